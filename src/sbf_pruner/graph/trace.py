"""A model and example inputs in; the operators that ran, and what each belongs to, out.

One forward pass of a *copy* of the model is recorded below autograd, where every layer, functional call
and tensor method has become one of a few hundred ATen operators.  The copy lives on the meta device, so
nothing is computed and no weights are copied; a model that needs real numbers to choose its way is run on
a real copy instead.  Weights are recognised by the parameter object itself, not by guessing from names.
In-place operators are recorded as if they returned a new value.  The user's model is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..attached import without_attached
from ..errors import TraceError
from ..inputs import call, map_tensors, meta_copy, real_copy
from ..layers import Remap, Zeros
from .records import REMAP, STALE, ZEROS, Call, Op, Trace, Value
from .shapes import quick_result
from .where import explain, where


def record(model: nn.Module, example_inputs: Any) -> Trace:
    """Run the model once, in evaluation mode and on a copy, and write down its operators.

    Where a module leaves out some of its children then (auxiliary heads), that module alone runs in training
    mode, if it does the same and more.

    >>> [op.name for op in record(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), torch.rand(1, 3, 8, 8)).ops]
    ['aten.convolution', 'aten.relu']
    """
    found = record_in(model, example_inputs, ())
    holders = _left_out(model, found)
    if holders:
        try:
            again = record_in(model, example_inputs, holders)
        except TraceError:
            return found
        if set(found.states) < set(again.states) and _continues(again.ops, found.ops):
            return again
    return found


def _left_out(model: nn.Module, found: Trace) -> tuple[str, ...]:
    """The modules that ran while children of theirs with parameters did not."""
    holders: dict[str, None] = {}
    for name, _ in model.named_parameters():
        path = name.rpartition(".")[0]
        if name not in found.states and path not in found.calls:
            while path and path not in found.calls:
                path = path.rpartition(".")[0]
            holders[path] = None
    return tuple(holders)


def _continues(longer: list[Op], shorter: list[Op]) -> bool:
    """Is one recording the other with operators added?"""
    rest = iter(longer)
    return all(any((op.name, op.where) == (other.name, other.where) for other in rest) for op in shorter)


def record_in(model: nn.Module, example_inputs: Any, training: tuple[str, ...]) -> Trace:
    """`record` with the given modules in training mode, and all others in evaluation mode."""
    try:
        inputs = map_tensors(example_inputs, lambda t: t.to("meta"))
        return _record_copy(model, meta_copy(model), inputs, True, training)
    except Exception:
        # Not every model can run without numbers (control flow on values, constants made on the CPU); if it
        # cannot run with them either, that second failure is the one worth showing.
        pass
    try:
        inputs = map_tensors(example_inputs, Tensor.clone)
        found = _record_copy(model, real_copy(model), inputs, False, training)
        if found.literals:
            _check_literals(model, example_inputs, found)
        return found
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(explain(error)) from error


def ops_again(model: nn.Module, example_inputs: Any, earlier: Trace) -> list[Op]:
    """The operators of a model that runs as in an earlier recording; if it fails, those until then.

    With numbers or without, as then: the operators have other names on a GPU than on no device.
    """
    on_meta = earlier.on_meta
    inputs = map_tensors(example_inputs, lambda t: t.to("meta") if on_meta else t.clone())
    twin = meta_copy(model) if on_meta else real_copy(model)
    try:
        return _record_copy(model, twin, inputs, on_meta, earlier.training).ops
    except Exception as error:
        found: list[Op] = getattr(error, "recorded_ops", [])
        return found


def _check_literals(model: nn.Module, example_inputs: Any, found: Trace) -> None:
    """Are the tensors that the forward made of numbers the same for other inputs?"""
    noise = map_tensors(example_inputs, lambda t: t + torch.rand_like(t) if t.is_floating_point() else t.clone())
    again = _record_copy(model, real_copy(model), noise, False, found.training)
    for (line, one), (_, other) in zip(found.literals, again.literals, strict=False):
        if not torch.equal(one, other):
            raise TraceError(_not_from_torch(line))


def _not_from_torch(line: str) -> str:
    return (
        f"at {line} a tensor arrives that torch did not compute from the inputs (NumPy, or a list made from "
        "values?), so what it depends on cannot be followed; keep that step in torch"
    )


def _record_copy(model: nn.Module, twin: nn.Module, inputs: Any, on_meta: bool, training: tuple[str, ...]) -> Trace:
    without_attached(twin).eval()
    for path in training:
        twin.get_submodule(path).training = True
    recorder = _Recorder(model, twin, inputs, trusts_constants=on_meta)
    try:
        with torch.no_grad(), recorder.watching(twin), recorder:
            result = call(twin, inputs)
    except Exception as error:
        error.recorded_ops = recorder.ops  # type: ignore[attr-defined]
        raise
    outputs = [recorder.value(t) for t in pytree.tree_leaves(_as_tree(result)) if isinstance(t, Tensor)]
    if not outputs:
        raise TraceError("the model returns no tensor; return a tensor, or a tuple or dict of them")
    for position, op in enumerate(recorder.ops):
        op.position = position
    calls, states, literals = recorder.calls, recorder.states, recorder.literals
    return Trace(recorder.ops, recorder.input_values, outputs, calls, states, literals, training, on_meta)


def _as_tree(result: Any) -> Any:
    # Hugging Face's and torchvision's output classes are dict- or tuple-like, but unknown to pytree.
    if isinstance(result, dict):
        return {k: _as_tree(v) for k, v in result.items()}
    if isinstance(result, (list, tuple)):
        return [_as_tree(v) for v in result]
    if hasattr(result, "__dataclass_fields__"):
        return {k: _as_tree(getattr(result, k)) for k in result.__dataclass_fields__}
    return result


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module, twin: nn.Module, inputs: Any, trusts_constants: bool) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.calls: dict[str, list[Call]] = {}
        self.states: dict[str, Value] = {}
        self.literals: list[tuple[str, Tensor]] = []
        self._stack: list[Call] = []
        self._trusts_constants = trusts_constants
        self._alive: list[Tensor] = []  # holds every tensor seen, so that an id is never used twice
        self._value: dict[int, Value] = {}
        self._writes: dict[int, int] = {}  # storage -> how often it was written in place
        self._seen: dict[int, int] = {}  # id(tensor) -> the count above when its value was noted
        self._writer: dict[int, Value] = {}  # storage -> the value written last
        real = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
            trained = isinstance(tensor, nn.Parameter)
            self._note(tensor, Value(tuple(tensor.shape), "state", name, real[name].detach(), trained))
        for module in twin.modules():
            for held in vars(module).values():
                if isinstance(held, Tensor) and id(held) not in self._value:
                    self._note(held, Value(tuple(held.shape), "constant"))
        self.input_values = []
        for tensor in pytree.tree_leaves(inputs):
            if isinstance(tensor, Tensor):
                self.input_values.append(self._note(tensor, Value(tuple(tensor.shape), "input")))

    # -- module calls ------------------------------------------------------------------------------

    def watching(self, twin: nn.Module) -> _Hooks:
        """A context in which the module calls of the copy are noted."""
        hooks = _Hooks()
        for path, module in twin.named_modules():
            hooks.add(module.register_forward_pre_hook(self._enter(path), with_kwargs=True))
            hooks.add(module.register_forward_hook(self._leave))
        return hooks

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            inputs = tuple(self.value(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
            parent = self._stack[-1] if self._stack else None
            self._stack.append(Call(path, inputs, len(self.ops), parent))

        return enter

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        done = self._stack.pop()
        tensors = [t for t in pytree.tree_leaves(_as_tree(result)) if isinstance(t, Tensor)]
        done.outputs = tuple(self.value(t) for t in tensors)
        done.last = len(self.ops)
        self.calls.setdefault(done.module, []).append(done)
        if isinstance(module, (Remap, Zeros)):
            # Our own modules of an earlier pruning are one operator each: what they mean, not how they do it.
            name = REMAP if isinstance(module, Remap) else ZEROS
            where = self.ops[done.first].where if done.last > done.first else ""
            if done.outputs == done.inputs:
                fresh = self._note(tensors[0], Value(done.outputs[0].shape, "result"))
                done.outputs = (fresh,)
            self.ops[done.first :] = [Op(name, (done.inputs[0],), {}, done.inputs, done.outputs, done, where)]
            done.last = done.first + 1

    # -- operators -----------------------------------------------------------------------------------

    def value(self, tensor: Tensor) -> Value:
        """What is known of a tensor now; an alias of memory written since is no longer what it was."""
        known = self._value.get(id(tensor))
        if known is None:
            if not self._trusts_constants:
                raise TraceError(_not_from_torch(where()))
            return self._note(tensor, Value(tuple(tensor.shape), "constant"))
        storage = _storage(tensor)
        if self._seen[id(tensor)] != self._writes.get(storage, 0):
            inputs = (known, self._writer[storage])
            fresh = Value(known.shape, "result", made_of=_roots(inputs))
            self.ops.append(Op(STALE, inputs, {}, inputs, (fresh,), self._here(), where()))
            return self._note(tensor, fresh)
        return known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func._overloadpacket)
        if name in _FRESH and not any(isinstance(a, Tensor) for a in pytree.tree_leaves((args, kwargs))):
            result = func(*args, **kwargs)
            self._outputs(func, name, args, kwargs, (), result)
            return result
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        if name in _LIFTED:
            for tensor in tensors:
                if id(tensor) not in self._value:  # torch.tensor(...) written in the forward
                    numbers = None if tensor.is_meta else tensor.clone()
                    self._note(tensor, Value(tuple(tensor.shape), "constant", data=numbers))
                    if numbers is not None and not self._trusts_constants:
                        self.literals.append((where(), numbers))
        inputs = tuple(self.value(t) for t in tensors)
        noted_args, noted_kwargs = pytree.tree_map_only(Tensor, self.value, (args, kwargs))
        result = quick_result(name, args, kwargs) if self._trusts_constants else None
        if result is None:
            result = func(*args, **kwargs)
        self._outputs(func, name, noted_args, noted_kwargs, inputs, result, _written(func, args, kwargs))
        return result

    def _outputs(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        inputs: tuple[Value, ...],
        result: Any,
        written: Sequence[Tensor] = (),
    ) -> None:
        roots = _roots(inputs)
        for tensor in written:
            storage = _storage(tensor)
            self._writes[storage] = self._writes.get(storage, 0) + 1
            self._writer[storage] = self._note(tensor, Value(tuple(tensor.shape), "result", made_of=roots))
        outputs: list[Value | None] = []
        touched = {id(t) for t in written}
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if not isinstance(tensor, Tensor):
                outputs.append(None)
            elif id(tensor) in touched:
                outputs.append(self._value[id(tensor)])
            else:
                outputs.append(self._note(tensor, Value(tuple(tensor.shape), "result", made_of=roots)))
        if written and not any(outputs):
            outputs = [self._value[id(t)] for t in written]
        op = Op(name, args, kwargs, inputs, tuple(outputs), self._here(), where(), func, bool(written))
        self.ops.append(op)
        for value in inputs:
            if value.kind == "state":
                self.states[value.name] = value
        if name == "aten.t" and outputs[0] is not None:
            outputs[0].transpose_of = inputs[0]

    def _note(self, tensor: Tensor, value: Value) -> Value:
        if id(tensor) not in self._value:
            self._alive.append(tensor)
        self._value[id(tensor)] = value
        self._seen[id(tensor)] = self._writes.get(_storage(tensor), 0)
        return value

    def _here(self) -> Call | None:
        return self._stack[-1] if self._stack else None


class _Hooks:
    def __init__(self) -> None:
        self._handles: list[Any] = []

    def add(self, handle: Any) -> None:
        self._handles.append(handle)

    def __enter__(self) -> _Hooks:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


# Operators that make a tensor from nothing but sizes and numbers, and those that take over a literal.
_FRESH = {
    f"aten.{name}"
    for name in (
        *("zeros", "ones", "full", "empty", "arange", "linspace", "rand", "randn"),
        *("eye", "scalar_tensor", "empty_strided"),
    )
}
_LIFTED = {"aten.lift_fresh", "aten.lift_fresh_copy", "aten._to_copy", "aten.detach", "aten.alias"}


def _roots(inputs: Sequence[Value]) -> tuple[Value, ...] | None:
    """What a result of the given values is made of."""
    found: dict[Value, None] = {}
    for value in inputs:
        roots = value.roots
        if roots is None:
            return None
        found |= dict.fromkeys(roots)
    return tuple(found)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    if not func._schema.is_mutable:
        return []
    found: list[Tensor] = []
    for i, spec in enumerate(func._schema.arguments):
        if spec.alias_info is not None and spec.alias_info.is_write:
            held = kwargs.get(spec.name) if spec.name in kwargs else (args[i] if i < len(args) else None)
            found += [t for t in pytree.tree_leaves(held) if isinstance(t, Tensor)]
    return found

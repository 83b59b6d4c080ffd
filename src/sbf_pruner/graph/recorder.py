"""Record the operators of a forward pass and the module call that each belongs to.

Operators are recorded below autograd, where every layer, functional call and tensor method has become one of a few
hundred ATen operators. Weights are identified by the parameter object, not by name. In-place operators are recorded
as if they returned a new value; reading an alias of the written memory later is recorded as a `STALE` operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import TraceError
from ..modules import Remap, Zeros
from ..utils.user_code import holds_the_model, nested, not_from_torch, user_location
from .operators.layers import BATCH_NORMS
from .records import INSTANCE_NORM, REMAP, STALE, ZEROS, Call, Literals, Op, Value


class Memory:
    """Map from each tensor of one forward pass to its current `Value`.

    Tensors may share memory: an in-place write to one makes the values recorded for the others stale.
    """

    def __init__(self) -> None:
        # Tensor id -> the tensor (referenced, so that its id is not reused), its value, its storage when recorded.
        self._noted: dict[int, tuple[Tensor, Value, int]] = {}
        self._writer: dict[int, Value] = {}  # storage -> value of the last in-place write
        self._seen: dict[int, Value | None] = {}  # tensor id -> `_writer` of its storage when recorded

    def get(self, tensor: Tensor) -> Value | None:
        """Return the value recorded last, even if stale; None if there is none or `.data` was assigned since."""
        _, value, storage = self._noted.get(id(tensor), (None, None, 0))
        return value if storage == _storage(tensor) else None

    def same_place(self, tensor: Tensor) -> Tensor | None:
        """Return a recorded tensor with the same memory, such as `x` for `x.as_subclass(torch.Tensor)`, or None."""
        place, here = _place(tensor), _storage(tensor)
        noted = [other for other, _, storage in self._noted.values() if storage == here]
        return next((other for other in noted if _place(other) == place), None)

    def note(self, tensor: Tensor, value: Value) -> Value:
        """Set and return the current value of a tensor."""
        storage = _storage(tensor)
        self._noted[id(tensor)] = tensor, value, storage
        self._seen[id(tensor)] = self._writer.get(storage)
        return value

    def write(self, tensor: Tensor, value: Value) -> None:
        """Set the value of a tensor written in place; the values of tensors that share its memory become stale."""
        self._writer[_storage(tensor)] = value
        self.note(tensor, value)

    def written_since(self, tensor: Tensor) -> Value | None:
        """Return the last value written in place to the tensor's storage since its own was recorded, or None."""
        writer = self._writer.get(_storage(tensor))
        return None if writer is self._seen[id(tensor)] else writer


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _aten(names: str) -> set[str]:
    return {f"aten.{name}" for name in names.split()}


_LIKE_THE_OPERAND = _aten(
    "relu hardswish hardsigmoid hardtanh silu gelu sigmoid tanh elu leaky_relu neg abs exp sqrt mish clamp "
    "clamp_min"
)
_PAIRS = _aten("add mul sub")


def meta_result(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a common operator on meta tensors, or None if the operator itself has to run.

    Torch infers shapes on the meta device in slow Python; avoiding this more than halves the time of a trace.
    """
    x = args[0] if args else None
    if not isinstance(x, Tensor) or not x.is_meta or not x.is_floating_point() or kwargs:
        return None
    plain = name.removesuffix("_")
    if plain in _LIKE_THE_OPERAND:
        if any(isinstance(a, Tensor) for a in args[1:]):
            return None
    elif plain in _PAIRS:
        other = args[1] if len(args) == 2 else None
        if not isinstance(other, Tensor) or _like(other) != _like(x):
            return None
    elif name == "aten.native_batch_norm" and x.is_contiguous():
        saved = x.shape[1] if args[5] else 0
        return torch.empty_like(x), x.new_empty(saved), x.new_empty(saved)
    else:
        return None
    return x if name.endswith("_") else torch.empty_like(x)


def _like(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


_AROUND = _aten("view repeat clone empty")


def merge_instance_norm(call: Call, ops: Sequence[Op]) -> Sequence[Op]:
    """Merge the operators of an instance norm's call into one operator with the arguments of a batch norm.

    Torch runs a batch norm over a view of shape `(1, N * C, H, W)`. If other operators ran, change nothing.
    """
    norms = [op for op in ops if op.name in BATCH_NORMS]
    if len(norms) != 1 or any(op.name not in BATCH_NORMS | _AROUND for op in ops):
        return ops
    norm = norms[0]
    made_from = {op.results[0]: op.inputs[0] for op in ops if op.name in _AROUND and op.inputs}

    def origin(value: Value) -> Value:
        while value in made_from:
            value = made_from[value]
        return value

    x, *states = (origin(held) if isinstance(held, Value) else held for held in norm.args[:5])
    ends = x in call.inputs and len(call.outputs) == 1 and origin(call.outputs[0]) is norm.outputs[0]
    if not ends or call.outputs[0].shape != x.shape or norm.args[0].shape[2:] != x.shape[2:]:
        return ops
    inputs = tuple(held for held in (x, *states) if held is not None)
    return [Op(INSTANCE_NORM, (x, *states, *norm.args[5:]), {}, inputs, call.outputs, call, norm.where)]


class Recorder(TorchDispatchMode):
    """Dispatch mode that records every operator of a model's copy and the module call it belongs to.

    `trusts_constants` is true on the meta device. If it is false, the caller has to check two lists of constants:
    `literals` (tensors that the forward makes from Python numbers) and `strangers` (tensors that no operator made).
    """

    def __init__(self, model: nn.Module, twin: nn.Module, inputs: Any, trusts_constants: bool) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.calls: dict[str, list[Call]] = {}
        self.states: dict[str, Value] = {}
        self.literals: list[tuple[str, Tensor]] = []
        self.strangers: list[tuple[str, Tensor]] = []
        self._stack: list[Call] = []
        self._given: list[list[Tensor]] = []  # input tensors of each call on the stack
        self._kept: dict[int, Call] = {}  # id of the tensor a call returned -> the call; see `_leave`
        self._quiet = False
        self._trusts_constants = trusts_constants
        self._memory = Memory()
        real = dict(model.named_parameters()) | dict(model.named_buffers())
        self._original = {id(tensor): name for name, tensor in real.items()}
        for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
            trained = isinstance(tensor, nn.Parameter)
            self._memory.note(tensor, Value(tuple(tensor.shape), "state", name, real[name].detach(), trained))
        for module in twin.modules():
            own = {name: held for name, held in vars(module).items() if name not in _REGISTRIES}
            for held in pytree.tree_leaves(as_tree(own)):
                if isinstance(held, Tensor) and self._memory.get(held) is None:
                    self._memory.note(held, Value(tuple(held.shape), "constant"))
        self.input_values = []
        for tensor in pytree.tree_leaves(inputs):
            if isinstance(tensor, Tensor):
                self.input_values.append(self._memory.note(tensor, Value(tuple(tensor.shape), "input")))

    # -- module calls ------------------------------------------------------------------------------

    @contextmanager
    def watching(self, twin: nn.Module) -> Iterator[None]:
        """Record the module calls of the copy and, on the meta device, the values of literals, while active."""
        handles: list[Any] = []
        for path, module in twin.named_modules():
            # These run outside the user's own hooks, so that operators of those hooks belong to the call: surgery
            # treats them as part of the module.
            handles.append(module.register_forward_pre_hook(self._enter(path), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            with Literals() if self._trusts_constants else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            inputs = tuple(self.value(t) for t in tensors)
            self._stack.append(Call(path, inputs, len(self.ops), self._call))
            self._given.append(tensors)

        return enter

    def _leave(self, module: nn.Module, args: Any, result: Any) -> Tensor | None:
        done = self._stack.pop()
        now = [(self._memory.get(t), self._memory.written_since(t)) for t in self._given.pop()]
        done.overwritten = tuple(v for pair in now for v in pair if v is not None and v not in done.inputs)
        tensors = [t for t in pytree.tree_leaves(as_tree(result)) if isinstance(t, Tensor)]
        done.outputs = tuple(self.value(t) for t in tensors)
        self.calls.setdefault(done.module, []).append(done)
        if isinstance(module, (Remap, Zeros)):
            # A module that an earlier extraction inserted is recorded as one operator, in place of those it ran.
            name = REMAP if isinstance(module, Remap) else ZEROS
            where = self.ops[done.first].where if len(self.ops) > done.first else ""
            if done.outputs == done.inputs:
                fresh = self._memory.note(tensors[0], Value(done.outputs[0].shape, "result"))
                done.outputs = (fresh,)
            self.ops[done.first :] = [Op(name, (done.inputs[0],), {}, done.inputs, done.outputs, done, where)]
            for table in [held for held in self.states if held.rpartition(".")[0] == done.module]:
                del self.states[table]  # no remaining operator reads it
        elif isinstance(module, _InstanceNorm):
            self.ops[done.first :] = merge_instance_norm(done, self.ops[done.first :])
        done.last = len(self.ops)
        holds = next(chain(module.parameters(), module.buffers()), None) is not None
        if type(result) is not Tensor or done.outputs[0] in done.inputs or isinstance(module, Remap) or not holds:
            return None
        # Return an alias to the caller: if the original is read later, a hook or the module has stored the result.
        self._kept[id(result)] = done
        self._quiet = True
        handed_on = result.detach()
        self._quiet = False
        self._memory.note(handed_on, done.outputs[0])
        return handed_on

    # -- operators -----------------------------------------------------------------------------------

    def value(self, tensor: Tensor) -> Value:
        """Return the current value of a tensor.

        If it is stale, record a `STALE` operator and return its result. Raise a TraceError if the copy of the model
        reads a tensor of the original model.
        """
        known = self._memory.get(tensor)
        if id(tensor) in self._kept:
            self._kept[id(tensor)].kept = True
        if known is None:
            if id(tensor) in self._original:
                raise TraceError(holds_the_model(user_location(), self._original[id(tensor)]))
            other = self._memory.same_place(tensor)
            if other is not None:
                return self._memory.note(tensor, self.value(other))
            return self._memory.note(tensor, self._stranger(tensor))
        written = self._memory.written_since(tensor)
        if written is not None:
            inputs = (known, written)
            fresh = Value(known.shape, "result", made_of=_roots(inputs))
            self.ops.append(Op(STALE, inputs, {}, inputs, (fresh,), self._call, user_location()))
            return self._memory.note(tensor, fresh)
        return known

    def _stranger(self, tensor: Tensor) -> Value:
        """Return a constant for a tensor that no operator returned; raise a TraceError if it has no values."""
        if not self._trusts_constants:
            self.strangers.append((user_location(), tensor))
            return Value(tuple(tensor.shape), "constant")
        if tensor.is_meta:  # after this error the model is traced on real tensors
            raise TraceError(not_from_torch(user_location()))
        return Value(tuple(tensor.shape), "constant", data=tensor.clone())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        name = str(func._overloadpacket)
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        if name in _LIFTED:
            for tensor in tensors:
                if self._memory.get(tensor) is None and not tensor.is_meta:  # torch.tensor(...) in the forward
                    numbers = tensor.clone()
                    self._memory.note(tensor, Value(tuple(tensor.shape), "constant", data=numbers))
                    if not self._trusts_constants:
                        self.literals.append((user_location(), numbers))
        inputs = tuple(self.value(t) for t in tensors)
        noted_args, noted_kwargs = pytree.tree_map_only(Tensor, self.value, (args, kwargs))
        result = meta_result(name, args, kwargs) if self._trusts_constants else None
        if result is None:
            result = func(*args, **kwargs)
        written = _written(func, args, kwargs)
        outputs = self._outputs(_roots(inputs), result, written)
        op = Op(name, noted_args, noted_kwargs, inputs, outputs, self._call, user_location(), func, bool(written))
        if isinstance(result, (int, float)) and not isinstance(result, bool):
            op.returned = result
        self.ops.append(op)
        self.states |= {value.name: value for value in inputs if value.kind == "state"}
        if name == "aten.t":
            op.results[0].transpose_of = inputs[0]
        if name in _LIFTED and inputs[0].kind != "state" and inputs[0].is_table:
            # Keep the numbers of an index table when it is copied or moved to another device.
            data = inputs[0].data
            if data is not None and data.dtype == result.dtype:
                op.results[0].data = data
        return result

    def _outputs(
        self, roots: tuple[Value, ...] | None, result: Any, written: Sequence[Tensor]
    ) -> tuple[Value | None, ...]:
        """Record and return a value for each tensor that an operator returned, or wrote in place."""
        for tensor in written:
            self._memory.write(tensor, Value(tuple(tensor.shape), "result", made_of=roots))
        outputs: list[Value | None] = []
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if not isinstance(tensor, Tensor):
                outputs.append(None)
            elif tensor.is_nested:
                raise TraceError(nested(user_location()))
            elif any(tensor is other for other in written):
                outputs.append(self._memory.get(tensor))
            else:
                outputs.append(self._memory.note(tensor, Value(tuple(tensor.shape), "result", made_of=roots)))
        if written and not any(outputs):
            outputs = [self._memory.get(t) for t in written]
        return tuple(outputs)

    @property
    def _call(self) -> Call | None:
        return self._stack[-1] if self._stack else None


_REGISTRIES = ("_parameters", "_buffers", "_modules")
_LIFTED = _aten("lift_fresh lift_fresh_copy _to_copy detach alias")  # literals are first read by these


def _roots(inputs: Sequence[Value]) -> tuple[Value, ...] | None:
    """Return the parameters and buffers that values are computed from; None if any depends on network inputs."""
    roots = [value.roots for value in inputs]
    return None if None in roots else tuple(dict.fromkeys(root for held in roots for root in held or ()))


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    if not func._schema.is_mutable:
        return []
    given = {spec.name: held for spec, held in zip(func._schema.arguments, args, strict=False)} | kwargs
    writes = [s.name for s in func._schema.arguments if s.alias_info is not None and s.alias_info.is_write]
    return [t for name in writes for t in pytree.tree_leaves(given.get(name)) if isinstance(t, Tensor)]


def as_tree(result: Any, seen: set[int] | None = None) -> Any:
    """Convert a model's result to nested plain dicts and lists that pytree can flatten.

    Pytree does not flatten the dict and tuple subclasses that Hugging Face and torchvision return. An object of any
    other class becomes a dict of its attributes.
    """
    seen = set() if seen is None else seen
    if isinstance(result, dict):
        return {k: as_tree(v, seen) for k, v in result.items()}
    if isinstance(result, (list, tuple, set, frozenset)):
        return [as_tree(v, seen) for v in result]
    if result is None or isinstance(result, (Tensor, nn.Module, type, ModuleType, str, int, float)):
        return result
    slots = [name for kind in type(result).__mro__ for name in getattr(kind, "__slots__", ())]
    names = (*getattr(result, "__dict__", ()), *slots)
    if not names or id(result) in seen:  # stop at circular references
        return None
    seen.add(id(result))
    return {name: as_tree(getattr(result, name, None), seen) for name in names}

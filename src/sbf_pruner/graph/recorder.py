"""What a copy of a model does while it runs: its operators, and what each belongs to.

Operators are seen below autograd, where every layer, functional call and tensor method has become one of a few
hundred ATen operators.  Weights are recognised by the parameter object itself, not by guessing from names.
In-place operators are recorded as if they returned a new value; an alias of memory that was written since is an
operator of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import TraceError
from ..layers import Remap, Zeros
from .instances import put_together
from .literals import Literals
from .memory import Memory
from .records import REMAP, STALE, ZEROS, Call, Op, Value
from .shapes import quick_result
from .where import holds_the_model, nested, not_from_torch, where


class Recorder(TorchDispatchMode):
    """While entered, every operator of the copy is written down, with the module call it belongs to."""

    def __init__(self, model: nn.Module, twin: nn.Module, inputs: Any, trusts_constants: bool) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.calls: dict[str, list[Call]] = {}
        self.states: dict[str, Value] = {}
        self.literals: list[tuple[str, Tensor]] = []
        self.strangers: list[tuple[str, Tensor]] = []
        self._stack: list[Call] = []
        self._given: list[list[Tensor]] = []  # what went into each call on the stack
        self._kept: dict[int, Call] = {}  # what a call gave, by identity, before it was handed on
        self._quiet = False
        self._trusts_constants = trusts_constants
        self._memory = Memory()
        real = dict(model.named_parameters()) | dict(model.named_buffers())
        self._original = {id(tensor): name for name, tensor in real.items()}
        for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
            trained = isinstance(tensor, nn.Parameter)
            self._memory.note(tensor, Value(tuple(tensor.shape), "state", name, real[name].detach(), trained))
        for module in twin.modules():
            for held in pytree.tree_leaves(as_tree(vars(module))):
                if isinstance(held, Tensor) and self._memory.get(held) is None:
                    self._memory.note(held, Value(tuple(held.shape), "constant"))
        self.input_values = []
        for tensor in pytree.tree_leaves(inputs):
            if isinstance(tensor, Tensor):
                self.input_values.append(self._memory.note(tensor, Value(tuple(tensor.shape), "input")))

    # -- module calls ------------------------------------------------------------------------------

    @contextmanager
    def watching(self, twin: nn.Module) -> Iterator[None]:
        """While entered, the module calls of the copy are noted, and the numbers it writes into tensors."""
        handles: list[Any] = []
        for path, module in twin.named_modules():
            # Before hooks of the user's: what they compute belongs to the call, and goes or stays with the module.
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
            parent = self._stack[-1] if self._stack else None
            self._stack.append(Call(path, inputs, len(self.ops), parent))
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
            # Our own modules of an earlier pruning are one operator each: what they mean, not how they do it.
            name = REMAP if isinstance(module, Remap) else ZEROS
            where = self.ops[done.first].where if len(self.ops) > done.first else ""
            if done.outputs == done.inputs:
                fresh = self._memory.note(tensors[0], Value(done.outputs[0].shape, "result"))
                done.outputs = (fresh,)
            self.ops[done.first :] = [Op(name, (done.inputs[0],), {}, done.inputs, done.outputs, done, where)]
            for table in [held for held in self.states if held.rpartition(".")[0] == done.module]:
                del self.states[table]  # nothing that is left reads it
        elif isinstance(module, _InstanceNorm):
            self.ops[done.first :] = put_together(done, self.ops[done.first :])
        done.last = len(self.ops)
        holds = any(True for _ in chain(module.parameters(), module.buffers()))
        if type(result) is not Tensor or done.outputs[0] in done.inputs or isinstance(module, Remap) or not holds:
            return None
        # Who called the module gets another tensor than who kept the result, so that they can be told apart.
        self._kept[id(result)] = done
        self._quiet = True
        handed_on = result.detach()
        self._quiet = False
        self._memory.note(handed_on, done.outputs[0])
        return handed_on

    # -- operators -----------------------------------------------------------------------------------

    def value(self, tensor: Tensor) -> Value:
        """What is known of a tensor now; an alias of memory written since is no longer what it was."""
        known = self._memory.get(tensor)
        if id(tensor) in self._kept:
            self._kept[id(tensor)].kept = True
        if known is None:
            if id(tensor) in self._original:
                raise TraceError(holds_the_model(where(), self._original[id(tensor)]))
            other = self._memory.same_place(tensor)
            if other is not None:
                return self._memory.note(tensor, self.value(other))
            return self._memory.note(tensor, self._stranger(tensor))
        written = self._memory.written_since(tensor)
        if written is not None:
            inputs = (known, written)
            fresh = Value(known.shape, "result", made_of=_roots(inputs))
            self.ops.append(Op(STALE, inputs, {}, inputs, (fresh,), self._here(), where()))
            return self._memory.note(tensor, fresh)
        return known

    def _stranger(self, tensor: Tensor) -> Value:
        """A tensor that no operator gave."""
        if not self._trusts_constants:
            self.strangers.append((where(), tensor))
            return Value(tuple(tensor.shape), "constant")
        if tensor.is_meta:  # made of numbers in a way that is not seen: a recording with numbers will tell
            raise TraceError(not_from_torch(where()))
        return Value(tuple(tensor.shape), "constant", data=tensor.clone())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        name = str(func._overloadpacket)
        if name in _FRESH and not any(isinstance(a, Tensor) for a in pytree.tree_leaves((args, kwargs))):
            result = func(*args, **kwargs)
            self._outputs(func, name, args, kwargs, (), result)
            return result
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        if name in _LIFTED:
            for tensor in tensors:
                if self._memory.get(tensor) is None and not tensor.is_meta:  # torch.tensor(...) in the forward
                    numbers = tensor.clone()
                    self._memory.note(tensor, Value(tuple(tensor.shape), "constant", data=numbers))
                    if not self._trusts_constants:
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
            self._memory.write(tensor, Value(tuple(tensor.shape), "result", made_of=roots))
        outputs: list[Value | None] = []
        touched = {id(t) for t in written}
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if not isinstance(tensor, Tensor):
                outputs.append(None)
            elif tensor.is_nested:
                raise TraceError(nested(where()))
            elif id(tensor) in touched:
                outputs.append(self._memory.get(tensor))
            else:
                outputs.append(self._memory.note(tensor, Value(tuple(tensor.shape), "result", made_of=roots)))
        if written and not any(outputs):
            outputs = [self._memory.get(t) for t in written]
        op = Op(name, args, kwargs, inputs, tuple(outputs), self._here(), where(), func, bool(written))
        if isinstance(result, (int, float)) and not isinstance(result, bool):
            op.told = result
        self.ops.append(op)
        for value in inputs:
            if value.kind == "state":
                self.states[value.name] = value
        if name == "aten.t" and outputs[0] is not None:
            outputs[0].transpose_of = inputs[0]
        if name in _LIFTED and outputs[0] is not None:
            numbers = inputs[0].data if inputs[0].kind != "state" else None
            # A table of indices, say, which may have been made elsewhere and moved.
            if numbers is not None and numbers.dtype == result.dtype and not numbers.is_floating_point():
                outputs[0].data = numbers

    def _here(self) -> Call | None:
        return self._stack[-1] if self._stack else None


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


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    if not func._schema.is_mutable:
        return []
    found: list[Tensor] = []
    for i, spec in enumerate(func._schema.arguments):
        if spec.alias_info is not None and spec.alias_info.is_write:
            held = kwargs.get(spec.name) if spec.name in kwargs else (args[i] if i < len(args) else None)
            found += [t for t in pytree.tree_leaves(held) if isinstance(t, Tensor)]
    return found


def as_tree(result: Any, seen: set[int] | None = None) -> Any:
    """A model's result as plain dicts and lists.

    Hugging Face's and torchvision's output classes are dict- or tuple-like, but unknown to pytree; an object of
    any other class is what it holds.
    """
    seen = set() if seen is None else seen
    if isinstance(result, dict):
        return {k: as_tree(v, seen) for k, v in result.items()}
    if isinstance(result, (list, tuple, set, frozenset)):
        return [as_tree(v, seen) for v in result]
    if isinstance(result, (Tensor, nn.Module, type, ModuleType)):
        return result
    slots = [name for kind in type(result).__mro__ for name in getattr(kind, "__slots__", ())]
    names = (*getattr(result, "__dict__", ()), *slots)
    if not names or id(result) in seen:  # objects may refer to each other
        return None
    seen.add(id(result))
    return {name: as_tree(getattr(result, name, None), seen) for name in names}

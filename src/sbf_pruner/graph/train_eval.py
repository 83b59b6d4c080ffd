"""Find operators with an effect on channels that a network runs in training mode and not in evaluation mode.

Two traces are compared by giving every tensor a number: two tensors have the same number only if they have the same
channels, and each channel is zero in both or in neither. The result of an activation or a dropout has the number of
its operand; the number of a layer's result depends on the layer's weight only, not on its input.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .nodes import Alive, Elementwise
from .operators import POINTWISE, build_node, rule_of
from .operators.layers import BATCH_NORMS, LAYERS, layer_weight, weight_owner
from .records import Op, Trace, Value

# `_DRAW`: operators that draw random numbers. `_NEW`: prefixes of operators that read no values of a tensor.
_RANDOM = (
    "rand randn randint rand_like randn_like randint_like randperm bernoulli uniform normal exponential geometric"
)
_DRAW = {f"aten.{name}" for name in (*_RANDOM.split(), "log_normal", "random")}
_NEW = ("aten.new_", "aten.empty", "aten.zeros", "aten.ones", "aten.full", "aten.rand")


@dataclass
class Difference:
    """Differences of a trace, `again`, from another trace, `found`."""

    ops: list[Op]  # operators that use channels in another way than `found`, or another parameter or buffer
    outputs: list[Value]  # outputs whose channels differ from those of all outputs of `found`
    extends: bool  # `again` also has all operators and outputs of `found`
    more: frozenset[int]  # positions of operators that run more often in `again`
    drawn: frozenset[int]  # positions of operators that read random numbers only
    by_chance: bool  # random numbers decide what runs, so the next call may differ


def difference(again: Trace, found: Trace) -> Difference:
    """Return the operators and outputs of `again` that `found` does not have."""
    numbers: dict[Hashable, int] = {}
    before, now = _Reading(found, numbers), _Reading(again, numbers)
    by_chance = again.random_calls or any(
        op.position in now.drawn and op.name == "aten._local_scalar_dense" for op in again.ops
    )
    # If an operator is skipped at random, later operators read another tensor. They are not new if the same line
    # also runs in `found`.
    lines = {(op.name, op.where) for op in found.ops} if by_chance else set()
    known, given, left = {None, *before.ops}, set(before.outputs), Counter(before.ops)
    ops, more = [], set()
    for op, number in zip(again.ops, now.ops, strict=True):
        # A scalar, such as a count of batches, has no channels.
        reads_more = any(v.kind == "state" and v.shape and v.name not in found.states for v in op.inputs)
        if reads_more or (number not in known and (op.name, op.where) not in lines):
            ops.append(op)
        left[number] -= 1
        if left[number] < 0:
            more.add(op.position)
    outputs = [value for value, number in zip(again.outputs, now.outputs, strict=True) if number not in given]
    extends = known <= {None, *now.ops} and given <= set(now.outputs)
    return Difference(ops, outputs, extends, frozenset(more), frozenset(now.drawn), by_chance)


def feeding(again: Trace, found: Trace, new: Difference) -> dict[str, str]:
    """Map each layer that feeds an operator or output that only `again` has to the line of that operator.

    A layer that feeds an operator that only `found` has is included if both operators share a parameter or buffer.
    """
    ends = [(op.inputs, op.where) for op in new.ops]
    fed = _feeding(again, ends + [((value,), "the network's outputs") for value in new.outputs])
    lines = {value.name: op.where for op in new.ops for value in op.inputs if value.kind == "state"}
    shared = [
        (op.inputs, lines[value.name])
        for op in difference(found, again).ops
        for value in op.inputs
        if value.kind == "state" and value.name in lines
    ]
    return _feeding(found, shared) | fed


def _feeding(trace: Trace, ends: Sequence[tuple[Sequence[Value], str]]) -> dict[str, str]:
    makers = {value: op for op in trace.ops for value in op.outputs}
    found: dict[str, str] = {}
    for values, line in ends:
        todo, seen = list(values), set[Value]()
        while todo:
            value = todo.pop()
            maker = makers.get(value)
            if maker is None or value in seen:
                continue
            seen.add(value)
            layer = weight_owner(maker) if maker.name in LAYERS else None
            if layer is not None:
                found.setdefault(layer, line)
            if layer is None or _is_grouped(maker):
                todo += maker.inputs
    return found


def _is_grouped(op: Op) -> bool:
    return op.name == "aten.convolution" and op.args[8] > 1


class _Reading:
    """Numbers of the operators and outputs of one trace; `numbers` is shared by the traces that are compared.

    `ops` has None for an operator that leaves channels unchanged, or that does not depend on the network's inputs.
    """

    def __init__(self, trace: Trace, numbers: dict[Hashable, int]) -> None:
        self._numbers = numbers
        self._of: dict[Value, int] = {v: self._number("input", place) for place, v in enumerate(trace.inputs)}
        self._fed: set[Value] = set(trace.inputs)  # values that depend on the inputs
        self._chance: set[Value] = set()  # values that depend on random numbers only
        self.drawn: set[int] = set()
        self.ops = [self._read(op) for op in trace.ops]
        self.outputs = [self._value(value) for value in trace.outputs]

    def _number(self, *key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _value(self, value: Value) -> int:
        if value not in self._of:
            key: Hashable = value.name
            if value.kind != "state":
                key = (value.shape, None if value.data is None else repr(value.data.tolist()))
            self._of[value] = self._number(value.kind, key)
        return self._of[value]

    def _read(self, op: Op) -> int | None:
        name, outputs = op.name.removesuffix("_"), op.results
        fed = any(value in self._fed for value in op.inputs)
        if name.startswith(_NEW) or (name in _DRAW and op.mutates):
            fed = False
        by_chance = not fed and (name in _DRAW or any(value in self._chance for value in op.inputs))
        handed_on = self._handed_on(op) if fed else None
        if handed_on is not None:
            self._of |= dict.fromkeys(outputs, self._value(handed_on))
            self._fed.update(outputs)
            return None
        number = self._of_op(op, name)
        self._of |= {value: self._number(number, index) for index, value in enumerate(outputs)}
        if fed:
            self._fed.update(outputs)
            if op.name in LAYERS and not _is_grouped(op) and layer_weight(op).roots:
                self._of[outputs[0]] = self._number("layer", self._value(layer_weight(op)))
        elif by_chance:
            self._chance.update(outputs)
            self.drawn.add(op.position)
        return number if fed else None

    def _of_op(self, op: Op, name: str) -> int:
        if op.name in BATCH_NORMS:
            # The operator's name and arguments depend on the mode, so they are not compared. With batch statistics
            # and no shift, zero stays zero.
            keeps_zero = bool(op.args[5]) and not isinstance(op.args[2], Value)
            held = [self._value(v) if isinstance(v, Value) else None for v in op.args[:3]]
            return self._number("norm", keeps_zero, *held)
        args = pytree.tree_map_only(Value, lambda v: f"#{self._value(v)}", (op.args, op.kwargs))
        return self._number(name, repr(args))

    def _handed_on(self, op: Op) -> Value | None:
        """Return the operand with the channels and zeros of the result (up to random factors), or None."""
        node = build_node(op, {}) if rule_of(op) in POINTWISE else None
        if not isinstance(node, Elementwise) or node.steep:
            return None
        if node.alive_if not in (Alive.ANY, Alive.ALL, Alive.QUOTIENT):
            return None
        scales = self._chance if node.alive_if is not Alive.ANY else set()
        operands = dict.fromkeys(value for value in op.inputs if value not in scales)
        if len(operands) != 1 or (node.alive_if is Alive.QUOTIENT and op.inputs[0] not in operands):
            return None
        (operand,) = operands
        return operand if all(v.shape == operand.shape for v in node.outputs) else None


_NOT_THE_USERS = {"torch", "numpy", __name__.partition(".")[0], *sys.stdlib_module_names}


def may_read_training(module: nn.Module, without: set[CodeType] | None = None) -> bool:
    """Return True if user code that the module can reach may read `training`.

    If none does, a trace in training mode would show nothing new. Code objects are inspected, not run: those of the
    module's classes, hooks and attributes, and of the functions they call by name. A false positive costs one extra
    trace. Code objects in `without` do not read `training`; if the result is False, those inspected are added.

    >>> may_read_training(nn.Dropout())  # which is torch's
    False
    """
    own = [kind for kind in type(module).__mro__ if _is_the_users(kind.__module__)]
    tables = [held for name, held in vars(module).items() if name.endswith("_hooks") and isinstance(held, dict)]
    hooks = [hook for table in tables for hook in table.values()]
    todo: list[object] = [*hooks, *own, *(vars(module).values() if own else ())]
    known = without if without is not None else set()
    codes: set[CodeType] = set()
    seen: set[int] = set()
    while todo:
        held = todo.pop()
        if isinstance(held, FunctionType):
            code = held.__code__
            if code in known or code in codes:
                continue
            codes.add(code)
            if any("training" in (*inner.co_names, *inner.co_consts) for inner in _nested(code)):
                return True
        elif id(held) in seen:
            continue
        seen.add(id(held))
        todo += _within(held, own)
    known |= codes
    return False


def never_reads_training(module: nn.Module) -> bool:
    """Return True if the class of a module is from torch and its own code never reads `self.training`.

    Whether the code of another module reads the flag of this module is not checked.

    >>> never_reads_training(nn.Conv2d(1, 1, 1)), never_reads_training(nn.BatchNorm2d(1))
    (True, False)
    """
    kinds = [kind for kind in type(module).__mro__ if kind not in (nn.Module, object)]
    functions = [held for kind in kinds for held in vars(kind).values() if isinstance(held, FunctionType)]
    from_torch = all(kind.__module__.partition(".")[0] == "torch" for kind in kinds)
    return from_torch and not any("training" in held.__code__.co_names for held in functions)


def _is_the_users(module: str | None) -> bool:
    return bool(module) and str(module).partition(".")[0] not in _NOT_THE_USERS


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for held in code.co_consts:
        if isinstance(held, CodeType):
            yield from _nested(held)


def _within(held: object, own: Collection[type]) -> list[object]:
    """Return the objects reachable from `held` that may be called: methods, globals, members of containers."""
    if isinstance(held, FunctionType):
        return _reached(held) if _is_the_users(held.__module__) else []
    if isinstance(held, property):
        return [held.fget]
    if isinstance(held, partial):
        return [held.func, *held.args, *held.keywords.values()]
    if isinstance(held, MethodType):
        return [held.__func__, held.__self__]
    if isinstance(held, (staticmethod, classmethod)):
        return [held.__func__]
    if isinstance(held, dict):
        return list(held.values())
    if isinstance(held, (list, tuple, set, frozenset)):
        return list(held)
    if isinstance(held, type):
        # Other module classes are skipped: their instances in the model are inspected separately.
        strange = issubclass(held, nn.Module) and held not in own
        return [] if strange or not _is_the_users(held.__module__) else list(vars(held).values())
    if isinstance(held, (nn.Module, Tensor, ModuleType)) or not _is_the_users(type(held).__module__):
        return []
    return [*type(held).__mro__, *getattr(held, "__dict__", {}).values()]


def _reached(function: FunctionType) -> list[object]:
    """Return the objects that a function can reach by name: closure cells, globals, names in user modules."""
    cells = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            cells.append(cell.cell_contents)
    names = {name for code in _nested(function.__code__) for name in code.co_names}
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    files = [held for held in known if isinstance(held, ModuleType) and _is_the_users(held.__name__)]
    through = [vars(file)[name] for file in files for name in names if name in vars(file)]
    return [*cells, *known, *through, *(function.__defaults__ or ()), vars(function).get("__wrapped__")]

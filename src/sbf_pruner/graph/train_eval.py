"""What a network does in one of its modes and not in the other, as far as its channels go.

Two recordings enter, of evaluation and of training mode; what the second has of its own leaves.  Every tensor gets
a number for its channels, and two tensors have the same only if their channels are the same and zero together: a
ReLU or a dropout hands them on, and a layer makes its own of whatever it reads.

Does code of the user's own ask a module for its mode?

A module enters; yes or no leaves.  The code is read, not run: that of the module's classes and hooks, of what it
holds, and of the functions that these call, as far as names lead to them.  A yes too many costs a recording.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .layer_nodes import BATCH_NORMS, LAYERS, owner
from .nodes import Elementwise
from .operators import POINTWISE, build_node, rule_of
from .records import Op, Trace, Value

# Operators that draw random numbers, and those that ask a tensor for its shape alone.
_DRAW = {
    f"aten.{name}"
    for name in (
        *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm"),
        *("bernoulli", "uniform", "normal", "exponential", "geometric", "log_normal", "random"),
    )
}
_NEW = ("aten.new_", "aten.empty", "aten.zeros", "aten.ones", "aten.full", "aten.rand")


@dataclass
class Difference:
    """What a recording has that the one before has not."""

    ops: list[Op]  # that read, or do to channels, what nothing did
    outputs: list[Value]  # with channels that were none's
    extends: bool  # and it does everything else as well
    more: frozenset[int]  # positions of the operators that run more often
    drawn: frozenset[int]  # positions of those that see nothing but random numbers
    by_chance: bool  # random numbers chose this way, and may choose another the next time


def difference(again: Trace, found: Trace) -> Difference:
    """What runs in `again` and not in `found`."""
    numbers: dict[Hashable, int] = {}
    before, now = _Reading(found, numbers), _Reading(again, numbers)
    by_chance = again.lucky or any(
        op.position in now.drawn and op.name == "aten._local_scalar_dense" for op in again.ops
    )
    # Where chance leaves something out, what comes behind reads something else; a line that runs anyway is no news.
    lines = {(op.name, op.where) for op in found.ops} if by_chance else set()
    known, given, left = {None, *before.ops}, set(before.outputs), Counter(before.ops)
    ops, more = [], set()
    for op, number in zip(again.ops, now.ops, strict=True):
        if _reads_more(op, found) or (number not in known and (op.name, op.where) not in lines):
            ops.append(op)
        left[number] -= 1
        if left[number] < 0:
            more.add(op.position)
    outputs = [value for value, number in zip(again.outputs, now.outputs, strict=True) if number not in given]
    extends = known <= {None, *now.ops} and given <= set(now.outputs)
    return Difference(ops, outputs, extends, frozenset(more), frozenset(now.drawn), by_chance)


def _reads_more(op: Op, found: Trace) -> bool:
    # A number, such as a count of batches, has no channels.
    return any(value.kind == "state" and value.shape and value.name not in found.states for value in op.inputs)


def feeding(again: Trace, found: Trace, new: Difference) -> dict[str, str]:
    """The layers whose channels reach what runs in `again` alone, or its weights in `found`; with the line."""
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
        todo, seen = list(values), set(values)
        while todo:
            maker = makers.get(todo.pop())
            if maker is None:
                continue
            layer = owner(maker) if maker.name in LAYERS else None
            if layer is not None:
                found.setdefault(layer, line)
            if layer is None or (maker.name == "aten.convolution" and maker.args[8] > 1):
                todo += (fresh := [v for v in maker.inputs if v not in seen])
                seen.update(fresh)
    return found


class _Reading:
    """One recording, in numbers: `ops` has None for what hands channels on, or has none to do with."""

    def __init__(self, trace: Trace, numbers: dict[Hashable, int]) -> None:
        self._numbers = numbers
        self._of: dict[Value, int] = {v: self._number("input", place) for place, v in enumerate(trace.inputs)}
        self._fed: set[Value] = set(trace.inputs)  # what depends on the inputs
        self._chance: set[Value] = set()  # what depends on chance alone
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
        name, outputs = op.name.removesuffix("_"), [v for v in op.outputs if v is not None]
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
        for place, value in enumerate(outputs):
            self._of[value] = self._number(number, place)
        if fed:
            self._fed.update(outputs)
            if self._makes_channels(op):
                weight = op.args[LAYERS[op.name]]
                self._of[outputs[0]] = self._number("layer", self._value(weight.transpose_of or weight))
        elif by_chance:
            self._chance.update(outputs)
            self.drawn.add(op.position)
        return number if fed else None

    def _of_op(self, op: Op, name: str) -> int:
        if op.name in BATCH_NORMS:
            # In training it has another name, or other settings.  By its own statistics zero stays zero.
            keeps_zero = bool(op.args[5]) and not isinstance(op.args[2], Value)
            held = [self._value(v) if isinstance(v, Value) else None for v in op.args[:3]]
            return self._number("norm", keeps_zero, *held)
        args = pytree.tree_map_only(Value, lambda v: f"#{self._value(v)}", (op.args, op.kwargs))
        return self._number(name, repr(args))

    def _makes_channels(self, op: Op) -> bool:
        if op.name not in LAYERS or (op.name == "aten.convolution" and op.args[8] > 1):
            return False
        weight = op.args[LAYERS[op.name]]
        return bool((weight.transpose_of or weight).roots)

    def _handed_on(self, op: Op) -> Value | None:
        """The operand whose channels the result has, zero where they are: chance may scale them."""
        rule = rule_of(op)
        node = build_node(op, {}) if rule in POINTWISE else None
        if not isinstance(node, Elementwise) or node.steep or node.zero not in ("any", "all", "first"):
            return None
        scales = self._chance if node.zero != "any" else set()
        operands = dict.fromkeys(value for value in op.inputs if value not in scales)
        if len(operands) != 1 or (node.zero == "first" and op.inputs[0] not in operands):
            return None
        (operand,) = operands
        return operand if all(v.shape == operand.shape for v in node.outputs) else None


_NOT_THE_USERS = {"torch", "numpy", __name__.partition(".")[0], *sys.stdlib_module_names}


def asks_for_its_mode(module: nn.Module, without: set[CodeType] | None = None) -> bool:
    """Does code of the user's own read `training`?  Where none does, a run of its own would show nothing new.

    `without` holds code that is known not to, and gets more of it.

    >>> asks_for_its_mode(nn.Dropout())  # which is torch's
    False
    """
    own = [kind for kind in type(module).__mro__ if _is_the_users(kind.__module__)]
    hooks = [
        hook
        for name, table in vars(module).items()
        if name.endswith("_hooks") and isinstance(table, dict)
        for hook in table.values()
    ]
    todo: list[object] = [*hooks, *own, *(vars(module).values() if own else ())]
    known = without if without is not None else set()
    seen: set[CodeType] = set()
    met: set[int] = set()
    while todo:
        held = todo.pop()
        if isinstance(held, FunctionType):
            code = held.__code__
            if code in known or code in seen:
                continue
            seen.add(code)
            if any("training" in (*inner.co_names, *inner.co_consts) for inner in _nested(code)):
                return True
        elif id(held) in met:
            continue
        met.add(id(held))
        todo += _within(held, own)
    known |= seen
    return False


def ignores_its_mode(module: nn.Module) -> bool:
    """Is it a module of torch's whose mode is a note that nothing but code of the user's would read?

    >>> ignores_its_mode(nn.Conv2d(1, 1, 1)), ignores_its_mode(nn.BatchNorm2d(1))
    (True, False)
    """
    kinds = [kind for kind in type(module).__mro__ if kind not in (nn.Module, object)]
    functions = [held for kind in kinds for held in vars(kind).values() if isinstance(held, FunctionType)]
    return all(map(_is_torchs, kinds)) and not any("training" in held.__code__.co_names for held in functions)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _is_the_users(module: str | None) -> bool:
    return bool(module) and str(module).partition(".")[0] not in _NOT_THE_USERS


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A function's code with that of the functions written in it."""
    yield code
    for held in code.co_consts:
        if isinstance(held, CodeType):
            yield from _nested(held)


def _within(held: object, own: Collection[type]) -> list[object]:
    """What may be called by way of something: methods, a function's globals, what is held in lists and objects."""
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
        # The modules that a class builds are asked themselves.
        strange = issubclass(held, nn.Module) and held not in own
        return [] if strange or not _is_the_users(held.__module__) else list(vars(held).values())
    if isinstance(held, (nn.Module, Tensor, ModuleType)) or not _is_the_users(type(held).__module__):
        return []
    return [*type(held).__mro__, *getattr(held, "__dict__", {}).values()]


def _reached(function: FunctionType) -> list[object]:
    """What the names in a function stand for, where it knows them from its file or from where it was written."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    names = {name for code in _nested(function.__code__) for name in code.co_names}
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    files = [held for held in known if isinstance(held, ModuleType) and _is_the_users(held.__name__)]
    through = [vars(file)[name] for file in files for name in names if name in vars(file)]
    return [*cells, *known, *through, *(function.__defaults__ or ()), vars(function).get("__wrapped__")]


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a name that has no value yet
        return False

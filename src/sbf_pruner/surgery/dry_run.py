"""Dry run of an extracted network, compared operator by operator with the trace of the original model.

The small network runs on the meta device if the model can, so that sizes fixed by the model's own code are found
without arithmetic. Remaining channels must go where the layout expects them, and nothing else may depend on their
number: not which operators run, not their operands and literals, and not which pixels they read.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import PruningError
from ..graph.channel_graph import ChannelGraph
from ..graph.nodes import Boundary, ChannelMove, Grids, Layout, Node
from ..graph.operators import build_node, fresh, fresh_zeros, is_custom, rule_of
from ..graph.operators.layers import GROUP_NORM, Norm
from ..graph.operators.movement import RESHAPES, indexed, moved, padded
from ..graph.records import REMAP, ZEROS, Op, Trace, Value, same_numbers
from ..graph.tracer import rerun_ops
from ..graph.train_eval import may_read_training
from ..modules import Remap, Zeros, plain_names
from ..utils.user_code import failing_line
from ..utils.user_model import call, map_tensors, meta_copy, real_copy, remove_pruner_hooks

# Operators that are not compared: whether they run depends on strides, not on what is computed.
_QUIET = {f"aten.{n}" for n in ("clone", "contiguous", "alias", "detach", "_to_copy", "empty", "t", "as_strided_")}
_QUIET |= {REMAP, ZEROS}


@dataclass
class DryRun:
    """Dry runs of an extracted network, compared with the traces of the original model."""

    small: nn.Module
    model: nn.Module
    example_inputs: Any
    graph: ChannelGraph
    layout: Layout
    vanished: set[str]

    def first_mismatch(self) -> Op | None:
        """Run the small network as the original was traced; return the first operator that differs, or None."""
        nodes = {node.op: node for node in self.graph.nodes}

        def same(actual: Op, promised: Op, decided: ValueDependent) -> bool:
            return agrees(actual, nodes[promised], self.layout, decided)

        found = rerun_ops(self.small, self.example_inputs, self.graph.trace)
        odd = self._first_difference(found, list(nodes), self.graph.trace.on_meta, same)
        if odd is None:
            _check_seen(self.small, found, self.graph)
        return odd

    def first_call_mismatch(self) -> Op | None:
        """Return the first operator of a model's first call that depends on a number of channels, or None.

        Applies to models that store tensors in their first call. If the model has run since it was traced, nothing
        is compared: the model has these tensors already, and the small network has copies of them.
        """
        first = self.graph.trace.first
        if first is None:
            return None
        now = rerun_ops(self.model, self.example_inputs, first)
        return (
            self.other_trace_mismatch(first) if [op.name for op in now] == [op.name for op in first.ops] else None
        )

    def other_trace_mismatch(self, other: Trace | None) -> Op | None:
        """Return the first operator of a trace without a graph that depends on a number of channels, or None.

        That is a trace of the other mode, or of a first call. It has no layout, but numeric arguments must not
        depend on a width, and the inputs of operators that run in that mode only must keep all channels.
        """
        if other is None:
            return None
        movers: dict[tuple[Any, ...], list[ChannelMove]] = defaultdict(list)
        for node in self.graph.nodes:
            if isinstance(node, ChannelMove):
                movers[_identity(node.op)].append(node)

        def same(actual: Op, promised: Op, decided: ValueDependent) -> bool:
            if not _does_the_same(actual, promised, other, decided):
                return False
            # Channels and pixels must move as they do at the same line in the channel graph's trace.
            nodes = movers.get(_identity(promised), ())
            unknown = not nodes or decided.touches(promised)
            return unknown or any(moves_alike(actual, node, self.layout) for node in nodes)

        found = rerun_ops(self.small, self.example_inputs, other)
        return self._first_difference(found, other.ops, other.on_meta, same)

    def _first_difference(
        self, found: list[Op], promised: list[Op], on_meta: bool, same: Callable[[Op, Op, ValueDependent], bool]
    ) -> Op | None:
        """Return the first operator of `promised` that differs from the one at the same place in `found`, or None.

        If `found` has more operators at the end, their number depends on a width: return the last promised one.
        """
        names = names_of(self.small), names_of(self.model)
        operands = Operands(_handed_on(found), _handed_on(promised), names)
        decided = ValueDependent((), ()) if on_meta else ValueDependent(found, promised)
        actual = iter([op for op in found if not _quiet(op)])
        last = None
        for op in promised:
            if not op.name.startswith("edge.") and not _quiet(op) and not op.inside(self.vanished):
                now = next(actual, None)
                if now is None or not same(now, op, decided) or not operands.agree(now, op):
                    return op
                last = op
        return last if next(actual, None) is not None else None


def _identity(op: Op) -> tuple[Any, ...]:
    return op.name, op.where, tuple(settings(op)), tuple(value.shape for value in op.inputs)


def _does_the_same(actual: Op, promised: Op, other: Trace, decided: ValueDependent) -> bool:
    if not same_kind(actual, promised):
        return False
    if promised.position in other.apart and not decided.touches(promised):
        # Shapes of tensors computed from weights alone, such as transposes, may differ: they depend on the filters.
        now, then = ([v.shape for v in op.inputs if not v.roots] for op in (actual, promised))
        if now != then:
            return False
    if promised.position in other.drawn:  # the scale of random numbers may depend on their count
        return True
    if other.cold and not promised.inputs:  # the model may store such a tensor, so its size must be equal
        return decided.same(promised, settings(actual), settings(promised))
    moves = has_channel_indices(promised)
    return decided.same(promised, fixed_settings(actual, moves), fixed_settings(promised, moves))


def _handed_on(ops: Sequence[Op]) -> dict[Value, Value]:
    """Map the result of every operator that is not compared, and of every module edge, to its operand."""
    found: dict[Value, Value] = {}
    for op in ops:
        maps = [v for v in op.inputs if v.kind != "state" or len(v.shape) > 1]
        if (_quiet(op) or op.name.startswith("edge.")) and op.name != ZEROS and maps and op.results:
            found[op.results[0]] = maps[0]
    return found


def _check_seen(small: nn.Module, found: Sequence[Op], graph: ChannelGraph) -> None:
    """Raise a PruningError if an inserted module did not run, because some object refers to the replaced one."""
    ran = {op.call.module for op in found if op.name in (REMAP, ZEROS) and op.call is not None}
    gated = {node.module for node in graph.nodes if isinstance(node, Boundary)}
    for path, module in small.named_modules():
        home = path.removesuffix(".before").removesuffix(".after")
        if isinstance(module, (Remap, Zeros)) and path not in ran and home in gated:
            raise PruningError(
                f"{home} is also referenced outside the module tree, so replacing it has no effect there; call it "
                "as an attribute of the module it belongs to, or leave it out of the plan"
            )


def failure_in_training(small: nn.Module, model: nn.Module, example_inputs: Any) -> str | None:
    """Return the line where the small network fails in training mode; None if it runs or the model fails too."""
    if not any(map(may_read_training, small.modules())):
        return None
    state = random.getstate()
    try:
        # As in tracing: on the meta device, or with real tensors if the model needs them.
        for copied, moved in ((meta_copy, lambda t: t.to("meta")), (real_copy, torch.clone)):
            inputs = map_tensors(example_inputs, moved)
            error = _error_in_training(copied(small), inputs)
            if error is None:
                return None
            if _error_in_training(remove_pruner_hooks(copied(model)), inputs) is None:
                return failing_line(error)
    finally:
        random.setstate(state)
    return None


def _error_in_training(model: nn.Module, inputs: Any) -> Exception | None:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            call(model.train(), inputs)
    except Exception as error:
        return error
    return None


def _adds_bias(op: Op) -> bool:
    # The strides of its input decide whether a linear layer adds its bias in the product or afterwards.
    return (
        op.name == "aten.add" and not op.kwargs and any(v.kind == "state" and len(v.shape) == 1 for v in op.inputs)
    )


def _quiet(op: Op) -> bool:
    return op.name in _QUIET or _adds_bias(op)


_SAME = {f"aten.{n}": "aten.view" for n in ("_unsafe_view", "reshape", "_reshape_alias")}
_SAME["aten.addmm"] = "aten.mm"
# Positions of arguments that are widths: groups of a convolution; channels and groups of a group norm.
_WIDTHS = {"aten.convolution": (8,), GROUP_NORM: (4, 6)}


def agrees(actual: Op, node: Node, layout: Layout, decided: ValueDependent) -> bool:
    """Return True if the operator `actual` has the shapes, settings and channel positions of the layout."""
    promised = node.op
    if not same_kind(actual, promised) or len(actual.outputs) < len(promised.outputs):
        return False
    for now, then in zip(actual.outputs, promised.outputs, strict=False):
        if now is not None and then is not None and not decided.fits(now, then, layout.sizes(then)):
            return False
    moves = isinstance(node, ChannelMove) and has_channel_indices(promised)
    if not decided.same(promised, fixed_settings(actual, moves), fixed_settings(promised, moves)):
        return False
    if isinstance(node, Norm) and actual.name == GROUP_NORM:
        # A hard-coded number of groups may divide fewer channels too, but then fewer of them share statistics.
        return actual.inputs[0].shape[1] == node.per_group * actual.args[6]
    return not isinstance(node, ChannelMove) or decided.touches(promised) or moves_alike(actual, node, layout)


def same_kind(actual: Op, promised: Op) -> bool:
    """Return True for the same operator with equal literals; `torch.tensor(x.shape[1])` depends on a width."""
    literals = [
        (now.data, then.data)
        for now, then in zip(actual.inputs, promised.inputs, strict=False)
        if now.kind == then.kind == "constant"
    ]
    same = all(now is None or then is None or same_numbers(now, then) for now, then in literals)
    return same and _SAME.get(actual.name, actual.name) == _SAME.get(promised.name, promised.name)


def settings(op: Op) -> list[Any]:
    """Return all numbers and strings among an operator's arguments."""
    return _plain(pytree.tree_leaves((op.args, op.kwargs)))


def fixed_settings(op: Op, moves: bool) -> list[Any]:
    """Return the arguments of an operator that must not depend on a width, such as the divisor in `x / x.shape[1]`.

    If `moves` is true, integers are left out: they may be sizes or indices of channels, which `moves_alike` checks.
    """
    given = (*op.args, *op.kwargs.values())
    if moves:
        return [a for a in _plain(given) if not isinstance(a, int)]
    if not op.inputs or rule_of(op) in (fresh, fresh_zeros):  # `_plain` omits its list of sizes
        return _plain(given)
    kept = [a for place, a in enumerate(op.args) if place not in _WIDTHS.get(op.name, ())]
    if op.name == "aten.affine_grid_generator":  # takes the size of a feature map, but ignores channels
        kept[1] = [n for place, n in enumerate(kept[1]) if place != 1]
    return _plain(pytree.tree_leaves((kept, op.kwargs)))


def has_channel_indices(op: Op) -> bool:
    """Return True if integer arguments of an operator may be sizes and positions of channels."""
    rule = rule_of(op)
    return rule in (moved, indexed, padded) or (rule is not None and is_custom(rule))


def _plain(given: Iterable[Any]) -> list[Any]:
    return [a for a in given if isinstance(a, (int, float, str))]


def moves_alike(actual: Op, node: ChannelMove, layout: Layout) -> bool:
    """Return True if an operator moves each remaining channel, and each pixel, where the layout expects it.

    Equal shapes are not enough: after pruning, the first half of the channels may consist of other channels.
    """
    joins = actual.name == "aten.cat"  # `cat` ignores operands of shape (0,)
    operands = [v for v in dict.fromkeys(actual.inputs) if not v.is_table and not (joins and v.shape == (0,))]
    if len(operands) != len(node.operands):
        return False
    grids: Grids = {}
    numbers, start = [], 0
    for now, then in zip(operands, node.operands, strict=True):
        present = layout.joint(then)
        grids[now] = tuple(n if g > 1 else 1 for n, g in zip(now.shape, present.shape, strict=True))
        numbers.append(np.cumsum(present.reshape(-1)) - 1 + start)
        start += int(present.sum())
    found = build_node(actual, grids)
    if not isinstance(found, ChannelMove):
        return False
    new = np.append(np.concatenate(numbers), -1)
    tables = zip(node.outputs, node.labels, found.labels, strict=False)
    if not all(_equal(now, new[_left(labels, out, layout)]) for out, labels, now in tables):
        return False
    # A reshape to the right shape keeps the order of its elements, whatever its arguments.
    if actual.name in RESHAPES or settings(actual) == settings(node.op):
        return True
    return _moves_pixels_alike(actual, operands, node, layout)


def _moves_pixels_alike(actual: Op, operands: Sequence[Value], node: ChannelMove, layout: Layout) -> bool:
    """Return True if an operator moves pixels as in the original; a spatial shift must not depend on a width."""
    pixels: list[Grids] = [{}, {}]
    for now, then in zip(operands, node.operands, strict=True):
        for value, grids in zip((now, then), pixels, strict=True):
            grids[value] = tuple(n if g == 1 else 1 for n, g in zip(value.shape, node.grids[then], strict=True))
    found, whole = build_node(actual, pixels[0]), build_node(node.op, pixels[1])
    if not isinstance(found, ChannelMove) or not isinstance(whole, ChannelMove):
        return False
    tables = zip(node.outputs, found.labels, whole.labels, strict=False)
    return all(_equal(now, _left(then, out, layout)) for out, now, then in tables)


def _left(labels: NDArray[np.int64], out: Value, layout: Layout) -> NDArray[np.int64]:
    """Return the entries of `labels`, one source index per channel of `out`, that belong to remaining channels."""
    places = [layout.indices(out, d) if n != 1 else [0] for d, n in enumerate(labels.shape)]
    return labels[np.ix_(*places)]


def _equal(now: NDArray[np.int64], then: NDArray[np.int64]) -> bool:
    """Return True if two arrays of the same rank are equal after broadcasting dimensions of size 1."""
    fits = now.ndim == then.ndim and all(a == b or 1 in (a, b) for a, b in zip(now.shape, then.shape, strict=True))
    return fits and bool(np.all(now == then))


Names = Mapping[str, Set[str]]  # one name of a stored tensor -> all its names


class Operands:
    """Correspondence between tensors of the small network and of the original, as far as both are known.

    Shapes alone are not enough: a forward that chooses by a width (`a if a.shape[1] > 8 else b`) may run the same
    operator on another tensor, or with another module's weights.
    """

    def __init__(self, now: Mapping[Value, Value], then: Mapping[Value, Value], names: tuple[Names, Names]) -> None:
        self._now, self._then = now, then  # operators not compared: result -> operand
        self._names = names
        self._same: dict[Value, Value] = {}  # value in the small network -> value in the original
        self._paired: set[Value] = set()

    def agree(self, now: Op, then: Op) -> bool:
        """Return True if two operators read corresponding tensors; their results correspond from then on."""
        for mine, other in zip(now.inputs, then.inputs, strict=False):
            mine, other = _origin(mine, self._now), _origin(other, self._then)
            if mine.kind == other.kind == "state" and not self._same_name(mine, other):
                return False
            known = self._same.get(mine)
            if known is not None and other in self._paired and known is not other:
                return False
            if (mine.kind == "input" and other in self._paired) or (other.kind == "input" and known is not None):
                return False
        pairs = [(a, b) for a, b in zip(now.outputs, then.outputs, strict=False) if a is not None and b is not None]
        self._same |= dict(pairs)
        self._paired |= {b for _, b in pairs}
        return True

    def _same_name(self, mine: Value, other: Value) -> bool:
        now, then = (held.get(value.name) for held, value in zip(self._names, (mine, other), strict=True))
        return now is None or then is None or bool(now & then)


def names_of(model: nn.Module) -> Names:
    """Map the name of every parameter and buffer to all its names; a tied parameter has several.

    The latter are without the `RemappedModule` wrappers of earlier extractions.

    >>> tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> sorted(names_of(tied)["0.weight"])
    ['0.weight', '1.weight']
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    plain = plain_names(modules)
    found: dict[int, set[str]] = defaultdict(set)
    for path, module in modules.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            found[id(tensor)].add(f"{plain[path]}.{name}".lstrip("."))
    return {name: found[id(tensor)] for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _origin(value: Value, handed_on: Mapping[Value, Value]) -> Value:
    while value in handed_on:
        value = handed_on[value]
    return value


# Operators whose output size depends on values.
_BY_VALUE = "nonzero index masked_select bincount repeat_interleave _unique _unique2 unique_dim unique_consecutive"
_BY_VALUE_OPS = {"torchvision.nms", *(f"aten.{name}" for name in _BY_VALUE.split())}
_COMMON = (-1, 0, 1)  # as dimensions and flags these are too common to show that a value was read


class ValueDependent:
    """Sizes and numbers that depend on tensor values, and so may differ between the small network and the original.

    With fewer channels values differ: other boxes pass a threshold, or a maximum used as a divisor changes. Such
    code need not depend on a width. A dimension that lost channels must still have the predicted size.
    """

    def __init__(self, now: Sequence[Op], then: Sequence[Op]) -> None:
        self._now, self._then = _read_numbers(now), _read_numbers(then)
        self._sizes: set[Value] = set()
        for op in then:
            given = (a for a in (*op.args, *op.kwargs.values()) if isinstance(a, (int, float)))
            from_values = any(not isinstance(a, bool) and a in self._then for a in given)
            if op.name in _BY_VALUE_OPS or self.touches(op) or from_values:
                self._sizes.update(op.results)

    def touches(self, op: Op) -> bool:
        """Return True if an operator of the original has an operand or result whose size depends on values."""
        return not self._sizes.isdisjoint((*op.inputs, *op.results))

    def fits(self, now: Value, then: Value, promised: tuple[int, ...]) -> bool:
        """Return True if a tensor has the promised size, except in uncut dimensions that depend on values."""
        if now.shape == promised:
            return True
        if then not in self._sizes or len(now.shape) != len(promised):
            return False
        sizes = zip(now.shape, promised, then.shape, strict=True)
        return all(found == size or size == whole for found, size, whole in sizes)

    def same(self, op: Op, now: Sequence[Any], then: Sequence[Any]) -> bool:
        """Return True if an operator's arguments are equal, except for numbers that depend on tensor values."""
        free = int if self.touches(op) else ()
        return len(now) == len(then) and all(
            a == b
            or (a != a and b != b)  # both are NaN
            or (a in self._now and b in self._then)
            or (isinstance(a, free) and isinstance(b, free))
            for a, b in zip(now, then, strict=True)
        )


def _read_numbers(ops: Sequence[Op]) -> set[float]:
    """Return the numbers that were read from tensor values (`tensor.item()`), and their integer parts."""
    found = {op.returned for op in ops if op.returned is not None and math.isfinite(op.returned)}
    return (found | {int(number) for number in found}) - set(_COMMON)

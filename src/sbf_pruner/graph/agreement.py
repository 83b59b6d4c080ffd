"""Does one operator of a network that was cut do what the whole network's operator did?

An operator of either network, the node that stands for the second and the layout enter; yes or no leaves.  What
holds: channels that are left go where the layout expects them, and nothing else may depend on their number,
neither what is computed nor which pixels it is computed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from .decided import Decided
from .literals import same_numbers
from .masks import Grids, Layout
from .moves import RESHAPES, indexed, moved, padded
from .nodes import Map, Node
from .owners import GROUP_NORM
from .records import Op, Value
from .rules import build_node, fresh, fresh_zeros, is_custom, rule_of
from .weighted import Norm

_SAME = {f"aten.{n}": "aten.view" for n in ("_unsafe_view", "reshape", "_reshape_alias")}
_SAME["aten.addmm"] = "aten.mm"
# Arguments that are widths: the groups of a convolution; the channels and groups of a group norm.
_WIDTHS = {"aten.convolution": (8,), GROUP_NORM: (4, 6)}


def agrees(actual: Op, node: Node, layout: Layout, decided: Decided) -> bool:
    """Does an operator of the small network do what the layout promises?"""
    promised = node.op
    if not same_kind(actual, promised) or len(actual.outputs) < len(promised.outputs):
        return False
    for now, then in zip(actual.outputs, promised.outputs, strict=False):
        if now is not None and then is not None and not decided.fits(now, then, layout.sizes(then)):
            return False
    moves = isinstance(node, Map) and tells_places(promised)
    if not decided.same(promised, fixed_settings(actual, moves), fixed_settings(promised, moves)):
        return False
    if isinstance(node, Norm) and not _shares_alike(actual, node):
        return False
    return not isinstance(node, Map) or decided.touches(promised) or moves_alike(actual, node, layout)


def same_kind(actual: Op, promised: Op) -> bool:
    """Is it the same operator, with the same literals of the forward?"""
    names = [_SAME.get(op.name, op.name) for op in (actual, promised)]
    return names[0] == names[1] and all(map(_same_literal, actual.inputs, promised.inputs))


def _same_literal(now: Value, then: Value) -> bool:
    """A literal of the forward must not depend on a width (torch.tensor(x.shape[1]))."""
    literal = now.kind == then.kind == "constant" and now.data is not None and then.data is not None
    return not literal or same_numbers(now.data, then.data)  # type: ignore[arg-type]


def settings(op: Op) -> list[Any]:
    """All numbers and words among an operator's arguments."""
    return _plain(pytree.tree_leaves((op.args, op.kwargs)))


def fixed_settings(op: Op, moves: bool) -> list[Any]:
    """Those that must not depend on a width, as x / x.shape[1] does.

    Of what moves channels, whole numbers may be sizes and places of channels; `moves_alike` looks at them.
    """
    given = (*op.args, *op.kwargs.values())
    if moves:
        return [a for a in _plain(given) if not isinstance(a, int)]
    if not op.inputs or rule_of(op) in (fresh, fresh_zeros):  # it is told its sizes in a list, and has them
        return _plain(given)
    kept = [a for place, a in enumerate(op.args) if place not in _WIDTHS.get(op.name, ())]
    if op.name == "aten.affine_grid_generator":  # told the size of a map, of which it makes no use of the channels
        kept[1] = [n for place, n in enumerate(kept[1]) if place != 1]
    return _plain(pytree.tree_leaves((kept, op.kwargs)))


def tells_places(op: Op) -> bool:
    """May the numbers of an operator be sizes and places of channels?"""
    rule = rule_of(op)
    return rule in (moved, indexed, padded) or (rule is not None and is_custom(rule))


def _plain(given: Iterable[Any]) -> list[Any]:
    return [a for a in given if isinstance(a, (int, float, str))]


def _shares_alike(actual: Op, node: Norm) -> bool:
    """Do as many channels share statistics?  A number of groups that is written down may fit fewer channels too."""
    return actual.name != GROUP_NORM or actual.inputs[0].shape[1] == node.per_group * actual.args[6]


def moves_alike(actual: Op, node: Map, layout: Layout) -> bool:
    """Does the operator move each channel that is left, and each pixel, where the layout expects it?

    Not always, although the shapes are right: half of the channels are others when fewer are there.
    """
    tables = [v for v in actual.inputs if v.data is not None and not v.data.is_floating_point()]
    joins = actual.name == "aten.cat"  # which passes over what has no size at all
    operands = [v for v in dict.fromkeys(actual.inputs) if v not in tables and not (joins and v.shape == (0,))]
    if len(operands) != len(node.operands):
        return False
    grids: Grids = {}
    numbers, start = [], 0
    for now, then in zip(operands, node.operands, strict=True):
        there = layout.joint(then)
        grids[now] = tuple(n if g > 1 else 1 for n, g in zip(now.shape, there.shape, strict=True))
        numbers.append(np.cumsum(there.reshape(-1)) - 1 + start)
        start += int(there.sum())
    found = build_node(actual, grids)
    if not isinstance(found, Map):
        return False
    new = np.append(np.concatenate(numbers), -1)
    for out, labels, places in zip(node.outputs, node.labels, found.labels, strict=False):
        if not _equal(places, new[_left(labels, out, layout)]):
            return False
    return _moves_pixels_alike(actual, operands, node, layout)


def _moves_pixels_alike(actual: Op, operands: Sequence[Value], node: Map, layout: Layout) -> bool:
    """The same for the dimensions along which channels do not differ: a shift there must not be by a width.

    A view of the right shape keeps the order of what it is given, whatever numbers say so.
    """
    if actual.name in RESHAPES or settings(actual) == settings(node.op):
        return True
    pixels: list[Grids] = [{}, {}]
    for now, then in zip(operands, node.operands, strict=True):
        for value, grids in zip((now, then), pixels, strict=True):
            grids[value] = tuple(n if g == 1 else 1 for n, g in zip(value.shape, node.grids[then], strict=True))
    found, whole = build_node(actual, pixels[0]), build_node(node.op, pixels[1])
    if not isinstance(found, Map) or not isinstance(whole, Map):
        return False
    tables = zip(node.outputs, found.labels, whole.labels, strict=False)
    return all(_equal(now, _left(then, out, layout)) for out, now, then in tables)


def _left(labels: NDArray[np.int64], out: Value, layout: Layout) -> NDArray[np.int64]:
    """What a table over an output says of the channels that are left."""
    places = [layout.indices(out, d) if n != 1 else [0] for d, n in enumerate(labels.shape)]
    return labels[np.ix_(*places)]


def _equal(now: NDArray[np.int64], then: NDArray[np.int64]) -> bool:
    """Are two tables the same, where either may leave out what does not differ?"""
    fits = now.ndim == then.ndim and all(a == b or 1 in (a, b) for a, b in zip(now.shape, then.shape, strict=True))
    return fits and bool(np.all(now == then))

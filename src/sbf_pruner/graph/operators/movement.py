"""Rules for operators that move channels: each output channel is one input channel, or zero.

Views, permutations, slices and shuffles run on a tensor of channel numbers instead of values; the result shows
where each channel went. Channel numbers are expanded, not copied, along dimensions in which channels do not
differ, so those of a feature map take as much memory as it has channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from ..layer_nodes import Norm
from ..nodes import (
    Boundary,
    ChannelMove,
    Elementwise,
    Grid,
    Grids,
    Halves,
    Located,
    Node,
    Opaque,
    Sampled,
    Source,
    Sum,
)
from ..records import Op, Value

_POOLS = ("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d")
_LOCATING = {f"aten.{name}" for name in ("max", "min", *_POOLS)}  # which also return positions
RESHAPES = {"aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias"}
_JOINS = {*RESHAPES, "aten.pixel_shuffle"}  # can merge channels and pixels into one dimension


def _numbered(value: Value, grid: Grid, start: int) -> Tensor:
    count = math.prod(grid)
    return torch.arange(start, start + count).reshape(grid).expand(value.shape)


def _compact(numbers: Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Reduce dimensions along which the channel numbers do not differ to size 1."""
    for dim in range(numbers.dim()):
        if numbers.shape[dim] > 1:
            first = numbers.narrow(dim, 0, 1)
            if numbers.stride(dim) == 0 or bool((numbers == first).all()):
                numbers = first
    return np.array(numbers.numpy())


def _map(op: Op, grids: Grids, operands: Sequence[Value], labels: Sequence[Any]) -> Node:
    outputs = [v for v in op.outputs if v is not None]
    for value, table in zip(outputs, labels, strict=True):
        grids[value] = tuple(table.shape)
    kind = Located if op.name in _LOCATING and len(outputs) > 1 else ChannelMove
    return kind(op, grids, tuple(operands), tuple(np.asarray(t, np.int64) for t in labels))


def moved(op: Op, grids: Grids) -> Node:
    """Views, permutations, slices and shuffles: run the operator itself on channel numbers."""
    if all(v.data is not None and not v.data.is_floating_point() for v in op.inputs):
        return Source(op, grids)  # an index table, processed before it is used
    numbers: dict[Value, Tensor] = {}
    start = 0
    for value in dict.fromkeys(op.inputs):
        if value.data is not None and not value.data.is_floating_point():
            numbers[value] = value.data.cpu()  # an index table, which is applied and not moved
            continue
        if value.kind == "constant" or value in op.args[2:]:  # an index table with unknown values
            return Opaque(op, grids)
        numbers[value] = _numbered(value, grids[value], start)
        start += math.prod(grids[value])
    operands = [v for v in numbers if v.data is None or v.data.is_floating_point()]
    args, kwargs = pytree.tree_map_only(Value, numbers.__getitem__, (op.args, op.kwargs))
    if op.name in RESHAPES:
        result = args[0].reshape(args[1])
    else:
        function = op.overload
        if op.mutates:
            function = getattr(torch.ops.aten, op.name.removeprefix("aten.").removesuffix("_"))
        try:
            result = function(*args, **kwargs)
        except (IndexError, RuntimeError):  # a stored index may exceed the width of an extracted network
            return Opaque(op, grids)
    found = list(result) if isinstance(result, (list, tuple)) else [result]
    return _map(op, grids, operands, [_compact(t) for t in found])


def indexed(op: Op, grids: Grids) -> Node:
    """Indexing of one dimension by a stored table or a literal; any other index is opaque."""
    tables = [held for held in op.args[1] if held is not None]
    known = len(tables) == 1 and len(tables[0].shape) == 1 and tables[0].data is not None
    if not known or tables[0].data.dtype not in (torch.int32, torch.int64):
        return Opaque(op, grids)
    return moved(op, grids)


def halved(op: Op, grids: Grids) -> Node:
    """Gated linear unit (`glu`): the first half of a dimension times the sigmoid of the second half.

    If channels do not differ along that dimension, every channel is halved by itself.
    """
    x = op.args[0]
    dim = int(op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", -1)) % len(x.shape)
    numbers = np.arange(math.prod(grids[x])).reshape(grids[x])
    if grids[x][dim] == 1:
        return _map(op, grids, [x], [numbers])
    first, second = np.split(numbers, 2, dim)
    (out,) = [v for v in op.outputs if v is not None]
    grids[out] = first.shape
    return Halves(op, grids, (x,), (first,), second)


def joined(op: Op, grids: Grids) -> Node:
    """Concatenation; channel numbers are not expanded to the size of the feature map."""
    values: list[Value] = list(op.args[0])
    dim = int(op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0))
    values = [v for v in values if v.shape != (0,)]
    rank = len(values[0].shape)
    dim %= rank
    start, pieces, operands = 0, [], list(dict.fromkeys(values))
    numbered: dict[Value, Any] = {}
    for value in operands:
        count = math.prod(grids[value])
        numbered[value] = np.arange(start, start + count).reshape(grids[value])
        start += count
    common = list(np.broadcast_shapes(*([n if d != dim else 1 for d, n in enumerate(grids[v])] for v in values)))
    for value in values:
        common[dim] = value.shape[dim]
        pieces.append(np.broadcast_to(numbered[value], common))
    return _map(op, grids, operands, [np.concatenate(pieces, axis=dim)])


def padded(op: Op, grids: Grids) -> Node:
    """Zero padding; channels that padding adds are dead."""
    x, pads = op.args[0], list(op.args[1])
    value = op.number(2, "value", 0)
    grid, rank = grids[x], len(x.shape)
    pixels_only = all(grid[rank - 1 - i // 2] == 1 for i, n in enumerate(pads) if n)
    # Padding with -inf is of use only before a maximum, which it does not change.
    if value not in (0, None) and not (value == -math.inf and pixels_only):
        return Opaque(op, grids)
    widths = [(0, 0)] * rank
    for i in range(len(pads) // 2):
        dim = rank - 1 - i
        if grid[dim] > 1:  # other dimensions have one label for padding and content
            widths[dim] = (pads[2 * i], pads[2 * i + 1])
    if any(w < 0 for pair in widths for w in pair):
        return Opaque(op, grids)
    numbers = np.arange(math.prod(grid)).reshape(grid)
    return _map(op, grids, [x], [np.pad(numbers, widths, constant_values=-1)])


class MergedDimensions:
    """Track dimensions in which a reshape merged channels with pixels, and check how they are split again.

    The position of a channel in such a dimension depends on the image size. That is harmless if the dimension is
    the input of a linear layer, or is split into the same channels and pixels again. A reshape of `[batch, pixels,
    channels]` to `[batch, channels, height, width]` splits it elsewhere: each result then mixes channels, and
    different ones at every image size, so what holds at one size does not hold at another.

    Merged dimensions are rare; a network without them costs one comparison of sizes for each operator.
    """

    def __init__(self) -> None:
        # Tensors with a merged dimension: a number per entry, equal for the pixels of one channel.
        self._channels: dict[Value, NDArray[np.int64]] = {}
        self._count = 0  # numbers assigned so far

    def holds(self, node: Node) -> bool:
        """Record what a node does to merged dimensions; return False if that depends on the image size."""
        if isinstance(node, ChannelMove):
            return self._moved(node)
        if self._channels and isinstance(node, (Elementwise, Norm, Boundary)):
            for value in self._channels.keys() & set(node.inputs):
                same = [out for out in node.outputs if node.grids[out] == node.grids[value]]
                self._channels |= dict.fromkeys(same, self._channels[value])
        return True

    def _moved(self, node: ChannelMove) -> bool:
        grids, known = node.grids, not self._channels.keys().isdisjoint(node.operands)
        if not known and not (node.op.name in _JOINS and node.labels[0].size > math.prod(grids[node.operands[0]])):
            return True
        held = [np.broadcast_to(self._numbers(value, grids[value]), grids[value]) for value in node.operands]
        flat = np.concatenate([*(numbers.reshape(-1) for numbers in held), [-1]])
        joined = {}
        for out, labels in zip(node.outputs, node.labels, strict=True):
            after = flat[labels]
            if node.op.name in RESHAPES:
                if _cut_elsewhere(node.operands[0].shape, out.shape, held[0], after):
                    return False
            elif len(held) == 1 and _part_of_a_channel(held[0], after):
                return False
            zeros = after < 0
            after[zeros] = self._new(int(np.count_nonzero(zeros)))  # every zero is a channel of its own
            if len(np.unique(after)) < after.size:
                joined[out] = after
        self._channels |= joined
        return True

    def _numbers(self, value: Value, grid: Grid) -> NDArray[np.int64]:
        found = self._channels.get(value)
        return self._new(math.prod(grid)).reshape(grid) if found is None else found

    def _new(self, count: int) -> NDArray[np.int64]:
        self._count += count
        return np.arange(self._count - count, self._count)


def _cut_elsewhere(
    shape: Sequence[int], into: Sequence[int], before: NDArray[np.int64], after: NDArray[np.int64]
) -> bool:
    """Return True if a reshape splits a dimension of channels and leaves a part of it merged with pixels.

    `before` and `after` hold the channel number of each entry. Samples may be merged with channels, because that is
    how groups and heads are moved into the batch dimension.
    """
    varying = [dim for dim, size in enumerate(before.shape) if size > 1 and np.ptp(before, dim).any()]
    if 0 not in varying and into[0] % shape[0] == 0 and len(after) == into[0]:
        after = after[: into[0] // shape[0]]
    for dim, size in enumerate(after.shape):
        ends = math.prod(into[:dim]), math.prod(into[: dim + 1])
        cut = any(math.prod(shape[:d]) < end < math.prod(shape[: d + 1]) for d in varying for end in ends)
        if cut and size > 1:
            line = np.sort(after, dim)
            same = np.diff(line, axis=dim) == 0
            if same.any() and not same.all():
                return True
            # Where the number of pixels has no factor in common with that of the channels, no line repeats one.
            slices = np.moveaxis(after, dim, 0).reshape(size, -1)
            shared = sum(len(np.unique(one)) for one in slices)
            if shared not in ((distinct := len(np.unique(after))), size * distinct):
                return True
    return False


def _part_of_a_channel(before: NDArray[np.int64], after: NDArray[np.int64]) -> bool:
    """Return True if some channels keep a different share of their pixels than others."""
    channels, counts = np.unique(before, return_counts=True)
    places = np.searchsorted(channels, after[after >= 0])
    left = np.bincount(places, minlength=len(channels))
    return len(np.unique(left[left > 0] / counts[left > 0])) > 1


def _spatial(op: Op, grids: Grids, kept: int) -> Node:
    x = op.args[0]
    grid = grids[x]
    if any(n > 1 for n in grid[kept:]):
        return Opaque(op, grids)
    numbers = np.arange(math.prod(grid)).reshape(grid)
    return _map(op, grids, [x], [numbers for v in op.outputs if v is not None])


def pooled(op: Op, grids: Grids) -> Node:
    """Pooling, interpolation and spatial padding: channels are unchanged."""
    # The last digit in the name is the number of spatial dimensions, which are the last ones of the shape.
    digits = [c for c in op.name if c in "123"]
    rank = len(op.args[0].shape)
    return _spatial(op, grids, rank - int(digits[-1]) if digits else 2)


def sampled(op: Op, grids: Grids) -> Node:
    """`grid_sample`: all channels are sampled at the same positions, which a second tensor holds."""
    x, places = op.args[:2]
    if any(n > 1 for n in grids[x][2:]):
        return Opaque(op, grids)
    (out,) = [v for v in op.outputs if v is not None]
    grids[out] = grids[x]
    return Sampled(op, grids, (x, places), (np.arange(math.prod(grids[x])).reshape(grids[x]),))


def reduced(op: Op, grids: Grids) -> Node:
    """Mean, sum, maximum or norm over some dimensions.

    Over the channels themselves only sums and norms of positive order can be followed, because a removed channel
    adds as little to them as a zero. Other reductions over channels are opaque.
    """
    x = op.args[0]
    grid, rank = grids[x], len(x.shape)
    given: Any = next((a for a in op.args[1:] if isinstance(a, (list, tuple))), op.kwargs.get("dim"))
    if given is None and len(op.args) > 1 and type(op.args[1]) is int:
        given = [op.args[1]]
    dims = [given] if isinstance(given, int) else given or range(rank)
    over = {int(d) % rank for d in dims} if rank else set()
    outputs = [v for v in op.outputs if v is not None]
    keep = len(outputs[0].shape) == rank
    if any(grid[d] > 1 for d in over):
        order = op.number(1, "ord", 2) if op.name == "aten.linalg_vector_norm" else None
        if op.name == "aten.sum" or (order is not None and order > 0):
            grids[outputs[0]] = tuple(1 if d in over else n for d, n in enumerate(grid) if keep or d not in over)
            return Sum(op, grids, tuple(sorted(over)))
        return Opaque(op, grids, f"{op.name} at {op.where} reduces over the channels, whose number would change")
    shape = [n for d, n in enumerate(grid) if keep or d not in over]
    numbers = np.arange(math.prod(grid)).reshape(shape)
    return _map(op, grids, [x], [numbers for _ in outputs])

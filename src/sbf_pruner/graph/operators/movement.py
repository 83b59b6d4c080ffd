"""Rules for operators that move channels: each output channel is one input channel, or zero.

Views, permutations, slices and shuffles run on a tensor of channel numbers instead of values; the result shows
where each channel went. Channel numbers are expanded, not copied, along dimensions in which channels do not
differ, so those of an `(N, C, H, W)` feature map take the memory of C numbers. For grids, see `nodes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from ..nodes import ChannelMove, Grids, Halves, Located, Node, Opaque, Sampled, Source, Sum
from ..records import Op, Value

Numbers = NDArray[np.int64]  # of the shape of a tensor's grid: source index of each channel, or -1 for zero

_POOLS = ("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d")
_LOCATING = {f"aten.{name}" for name in ("max", "min", *_POOLS)}  # also return positions
RESHAPES = {"aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias"}


def _numbered(values: Iterable[Value], grids: Grids) -> dict[Value, Numbers]:
    """Return channel numbers in the shape of each tensor's grid, counted through all tensors."""
    found: dict[Value, Numbers] = {}
    start = 0
    for value in dict.fromkeys(values):
        count = math.prod(grids[value])
        found[value] = np.arange(start, start + count, dtype=np.int64).reshape(grids[value])
        start += count
    return found


def _compact(numbers: Tensor) -> Numbers:
    """Reduce dimensions along which the channel numbers do not differ to size 1."""
    for dim in range(numbers.dim()):
        if numbers.shape[dim] > 1:
            first = numbers.narrow(dim, 0, 1)
            if numbers.stride(dim) == 0 or bool((numbers == first).all()):
                numbers = first
    return np.array(numbers.numpy())


def _move(op: Op, grids: Grids, operands: Iterable[Value], labels: Sequence[Numbers]) -> Node:
    for value, table in zip(op.results, labels, strict=True):
        grids[value] = table.shape
    kind = Located if op.name in _LOCATING and len(labels) > 1 else ChannelMove
    return kind(op, grids, tuple(operands), tuple(labels))


def moved(op: Op, grids: Grids) -> Node:
    """Views, permutations, slices and shuffles: run the operator itself on channel numbers."""
    if all(value.is_table for value in op.inputs):
        return Source(op, grids)  # computes an index table, which has no channels
    operands = [value for value in dict.fromkeys(op.inputs) if not value.is_table]
    if any(value.kind == "constant" or value in op.args[2:] for value in operands):
        return Opaque(op, grids)  # an index table with unknown values
    tables = {value: value.data.cpu() for value in op.inputs if value.is_table and value.data is not None}
    numbers = {v: torch.from_numpy(held).expand(v.shape) for v, held in _numbered(operands, grids).items()}
    args, kwargs = pytree.tree_map_only(Value, (tables | numbers).__getitem__, (op.args, op.kwargs))
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
    found = result if isinstance(result, (list, tuple)) else [result]
    return _move(op, grids, operands, [_compact(t) for t in found])


def indexed(op: Op, grids: Grids) -> Node:
    """Indexing of one dimension by a stored table or a literal; any other index is opaque."""
    tables = [held for held in op.args[1] if held is not None]
    known = len(tables) == 1 and len(tables[0].shape) == 1 and tables[0].data is not None
    if not known or tables[0].data.dtype not in (torch.int32, torch.int64):
        return Opaque(op, grids)
    return moved(op, grids)


def halved(op: Op, grids: Grids) -> Node:
    """Gated linear unit (`glu`): the first half of a dimension times the sigmoid of the second half.

    If channels do not differ along that dimension, the output has the same channels as the input.
    """
    x = op.args[0]
    dim = op.dim(1, -1) % len(x.shape)
    numbers = _numbered([x], grids)[x]
    if grids[x][dim] == 1:
        return _move(op, grids, [x], [numbers])
    first, second = np.split(numbers, 2, dim)
    grids[op.results[0]] = first.shape
    return Halves(op, grids, (x,), (first,), second)


def joined(op: Op, grids: Grids) -> Node:
    """Concatenation; channel numbers are not expanded to the size of the feature map."""
    values: list[Value] = [v for v in op.args[0] if v.shape != (0,)]
    dim = op.dim(1, 0) % len(values[0].shape)
    numbers = _numbered(values, grids)
    common = list(np.broadcast_shapes(*([n if d != dim else 1 for d, n in enumerate(grids[v])] for v in values)))
    pieces = []
    for value in values:
        common[dim] = value.shape[dim]
        pieces.append(np.broadcast_to(numbers[value], common))
    return _move(op, grids, numbers, [np.concatenate(pieces, axis=dim)])


def padded(op: Op, grids: Grids) -> Node:
    """Zero padding; channels that padding adds are dead."""
    x, pads = op.args[0], list(op.args[1])
    value = op.number(2, "value", 0)
    grid, last = grids[x], len(x.shape) - 1
    pairs = {last - i // 2: (pads[i], pads[i + 1]) for i in range(0, len(pads), 2)}
    pixels_only = all(grid[dim] == 1 for dim, pair in pairs.items() if any(pair))
    # Padding with -inf is of use only before a maximum, which it does not change.
    if value not in (0, None) and not (value == -math.inf and pixels_only):
        return Opaque(op, grids)
    # Along dimensions of grid size 1, padding and content have the same channel number.
    widths = [pairs.get(dim, (0, 0)) if size > 1 else (0, 0) for dim, size in enumerate(grid)]
    if any(w < 0 for pair in widths for w in pair):
        return Opaque(op, grids)
    return _move(op, grids, [x], [np.pad(_numbered([x], grids)[x], widths, constant_values=-1)])


def pooled(op: Op, grids: Grids) -> Node:
    """Pooling, interpolation and spatial padding: channels are unchanged."""
    x = op.args[0]
    # The last digit in the name is the number of spatial dimensions, which are the last ones of the shape.
    digits = [c for c in op.name if c in "123"]
    first = len(x.shape) - int(digits[-1]) if digits else 2
    if any(n > 1 for n in grids[x][first:]):
        return Opaque(op, grids)
    return _move(op, grids, [x], [_numbered([x], grids)[x]] * len(op.results))


def sampled(op: Op, grids: Grids) -> Node:
    """`grid_sample`: all channels are sampled at the same positions, given by a second tensor."""
    x, positions = op.args[:2]
    if any(n > 1 for n in grids[x][2:]):
        return Opaque(op, grids)
    grids[op.results[0]] = grids[x]
    return Sampled(op, grids, (x, positions), (_numbered([x], grids)[x],))


def reduced(op: Op, grids: Grids) -> Node:
    """Mean, sum, maximum or norm over some dimensions.

    Over channel dimensions only sums and norms of positive order are supported, because a channel of zeros adds
    nothing to them. Other reductions over channels are opaque.
    """
    x, out = op.args[0], op.results[0]
    grid, rank = grids[x], len(x.shape)
    given: Any = next((a for a in op.args[1:] if isinstance(a, (list, tuple))), op.kwargs.get("dim"))
    if given is None and len(op.args) > 1 and type(op.args[1]) is int:
        given = op.args[1]
    dims = [given] if isinstance(given, int) else given or range(rank)
    over = {int(d) % rank for d in dims} if rank else set()
    kept = tuple(1 if d in over else n for d, n in enumerate(grid) if len(out.shape) == rank or d not in over)
    if any(grid[d] > 1 for d in over):
        order = op.number(1, "ord", 2) if op.name == "aten.linalg_vector_norm" else None
        if op.name == "aten.sum" or (order is not None and order > 0):
            grids[out] = kept
            return Sum(op, grids, tuple(sorted(over)))
        return Opaque(op, grids, f"{op.name} at {op.where} reduces over the channels, whose number would change")
    return _move(op, grids, [x], [_numbered([x], grids)[x].reshape(kept)] * len(op.results))

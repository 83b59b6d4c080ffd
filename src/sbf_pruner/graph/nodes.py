"""Node types of the channel graph: how each operator propagates liveness and need, and constrains layouts.

Boolean masks say which channels of a tensor are *alive* (may be nonzero) and *needed* (some output depends on
them). The shape of a tensor's masks is its *grid*: the tensor's shape with 1 in the dimensions along which channels
do not differ, such as `(1, C, 1, 1)`. The *layout*, one mask per dimension, says which channels are present in the
extracted network. `push` propagates liveness forward, `pull` propagates need backward, and `tie` adds channels to
layouts until the operator, run on the smaller tensors, gives the same result. Only a `Boundary` allows different
layouts of its input and output, because a remap can be inserted there. Layouts never shrink.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from .records import Op, Value

Mask = NDArray[np.bool_]
Grid = tuple[int, ...]  # shape of the masks of a tensor
Grids = dict[Value, Grid]
End = tuple[Value, int]  # a tensor and one of its dimensions


def along(dim: int, shape: Sequence[int]) -> Grid:
    """Return the mask shape of a tensor whose channels differ along one dimension only.

    >>> along(1, (8, 16, 4, 4))
    (1, 16, 1, 1)
    """
    return tuple(n if d == dim else 1 for d, n in enumerate(shape))


@dataclass
class Flow:
    """Channels that are alive and needed when each layer keeps a given choice of filters."""

    alive: dict[Value, Mask] = field(default_factory=dict)
    needed: dict[Value, Mask] = field(default_factory=dict)
    reached: set[Value] = field(default_factory=set)  # alive values that depend on the network's inputs

    def wanted(self, value: Value) -> Mask | None:
        """Return the mask of the alive and needed channels of a value; None if `need` was not called for it."""
        needed = self.needed.get(value)
        return None if needed is None else needed & self.alive[value]

    def need(self, value: Value, mask: Mask, grid: Grid) -> None:
        """Add `mask` to the needed channels of a value; see `shrink` for a mask of another shape than `grid`."""
        self.needed[value] = shrink(mask, grid) | self.needed.get(value, False)


class Layout:
    """Channels of each tensor in the extracted network: a mask per dimension, None where all are present."""

    def __init__(self, grids: Grids) -> None:
        self.grids = grids
        self.masks: dict[Value, list[Mask | None]] = {}
        self.changed = True  # False once every constraint holds

    def start(self, value: Value, present: Mask | None) -> None:
        """Set the mask of each dimension to the indices of the `present` channels along it; None for no channel."""
        grid = self.grids[value]
        nothing = [np.zeros(n, bool) if n > 1 else None for n in grid]
        self.masks[value] = nothing if present is None else _hull(present, grid)

    def joint(self, value: Value) -> Mask:
        """Return the present channels of a value as one mask of the shape `self.grids[value]`."""
        grid = self.grids[value]
        result = np.ones(grid, bool)
        for dim, mask in enumerate(self.masks[value]):
            if mask is not None and grid[dim] > 1:
                result &= mask.reshape(along(dim, grid))
        return result

    def grow(self, value: Value, present: Mask) -> None:
        """Add the indices of the given channels to the mask of each dimension."""
        for dim, mask in enumerate(_hull(present, self.grids[value])):
            self.add(value, dim, mask)

    def add(self, value: Value, dim: int, mask: Mask | None) -> None:
        """Add the channels in `mask` along one dimension, or all of them if it is None."""
        before = self.masks[value][dim]
        if before is None or before is mask:
            return
        grown = np.ones_like(before) if mask is None else before | mask
        if np.count_nonzero(grown) > np.count_nonzero(before):
            self.masks[value][dim] = grown
            self.changed = True

    def tie(self, ends: Sequence[End]) -> None:
        """Give all dimensions in `ends` the same channels: the union of their present channels."""
        masks = [self.masks[value][dim] for value, dim in ends]
        if all(mask is masks[0] for mask in masks):
            return
        known = [mask for mask in masks if mask is not None]
        if len(known) < len(masks):
            for value, dim in ends:
                self.add(value, dim, None)
            return
        total = reduce(np.logical_or, known)
        count = np.count_nonzero(total)
        for (value, dim), mask in zip(ends, known, strict=True):
            if np.count_nonzero(mask) < count:
                self.changed = True
            self.masks[value][dim] = total  # one array, so that the identity check above succeeds next time

    def fill(self, value: Value) -> None:
        """Add all channels of a value."""
        self.fill_other(value, -1)

    def fill_other(self, value: Value, dim: int) -> None:
        """Add all channels along every dimension but one."""
        for other, mask in enumerate(self.masks[value]):
            if mask is not None and other != dim:
                self.add(value, other, None)

    def sizes(self, value: Value) -> tuple[int, ...]:
        """Return the shape of the value in the extracted network."""
        masks = self.masks[value]
        return tuple(n if m is None else int(np.count_nonzero(m)) for n, m in zip(value.shape, masks, strict=True))

    def line(self, value: Value, dim: int) -> Mask:
        """Return the present channels along one dimension as a mask."""
        mask = self.masks[value][dim]
        return np.ones(value.shape[dim], bool) if mask is None else mask

    def indices(self, value: Value, dim: int) -> list[int]:
        """Return the indices of the present channels along one dimension."""
        return np.flatnonzero(self.line(value, dim)).tolist()


def _hull(present: Mask, grid: Grid) -> list[Mask | None]:
    if present.size == max(grid, default=1):  # channels differ along one dimension at most
        return [present.reshape(n) if n > 1 else None for n in grid]
    axes = range(len(grid))
    return [some(present, tuple(a for a in axes if a != d)) if grid[d] > 1 else None for d in axes]


def some(mask: Mask, axes: int | tuple[int, ...], keepdims: bool = False) -> Mask:
    """Return `mask.any(axes)` as an array, even if the result is zero-dimensional."""
    return np.asarray(mask.any(axes, keepdims=keepdims))


def shrink(mask: Mask, grid: Grid) -> Mask:
    """Reduce a mask by `any` along dimensions of size 1 in `grid`, and broadcast it along the others."""
    if mask.shape == grid:
        return mask
    extra = mask.ndim - len(grid)
    if extra > 0:
        mask = some(mask, tuple(range(extra)))
    mask = mask.reshape((1,) * -extra + mask.shape)
    axes = tuple(d for d, n in enumerate(grid) if n == 1 and mask.shape[d] > 1)
    return np.broadcast_to(some(mask, axes, keepdims=True) if axes else mask, grid)


def whole_groups(mask: Mask, size: int) -> Mask:
    """Return the mask of all groups of `size` consecutive channels with at least one channel in `mask`."""
    if size == 1:
        return mask
    return np.repeat(mask.reshape(-1, size).any(1), size).reshape(mask.shape)


def equalize_groups(rows: Mask, present: Mask) -> Mask:
    """Add channels, in ascending order, until each present group has as many as the largest one, at least one.

    `rows` has the shape `(groups, channels per group)`, `present` the shape `(groups,)`.
    """
    counts = rows.sum(1)
    missing = np.where(present, max(int(counts.max()), 1) - counts, 0)
    absent = ~rows
    return np.asarray(rows | (absent & (absent.cumsum(1) <= missing[:, None])))


@dataclass
class Node:
    """One operator in the channel graph."""

    op: Op
    grids: Grids = field(repr=False)

    # Reason why the channels of the operator's inputs cannot be removed, or "" if they can.
    blocks = ""

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.op.inputs

    @property
    def out(self) -> Value:
        return self.outputs[0]

    @property
    def outputs(self) -> list[Value]:
        return self.op.results

    def push(self, flow: Flow) -> None:
        """Set the alive channels of the outputs, given those of the inputs."""
        for value in self.outputs:
            flow.alive[value] = np.ones(self.grids[value], bool)

    def pull(self, flow: Flow) -> None:
        """Mark the input channels as needed that alive and needed output channels depend on."""
        if self.outputs and not any(flow.needed[v].any() for v in self.outputs if v in flow.needed):
            return
        for value in self.inputs:
            flow.need(value, np.ones(self.grids[value], bool), self.grids[value])

    def tie(self, layout: Layout) -> None:
        """Add channels to layouts until the operator gives the same result on the smaller tensors."""
        for value in (*self.inputs, *self.outputs):
            layout.fill(value)

    def wanted(self, flow: Flow) -> Mask | None:
        """Return the channels of the first output that are alive and needed; see `Flow.wanted`."""
        return flow.wanted(self.out)


@dataclass
class Opaque(Node):
    """An operator that mixes channels in an unknown way, so that all of them must be present."""

    blocks: str = ""

    def __post_init__(self) -> None:
        if not self.blocks:
            self.blocks = f"{self.op.name} at {self.op.where} mixes channels in a way that is not known"


@dataclass
class Source(Node):
    """An operator, such as `torch.zeros`, whose result has no channels of its inputs."""

    zero: bool = False  # the result is zero

    def push(self, flow: Flow) -> None:
        for value in self.outputs:
            flow.alive[value] = np.full(self.grids[value], not self.zero)

    def tie(self, layout: Layout) -> None:
        return


class Alive(Enum):
    """When a channel of the result of an elementwise operator is alive, that is, may be nonzero."""

    ANY = "if any operand is (a sum)"
    ALL = "if all operands are (a product)"
    QUOTIENT = "if the first operand is, or any other is zero"
    FIRST = "if the first operand is (a masked tensor)"
    OTHERS = "if any operand but the first is (torch.where)"
    ALWAYS = "always, because the result is never zero (a sigmoid)"
    NEVER = "never, because the result is always zero"


@dataclass
class Elementwise(Node):
    """An operator that works element by element, with broadcasting."""

    alive_if: Alive = Alive.ANY
    steep: bool = False  # the gradient at zero is infinite or NaN, so no operand may be a removed channel
    poles: tuple[Value, ...] = ()  # operands, such as divisors, for which a zero gives infinity or NaN
    insists: bool = False  # operands in `avoiding` are always needed: a NaN stays NaN behind a closed gate

    def __post_init__(self) -> None:
        if self.steep or (self.poles and self.alive_if is Alive.ALWAYS):
            self.blocks = self.at_zero
        elif self.alive_if is Alive.ALWAYS:
            self.blocks = f"{self.op.name} at {self.op.where} turns a removed channel into a constant"

    @property
    def at_zero(self) -> str:
        """Reason why no operand in `avoiding` may be a removed channel."""
        return f"{self.op.name} at {self.op.where} has no {self.lacks} at zero, the value of a removed channel"

    @property
    def lacks(self) -> str:
        return "gradient" if self.steep else "value"

    @property
    def avoiding(self) -> tuple[Value, ...]:
        """Operands that must not become zero."""
        return self.inputs if self.steep else self.poles

    def ends(self, constant: Value, gone: Collection[Value]) -> bool:
        """Return True if a removed channel, constant in `constant` and zero in `gone`, is zero in the result."""
        first, *others = self.inputs
        if self.alive_if is Alive.FIRST:
            return first is not constant
        if self.alive_if is Alive.QUOTIENT:
            return first in gone and first is not constant
        if self.alive_if is Alive.OTHERS:
            return first is constant and all(v in gone for v in others)
        return self.alive_if is Alive.ALL and self.out in gone

    def push(self, flow: Flow) -> None:
        masks = [flow.alive[v] for v in self.inputs]
        if self.alive_if is Alive.ALWAYS or not masks:
            alive = np.ones((), bool)
        elif self.alive_if is Alive.NEVER:
            alive = np.zeros((), bool)
        elif self.alive_if is Alive.ALL:
            alive = reduce(np.logical_and, masks)
        elif self.alive_if is Alive.FIRST:
            alive = masks[0]
        elif self.alive_if is Alive.QUOTIENT:
            alive = reduce(np.logical_or, [masks[0], *(~m for m in masks[1:])])
        else:
            alive = reduce(np.logical_or, masks[1:] if self.alive_if is Alive.OTHERS else masks)
        for value in self.outputs:
            flow.alive[value] = shrink(alive, self.grids[value])

    def pull(self, flow: Flow) -> None:
        for out in self.outputs:
            if (wanted := flow.wanted(out)) is not None:
                for value in self.inputs:
                    flow.need(value, wanted, self.grids[value])
        for value in self.avoiding if self.insists else ():
            flow.need(value, flow.alive[value], self.grids[value])

    @cached_property
    def _ends(self) -> list[list[End]]:
        """Sets of dimensions that are broadcast to one another, if channels differ along any of them."""
        values = [*self.inputs, *self.outputs]
        rank = max((len(v.shape) for v in values), default=0)
        found = [
            [(v, len(v.shape) - back) for v in values if len(v.shape) >= back and v.shape[-back] > 1]
            for back in range(1, rank + 1)
        ]
        return [ends for ends in found if any(self.grids[v][dim] > 1 for v, dim in ends)]

    def tie(self, layout: Layout) -> None:
        for ends in self._ends:
            layout.tie(ends)


@dataclass
class ChannelMove(Node):
    """An operator that moves channels: each output channel is one input channel, or zero.

    `labels` holds one array of source indices per output, in the shape of its masks: the position of a
    channel in the flattened, concatenated masks of all operands, or -1 for zero.
    """

    operands: tuple[Value, ...]
    labels: tuple[NDArray[np.int64], ...]

    def _flat(self, masks: Sequence[Mask]) -> Mask:
        # The source index -1 selects the last entry, which is False.
        return np.concatenate([*(m.reshape(-1) for m in masks), np.zeros(1, bool)])

    def _split(self, flat: Mask) -> list[tuple[Value, Mask]]:
        grids = [self.grids[v] for v in self.operands]
        pieces = np.split(flat, np.cumsum([math.prod(grid) for grid in grids]))  # the last one is the entry for -1
        return [(v, m.reshape(grid)) for v, m, grid in zip(self.operands, pieces, grids, strict=False)]

    def push(self, flow: Flow) -> None:
        flat = self._flat([flow.alive[v] for v in self.operands])
        for value, labels in zip(self.outputs, self.labels, strict=True):
            flow.alive[value] = flat[labels]

    def pull(self, flow: Flow) -> None:
        flat = self._flat([np.zeros(self.grids[v], bool) for v in self.operands])
        for value, labels in zip(self.outputs, self.labels, strict=True):
            if (wanted := flow.wanted(value)) is not None:
                flat[labels[wanted]] = True
        for value, mask in self._split(flat):
            flow.need(value, mask, self.grids[value])

    def tie(self, layout: Layout) -> None:
        flat = self._flat([layout.joint(v) for v in self.operands])
        for value, labels in zip(self.outputs, self.labels, strict=True):
            layout.grow(value, flat[labels])
        for value, labels in zip(self.outputs, self.labels, strict=True):
            flat[labels[layout.joint(value)]] = True
        for value, mask in self._split(flat):
            layout.grow(value, mask)


@dataclass
class Located(ChannelMove):
    """An operator, such as max pooling, that also returns positions, which are nonzero even for zero input."""

    @property
    def positions(self) -> Value:
        return self.outputs[1]

    def push(self, flow: Flow) -> None:
        super().push(flow)
        flow.alive[self.positions] = np.ones(self.grids[self.positions], bool)


@dataclass
class Sampled(ChannelMove):
    """Sampling of the first operand at positions given by the other operands, which keep all their channels."""

    def pull(self, flow: Flow) -> None:
        super().pull(flow)
        wanted = self.wanted(flow)
        for value in self.operands[1:] if wanted is not None and wanted.any() else ():
            flow.need(value, np.ones(self.grids[value], bool), self.grids[value])

    def tie(self, layout: Layout) -> None:
        super().tie(layout)
        for value in self.operands[1:]:
            layout.fill(value)


@dataclass
class Halves(ChannelMove):
    """A gated linear unit: channel i of the first half times the sigmoid of channel i of the second half."""

    partners: NDArray[np.int64]  # source indices of the channels in the second half

    def pull(self, flow: Flow) -> None:
        super().pull(flow)
        wanted = self.wanted(flow)
        if wanted is not None:
            x = self.operands[0]
            flow.need(x, self._filled(np.zeros(self.grids[x], bool), self.partners[wanted]), self.grids[x])

    def tie(self, layout: Layout) -> None:
        x, out, (labels,) = self.operands[0], self.out, self.labels
        present = layout.joint(x)
        flat = present.reshape(-1)
        pairs = flat[labels] | flat[self.partners] | layout.joint(out)
        layout.grow(out, pairs)
        pairs = layout.joint(out)
        layout.grow(x, self._filled(self._filled(present, labels[pairs]), self.partners[pairs]))

    def _filled(self, mask: Mask, numbers: NDArray[np.int64]) -> Mask:
        flat = mask.reshape(-1).copy()
        flat[numbers] = True
        return flat.reshape(mask.shape)


@dataclass
class Across(Node):
    """An operator, such as a softmax over branches, that mixes all channels along one dimension and no others."""

    over: tuple[int]
    blocks: str

    def pull(self, flow: Flow) -> None:
        x, out = self.inputs[0], self.out
        if out in flow.needed:
            rows = some(flow.needed[out], self.over, keepdims=True)
            flow.need(x, np.broadcast_to(rows, self.grids[x]), self.grids[x])

    def tie(self, layout: Layout) -> None:
        x, out = self.inputs[0], self.out
        for dim in range(len(x.shape)):
            if dim in self.over:
                layout.add(x, dim, None)
            layout.tie([(x, dim), (out, dim)])


@dataclass
class Sum(Node):
    """A sum over dimensions along which channels differ, from which channels of zeros can be omitted."""

    over: tuple[int, ...] = ()

    def push(self, flow: Flow) -> None:
        alive = some(flow.alive[self.inputs[0]], self.over, keepdims=True)
        flow.alive[self.out] = alive.reshape(self.grids[self.out])

    def pull(self, flow: Flow) -> None:
        wanted, x = self.wanted(flow), self.inputs[0]
        if wanted is not None:
            if wanted.ndim < len(x.shape):
                wanted = np.expand_dims(wanted, self.over)
            flow.need(x, np.broadcast_to(wanted, self.grids[x]), self.grids[x])

    def tie(self, layout: Layout) -> None:
        x, out = self.inputs[0], self.out
        if x.roots is not None:  # a stored tensor is not zero in its unneeded channels, so all must be summed
            for dim in self.over:
                layout.add(x, dim, None)
        kept = [d for d in range(len(x.shape)) if d not in self.over]
        places = kept if len(out.shape) == len(x.shape) else range(len(kept))
        for dim, place in zip(kept, places, strict=True):
            layout.tie([(x, dim), (out, place)])


@dataclass
class Boundary(Node):
    """An edge, that is, the input or output of a module, where a gate can be placed and a remap inserted.

    Its two sides `x` and `out` may therefore differ in layout. `layer` names the layer whose filters are gated
    here. `labels` is set for a `Remap` that is already in the network: the source index of every output channel, or
    -1 for zero.
    """

    module: str = field(kw_only=True)
    side: str = field(kw_only=True)  # "in", "out", or "remap"
    layer: str = ""
    labels: NDArray[np.int64] | None = None
    dim: int = 1
    free: bool = True  # False if no remap can be inserted here; both sides then share a layout
    walled: bool = False  # sizes hard-coded in the module apply to its inner side only; no gate is here
    lasting: bool = False  # every call is needed, because each updates the running statistics

    def line(self, value: Value) -> Grid:
        """Return the mask shape of a tensor whose channels differ along the edge's dimension only."""
        return along(self.dim % len(value.shape), value.shape)

    @property
    def x(self) -> Value:
        return self.op.inputs[0]

    def push(self, flow: Flow) -> None:
        alive = flow.alive[self.x]
        if self.labels is not None:
            alive = np.append(shrink(alive, self.line(self.x)), False)[self.labels]
        flow.alive[self.out] = alive

    def wanted(self, flow: Flow) -> Mask | None:
        return flow.alive[self.out] if self.lasting else super().wanted(flow)

    def gate(self, flow: Flow, keep: Mask) -> None:
        """Close the gates of the filters that are not kept."""
        flow.alive[self.out] = flow.alive[self.out] & keep.reshape(self.grids[self.out])

    def pull(self, flow: Flow) -> None:
        wanted = self.wanted(flow)
        if wanted is None:
            return
        if self.labels is not None:
            flat = np.zeros(self.x.shape[self.dim] + 1, bool)
            flat[self.labels[wanted]] = True
            wanted = flat[:-1].reshape(self.line(self.x))
        flow.need(self.x, wanted, self.grids[self.x])

    @cached_property
    def _other_dims(self) -> list[End]:
        """Dimensions, other than the edge's own, along which channels differ."""
        sides = [(v, d) for v in (self.x, self.out) for d, n in enumerate(self.grids[v]) if n > 1]
        return [(v, d) for v, d in sides if d != self.dim % len(v.shape)]

    def tie(self, layout: Layout) -> None:
        if self.free:
            for value, dim in self._other_dims:
                layout.add(value, dim, None)
        else:  # without a remap, both sides are the same tensor
            for dim in range(len(self.x.shape)):
                layout.tie([(self.x, dim), (self.out, dim)])

    def source(self, layout: Layout, alive: Mask) -> list[int]:
        """Return, for each present channel of `out`, its index in the present channels of `x`, or -1 for zero."""
        index = {c: i for i, c in enumerate(layout.indices(self.x, self.dim))}
        size = self.out.shape[self.dim]
        origin = np.arange(size) if self.labels is None else np.broadcast_to(self.labels.reshape(-1), size)
        return [index.get(int(origin[c]), -1) if alive[c] else -1 for c in layout.indices(self.out, self.dim)]


def channel_dim(edges: Sequence[Boundary]) -> int | None:
    """Return the channel dimension of all calls of a module, negative if equal only from the end, else None."""
    if len({edge.dim for edge in edges}) == 1:
        return edges[0].dim
    from_the_end = {edge.dim - len(edge.out.shape) for edge in edges}
    return from_the_end.pop() if len(from_the_end) == 1 else None


def common_dim(edges: Sequence[Boundary]) -> int:
    """Return the `channel_dim` of edges for which it is not None."""
    dim = channel_dim(edges)
    assert dim is not None  # modules without a common dimension have no edges
    return dim

"""Node types of the channel graph: how liveness passes through each operator, and which layouts it constrains.

A tensor's *grid* is its shape with 1 in the dimensions along which channels do not differ. Small boolean arrays
over it say which channels are *alive* (may be non-zero) and *needed* (some output depends on them); the *layout*,
one mask per dimension, says which are present in the extracted network. `push` carries alive forward, `pull` needed
backward, and `tie` grows layouts until the operator itself, run on the smaller tensors, gives the same result. Only
a `Boundary` leaves layouts free, because a remap can be inserted there. Layouts never shrink.
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
Grid = tuple[int, ...]
Grids = dict[Value, Grid]
End = tuple[Value, int]  # a tensor and one of its dimensions


def along(dim: int, shape: Sequence[int]) -> Grid:
    """Return the grid of a tensor whose channels differ along one dimension only.

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
        """Return the channels of a value that are alive and needed; None if no need was recorded."""
        needed = self.needed.get(value)
        return None if needed is None else needed & self.alive[value]

    def need(self, value: Value, mask: Mask, grid: Grid) -> None:
        """Add to the needed channels of a value; `mask` may be larger than its grid (broadcasting)."""
        self.needed[value] = shrink(mask, grid) | self.needed.get(value, False)


class Layout:
    """Channels of every tensor present in the extracted network: a mask per dimension, or `None` for all."""

    def __init__(self, grids: Grids) -> None:
        self.grids = grids
        self.masks: dict[Value, list[Mask | None]] = {}
        self.changed = True  # False once every constraint holds

    def start(self, value: Value, present: Mask | None) -> None:
        """Start with the hull of the given channels: per dimension, every index at which any of them lies."""
        grid = self.grids[value]
        nothing = [np.zeros(n, bool) if n > 1 else None for n in grid]
        self.masks[value] = nothing if present is None else _hull(present, grid)

    def joint(self, value: Value) -> Mask:
        """Return the present channels as a mask over the value's grid."""
        grid = self.grids[value]
        result = np.ones(grid, bool)
        for dim, mask in enumerate(self.masks[value]):
            if mask is not None and grid[dim] > 1:
                result &= mask.reshape(along(dim, grid))
        return result

    def grow(self, value: Value, present: Mask) -> None:
        """Add the hull of the given channels; see `start`."""
        for dim, mask in enumerate(_hull(present, self.grids[value])):
            self.add(value, dim, mask)

    def add(self, value: Value, dim: int, mask: Mask | None) -> None:
        """Add channels along one dimension; `None` adds all."""
        before = self.masks[value][dim]
        if before is None or before is mask:
            return
        grown = np.ones_like(before) if mask is None else before | mask
        if np.count_nonzero(grown) > np.count_nonzero(before):
            self.masks[value][dim] = grown
            self.changed = True

    def tie(self, ends: Sequence[End]) -> None:
        """Make the given dimensions hold the same channels: the union of what each has."""
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
            self.masks[value][dim] = total  # shared, so that the identity check above is enough next time

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
    """`mask.any(axes)`, as an array even if the result is zero-dimensional."""
    return np.asarray(mask.any(axes, keepdims=keepdims))


def shrink(mask: Mask, grid: Grid) -> Mask:
    """Reduce a mask to a grid by `any` along each dimension of size 1, and broadcast along the others."""
    if mask.shape == grid:
        return mask
    extra = mask.ndim - len(grid)
    if extra > 0:
        mask = some(mask, tuple(range(extra)))
    mask = mask.reshape((1,) * -extra + mask.shape)
    axes = tuple(d for d, n in enumerate(grid) if n == 1 and mask.shape[d] > 1)
    return np.broadcast_to(some(mask, axes, keepdims=True) if axes else mask, grid)


def whole_groups(mask: Mask, size: int) -> Mask:
    """Extend a mask over channels to whole groups of `size` consecutive channels."""
    if size == 1:
        return mask
    return np.repeat(mask.reshape(-1, size).any(1), size).reshape(mask.shape)


def equalize_groups(rows: Mask, present: Mask) -> Mask:
    """Fill the rows of the present groups to the count of the fullest row (at least 1), lowest channels first."""
    counts = rows.sum(1)
    missing = np.where(present, max(int(counts.max()), 1) - counts, 0)
    absent = ~rows
    return np.asarray(rows | (absent & (absent.cumsum(1) <= missing[:, None])))


@dataclass
class Node:
    """One operator in the channel graph."""

    op: Op
    grids: Grids = field(repr=False)

    # Why a layer whose channels arrive here cannot lose them, or "" if it can.
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
        """Set the alive channels of the outputs from those of the inputs."""
        for value in self.outputs:
            flow.alive[value] = np.ones(self.grids[value], bool)

    def pull(self, flow: Flow) -> None:
        """Add to the needed channels of the inputs what the outputs need."""
        if self.outputs and not any(flow.needed[v].any() for v in self.outputs if v in flow.needed):
            return
        for value in self.inputs:
            flow.need(value, np.ones(self.grids[value], bool), self.grids[value])

    def tie(self, layout: Layout) -> None:
        """Grow layouts until the operator gives the same result on the small tensors as on the large ones."""
        for value in (*self.inputs, *self.outputs):
            layout.fill(value)

    def wanted(self, flow: Flow) -> Mask | None:
        """Return the channels of the first output that are alive and needed; see `Flow.wanted`."""
        return flow.wanted(self.out)


@dataclass
class Opaque(Node):
    """An operator that mixes channels in an unknown way: all of them must be present."""

    blocks: str = ""

    def __post_init__(self) -> None:
        if not self.blocks:
            self.blocks = f"{self.op.name} at {self.op.where} mixes channels in a way that is not known"


@dataclass
class Source(Node):
    """An operator whose result carries no channels of its inputs, such as `torch.zeros`."""

    zero: bool = False

    def push(self, flow: Flow) -> None:
        for value in self.outputs:
            flow.alive[value] = np.full(self.grids[value], not self.zero)

    def tie(self, layout: Layout) -> None:
        return


class Alive(Enum):
    """When a channel of the result of an elementwise operator is alive, that is, may be non-zero."""

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
    poles: tuple[Value, ...] = ()  # operands, such as divisors, whose zero gives infinity or NaN
    insists: bool = False  # needs `avoiding` even if the result is unused: a NaN stays NaN behind a closed gate

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
        """Return True if an operand that became a constant does not make the result one: others are in `gone`."""
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
        """Dimensions that broadcast together, if channels differ along any of them."""
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

    `labels` holds one array per output, over its grid: the number of the input channel, counted through the grids
    of all operands one after the other, or -1 for zero.
    """

    operands: tuple[Value, ...]
    labels: tuple[NDArray[np.int64], ...]

    def _flat(self, masks: Sequence[Mask]) -> Mask:
        # The last entry is a zero, which the label -1 indexes.
        return np.concatenate([*(m.reshape(-1) for m in masks), np.zeros(1, bool)])

    def _split(self, flat: Mask) -> list[tuple[Value, Mask]]:
        grids = [self.grids[v] for v in self.operands]
        pieces = np.split(flat, np.cumsum([math.prod(grid) for grid in grids]))  # the last one is the zero
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
    """An operator that also returns positions, such as max pooling; they are alive even where the input is zero."""

    @property
    def positions(self) -> Value:
        return self.outputs[1]

    def push(self, flow: Flow) -> None:
        super().push(flow)
        flow.alive[self.positions] = np.ones(self.grids[self.positions], bool)


@dataclass
class Sampled(ChannelMove):
    """Sampling of the first operand at positions given by the others, which must keep all their channels."""

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
    """A gated linear unit: each channel of the first half times the sigmoid of its partner in the second half."""

    partners: NDArray[np.int64]  # numbers of the second half's channels

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
    """A sum over dimensions along which channels differ: leaving out a channel of zeros changes nothing."""

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
    """An edge of a module: a gate can be placed and a remap inserted here, so its two sides may differ in layout.

    `layer` names the layer whose filters are gated here. `labels` is set for a `Remap` that is already in the
    network: the input channel of every output channel, or -1 for zero.
    """

    module: str = field(kw_only=True)
    side: str = field(kw_only=True)  # "in", "out", or "remap"
    layer: str = ""
    labels: NDArray[np.int64] | None = None
    dim: int = 1
    free: bool = True  # False if no remap can be inserted here: both sides share a layout
    walled: bool = False  # sizes hard-coded in the module apply to its inner side only; no gate closes here
    lasting: bool = False  # every call updates the module's running statistics, so each is needed

    def line(self, value: Value) -> Grid:
        """Return the grid of a tensor whose channels differ along the edge's dimension only."""
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
        else:  # both sides are one tensor
            for dim in range(len(self.x.shape)):
                layout.tie([(self.x, dim), (self.out, dim)])

    def source(self, layout: Layout, alive: Mask) -> list[int]:
        """Return, for every present channel after the edge, its index among those before it, or -1 for zero."""
        index = {c: i for i, c in enumerate(layout.indices(self.x, self.dim))}
        size = self.out.shape[self.dim]
        origin = np.arange(size) if self.labels is None else np.broadcast_to(self.labels.reshape(-1), size)
        return [index.get(int(origin[c]), -1) if alive[c] else -1 for c in layout.indices(self.out, self.dim)]


def channel_dim(edges: Sequence[Boundary]) -> int | None:
    """Return the channel dimension of all calls of a module, negative if it agrees from the end only, or None."""
    if len({edge.dim for edge in edges}) == 1:
        return edges[0].dim
    from_the_end = {edge.dim - len(edge.out.shape) for edge in edges}
    return from_the_end.pop() if len(from_the_end) == 1 else None


def common_dim(edges: Sequence[Boundary]) -> int:
    """Return `channel_dim` of edges that have one."""
    dim = channel_dim(edges)
    assert dim is not None  # modules without a common dimension have no edges
    return dim

"""What is known of every tensor, each as a small boolean array that broadcasts to its shape.

A tensor's *grid* is its shape with 1 in the dimensions along which channels do not differ.  Over it stand
*alive* (may this channel be anything but zero?), *needed* (does any output depend on it?) and, one mask per
dimension, the *layout*: which channels are physically there in the extracted network.

The kinds of node a channel graph is made of: how liveness passes through each, and what each ties.

*Alive* is pushed forward and *needed* pulled backward through the nodes.  A node ties the layouts of its
tensors so that the operator itself, run on the smaller tensors, does what it did; only a `Boundary` leaves
them free, because there a remap can be inserted.  Layouts only ever grow.

The edges of modules, as nodes of the channel graph: where gates stand and remaps are put in.

Masks of what is alive enter on one side and leave on the other, without what a gate holds back.  Where an edge is
free, its two sides may be laid out differently, because surgery can put a remap between them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from .records import Op, Value

Mask = NDArray[np.bool_]
Grid = tuple[int, ...]
Grids = dict[Value, Grid]
End = tuple[Value, int]  # a tensor and one of its dimensions


def along(dim: int, shape: Sequence[int]) -> Grid:
    """The grid of a tensor whose channels differ along one dimension alone.

    >>> along(1, (8, 16, 4, 4))
    (1, 16, 1, 1)
    """
    return tuple(n if d == dim else 1 for d, n in enumerate(shape))


@dataclass
class Flow:
    """What is alive and needed under one choice of gates."""

    alive: dict[Value, Mask] = field(default_factory=dict)
    needed: dict[Value, Mask] = field(default_factory=dict)
    reached: set[Value] = field(default_factory=set)  # what is alive and depends on the network's inputs

    def need(self, value: Value, mask: Mask, grid: Grid) -> None:
        """Add to what is needed of a value; `mask` may be larger than the value's grid (broadcasting)."""
        mask = mask if mask.shape == grid else shrink(mask, grid)
        before = self.needed.get(value)
        self.needed[value] = mask if before is None else before | mask


class Layout:
    """Which channels of every tensor are there, one mask per dimension; `None` stands for all of them."""

    def __init__(self, grids: Grids) -> None:
        self.grids = grids
        self.masks: dict[Value, list[Mask | None]] = {}
        self.changed: set[Value] = set()  # what has grown since somebody looked

    def start(self, value: Value, present: Mask) -> None:
        """Begin with the hull of the given channels: the smallest box of whole rows that holds them."""
        self.masks[value] = _hull(present, self.grids[value])

    def start_empty(self, value: Value) -> None:
        """Begin with no channel; large weights are never laid out for this."""
        self.masks[value] = [_nothing(n) if n > 1 else None for n in self.grids[value]]

    def joint(self, value: Value) -> Mask:
        """The channels that are there, over the value's grid."""
        grid = self.grids[value]
        result = np.ones(grid, bool)
        for dim, mask in enumerate(self.masks[value]):
            if mask is not None and grid[dim] > 1:
                result &= mask.reshape(along(dim, grid))
        return result

    def grow(self, value: Value, present: Mask) -> None:
        """Add the hull of the given channels."""
        for dim, mask in enumerate(_hull(present, self.grids[value])):
            self.add(value, dim, mask)

    def add(self, value: Value, dim: int, mask: Mask | None) -> None:
        """Add channels along one dimension; `None` adds all."""
        mine = self.masks[value][dim]
        if mine is None or mine is mask:
            return
        grown = np.ones_like(mine) if mask is None else mine | mask
        if np.count_nonzero(grown) > np.count_nonzero(mine):
            self.masks[value][dim] = grown
            self.changed.add(value)

    def tie(self, ends: Sequence[End]) -> None:
        """Make the given dimensions of the given values hold the same channels."""
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
                self.changed.add(value)
            self.masks[value][dim] = total  # one array for all of them, by which they are known to be tied

    def fill(self, value: Value) -> None:
        """All channels of a value are there."""
        self.fill_other(value, -1)

    def fill_other(self, value: Value, dim: int) -> None:
        """All is there along every dimension but one."""
        for other, mask in enumerate(self.masks[value]):
            if mask is not None and other != dim:
                self.add(value, other, None)

    def sizes(self, value: Value) -> tuple[int, ...]:
        """The shape of the value in the extracted network."""
        masks = self.masks[value]
        return tuple(n if m is None else int(np.count_nonzero(m)) for n, m in zip(value.shape, masks, strict=True))

    def line(self, value: Value, dim: int) -> Mask:
        """The channels that are there along one dimension, as a mask."""
        mask = self.masks[value][dim]
        return np.ones(value.shape[dim], bool) if mask is None else mask

    def indices(self, value: Value, dim: int) -> list[int]:
        """The channels that are there along one dimension."""
        mask = self.masks[value][dim]
        return list(range(value.shape[dim])) if mask is None else np.flatnonzero(mask).tolist()


@cache
def _nothing(size: int) -> Mask:
    return np.broadcast_to(np.False_, (size,))  # which cannot be written to


def _hull(present: Mask, grid: Grid) -> list[Mask | None]:
    present = spread(present, grid)
    if present.size == max(grid, default=1):  # along one dimension at most
        return [present.reshape(n) if n > 1 else None for n in grid]
    axes = range(len(grid))
    return [some(present, tuple(a for a in axes if a != d)) if grid[d] > 1 else None for d in axes]


def some(mask: Mask, axes: int | tuple[int, ...], keepdims: bool = False) -> Mask:
    """Where any element along the axes is set, as an array even when nothing is left to index."""
    return np.asarray(mask.any(axes, keepdims=keepdims))


def shrink(mask: Mask, grid: Grid) -> Mask:
    """Fit a mask to a grid: where that is smaller, a channel is in if any of its elements is."""
    if mask.shape == grid:
        return mask
    extra = mask.ndim - len(grid)
    if extra > 0:
        mask = some(mask, tuple(range(extra)))
    mask = mask.reshape((1,) * -extra + mask.shape)
    axes = tuple(d for d, n in enumerate(grid) if n == 1 and mask.shape[d] > 1)
    return spread(some(mask, axes, keepdims=True) if axes else mask, grid)


def spread(mask: Mask, grid: Grid) -> Mask:
    """A mask over a larger grid; it is not written to, and may be the same array."""
    return mask if mask.shape == grid else np.broadcast_to(mask, grid)


def whole_groups(mask: Mask, size: int) -> Mask:
    """Add to a mask over channels the rest of every group of which one is in."""
    if size == 1:
        return mask
    return np.repeat(mask.reshape(-1, size).any(1), size).reshape(mask.shape)


def level(rows: Mask, there: Mask) -> Mask:
    """Fill the rows of the groups that are there up to the fullest one, lowest channels first."""
    counts = rows.sum(1)
    missing = np.where(there, max(int(counts.max()), 1) - counts, 0)
    absent = ~rows
    return np.asarray(rows | (absent & (absent.cumsum(1) <= missing[:, None])))


@dataclass
class Node:
    """One operator in the channel graph."""

    op: Op
    grids: Grids = field(repr=False)

    # A reason a layer whose channels arrive here cannot lose them, or "" where they can.
    blocks = ""

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.op.inputs

    @cached_property
    def outputs(self) -> list[Value]:
        return [v for v in self.op.outputs if v is not None]

    @property
    def tied(self) -> Sequence[Value]:
        """The tensors whose layouts `tie` looks at; none if it never has anything to add."""
        return (*self.inputs, *self.outputs)

    def push(self, flow: Flow) -> None:
        """Set what is alive of the outputs."""
        for value in self.outputs:
            flow.alive[value] = np.ones(self.grids[value], bool)

    def pull(self, flow: Flow) -> None:
        """Add what is needed of the inputs."""
        if self.outputs and not any(flow.needed[v].any() for v in self.outputs if v in flow.needed):
            return
        for value in self.inputs:
            flow.need(value, np.ones(self.grids[value], bool), self.grids[value])

    def tie(self, layout: Layout) -> None:
        """Grow layouts until the operator does on the small tensors what it did on the large ones."""
        for value in (*self.inputs, *self.outputs):
            layout.fill(value)

    def wanted(self, flow: Flow) -> Mask | None:
        """What is alive and needed of the first output, or None if nothing asks for any of it."""
        out = self.outputs[0]
        needed = flow.needed.get(out)
        if needed is None:
            return None
        return needed & flow.alive[out]


@dataclass
class Opaque(Node):
    """An operator that mixes channels in a way not known: all of them must be there."""

    why: str = ""

    def __post_init__(self) -> None:
        self.blocks = self.why or f"{self.op.name} at {self.op.where} mixes channels in a way that is not known"


@dataclass
class Source(Node):
    """A tensor made from nothing."""

    zero: bool = False

    @property
    def tied(self) -> Sequence[Value]:
        return ()

    def push(self, flow: Flow) -> None:
        for value in self.outputs:
            flow.alive[value] = np.full(self.grids[value], not self.zero)

    def tie(self, layout: Layout) -> None:
        return


@dataclass
class Elementwise(Node):
    """Channel by channel, with broadcasting.

    `zero` says when a result is zero: "any" operand alive keeps it alive (sums), "all" must be (products), only
    the "first" counts, if no other is zero (quotients) or "whatever" the others are (a mask), or only the "rest" (a
    choice), "never" (a sigmoid of zero is a half) or "always".
    """

    zero: str = "any"
    steep: bool = False  # infinitely so at zero: the gradient of a channel that is gone is not a number
    poles: tuple[Value, ...] = ()  # the operands at whose zero the result itself is not a number: divisors
    insists: bool = False  # needs them also where nobody asks: what is no number is none after a closed gate either

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.op.inputs

    def __post_init__(self) -> None:
        if self.zero == "never":
            self.blocks = f"{self.op.name} at {self.op.where} turns a removed channel into a constant"
        if self.steep or (self.poles and self.zero == "never"):
            self.blocks = self.at_zero

    @property
    def at_zero(self) -> str:
        """Why none of the `avoiding` may be a channel that was removed."""
        return f"{self.op.name} at {self.op.where} has no {self.lacks} at zero, where a removed channel is"

    @property
    def lacks(self) -> str:
        return "gradient" if self.steep else "value"

    @property
    def avoiding(self) -> tuple[Value, ...]:
        """The operands that must not become zero."""
        return self.operands if self.steep else self.poles

    def ends(self, constant: Value, gone: Collection[Value]) -> bool:
        """Is the result no constant, because another operand is gone, or decides what is zero?"""
        if self.zero == "whatever":
            return self.operands[0] is not constant
        if self.zero == "first":
            return self.operands[0] in gone and self.operands[0] is not constant
        if self.zero == "rest":
            return self.operands[0] is constant and all(v in gone for v in self.operands[1:])
        return self.zero == "all" and self.outputs[0] in gone

    def push(self, flow: Flow) -> None:
        masks = [flow.alive[v] for v in self.operands]
        if self.zero == "never" or not masks:
            alive = np.ones((), bool)
        elif self.zero == "always":
            alive = np.zeros((), bool)
        elif self.zero == "all":
            alive = reduce(np.logical_and, masks)
        elif self.zero == "whatever":
            alive = masks[0]
        elif self.zero == "first":
            alive = reduce(np.logical_or, [masks[0], *(~m for m in masks[1:])])
        else:
            alive = reduce(np.logical_or, masks[1:] if self.zero == "rest" else masks)
        for value in self.outputs:
            flow.alive[value] = shrink(alive, self.grids[value])

    def pull(self, flow: Flow) -> None:
        for out in self.outputs:
            if out in flow.needed:
                wanted = flow.needed[out] & flow.alive[out]
                for value in self.operands:
                    flow.need(value, wanted, self.grids[value])
        for value in self.avoiding if self.insists else ():
            flow.need(value, flow.alive[value], self.grids[value])

    @cached_property
    def _ends(self) -> list[list[End]]:
        """The dimensions that meet, where channels differ along any of them."""
        values = [*self.operands, *self.outputs]
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
class Map(Node):
    """Channels moved about: each output channel is one input channel, or zero.

    `labels` holds, over the first output's grid, the number of the input channel (counted over the grids of
    all operands, one after the other), or -1 for zero; several outputs have one array each.
    """

    operands: tuple[Value, ...] = ()
    labels: tuple[NDArray[np.int64], ...] = ()

    def _flat(self, masks: Sequence[Mask]) -> Mask:
        # The last entry answers for the label -1: a zero.
        return np.concatenate([*(m.reshape(-1) for m in masks), np.zeros(1, bool)])

    def _split(self, flat: Mask) -> list[tuple[Value, Mask]]:
        found, at = [], 0
        for value in self.operands:
            grid = self.grids[value]
            size = math.prod(grid)
            found.append((value, flat[at : at + size].reshape(grid)))
            at += size
        return found

    def push(self, flow: Flow) -> None:
        flat = self._flat([flow.alive[v] for v in self.operands])
        for value, labels in zip(self.outputs, self.labels, strict=True):
            flow.alive[value] = flat[labels]

    def pull(self, flow: Flow) -> None:
        flat = self._flat([np.zeros(self.grids[v], bool) for v in self.operands])
        for value, labels in zip(self.outputs, self.labels, strict=True):
            if value in flow.needed:
                flat[labels[flow.needed[value] & flow.alive[value]]] = True
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
class Located(Map):
    """The channels of a map, and where in each something was found: a place also where all is zero."""

    @property
    def places(self) -> Value:
        return self.outputs[1]

    def push(self, flow: Flow) -> None:
        super().push(flow)
        flow.alive[self.places] = np.ones(self.grids[self.places], bool)


@dataclass
class Sampled(Map):
    """The channels of the first operand, at places that the others tell: those must be there as they were."""

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
class Halves(Map):
    """Every channel of a first half times a sigmoid of its partner in the second: zero where the first one is."""

    partners: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def pull(self, flow: Flow) -> None:
        super().pull(flow)
        wanted = self.wanted(flow)
        if wanted is not None:
            x = self.operands[0]
            flow.need(x, self._filled(np.zeros(self.grids[x], bool), self.partners[wanted]), self.grids[x])

    def tie(self, layout: Layout) -> None:
        x, out, (labels,) = self.operands[0], self.outputs[0], self.labels
        there = layout.joint(x)
        flat = there.reshape(-1)
        pairs = flat[labels] | flat[self.partners] | layout.joint(out)
        layout.grow(out, pairs)
        pairs = layout.joint(out)
        layout.grow(x, self._filled(self._filled(there, labels[pairs]), self.partners[pairs]))

    def _filled(self, mask: Mask, places: NDArray[np.int64]) -> Mask:
        flat = mask.reshape(-1).copy()
        flat[places] = True
        return flat.reshape(mask.shape)


@dataclass
class Across(Node):
    """All channels along one dimension by all of them, and nothing across the others: a softmax of branches."""

    over: int = 0
    why: str = ""

    def __post_init__(self) -> None:
        self.blocks = self.why

    def pull(self, flow: Flow) -> None:
        x, out = self.inputs[0], self.outputs[0]
        if out in flow.needed:
            rows = some(flow.needed[out], self.over, keepdims=True)
            flow.need(x, np.broadcast_to(rows, self.grids[x]), self.grids[x])

    def tie(self, layout: Layout) -> None:
        x, out = self.inputs[0], self.outputs[0]
        for dim in range(len(x.shape)):
            if dim == self.over:
                layout.add(x, dim, None)
            layout.tie([(x, dim), (out, dim)])


@dataclass
class Sum(Node):
    """A sum over dimensions along which channels differ: a missing channel is missed as little as a zero."""

    over: tuple[int, ...] = ()

    def _aligned(self, mask: Mask) -> Mask:
        """What holds for the output, with the dimensions that are summed over."""
        x, out = self.inputs[0], self.outputs[0]
        return mask if len(out.shape) == len(x.shape) else np.expand_dims(mask, self.over)

    def push(self, flow: Flow) -> None:
        out = self.outputs[0]
        flow.alive[out] = some(flow.alive[self.inputs[0]], self.over, keepdims=True).reshape(self.grids[out])

    def pull(self, flow: Flow) -> None:
        wanted = self.wanted(flow)
        if wanted is not None:
            x = self.inputs[0]
            flow.need(x, np.broadcast_to(self._aligned(wanted), self.grids[x]), self.grids[x])

    def tie(self, layout: Layout) -> None:
        x, out = self.inputs[0], self.outputs[0]
        if x.roots is not None:  # stored numbers are not zero where nobody asks for them
            for dim in self.over:
                layout.add(x, dim, None)
        kept = [d for d in range(len(x.shape)) if d not in self.over]
        places = kept if len(out.shape) == len(x.shape) else range(len(kept))
        for dim, place in zip(kept, places, strict=True):
            layout.tie([(x, dim), (out, place)])


@dataclass
class Boundary(Node):
    """The edge of a module: a gate may stand here, and a remap be inserted, so layouts are free.

    `layer` names the layer whose filters are gated here.  `labels` is set for a remap that is already in
    the network.
    """

    module: str = field(kw_only=True)
    side: str = field(kw_only=True)  # "in", "out", or "remap"
    layer: str = ""
    labels: NDArray[np.int64] | None = None
    dim: int = 1
    free: bool = True  # False: nothing can be inserted here, both sides have one layout
    walled: bool = False  # sizes that the module's own code fixes bind only its inside
    lasting: bool = False  # every call leaves a trace in the module's statistics, so none is ever useless

    def line(self, value: Value) -> Grid:
        """The grid of a tensor here if its channels differ along the edge's dimension alone."""
        return along(self.dim % len(value.shape), value.shape)

    @property
    def x(self) -> Value:
        return self.op.inputs[0]

    @property
    def out(self) -> Value:
        return self.outputs[0]

    def push(self, flow: Flow) -> None:
        alive = flow.alive[self.x]
        if self.labels is not None:
            alive = np.append(shrink(alive, self.line(self.x)), False)[self.labels]
        flow.alive[self.out] = spread(alive, self.grids[self.out])

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

    @property
    def tied(self) -> Sequence[Value]:
        lined = all(math.prod(self.grids[v]) == self.grids[v][self.dim] for v in (self.x, self.out))
        return () if self.free and lined else super().tied

    def tie(self, layout: Layout) -> None:
        if not self.free:  # the same tensor twice
            for dim in range(len(self.x.shape)):
                layout.tie([(self.x, dim), (self.out, dim)])
            return
        for value in (self.x, self.out):
            layout.fill_other(value, self.dim % len(value.shape))

    def source(self, layout: Layout, alive: Mask) -> list[int]:
        """For every channel there after the edge, its place before it, or -1 where it is zero."""
        place = {c: i for i, c in enumerate(layout.indices(self.x, self.dim))}
        size = self.out.shape[self.dim]
        origin = np.arange(size) if self.labels is None else np.broadcast_to(self.labels.reshape(-1), size)
        return [place.get(int(origin[c]), -1) if alive[c] else -1 for c in layout.indices(self.out, self.dim)]


def common_dim(edges: Sequence[Boundary]) -> int | None:
    """The dimension of the channels in all calls of a module, from the first one or, below zero, from the last."""
    if len({edge.dim for edge in edges}) == 1:
        return edges[0].dim
    from_the_end = {edge.dim - len(edge.out.shape) for edge in edges}
    return from_the_end.pop() if len(from_the_end) == 1 else None

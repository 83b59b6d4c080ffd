"""The kinds of node a channel graph is made of: how liveness passes through each, and what each ties.

*Alive* is pushed forward and *needed* pulled backward through the nodes.  A node ties the layouts of its
tensors so that the operator itself, run on the smaller tensors, does what it did; only a `Boundary` leaves
them free, because there a remap can be inserted.  Layouts only ever grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from .masks import Flow, Grid, Grids, Layout, Mask, level, shrink, some, spread, whole_groups
from .trace import Op, Value


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

    def push(self, flow: Flow) -> None:
        for value in self.outputs:
            flow.alive[value] = np.full(self.grids[value], not self.zero)

    def tie(self, layout: Layout) -> None:
        return


@dataclass
class Elementwise(Node):
    """Channel by channel, with broadcasting.

    `zero` says when a result is zero: "any" operand alive keeps it alive (sums), "all" must be (products),
    only the "first" counts (quotients), "never" (a sigmoid of zero is a half) or "always".
    """

    zero: str = "any"

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.op.inputs

    def __post_init__(self) -> None:
        if self.zero == "never":
            self.blocks = f"{self.op.name} at {self.op.where} turns a removed channel into a constant"

    def push(self, flow: Flow) -> None:
        masks = [flow.alive[v] for v in self.operands]
        if self.zero == "never" or not masks:
            alive = np.ones((), bool)
        elif self.zero == "always":
            alive = np.zeros((), bool)
        elif self.zero == "all":
            alive = reduce(np.logical_and, masks)
        elif self.zero == "first":
            alive = reduce(np.logical_or, [masks[0], *(~m for m in masks[1:])])
        else:
            alive = reduce(np.logical_or, masks)
        for value in self.outputs:
            flow.alive[value] = spread(alive, self.grids[value])

    def pull(self, flow: Flow) -> None:
        for out in self.outputs:
            if out in flow.needed:
                wanted = flow.needed[out] & flow.alive[out]
                for value in self.operands:
                    flow.need(value, wanted, self.grids[value])

    def tie(self, layout: Layout) -> None:
        values = [*self.operands, *self.outputs]
        rank = max((len(v.shape) for v in values), default=0)
        for back in range(1, rank + 1):
            ends = [(v, len(v.shape) - back) for v in values if len(v.shape) >= back and v.shape[-back] > 1]
            if len(ends) > 1:
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
            size = int(np.prod(grid))
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
        kept = [d for d in range(len(x.shape)) if d not in self.over]
        places = kept if len(out.shape) == len(x.shape) else range(len(kept))
        for dim, place in zip(kept, places, strict=True):
            layout.tie([(x, dim), (out, place)])


def _need_all(flow: Flow, weights: Sequence[Value | None], grids: Grids) -> None:
    """Weights that depend on the input are needed as any other tensor is."""
    for value in weights:
        if value is not None and value.roots is None:
            flow.need(value, np.ones(grids[value], bool), grids[value])


@dataclass
class Contract(Node):
    """A convolution or a linear layer: every output channel is a sum over the input channels of its group."""

    x: Value = field(kw_only=True)
    weight: Value = field(kw_only=True)  # as stored, also where the operator got it transposed
    bias: Value | None = field(kw_only=True)
    out_axis: int = field(kw_only=True)  # of the stored weight
    in_axis: int = field(kw_only=True)
    groups: int = field(default=1, kw_only=True)
    revives: bool = field(default=False, kw_only=True)  # the bias brings a filter without input back
    idle: Mask | None = field(default=None, kw_only=True)  # filters without input in the user's own network
    layer: str = field(default="", kw_only=True)  # what the graph calls the layer that runs here

    @property
    def out(self) -> Value:
        return self.outputs[0]

    @property
    def filters(self) -> int:
        return self.out.shape[1]

    @property
    def stored(self) -> bool:
        """Is the weight a parameter itself?  Else it is computed, from parameters or even from the input."""
        return self.weight.kind == "state"

    @property
    def transposed(self) -> bool:
        return self.op.name == "aten.convolution" and bool(self.op.args[6])

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.x.shape[1]

    def grouped(self, mask: Mask) -> Mask:
        """A mask over channels as one row per group."""
        return mask.reshape(self.groups, -1)

    def live(self, flow: Flow) -> Mask:
        """Which filters have any live input."""
        alive = shrink(flow.alive[self.x], self._line(self.x)).reshape(-1)
        return np.repeat(self.grouped(alive).any(1), self.filters // self.groups)

    def fed(self, flow: Flow) -> Mask:
        """Which filters have not lost their input (what had none from the start is the user's own constant)."""
        live = self.live(flow)
        return live if self.idle is None else live | self.idle

    def _line(self, value: Value) -> Grid:
        return tuple(n if d == 1 else 1 for d, n in enumerate(value.shape))

    def push(self, flow: Flow) -> None:
        alive = self.live(flow) if self.bias is None else self.fed(flow)
        if self.revives:
            alive = np.ones(self.filters, bool)
        flow.alive[self.out] = alive.reshape(self._line(self.out))

    def pull(self, flow: Flow) -> None:
        wanted = self.wanted(flow)
        if wanted is None:
            return
        rows = np.repeat(self.grouped(wanted.reshape(-1)).any(1), self.x.shape[1] // self.groups)
        flow.need(self.x, rows.reshape(self._line(self.x)), self.grids[self.x])
        _need_all(flow, [self.weight, self.bias], self.grids)

    def tie(self, layout: Layout) -> None:
        sides = [(self.out_axis, self.out), (self.in_axis, self.x)]
        if not self.stored:
            # A computed weight is sliced by slicing what it is made of: by filters, never by inputs, because
            # those are what a filter is normalised over.
            sides = sides[:1] if self.weight.roots and self.weight.shape[self.out_axis] == self.filters else []
            layout.fill_other(self.weight, self.out_axis)
            if not sides:
                for value in (self.weight, self.x, self.out):
                    layout.fill(value)
        layout.fill_other(self.x, 1)
        if self.groups > 1:
            self._tie_groups(layout)
        elif not self.stored:
            layout.fill(self.x)
        if self.bias is not None:
            layout.tie([(self.bias, 0), (self.out, 1)])
        # With groups the stored weight has no axis of all inputs; surgery slices it group by group.
        for axis, value in sides:
            if self.weight.shape[axis] == value.shape[1]:
                layout.tie([(self.weight, axis), (value, 1)])

    def _tie_groups(self, layout: Layout) -> None:
        """The groups that are there have equal numbers of inputs, and equal numbers of filters."""
        sides = [self.grouped(layout.line(v, 1)) for v in (self.x, self.out)]
        there = some(sides[0], 1) | some(sides[1], 1)
        if not self.stored:
            sides[0] = sides[0] | there[:, None]
        for value, rows in zip((self.x, self.out), sides, strict=True):
            layout.add(value, 1, level(rows, there).reshape(-1))


@dataclass
class Norm(Node):
    """Normalisation: every channel by its own statistics or its group's, with a scale and shift of its own."""

    x: Value = field(kw_only=True)
    states: tuple[Value, ...] = field(kw_only=True)
    per_group: int = field(default=1, kw_only=True)  # channels that share statistics
    revives: bool = field(default=True, kw_only=True)  # no gate stands here: a zero comes back as a constant
    idle: Mask | None = field(default=None, kw_only=True)  # zero in the user's own network, a constant after

    @property
    def out(self) -> Value:
        return self.outputs[0]

    def push(self, flow: Flow) -> None:
        for value in self.outputs:
            flow.alive[value] = np.ones(self.grids[value], bool)
        if not self.revives:
            alive = shrink(flow.alive[self.x], self.grids[self.out])
            flow.alive[self.out] = alive if self.idle is None else alive | self.idle

    def pull(self, flow: Flow) -> None:
        wanted = self.wanted(flow)
        if wanted is not None:
            flow.need(self.x, whole_groups(wanted, self.per_group), self.grids[self.x])
            _need_all(flow, self.states, self.grids)

    def tie(self, layout: Layout) -> None:
        layout.fill_other(self.x, 1)
        if self.per_group > 1:
            layout.add(self.x, 1, whole_groups(layout.line(self.x, 1), self.per_group))
        layout.tie([(self.x, 1), (self.out, 1), *((s, 0) for s in self.states)])


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
        rank = len(value.shape)
        return tuple(n if d == self.dim % rank else 1 for d, n in enumerate(value.shape))

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

    def tie(self, layout: Layout) -> None:
        for value in (self.x, self.out):
            layout.fill_other(value, self.dim % len(value.shape))
        if not self.free:
            layout.tie([(self.x, self.dim), (self.out, self.dim)])

    def source(self, layout: Layout, alive: Mask) -> list[int]:
        """For every channel there after the edge, its place before it, or -1 where it is zero."""
        place = {c: i for i, c in enumerate(layout.indices(self.x, self.dim))}
        size = self.out.shape[self.dim]
        origin = np.arange(size) if self.labels is None else np.broadcast_to(self.labels.reshape(-1), size)
        return [place.get(int(origin[c]), -1) if alive[c] else -1 for c in layout.indices(self.out, self.dim)]

"""Operators that multiply: convolutions and matrix products, which end channels and begin others, and norms.

How each of them lets liveness through, what it needs, and which layouts it can run in; see `nodes`.

Which recorded operators are layers and norms, and whose weights they use.

A recorded operator enters; the module that holds its weight leaves, also where the weight is computed or
transposed on its way.  Of every such weight it is known which of its dimensions are filters and inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .nodes import Flow, Grids, Layout, Mask, Node, along, level, shrink, some, whole_groups
from .records import INSTANCE_NORM, Op, Trace, Value


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
    unit: int = field(default=1, kw_only=True)  # filters that the norm behind it looks at together
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

    @property
    def tied(self) -> Sequence[Value]:
        return [v for v in (self.x, self.weight, self.bias, self.out) if v is not None]

    def grouped(self, mask: Mask) -> Mask:
        """A mask over channels as one row per group."""
        return mask.reshape(self.groups, -1)

    def live(self, flow: Flow) -> Mask:
        """Which filters have any live input."""
        return self._by_group(flow.alive[self.x], self.x, self.filters)

    def _by_group(self, mask: Mask, value: Value, count: int) -> Mask:
        """Of `count` channels on the one side: which are in a group that has any of a mask's on the other?"""
        if self.groups == 1:
            return np.full(count, np.count_nonzero(mask) > 0)
        rows = self.grouped(shrink(mask, along(1, value.shape)))
        return np.repeat(rows.any(1), count // self.groups)

    def fed(self, flow: Flow) -> Mask:
        """Which filters are not gone with their input (what had none from the start is the user's own constant).

        One without input is its bias, which those see that share the statistics of a norm with it.
        """
        live = self.live(flow)
        fed = live if self.idle is None else live | self.idle
        return fed if self.bias is None else whole_groups(fed, self.unit)

    def push(self, flow: Flow) -> None:
        alive = self.live(flow) if self.bias is None else self.fed(flow)
        if self.revives:
            alive = np.ones(self.filters, bool)
        flow.alive[self.out] = alive.reshape(self.grids[self.out])

    def pull(self, flow: Flow) -> None:
        wanted = self.wanted(flow)
        if wanted is None:
            return
        read = self._by_group(wanted, self.out, self.x.shape[1])
        flow.need(self.x, read.reshape(along(1, self.x.shape)), self.grids[self.x])
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
class Product(Node):
    """Rows by columns for every sample, as in attention; what is summed over counts where both sides have it."""

    left: Value = field(kw_only=True)
    right: Value = field(kw_only=True)

    @property
    def out(self) -> Value:
        return self.outputs[0]

    def ends(self, value: Value) -> bool:
        """Are channels of this side summed over, and none of them a channel of the result?"""
        rows = self.grids[self.left][1] if value is self.left else 1
        columns = self.grids[self.right][2] if value is self.right else 1
        return rows == columns == 1

    def push(self, flow: Flow) -> None:
        flow.alive[self.out] = _meeting(flow.alive[self.left], flow.alive[self.right])

    def pull(self, flow: Flow) -> None:
        wanted = self.wanted(flow)
        if wanted is not None:
            left, right = (flow.alive[value].transpose(0, 2, 1) for value in (self.left, self.right))
            flow.need(self.left, _meeting(wanted, right), self.grids[self.left])
            flow.need(self.right, _meeting(left, wanted), self.grids[self.right])

    def tie(self, layout: Layout) -> None:
        layout.tie([(self.left, 1), (self.out, 1)])
        layout.tie([(self.right, 2), (self.out, 2)])
        layout.tie([(self.left, 2), (self.right, 1)])


def _meeting(left: Mask, right: Mask) -> Mask:
    """Which entries of a product of matrices have any term; where a side does not vary it stands for all."""
    length = max(left.shape[2], right.shape[1])
    rows = np.broadcast_to(left, (*left.shape[:2], length)).astype(np.float32)
    return np.asarray(rows @ np.broadcast_to(right, (len(right), length, right.shape[2])) > 0)


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


LAYERS = {"aten.convolution": 1, "aten.mm": 1, "aten.addmm": 2}
PRODUCTS = {"aten.mm", "aten.addmm"}
BATCH_NORMS = {f"aten.{name}" for name in ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit")}
GROUP_NORM = "aten.native_group_norm"
_NORMS = BATCH_NORMS | {INSTANCE_NORM, GROUP_NORM}


def owner(op: Op) -> str | None:
    """The module whose weight a layer or norm operator uses."""
    if op.name in LAYERS:
        weight: Value = op.args[LAYERS[op.name]]
        weight = weight.transpose_of or weight
        # What a computed weight is made of is held by the layer itself, or by its parametrisations.
        holders = {root.name.rpartition(".")[0].partition(".parametrizations.")[0] for root in weight.roots or ()}
        return holders.pop() if len(holders) == 1 else None
    if op.name in _NORMS:
        for held in op.args[1:5]:
            if isinstance(held, Value) and held.kind == "state":
                return held.name.rpartition(".")[0]
    return None


def weight_grids(trace: Trace) -> Grids:
    """Of a stored weight, however large, filters and inputs are told apart.

    Of those behind a computed weight only the filters are: whatever normalises a filter does so over its
    inputs, which must therefore all stay.
    """
    grids: Grids = {}
    for op in trace.ops:
        if op.name in LAYERS:
            weight: Value = op.args[LAYERS[op.name]]
            axis = 0
            if weight.transpose_of is not None:
                weight = weight.transpose_of
            elif op.name in PRODUCTS or op.args[6]:
                axis = 1
            if weight.kind == "state":
                grids[weight] = weight.shape
            elif weight.kind == "result":
                for root in weight.roots or ():
                    if root.shape == weight.shape and grids.get(root) != root.shape:
                        grids[root] = along(axis, root.shape)
    return grids

"""Convolutions, linear layers, matrix products and norms: their nodes and the rules that build them.

Each output channel of a layer is a sum over input channels. A weight may be computed (weight norm) or transposed
before the operator reads it; its module and its dimensions of filters and inputs are found in the trace. These are
opaque: products of two activations not computed per sample, and norms that share statistics among all channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..nodes import Flow, Grids, Layout, Mask, Node, Opaque, Source, along, equalize_groups, shrink, whole_groups
from ..records import INSTANCE_NORM, Op, Trace, Value
from .movement import moved
from .pointwise import opaque, zero_kept


def _need_all(flow: Flow, weights: Sequence[Value | None], grids: Grids) -> None:
    """Mark weights that are computed from the network's input as needed, like activations."""
    for value in weights:
        if value is not None and value.roots is None:
            flow.need(value, np.ones(grids[value], bool), grids[value])


@dataclass(kw_only=True)
class LayerNode(Node):
    """A convolution or a linear layer: every output channel is a sum over the input channels of its group."""

    x: Value
    weight: Value  # as stored, even if the operator received its transpose
    bias: Value | None
    out_axis: int  # dimension of the filters in the stored weight
    in_axis: int
    groups: int = 1
    unit: int = 1  # number of filters that share statistics in the norm after it
    revives: bool = False  # a filter with zero input gives its bias, a constant that no gate here closes
    idle: Mask | None = None  # filters with zero input even if all filters are kept
    layer: str = ""  # name of the layer in the graph

    @property
    def filters(self) -> int:
        return self.out.shape[1]

    @property
    def stored(self) -> bool:
        """True if the weight is a parameter or buffer; False if it is computed, even from the network's input."""
        return self.weight.kind == "state"

    @property
    def transposed(self) -> bool:
        return self.op.name == "aten.convolution" and bool(self.op.args[6])

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.x.shape[1]

    def grouped(self, mask: Mask) -> Mask:
        """Reshape a mask over channels to `(groups, channels per group)`."""
        return mask.reshape(self.groups, -1)

    def live(self, flow: Flow) -> Mask:
        """Return a mask of the filters with at least one alive input channel."""
        return self._by_group(flow.alive[self.x], self.x, self.filters)

    def _by_group(self, mask: Mask, value: Value, count: int) -> Mask:
        """Return a mask of the `count` channels on the side opposite to `value` whose group has one in `mask`."""
        if self.groups == 1:
            return np.full(count, mask.any())
        rows = self.grouped(shrink(mask, along(1, value.shape)))
        return np.repeat(rows.any(1), count // self.groups)

    def fed(self, flow: Flow) -> Mask:
        """Return a mask of the filters with alive input or in `idle` (constants of the dense network).

        With a bias, a filter with zero input is a constant in the statistics of the norm after it, so the mask is
        extended to whole groups of `unit` filters.
        """
        fed = self.live(flow) if self.idle is None else self.live(flow) | self.idle
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
            # A computed weight is sliced by slicing its parameters: along filters, never along inputs, because a
            # filter is normalized over its inputs.
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
        # The second dimension of a grouped weight is the inputs per group, so surgery slices it group by group.
        for axis, value in sides:
            if self.weight.shape[axis] == value.shape[1]:
                layout.tie([(self.weight, axis), (value, 1)])

    def _tie_groups(self, layout: Layout) -> None:
        """Add channels until all groups that are kept have equally many inputs and equally many filters."""
        sides = [self.grouped(layout.line(v, 1)) for v in (self.x, self.out)]
        present = np.asarray(sides[0].any(1) | sides[1].any(1))
        if not self.stored:
            sides[0] = sides[0] | present[:, None]
        for value, rows in zip((self.x, self.out), sides, strict=True):
            layout.add(value, 1, equalize_groups(rows, present).reshape(-1))


@dataclass(kw_only=True)
class Product(Node):
    """A batched matrix product of two activations, as in attention.

    An entry of the result is alive if some channel that is summed over for it is alive in both operands.
    """

    left: Value
    right: Value

    def ends(self, value: Value) -> bool:
        """Return True if no channel of this operand is a channel of the result: all are summed over."""
        rows = self.grids[self.left][1] if value is self.left else 1
        columns = self.grids[self.right][2] if value is self.right else 1
        return rows == columns == 1

    def push(self, flow: Flow) -> None:
        flow.alive[self.out] = _matrix_product(flow.alive[self.left], flow.alive[self.right])

    def pull(self, flow: Flow) -> None:
        wanted = self.wanted(flow)
        if wanted is not None:
            left, right = (flow.alive[value].transpose(0, 2, 1) for value in (self.left, self.right))
            flow.need(self.left, _matrix_product(wanted, right), self.grids[self.left])
            flow.need(self.right, _matrix_product(left, wanted), self.grids[self.right])

    def tie(self, layout: Layout) -> None:
        layout.tie([(self.left, 1), (self.out, 1)])
        layout.tie([(self.right, 2), (self.out, 2)])
        layout.tie([(self.left, 2), (self.right, 1)])


def _matrix_product(left: Mask, right: Mask) -> Mask:
    """Return a mask of the entries of a matrix product with a nonzero term; dimensions of size 1 are broadcast."""
    length = max(left.shape[2], right.shape[1])
    rows = np.broadcast_to(left, (*left.shape[:2], length)).astype(np.float32)
    return np.asarray(rows @ np.broadcast_to(right, (len(right), length, right.shape[2])) > 0)


@dataclass(kw_only=True)
class Norm(Node):
    """A norm with statistics per channel or per group of channels, and a scale and shift per channel."""

    x: Value
    states: tuple[Value, ...]
    per_group: int = 1  # number of channels that share statistics
    revives: bool = True  # a channel of zeros becomes a nonzero constant that no gate here closes
    idle: Mask | None = None  # channels with zero input even if all filters are kept

    def push(self, flow: Flow) -> None:
        super().push(flow)
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


def layer_weight(op: Op) -> Value:
    """Return the weight of a layer operator, as stored, even if the operator received its transpose."""
    weight: Value = op.args[LAYERS[op.name]]
    return weight.transpose_of or weight


def weight_owner(op: Op) -> str | None:
    """Return the module whose weight a layer or norm operator uses; None unless there is exactly one."""
    if op.name in LAYERS:
        weight = layer_weight(op)
        # The parameters of a computed weight are held by the layer itself or by its parametrizations.
        holders = {root.name.rpartition(".")[0].partition(".parametrizations.")[0] for root in weight.roots or ()}
        return holders.pop() if len(holders) == 1 else None
    if op.name in _NORMS:
        for held in op.args[1:5]:
            if isinstance(held, Value) and held.kind == "state":
                return held.name.rpartition(".")[0]
    return None


def weight_grids(trace: Trace) -> Grids:
    """Return the grids of all layer weights: the grid of a stored weight, however large, is its shape.

    If a weight is computed, its parameters have grids of 1 except along filters, which are normalized over inputs.
    """
    grids: Grids = {}
    for op in trace.ops:
        if op.name in LAYERS:
            weight = layer_weight(op)
            axis = int(weight in op.args and (op.name in PRODUCTS or op.args[6]))
            if weight.kind == "state":
                grids[weight] = weight.shape
            elif weight.kind == "result":
                for root in weight.roots or ():
                    if root.shape == weight.shape and grids.get(root) != root.shape:
                        grids[root] = along(axis, root.shape)
    return grids


def _layer(
    op: Op, grids: Grids, x: Value, weight: Value, bias: Value | None, axes: tuple[int, int], groups: int = 1
) -> Node:
    (out,) = op.results
    grids[out] = along(1, out.shape)
    out_axis, in_axis = axes
    return LayerNode(
        *(op, grids), x=x, weight=weight, bias=bias, out_axis=out_axis, in_axis=in_axis, groups=groups,
        revives=bias is not None,
    )  # fmt: skip


def convolution(op: Op, grids: Grids) -> Node:
    """Convolutions in one to three dimensions: plain, grouped, depthwise and transposed."""
    x, weight, bias = op.args[:3]
    transposed, groups = op.args[6], op.args[8]
    if len(x.shape) != len(weight.shape):
        return opaque(op, grids)
    return _layer(op, grids, x, weight, bias, (1, 0) if transposed else (0, 1), groups)


def matrix_product(op: Op, grids: Grids) -> Node:
    """Linear layers (`mm`, `addmm`). A product of two activations also mixes samples, so it is opaque."""
    if op.name == "aten.addmm":
        bias, x, weight = op.args[:3]
        if len(bias.shape) != 1 or op.kwargs:
            return opaque(op, grids)
    else:
        bias, (x, weight) = None, op.args[:2]
    if weight.transpose_of is not None and weight.transpose_of.roots:
        return _layer(op, grids, x, weight.transpose_of, bias, (0, 1))
    if weight.roots:
        return _layer(op, grids, x, weight, bias, (1, 0))
    return Opaque(op, grids, f"{op.name} at {op.where} multiplies activations with each other")


def batched_product(op: Op, grids: Grids) -> Node:
    """Batched product of two activations: attention over pixels or channels, bilinear pooling."""
    left, right = op.args[:2]
    if grids[left][0] > 1 or grids[right][0] > 1:
        # The heads are in the batch dimension of one tensor, so all would have to lose the same channels.
        why = "is a matrix product per head, and all heads must keep the same number of channels"
        return Opaque(op, grids, f"{op.name} at {op.where} {why}")
    grids[op.results[0]] = 1, grids[left][1], grids[right][2]
    return Product(op, grids, left=left, right=right)


def transpose(op: Op, grids: Grids) -> Node:
    """Transpose; the node of a linear layer that reads a transposed weight refers to the stored weight itself."""
    stored = op.results[0].transpose_of
    return Source(op, grids) if stored is not None and stored.roots else moved(op, grids)


def batch_norm(op: Op, grids: Grids) -> Node:
    """Batch norm and instance norm, whose effect on channels is the same: both normalize each channel by itself."""
    # With batch statistics a channel of zeros stays zero unless a shift is added.
    return _norm(op, grids, op.args[1:5], revives=isinstance(op.args[2], Value) or not op.args[5])


def _norm(op: Op, grids: Grids, states: Sequence[Any], revives: bool, per_group: int = 1) -> Node:
    op = dataclasses.replace(op, outputs=op.outputs[:1])  # the other outputs are saved for the backward pass
    grids[op.results[0]] = along(1, op.results[0].shape)
    states = tuple(v for v in states if isinstance(v, Value))
    return Norm(op, grids, x=op.args[0], states=states, revives=revives, per_group=per_group)


def weight_norm(op: Op, grids: Grids) -> Node:
    """Weight norm of each filter; opaque if channels also differ along dimensions other than the filters."""
    dim = op.dim(2, 0)
    if any(n > 1 for v in op.args[:2] for d, n in enumerate(grids[v]) if d != dim % len(v.shape)):
        return opaque(op, grids)
    return zero_kept(op, grids)


def group_norm(op: Op, grids: Grids) -> Node:
    """Group norm: channels that share statistics are kept or removed together."""
    per_group = op.args[0].shape[1] // op.args[6]
    if op.args[6] == 1:
        grids[op.results[0]] = along(1, op.results[0].shape)
        return layer_norm(op, grids)
    # A channel of zeros among others is not zero after the mean of the group is subtracted.
    return _norm(op, grids, op.args[1:3], isinstance(op.args[2], Value) or per_group > 1, per_group)


def layer_norm(op: Op, grids: Grids) -> Node:
    """Layer norm: opaque, because all channels share its statistics and removing one would change them."""
    return Opaque(op, grids, f"{op.name} at {op.where} shares its statistics among all channels")

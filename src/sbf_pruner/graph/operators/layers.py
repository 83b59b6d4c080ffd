"""Rules for convolutions, matrix products and normalization.

Products of two activations that are not computed per sample, and norms whose statistics are shared by all
channels, are opaque.
"""

from __future__ import annotations

import dataclasses

from ..layer_nodes import LayerNode, Norm, Product
from ..nodes import Alive, Grids, Node, Opaque, Source, along
from ..records import Op, Value
from .movement import moved
from .pointwise import elementwise, opaque


def _contract(
    op: Op, grids: Grids, x: Value, weight: Value, bias: Value | None, axes: tuple[int, int], groups: int = 1
) -> Node:
    out = op.outputs[0]
    assert out is not None
    grids[out] = along(1, out.shape)
    return LayerNode(
        op,
        grids,
        x=x,
        weight=weight,
        bias=bias,
        out_axis=axes[0],
        in_axis=axes[1],
        groups=groups,
        revives=bias is not None,
    )


def convolution(op: Op, grids: Grids) -> Node:
    """Convolutions in one to three dimensions: plain, grouped, depthwise and transposed."""
    x, weight, bias = op.args[:3]
    transposed, groups = op.args[6], op.args[8]
    if len(x.shape) != len(weight.shape):
        return opaque(op, grids)
    return _contract(op, grids, x, weight, bias, (1, 0) if transposed else (0, 1), groups)


def matrix_product(op: Op, grids: Grids) -> Node:
    """Linear layers (`mm`, `addmm`). A product of two activations also mixes samples, so it is opaque."""
    if op.name == "aten.addmm":
        bias, x, weight = op.args[:3]
        if len(bias.shape) != 1 or op.kwargs:
            return opaque(op, grids)
    else:
        bias, (x, weight) = None, op.args[:2]
    if weight.transpose_of is not None and weight.transpose_of.roots:
        return _contract(op, grids, x, weight.transpose_of, bias, (0, 1))
    if weight.roots:
        return _contract(op, grids, x, weight, bias, (1, 0))
    return Opaque(op, grids, f"{op.name} at {op.where} multiplies activations with each other")


def batched_product(op: Op, grids: Grids) -> Node:
    """Batched product of two activations: attention over pixels or channels, bilinear pooling."""
    left, right, out = *op.args[:2], op.outputs[0]
    assert out is not None
    if grids[left][0] > 1 or grids[right][0] > 1:
        # The heads are in the batch dimension: a tensor is a box, so all would have to lose the same channels.
        why = "is a matrix product per head, and all heads must keep the same number of channels"
        return Opaque(op, grids, f"{op.name} at {op.where} {why}")
    grids[out] = 1, grids[left][1], grids[right][2]
    return Product(op, grids, left=left, right=right)


def transpose(op: Op, grids: Grids) -> Node:
    """Transposes. A linear layer that reads a transposed weight refers to the stored weight itself."""
    out = op.outputs[0]
    if out is not None and out.transpose_of is not None and out.transpose_of.roots:
        return Source(op, grids)
    return moved(op, grids)


def batch_norm(op: Op, grids: Grids) -> Node:
    """Batch norm and instance norm, whose effect on channels is the same: both normalize each channel by itself."""
    x = op.args[0]
    states = tuple(v for v in op.args[1:5] if isinstance(v, Value))
    op = dataclasses.replace(op, outputs=op.outputs[:1])  # the others are saved for the backward pass
    out = op.outputs[0]
    assert out is not None
    grids[out] = along(1, out.shape)
    by_batch = bool(op.args[5])
    shifts = isinstance(op.args[2], Value)
    # With batch statistics a channel of zeros stays zero unless a shift is added.
    return Norm(op, grids, x=x, states=states, revives=shifts or not by_batch)


def weight_norm(op: Op, grids: Grids) -> Node:
    """Weight norm over each filter by itself; opaque if channels differ along other dimensions."""
    value, length = op.args[:2]
    dim = int(op.number(2, "dim", 0) or 0)
    if any(n > 1 for held in (value, length) for d, n in enumerate(grids[held]) if d != dim % len(held.shape)):
        return opaque(op, grids)
    return elementwise(op, grids, Alive.ANY)


def group_norm(op: Op, grids: Grids) -> Node:
    """Group norm: channels that share statistics are kept or removed together."""
    x, groups = op.args[0], op.args[6]
    states = tuple(v for v in op.args[1:3] if isinstance(v, Value))
    op = dataclasses.replace(op, outputs=op.outputs[:1])
    out = op.outputs[0]
    assert out is not None
    grids[out] = along(1, out.shape)
    per_group = x.shape[1] // groups
    if groups == 1:
        return _shared_statistics(op, grids)
    # A channel of zeros among others is not zero after the mean of the group is subtracted.
    shifts = isinstance(op.args[2], Value) or per_group > 1
    return Norm(op, grids, x=x, states=states, revives=shifts, per_group=per_group)


def layer_norm(op: Op, grids: Grids) -> Node:
    """Layer norm: opaque, because all channels share its statistics and removing one would change them."""
    return _shared_statistics(op, grids)


def _shared_statistics(op: Op, grids: Grids) -> Node:
    return Opaque(op, grids, f"{op.name} at {op.where} shares its statistics among all channels")

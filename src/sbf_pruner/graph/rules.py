"""One row per operator: which kind of node it is.

A rule takes the recorded operator and the grids known so far, and returns the node that stands for it; the
grids of its outputs are set on the way.  An operator without a row is opaque: the layers that feed it are
left alone and named.  A row holds for the in-place form too (`relu_` is looked up as `relu`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ..errors import PruningError, nearest
from .masks import Grid, Grids
from .moves import joined, moved, padded, pooled, reduced
from .nodes import Across, Elementwise, Node, Opaque, Source
from .records import STALE, Op, Value
from .weighted import Contract, Norm

Rule = Callable[[Op, Grids], Node]

# A stored tensor larger than this, if it is no layer's weight, is followed along its first dimension only.
_LARGE_STATE = 1 << 22


def build_node(op: Op, grids: Grids) -> Node:
    """The node that stands for an operator; never fails, unknown ones are opaque."""
    for value in op.inputs:
        grids.setdefault(value, _first_grid(value))
    rule = RULES.get(op.name) or RULES.get(op.name.removesuffix("_")) or opaque
    node = rule(op, grids)
    for value in node.outputs:
        grids.setdefault(value, (1,) * len(value.shape))
    return node


def _first_grid(value: Value) -> Grid:
    # The channels of an input are the user's and never removed: no dimension of it varies.
    if value.kind != "state":
        return (1,) * len(value.shape)
    if np.prod(value.shape) <= _LARGE_STATE:
        return value.shape
    return tuple(n if d == 0 else 1 for d, n in enumerate(value.shape))


# -- elementwise ---------------------------------------------------------------------------------------


def _elementwise(op: Op, grids: Grids, zero: str) -> Node:
    try:
        grid = np.broadcast_shapes(*(grids[v] for v in op.inputs))
    except ValueError:
        return opaque(op, grids)
    for value in op.outputs:
        if value is not None:
            if len(grid) != len(value.shape):
                return opaque(op, grids)
            grids[value] = grid
    return Elementwise(op, grids, zero)


def zero_kept(op: Op, grids: Grids) -> Node:
    """f(0) = 0: a dead channel stays dead."""
    return _elementwise(op, grids, "any")


def zero_lost(op: Op, grids: Grids) -> Node:
    """f(0) is not 0: a dead channel becomes a constant."""
    return _elementwise(op, grids, "never")


def zero_made(op: Op, grids: Grids) -> Node:
    """Zeros in the shape of the operand."""
    return _elementwise(op, grids, "always")


def addition(op: Op, grids: Grids) -> Node:
    """A sum is alive where either side is; adding a number other than zero brings dead channels back."""
    if len(op.inputs) == 2 or op.number(1, "other", 0) == 0:
        return _elementwise(op, grids, "any")
    return _elementwise(op, grids, "never")


def product(op: Op, grids: Grids) -> Node:
    """A product is alive where both sides are."""
    return _elementwise(op, grids, "all")


def quotient(op: Op, grids: Grids) -> Node:
    """A quotient is alive where its numerator is."""
    if op.inputs and op.args[0] is op.inputs[0]:
        return _elementwise(op, grids, "first")
    return _elementwise(op, grids, "never")


def clamp(op: Op, grids: Grids) -> Node:
    """A clamp keeps zero when zero lies inside its range."""
    if len(op.inputs) > 1:
        return _elementwise(op, grids, "never")
    low, high = op.number(1, "min", None), op.number(2, "max", None)
    inside = (low is None or low <= 0) and (high is None or high >= 0)
    return _elementwise(op, grids, "any" if inside else "never")


def clamp_min(op: Op, grids: Grids) -> Node:
    """`clamp` with a lower end only."""
    low = op.number(1, "min", 0)
    return _elementwise(op, grids, "any" if low is not None and low <= 0 else "never")


def clamp_max(op: Op, grids: Grids) -> Node:
    """`clamp` with an upper end only."""
    high = op.number(1, "max", 0)
    return _elementwise(op, grids, "any" if high is not None and high >= 0 else "never")


def hardtanh(op: Op, grids: Grids) -> Node:
    """ReLU6 and its kin."""
    low, high = op.number(1, "min_val", -1.0), op.number(2, "max_val", 1.0)
    inside = low is not None and high is not None and low <= 0 <= high
    return _elementwise(op, grids, "any" if inside else "never")


def threshold(op: Op, grids: Grids) -> Node:
    """Zero stays where it lies above the threshold, or is what stands below it."""
    limit, value = op.number(1, "threshold", 0), op.number(2, "value", 0)
    kept = value == 0 or (limit is not None and limit < 0)
    return _elementwise(op, grids, "any" if kept else "never")


def prelu(op: Op, grids: Grids) -> Node:
    """Alive where the map is; the slopes make nothing out of zero."""
    return _elementwise(op, grids, "first")


def power(op: Op, grids: Grids) -> Node:
    """A positive power of zero is zero."""
    exponent = op.number(1, "exponent", None)
    good = len(op.inputs) == 1 and op.args[0] is op.inputs[0] and exponent is not None and exponent > 0
    return _elementwise(op, grids, "any" if good else "never")


def softmax(op: Op, grids: Grids) -> Node:
    """A softmax over a dimension along which channels do not differ is one per channel."""
    x, dim = op.args[0], int(op.args[1])
    if grids[x][dim] == 1:
        return _elementwise(op, grids, "never")
    op = dataclasses.replace(op, outputs=op.outputs[:1])
    out = op.outputs[0]
    assert out is not None
    grids[out] = grids[x]
    return Across(op, grids, dim % len(x.shape), f"{op.name} at {op.where} normalises over the channels")


# -- layers ----------------------------------------------------------------------------------------------


def _line(value: Value) -> Grid:
    return tuple(n if d == 1 else 1 for d, n in enumerate(value.shape))


def _contract(
    op: Op, grids: Grids, x: Value, weight: Value, bias: Value | None, axes: tuple[int, int], groups: int = 1
) -> Node:
    out = op.outputs[0]
    assert out is not None
    grids[out] = _line(out)
    return Contract(
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
    """Plain, grouped, depthwise and transposed convolutions in one to three dimensions."""
    x, weight, bias = op.args[:3]
    transposed, groups = op.args[6], op.args[8]
    if len(x.shape) != len(weight.shape):
        return opaque(op, grids)
    return _contract(op, grids, x, weight, bias, (1, 0) if transposed else (0, 1), groups)


def matrix_product(op: Op, grids: Grids) -> Node:
    """A linear layer; a product of two activations (attention) is opaque."""
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


def transpose(op: Op, grids: Grids) -> Node:
    """The transpose of a stored weight, on its way into a linear layer, is the weight itself."""
    out = op.outputs[0]
    if out is not None and out.transpose_of is not None and out.transpose_of.roots:
        return Source(op, grids)
    return moved(op, grids)


def batch_norm(op: Op, grids: Grids) -> Node:
    """Batch norm, and instance norm (which reaches us as batch norm over a view)."""
    x = op.args[0]
    states = tuple(v for v in op.args[1:5] if isinstance(v, Value))
    op = dataclasses.replace(op, outputs=op.outputs[:1])  # the others are saved for its backward
    out = op.outputs[0]
    assert out is not None
    grids[out] = _line(out)
    by_batch = bool(op.args[5])
    shifts = isinstance(op.args[2], Value)
    # By its own statistics a channel of zeros stays zero, unless a shift is added.
    return Norm(op, grids, x=x, states=states, revives=shifts or not by_batch)


def weight_norm(op: Op, grids: Grids) -> Node:
    """A weight as a direction and a length per filter: each filter by itself."""
    value, length = op.args[:2]
    dim = int(op.number(2, "dim", 0) or 0)
    if any(n > 1 for held in (value, length) for d, n in enumerate(grids[held]) if d != dim % len(held.shape)):
        return opaque(op, grids)
    return _elementwise(op, grids, "any")


def group_norm(op: Op, grids: Grids) -> Node:
    """Group norm: channels that share statistics go together or not at all."""
    x, groups = op.args[0], op.args[6]
    states = tuple(v for v in op.args[1:3] if isinstance(v, Value))
    op = dataclasses.replace(op, outputs=op.outputs[:1])
    out = op.outputs[0]
    assert out is not None
    grids[out] = _line(out)
    per_group = x.shape[1] // groups
    if groups == 1:
        return _shared_statistics(op, grids)
    # A channel of zeros among others is not zero after their mean has been taken off it.
    shifts = isinstance(op.args[2], Value) or per_group > 1
    return Norm(op, grids, x=x, states=states, revives=shifts, per_group=per_group)


def layer_norm(op: Op, grids: Grids) -> Node:
    """Layer norm shares its statistics among all channels, and removal would change them."""
    return _shared_statistics(op, grids)


def _shared_statistics(op: Op, grids: Grids) -> Node:
    return Opaque(op, grids, f"{op.name} at {op.where} shares its statistics among all channels")


# -- the rest ----------------------------------------------------------------------------------------------


def opaque(op: Op, grids: Grids) -> Node:
    """Anything else: all channels must be there."""
    if op.name.startswith(("aten.", "sbf.")):
        return Opaque(op, grids)
    return Opaque(op, grids, f"{op.name} at {op.where} is not known; tell what it does with sbf.register_rule")


def restrided(op: Op, grids: Grids) -> Node:
    """Pooling to one pixel renames strides when the channels lie last; anything else is unknown."""
    x, size, stride = op.args[0], tuple(op.args[1]), tuple(op.args[2])
    same = size == x.shape and len(size) > 2 and stride[:2] == (size[1], 1) and set(size[2:]) == {1}
    return _elementwise(op, grids, "any") if same and len(op.args) == 3 else opaque(op, grids)


def fresh(op: Op, grids: Grids) -> Node:
    """A tensor made from sizes and numbers."""
    return Source(op, grids)


def fresh_zeros(op: Op, grids: Grids) -> Node:
    """A tensor of zeros made from sizes."""
    return Source(op, grids, zero=True)


def _rows(rule: Rule, names: str) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


RULES: dict[str, Rule] = {
    **_rows(convolution, "convolution"),
    **_rows(matrix_product, "mm addmm"),
    **_rows(batch_norm, "native_batch_norm cudnn_batch_norm _native_batch_norm_legit"),
    **_rows(weight_norm, "_weight_norm_interface"),
    **_rows(group_norm, "native_group_norm"),
    **_rows(layer_norm, "native_layer_norm"),
    **_rows(
        zero_kept,
        "relu leaky_relu gelu silu hardswish elu selu celu mish tanh abs neg sqrt sign square sin erf expm1 "
        "log1p floor ceil round trunc hardshrink softshrink nan_to_num rrelu_with_noise "
        "clone alias detach contiguous _to_copy lift_fresh lift_fresh_copy native_dropout maximum minimum",
    ),
    **_rows(zero_lost, "sigmoid hardsigmoid exp softplus cos log log2 log_sigmoid_forward rsqrt reciprocal"),
    **_rows(zero_lost, "rsub eq ne lt le gt ge logical_not"),
    **_rows(zero_made, "zeros_like"),
    **_rows(zero_lost, "ones_like full_like rand_like randn_like"),
    **_rows(addition, "add sub"),
    **_rows(product, "mul"),
    **_rows(quotient, "div"),
    **_rows(clamp, "clamp"),
    **_rows(clamp_min, "clamp_min"),
    **_rows(clamp_max, "clamp_max"),
    **_rows(hardtanh, "hardtanh"),
    **_rows(threshold, "threshold"),
    **_rows(prelu, "_prelu_kernel"),
    **_rows(power, "pow"),
    **_rows(transpose, "t"),
    **_rows(
        moved,
        "view _unsafe_view reshape _reshape_alias transpose permute slice select split split_with_sizes unbind "
        "squeeze unsqueeze expand repeat roll flip pixel_shuffle pixel_unshuffle channel_shuffle index_select "
        "stack narrow",
    ),
    **_rows(joined, "cat"),
    **_rows(restrided, "as_strided_"),
    **_rows(padded, "constant_pad_nd"),
    **_rows(
        pooled,
        "max_pool1d max_pool2d max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_max_pool2d adaptive_max_pool3d "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d "
        "upsample_linear1d upsample_trilinear3d _upsample_nearest_exact2d _upsample_bilinear2d_aa "
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
        "replication_pad3d",
    ),
    **_rows(reduced, "mean sum amax amin max min linalg_vector_norm var std var_mean"),
    **_rows(softmax, "_softmax _log_softmax _safe_softmax"),
    **_rows(fresh, "ones full empty arange linspace rand randn eye scalar_tensor new_ones new_full new_empty"),
    **_rows(fresh_zeros, "zeros new_zeros"),
    STALE: opaque,
}

# The rules a user can name; each says what the operator does to a channel.
NAMED: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (zero_kept, zero_lost, addition, product, quotient, softmax, moved, joined, pooled, reduced)
}


def register_rule(operator: str, rule: str | Rule) -> None:
    """Tell how channels pass through an operator of your own, so that layers around it can be pruned.

    `rule` is a name ("zero_kept": element by element with f(0) = 0; "zero_lost": element by element;
    "addition", "product", "quotient", "softmax", "moved": channels change places; "joined": a concatenation;
    "pooled": pixels change, channels do not; "reduced": a mean or maximum over other dimensions), or a function
    from the recorded operator and the grids known so far to a node, as those in this file are.

    >>> register_rule("shop::soft_step", "zero_kept")
    >>> register_rule("shop::soft_step", "smooth")
    Traceback (most recent call last):
        ...
    sbf_pruner.errors.PruningError: no rule is called 'smooth'; known: zero_kept, ...
    """
    space, _, name = operator.replace("::", ".").partition(".")
    if not (space and name) or "." in name:
        raise PruningError(f"an operator is named namespace::name, like aten::relu, not {operator!r}")
    if space == "aten" and f"aten.{name}" in RULES:
        raise PruningError(f"{operator} has a rule already")
    if isinstance(rule, str) and rule not in NAMED:
        raise PruningError(f"no rule is called {rule!r}; {nearest(rule, NAMED)}")
    RULES[f"{space}.{name}"] = NAMED[rule] if isinstance(rule, str) else rule

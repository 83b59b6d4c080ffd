"""Rule registry: for each ATen operator, the function that builds its node in the channel graph.

A rule takes a recorded operator and the grids known so far (see `nodes`), returns the node of the operator and
sets the grids of its outputs. An operator without a rule is opaque: the layers that feed it are skipped, with
the operator as the reason. In-place forms use the rule of the plain form (`relu_` that of `relu`). The rules are
defined in `pointwise`, `layers` and `movement`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...errors import PruningError, suggestion
from ..nodes import Grid, Grids, Node, Source, along
from ..records import STALE, Op, Value
from .layers import (
    batch_norm,
    batched_product,
    convolution,
    group_norm,
    layer_norm,
    matrix_product,
    transpose,
    weight_norm,
)
from .movement import halved, indexed, joined, moved, padded, pooled, reduced, sampled
from .pointwise import (
    addition,
    choice,
    clamp,
    clamp_max,
    clamp_min,
    comparison,
    empty_result,
    filled,
    hardtanh,
    opaque,
    power,
    prelu,
    product,
    quotient,
    restrided,
    root,
    softmax,
    threshold,
    undefined_at_zero,
    unpooled,
    zero_kept,
    zero_lost,
    zero_made,
)

Rule = Callable[[Op, Grids], Node]

# A stored tensor with more elements than this that is no layer's weight has channels along dimension 0 only.
_LARGE_STATE = 1 << 22


def rule_of(op: Op) -> Rule | None:
    """Return the rule of an operator or of its plain form if it works in place; None if it has none."""
    return RULES.get(op.name) or RULES.get(op.name.removesuffix("_"))


def build_node(op: Op, grids: Grids) -> Node:
    """Build the node of an operator and set the grids of its tensors.

    Operators without a rule, or with an empty result, become opaque. Raises PruningError if a rule that the user
    registered fails; exceptions of built-in rules are bugs and propagate.
    """
    for value in op.inputs:
        grids.setdefault(value, _first_grid(value))
    rule = rule_of(op) or opaque
    try:
        node = rule(op, grids) if not _is_empty(op) else empty_result(op, grids)
    except Exception as error:
        if _is_built_in(op.name):
            raise
        raise PruningError(
            f"the rule that was registered for {op.name} does not fit it at {op.where} ({error}); register another"
        ) from error
    for value in node.outputs:
        grids.setdefault(value, (1,) * len(value.shape))
    return node


def _is_empty(op: Op) -> bool:
    outputs = [value for value in op.outputs if value is not None]
    return bool(outputs) and all(0 in value.shape for value in outputs)


def _first_grid(value: Value) -> Grid:
    # The channels of inputs and constants are never removed, so their grids have no dimension of channels.
    if value.kind != "state":
        return (1,) * len(value.shape)
    if math.prod(value.shape) <= _LARGE_STATE:
        return value.shape
    return along(0, value.shape)


def fresh(op: Op, grids: Grids) -> Node:
    """Build the node of an operator that creates a tensor from sizes and numbers."""
    return Source(op, grids)


def fresh_zeros(op: Op, grids: Grids) -> Node:
    """Build the node of an operator that creates zeros from sizes."""
    return Source(op, grids, zero=True)


def _rows(rule: Rule, names: str) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


RULES: dict[str, Rule] = {
    **_rows(convolution, "convolution"),
    **_rows(matrix_product, "mm addmm"),
    **_rows(batched_product, "bmm"),
    **_rows(batch_norm, "native_batch_norm cudnn_batch_norm _native_batch_norm_legit instance_norm"),
    **_rows(weight_norm, "_weight_norm_interface"),
    **_rows(group_norm, "native_group_norm"),
    **_rows(layer_norm, "native_layer_norm"),
    **_rows(
        zero_kept,
        "relu leaky_relu gelu silu hardswish elu selu celu mish tanh abs neg sign square sin tan asin atan sinh "
        "asinh atanh erf expm1 log1p floor ceil round trunc frac hardshrink softshrink nan_to_num rrelu_with_noise "
        "clone alias detach contiguous _to_copy lift_fresh lift_fresh_copy native_dropout maximum minimum lerp "
        "addcmul",
    ),
    **_rows(zero_lost, "sigmoid hardsigmoid exp softplus cos log_sigmoid_forward"),
    **_rows(undefined_at_zero, "log log2 rsqrt reciprocal"),
    **_rows(comparison, "eq ne lt le gt ge"),
    **_rows(zero_lost, "rsub logical_not"),
    **_rows(zero_made, "zeros_like"),
    **_rows(zero_lost, "ones_like full_like empty_like rand_like randn_like randint_like"),
    **_rows(zero_lost, "bernoulli uniform normal exponential geometric log_normal random"),
    **_rows(addition, "add sub"),
    **_rows(product, "mul"),
    **_rows(quotient, "div fmod remainder"),
    **_rows(clamp, "clamp"),
    **_rows(clamp_min, "clamp_min"),
    **_rows(clamp_max, "clamp_max"),
    **_rows(hardtanh, "hardtanh"),
    **_rows(threshold, "threshold"),
    **_rows(prelu, "_prelu_kernel"),
    **_rows(power, "pow"),
    **_rows(root, "sqrt"),
    **_rows(choice, "where"),
    **_rows(filled, "masked_fill"),
    **_rows(transpose, "t"),
    **_rows(
        moved,
        "view _unsafe_view reshape _reshape_alias transpose permute slice select split split_with_sizes unbind "
        "squeeze unsqueeze expand repeat roll flip pixel_shuffle pixel_unshuffle channel_shuffle index_select "
        "stack narrow",
    ),
    **_rows(indexed, "index"),
    **_rows(halved, "glu"),
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
    **_rows(unpooled, "max_unpool2d max_unpool3d"),
    **_rows(sampled, "grid_sampler_2d grid_sampler_3d"),
    **_rows(reduced, "mean sum amax amin max min linalg_vector_norm var std var_mean"),
    **_rows(softmax, "_softmax _log_softmax _safe_softmax"),
    **_rows(fresh, "ones full empty arange linspace rand randn randint eye scalar_tensor"),
    **_rows(fresh, "new_ones new_full new_empty"),
    **_rows(fresh_zeros, "zeros new_zeros"),
    STALE: opaque,
}

_BUILT_IN = frozenset(RULES)


def _is_built_in(name: str) -> bool:
    return name in _BUILT_IN or name.removesuffix("_") in _BUILT_IN


POINTWISE = frozenset(
    (
        *(
            addition,
            choice,
            clamp,
            clamp_max,
            clamp_min,
            comparison,
            filled,
            hardtanh,
            undefined_at_zero,
            power,
            prelu,
            product,
        ),
        *(quotient, restrided, root, softmax, threshold, unpooled, zero_kept, zero_lost, zero_made),
    )
)
"""Rules of elementwise operators."""

# The rules that `register_rule` accepts by name.
NAMED: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (zero_kept, zero_lost, addition, product, quotient, softmax, moved, joined, pooled, reduced)
}


_PROVIDED = frozenset((*RULES.values(), *NAMED.values()))


def is_custom(rule: Rule) -> bool:
    """Return True if a rule is a function of the user's, not one of this package."""
    return rule not in _PROVIDED


def register_rule(operator: str, rule: str | Rule) -> None:
    """Declare how channels pass through a custom operator, so that the layers around it can be pruned.

    `rule` is one of the names "zero_kept" (elementwise with f(0) = 0), "zero_lost" (elementwise with f(0) != 0),
    "addition", "product", "quotient", "softmax", "moved" (channels change position), "joined" (concatenation),
    "pooled" (pixels change, channels do not) and "reduced" (mean or maximum over other dimensions); or a function
    from the recorded operator and the grids known so far to a node, like those in `pointwise` and `movement`.

    >>> register_rule("shop::soft_step", "zero_kept")
    >>> register_rule("shop::soft_step", "smooth")
    Traceback (most recent call last):
        ...
    sbf_pruner.errors.PruningError: no rule is called 'smooth'; known: zero_kept, ...
    """
    space, _, name = operator.replace("::", ".").partition(".")
    if not (space and name) or "." in name:
        raise PruningError(f"an operator is named namespace::name, like aten::relu, not {operator!r}")
    if _is_built_in(f"{space}.{name}"):
        raise PruningError(f"{operator} has a rule already")
    if isinstance(rule, str) and rule not in NAMED:
        raise PruningError(f"no rule is called {rule!r}; {suggestion(rule, NAMED)}")
    RULES[f"{space}.{name}"] = NAMED[rule] if isinstance(rule, str) else rule

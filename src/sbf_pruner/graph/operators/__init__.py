"""Rule registry: for each ATen operator, the function that builds its node in the channel graph.

A rule takes a recorded operator and the grids known so far, sets the grids of its outputs and returns its node. A
tensor's grid is the shape of the mask over its channels (see `nodes`). An operator without a rule is opaque: the
layers that feed it are skipped, with the operator as the reason. In-place operators use the rule of the plain
operator (`relu_` that of `relu`). The rules are defined in `pointwise`, `layers` and `movement`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ...errors import PruningError, suggestion
from ..nodes import Grid, Grids, Node, Opaque, Source, along
from ..records import STALE, Op, Value
from . import layers, movement, pointwise

Rule = Callable[[Op, Grids], Node]

# A parameter or buffer with more elements than this has channels along dimension 0 only, except layers' weights.
_LARGE_STATE = 1 << 22


def rule_of(op: Op) -> Rule | None:
    """Return the rule of an operator, or of the plain operator if it is in-place; None if there is none."""
    return RULES.get(op.name) or RULES.get(op.name.removesuffix("_"))


def build_node(op: Op, grids: Grids) -> Node:
    """Build the node of an operator and set the grids of its tensors.

    Raise a PruningError if a rule that the user registered fails; exceptions of built-in rules propagate.
    """
    for value in op.inputs:
        grids.setdefault(value, _first_grid(value))
    try:
        if op.results and all(0 in value.shape for value in op.results):  # shows nothing about channels
            why = "returns an empty tensor for the example inputs; give inputs for which it does not"
            node: Node = Opaque(op, grids, f"{op.name} at {op.where} {why}")
        else:
            node = (rule_of(op) or pointwise.opaque)(op, grids)
    except Exception as error:
        if _is_built_in(op.name):
            raise
        raise PruningError(
            f"the rule that was registered for {op.name} does not fit it at {op.where} ({error}); register another"
        ) from error
    for value in node.outputs:
        grids.setdefault(value, (1,) * len(value.shape))
    return node


def _first_grid(value: Value) -> Grid:
    # The channels of inputs and constants are never removed, so their grids have no dimension of channels.
    if value.kind != "state":
        return (1,) * len(value.shape)
    return value.shape if math.prod(value.shape) <= _LARGE_STATE else along(0, value.shape)


fresh: Rule = Source  # creates a tensor from sizes and numbers
fresh_zeros: Rule = partial(Source, zero=True)

# Operators of the `aten` namespace by their rules.
_POINTWISE: dict[Rule, str] = {
    pointwise.zero_kept: (
        "relu leaky_relu gelu silu hardswish elu selu celu mish tanh abs neg sign square sin tan asin atan sinh "
        "asinh atanh erf expm1 log1p floor ceil round trunc frac hardshrink softshrink nan_to_num rrelu_with_noise "
        "clone alias detach contiguous _to_copy lift_fresh lift_fresh_copy native_dropout maximum minimum lerp "
        "addcmul"
    ),
    pointwise.zero_lost: (
        "sigmoid hardsigmoid exp softplus cos log_sigmoid_forward rsub logical_not ones_like full_like empty_like "
        "rand_like randn_like randint_like bernoulli uniform normal exponential geometric log_normal random"
    ),
    pointwise.zero_made: "zeros_like",
    pointwise.undefined_at_zero: "log log2 rsqrt reciprocal",
    pointwise.comparison: "eq ne lt le gt ge",
    pointwise.addition: "add sub",
    pointwise.product: "mul",
    pointwise.quotient: "div fmod remainder",
    pointwise.clamp: "clamp clamp_min clamp_max hardtanh",
    pointwise.threshold: "threshold",
    pointwise.prelu: "_prelu_kernel",
    pointwise.power: "pow",
    pointwise.root: "sqrt",
    pointwise.choice: "where",
    pointwise.filled: "masked_fill",
    pointwise.restrided: "as_strided_",
    pointwise.unpooled: "max_unpool2d max_unpool3d",
    pointwise.softmax: "_softmax _log_softmax _safe_softmax",
}
_OTHERS: dict[Rule, str] = {
    layers.convolution: "convolution",
    layers.matrix_product: "mm addmm",
    layers.batched_product: "bmm",
    layers.batch_norm: "native_batch_norm cudnn_batch_norm _native_batch_norm_legit instance_norm",
    layers.weight_norm: "_weight_norm_interface",
    layers.group_norm: "native_group_norm",
    layers.layer_norm: "native_layer_norm",
    layers.transpose: "t",
    movement.moved: (
        "view _unsafe_view reshape _reshape_alias transpose permute slice select split split_with_sizes unbind "
        "squeeze unsqueeze expand repeat roll flip pixel_shuffle pixel_unshuffle channel_shuffle index_select "
        "stack narrow"
    ),
    movement.indexed: "index",
    movement.halved: "glu",
    movement.joined: "cat",
    movement.padded: "constant_pad_nd",
    movement.pooled: (
        "max_pool1d max_pool2d max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_max_pool2d adaptive_max_pool3d "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d "
        "upsample_linear1d upsample_trilinear3d _upsample_nearest_exact2d _upsample_bilinear2d_aa "
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
        "replication_pad3d"
    ),
    movement.sampled: "grid_sampler_2d grid_sampler_3d",
    movement.reduced: "mean sum amax amin max min linalg_vector_norm var std var_mean",
    fresh: "ones full empty arange linspace rand randn randint eye scalar_tensor new_ones new_full new_empty",
    fresh_zeros: "zeros new_zeros",
}
RULES: dict[str, Rule] = {
    f"aten.{name}": rule for rule, names in (_POINTWISE | _OTHERS).items() for name in names.split()
}
RULES[STALE] = pointwise.opaque
POINTWISE = frozenset(_POINTWISE)

_BUILT_IN = frozenset(RULES)
_PROVIDED = frozenset(RULES.values())


def _is_built_in(name: str) -> bool:
    return name in _BUILT_IN or name.removesuffix("_") in _BUILT_IN


# The rules that `register_rule` accepts by name.
NAMED: dict[str, Rule] = {
    "zero_kept": pointwise.zero_kept,
    "zero_lost": pointwise.zero_lost,
    "addition": pointwise.addition,
    "product": pointwise.product,
    "quotient": pointwise.quotient,
    "softmax": pointwise.softmax,
    "moved": movement.moved,
    "joined": movement.joined,
    "pooled": movement.pooled,
    "reduced": movement.reduced,
}


def is_custom(rule: Rule) -> bool:
    """Return True if a rule is a function of the user's, not one of this package."""
    return rule not in _PROVIDED


def register_rule(operator: str, rule: str | Rule) -> None:
    """Declare how channels pass through a custom operator, so that the layers around it can be pruned.

    `rule` is one of the names "zero_kept" (elementwise with f(0) = 0), "zero_lost" (elementwise with f(0) != 0),
    "addition", "product", "quotient", "softmax", "moved" (channels change position), "joined" (concatenation),
    "pooled" (pixels change, channels do not) and "reduced" (mean or maximum over other dimensions); or a function
    that takes the operator and the grids known so far and returns a node, like those in `pointwise` and `movement`.

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

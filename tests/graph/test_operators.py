"""One row per operator: which channels are alive behind it, and which are needed before it, by hand."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sbf_pruner.errors import PruningError
from sbf_pruner.graph import ChannelMove, Elementwise, Flow, LayerNode, Norm, Opaque, Source, record, trace
from sbf_pruner.graph.operators import NAMED, RULES, build_node, register_rule
from sbf_pruner.plan import Plan
from sbf_pruner.pruner import Pruner
from sbf_pruner.surgery import extract
from zoo import ZOO


class Apply(nn.Module):
    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)
        self.table = nn.Buffer(torch.tensor([3, 0]))
        self.slopes = nn.Parameter(torch.ones(4))

    def forward(self, *inputs):
        takes_module = "m" in inspect.signature(self.function).parameters
        return self.function(self, *inputs) if takes_module else self.function(*inputs)


def run(function, *masks, modules=None, side=6):
    """The nodes of a function of maps whose channels are alive as the masks say, and what flows in them."""
    inputs = tuple(torch.zeros(2, len(mask), side, side) for mask in masks)
    trace = record(Apply(function, **(modules or {})), inputs)
    flow, grids = Flow(), {}
    for value, mask in zip(trace.inputs, masks, strict=True):
        grids[value] = (1, len(mask), 1, 1)
        flow.alive[value] = np.array(mask, bool).reshape(grids[value])
    nodes = []
    for op in trace.ops:
        for value in op.inputs:
            if value.kind in ("state", "constant"):
                flow.alive.setdefault(value, np.ones((), bool))
        node = build_node(op, grids)
        for value in op.inputs:
            flow.alive[value] = np.broadcast_to(flow.alive[value], grids[value])
        node.push(flow)
        nodes.append(node)
    return trace, nodes, flow, grids


def alive(function, *masks, **options):
    trace, _, flow, _ = run(function, *masks, **options)
    return flow.alive[trace.outputs[0]].astype(int).reshape(-1).tolist()


def needed(function, wanted, *masks, **options):
    """Which channels of the inputs are needed if those of the output are wanted that the mask says."""
    trace, nodes, flow, grids = run(function, *masks, **options)
    out = trace.outputs[0]
    flow.need(out, np.array(wanted, bool).reshape(grids[out]), grids[out])
    for node in reversed(nodes):
        node.pull(flow)
    return [flow.needed[v].astype(int).reshape(-1).tolist() if v in flow.needed else None for v in trace.inputs]


A, B = [1, 1, 0, 0], [1, 0, 1, 0]

ALIVE = {
    # Zero stays zero.
    "relu": (lambda x: F.relu(x), [A], A),
    "relu in place": (lambda x: F.relu_(x * 1), [A], A),
    "leaky relu": (lambda x: F.leaky_relu(x), [A], A),
    "gelu, silu, tanh": (lambda x: F.gelu(F.silu(torch.tanh(x))), [A], A),
    "hardswish, elu, mish": (lambda x: F.hardswish(F.elu(F.mish(x))), [A], A),
    "relu6": (lambda x: F.relu6(x), [A], A),
    "dropout": (lambda x: F.dropout(x, 0.5, training=True), [A], A),
    "arc tangent, hyperbolic sine": (lambda x: x.atan().sinh().asinh().frac(), [A], A),
    "remainder": (lambda x: torch.fmod(x, 2.0) + torch.remainder(x, 3.0), [A], A),
    "zero where it is negative": (lambda x: x.masked_fill(x < 0, 0.0), [A], A),
    "zero where another says so": (lambda x, y: x.masked_fill(y > 0, 0), [A, B], A),
    "negation, absolute value": (lambda x: -x.abs(), [A], A),
    "square": (lambda x: x**2, [A], A),
    "prelu": (lambda m, x: F.prelu(x, m.slopes), [A], A),
    "clamp around zero": (lambda x: x.clamp(-1, 1), [A], A),
    "clamp from below": (lambda x: x.clamp_min(0), [A], A),
    "above zero, not zero": (lambda x: (x > 0) * (x != 0), [A], A),
    "threshold below zero": (lambda x: F.threshold(x, -1.0, 5.0), [A], A),
    "threshold to zero": (lambda x: F.threshold(x, 1.0, 0.0), [A], A),
    # Zero comes back as a constant.
    "sigmoid": (lambda x: torch.sigmoid(x), [A], [1, 1, 1, 1]),
    "exponential": (lambda x: x.exp(), [A], [1, 1, 1, 1]),
    "softplus": (lambda x: F.softplus(x), [A], [1, 1, 1, 1]),
    "softmax over pixels": (lambda x: x.softmax(-1), [A], [1, 1, 1, 1]),
    "plus one": (lambda x: x + 1, [A], [1, 1, 1, 1]),
    "one minus": (lambda x: 1 - x, [A], [1, 1, 1, 1]),
    "one over": (lambda x: 1 / x, [A], [1, 1, 1, 1]),
    "at least zero": (lambda x: x >= 0, [A], [1, 1, 1, 1]),
    "as large as another": (lambda x, y: x == y, [A, B], [1, 1, 1, 1]),
    "clamp above zero": (lambda x: x.clamp(1, 2), [A], [1, 1, 1, 1]),
    "threshold to a constant": (lambda x: F.threshold(x, 1.0, 5.0), [A], [1, 1, 1, 1]),
    "a number where it is negative": (lambda x: x.masked_fill(x < 0, 2.0), [A], [1, 1, 1, 1]),
    "power zero": (lambda x: x**0, [A], [1, 1, 1, 1]),
    # Sums, products, quotients.
    "sum": (lambda x, y: x + y, [A, B], [1, 1, 1, 0]),
    "difference": (lambda x, y: x - y, [A, B], [1, 1, 1, 0]),
    "maximum": (lambda x, y: torch.maximum(x, y), [A, B], [1, 1, 1, 0]),
    "product": (lambda x, y: x * y, [A, B], [1, 0, 0, 0]),
    "times a number": (lambda x: 3 * x, [A], A),
    "plus zero": (lambda x: x + 0, [A], A),
    "sum over channels": (lambda x: x.sum(1, keepdim=True), [A], [1]),
    "norm over channels": (lambda x: x.norm(dim=1, keepdim=True), [[0, 0, 0, 0]], [0]),
    "choice": (lambda x, y: torch.where(x > 0, x, y), [A, B], [1, 1, 1, 0]),
    "moving average": (lambda x, y: torch.lerp(x, y, 0.1), [A, B], [1, 1, 1, 0]),
    "sum of branches": (lambda x: x.unflatten(1, (2, 2)).sum(1), [[0, 1, 0, 0]], [0, 1]),
    "padding for a maximum": (lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-float("inf")), 2), [A], A),
    "product with a vector": (lambda x, y: x * y.mean((2, 3), keepdim=True), [A, B], [1, 0, 0, 0]),
    "quotient where both live": (lambda x, y: x / y, [A, [1, 1, 1, 1]], A),
    "nothing over nothing": (lambda x, y: x / y, [A, A], [1, 1, 1, 1]),
    "zeros": (lambda x: x * torch.zeros_like(x), [A], [0, 0, 0, 0]),
    # Channels moved about.
    "concatenation": (lambda x, y: torch.cat([x, y, x], 1), [A, B], A + B + A),
    "chunk": (lambda x: x.chunk(2, 1)[1], [B], [1, 0]),
    "split": (lambda x: x.split([1, 3], 1)[1], [A], [1, 0, 0]),
    "slice": (lambda x: x[:, 1:], [A], [1, 0, 0]),
    "every second": (lambda x: x[:, ::2], [A], [1, 0]),
    "select": (lambda x: x[:, 1][:, None], [A], [1]),
    "flip": (lambda x: x.flip(1), [A], [0, 0, 1, 1]),
    "roll": (lambda x: x.roll(1, 1), [A], [0, 1, 1, 0]),
    "repeat": (lambda x: x.repeat(1, 2, 1, 1), [A], A + A),
    "padding": (lambda x: F.pad(x, (0, 0, 0, 0, 1, 2)), [A], [0, *A, 0, 0]),
    "shuffle": (lambda x: x.view(-1, 2, 2, 6, 6).transpose(1, 2).reshape(x.shape), [A], B),
    "channel shuffle": (lambda x: F.channel_shuffle(x, 2), [A], B),
    "index": (lambda m, x: x[:, m.table], [A], [0, 1]),
    "index written down": (lambda x: x[:, torch.tensor([1, 1, 2])], [A], [1, 1, 0]),
    "gated linear unit": (lambda x: F.glu(x, 1), [[0, 1, 1, 0]], [0, 1]),
    "gated linear unit of pixels": (lambda x: F.glu(x, 2), [A], A),
    "index table": (lambda m, x: x.index_select(1, m.table), [A], [0, 1]),
    "flatten": (lambda x: x.flatten(1), [[1, 0]], [1] * 36 + [0] * 36),
    "stack": (lambda x, y: torch.stack([x, y], 1).flatten(1, 2), [A, B], A + B),
    "pixel unshuffle": (lambda x: F.pixel_unshuffle(x, 2), [[1, 0]], [1, 1, 1, 1, 0, 0, 0, 0]),
    "last dimension": (lambda x: x.permute(0, 2, 3, 1).flip(-1), [A], [0, 0, 1, 1]),
    # Pixels.
    "pooling": (lambda x: F.avg_pool2d(F.max_pool2d(x, 2), 2), [A], A),
    "adaptive pooling": (lambda x: F.adaptive_avg_pool2d(x, 1), [A], A),
    "mean and maximum over pixels": (lambda x: x.mean((2, 3)) + x.amax((2, 3)), [A], A),
    "interpolation": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [A], A),
    "padding of pixels": (lambda x: F.pad(F.pad(x, (1, 1, 1, 1)), (1, 1, 1, 1), mode="reflect"), [A], A),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIVE)
def test_alive(name):
    function, masks, expected = ALIVE[name]
    assert alive(function, *masks) == expected


NEEDED = {
    "activation": (lambda x: F.relu(x), B, [[1, 1, 1, 1]], [B]),
    "sum": (lambda x, y: x + y, B, [[1, 1, 1, 1], [1, 1, 1, 1]], [B, B]),
    "what is dead is not needed": (lambda x, y: x * y, [1, 1, 1, 1], [A, B], [[1, 0, 0, 0], [1, 0, 0, 0]]),
    "concatenation": (lambda x, y: torch.cat([x, y], 1), [1, 0, 0, 1], [[1, 1], [1, 1]], [[1, 0], [0, 1]]),
    "slice": (lambda x: x[:, 1:3], [0, 1], [[1, 1, 1, 1]], [[0, 0, 1, 0]]),
    "flip": (lambda x: x.flip(1), A, [[1, 1, 1, 1]], [[0, 0, 1, 1]]),
    "mean over pixels": (lambda x: x.mean((2, 3)), B, [[1, 1, 1, 1]], [B]),
    "sum of branches": (lambda x: x.unflatten(1, (2, 2)).sum(1), [0, 1], [[1, 1, 1, 1]], [[0, 1, 0, 1]]),
    "softmax of branches": (
        lambda x: x.unflatten(1, (2, 2)).softmax(1).flatten(1, 2),
        [1, 0, 0, 0],
        [[1, 1, 1, 1]],
        [[1, 0, 1, 0]],
    ),
    "gated linear unit": (lambda x: F.glu(x, 1), [1, 0], [[1, 1, 1, 1]], [[1, 0, 1, 0]]),
    "nothing of what is dead": (lambda x: F.glu(x, 1), [1, 1], [[0, 1, 1, 1]], [[0, 1, 0, 1]]),
    "unknown": (lambda x: x.cumsum(1), [1], [[1, 1, 1, 1]], [[1, 1, 1, 1]]),
}


@pytest.mark.parametrize("name", NEEDED)
def test_needed(name):
    function, wanted, masks, expected = NEEDED[name]
    assert needed(function, wanted, *masks) == expected


# -- layers ---------------------------------------------------------------------------------------------


def layer(module):
    return {"modules": {"layer": module}}


def test_a_convolution_lives_if_any_input_does():
    conv = layer(nn.Conv2d(4, 3, 1, bias=False))
    assert alive(lambda m, x: m.layer(x), A, **conv) == [1, 1, 1]
    assert alive(lambda m, x: m.layer(x), [0, 0, 0, 0], **conv) == [0, 0, 0]
    assert needed(lambda m, x: m.layer(x), [0, 1, 0], A, **conv) == [[1, 1, 1, 1]]
    assert needed(lambda m, x: m.layer(x), [0, 0, 0], A, **conv) == [[0, 0, 0, 0]]


def test_a_bias_brings_filters_without_input_back():
    assert alive(lambda m, x: m.layer(x), [0, 0, 0, 0], **layer(nn.Conv2d(4, 3, 1))) == [1, 1, 1]


def test_a_grouped_convolution_lives_group_by_group():
    conv = layer(nn.Conv2d(4, 6, 1, groups=2, bias=False))
    assert alive(lambda m, x: m.layer(x), A, **conv) == [1, 1, 1, 0, 0, 0]
    assert needed(lambda m, x: m.layer(x), [0, 0, 0, 0, 1, 0], [1, 1, 1, 1], **conv) == [[0, 0, 1, 1]]


def test_a_depthwise_convolution_follows_its_input():
    conv = layer(nn.Conv2d(4, 8, 1, groups=4, bias=False))
    assert alive(lambda m, x: m.layer(x), B, **conv) == [1, 1, 0, 0, 1, 1, 0, 0]


def test_a_transposed_convolution_has_its_filters_in_the_second_axis():
    _, nodes, _, _ = run(lambda m, x: m.layer(x), A, **layer(nn.ConvTranspose2d(4, 6, 2, 2, groups=2)))
    (node,) = nodes
    assert isinstance(node, LayerNode)
    assert (node.out_axis, node.in_axis, node.groups, node.filters) == (1, 0, 2, 6)


def test_a_linear_layer_is_a_contraction_of_the_stored_weight():
    modules = {"modules": {"layer": nn.Linear(4, 3)}}
    _, nodes, _, _ = run(lambda m, x: m.layer(x.mean((2, 3))), A, **modules)
    node = nodes[-1]
    assert isinstance(node, LayerNode)
    assert (node.weight.name, node.bias.name, node.out_axis, node.in_axis) == (
        "layer.weight",
        "layer.bias",
        0,
        1,
    )


def test_a_convolution_takes_any_pixel_for_the_channel():
    """Where a learned map was added, channels are alive pixel by pixel."""
    conv = layer(nn.Conv2d(1, 3, 1, bias=False))
    assert alive(lambda m, x: m.layer(F.pixel_shuffle(x, 2)), [0, 0, 1, 0], **conv) == [1, 1, 1]


def test_a_norm_brings_every_channel_back_until_a_gate_stands_there():
    trace, nodes, flow, _ = run(lambda m, x: m.layer(x), A, **layer(nn.BatchNorm2d(4)))
    node = next(n for n in nodes if isinstance(n, Norm))
    assert flow.alive[trace.outputs[0]].all()
    node.revives = False
    node.push(flow)
    assert flow.alive[trace.outputs[0]].reshape(-1).tolist() == [True, True, False, False]
    node.idle = np.array([0, 0, 1, 0], bool).reshape(1, 4, 1, 1)
    node.push(flow)
    assert flow.alive[trace.outputs[0]].reshape(-1).tolist() == [True, True, True, False]


def test_an_instance_norm_without_shift_keeps_zeros():
    assert alive(lambda m, x: m.layer(x), [0, 0, 0, 0], **layer(nn.InstanceNorm2d(4))).count(1) == 0


# -- what is not known ----------------------------------------------------------------------------------

UNKNOWN = "mixes channels in a way that is not known"
REDUCES = "reduces over the channels, whose number would change"
SHARES = "shares its statistics among all channels"

OPAQUE = {
    "cumulative sum": (lambda x: x.cumsum(1), "cumsum", UNKNOWN),
    "mean over channels": (lambda x: x.mean(1), "mean", REDUCES),
    "mean of all": (lambda x: x.mean(), "mean", REDUCES),
    "smallest of all": (lambda x: x.norm(-float("inf")), "linalg_vector_norm", REDUCES),
    "root": (lambda x: x.abs().sqrt(), "sqrt", "has no gradient at zero, the value of a removed channel"),
    "power below one": (lambda x: x.abs() ** 0.5, "pow", "has no gradient at zero, the value of a removed channel"),
    "power below zero": (lambda x: x**-1.5, "pow", "has no value at zero, the value of a removed channel"),
    "one over": (lambda x: 1 / x, "reciprocal", "has no value at zero, the value of a removed channel"),
    "logarithm": (lambda x: x.abs().log(), "log", "has no value at zero, the value of a removed channel"),
    "softmax over channels": (lambda x: x.softmax(1), "_softmax", "normalises over the channels"),
    "group norm": (lambda x: F.group_norm(x, 1), "native_group_norm", SHARES),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[1:]), "native_layer_norm", SHARES),
    "product": (lambda x: x[0, 0] @ x[0, 1].t(), "mm", "multiplies activations with each other"),
    "computed index": (lambda x: x.index_select(1, torch.arange(3)), "index_select", UNKNOWN),
    "padding with a number": (lambda x: F.pad(x, (1, 1), value=2.0), "constant_pad_nd", UNKNOWN),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_unknown_operators_say_why_they_block(name):
    function, operator, reason = OPAQUE[name]
    _, nodes, _, _ = run(function, A)
    node = next(n for n in nodes if n.blocks)
    assert re.fullmatch(rf"aten\.{operator} at test_operators\.py:\d+ {reason}", node.blocks)


# -- reshapes that mix channels with pixels ---------------------------------------------------------------


def halves(x, dim):
    return torch.cat(x.chunk(2, dim)[::-1], dim)


def last(x):
    """Channels behind the pixels."""
    return x.permute(0, 2, 3, 1)


# Of a map of 12 channels and 4x4 pixels: where a channel is afterwards depends on the number of pixels.
MIXING = {
    "no transpose": lambda x: last(x).reshape(x.shape),
    "no transpose, of a part": lambda x: last(x[:, :6]).reshape(-1, 6, 4, 4),
    "no transpose, of tokens": lambda x: x.flatten(2).transpose(1, 2).unflatten(1, (4, 4)).reshape(x.shape),
    "tokens for channels": lambda x: x.flatten(2).reshape(-1, 16, 12).transpose(1, 2).reshape(x.shape),
    "columns for channels": lambda x: last(x).reshape(-1, 4, 12, 4).transpose(1, 2),
    "flattened between": lambda x: last(x).flatten(1).unflatten(1, x.shape[1:]),
    "something between": lambda x: torch.tanh(last(x).flatten(1).clone() * 2).view(x.shape),
    "cut between": lambda x: torch.cat([y.view(-1, 6, 4, 4) for y in last(x).flatten(1).split(96, 1)], 1),
    "cut within a channel": lambda x: halves(x.flatten(1)[:, :40], 1).view(-1, 10, 4, 1).expand(-1, 10, 4, 4),
    "rows of all samples": lambda x: last(x).reshape(-1, 12).view(x.shape),
    "channels as samples": lambda x: last(x).reshape(-1, 1, 4, 4).view(x.shape),
    "behind a pixel shuffle": lambda x: last(F.pixel_shuffle(x, 2)).reshape(-1, 3, 8, 8),
}

# The same at 1x5 pixels, a number that has no factor in common with that of the channels.
UNEVEN = {
    "no transpose": lambda x: last(x).reshape(x.shape),
    "no transpose, of tokens": lambda x: x.flatten(2).transpose(1, 2).reshape(x.shape),
    "flattened between": lambda x: last(x).flatten(1).unflatten(1, x.shape[1:]),
}

# There they come apart as they were joined, or are not joined at all.
APART = {
    "flattened": lambda x: x.flatten(1)[:, :, None, None],
    "flattened, and back": lambda x: torch.tanh(x.flatten(1)).view(x.shape),
    "flattened by pixels, and back": lambda x: last(x).flatten(1).view(-1, 4, 4, 12).permute(0, 3, 1, 2),
    "cut in halves of the channels": lambda x: halves(x.flatten(1), 1).view(x.shape),
    "cut in halves of the pixels": lambda x: halves(last(x).flatten(1), 1).view(-1, 4, 4, 12).permute(0, 3, 1, 2),
    "tokens": lambda x: x.flatten(2).transpose(1, 2).transpose(1, 2).reshape(x.shape),
    "shuffled channels": lambda x: x.view(-1, 3, 4, 4, 4).transpose(1, 2).reshape(x.shape),
    "heads": lambda x: (
        x.view(-1, 3, 4, 16).transpose(2, 3).reshape(-1, 3, 4, 4, 4).transpose(2, 4).reshape(x.shape)
    ),
    "groups as samples": lambda x: halves(x.view(-1, 4, 4, 4), 1).view(x.shape),
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "space to depth": lambda x: x.view(-1, 12, 2, 2, 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(-1, 48, 2, 2),
    "depth to space": lambda x: x.view(-1, 3, 2, 2, 4, 4).permute(0, 1, 4, 2, 5, 3).reshape(-1, 3, 8, 8),
    "windows": lambda x: (
        last(x).view(-1, 2, 2, 2, 2, 12).transpose(2, 3).reshape(-1, 4, 12).transpose(1, 2)[..., None]
    ),
}


def reshaped(function, pixels=(4, 4)):
    """The graph of a network that does this to the channels of its layer `one`."""
    images = torch.zeros(2, 3, *pixels)
    width = function(torch.zeros(2, 12, *pixels)).shape[1]
    layers = {"one": nn.Conv2d(3, 12, 1), "two": nn.Conv2d(width, 2, 1)}
    return trace(Apply(lambda m, x: m.two(function(m.one(x))), **layers), images)


@pytest.mark.parametrize(
    ("function", "pixels"),
    [*((function, (4, 4)) for function in MIXING.values()), *((function, (1, 5)) for function in UNEVEN.values())],
    ids=[*MIXING, *(f"{name}, 1x5" for name in UNEVEN)],
)
def test_a_reshape_that_mixes_channels_with_pixels_leaves_its_layer_alone(function, pixels):
    said = reshaped(function, pixels).skipped["one"]
    assert re.fullmatch(
        r"aten\.\w+ at test_operators\.py:\d+ mixes channels with pixels, differently at every image size", said
    )


@pytest.mark.parametrize("name", APART)
def test_a_reshape_that_keeps_channels_and_pixels_apart_is_followed(name):
    assert "one" in reshaped(APART[name]).layers


def test_an_operator_without_a_row_is_opaque():
    assert "aten.cumsum" not in RULES
    _, nodes, flow, _ = run(lambda x: x.cumsum(2), A)
    assert isinstance(nodes[0], Opaque)
    assert all(flow.alive[v].all() for v in nodes[0].outputs)


def test_kinds():
    def kind(function):
        return type(run(function, A)[1][-1])

    assert kind(lambda x: F.relu(x)) is Elementwise
    assert kind(lambda x: x.flip(1)) is ChannelMove
    assert kind(lambda x: x + torch.ones(6)) is Elementwise
    assert type(run(lambda x: x + torch.ones(6), A)[1][0]) is Source


# -- operators of a user ----------------------------------------------------------------------------------


@pytest.fixture
def squash():
    """An operator nobody knows, and afterwards the table as it was."""
    before = dict(RULES)
    library = torch.library.Library("tests_rules", "DEF")
    library.define("squash(Tensor x) -> Tensor")
    library.impl("squash", lambda x: x / (1 + x.abs()), "CompositeExplicitAutograd")
    yield torch.ops.tests_rules.squash
    RULES.clear()
    RULES.update(before)
    library._destroy()


class Squashed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(i, o, 1) for i, o in ((3, 6), (6, 5), (5, 4)))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.head(self.three(torch.ops.tests_rules.squash(self.two(torch.relu(self.one(x))))))


def test_an_unknown_operator_stops_only_what_touches_it(squash):
    model, inputs = Squashed().double(), torch.rand(2, 3, 4, 4).double()
    graph = trace(model, inputs)
    assert list(graph.layers) == ["one", "three"]
    assert re.fullmatch(
        r"tests_rules\.squash at test_operators\.py:\d+ has no pruning rule; add one with sbf\.register_rule",
        graph.skipped["two"],
    )
    small = extract(model, inputs, Plan({"one": [1, 4], "three": [0]}))
    assert small.two.weight.shape == (5, 2, 1, 1)


def test_a_registered_operator_is_followed(squash):
    register_rule("tests_rules::squash", "zero_kept")
    model, inputs = Squashed().double(), torch.rand(2, 3, 4, 4).double()
    pruner = Pruner(model, inputs)
    pruner.gate(Plan({"two": [0, 3]}))
    small = pruner.extract()
    assert small.three.weight.shape == (4, 2, 1, 1)
    torch.testing.assert_close(small(inputs), model(inputs))


def test_a_rule_can_be_a_function(squash):
    register_rule("tests_rules::squash", lambda op, grids: NAMED["zero_kept"](op, grids))
    assert "two" in trace(Squashed(), torch.rand(2, 3, 4, 4)).layers


@pytest.mark.parametrize(
    ("operator", "rule", "message"),
    [
        ("squash", "zero_kept", "an operator is named namespace::name, like aten::relu, not 'squash'"),
        ("a::b.c", "zero_kept", "an operator is named namespace::name, like aten::relu, not 'a::b.c'"),
        ("aten::relu", "zero_lost", "aten::relu has a rule already"),
        ("aten::relu_", "zero_lost", "aten::relu_ has a rule already"),
        ("tests_rules::squash", "zero_keep", "no rule is called 'zero_keep'; did you mean 'zero_kept'?"),
    ],
)
def test_what_cannot_be_registered(operator, rule, message):
    with pytest.raises(PruningError, match=re.escape(message)):
        register_rule(operator, rule)


def test_a_rule_that_does_not_fit_is_told_and_can_be_replaced(squash):
    register_rule("tests_rules::squash", lambda op, grids: 1 / 0)
    with pytest.raises(
        PruningError, match=r"registered for tests_rules.squash does not fit it at .*division by zero"
    ):
        trace(Squashed(), torch.rand(2, 3, 4, 4))
    register_rule("tests_rules::squash", "zero_kept")
    assert "two" in trace(Squashed(), torch.rand(2, 3, 4, 4)).layers


def test_a_stored_map_does_not_make_channels_of_pixels():
    assert list(trace(*ZOO["StoredMap"]()).layers) == ["stem", "body.0", "out.0"]
    _, nodes, _, grids = run(lambda m, x: x * m.slopes[:, None, None], [1])
    assert grids[nodes[-1].outputs[0]] == (1, 4, 1, 1), "but where nothing else has any, they are the map's own"

"""Random networks and random plans: what must hold for all of them.

A network is drawn as a list of steps, each a kind and three numbers that mean something for any network built
so far, so that whatever Hypothesis tries, and shrinks to, is a valid network.
"""

from __future__ import annotations

import copy
import tempfile
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from cases import (
    assert_equal_networks,
    assert_equal_outputs,
    assert_every_layer_is_in_one_list,
    other_inputs,
    reconnected,
)
from sbf_pruner.graph import ChannelGraph, trace
from sbf_pruner.measurement import measure
from sbf_pruner.plan import Plan
from sbf_pruner.pruner import Pruner
from sbf_pruner.saving import load, save
from sbf_pruner.surgery import extract
from zoo import Standardised, StandardisedByHand, randomise

INPUTS = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Step(NamedTuple):
    kind: str
    a: int  # which tensor
    b: int  # which other tensor
    n: int  # a width, a number of groups, a variant


# -- the networks ------------------------------------------------------------------------------------------


class RandomNet(nn.Module):
    """Runs its steps one after the other; every step adds a tensor to those the next can use."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.program: list[tuple[str, list[int], str, int]] = []
        self.sizes = [(3, 8)]  # channels, pixels along a side
        for step in steps:
            getattr(self, f"_{step.kind}")(step.a % len(self.sizes), step.b % len(self.sizes), step.n)
        self.head = nn.Linear(sum(c for c, _ in self.sizes[-2:]), 3)

    def forward(self, x):
        values = [x]
        for kind, sources, layer, n in self.program:
            values.append(self._run(kind, [values[i] for i in sources], layer, n))
        return self.head(torch.cat([v.mean((2, 3)) for v in values[-2:]], 1))

    def _run(self, kind, xs, layer, n):
        x = xs[0]
        if layer:
            return self.layers[layer](x)
        if kind == "act":
            return (F.relu, F.gelu, torch.tanh, torch.sigmoid, F.hardswish, torch.square)[n](x)
        if kind == "shift":
            return x + 0.5
        if kind == "add":
            return x + xs[1]
        if kind == "mul":
            return x * xs[1]
        if kind == "excite":
            return x * torch.sigmoid(xs[1].mean((2, 3), keepdim=True))
        if kind == "cat":
            return torch.cat(xs, 1)
        if kind == "chunk":
            return x.chunk(2, 1)[n]
        if kind == "slice":
            return x[:, n:]
        if kind == "pad":
            return F.pad(x, (0, 0, 0, 0, n, 1))
        if kind == "flip":
            return x.flip(1)
        if kind == "shuffle":
            batch, channels, height, width = x.shape
            return x.view(batch, n, channels // n, height, width).transpose(1, 2).reshape(x.shape)
        if kind == "fold":
            return x.unflatten(1, (2, -1)).sum(1)
        if kind == "stack":
            return torch.stack(xs, 2).flatten(1, 2)
        if kind == "split":
            return torch.cat(torch.split(x, n, 1)[::-1], 1)
        if kind == "pixels":
            return F.pixel_shuffle(x, 2) if n else F.pixel_unshuffle(x, 2)
        if kind == "up":
            return F.interpolate(x, scale_factor=2)
        return F.max_pool2d(x, 2)

    # -- steps: what they add; one that does not fit the tensors at hand becomes one that does

    def _add_value(self, kind, sources, size, layer="", n=0):
        self.program.append((kind, sources, layer, n))
        self.sizes.append(size)

    def _add_layer(self, source, module, channels, side=None):
        name = f"{len(self.layers)}"
        self.layers[name] = module
        self._add_value("layer", [source], (channels, side or self.sizes[source][1]), name)

    def _conv(self, a, b, n):
        inputs, outputs = self.sizes[a][0], n % 7 + 2
        self._add_layer(a, nn.Conv2d(inputs, outputs, 3, padding=1, bias=n % 2 == 0), outputs)

    def _conv_bn(self, a, b, n):
        inputs, outputs = self.sizes[a][0], n % 7 + 2
        conv = nn.Conv2d(inputs, outputs, 1 + 2 * (n % 2), padding=n % 2, bias=n % 3 == 0)
        self._add_layer(a, nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU()), outputs)

    def _strided(self, a, b, n):
        (inputs, side), outputs = self.sizes[a], n % 7 + 2
        self._add_layer(a, nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), outputs, (side + 1) // 2)

    def _transposed(self, a, b, n):
        (inputs, side), outputs = self.sizes[a], n % 7 + 2
        if side >= 8:
            return self._conv(a, b, n)
        return self._add_layer(a, nn.ConvTranspose2d(inputs, outputs, 2, 2), outputs, 2 * side)

    def _depthwise(self, a, b, n):
        inputs, times = self.sizes[a][0], n % 2 + 1
        conv = nn.Conv2d(inputs, inputs * times, 3, padding=1, groups=inputs, bias=n % 3 == 0)
        self._add_layer(a, conv, inputs * times)

    def _grouped(self, a, b, n):
        inputs, groups = self.sizes[a][0], n % 3 + 2
        if inputs % groups:
            return self._conv(a, b, n)
        outputs = groups * (n % 2 + 1)
        return self._add_layer(a, nn.Conv2d(inputs, outputs, 1, groups=groups, bias=n % 2 == 0), outputs)

    def _bn(self, a, b, n):
        self._add_layer(a, nn.BatchNorm2d(self.sizes[a][0], affine=n % 4 != 0), self.sizes[a][0])

    def _again(self, a, b, n):
        """A layer that was used before, on a tensor it fits."""
        used = [(layer, source, at) for at, (_, (source, *_), layer, _) in enumerate(self.program, 1) if layer]
        fitting = [(layer, at) for layer, source, at in used if self.sizes[source] == self.sizes[a]]
        if not fitting:
            return self._conv_bn(a, b, n)
        layer, at = fitting[n % len(fitting)]
        return self._add_value("layer", [a], self.sizes[at], layer)

    def _act(self, a, b, n):
        self._add_value("act", [a], self.sizes[a], n=n % 6)

    def _shift(self, a, b, n):
        self._add_value("shift", [a], self.sizes[a])

    def _pair(self, kind, a, b):
        fitting = [i for i, size in enumerate(self.sizes) if size == self.sizes[a]]
        self._add_value(kind, [a, fitting[b % len(fitting)]], self.sizes[a])

    def _add(self, a, b, n):
        self._pair("add", a, b)

    def _mul(self, a, b, n):
        self._pair("mul", a, b)

    def _excite(self, a, b, n):
        self._pair("excite", a, b)

    def _residual(self, a, b, n):
        """A branch of its own, added to what it came from."""
        channels, side = self.sizes[a]
        conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self._add_layer(a, nn.Sequential(conv, nn.BatchNorm2d(channels)), channels)
        self._add_value("add", [a, len(self.sizes) - 1], (channels, side))

    def _cat(self, a, b, n):
        fitting = [i for i, size in enumerate(self.sizes) if size[1] == self.sizes[a][1]]
        other = fitting[b % len(fitting)]
        self._add_value("cat", [a, other], (self.sizes[a][0] + self.sizes[other][0], self.sizes[a][1]))

    def _chunk(self, a, b, n):
        channels, side = self.sizes[a]
        if channels % 2:
            return self._slice(a, b, n)
        return self._add_value("chunk", [a], (channels // 2, side), n=n % 2)

    def _slice(self, a, b, n):
        channels, side = self.sizes[a]
        start = n % channels
        self._add_value("slice", [a], (channels - start, side), n=start)

    def _pad(self, a, b, n):
        channels, side = self.sizes[a]
        self._add_value("pad", [a], (channels + n % 3 + 1, side), n=n % 3)

    def _flip(self, a, b, n):
        self._add_value("flip", [a], self.sizes[a])

    def _shuffle(self, a, b, n):
        channels = self.sizes[a][0]
        groups = next(g for g in (2, 3, 5, 7, channels) if channels % g == 0)
        self._add_value("shuffle", [a], self.sizes[a], n=groups)

    def _standardised(self, a, b, n):
        inputs, outputs = self.sizes[a][0], n % 5 + 2
        kind = (Standardised, StandardisedByHand)[n % 2]
        self._add_layer(a, kind(inputs, outputs, 3, padding=1, bias=n % 3 == 0), outputs)

    def _fold(self, a, b, n):
        """Halves that one layer made, added up."""
        channels, side = self.sizes[a]
        if channels % 2:
            return self._split(a, b, n)
        return self._add_value("fold", [a], (channels // 2, side))

    def _stack(self, a, b, n):
        fitting = [i for i, size in enumerate(self.sizes) if size == self.sizes[a]]
        channels, side = self.sizes[a]
        self._add_value("stack", [a, fitting[b % len(fitting)]], (2 * channels, side))

    def _split(self, a, b, n):
        channels, side = self.sizes[a]
        self._add_value("split", [a], (channels, side), n=n % channels + 1)

    def _pixels(self, a, b, n):
        channels, side = self.sizes[a]
        if channels % 4 == 0 and side <= 4:
            return self._add_value("pixels", [a], (channels // 4, 2 * side), n=1)
        if channels <= 4 and side >= 4:
            return self._add_value("pixels", [a], (channels * 4, side // 2), n=0)
        return self._pool(a, b, n)

    def _pool(self, a, b, n):
        channels, side = self.sizes[a]
        if side < 4:
            return self._up(a, b, n)
        return self._add_value("pool", [a], (channels, side // 2))

    def _up(self, a, b, n):
        channels, side = self.sizes[a]
        if side > 8:
            return self._act(a, b, n)
        return self._add_value("up", [a], (channels, 2 * side))


KINDS = [
    *("conv", "conv_bn", "conv_bn", "residual", "residual", "strided", "transposed", "depthwise", "grouped"),
    *("bn", "again", "act", "act", "shift", "add", "mul", "excite", "cat", "chunk", "slice", "pad", "flip"),
    *("shuffle", "pool", "up", "standardised", "fold", "stack", "split", "pixels"),
]
# Tensors are counted from the last: small numbers, to which Hypothesis shrinks, make a chain.
step = st.builds(Step, st.sampled_from(KINDS), st.integers(-3, -1), st.integers(-5, 5), st.integers(0, 11))
steps = st.lists(step, min_size=2, max_size=9).filter(
    lambda s: any("conv" in x.kind or x.kind == "standardised" for x in s)
)
seeds = st.integers(0, 2**16)
ratios = st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9])


def build(drawn: list[Step]) -> nn.Module:
    torch.manual_seed(0)
    return randomise(RandomNet(drawn).double())


def draw_plan(graph: ChannelGraph, ratio: float, seed: int) -> Plan:
    rng = np.random.default_rng(seed)
    masks = {name: rng.random(layer.filters) < ratio for name, layer in graph.layers.items()}
    return Plan.from_masks(reconnected(graph, masks, rng))


def draw_pruner(drawn: list[Step], ratio: float, seed: int) -> Pruner:
    model = build(drawn)
    graph = trace(model, INPUTS)
    assume(graph.layers)
    pruner = Pruner(model, INPUTS, graph=graph)
    pruner.gate(draw_plan(graph, ratio, seed))
    return pruner


def check(examples: int):
    slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=examples, suppress_health_check=slow_is_fine)


# -- what must hold ----------------------------------------------------------------------------------------


def masked_equals_extracted(drawn, ratio, seed):
    pruner = draw_pruner(drawn, ratio, seed)
    small = pruner.extract()
    for training in (False, True):
        assert_equal_networks(pruner, small, training, seed, tolerance=1e-9)
    if (inputs := other_inputs(pruner.model, INPUTS)) is not None:
        assert_equal_outputs(pruner.model, small, inputs, tolerance=1e-9)
    dense, left = measure(pruner.model, INPUTS), measure(small, INPUTS)
    assert left.params <= dense.params
    assert left.macs <= dense.macs


def all_filters_are_the_identity(drawn):
    model = build(drawn)
    graph = trace(model, INPUTS)
    assert_every_layer_is_in_one_list(model, graph)
    assume(graph.layers)
    everything = Plan({name: range(layer.filters) for name, layer in graph.layers.items()})
    small = extract(model, INPUTS, everything, graph)
    other = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(small.eval()(other), model.eval()(other), rtol=0, atol=1e-10)
    if all(value in graph.flow({}).needed for value in graph.grids if value.kind == "result"):
        assert sorted(small.state_dict()) == sorted(model.state_dict()), "helpers where nothing was lost"


def plans_compose(drawn, ratios, seeds):
    first = draw_pruner(drawn, ratios[0], seeds[0])
    middle = first.extract()
    assume(any(isinstance(m, nn.Conv2d) for m in middle.modules()))
    graph = trace(middle, INPUTS)
    assume(graph.layers)
    plan = draw_plan(graph, ratios[1], seeds[1])
    # A depthwise convolution of which one channel is left looks like any other, but not to the first network.
    plan = Plan({name: kept for name, kept in plan.keep.items() if name in first.graph.layers})
    second = Pruner(middle, INPUTS, graph=graph)
    second.gate(plan)
    then = Plan({name: kept for name, kept in second.plan().keep.items() if name in first.graph.layers})
    twice = second.extract()
    once = extract(first.model, INPUTS, first.plan().then(then), first.graph)
    other = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    for training in (False, True):
        found, wanted = (copy.deepcopy(net).train(training)(other) for net in (twice, once))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert measure(twice, INPUTS).params == measure(once, INPUTS).params
    assert measure(twice, INPUTS).macs == measure(once, INPUTS).macs


def settling_is_final(drawn, ratio, seed):
    """A settled plan settles to itself and gives the same network as the plan it came from."""
    pruner = draw_pruner(drawn, ratio, seed)
    settled = pruner.plan()
    pruner.gate(settled)
    assert pruner.plan() == settled
    assert all(set(kept) <= set(range(pruner.graph.layers[n].filters)) for n, kept in settled.keep.items())


def saved_is_loaded(drawn, ratios, seeds):
    """Also where the network was pruned twice."""
    small = draw_pruner(drawn, ratios[0], seeds[0]).extract()
    if any(isinstance(m, nn.Conv2d) for m in small.modules()):
        graph = trace(small, INPUTS)
        small = extract(small, INPUTS, draw_plan(graph, ratios[1], seeds[1]), graph)
    with tempfile.TemporaryDirectory() as folder:
        save(small, folder)
        again = load(folder, lambda: RandomNet(drawn).double())
    other = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    assert torch.equal(again.eval()(other), small.eval()(other))
    assert [p.shape for p in again.parameters()] == [p.shape for p in small.parameters()]


@check(50)
@given(steps, ratios, seeds)
def test_masked_equals_extracted(drawn, ratio, seed):
    masked_equals_extracted(drawn, ratio, seed)


@check(40)
@given(steps)
def test_all_filters_are_the_identity(drawn):
    all_filters_are_the_identity(drawn)


@check(25)
@given(steps, st.tuples(ratios, ratios), st.tuples(seeds, seeds))
def test_plans_compose(drawn, ratios, seeds):
    plans_compose(drawn, ratios, seeds)


@check(40)
@given(steps, ratios, seeds)
def test_settling_is_final(drawn, ratio, seed):
    settling_is_final(drawn, ratio, seed)


@check(12)
@given(steps, st.tuples(ratios, ratios), st.tuples(seeds, seeds))
def test_saving_and_loading_is_the_identity(drawn, ratios, seeds):
    saved_is_loaded(drawn, ratios, seeds)


many_steps = st.lists(step, min_size=2, max_size=20).filter(
    lambda s: any("conv" in x.kind or x.kind == "standardised" for x in s)
)


@pytest.mark.slow
@settings(check(3000), derandomize=False)
@given(many_steps, ratios, seeds)
def test_masked_equals_extracted_often(drawn, ratio, seed):
    masked_equals_extracted(drawn, ratio, seed)


@pytest.mark.slow
@settings(check(1500), derandomize=False)
@given(many_steps, st.tuples(ratios, ratios), st.tuples(seeds, seeds))
def test_plans_compose_often(drawn, ratios, seeds):
    plans_compose(drawn, ratios, seeds)


@pytest.mark.slow
@settings(check(1000), derandomize=False)
@given(many_steps)
def test_all_filters_are_the_identity_often(drawn):
    all_filters_are_the_identity(drawn)

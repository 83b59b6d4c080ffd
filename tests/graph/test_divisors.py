"""A removed channel is zero, and nothing may be divided by it: which layers are left alone, and which are not."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sbf_pruner.errors import PlanError
from sbf_pruner.graph import trace
from sbf_pruner.plan import Plan
from sbf_pruner.pruner import Pruner
from sbf_pruner.surgery import extract

PIXELS = {"dim": (2, 3), "keepdim": True}


class Net(nn.Module):
    """A layer that can be pruned, and two layers that something is done with."""

    def __init__(self, does):
        super().__init__()
        self.stem = nn.Conv2d(3, 5, 3, padding=1)
        self.one, self.two = nn.Conv2d(5, 6, 3, padding=1), nn.Conv2d(5, 6, 3, padding=1)
        self.follows = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.last, self.does = nn.Conv2d(6, 4, 1), does

    def forward(self, x):
        return self.last(self.does(self, F.leaky_relu(self.stem(x))))


def made(does):
    torch.manual_seed(0)
    return Net(does).double(), torch.rand(2, 3, 8, 8).double()


def of_one(function):
    """Something is done with one layer's channels; the other adds what it has."""
    return lambda net, x: function(net.one(x)) + net.two(x)


def assert_numbers(model, inputs, plan):
    """Under the plan the gated network gives numbers, with numbers as gradients, and the small one the same."""
    pruner = Pruner(model, inputs)
    pruner.gate(Plan(plan))
    model.zero_grad()
    outputs = model(inputs)
    outputs.square().sum().backward()
    assert outputs.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(pruner.extract()(inputs), outputs)
    pruner.detach()


BY_ZERO = {
    "sum": (of_one(lambda x: x / x.abs().sum(**PIXELS)), "div"),
    "norm": (of_one(lambda x: x / x.norm(**PIXELS)), "div"),
    "deviation": (of_one(lambda x: x / x.std(**PIXELS)), "div"),
    "root of the variance": (of_one(lambda x: x * x.var(**PIXELS).rsqrt()), "rsqrt"),
    "negative power": (of_one(lambda x: x * x.var(**PIXELS) ** -0.5), "pow"),
    "maximum": (of_one(lambda x: x / x.abs().amax(**PIXELS)), "div"),
    "in place": (of_one(lambda x: (x * 1).div_(x.norm(**PIXELS))), "div_"),
    "rounded": (of_one(lambda x: torch.div(x, x.norm(**PIXELS), rounding_mode="floor")), "div"),
    "one over": (of_one(lambda x: 1 / x), "reciprocal"),
    "times one over": (of_one(lambda x: x * x.reciprocal()), "reciprocal"),
    "logarithm": (of_one(lambda x: x.abs().log()), "log"),
    "times its logarithm": (of_one(lambda x: x * x.abs().log2()), "log2"),
    "how many are not zero": (of_one(lambda x: x / (x != 0).sum(**PIXELS)), "div"),
    "clamped to zero": (of_one(lambda x: x / x.norm(**PIXELS).clamp_min(0)), "div"),
    "one channel for all": (of_one(lambda x: x / x[:, 3:4]), "div"),
    "another layer": (lambda net, x: net.two(x) / net.one(x), "div"),
    "a product": (lambda net, x: net.two(x) / (net.one(x) * 2), "div"),
    "behind a depthwise layer": (lambda net, x: net.two(x) / net.follows(net.one(x)), "div"),
}


@pytest.mark.parametrize("name", BY_ZERO)
def test_a_layer_whose_channels_are_divided_by_is_left_alone(name):
    does, operator = BY_ZERO[name]
    model, inputs = made(does)
    graph = trace(model, inputs)
    reason = rf"aten\.{operator} at test_divisors\.py:\d+ has no value at zero, the value of a removed channel"
    assert re.fullmatch(reason, graph.skipped["one"])
    assert list(graph.layers) == ["stem", "two"]
    assert_numbers(model, inputs, {"stem": [0, 2], "two": [1, 5]})


BY_NO_ZERO = {
    "something added": lambda x: x / (x.norm(**PIXELS) + 1e-6),
    "a map added": lambda x: x / (x.abs() + torch.ones(8, 8, dtype=x.dtype)),
    "clamped": lambda x: x / x.norm(**PIXELS).clamp_min(1e-6),
    "the larger": lambda x: x / torch.maximum(x.std(**PIXELS), torch.tensor(1e-3)),
    "normalised": lambda x: F.normalize(x.flatten(2), dim=2).view_as(x),
    "normalised over channels": lambda x: F.normalize(x, dim=1),
    "over channels": lambda x: x / x.norm(dim=1, keepdim=True),
    "root of the variance": lambda x: x * (x.var(**PIXELS) + 1e-5).rsqrt(),
    "negative power": lambda x: x * (1 + x.square()) ** -0.5,
    "sigmoid": lambda x: x / (1 + (-x).exp()),
    "softsign": F.softsign,
    "softmax": lambda x: x * x.flatten(2).softmax(2).view_as(x),
    "logarithm": lambda x: x * (1 + x.abs()).log(),
    "one instead": lambda x: x / torch.where(x != 0, x, 1.0),
    "a number": lambda x: x / 3,
}


@pytest.mark.parametrize("name", BY_NO_ZERO)
def test_a_divisor_that_is_no_zero_costs_nothing(name):
    model, inputs = made(of_one(BY_NO_ZERO[name]))
    assert list(trace(model, inputs).layers) == ["stem", "one", "two"]
    assert_numbers(model, inputs, {"stem": [0, 2], "one": [1, 2], "two": [1, 5]})


@pytest.mark.parametrize(
    ("function", "lacks"),
    [(lambda x: x / x.norm(**PIXELS), "value"), (lambda x: x.abs().sqrt(), "gradient")],
)
def test_of_the_layers_that_are_added_up_one_has_to_stay(function, lacks):
    model, inputs = made(lambda net, x: function(net.one(x) + net.two(x)))
    graph = trace(model, inputs)
    assert list(graph.layers) == ["stem", "one"]
    assert f"has no {lacks} at zero" in graph.skipped["two"]
    assert_numbers(model, inputs, {"one": []})


def test_a_layer_before_the_one_that_is_divided_by_keeps_a_filter():
    """Without any the other gives zeros; where the network goes on beside it, nothing else would object."""
    model, inputs = made(lambda net, x: net.two(x) / net.one(net.inner(x)).norm(**PIXELS) + x.sum(1, keepdim=True))
    model.inner = nn.Conv2d(5, 5, 1).double()
    assert list(trace(model, inputs).layers) == ["stem", "two", "inner"]
    with pytest.raises(PlanError, match=r"the plan makes an input of aten\.div at test_divisors\.py:\d+ zero"):
        extract(model, inputs, Plan({"inner": []}))
    assert_numbers(model, inputs, {"inner": [3]})
    # Nobody asks for what is divided by where nothing is divided; in the gated network it is, all the same.
    assert_numbers(model, inputs, {"two": []})

"""Networks whose sizes, numbers and constants do not come from widths: they are cut like any other."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbf_pruner import Plan, Pruner, PruningError, extract, trace

SHIFT = torch.linspace(-1, 1, 4, dtype=torch.float64).view(1, 4, 1, 1)


class Held:
    """An object that holds a tensor."""

    def __init__(self) -> None:
        self.tensor = torch.rand(4, 1, 1, dtype=torch.float64)


class Tailed(nn.Module):
    """Two convolutions, and something behind them that depends on more than its input's size."""

    def __init__(self, tail: Callable[[Tailed, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.last, self.head = nn.Conv2d(8, 4, 3), nn.Linear(4, 6)
        self.out = nn.Linear(6, 2)
        self.listed, self.held = [torch.rand(4, 1, 1, dtype=torch.float64)], Held()
        self.tail = (tail,)  # out of reach of nn.Module's own attributes

    def forward(self, x: Tensor) -> Any:
        return self.tail[0](self, self.last(self.norm(self.first(x)).relu()))


def halved(y: Tensor) -> Tensor:
    while float(y.abs().max()) > 1e3:
        y = y / 2
    return y


def scaled(y: Tensor, by: Tensor) -> Tensor:
    return y * by if y.mean() > -1e9 else y  # needs numbers to run


def best(y: Tensor) -> Tensor:
    return y.topk(min(len(y), 1000)).values


def pixels(y: Tensor) -> Tensor:
    return y.permute(0, 2, 3, 1)


TAILS: dict[str, Callable[[Tailed, Tensor], Any]] = {
    "boxes above a threshold": lambda net, y: pixels(y)[y.amax(1) > y.amax(1).median()],
    "boxes above a fixed threshold": lambda net, y: pixels(y)[y.amax(1) > 0.3],
    "layers behind a threshold": lambda net, y: net.out(net.head(pixels(y)[y.amax(1) > 0.3]).relu()),
    "places": lambda net, y: (y, torch.nonzero(y > 0.1)),
    "classes that occur": lambda net, y: (y, torch.unique(y.argmax(1))),
    "the best of some": lambda net, y: best(y[y > 0.1]),
    "a mean over some": lambda net, y: y[y > 0.1].mean(),
    "some of them": lambda net, y: torch.masked_select(y, y > 0.1),
    "divided by its maximum": lambda net, y: y / float(y.abs().max()),
    "several numbers": lambda net, y: y * y.abs().max().item() + y.mean().item(),
    "as many as it says": lambda net, y: y.flatten(1)[:, : int(y.detach().abs().sum())],
    "a way chosen": lambda net, y: y * 2 if y.abs().mean() > 0 else y,
    "a loop": lambda net, y: halved(y),
    "nothing found": lambda net, y: (y, torch.cat([y[y > 1e9], y[y < -1e9]])),
    "nothing to join": lambda net, y: (y, torch.cat([y.new_zeros(0, 4), y.new_zeros(0, 4)])),
    "nothing before something": lambda net, y: (y, torch.cat([y.new_zeros(0), y.flatten()])),
    "a constant of the file": lambda net, y: y - SHIFT,
    "a list of constants": lambda net, y: scaled(y, net.listed[0]),
    "an object's constant": lambda net, y: scaled(y, net.held.tensor),
}


@pytest.mark.parametrize("name", TAILS)
def test_what_depends_on_numbers_is_cut_like_anything_else(name: str) -> None:
    net, x = Tailed(TAILS[name]).double().eval(), torch.rand(2, 3, 9, 9, dtype=torch.float64)
    net.norm.running_var.uniform_(0.01, 0.1)
    for keep in ([0, 1, 2], [1, 4, 5, 7], [6]):
        pruner = Pruner(net, x)
        plan = {"first": keep} | ({"head": [0, 3]} if name == "layers behind a threshold" else {})
        pruner.gate(Plan(plan))
        small = pruner.extract()
        expected, found = (each if isinstance(each, tuple) else (each,) for each in (net(x), small(x)))
        assert small.first.out_channels == len(keep)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
        pruner.detach()


def test_chance_is_the_same_in_every_recording_and_left_as_it_was() -> None:
    net, x = Tailed(lambda net, y: y * random.random()), torch.rand(2, 3, 9, 9)
    random.seed(7)
    expected = random.random()
    random.seed(7)
    assert extract(net, x, Plan({"first": [0, 1]})).first.out_channels == 2
    assert random.random() == expected


def test_what_comes_from_numpy_is_still_refused() -> None:
    net = Tailed(lambda net, y: scaled(y, torch.from_numpy(y.detach().numpy().copy()).mean()))
    with pytest.raises(PruningError, match="not computed by torch operators from the inputs"):
        trace(net, torch.rand(2, 3, 9, 9))


def test_a_way_that_the_cut_network_does_not_go_is_refused_with_the_cause() -> None:
    net, x = Tailed(lambda net, y: y * 2 if y.mean() > 0 else y + 1).eval(), torch.rand(2, 3, 9, 9)
    with torch.no_grad():
        net.last.bias.fill_(0.0)
        net.last.weight.fill_(-1.0)
        net.last.weight[:, 7] = 100.0
    with pytest.raises(PruningError, match=r"move decisions that depend on tensor values out of the forward"):
        extract(net, x, Plan({"first": range(7)}))


def test_a_width_that_decides_is_still_seen() -> None:
    def by_width(net: Tailed, y: Tensor) -> Tensor:
        wide = net.norm(net.first(torch.ones(1, 3, 9, 9)))  # runs with numbers, and reads a width
        return scaled(y, torch.ones(1)) * wide.shape[1]

    net, x = Tailed(by_width), torch.rand(2, 3, 9, 9)
    small = extract(net, x, Plan({"first": [0, 1]}))
    torch.testing.assert_close(small.eval()(x) / 8, gated(net, x) / 8)


def gated(net: nn.Module, x: Tensor) -> Tensor:
    pruner = Pruner(net, x)
    pruner.gate(Plan({"first": [0, 1]}))
    try:
        result: Tensor = net.eval()(x)
        return result
    finally:
        pruner.detach()

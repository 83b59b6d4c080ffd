"""Forwards that look at a width where no channel is meant: for pixels, settings, modules, or in training alone.

What is cut from them computes what the gated network does, or the cut is refused; it is never silently another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import assert_equal_networks
from sbf_pruner import Plan, Pruner, PruningError
from zoo import randomise

IMAGE = torch.rand(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PLANS = ([0, 1, 2, 5, 6], [1], [0, 1, 2, 3, 4, 6, 7])

Line = Callable[[Any, Tensor], Tensor]


class Lined(nn.Module):
    """Two convolutions with a line of code between them."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self.a, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.o = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        self.line = line

    def forward(self, x: Tensor) -> Tensor:
        x = self.line(self, F.relu(self.bn(self.a(x))))
        return self.o(F.relu(self.b(x)))


def made(network: nn.Module) -> Pruner:
    torch.manual_seed(0)
    return Pruner(randomise(network.double()), IMAGE)


def quarter(x: Tensor) -> int:
    return x.shape[1] // 4


LINES: dict[str, Line] = {
    "shifted": lambda net, x: x.roll(quarter(x), 2),
    "shifted along channels too": lambda net, x: x.roll((0, quarter(x)), (1, 3)),
    "a window": lambda net, x: x[:, :, quarter(x) : quarter(x) + 4],
    "narrowed": lambda net, x: x.narrow(2, quarter(x), 3),
    "one row": lambda net, x: x * x.select(2, quarter(x)).unsqueeze(2),
    "half of the rows": lambda net, x: x[:, :, : x.shape[1] // 2],
    "pieces": lambda net, x: x.split([quarter(x), 4, 4 - quarter(x)], 2)[1],
    "padded": lambda net, x: F.pad(x, (x.shape[1] // 8,) * 4),
    "padded and cut": lambda net, x: F.pad(x, (quarter(x), -quarter(x))),
    "pooled": lambda net, x: F.max_pool2d(x, 2 * quarter(x) + 1, 1, quarter(x)),
    "averaged": lambda net, x: F.avg_pool2d(x, 2 * quarter(x) + 1, 1, quarter(x)),
    "turned": lambda net, x: x.permute(0, 1, 3, 2) if x.shape[1] > 7 else x.permute(0, 1, 2, 3),
    "mirrored": lambda net, x: x.flip(2 if x.shape[1] > 7 else 3),
    "by another formula": lambda net, x: F.gelu(x, approximate="tanh" if x.shape[1] > 7 else "none"),
    "with numbers": lambda net, x: x.roll(quarter(x), 2) if float(x.sum()) < 1e9 else x,
}


@pytest.mark.parametrize("name", LINES)
def test_no_pixel_and_no_setting_depends_on_a_width(name: str) -> None:
    pruner = made(Lined(LINES[name]))
    for keep in PLANS:
        pruner.gate(Plan({"a": keep}))
        small = pruner.extract()
        for training in (False, True):
            assert_equal_networks(pruner, small, training)


class Dilated(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        step = quarter(x) + 1
        return F.conv2d(x, self.weight, self.bias, 1, step, step)


class ByTheBatch(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, x.shape[1] > 7)


class EitherHead(nn.Module):
    """Two heads of which a width chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1)
        self.one, self.two = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        return (self.one if x.shape[1] > 6 else self.two)(self.b(x).relu())


def between(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), module, nn.ReLU(), nn.Conv2d(8, 4, 1))


@pytest.mark.parametrize("module", [Dilated(8, 8, 3), ByTheBatch(8), EitherHead()], ids=lambda m: type(m).__name__)
def test_no_layer_depends_on_a_width(module: nn.Module) -> None:
    pruner = made(module if isinstance(module, EitherHead) else between(module))
    layer = next(iter(pruner.graph.layers))
    for keep in PLANS:
        pruner.gate(Plan({layer: keep}))
        small = pruner.extract()
        assert_equal_networks(pruner, small, training=False)


def shuffled(net: Any, x: Tensor) -> Tensor:
    batch, channels, *sizes = x.shape
    x = x.view(batch, 2, channels // 2, *sizes).transpose(1, 2).reshape(batch, channels, *sizes)
    one, two = x.chunk(2, 1)
    return torch.cat([two, one[:, : channels // 2].roll(1, 2)], 1).roll(channels // 2, 1)


def test_sizes_and_places_of_channels_may_depend_on_them() -> None:
    pruner = made(Lined(shuffled))
    pruner.gate(Plan({"a": [0, 2, 4, 6]}))
    small = pruner.extract()
    assert small.sbf_fixed_sizes == () and small.a.out_channels == 4
    assert_equal_networks(pruner, small, training=False)


# -- in training ------------------------------------------------------------------------------------------


def scaled(net: nn.Module, x: Tensor) -> Tensor:
    """Knows the module, and is no method of it."""
    return x * (x.shape[1] / 8 if net.training else 1.0)


class Helped(Lined):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.b(scaled(self, self.bn(self.a(x)).relu())).relu())


class Helper:
    def apply(self, net: nn.Module, x: Tensor) -> Tensor:
        return scaled(net, x)


class HoldsAHelper(Lined):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.b(self.helper.apply(self, self.bn(self.a(x)).relu())).relu())


class AsksALayer(Lined):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.b(scaled(self.a, self.bn(self.a(x)).relu())).relu())


class NeedsNumbers(Lined):
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.a(x)).relu()
        if float(x.sum()) > 1e9:
            return self.o(self.b(x))
        return self.o(self.b(x * (x.shape[1] / 8 if self.training else 1.0)).relu())


class ShiftsPixels(Lined):
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.a(x)).relu()
        return self.o(self.b(x.roll(x.shape[1] // 8 if self.training else 1, 2)).relu())


class PoolsPixels(Lined):
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.a(x)).relu()
        window = x.shape[1] // 8 * 2 + 1 if self.training else 3
        return self.o(self.b(F.avg_pool2d(x, window, 1, window // 2)).relu())


@pytest.mark.parametrize("kind", [Helped, HoldsAHelper, AsksALayer, NeedsNumbers, ShiftsPixels, PoolsPixels])
def test_what_depends_on_a_width_in_training_alone_is_refused(kind: type[Lined]) -> None:
    network = kind(F.relu)
    network.helper = Helper()
    pruner = made(network)
    pruner.gate(Plan({"a": PLANS[0]}))
    with pytest.raises(PruningError, match="in training mode the network computes something else with"):
        pruner.extract()


class Threshold(Lined):
    """Needs numbers, asks for its mode, and looks at no width."""

    def forward(self, x: Tensor) -> Tensor:
        self.trained = self.training
        x = self.bn(self.a(x)).relu()
        return self.o(self.b(x / x.sum().item()).relu())


def test_numbers_in_training_that_are_no_width_do_no_harm() -> None:
    pruner = made(Threshold(F.relu))
    pruner.gate(Plan({"a": PLANS[0]}))
    assert_equal_networks(pruner, pruner.extract(), training=False)


class SlicesTwice(nn.Module):
    """One line for two layers, of which other filters go; and a mode is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        self.one, self.two, self.all = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for layer, head in ((self.a, self.one), (self.b, self.two)):
            x = layer(x).relu()
            parts.append(head(x[:, : x.shape[1] // 2]))
        self.trained = self.training
        return sum(parts) + self.all(x)


def test_a_line_that_runs_for_several_layers_is_compared_with_each() -> None:
    pruner = made(SlicesTwice())
    for keep in ({"a": [0, 1, 6, 7], "b": [0, 1, 2, 5, 6, 7]}, {"a": [0, 5], "b": [1, 3, 4, 7]}):
        pruner.gate(Plan(keep))
        small = pruner.extract()
        assert small.sbf_fixed_sizes == ()
        for training in (False, True):
            assert_equal_networks(pruner, small, training)


def test_a_weight_under_two_names_is_known_under_both() -> None:
    one, two = nn.Conv2d(8, 8, 1, bias=False), nn.Conv2d(8, 8, 1, bias=False)
    two.weight = one.weight
    net = nn.Sequential(nn.Conv2d(3, 8, 1), one, nn.ReLU(), two, nn.ReLU(), nn.Conv2d(8, 4, 1)).double()
    pruner = Pruner(net, IMAGE)
    pruner.gate(Plan({"0": PLANS[0]}))
    assert_equal_networks(pruner, pruner.extract(), training=False)

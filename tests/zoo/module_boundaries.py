"""Modules, hooks and blocks that compute more than their one layer."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import IMAGE, Head, Shape, conv_bn, entry


def doing(function: Callable[[Tensor], Tensor], module: nn.Module) -> nn.Module:
    """A module that does something to what it gives."""
    module.register_forward_hook(functools.partial(_then, function))
    return module


def _then(function: Callable[[Tensor], Tensor], module: nn.Module, args: Any, given: Tensor) -> Tensor:
    return function(given)


def reversed_channels(x: Tensor) -> Tensor:
    return x.flip(1)


def plus_one(x: Tensor) -> Tensor:
    return x + 1


@entry(IMAGE)
class NormsWithMore(nn.Module):
    """Norms with an activation of their own, which may make something of zero."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), doing(torch.sigmoid, nn.BatchNorm2d(8)))
        self.second = nn.Sequential(nn.Conv2d(8, 6, 1), doing(plus_one, nn.BatchNorm2d(6)), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(6, 8, 1), doing(F.silu, nn.BatchNorm2d(8)))
        self.fourth = nn.Sequential(nn.Conv2d(8, 8, 1), doing(torch.exp, nn.GroupNorm(4, 8)))
        self.head = Head(8)

    def forward(self, x):
        return self.head(self.fourth(self.third(self.second(self.first(x)))))


class PlusItself(nn.BatchNorm2d):
    """A norm that is added to what it reads."""

    def forward(self, x):
        return super().forward(x) + x


@entry(IMAGE)
class NormsThatMove(nn.Module):
    """Norms that shuffle, or add what they read: channels that were removed before them would come back."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), doing(reversed_channels, nn.BatchNorm2d(8)), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 6, 1), PlusItself(6), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(6, 8, 1), nn.ReLU())
        self.depthwise = doing(torch.sigmoid, nn.Conv2d(8, 8, 1, groups=8))
        self.head = Head(8)

    def forward(self, x):
        return self.head(self.depthwise(self.third(self.second(self.first(x)))))


class Pooled(nn.Module):
    """A classifier that pools by itself."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, width))

    def forward(self, x):
        return F.linear(x.mean((2, 3)), self.weight)


class Flattened(nn.Linear):
    """A linear layer that flattens by itself."""

    def forward(self, x):
        return super().forward(x.flatten(1))


def one_pixel(x: Tensor) -> Tensor:
    return x[:, :, None, None]


@entry(IMAGE)
class OwnHeads(nn.Module):
    """Heads into which a map goes, and out of which come rows, or pixels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.pooled = nn.Sequential(Pooled(8, 6), nn.ReLU(), nn.Linear(6, 4))
        self.flat = nn.Sequential(Flattened(8 * 36, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
        self.pixel = nn.Sequential(doing(one_pixel, Flattened(8 * 36, 5)), nn.Conv2d(5, 4, 1))

    def forward(self, x):
        x = self.stem(x)
        return self.pooled(x), self.flat(x), self.pixel(x)


class Last(nn.Linear):
    """A linear layer over the channels of a map."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


@entry(Shape(2, 3, 8, 16))
class ChannelsElsewhere(nn.Module):
    """Patches that come as rows of channels, as many as there are channels, and channels that go last and back."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), Last(6, 5), nn.BatchNorm2d(5), nn.ReLU())
        self.patches = doing(tokens, nn.Conv2d(5, 8, 4, 4))
        self.mix = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.patches(self.stem(x)))
        return self.fc(x + F.relu(self.mix(x)))


def half_by_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, 1)
    return left * right.sigmoid()


def both_signs(x: Tensor) -> Tensor:
    return torch.cat([x, -x], 1).relu()


@entry(IMAGE)
class FiltersMoved(nn.Module):
    """Layers whose filters leave their module in another number or order."""

    def __init__(self):
        super().__init__()
        self.gated = doing(half_by_half, nn.Conv2d(3, 8, 3))
        self.turned = doing(reversed_channels, nn.Conv2d(4, 6, 1))
        self.both = doing(both_signs, nn.Conv2d(6, 4, 1))
        self.finer = doing(nn.PixelShuffle(2), nn.Conv2d(8, 8, 1))
        self.between = nn.ModuleList(nn.Conv2d(n, n, 1) for n in (4, 6, 8))
        self.head = Head(2)

    def forward(self, x):
        for layer, after in zip((self.gated, self.turned, self.both), self.between, strict=True):
            x = F.relu(after(F.relu(layer(x))))
        return self.head(self.finer(x))


class WithNorm(nn.Conv2d):
    """A convolution that holds its norm, as detectron2's does."""

    def __init__(self, *args: Any, norm: nn.Module | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.norm = norm

    def forward(self, x):
        x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        return F.relu(x if self.norm is None else self.norm(x))


@entry(IMAGE)
class NormInside(nn.Module):
    """Convolutions that hold their norms, one of them called twice."""

    def __init__(self):
        super().__init__()
        self.stem = WithNorm(3, 8, 3, padding=1, norm=nn.BatchNorm2d(8), bias=False)
        self.block = nn.Sequential(
            WithNorm(8, 6, 3, padding=1, norm=nn.InstanceNorm2d(6, affine=True)),
            WithNorm(6, 8, 1, norm=nn.GroupNorm(4, 8)),
        )
        self.again = WithNorm(8, 8, 1, norm=nn.BatchNorm2d(8))
        self.head = Head(8)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.again(self.again(x + self.block(x))))


def remember(module: nn.Module, args: Any, given: Tensor) -> None:
    module.given = given


@entry(IMAGE)
class Remembered(nn.Module):
    """What a norm and a layer give is read where a hook has put it, which is before any gate behind them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 8), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 5, 1))
        self.seen = [1, 3]
        for place in self.seen:
            self.stem[place].register_forward_hook(remember)
        self.again, self.out = nn.Conv2d(8, 5, 1), Head(5)

    def forward(self, x):
        x = self.stem(x)
        norm, layer = (vars(self.stem[place]).pop("given") for place in self.seen)
        return self.out(F.relu(x + self.again(norm))), layer * 2


@entry(IMAGE)
class RowsAndTokens(nn.Module):
    """One linear layer for pixels and for what they have in common."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU())
        self.shared = nn.Linear(8, 8)
        self.one, self.all = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2).contiguous()
        common = x.mean(1)
        return self.all(common + F.relu(self.shared(common))), self.one(F.relu(self.shared(x)))


def flipped(module, args):
    return (args[0].flip(1),)


def centred(module, args):
    return (args[0] - args[0].mean((2, 3), keepdim=True),)


@entry(IMAGE)
class PreHooks(nn.Module):
    """Layers that compute something before they are called, beside others, so that they may vanish or be fitted."""

    def __init__(self):
        super().__init__()
        self.stem, self.other = conv_bn(3, 6), conv_bn(3, 6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.side = nn.utils.weight_norm(nn.Conv2d(6, 5, 1))
        self.flipped, self.centred = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.flipped.register_forward_pre_hook(flipped)
        self.centred.register_forward_pre_hook(centred)
        self.head = Head(11)

    def forward(self, x):
        x = F.relu(self.stem(x)) + F.relu(self.other(x))
        x = x + F.relu(self.flipped(x))
        x = x + F.relu(self.centred(x))
        return self.head(torch.cat([x, F.relu(self.side(x))], 1))

"""Weights that are computed, masked, shared out or used without a module."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import nn

from .base import IMAGE, Head, conv_bn, entry


@entry(IMAGE)
class FunctionalConv(nn.Module):
    """A convolution and a norm without modules."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.weight = nn.Parameter(torch.randn(5, 6, 3, 3) / 5)
        self.gain = nn.Parameter(torch.randn(5))
        self.shift = nn.Parameter(torch.randn(5))
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("var", torch.rand(5) + 0.5)
        self.out = conv_bn(5, 6)
        self.head = Head(6)

    def forward(self, x):
        x = F.conv2d(self.stem(x), self.weight, padding=1)
        x = F.batch_norm(x, self.mean, self.var, self.gain, self.shift, self.training)
        return self.head(self.out(F.relu(x)))


@entry(IMAGE)
class ComputedWeight(nn.Module):
    """Weight standardisation: what the convolution sees is not what is stored."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.conv = nn.Conv2d(6, 5, 3, bias=False)
        self.norm = nn.BatchNorm2d(5)
        self.out = conv_bn(5, 6)
        self.head = Head(6)

    def forward(self, x):
        weight = self.conv.weight
        weight = weight - weight.mean((1, 2, 3), keepdim=True)
        return self.head(self.out(F.relu(self.norm(F.conv2d(self.stem(x), weight)))))


@entry(IMAGE)
class DynamicWeight(nn.Module):
    """The input chooses among weights."""

    class Experts(nn.Conv2d):
        def __init__(self, *args):
            super().__init__(*args)
            self.routing = nn.Linear(3, 1)

        def forward(self, x):
            share = torch.sigmoid(self.routing(torch.stack([x.sum(), x.square().sum(), x.abs().sum()])))
            return F.conv2d(x, share * self.weight + (1 - share) * self.weight.flip(2), self.bias)

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.experts = self.Experts(6, 5, 3)
        self.out = conv_bn(5, 6)
        self.head = Head(6)

    def forward(self, x):
        return self.head(self.out(F.relu(self.experts(self.stem(x)))))


class WeightNet(nn.Module):
    """A convolution whose weight is made anew in every call."""

    def __init__(self, middle):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.conv = middle
        self.out = conv_bn(middle.out_channels, 6)
        self.head = Head(6)

    def forward(self, x):
        return self.head(self.out(F.relu(self.conv(self.stem(x)))))


@entry(IMAGE)
def WeightNorm():
    return WeightNet(nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 5, 3)))


@entry(IMAGE)
def WeightNormHook():
    """The old way: a hook sets a plain attribute before every call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return WeightNet(nn.utils.weight_norm(nn.Conv2d(6, 5, 3, bias=False)))


@entry(IMAGE)
def WeightNormTransposed():
    return WeightNet(nn.utils.parametrizations.weight_norm(nn.ConvTranspose2d(6, 5, 3), dim=1))


@entry(IMAGE)
def SpectralNorm():
    """Every filter is divided by the largest singular value of all of them."""
    return WeightNet(nn.utils.parametrizations.spectral_norm(nn.Conv2d(6, 5, 3)))


class Standardised(nn.Conv2d):
    """Zero mean and unit variance for every filter, with a gain of its own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, x):
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, weight=(self.gain * 0.7).view(-1), training=True)
        return self._conv_forward(x, weight.reshape_as(self.weight), self.bias)


class StandardisedByHand(nn.Conv2d):
    """The same, written out."""

    def forward(self, x):
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        std = self.weight.std((1, 2, 3), keepdim=True) + 1e-5
        return self._conv_forward(x, (self.weight - mean) / std, self.bias)


@entry(IMAGE)
def WeightStandardised():
    return nn.Sequential(
        Standardised(3, 6, 3, padding=1), nn.ReLU(), Standardised(6, 8, 3, groups=2), nn.ReLU(),
        StandardisedByHand(8, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        Standardised(6, 6, 3, padding=1, groups=6), nn.ReLU(), StandardisedByHand(6, 5, 1), Head(5),
    )  # fmt: skip


@entry(IMAGE)
class WeightOfABlock(nn.Module):
    """A block that multiplies with a weight of its own among its layers."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 6)
            self.mix = nn.Parameter(torch.randn(5, 1))

        def forward(self, x):
            x = self.one(x)
            return self.two(x * torch.sigmoid(x @ self.mix))

    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.out = conv_bn(3, 6), self.Inner(), conv_bn(6, 5)
        self.head = Head(5)

    def forward(self, x):
        x = F.relu(self.stem(x)).permute(0, 2, 3, 1)
        return self.head(self.out(self.inner(x).permute(0, 3, 1, 2)))


class MaskedConv(nn.Conv2d):
    """A convolution whose weight is multiplied with a buffer."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("mask", (torch.rand_like(self.weight) < 0.7).to(self.weight.dtype))

    def forward(self, x):
        return F.conv2d(x, self.mask * self.weight, self.bias, self.stride, self.padding)


class FixedConv(nn.Module):
    """A convolution that is not trained: its weight is a buffer."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.register_buffer("weight", torch.randn(outputs, inputs, 3, 3))
        self.bias = None

    def forward(self, x):
        return F.conv2d(x, self.weight, padding=1)


@entry(IMAGE)
def MaskedWeight():
    return nn.Sequential(
        FixedConv(3, 6), nn.ReLU(), MaskedConv(6, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(),
        MaskedConv(5, 6, 1, bias=False), nn.ReLU(), Head(6),
    )  # fmt: skip

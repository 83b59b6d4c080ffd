"""Grouped and depthwise convolutions."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from .base import IMAGE, Head, Shape, conv_bn, entry


class InvertedResidual(nn.Module):
    """MobileNetV2's block."""

    def __init__(self, inputs: int, wide: int, outputs: int, bias: bool, multiplier: int = 1):
        super().__init__()
        self.expand = conv_bn(inputs, wide, 1)
        self.depthwise = conv_bn(wide, wide * multiplier, groups=wide, bias=bias)
        self.project = conv_bn(wide * multiplier, outputs, 1)
        self.adds = inputs == outputs

    def forward(self, x):
        out = F.relu6(self.expand(x))
        out = self.project(F.relu6(self.depthwise(out)))
        return x + out if self.adds else out


def mobile(**options):
    blocks = [InvertedResidual(4, 8, 6, **options), InvertedResidual(6, 9, 6, **options)]
    return nn.Sequential(*conv_bn(3, 4), nn.ReLU6(), *blocks, Head(6))


@entry(IMAGE)
def Depthwise():
    return mobile(bias=False)


@entry(IMAGE)
def DepthwiseBias():
    return mobile(bias=True)


@entry(IMAGE)
def DepthwiseMultiplier():
    return mobile(bias=True, multiplier=2)


@entry(IMAGE)
def DepthwiseNoNorm():
    """A bias brings a dead channel back, and no norm follows."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 1),
        nn.ReLU(),
        Head(5),
    )


class GroupedBlock(nn.Module):
    """ResNeXt's block."""

    def __init__(self, width: int, inner: int, groups: int):
        super().__init__()
        self.conv1 = conv_bn(width, inner, 1)
        self.conv2 = conv_bn(inner, inner, groups=groups)
        self.conv3 = conv_bn(inner, width, 1)

    def forward(self, x):
        return F.relu(x + self.conv3(F.relu(self.conv2(F.relu(self.conv1(x))))))


@entry(IMAGE)
def Grouped():
    return nn.Sequential(*conv_bn(3, 6), nn.ReLU(), GroupedBlock(6, 8, 2), GroupedBlock(6, 12, 4), Head(6))


@entry(Shape(2, 4, 8, 8))
def GroupedStem():
    """The groups read the input, which cannot shrink, so none of them can go."""
    last = [*conv_bn(5, 1), nn.BatchNorm2d(1), Head(1)]
    return nn.Sequential(*conv_bn(4, 6, groups=2), nn.ReLU(), *conv_bn(6, 5), nn.ReLU(), *last)


@entry(IMAGE)
def GroupedBias():
    """Grouped convolutions one after the other, with biases and no norm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=4), nn.ReLU(),
        nn.Conv2d(12, 4, 1, groups=2), nn.ReLU(), nn.Conv2d(4, 6, 1), Head(6),
    )  # fmt: skip


@entry(IMAGE)
def GroupedGroupNorm():
    """Group norms whose groups lie across those of the convolutions before them, with biases and without."""
    return nn.Sequential(
        *conv_bn(3, 6), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=3), nn.GroupNorm(2, 6), nn.ReLU(),
        *conv_bn(6, 12), nn.ReLU(), nn.Conv2d(12, 12, 1, groups=6, bias=False), nn.GroupNorm(4, 12), nn.ReLU(),
        *conv_bn(12, 5), Head(5),
    )  # fmt: skip

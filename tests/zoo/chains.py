"""Layers one after the other, with norms, activations and dimensions of many kinds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .base import IMAGE, Head, Shape, conv_bn, entry


@entry(IMAGE)
def Plain():
    return nn.Sequential(
        *conv_bn(3, 8), nn.ReLU(), nn.MaxPool2d(2), *conv_bn(8, 6, bias=True), nn.ReLU6(), *conv_bn(6, 5),
        nn.GELU(), nn.AvgPool2d(2), Head(5),
    )  # fmt: skip


@entry(IMAGE)
def NoNorm():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.LeakyReLU(0.1),
        nn.Conv2d(5, 7, 3, bias=False), nn.Tanh(), Head(7),
    )  # fmt: skip


@entry(IMAGE)
def NormBeforeConvOrder():
    """Convolution, activation, norm."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.BatchNorm2d(6), nn.Conv2d(6, 5, 3), nn.PReLU(5), nn.BatchNorm2d(5),
        nn.Conv2d(5, 8, 1), nn.PReLU(), nn.BatchNorm2d(8), Head(8),
    )  # fmt: skip


@entry(IMAGE)
def AffineFreeNorm():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, affine=False), nn.ReLU(),
        nn.Conv2d(6, 5, 3), nn.BatchNorm2d(5, track_running_stats=False), nn.ReLU(),
        nn.Conv2d(5, 7, 1), nn.BatchNorm2d(7, affine=False, track_running_stats=False), Head(7),
    )  # fmt: skip


@entry(IMAGE)
def InstanceNorm():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.InstanceNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 5, 3, padding=1), nn.InstanceNorm2d(5, affine=True), nn.ReLU(),
        nn.Conv2d(5, 7, 3, padding=1), nn.InstanceNorm2d(7, affine=True, track_running_stats=True), nn.ReLU(),
        *conv_bn(7, 6), Head(6),
    )  # fmt: skip


@entry(IMAGE)
def GroupNorm():
    """Statistics shared among some channels, each by itself, or among all: the last layer is left alone."""
    return nn.Sequential(
        *conv_bn(3, 6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(),
        nn.Conv2d(8, 6, 3, bias=False), nn.GroupNorm(6, 6), nn.GELU(),
        nn.Conv2d(6, 6, 1), nn.GroupNorm(1, 6), nn.ReLU(), *conv_bn(6, 5), Head(5),
    )  # fmt: skip


@entry(IMAGE)
class GroupNormFree(nn.Module):
    """A group norm without weights, which holds nothing but a number of groups."""

    def __init__(self):
        super().__init__()
        self.stem, self.attend, self.norm = conv_bn(3, 8), nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8, affine=False)
        self.head = Head(8)

    def forward(self, x):
        x = F.relu(self.stem(x))
        return self.head(x * torch.sigmoid(self.norm(self.attend(x))))


@entry(IMAGE)
class GroupNormStream(nn.Module):
    """Group norms before the convolutions of a residual stream."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, 8) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=i == 1) for i in range(2))
        self.head = Head(8)

    def forward(self, x):
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x = x + conv(F.relu(norm(x)))
        return self.head(F.relu(self.norms[2](x)))


@entry(IMAGE)
class Dropout(nn.Module):
    """Dropout of several kinds; switched off, they must not stand in the way."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*conv_bn(3, 6), nn.Dropout(0.0), nn.ReLU(), *conv_bn(6, 5), nn.Dropout2d(0.0))
        self.head = Head(5)

    def forward(self, x):
        return self.head(F.dropout(self.body(x), 0.0, self.training))


@entry(IMAGE)
class FlattenLinear(nn.Module):
    """A classifier that sees every pixel, with hidden layers and norms of its own."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(*conv_bn(3, 4), nn.ReLU(), nn.MaxPool2d(2), *conv_bn(4, 5), nn.ReLU())
        self.classifier = nn.Sequential(
            nn.Linear(5 * 4 * 4, 9, bias=False),
            nn.BatchNorm1d(9),
            nn.ReLU(),
            nn.Linear(9, 7),
            nn.ReLU(),
            nn.Linear(7, 4),
        )

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


@entry(Shape(2, 3, 12))
class Conv1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.MaxPool1d(2))
        self.body = nn.Sequential(nn.Conv1d(6, 6, 3, padding=1, bias=False), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(x + self.body(x)).mean(-1))


@entry(Shape(2, 2, 4, 6, 6))
class Conv3d(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(2, 5, 3, padding=1), nn.BatchNorm3d(5), nn.ReLU(), nn.AvgPool3d(2))
        self.depthwise = nn.Conv3d(5, 5, 3, padding=1, groups=5)
        self.body = nn.Sequential(
            nn.Conv3d(5, 6, (1, 3, 3), bias=False), nn.BatchNorm3d(6), nn.AdaptiveAvgPool3d(1)
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.body(self.depthwise(self.stem(x))).flatten(1))


@entry(Shape(2, 2, 10))
def InstanceNormRows():
    return nn.Sequential(
        nn.Conv1d(2, 6, 3), nn.InstanceNorm1d(6, affine=True), nn.LeakyReLU(), nn.Conv1d(6, 5, 3),
        nn.InstanceNorm1d(5, track_running_stats=True), nn.ReLU(), nn.Conv1d(5, 4, 3), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip

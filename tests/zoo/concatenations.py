"""Concatenations, splits, shuffles, and channels in another order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from .base import IMAGE, Head, conv_bn, entry


class Inception(nn.Module):
    def __init__(self, inputs: int):
        super().__init__()
        self.one = conv_bn(inputs, 3, 1)
        self.three = nn.Sequential(*conv_bn(inputs, 4, 1), nn.ReLU(), *conv_bn(4, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), *conv_bn(inputs, 2, 1))

    def forward(self, x):
        return F.relu(torch.cat([self.one(x), self.three(x), self.pool(x)], 1))


@entry(IMAGE)
def Concat():
    return nn.Sequential(*conv_bn(3, 6), nn.ReLU(), Inception(6), nn.MaxPool2d(2), Inception(10), Head(10))


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 5, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(5), nn.Conv2d(5, growth, 3, padding=1, bias=False)

    def forward(self, maps):
        x = self.conv1(F.relu(self.bn1(torch.cat(maps, 1))))
        return self.conv2(F.relu(self.bn2(x)))


@entry(IMAGE)
class Dense(nn.Module):
    """DenseNet: norms after concatenations, a transition, another norm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 4), nn.ReLU())
        self.layers = nn.ModuleList([DenseLayer(4, 3), DenseLayer(7, 3)])
        self.norm = nn.BatchNorm2d(10)
        self.transition = nn.Sequential(nn.ReLU(), nn.Conv2d(10, 5, 1, bias=False), nn.AvgPool2d(2))
        self.last = DenseLayer(5, 3)
        self.final = nn.BatchNorm2d(8)
        self.head = Head(8)

    def forward(self, x):
        maps = [self.stem(x)]
        for layer in self.layers:
            maps.append(layer(maps))
        x = self.transition(self.norm(torch.cat(maps, 1)))
        return self.head(F.relu(self.final(torch.cat([x, self.last([x])], 1))))


@entry(IMAGE)
class Split(nn.Module):
    """Halves by split, chunk and slices, treated differently and joined in another order."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 9), nn.ReLU())
        self.a, self.b, self.c = conv_bn(2, 4), conv_bn(3, 4), conv_bn(4, 6)
        self.wide = conv_bn(6, 8)
        self.out = conv_bn(7, 5)
        self.head = Head(5)

    def forward(self, x):
        a, b, c = self.stem(x).split([2, 3, 4], 1)
        x = torch.cat([self.c(c), self.a(a) + self.b(b)], 1)[:, 2:8]
        x = self.wide(x)
        gate, value = x.chunk(2, 1)
        x = torch.cat([gate.tanh() * value, x[:, :3]], 1)
        return self.head(self.out(F.relu(x)))


class ShuffleUnit(nn.Module):
    """ShuffleNet V2: half of the channels pass, half are transformed, then all are shuffled."""

    def __init__(self, width: int):
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            *conv_bn(half, half, 1),
            nn.ReLU(),
            *conv_bn(half, half, groups=half),
            *conv_bn(half, half, 1),
            nn.ReLU(),
        )

    def forward(self, x):
        left, right = x.chunk(2, dim=1)
        x = torch.cat([left, self.branch(right)], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


@entry(IMAGE)
def Shuffle():
    return nn.Sequential(
        *conv_bn(3, 8), nn.ReLU(), ShuffleUnit(8), ShuffleUnit(8), nn.MaxPool2d(2), *conv_bn(8, 6), Head(6)
    )


@entry(IMAGE)
class PaddedStream(nn.Module):
    """Channels that are zero from the start, until a norm or a bias makes constants of them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 4), nn.ReLU())
        self.norm, self.depthwise = nn.BatchNorm2d(7), nn.Conv2d(7, 7, 3, padding=1, groups=7)
        self.grouped = nn.Conv2d(8, 4, 1, groups=2)
        self.out = conv_bn(11, 5)
        self.head = Head(5)

    def forward(self, x):
        x = self.stem(x)
        wide = F.relu(self.norm(F.pad(x, (0, 0, 0, 0, 1, 2))))
        right = self.grouped(F.pad(x, (0, 0, 0, 0, 0, 4)))
        left = self.depthwise(F.pad(x, (0, 0, 0, 0, 3, 0))) + wide
        return self.head(self.out(F.relu(torch.cat([left, right], 1))))


@entry(IMAGE)
def PixelShuffle():
    return nn.Sequential(
        *conv_bn(3, 6), nn.ReLU(), *conv_bn(6, 12), nn.PixelShuffle(2), nn.ReLU(), *conv_bn(3, 5), nn.ReLU(),
        nn.PixelUnshuffle(2), *conv_bn(20, 4), Head(4),
    )  # fmt: skip


@entry(IMAGE)
class Indexed(nn.Module):
    """Channels in another order, some of them twice, by a table that is stored or written down."""

    def __init__(self):
        super().__init__()
        self.stem, self.middle, self.last = conv_bn(3, 6), nn.Conv2d(6, 5, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.order, self.head = nn.Buffer(torch.tensor([5, 3, 1, 0, 2, 4])), Head(8)

    def forward(self, x):
        x = F.relu(self.middle(F.relu(self.stem(x))[:, self.order]))
        x = F.relu(self.last(x[:, torch.tensor([3, 0, 4, 1, 2, 0])]))
        x = x[:, [5, 0, 1, 2, 3, 4]]
        return self.head(x.index_select(1, torch.tensor([5, 4, 3, 2, 1, 0, 0, 1])))


class ConvBlock(nn.Module):
    """A convolution with its norm, which `fuse` folds into it in place as ultralytics does."""

    def __init__(self, inputs, outputs, kernel=3):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))

    def forward_fuse(self, x):
        return self.act(self.conv(x))

    def fuse(self):
        conv, bn = self.conv, self.bn
        conv.weight, conv.bias = fuse_conv_bn_weights(
            conv.weight, conv.bias, bn.running_mean, bn.running_var, bn.eps, bn.weight, bn.bias
        )
        self.conv = conv.requires_grad_(False)
        delattr(self, "bn")
        self.forward = self.forward_fuse


@entry(IMAGE)
class CrossStage(nn.Module):
    """YOLO: one half passes, the other goes through a bottleneck that is added to it; all are joined."""

    def __init__(self):
        super().__init__()
        self.stem = ConvBlock(3, 6)
        self.enter = ConvBlock(6, 8, 1)
        self.first, self.second = ConvBlock(4, 3), ConvBlock(3, 4)
        self.leave = ConvBlock(12, 6, 1)
        self.head = Head(6)

    def forward(self, x):
        parts = list(self.enter(self.stem(x)).chunk(2, 1))
        parts.append(parts[-1] + self.second(self.first(parts[-1])))
        return self.head(self.leave(torch.cat(parts, 1)))

    def fuse(self):
        for module in self.modules():
            if isinstance(module, ConvBlock):
                module.fuse()
        return self

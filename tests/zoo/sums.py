"""Residual networks: identity and projection shortcuts, padded streams, branches that may vanish."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .base import IMAGE, Head, conv_bn, entry


class Block(nn.Module):
    """A residual block with an identity or a projection shortcut."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        plain = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if plain else conv_bn(inputs, outputs, 1, stride=stride)

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


@entry(IMAGE)
def Residual():
    """Two stages of several blocks, identity and projection shortcuts."""
    blocks = [Block(6, 4, 6), Block(6, 5, 6), Block(6, 6, 8, 2), Block(8, 6, 8), Block(8, 4, 8)]
    return nn.Sequential(*conv_bn(3, 6), nn.ReLU(), *blocks, Head(8))


class OptionABlock(nn.Module):
    """The shortcut is subsampled and padded with zero channels."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = conv_bn(inputs, outputs, stride=stride)
        self.conv2, self.bn2 = conv_bn(outputs, outputs)
        self.stride, self.extra = stride, outputs - inputs

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        low = self.extra // 2
        shortcut = x if self.stride == 1 else F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, low, self.extra - low))
        return F.relu(out + shortcut)


@entry(IMAGE)
def OptionA():
    blocks = [OptionABlock(4, 4, 1), OptionABlock(4, 4, 1), OptionABlock(4, 8, 2), OptionABlock(8, 8, 1)]
    return nn.Sequential(*conv_bn(3, 4), nn.ReLU(), *blocks, Head(8))


class PreActivationBlock(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, inner, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, width, 3, padding=1, bias=False)

    def forward(self, x):
        return x + self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))


@entry(IMAGE)
def PreActivation():
    """Norms stand on the residual stream, where they would bring a dead channel back."""
    stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
    return nn.Sequential(
        stem, PreActivationBlock(6, 5), PreActivationBlock(6, 4), nn.BatchNorm2d(6), nn.ReLU(), Head(6)
    )


@entry(IMAGE)
class EmptyBranch(nn.Module):
    """Branches of one layer each beside an identity: an empty layer is an empty branch."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.left, self.right = conv_bn(6, 6), conv_bn(6, 6, stride=1)
        self.biased = nn.Conv2d(6, 6, 3, padding=1)
        self.head = Head(6)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.left(x) + self.biased(F.relu(self.right(x)))
        return self.head(x)


@entry(IMAGE)
class InplaceOps(nn.Module):
    """Results written over their operands."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU(inplace=True))
        self.left, self.right = conv_bn(6, 6), nn.Sequential(*conv_bn(6, 6), nn.Hardswish(inplace=True))
        self.scale = nn.Conv2d(6, 6, 1)
        self.head = Head(6)

    def forward(self, x):
        x = self.stem(x)
        out = self.left(x)
        out += x
        out.relu_()
        scale = self.scale(x)
        out = out * scale.sigmoid_()
        more = self.right(out)
        more.add_(out, alpha=0.5)
        more *= 2
        return self.head(F.relu(more, inplace=True))


@entry(IMAGE)
class StoredMap(nn.Module):
    """Stored maps of pixels, and of the pixels of every channel, multiplied with activations that are pooled."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.out = nn.Conv2d(3, 6, 3, padding=1), conv_bn(6, 8), conv_bn(8, 7)
        self.scale, self.pixels = nn.Parameter(torch.randn(1, 6, 8, 8)), nn.Parameter(torch.randn(8, 8))
        self.shift = nn.Parameter(torch.randn(8, 4, 4))
        self.head = Head(7)

    def forward(self, x):
        x = F.relu(self.stem(x * self.pixels) * self.scale)
        x = x * x.mean((2, 3), keepdim=True)
        x = F.max_pool2d(F.silu(self.body(x)), 2)
        return self.head(self.out(x + self.shift * x))


@entry(IMAGE)
class BareParameter(nn.Module):
    """Parameters that belong to no layer: a layer scale on the map, a learned map added to it."""

    def __init__(self):
        super().__init__()
        self.stem = conv_bn(3, 6)
        self.body = conv_bn(6, 6)
        self.gamma = nn.Parameter(torch.randn(6, 1, 1))
        self.position = nn.Parameter(torch.randn(1, 5, 8, 8))
        self.wide = conv_bn(6, 5)
        self.out = conv_bn(5, 7)
        self.head = Head(7)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = x + self.gamma * self.body(x)
        return self.head(self.out(F.relu(self.wide(x) + self.position)))


@entry(IMAGE)
class InstanceNormStream(nn.Module):
    """Instance norms before the convolutions of a residual stream, and one that two layers share."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norms = nn.ModuleList(nn.InstanceNorm2d(6, affine=i != 1, track_running_stats=i > 0) for i in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1, bias=i == 1, groups=5 * i + 1) for i in range(2))
        self.left, self.right = nn.Conv2d(6, 5, 1), nn.Conv2d(6, 5, 1)
        self.both = nn.InstanceNorm2d(5)
        self.head = Head(10)

    def forward(self, x):
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x = x + conv(F.leaky_relu(norm(x)))
        x = F.gelu(self.norms[2](x))
        return self.head(F.relu(torch.cat([self.both(self.left(x)), self.both(self.right(x))], 1)))

"""Tiny networks, each named for what makes it hard to prune, with example inputs for each.

`ZOO[name]()` gives a network in float64 and its inputs; `REFUSED` holds those that cannot be traced or have
nothing to prune.  Norms have random statistics and random, partly negative, scales and shifts, so that a
removed channel that comes back as a constant is seen in the output.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils import _pytree as pytree

Make = Callable[[], tuple[nn.Module, Any]]

ZOO: dict[str, Make] = {}
REFUSED: dict[str, Make] = {}


def entry(inputs: Any, into: dict[str, Make] = ZOO) -> Callable[[Any], Any]:
    """Enter a network into the zoo; `inputs` is a nest of tuples, lists and dicts of `Shape`s."""

    def enter(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def make() -> tuple[nn.Module, Any]:
            torch.manual_seed(1)
            model = randomise(build().double())
            example = pytree.tree_map_only(Shape, lambda s: torch.randn(s.sizes, dtype=torch.float64), inputs)
            return model, example

        into[build.__name__] = make
        return build

    return enter


class Shape:
    """The shape of an example input."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes


IMAGE = Shape(2, 3, 8, 8)


def randomise(model: nn.Module) -> nn.Module:
    """Give every norm statistics, scales and shifts as training might leave them."""
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
            if type(module).__name__.endswith("Norm") or "Norm" in type(module).__name__:
                if getattr(module, "weight", None) is not None:
                    module.weight.uniform_(0.5, 1.5).mul_(torch.randn_like(module.weight).sign())
                if getattr(module, "bias", None) is not None:
                    module.bias.normal_()
    return model


def fresh_inputs(inputs: Any, batch: int = 3, seed: int = 0, requires_grad: bool = False) -> Any:
    """Other random inputs of the same kind, with another batch size."""
    generator = torch.Generator().manual_seed(seed)

    def other(t: Tensor) -> Tensor:
        new = torch.randn(batch, *t.shape[1:], dtype=t.dtype, generator=generator)
        return new.requires_grad_(requires_grad)

    return pytree.tree_map_only(Tensor, other, inputs)


def conv_bn(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Sequential:
    """A convolution without bias that keeps the size of the map, and its norm."""
    options = {"padding": kernel // 2, "bias": False, **options}
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, **options), nn.BatchNorm2d(outputs))


class Head(nn.Module):
    """Global pooling and a classifier."""

    def __init__(self, width: int, classes: int = 4) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.pool(x).flatten(1))


# -- one after the other --------------------------------------------------------------------------------


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


# -- sums -----------------------------------------------------------------------------------------------


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


# -- concatenations, splits, shuffles -------------------------------------------------------------------


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
class WidthDependent(nn.Module):
    """Where a channel goes, and by what it is multiplied, depends on how many there are."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = conv_bn(3, 8), conv_bn(8, 8), conv_bn(8, 6)
        self.head = Head(6)

    def forward(self, x):
        x = F.channel_shuffle(F.relu(self.one(x)), 2)
        x = F.relu(self.two(x))
        x = x.roll(x.shape[1] // 2, 1)
        x = torch.add(x, x, alpha=1 / x.shape[1])
        x = self.three(x)
        return self.head(x / x.shape[1] ** 0.5)


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


# -- groups ---------------------------------------------------------------------------------------------


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


# -- products -------------------------------------------------------------------------------------------


class Squeeze(nn.Module):
    """Squeeze-and-excitation, by 1x1 convolutions or by linear layers."""

    def __init__(self, width: int, form: str):
        super().__init__()
        layer = (lambda i, o: nn.Conv2d(i, o, 1)) if form == "conv" else nn.Linear
        self.reduce, self.restore = layer(width, 3), layer(3, width)
        self.form = form

    def forward(self, x):
        s = x.mean((2, 3), keepdim=self.form == "conv")
        s = torch.sigmoid(self.restore(F.relu(self.reduce(s))))
        return x * (s if self.form == "conv" else s[:, :, None, None])


@entry(IMAGE)
class SqueezeExcite(nn.Module):
    def __init__(self, forms=("conv", "linear")):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.first = nn.Sequential(*conv_bn(6, 6), nn.ReLU(), Squeeze(6, forms[0]))
        self.second = nn.Sequential(*conv_bn(6, 8), nn.ReLU(), Squeeze(8, forms[1]))
        self.head = Head(8)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.second(x + self.first(x)))


@entry(IMAGE)
class GatedUnit(nn.Module):
    """Half of the channels times the other half: filters are alive only in pairs."""

    def __init__(self):
        super().__init__()
        self.stem, self.both = conv_bn(3, 6), conv_bn(6, 8)
        self.out = conv_bn(4, 5)
        self.head = Head(5)

    def forward(self, x):
        left, right = self.both(F.relu(self.stem(x))).chunk(2, 1)
        return self.head(F.relu(self.out(left * right)))


@entry(IMAGE)
class Swish(nn.Module):
    """x * sigmoid(x): the factor comes back as a half, the product does not."""

    def __init__(self):
        super().__init__()
        self.one, self.two = conv_bn(3, 6), conv_bn(6, 5)
        self.head = Head(5)

    def forward(self, x):
        x = self.one(x)
        x = self.two(x * torch.sigmoid(x))
        return self.head(x * (1 + torch.tanh(x)) / 2)


@entry(IMAGE)
class SelfUse(nn.Module):
    """A map that meets itself: sums, products and concatenations with the same operand."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = conv_bn(3, 6), conv_bn(12, 5), conv_bn(5, 6)
        self.head = Head(6)

    def forward(self, x):
        x = self.one(x)
        x = self.two(torch.cat([x, x + x], 1))
        return self.head(self.three(x * x - x))


@entry(IMAGE)
class SelectiveKernel(nn.Module):
    """Two branches stacked in a dimension of their own and summed with weights from a softmax over it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.small, self.large = conv_bn(6, 5), conv_bn(6, 5, 5)
        self.squeeze, self.excite = nn.Linear(5, 3), nn.Linear(3, 10)
        self.head = Head(5)

    def forward(self, x):
        x = self.stem(x)
        both = torch.stack([self.small(x), self.large(x)], 1)
        weights = self.excite(F.relu(self.squeeze(both.sum(1).mean((2, 3))))).view(-1, 2, 5)
        return self.head((both * weights.softmax(1)[..., None, None]).sum(1))


@entry(IMAGE)
class ReZero(nn.Module):
    """Branches scaled by a single number that starts at zero, and by a buffer."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.more = conv_bn(3, 6), conv_bn(6, 6), conv_bn(6, 6)
        self.alpha = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 0, 1, 1]).view(6, 1, 1))
        self.head = Head(6)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = x + self.alpha * self.body(x)
        return self.head(x + 0.5 * self.mask * self.more(x))


# -- the same module or parameter more than once --------------------------------------------------------


@entry(IMAGE)
class SharedModule(nn.Module):
    """A convolution and its norm used twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.twice = conv_bn(6, 6)
        self.neck = conv_bn(6, 5)
        self.out = conv_bn(5, 6)
        self.head = Head(6)

    def forward(self, x):
        x = F.relu(self.twice(self.stem(x)))
        x = F.relu(self.twice(F.relu(self.out(self.neck(x)))))
        return self.head(x)


@entry(IMAGE)
class SharedNorm(nn.Module):
    """One norm behind two convolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.left, self.right = nn.Conv2d(6, 5, 3, padding=1), nn.Conv2d(6, 5, 1)
        self.norm = nn.BatchNorm2d(5)
        self.out = conv_bn(10, 6)
        self.head = Head(6)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.out(torch.cat([self.norm(self.left(x)), self.norm(self.right(x))], 1)))


@entry(IMAGE)
class SharedParameter(nn.Module):
    """Two convolutions that hold one weight."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.one, self.two = conv_bn(6, 6), conv_bn(6, 6)
        self.two[0].weight = self.one[0].weight
        self.out = conv_bn(6, 5)
        self.head = Head(5)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.out(F.relu(self.two(F.relu(self.one(x))))))


@entry(IMAGE)
class RegisteredTwice(nn.Module):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.conv, self.norm = conv_bn(6, 6)
        self.again = nn.Sequential(self.conv, self.norm)
        self.head = Head(6)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.again(x))


@entry(IMAGE)
class PlainListModules(nn.Module):
    """Modules that are registered and run from a plain list, where a swapped one would not be seen."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.one, self.two = conv_bn(6, 6)
        self.three, self.four = conv_bn(6, 6)
        self.steps = [self.one, self.two]
        self.others = (self.three, self.four)
        self.head = Head(6)

    def forward(self, x):
        x = self.stem(x)
        out = x
        for step in self.steps:
            out = step(out)
        x = F.relu(x + out)
        out = x
        for step in self.others:
            out = step(out)
        return self.head(x + out)


# -- other shapes of network ----------------------------------------------------------------------------


@entry(Shape(2, 3, 16, 16))
class Unet(nn.Module):
    """Down and up again, with skip connections."""

    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(*conv_bn(3, 4), nn.ReLU())
        self.down2 = nn.Sequential(nn.MaxPool2d(2), *conv_bn(4, 6), nn.ReLU())
        self.bottom = nn.Sequential(nn.MaxPool2d(2), *conv_bn(6, 8), nn.ReLU())
        self.up2 = nn.ConvTranspose2d(8, 6, 2, 2)
        self.fuse2 = nn.Sequential(*conv_bn(12, 6), nn.ReLU())
        self.fuse1 = nn.Sequential(*conv_bn(10, 5), nn.ReLU())
        self.out = nn.Conv2d(5, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(a)
        c = self.bottom(b)
        x = self.fuse2(torch.cat([b, self.up2(c)], 1))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(self.fuse1(torch.cat([a, x], 1)))


@entry(Shape(2, 8))
class Transposed(nn.Module):
    """A generator: a linear layer unfolded to a map, transposed convolutions, one of them grouped."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 6 * 2 * 2)
        self.body = nn.Sequential(
            nn.BatchNorm2d(6), nn.ReLU(),
            nn.ConvTranspose2d(6, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.ConvTranspose2d(8, 6, 3, 2, 1, output_padding=1, groups=2), nn.ReLU(),
            nn.ConvTranspose2d(6, 3, 3, 1, 1),
        )  # fmt: skip

    def forward(self, z):
        return torch.tanh(self.body(self.fc(z).view(-1, 6, 2, 2)))


class ConvNextBlock(nn.Module):
    """Depthwise convolution, layer norm with channels last, a linear bottleneck, a layer scale, a sum."""

    def __init__(self, width: int):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 10), nn.Linear(10, width)
        self.gamma = nn.Parameter(torch.randn(width))

    def forward(self, x):
        out = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        out = self.gamma * self.narrow(F.gelu(self.wide(out)))
        return x + out.permute(0, 3, 1, 2)


@entry(IMAGE)
def LayerNorm():
    """ConvNeXt: only the bottlenecks can lose channels."""
    return nn.Sequential(nn.Conv2d(3, 6, 2, 2), ConvNextBlock(6), ConvNextBlock(6), Head(6))


@entry(IMAGE)
class Linear3d(nn.Module):
    """Patches as tokens (N, L, C), linear layers on them, a residual sum."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 2, 2)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.down(F.gelu(self.up(x)))
        return self.fc(x.mean(1))


@entry((Shape(2, 3, 8, 8), Shape(2, 2, 8, 8)))
class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = conv_bn(3, 5), conv_bn(2, 5)
        self.out = conv_bn(5, 6)
        self.head = Head(6)

    def forward(self, a, b):
        return self.head(self.out(F.relu(self.left(a) + self.right(b))))


@entry({"image": Shape(2, 3, 8, 8), "extra": [Shape(2, 4), Shape(2, 4)]})
class DictInput(nn.Module):
    """Keyword arguments, one of them a list; a vector steers the map."""

    def __init__(self):
        super().__init__()
        self.stem = conv_bn(3, 6)
        self.scale, self.shift = nn.Linear(4, 6), nn.Linear(4, 6)
        self.out = conv_bn(6, 5)
        self.head = Head(5)

    def forward(self, image, extra):
        scale, shift = self.scale(extra[0]), self.shift(extra[1])
        x = self.stem(image) * scale[:, :, None, None] + shift[:, :, None, None]
        return self.head(self.out(F.relu(x)))


@entry(([Shape(2, 3, 8, 8), (Shape(2, 3, 4, 4),)],))
class NestedInput(nn.Module):
    """One argument that is a list with a tuple in it."""

    def __init__(self):
        super().__init__()
        self.large, self.small = conv_bn(3, 5, stride=2), conv_bn(3, 4)
        self.out = conv_bn(9, 5)
        self.head = Head(5)

    def forward(self, pyramid):
        large, (small,) = pyramid
        return self.head(self.out(F.relu(torch.cat([self.large(large), self.small(small)], 1))))


@entry(IMAGE)
class MultiOutput(nn.Module):
    """A tuple with a dict in it; one of the outputs is a feature map."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.middle = nn.Sequential(*conv_bn(6, 5), nn.ReLU())
        self.mask = nn.Conv2d(5, 1, 1)
        self.last = conv_bn(5, 6)
        self.head = Head(6)

    def forward(self, x):
        middle = self.middle(self.stem(x))
        last = self.last(middle)
        return self.head(F.relu(last)), {"mask": torch.sigmoid(self.mask(middle)), "features": last}


@entry(IMAGE)
class TwoReaders(nn.Module):
    """What a convolution gives is read by a norm and by others, so the gate stands before the norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = conv_bn(3, 6)
        self.raw, self.cooked = conv_bn(6, 5), conv_bn(6, 5)
        self.head = Head(5)

    def forward(self, x):
        x = self.conv(x)
        return self.head(F.relu(self.raw(x) + self.cooked(F.relu(self.norm(x)))))


@entry(IMAGE)
class Unused(nn.Module):
    """A layer that never runs, and one whose result is thrown away."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.never, self.wasted = conv_bn(6, 5), conv_bn(6, 5)
        self.out = conv_bn(6, 5)
        self.head = Head(5)

    def forward(self, x):
        x = self.stem(x)
        self.wasted(x)
        return self.head(self.out(x))


@entry(IMAGE)
class PaddingModes(nn.Module):
    """Convolutions that pad by themselves, and "same" padding of an even kernel."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6, padding_mode="reflect"), nn.ReLU())
        self.circular = conv_bn(6, 6, padding_mode="circular")
        self.same = conv_bn(6, 6, 4, padding="same")
        self.zero = nn.Sequential(
            nn.ZeroPad2d(1), nn.Conv2d(6, 5, 3), nn.ReflectionPad2d(1), nn.ReplicationPad2d(1)
        )
        self.head = Head(5)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.zero(F.relu(x + self.circular(x) + self.same(x))))


@entry(IMAGE)
class TokenGate(nn.Module):
    """Tokens times a gate whose bias alone is left when the layer before it is empty."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 2, 2)
        self.narrow, self.gate = nn.Linear(6, 3), nn.Linear(3, 6)
        self.out = nn.Linear(6, 5)
        self.fc = nn.Linear(5, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        gate = self.gate(F.relu(self.narrow(x)).transpose(1, 2).contiguous().transpose(1, 2))
        return self.fc(F.relu(self.out(x * torch.sigmoid(gate))).mean(1))


# -- modules that do more than their one layer -----------------------------------------------------------


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


# -- what must be left alone ----------------------------------------------------------------------------


@entry(IMAGE)
class MeanOverChannels(nn.Module):
    """Attention over space by mean and maximum over the channels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.middle = nn.Sequential(*conv_bn(6, 5), nn.ReLU())
        self.attend = nn.Conv2d(2, 1, 3, padding=1)
        self.out = conv_bn(5, 6)
        self.head = Head(6)

    def forward(self, x):
        x = self.middle(self.stem(x))
        where = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        return self.head(self.out(x * torch.sigmoid(self.attend(where))))


@entry(IMAGE)
class HardcodedView(nn.Module):
    """The number of channels is written into the forward."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.middle = nn.Sequential(*conv_bn(6, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.fc = nn.Linear(32, 4)

    def forward(self, x):
        return self.fc(self.middle(self.stem(x)).view(-1, 8 * 2 * 2))


@entry(IMAGE)
class HardcodedHalf(nn.Module):
    """Half of the channels, as a number known in Python."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 8), nn.ReLU())
        self.half = 4
        self.left, self.right = conv_bn(4, 5), conv_bn(4, 5)
        self.head = Head(5)

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(self.left(x[:, : self.half]) + self.right(x[:, self.half :])))


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
class NonLocal(nn.Module):
    """Attention between pixels: activations multiplied with each other."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU(), nn.MaxPool2d(2))
        self.query, self.key, self.value = (nn.Conv2d(6, 4, 1) for _ in range(3))
        self.project = conv_bn(4, 6, 1)
        self.head = Head(6)

    def forward(self, x):
        x = self.stem(x)
        query, key, value = (f(x).flatten(2) for f in (self.query, self.key, self.value))
        near = torch.softmax(query.transpose(1, 2) @ key, -1)
        mixed = (value @ near.transpose(1, 2)).view(x.shape[0], -1, *x.shape[2:])
        return self.head(x + self.project(mixed))


@entry(IMAGE)
class Heads(NonLocal):
    """Attention by two heads, between which its channels are divided."""

    def forward(self, x):
        x = self.stem(x)
        query, key, value = (f(x).view(x.shape[0], 2, -1, 16) for f in (self.query, self.key, self.value))
        near = torch.softmax(query.transpose(2, 3) @ key, -1)
        mixed = (value @ near.transpose(2, 3)).view(x.shape[0], -1, *x.shape[2:])
        return self.head(x + self.project(mixed))


@entry(IMAGE)
class ChannelAttention(NonLocal):
    """Attention between channels: those of the queries are the rows, those of the keys are the columns."""

    def forward(self, x):
        x = self.stem(x)
        query, key, value = (f(x).flatten(2) for f in (self.query, self.key, self.value))
        mixed = (torch.tanh(query @ key.transpose(1, 2)) @ value).view(x.shape[0], -1, *x.shape[2:])
        return self.head(x + self.project(mixed))


@entry(IMAGE)
class LinearAttention(NonLocal):
    """Attention without a softmax: a sum over the pixels first, and a divisor that is a product as well."""

    def forward(self, x):
        x = self.stem(x)
        query, key, value = (f(x).flatten(2) for f in (self.query, self.key, self.value))
        query, key = query.relu(), key.relu()
        mixed = (key @ value.transpose(1, 2)).transpose(1, 2) @ query
        weight = key.sum(2).unsqueeze(1) @ query + 1e-2
        return self.head(x + self.project((mixed / weight).view(x.shape[0], -1, *x.shape[2:])))


@entry(IMAGE)
class PixelsForChannels(NonLocal):
    """Attention between pixels that forgets to transpose its result back, as in MAnet: channels and pixels mix."""

    def __init__(self):
        super().__init__()
        self.value, self.project = nn.Conv2d(6, 6, 1), conv_bn(6, 6, 1)
        self.stem[-1] = nn.MaxPool2d((4, 8))  # more channels than pixels are left

    def forward(self, x):
        x = self.stem(x)
        query, key, value = (f(x).flatten(2) for f in (self.query, self.key, self.value))
        near = torch.softmax(query.transpose(1, 2) @ key, -1)
        mixed = (near @ value.transpose(1, 2)).reshape(x.shape[0], -1, *x.shape[2:])
        return self.head(x + self.project(mixed))


@entry(IMAGE)
class Rearranged(nn.Module):
    """Reshapes that take channels and pixels apart as they were joined."""

    def __init__(self):
        super().__init__()
        self.stem, self.one, self.two, self.out = conv_bn(3, 4), conv_bn(16, 6), conv_bn(6, 8), conv_bn(2, 5)
        self.head = Head(5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        n, c, h, w = x.shape[0], x.shape[1], x.shape[2] // 2, x.shape[3] // 2
        x = x.view(n, c, h, 2, w, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, 4 * c, h, w)  # space to depth
        x = F.relu(self.one(x))
        c, h, w = x.shape[1], h // 2, w // 2
        windows = x.permute(0, 2, 3, 1).view(n, h, 2, w, 2, c).transpose(2, 3).reshape(-1, 4, c)
        x = torch.tanh(windows).view(n, h, w, 2, 2, c).transpose(2, 3).reshape(n, 2 * h, 2 * w, c)
        x = x.permute(0, 3, 1, 2)
        # Places within patches as samples, as in MobileViT: rows of patches are joined with the channels at first.
        places = x.reshape(n * c * h, 2, w, 2).transpose(1, 2).reshape(n, c, h * w, 4).transpose(1, 3)
        places = F.gelu(places.reshape(n * 4, h * w, c)).view(n, 4, h * w, c).transpose(1, 3)
        x = places.reshape(n * c * h, w, 2, 2).transpose(1, 2).reshape(n, c, 2 * h, 2 * w)
        x = F.relu(self.two(x))
        c, h, w = x.shape[1:]
        x = torch.tanh(x.view(n * 2, c // 2, h, w)).view(n, c, h, w)  # groups as samples
        x = x.view(n, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // 4, 2 * h, 2 * w)
        return self.head(self.out(x))


@entry(IMAGE)
class BilinearPooling(nn.Module):
    """Every channel of one map by every channel of another."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.left, self.right = nn.Conv2d(6, 5, 1), conv_bn(6, 4, 1)
        self.fc = nn.Linear(20, 3)

    def forward(self, x):
        x = self.stem(x)
        left, right = self.left(x).flatten(2), self.right(x).relu().flatten(2)
        return self.fc(torch.bmm(left, right.transpose(1, 2)).flatten(1) / 64)


@entry(IMAGE)
class Mixed(nn.Module):
    """A stored matrix that mixes channels, and one that mixes columns of pixels, as products for every sample."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.channels, self.columns = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(8, 4))
        self.conv, self.head = conv_bn(5, 6), Head(6)

    def forward(self, x):
        x = torch.einsum("nchw,cd->ndhw", self.stem(x), self.channels)
        return self.head(self.conv(torch.einsum("nchw,wv->nchv", x, self.columns)).relu())


@entry(IMAGE)
class Unpooled(nn.Module):
    """Numbers that go back to where their maxima were found."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Sequential(*conv_bn(3, 6), nn.ReLU()), nn.Sequential(*conv_bn(6, 6), nn.ReLU())
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.deep, self.head = conv_bn(6, 6), Head(6)

    def forward(self, x):
        x, places = self.pool(self.down(x))
        return self.head(self.up(self.unpool(self.deep(x), places)))


@entry(IMAGE)
class Warped(nn.Module):
    """A map looked at from where the network wants to, and at places that are a layer's channels themselves."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.look = nn.Sequential(
            nn.Conv2d(3, 5, 1), nn.ReLU(), nn.Flatten(), nn.Linear(320, 4), nn.ReLU(), nn.Linear(4, 6)
        )
        self.flow = nn.Sequential(*conv_bn(6, 5), nn.ReLU(), nn.Conv2d(5, 2, 1))
        self.conv, self.head = conv_bn(6, 6), Head(6)

    def forward(self, x):
        stem = self.stem(x)
        turn = self.look(x).view(-1, 2, 3) * 0.1
        seen = F.grid_sample(stem, F.affine_grid(turn, list(stem.shape), align_corners=False), align_corners=False)
        bent = F.grid_sample(
            seen, self.flow(seen).tanh().permute(0, 2, 3, 1), padding_mode="border", align_corners=True
        )
        return self.head(self.conv(bent).relu() + stem)


@entry(IMAGE)
class InplaceSlice(nn.Module):
    """Some channels are written into a part of a map."""

    def __init__(self):
        super().__init__()
        self.stem, self.left = conv_bn(3, 6), conv_bn(6, 3)
        self.out = conv_bn(6, 5)
        self.head = Head(5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        part = self.left(x)
        x = x.clone()
        x[:, 1:4] = part
        return self.head(self.out(x))


@entry(IMAGE)
class Maxout(nn.Module):
    """The larger of two channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.pairs, self.out = conv_bn(3, 6), conv_bn(6, 8), conv_bn(4, 5)
        self.head = Head(5)

    def forward(self, x):
        x = self.pairs(F.relu(self.stem(x)))
        n, c, h, w = x.shape
        return self.head(self.out(x.view(n, c // 2, 2, h, w).max(2).values))


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
class Recurrent(nn.Module):
    """A recurrent layer reads the columns of a map."""

    def __init__(self):
        super().__init__()
        self.stem, self.body = conv_bn(3, 6), conv_bn(6, 5)
        self.gru = nn.GRU(5, 4, batch_first=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = self.body(F.relu(self.stem(x))).mean(2).transpose(1, 2)
        return self.fc(self.gru(x)[0][:, -1])


@entry(IMAGE)
class AuxiliaryHead(nn.Module):
    """A second classifier that runs in training alone."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.last = conv_bn(3, 8), conv_bn(8, 6), conv_bn(6, 5)
        self.head = Head(5)
        self.aux = nn.ModuleList([nn.Sequential(*conv_bn(6, 4), nn.ReLU(), Head(4))])

    def forward(self, x):
        middle = F.relu(self.body(F.relu(self.stem(x))))
        out = self.head(F.relu(self.last(middle)))
        return (out, self.aux[0](middle)) if self.training else out


@entry(IMAGE)
class FeaturesInTraining(nn.Module):
    """Gives its features too while it trains, and drops branches then."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.last = conv_bn(3, 6), conv_bn(6, 6), conv_bn(6, 5)
        self.fc = nn.Linear(5, 4)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = x + dropped(F.relu(self.body(x)), self.training)
        features = F.relu(self.last(x)).mean((2, 3))
        return (self.fc(features), features) if self.training else self.fc(features)


def dropped(x, training):
    """A branch that is left out for some images; for none here, so that networks can be compared."""
    if not training:
        return x
    keep = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(1.0)
    return x.div(0.5) * keep * 0.5


@entry(IMAGE)
class OtherwiseInTraining(nn.Module):
    """Other functions, another order of channels and another norm while it trains."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(a, 6, 3, padding=1) for a in (3, 6, 6, 6, 6, 6))
        self.norm, self.head = nn.BatchNorm2d(6, affine=False), Head(6)

    def forward(self, x):
        hard = self.training
        x = self.convs[0](x)
        x = F.relu(self.convs[1](torch.sigmoid(x) if hard else F.hardtanh(x)))
        x = F.relu(self.convs[2](x.flip(1) if hard else x))
        x = self.convs[3](F.elu(x) if hard else F.relu6(x))
        x = F.relu(F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=hard))
        x = self.convs[5](x) if hard else self.convs[4](x)
        return self.head(F.relu(x))


@entry(IMAGE)
class KeepsFromTheFirstCall(nn.Module):
    """Positions and a mask that are made once, for the size that is seen first."""

    def __init__(self):
        super().__init__()
        self.stem, self.body = conv_bn(3, 6), conv_bn(6, 5)
        self.positions = self.mask = None
        self.head = Head(5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        if self.mask is None or (self.mask.shape[1:], self.mask.dtype) != (x.shape[1:], x.dtype):
            self.positions = torch.arange(x.shape[3], dtype=x.dtype, device=x.device)
            self.mask = torch.ones_like(x[:1]) * 0.5
        return self.head(F.relu(self.body(x * self.mask) + self.positions))


@entry(IMAGE)
class WidthOfTheInput(nn.Module):
    """A module that writes the width it was given into a view of something else."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = conv_bn(6, 3), conv_bn(6, 2)

        def forward(self, x):
            n, c, h, w = x.shape
            product = self.one(x).view(n, 3, 1, h, w) * self.two(x).view(n, 1, 2, h, w)
            return product.reshape(n, c, h, w)

    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.out = conv_bn(3, 6), self.Inner(), conv_bn(6, 5)
        self.head = Head(5)

    def forward(self, x):
        return self.head(self.out(self.inner(F.relu(self.stem(x)))))


@entry(IMAGE)
class LiteralWidth(nn.Module):
    """A width, and a choice of channels, written into tensors by the forward."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.out = conv_bn(3, 6), conv_bn(6, 8), conv_bn(4, 5)
        self.head = Head(5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(self.body(x / torch.tensor(float(x.shape[1]))))
        return self.head(self.out(x.index_select(1, torch.tensor([6, 1, 0, 3]))))


@entry(IMAGE)
class WidthInPixels(nn.Module):
    """Widths that say how far pixels move, and over how many of them a mean is taken."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.last, self.head = conv_bn(3, 6), conv_bn(6, 8), conv_bn(8, 5), Head(5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = F.relu(self.body(x.roll(x.shape[1] // 2, 2)[:, :, x.shape[1] // 3 :][:, :, :5]))
        x = F.avg_pool2d(x, 2 * (x.shape[1] // 4) + 1, 1, x.shape[1] // 4)
        return self.head(self.last(F.pad(x, (x.shape[1] // 4, -(x.shape[1] // 4)))))


@entry(IMAGE)
class AsksItsLayers(nn.Module):
    """The forward reads settings and types from layers that may vanish."""

    def __init__(self):
        super().__init__()
        self.stem, self.side, self.out = conv_bn(3, 6), nn.Conv2d(6, 6, 3, padding=1), conv_bn(6, 5)
        self.head = Head(5)

    def forward(self, x):
        x = F.relu(self.stem(x.to(self.side.weight.dtype)))
        return self.head(self.out(x + self.side(x) * self.side.stride[0]))


@entry(IMAGE)
class SplitAttention(nn.Module):
    """A sum over branches that one convolution made."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.both = nn.Sequential(*conv_bn(6, 10, groups=2), nn.ReLU())
        self.squeeze, self.excite = nn.Conv2d(5, 4, 1), nn.Conv2d(4, 10, 1)
        self.out = conv_bn(5, 6)
        self.head = Head(6)

    def forward(self, x):
        x = self.both(self.stem(x))
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w)
        gap = x.sum(1).mean((2, 3), keepdim=True)
        weights = self.excite(F.relu(self.squeeze(gap))).view(n, 2, -1, 1, 1).softmax(1)
        return self.head(F.relu(self.out((x * weights).sum(1))))


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


@entry(IMAGE)
class SumOverChannels(nn.Module):
    """All channels added up into one."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.out = conv_bn(3, 6), conv_bn(6, 5), conv_bn(1, 4)
        self.head = Head(4)

    def forward(self, x):
        x = self.body(F.relu(self.stem(x)))
        return self.head(F.relu(self.out(x.sum(1, keepdim=True))) * F.relu(x.sum(1)).unsqueeze(1))


@entry(Shape(2, 3, 9, 9))
class KeywordCalls(nn.Module):
    """Modules called by keyword, and one that is told the size it should give."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.down, self.up = nn.Conv2d(6, 5, 3, 2, 1), nn.ConvTranspose2d(5, 6, 3, 2, 1)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x):
        x = F.relu(self.norm(input=self.stem(input=x)))
        return self.out(x + self.up(F.relu(self.down(x)), output_size=x.shape[2:]))


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


class Average(nn.Module):
    """Keeps the mean of every channel while it trains; what comes out does not depend on it."""

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("slow", torch.zeros(channels))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, 2, 3)), alpha=0.1)
                self.slow.lerp_(x.mean((0, 2, 3)), 0.01)
        return x


@entry(IMAGE)
def TrainingStatistics():
    return nn.Sequential(*conv_bn(3, 6), nn.ReLU(), Average(6), *conv_bn(6, 5), nn.ReLU(), Average(5), Head(5))


class FourConvs(nn.Module):
    """What is between them, a network of the zoo says."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 6), (6, 5), (5, 6), (6, 5)))
        self.head = Head(5)


@entry(IMAGE)
class NormalisedByHand(FourConvs):
    """Quotients and choices in which a constant is harmless: what it divides, or chooses between, is gone."""

    def forward(self, x):
        x = self.convs[0](x)
        mean, variance = x.mean((2, 3), keepdim=True), x.var((2, 3), keepdim=True)
        x = F.softsign(self.convs[1]((x - mean) / torch.sqrt(variance + 1e-5)))
        x = self.convs[2](x)
        x = self.convs[3](torch.where(x > 0, x, 0.3 * x))
        return self.head(F.normalize(x, dim=1))


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


@entry(Shape(2, 2, 10))
def InstanceNormRows():
    return nn.Sequential(
        nn.Conv1d(2, 6, 3), nn.InstanceNorm1d(6, affine=True), nn.LeakyReLU(), nn.Conv1d(6, 5, 3),
        nn.InstanceNorm1d(5, track_running_stats=True), nn.ReLU(), nn.Conv1d(5, 4, 3), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 10, dropout=0.0, batch_first=True, **options)


@entry(IMAGE)
class Transformer(nn.Module):
    """Layers that torch runs as one operator each where no gradient is wanted, alone and in a stack."""

    def __init__(self):
        super().__init__()
        self.stem, self.patches = conv_bn(3, 6), nn.Conv2d(6, 8, 2, stride=2)
        self.first = encoder_layer()
        self.stack = nn.TransformerEncoder(encoder_layer(activation="gelu"), 2)
        self.second = encoder_layer(norm_first=True)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.patches(F.relu(self.stem(x))).flatten(2).transpose(1, 2)
        return self.fc(self.second(self.stack(self.first(x))).mean(1))


@entry(IMAGE)
class DividedByMore(FourConvs):
    """Divisors of which a removed channel is no zero, because something was added to it or it was clamped."""

    def forward(self, x):
        x = self.convs[0](x)
        x = self.convs[1](x / (x.norm(dim=(2, 3), keepdim=True) + 1e-3))
        x = self.convs[2](x * (x.var((2, 3), keepdim=True) + 1e-3).rsqrt())
        x = self.convs[3](x / x.abs().sum((2, 3), keepdim=True).clamp_min(1e-3) + x / (1 + (-x).exp()))
        return self.head(x * torch.log(1 + x.abs()))


@entry(IMAGE)
class Divided(nn.Module):
    """Divisors that must not become zero: some layers stay, those before and beside them keep a filter at least."""

    def __init__(self):
        super().__init__()
        self.stem, self.inner = nn.Sequential(*conv_bn(3, 6), nn.ReLU()), nn.Conv2d(6, 5, 3, padding=1)
        self.over, self.below = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(5, 6, 1, bias=False)
        self.one, self.two, self.head = nn.Conv2d(6, 5, 1), nn.Conv2d(6, 5, 1), Head(5)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.over(x) / self.below(F.elu(self.inner(x))).norm(dim=(2, 3), keepdim=True)
        x = self.one(x) + self.two(F.gelu(x))
        return self.head(x / x.std((2, 3), keepdim=True))


@entry(IMAGE)
class GatedLinearUnits(nn.Module):
    """Half of the channels, times a sigmoid of the others; and half of the rows, by the other rows."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = conv_bn(3, 8), nn.Conv2d(4, 12, 3, padding=1), conv_bn(6, 6)
        self.left, self.right, self.head = nn.Conv2d(6, 5, 1), nn.Conv2d(6, 5, 1), Head(5)

    def forward(self, x):
        x = F.glu(self.three(F.glu(self.two(F.glu(self.one(x), 1)), 1)), 2)
        return self.head(F.relu(F.glu(torch.cat([self.left(x), self.right(x)], 1), 1)))


@entry(IMAGE)
class AnewInTraining(nn.Module):
    """In training mode alone something is made of a weight anew, and a layer reads what it meets."""

    def __init__(self):
        super().__init__()
        self.stem, self.table = conv_bn(3, 6), nn.Parameter(torch.rand(6))
        self.proj, self.head = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.stem(x)).mean((2, 3))
        x = x + (self.table.flip(0) if self.training else self.table)
        return self.head(F.relu(self.proj(x)))


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


@entry(IMAGE)
class Filled(nn.Module):
    """Numbers put where a mask says so, and functions that keep zero."""

    def __init__(self):
        super().__init__()
        self.stem, self.convs = conv_bn(3, 6), nn.ModuleList(nn.Conv2d(6, 6, 1) for _ in range(3))
        self.head = Head(6)

    def forward(self, x):
        x = self.stem(x)
        x = self.convs[0](x.masked_fill(x < 0.1, 0.0))
        x = self.convs[1](torch.atan(x.masked_fill(torch.eye(8, dtype=torch.bool, device=x.device), 0)).sinh())
        x = self.convs[2](torch.fmod(x.asinh(), 0.7) + x.frac())
        return self.head(x.masked_fill(x > 0.5, 0.5))


@entry(IMAGE)
class Compared(nn.Module):
    """Zero is not above zero: a channel that is gone is false."""

    def __init__(self):
        super().__init__()
        self.stem, self.mask, self.other = conv_bn(3, 6), nn.Conv2d(3, 6, 1), nn.Conv2d(3, 6, 3, padding=1)
        self.above, self.middle, self.head = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 5, 3), Head(5)

    def forward(self, x):
        y = torch.where(self.mask(x) > 0, self.stem(x), self.other(x))
        return self.head(F.relu(self.middle(y * (y > 0.5) + (self.above(x) > 0).to(y.dtype))))


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


# -- what must be refused -------------------------------------------------------------------------------


@entry(IMAGE, into=REFUSED)
class Untraceable(nn.Module):
    """A step that leaves torch."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.head = Head(6)

    def forward(self, x):
        x = self.stem(x)
        x = torch.from_numpy(x.detach().numpy() * 2)
        return self.head(x)


@entry(Shape(2, 8), into=REFUSED)
def NoConv():
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))

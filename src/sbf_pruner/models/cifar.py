"""ResNet, VGG-16 and MobileNetV2 for small images such as CIFAR.

Convolutions are initialized He-normal with fan-out, norms and linear layers as in PyTorch. Initialization also
works on meta tensors.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def init_weights(model: nn.Module) -> None:
    """Initialize every convolution of `model` He-normal with fan-out, in place."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class Shortcut(nn.Module):
    """Parameter-free shortcut (option A): take every second pixel and zero-pad the channels on both sides."""

    def __init__(self, extra_channels: int) -> None:
        super().__init__()
        before = extra_channels // 2
        self.padding = (0, 0, 0, 0, before, extra_channels - before)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], self.padding)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; a block with more channels than its input halves height and width."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        widens = channels != in_channels
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=2 if widens else 1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = Shortcut(channels - in_channels) if widens else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return torch.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """CIFAR ResNet: three stages of 16, 32 and 64 channels with `blocks` blocks each, for images of any size.

    Shortcuts have no weights (option A), so the dense counts are those of the pruning literature: 853,018
    parameters and 125,485,696 MACs for ResNet-56 on 3x32x32.
    """

    def __init__(self, blocks: int, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks)
        self.layer2 = _stage(16, 32, blocks)
        self.layer3 = _stage(32, 64, blocks)
        self.fc = nn.Linear(64, num_classes)
        init_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _stage(in_channels: int, channels: int, blocks: int) -> nn.Sequential:
    widths = [in_channels] + [channels] * (blocks - 1)
    return nn.Sequential(*(BasicBlock(width, channels) for width in widths))


def resnet20(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """The CIFAR ResNet with 20 layers."""
    return ResNet(3, num_classes, in_channels)


def resnet32(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """The CIFAR ResNet with 32 layers."""
    return ResNet(5, num_classes, in_channels)


def resnet44(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """The CIFAR ResNet with 44 layers."""
    return ResNet(7, num_classes, in_channels)


def resnet56(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """The CIFAR ResNet with 56 layers, the paper's first network.

    >>> sum(p.numel() for p in resnet56().parameters())
    853018
    """
    return ResNet(9, num_classes, in_channels)


def resnet110(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """The CIFAR ResNet with 110 layers, the paper's second network."""
    return ResNet(18, num_classes, in_channels)


VGG_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG16(nn.Module):
    """VGG-16 with batch norm for images of `image_size` pixels or more.

    It has the thirteen convolutions of the original, in five stages; average pooling and one linear layer replace
    the three large linear layers. `image_size` determines the number of max pools between the stages (four at 32
    pixels), so that the feature map before average pooling has at least 2x2 pixels.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> None:
        super().__init__()
        pools = max(0, min(len(VGG_STAGES) - 1, image_size.bit_length() - 2))
        layers: list[nn.Module] = []
        for index, stage in enumerate(VGG_STAGES):
            if 0 < index <= pools:
                layers.append(nn.MaxPool2d(2))
            for channels in stage:
                conv = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
                layers += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
                in_channels = channels
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(in_channels, num_classes)
        init_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


def vgg16_bn(num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> VGG16:
    """VGG-16 with batch norm; `image_size` is the smallest side of its images."""
    return VGG16(num_classes, in_channels, image_size)


# One row per stage, as in the paper: expansion, channels, blocks, and the stride of the first block.
MOBILENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class ConvNorm(nn.Sequential):
    """A convolution, its batch norm, and a ReLU6 unless `activate` is false."""

    def __init__(
        self, in_channels: int, channels: int, kernel: int, stride: int = 1, groups: int = 1, activate: bool = True
    ) -> None:
        conv = nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2, groups=groups, bias=False)
        parts: OrderedDict[str, nn.Module] = OrderedDict(conv=conv, bn=nn.BatchNorm2d(channels))
        if activate:
            parts["act"] = nn.ReLU6()
        super().__init__(parts)


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise convolution and 1x1 projection, added to the input if the shapes agree.

    The depthwise convolution is a follower: its filters are removed with those of the convolution before it.
    """

    def __init__(self, in_channels: int, channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.expand = ConvNorm(in_channels, hidden, 1) if expansion > 1 else nn.Identity()
        self.depthwise = ConvNorm(hidden, hidden, 3, stride=stride, groups=hidden)
        self.project = ConvNorm(hidden, channels, 1, activate=False)
        self.residual = stride == 1 and in_channels == channels

    def forward(self, x: Tensor) -> Tensor:
        out = self.project(self.depthwise(self.expand(x)))
        return x + out if self.residual else out


class MobileNetV2(nn.Module):
    """MobileNetV2 with the blocks and widths of the original.

    Unlike in the ImageNet network, the stem and the second stage do not halve the feature map, so an image of 32x32
    pixels ends as a map of 4x4, and one of 8x8 as 1x1. There is no dropout, so a gated network and the one
    extracted from it give the same outputs in training mode, too.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width_mult: float = 1.0) -> None:
        super().__init__()
        width = _rounded(32 * width_mult)
        head = _rounded(1280 * max(1.0, width_mult))
        self.stem = ConvNorm(in_channels, width, 3)
        blocks: list[nn.Module] = []
        for expansion, base_channels, repeats, stride in MOBILENET_STAGES:
            channels = _rounded(base_channels * width_mult)
            for index in range(repeats):
                blocks.append(InvertedResidual(width, channels, expansion, stride if index == 0 else 1))
                width = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = ConvNorm(width, head, 1)
        self.fc = nn.Linear(head, num_classes)
        init_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.blocks(self.stem(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _rounded(width: float, divisor: int = 8) -> int:
    """Round to the nearest multiple of `divisor`, or up if the nearest is more than 10 % below `width`."""
    nearest = max(divisor, int(width + divisor / 2) // divisor * divisor)
    return nearest if nearest >= 0.9 * width else nearest + divisor


def mobilenet_v2(num_classes: int = 10, in_channels: int = 3, width_mult: float = 1.0) -> MobileNetV2:
    """MobileNetV2 for small images; `width_mult` scales the widths of all layers."""
    return MobileNetV2(num_classes, in_channels, width_mult)

"""The CIFAR family of residual networks: 20, 32, 44, 56 and 110 layers.

Images of any size enter (32x32 and 8x8 alike), class logits leave.  Shortcuts have no weights (option A:
every second pixel, missing channels filled with zeros), so the dense counts are the ones the pruning
literature quotes: 853,018 parameters and 125,485,696 MACs for ResNet-56 on 3x32x32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .initial import start_weights


class Shortcut(nn.Module):
    """Subsample by two and pad the channels with zeros, half of them before and half behind."""

    def __init__(self, extra_channels: int) -> None:
        super().__init__()
        before = extra_channels // 2
        self.padding = (0, 0, 0, 0, before, extra_channels - before)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], self.padding)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; a wider block halves the map."""

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
    """A stem, three stages of 16, 32 and 64 channels with `blocks` blocks each, and a linear classifier."""

    def __init__(self, blocks: int, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks)
        self.layer2 = _stage(16, 32, blocks)
        self.layer3 = _stage(32, 64, blocks)
        self.fc = nn.Linear(64, num_classes)
        start_weights(self)

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

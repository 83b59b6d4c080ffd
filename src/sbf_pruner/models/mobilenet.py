"""MobileNetV2 for small images.

Images enter, class logits leave.  Blocks and widths are the original's; the stem and the second stage keep
the size of the map (they halve it in the ImageNet network), so 32x32 pixels end as 4x4 and 8x8 as one.  Its
3x3 convolutions are depthwise: their channels follow the 1x1 convolution before them.  There is no dropout,
so a gated network and the one extracted from it agree in training too.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from .initial import start_weights


class Stage(NamedTuple):
    """One row of the paper's table: expansion factor, width, number of blocks, stride of the first."""

    expansion: int
    channels: int
    blocks: int
    stride: int


STAGES = (
    Stage(1, 16, 1, 1),
    Stage(6, 24, 2, 1),
    Stage(6, 32, 3, 2),
    Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1),
    Stage(6, 160, 3, 2),
    Stage(6, 320, 1, 1),
)


class ConvNorm(nn.Sequential):
    """A convolution, its batch norm, and a ReLU6 unless `activate` is false."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        activate: bool = True,
    ) -> None:
        conv = nn.Conv2d(in_channels, channels, kernel, stride, kernel // 2, groups=groups, bias=False)
        parts: OrderedDict[str, nn.Module] = OrderedDict(conv=conv, bn=nn.BatchNorm2d(channels))
        if activate:
            parts["act"] = nn.ReLU6()
        super().__init__(parts)


class InvertedResidual(nn.Module):
    """Expand, filter each channel on its own, project; added to its input where the shapes agree."""

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
    """A stem, seven stages of inverted residuals, a wide 1x1 head, and a linear classifier."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3, width_mult: float = 1.0) -> None:
        super().__init__()
        width = _rounded(32 * width_mult)
        head = _rounded(1280 * max(1.0, width_mult))
        self.stem = ConvNorm(in_channels, width, 3)
        blocks: list[nn.Module] = []
        for stage in STAGES:
            channels = _rounded(stage.channels * width_mult)
            for index in range(stage.blocks):
                blocks.append(InvertedResidual(width, channels, stage.expansion, stage.stride if index == 0 else 1))
                width = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = ConvNorm(width, head, 1)
        self.fc = nn.Linear(head, num_classes)
        start_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(self.blocks(self.stem(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _rounded(width: float, divisor: int = 8) -> int:
    """The nearest multiple of `divisor` that is not more than a tenth below `width`."""
    nearest = max(divisor, int(width + divisor / 2) // divisor * divisor)
    return nearest if nearest >= 0.9 * width else nearest + divisor


def mobilenet_v2(num_classes: int = 10, in_channels: int = 3, width_mult: float = 1.0) -> MobileNetV2:
    """MobileNetV2 for small images; `width_mult` scales every layer's width."""
    return MobileNetV2(num_classes, in_channels, width_mult)

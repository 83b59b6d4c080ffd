"""VGG-16 with batch norm, for small images.

Images of `image_size` pixels or more enter, class logits leave.  The thirteen convolutions are the
original's; one linear layer, fed by the average over what is left of the map, replaces its three large ones.
How often the map is halved is settled when the network is built (four times at 32 pixels), so that at least
2x2 pixels reach the average.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .initial import start_weights

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG16(nn.Module):
    """Thirteen convolutions in five stages, max pooling between them, and a linear classifier."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> None:
        super().__init__()
        pools = _pools(image_size)
        layers: list[nn.Module] = []
        for index, stage in enumerate(STAGES):
            if 0 < index <= pools:
                layers.append(nn.MaxPool2d(2))
            for channels in stage:
                conv = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
                layers += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
                in_channels = channels
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(in_channels, num_classes)
        start_weights(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


def _pools(image_size: int) -> int:
    """How many halvings leave at least two pixels a side, four at most."""
    return max(0, min(len(STAGES) - 1, image_size.bit_length() - 2))


def vgg16_bn(num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> VGG16:
    """VGG-16 with batch norm; `image_size` is the smallest side it will be given."""
    return VGG16(num_classes, in_channels, image_size)

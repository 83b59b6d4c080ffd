"""Networks whose code contains, keeps or reads a number of channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .base import IMAGE, Head, conv_bn, entry


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

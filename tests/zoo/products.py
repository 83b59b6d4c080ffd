"""Products of feature maps: squeeze and excite, gates, attention over branches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .base import IMAGE, Head, conv_bn, entry


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
class GatedLinearUnits(nn.Module):
    """Half of the channels, times a sigmoid of the others; and half of the rows, by the other rows."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = conv_bn(3, 8), nn.Conv2d(4, 12, 3, padding=1), conv_bn(6, 6)
        self.left, self.right, self.head = nn.Conv2d(6, 5, 1), nn.Conv2d(6, 5, 1), Head(5)

    def forward(self, x):
        x = F.glu(self.three(F.glu(self.two(F.glu(self.one(x), 1)), 1)), 2)
        return self.head(F.relu(F.glu(torch.cat([self.left(x), self.right(x)], 1), 1)))

"""Operators for which a removed channel, which is zero, needs care: reductions, divisors, comparisons, indices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .base import IMAGE, Head, conv_bn, entry


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
class SumOverChannels(nn.Module):
    """All channels added up into one."""

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.out = conv_bn(3, 6), conv_bn(6, 5), conv_bn(1, 4)
        self.head = Head(4)

    def forward(self, x):
        x = self.body(F.relu(self.stem(x)))
        return self.head(F.relu(self.out(x.sum(1, keepdim=True))) * F.relu(x.sum(1)).unsqueeze(1))


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

"""Modules and parameters that are used or registered more than once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .base import IMAGE, Head, conv_bn, entry


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

"""Networks that cannot be traced, or have nothing to prune."""

from __future__ import annotations

import torch
from torch import nn

from .base import IMAGE, REFUSED, Head, Shape, conv_bn, entry


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

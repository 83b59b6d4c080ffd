"""Networks that do something else in training mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .base import IMAGE, Head, conv_bn, entry


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

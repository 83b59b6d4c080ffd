"""Matrix products and reshapes: attention, bilinear pooling, transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .base import IMAGE, Head, conv_bn, entry


@entry(IMAGE)
class NonLocal(nn.Module):
    """Attention between pixels: activations multiplied with each other."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU(), nn.MaxPool2d(2))
        self.query, self.key, self.value = (nn.Conv2d(6, 4, 1) for _ in range(3))
        self.project = conv_bn(4, 6, 1)
        self.head = Head(6)

    def forward(self, x):
        x = self.stem(x)
        query, key, value = (f(x).flatten(2) for f in (self.query, self.key, self.value))
        near = torch.softmax(query.transpose(1, 2) @ key, -1)
        mixed = (value @ near.transpose(1, 2)).view(x.shape[0], -1, *x.shape[2:])
        return self.head(x + self.project(mixed))


@entry(IMAGE)
class Heads(NonLocal):
    """Attention by two heads, between which its channels are divided."""

    def forward(self, x):
        x = self.stem(x)
        query, key, value = (f(x).view(x.shape[0], 2, -1, 16) for f in (self.query, self.key, self.value))
        near = torch.softmax(query.transpose(2, 3) @ key, -1)
        mixed = (value @ near.transpose(2, 3)).view(x.shape[0], -1, *x.shape[2:])
        return self.head(x + self.project(mixed))


@entry(IMAGE)
class ChannelAttention(NonLocal):
    """Attention between channels: those of the queries are the rows, those of the keys are the columns."""

    def forward(self, x):
        x = self.stem(x)
        query, key, value = (f(x).flatten(2) for f in (self.query, self.key, self.value))
        mixed = (torch.tanh(query @ key.transpose(1, 2)) @ value).view(x.shape[0], -1, *x.shape[2:])
        return self.head(x + self.project(mixed))


@entry(IMAGE)
class LinearAttention(NonLocal):
    """Attention without a softmax: a sum over the pixels first, and a divisor that is a product as well."""

    def forward(self, x):
        x = self.stem(x)
        query, key, value = (f(x).flatten(2) for f in (self.query, self.key, self.value))
        query, key = query.relu(), key.relu()
        mixed = (key @ value.transpose(1, 2)).transpose(1, 2) @ query
        weight = key.sum(2).unsqueeze(1) @ query + 1e-2
        return self.head(x + self.project((mixed / weight).view(x.shape[0], -1, *x.shape[2:])))


@entry(IMAGE)
class PixelsForChannels(NonLocal):
    """Attention between pixels that forgets to transpose its result back, as in MAnet: channels and pixels mix."""

    def __init__(self):
        super().__init__()
        self.value, self.project = nn.Conv2d(6, 6, 1), conv_bn(6, 6, 1)
        self.stem[-1] = nn.MaxPool2d((4, 8))  # more channels than pixels are left

    def forward(self, x):
        x = self.stem(x)
        query, key, value = (f(x).flatten(2) for f in (self.query, self.key, self.value))
        near = torch.softmax(query.transpose(1, 2) @ key, -1)
        mixed = (near @ value.transpose(1, 2)).reshape(x.shape[0], -1, *x.shape[2:])
        return self.head(x + self.project(mixed))


@entry(IMAGE)
class Rearranged(nn.Module):
    """Reshapes that take channels and pixels apart as they were joined."""

    def __init__(self):
        super().__init__()
        self.stem, self.one, self.two, self.out = conv_bn(3, 4), conv_bn(16, 6), conv_bn(6, 8), conv_bn(2, 5)
        self.head = Head(5)

    def forward(self, x):
        x = F.relu(self.stem(x))
        n, c, h, w = x.shape[0], x.shape[1], x.shape[2] // 2, x.shape[3] // 2
        x = x.view(n, c, h, 2, w, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, 4 * c, h, w)  # space to depth
        x = F.relu(self.one(x))
        c, h, w = x.shape[1], h // 2, w // 2
        windows = x.permute(0, 2, 3, 1).view(n, h, 2, w, 2, c).transpose(2, 3).reshape(-1, 4, c)
        x = torch.tanh(windows).view(n, h, w, 2, 2, c).transpose(2, 3).reshape(n, 2 * h, 2 * w, c)
        x = x.permute(0, 3, 1, 2)
        # Places within patches as samples, as in MobileViT: rows of patches are joined with the channels at first.
        places = x.reshape(n * c * h, 2, w, 2).transpose(1, 2).reshape(n, c, h * w, 4).transpose(1, 3)
        places = F.gelu(places.reshape(n * 4, h * w, c)).view(n, 4, h * w, c).transpose(1, 3)
        x = places.reshape(n * c * h, w, 2, 2).transpose(1, 2).reshape(n, c, 2 * h, 2 * w)
        x = F.relu(self.two(x))
        c, h, w = x.shape[1:]
        x = torch.tanh(x.view(n * 2, c // 2, h, w)).view(n, c, h, w)  # groups as samples
        x = x.view(n, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // 4, 2 * h, 2 * w)
        return self.head(self.out(x))


@entry(IMAGE)
class BilinearPooling(nn.Module):
    """Every channel of one map by every channel of another."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.left, self.right = nn.Conv2d(6, 5, 1), conv_bn(6, 4, 1)
        self.fc = nn.Linear(20, 3)

    def forward(self, x):
        x = self.stem(x)
        left, right = self.left(x).flatten(2), self.right(x).relu().flatten(2)
        return self.fc(torch.bmm(left, right.transpose(1, 2)).flatten(1) / 64)


@entry(IMAGE)
class Mixed(nn.Module):
    """A stored matrix that mixes channels, and one that mixes columns of pixels, as products for every sample."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.channels, self.columns = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(8, 4))
        self.conv, self.head = conv_bn(5, 6), Head(6)

    def forward(self, x):
        x = torch.einsum("nchw,cd->ndhw", self.stem(x), self.channels)
        return self.head(self.conv(torch.einsum("nchw,wv->nchv", x, self.columns)).relu())


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 10, dropout=0.0, batch_first=True, **options)


@entry(IMAGE)
class Transformer(nn.Module):
    """Layers that torch runs as one operator each where no gradient is wanted, alone and in a stack."""

    def __init__(self):
        super().__init__()
        self.stem, self.patches = conv_bn(3, 6), nn.Conv2d(6, 8, 2, stride=2)
        self.first = encoder_layer()
        self.stack = nn.TransformerEncoder(encoder_layer(activation="gelu"), 2)
        self.second = encoder_layer(norm_first=True)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.patches(F.relu(self.stem(x))).flatten(2).transpose(1, 2)
        return self.fc(self.second(self.stack(self.first(x))).mean(1))

"""Other shapes of network: several inputs and outputs, decoders, tokens, recurrent layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .base import IMAGE, Head, Shape, conv_bn, entry


@entry(Shape(2, 3, 16, 16))
class Unet(nn.Module):
    """Down and up again, with skip connections."""

    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(*conv_bn(3, 4), nn.ReLU())
        self.down2 = nn.Sequential(nn.MaxPool2d(2), *conv_bn(4, 6), nn.ReLU())
        self.bottom = nn.Sequential(nn.MaxPool2d(2), *conv_bn(6, 8), nn.ReLU())
        self.up2 = nn.ConvTranspose2d(8, 6, 2, 2)
        self.fuse2 = nn.Sequential(*conv_bn(12, 6), nn.ReLU())
        self.fuse1 = nn.Sequential(*conv_bn(10, 5), nn.ReLU())
        self.out = nn.Conv2d(5, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(a)
        c = self.bottom(b)
        x = self.fuse2(torch.cat([b, self.up2(c)], 1))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(self.fuse1(torch.cat([a, x], 1)))


@entry(Shape(2, 8))
class Transposed(nn.Module):
    """A generator: a linear layer unfolded to a map, transposed convolutions, one of them grouped."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 6 * 2 * 2)
        self.body = nn.Sequential(
            nn.BatchNorm2d(6), nn.ReLU(),
            nn.ConvTranspose2d(6, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.ConvTranspose2d(8, 6, 3, 2, 1, output_padding=1, groups=2), nn.ReLU(),
            nn.ConvTranspose2d(6, 3, 3, 1, 1),
        )  # fmt: skip

    def forward(self, z):
        return torch.tanh(self.body(self.fc(z).view(-1, 6, 2, 2)))


class ConvNextBlock(nn.Module):
    """Depthwise convolution, layer norm with channels last, a linear bottleneck, a layer scale, a sum."""

    def __init__(self, width: int):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 10), nn.Linear(10, width)
        self.gamma = nn.Parameter(torch.randn(width))

    def forward(self, x):
        out = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        out = self.gamma * self.narrow(F.gelu(self.wide(out)))
        return x + out.permute(0, 3, 1, 2)


@entry(IMAGE)
def LayerNorm():
    """ConvNeXt: only the bottlenecks can lose channels."""
    return nn.Sequential(nn.Conv2d(3, 6, 2, 2), ConvNextBlock(6), ConvNextBlock(6), Head(6))


@entry(IMAGE)
class Linear3d(nn.Module):
    """Patches as tokens (N, L, C), linear layers on them, a residual sum."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 2, 2)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.down(F.gelu(self.up(x)))
        return self.fc(x.mean(1))


@entry((Shape(2, 3, 8, 8), Shape(2, 2, 8, 8)))
class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = conv_bn(3, 5), conv_bn(2, 5)
        self.out = conv_bn(5, 6)
        self.head = Head(6)

    def forward(self, a, b):
        return self.head(self.out(F.relu(self.left(a) + self.right(b))))


@entry({"image": Shape(2, 3, 8, 8), "extra": [Shape(2, 4), Shape(2, 4)]})
class DictInput(nn.Module):
    """Keyword arguments, one of them a list; a vector steers the map."""

    def __init__(self):
        super().__init__()
        self.stem = conv_bn(3, 6)
        self.scale, self.shift = nn.Linear(4, 6), nn.Linear(4, 6)
        self.out = conv_bn(6, 5)
        self.head = Head(5)

    def forward(self, image, extra):
        scale, shift = self.scale(extra[0]), self.shift(extra[1])
        x = self.stem(image) * scale[:, :, None, None] + shift[:, :, None, None]
        return self.head(self.out(F.relu(x)))


@entry(([Shape(2, 3, 8, 8), (Shape(2, 3, 4, 4),)],))
class NestedInput(nn.Module):
    """One argument that is a list with a tuple in it."""

    def __init__(self):
        super().__init__()
        self.large, self.small = conv_bn(3, 5, stride=2), conv_bn(3, 4)
        self.out = conv_bn(9, 5)
        self.head = Head(5)

    def forward(self, pyramid):
        large, (small,) = pyramid
        return self.head(self.out(F.relu(torch.cat([self.large(large), self.small(small)], 1))))


@entry(IMAGE)
class MultiOutput(nn.Module):
    """A tuple with a dict in it; one of the outputs is a feature map."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.middle = nn.Sequential(*conv_bn(6, 5), nn.ReLU())
        self.mask = nn.Conv2d(5, 1, 1)
        self.last = conv_bn(5, 6)
        self.head = Head(6)

    def forward(self, x):
        middle = self.middle(self.stem(x))
        last = self.last(middle)
        return self.head(F.relu(last)), {"mask": torch.sigmoid(self.mask(middle)), "features": last}


@entry(IMAGE)
class TwoReaders(nn.Module):
    """What a convolution gives is read by a norm and by others, so the gate stands before the norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = conv_bn(3, 6)
        self.raw, self.cooked = conv_bn(6, 5), conv_bn(6, 5)
        self.head = Head(5)

    def forward(self, x):
        x = self.conv(x)
        return self.head(F.relu(self.raw(x) + self.cooked(F.relu(self.norm(x)))))


@entry(IMAGE)
class Unused(nn.Module):
    """A layer that never runs, and one whose result is thrown away."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6), nn.ReLU())
        self.never, self.wasted = conv_bn(6, 5), conv_bn(6, 5)
        self.out = conv_bn(6, 5)
        self.head = Head(5)

    def forward(self, x):
        x = self.stem(x)
        self.wasted(x)
        return self.head(self.out(x))


@entry(IMAGE)
class PaddingModes(nn.Module):
    """Convolutions that pad by themselves, and "same" padding of an even kernel."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 6, padding_mode="reflect"), nn.ReLU())
        self.circular = conv_bn(6, 6, padding_mode="circular")
        self.same = conv_bn(6, 6, 4, padding="same")
        self.zero = nn.Sequential(
            nn.ZeroPad2d(1), nn.Conv2d(6, 5, 3), nn.ReflectionPad2d(1), nn.ReplicationPad2d(1)
        )
        self.head = Head(5)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.zero(F.relu(x + self.circular(x) + self.same(x))))


@entry(IMAGE)
class TokenGate(nn.Module):
    """Tokens times a gate whose bias alone is left when the layer before it is empty."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 2, 2)
        self.narrow, self.gate = nn.Linear(6, 3), nn.Linear(3, 6)
        self.out = nn.Linear(6, 5)
        self.fc = nn.Linear(5, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        gate = self.gate(F.relu(self.narrow(x)).transpose(1, 2).contiguous().transpose(1, 2))
        return self.fc(F.relu(self.out(x * torch.sigmoid(gate))).mean(1))


@entry(IMAGE)
class Recurrent(nn.Module):
    """A recurrent layer reads the columns of a map."""

    def __init__(self):
        super().__init__()
        self.stem, self.body = conv_bn(3, 6), conv_bn(6, 5)
        self.gru = nn.GRU(5, 4, batch_first=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = self.body(F.relu(self.stem(x))).mean(2).transpose(1, 2)
        return self.fc(self.gru(x)[0][:, -1])


@entry(Shape(2, 3, 9, 9))
class KeywordCalls(nn.Module):
    """Modules called by keyword, and one that is told the size it should give."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.down, self.up = nn.Conv2d(6, 5, 3, 2, 1), nn.ConvTranspose2d(5, 6, 3, 2, 1)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x):
        x = F.relu(self.norm(input=self.stem(input=x)))
        return self.out(x + self.up(F.relu(self.down(x)), output_size=x.shape[2:]))

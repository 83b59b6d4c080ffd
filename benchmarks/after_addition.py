"""The CIFAR ResNet whose last scores of a block stand behind the addition, to compare with those before it.

The same network, weight for weight, as the bundled one; only the gate of a block's second convolution multiplies
the sum of branch and shortcut.  Where it closes, the channel is gone from the stream until a later block adds to
it again, with all that earlier blocks had brought.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sbf_pruner.models import BasicBlock, ResNet
from sbf_pruner.models import resnet20 as plain_resnet20
from sbf_pruner.modules import GatePoint


class Block(BasicBlock):
    """A block with a place for the gate behind its addition."""

    def __init__(self, block: BasicBlock) -> None:
        nn.Module.__init__(self)
        for name, part in block.named_children():
            setattr(self, name, part)
        self.place = GatePoint(block.conv2.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return torch.relu(self.place(out + self.shortcut(x)))


def resnet20(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """ResNet-20 with the scores of its blocks behind their additions."""
    network = plain_resnet20(num_classes, in_channels)
    for stage in (network.layer1, network.layer2, network.layer3):
        for place, block in enumerate(stage):
            assert isinstance(block, BasicBlock)
            stage[place] = Block(block)
    return network

"""Filters ranked by a score of your own: here by how strongly each answers to some images.

A score says which filters go first; the budget says how many go.  What is left is cut out as ever: layers of one
residual stage may keep different filters, and the small network computes what the gated one does.
"""

import torch
from torch import nn

import sbf_pruner as sbf

torch.manual_seed(0)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


stem = (nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU())
model = nn.Sequential(*stem, Block(24), Block(24), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
model, images = model.double().eval(), torch.rand(32, 3, 16, 16, dtype=torch.float64)

pruner = sbf.Pruner(model, images[:1], budget=sbf.Budget(macs="50%"))
scores, modules = {}, dict(model.named_modules())


def remember(name):
    """A hook that takes the mean absolute answer of every filter of a layer."""
    return lambda module, inputs, output: scores.update({name: output.abs().mean((0, 2, 3))})


# One score for each filter of each layer that can be pruned, the higher the better.
hooks = [modules[name].register_forward_hook(remember(name)) for name in pruner.graph.layers]
with torch.no_grad():
    model(images)
for hook in hooks:
    hook.remove()
pruner.rank(scores)

small = pruner.extract()
with torch.no_grad():
    torch.testing.assert_close(small(images), model(images), rtol=0, atol=1e-12)
kept, left = pruner.plan().keep, sbf.measure(small, images[:1]).macs / sbf.measure(model, images[:1]).macs
assert kept["3.conv2"] != kept["4.conv2"], "which are added up, and may differ"
print(f"filters kept: {pruner.plan().widths()}")
print(f"{left:.1%} of the MACs left; gated and extracted agree to 1e-12")

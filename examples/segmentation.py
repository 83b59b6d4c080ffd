"""A small U-Net with two inputs and a loss per pixel, cut to 40 % of its multiply-accumulates (MACs).

Nothing is said about skip connections, concatenations or inputs: the network is traced on the example inputs, a
tuple of positional arguments here (a dict would be keyword arguments).
"""

import torch
from torch import nn
from torch.nn import functional as F

import sbf_pruner as sbf

torch.manual_seed(0)


def layer(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class TwoEyedUnet(nn.Module):
    """An image and a rough hint in; one logit per pixel out."""

    def __init__(self):
        super().__init__()
        self.image, self.hint, self.down = layer(3, 16), layer(1, 8), layer(24, 48)
        self.up, self.join, self.head = nn.ConvTranspose2d(48, 24, 2, stride=2), layer(48, 24), nn.Conv2d(24, 1, 1)

    def forward(self, image, hint):
        seen = torch.cat([self.image(image), self.hint(hint)], 1)
        raised = self.up(self.down(F.max_pool2d(seen, 2)))
        return self.head(self.join(torch.cat([seen, raised], 1)))


# Made-up images: a disc somewhere, under noise; the hint is one pixel, its middle.
down, right = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
middle = torch.randint(4, 12, (2, 32, 1, 1, 1))
discs = ((down - middle[0]).square() + (right - middle[1]).square() < 14).float()
inputs = discs + torch.randn(32, 3, 16, 16), ((down == middle[0]) & (right == middle[1])).float()


def train(network, steps):
    optimizer = torch.optim.Adam(network.train().parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(network(*inputs), discs).backward()
        optimizer.step()


model = TwoEyedUnet()
pruner = sbf.Pruner(model, inputs, budget=sbf.Budget(macs="40%"), scores=sbf.Scores(speed=0.1))
for part_of_the_way in (0.5, 1, 1):
    with pruner.gated():  # at first all gates are open: plain training
        train(model, steps=10)
    pruner.progress = part_of_the_way  # the limit closes in
    with pruner.scoring(tune=lambda: model(*inputs)):
        for _ in range(5):
            (F.binary_cross_entropy_with_logits(model(*inputs), discs) + pruner.penalty()).backward()
            pruner.step()

small = pruner.extract()
with torch.no_grad():
    torch.testing.assert_close(small.eval()(*inputs), model.eval()(*inputs), rtol=1e-4, atol=1e-4)
train(small, steps=10)
left = sbf.measure(small, inputs).macs / sbf.measure(model, inputs).macs
found = small.eval()(*inputs) > 0
overlap = ((found & (discs > 0)).sum() / (found | (discs > 0)).sum()).item()
print(f"filters kept: {pruner.plan().widths()}")
print(f"{left:.1%} of the MACs left; overlap with the discs {overlap:.0%}")

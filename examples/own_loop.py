"""Scores in a training loop of your own: warm-up, cycles of scores and weights, removal, fine-tuning.

Nobody says how small the network is to be: that comes out of the penalty.  Put your network, images and loss in the
place of these, and keep the two `with` blocks.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sbf_pruner as sbf

torch.manual_seed(0)
# Made-up images: waves in one of four directions, under noise.
labels = torch.randint(0, 4, (768,))
down, right = torch.meshgrid(torch.linspace(-5, 5, 12), torch.linspace(-5, 5, 12), indexing="ij")
angles = labels.view(-1, 1, 1) * torch.pi / 4
images = (torch.sin(down * angles.sin() + right * angles.cos()) + 2 * torch.randn(768, 12, 12)).unsqueeze(1)
loader = DataLoader(TensorDataset(images[:512], labels[:512]), batch_size=64, shuffle=True)

model = nn.Sequential(
    *(nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU()),
    *(nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 4)),
)
criterion = nn.CrossEntropyLoss()


def train(network, epochs, lr=2e-3):
    network.train()
    optimizer = torch.optim.Adam(network.parameters(), lr)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(network(x), y).backward()
            optimizer.step()


def accuracy(network):
    with torch.no_grad():
        return 100 * (network.eval()(images[512:]).argmax(1) == labels[512:]).float().mean().item()


train(model, epochs=4)
dense = accuracy(model)

pruner = sbf.Pruner(
    model, images[:1], scores=sbf.Scores(penalty=0.01, speed=0.1)
)  # speed: how far a score's logit moves in a step
for _ in range(3):
    with pruner.scoring():  # weights and batch norm frozen, continuous scores
        for x, y in loader:
            (criterion(model(x), y) + pruner.penalty()).backward()
            pruner.step()
    with pruner.gated():  # scores frozen, every filter on or off
        train(model, epochs=1)

small = pruner.extract()  # an ordinary, smaller module; `model` still computes the same, with its gates
with torch.no_grad():
    torch.testing.assert_close(small.eval()(images), model.eval()(images), rtol=1e-4, atol=1e-4)
train(small, epochs=4)

pruned, left = accuracy(small), sbf.measure(small, images[:1]).macs / sbf.measure(model, images[:1]).macs
print(f"filters kept: {pruner.plan().widths()}")
print(f"{left:.0%} of the MACs left; accuracy {dense:.1f} % dense, {pruned:.1f} % pruned")

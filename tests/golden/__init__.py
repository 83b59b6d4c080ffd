"""The network of the golden files, and the images it is compared on; `tools/golden.py` writes the files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

RECIPE: dict[str, Any] = {
    "name": "golden",
    "dense_control": False,
    "device": "cpu",
    "threads": 1,
    "model": {"name": "golden:Tiny", "num_classes": 4, "in_channels": 1},
    "data": {"name": "synthetic", "image_size": 8, "channels": 1, "samples": 32, "batch_size": 16},
    "phases": {"warmup": 1, "cycles": 1, "score": 2, "weights": 1, "finetune": 1},
    "scores": {"speed": 0.05},
    "budget": {"macs": 0.6},
}


class Tiny(nn.Module):
    """A stem, one residual block and a classifier."""

    def __init__(self, num_classes: int = 4, in_channels: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.branch = nn.Sequential(nn.Conv2d(6, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU())
        self.back = nn.Conv2d(5, 6, 1)
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        return self.fc(torch.relu(x + self.back(self.branch(x))).mean((2, 3)))


def images(count: int = 2) -> Tensor:
    """Images that are the same in every version of torch."""
    return torch.arange(count * 64, dtype=torch.float32).mul(0.7).sin().reshape(count, 1, 8, 8)

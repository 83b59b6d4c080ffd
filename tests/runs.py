"""Small runs to draw: a residual network on made-up images, trained in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbf_pruner.training.engine import Engine
from sbf_pruner.training.loop import Result, fit
from sbf_pruner.training.machine import Machine
from sbf_pruner.training.recipe import Recipe

EPOCHS = 10


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(out + x)


class Small(nn.Module):
    """A stem, two residual blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(torch.relu(self.norm(self.stem(x)))).mean((2, 3)))


def small_recipe(**changes: Any) -> Recipe:
    table: dict[str, Any] = {
        "name": "small",
        "dense_control": True,
        "device": "cpu",
        "model": {"name": "tests:Small", "num_classes": 4, "in_channels": 1},
        "data": {"name": "synthetic", "image_size": 8, "channels": 1, "samples": 64, "batch_size": 16},
        "phases": {"warmup": 2, "cycles": 2, "score": 2, "weights": 1, "finetune": 2},
        "scores": {"lr": 3e-3, "penalty": 0.02},
    }
    return Recipe.from_dict({**table, **changes})


def small_run(folder: Path, report: Any = None, force: bool = False, **changes: Any) -> Result:
    """Train a small network in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbf_pruner.training.summary.TIMED_SECONDS", 0.0)
        torch.manual_seed(0)
        return fit(Small(), small_recipe(**changes), run=folder, report=report, force=force)


def made_by(kind: type[Engine]) -> Callable[..., Engine]:
    """In the place of `make_engine`: an engine of one kind, whatever the machine asks for."""

    def make(network: nn.Module, machine: Machine, pruner: Any = None, team: Any = None) -> Engine:
        return kind(network, machine.device, pruner, team, order=machine.order)

    return make

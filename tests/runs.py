"""Small runs to draw: a residual network on made-up images, trained in a second."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbf_pruner.models import ResNet
from sbf_pruner.training import ComputeConfig, Recipe, Result, fit
from sbf_pruner.training.engine import Engine

EPOCHS = 10
HOSTILE = """<script>alert(1)</script>"'><img src=x onerror=alert(1)>"""
FOLDER = """<img src=x onerror=alert(1)>"'"""  # without a slash, so that a file can have this name


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

    def __init__(self, num_classes: int = 4, in_channels: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(torch.relu(self.norm(self.stem(x)))).mean((2, 3)))


def resnet8(num_classes: int = 10, in_channels: int = 3) -> ResNet:
    """A CIFAR ResNet with one block in each stage: as wide as the others, and traced in a third of the time."""
    return ResNet(1, num_classes, in_channels)


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
        patch.setattr("sbf_pruner.training.recording.TIMED_SECONDS", 0.0)
        torch.manual_seed(0)
        return fit(Small(), small_recipe(**changes), run=folder, report=report, force=force)


def made_by(kind: type[Engine]) -> Callable[..., Engine]:
    """In the place of `make_engine`: an engine of one kind, whatever the machine asks for."""

    def make(network: nn.Module, machine: ComputeConfig, pruner: Any = None, team: Any = None) -> Engine:
        return kind(network, machine.device, pruner, team, order=machine.order)

    return make


def hostile(held: Any, words: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> Any:
    """Plain values with markup around every string but those of `words`, and around the keys of `names`."""
    if isinstance(held, str):
        return f"{HOSTILE}{held}{HOSTILE}"
    if isinstance(held, list):
        return [hostile(item, words, names) for item in held]
    if not isinstance(held, dict):
        return held
    found = {key: item if key in words else hostile(item, words, names) for key, item in held.items()}
    return {
        key: {hostile(name): inner for name, inner in item.items()}
        if key in names and isinstance(item, dict)
        else item
        for key, item in found.items()
    }


def foreign_copy(folder: Path, to: Path, **summary: Any) -> Path:
    """A copy of a finished run in which every string that may be free text holds markup."""
    shutil.copytree(folder, to)
    named = ("layers", "skipped", "environment", "machine", "macs_left", "scores", "kept", "keep")
    for path in (to / "network.json", to / "plan.json", to / "summary.json"):
        held = json.loads(path.read_text())
        if path.name == "summary.json":
            held |= summary
        path.write_text(json.dumps(hostile(held, names=named)))
    for path in (to / "metrics.jsonl", to / "scores.jsonl"):
        lines = map(json.loads, path.read_text().splitlines())
        path.write_text("".join(f"{json.dumps(hostile(line, ('phase',), named))}\n" for line in lines))
    recipe = (to / "recipe.toml").read_text()
    (to / "recipe.toml").write_text(re.sub(r'"([^"\n]*)"', lambda text: json.dumps(hostile(text[1])), recipe))
    return to


ASKED: dict[str, Any] = {"budget": {"macs": 0.5}, "dense_control": False}


def ranked_run(folder: Path, method: str, seed: int = 0, **more: Any) -> Result:
    """Train a small run whose filters `method` chooses, to half of the MACs unless `changes` says otherwise."""
    torch.manual_seed(seed)
    changes = {**ASKED, **more.pop("changes", {})}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbf_pruner.training.recording.TIMED_SECONDS", 0.0)  # nobody looks at the latency here
        return fit(Small(), small_recipe(method=method, **changes), run=folder, **more)

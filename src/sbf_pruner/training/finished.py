"""A finished run, read back from its folder.

A path enters; the recipe, the summary, the small network and the function that builds the dense one leave.
What holds: a folder without a run, or with one that has not come to its end, is said to be so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import RunError
from ..export import load
from ..models import resolve
from .folder import RunFolder
from .recipe import Recipe


@dataclass(frozen=True)
class FinishedRun:
    """What a run left behind."""

    path: Path
    recipe: Recipe
    summary: dict[str, Any]
    build: Callable[[], nn.Module]
    """makes the dense network, with fresh weights"""
    small: nn.Module
    """the pruned network, in evaluation mode"""


def read_run(path: str | Path, otherwise: str = "") -> FinishedRun:
    """Read a finished run; `otherwise` ends the sentence that says there is none."""
    folder = RunFolder(Path(path))
    if not folder.begun:
        raise RunError(f"there is no run in {path}; name the folder of a finished run{otherwise}")
    if not folder.finished:
        raise RunError(f"the run in {path} is not finished; let it end (sbf run ... --resume)")
    recipe = folder.read_recipe()
    build = partial(build_dense, recipe)
    summary = folder.read_summary()
    return FinishedRun(folder.path, recipe, summary, build, load(folder.path, build).eval())


def build_dense(recipe: Recipe) -> nn.Module:
    """The dense network of a recipe, with fresh weights."""
    config = recipe.model
    torch.manual_seed(recipe.seed)
    return resolve(config.name, num_classes=config.num_classes, in_channels=config.in_channels, **config.options)

"""A finished run, read back from its folder: its recipe, its summary, and both networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..callables import UNTRUSTED, Origin
from ..errors import RunError
from ..export import load
from ..models import build_network
from .folder import RunFolder
from .recipe import Recipe


@dataclass(frozen=True)
class FinishedRun:
    """What a run left behind."""

    path: Path
    origin: Origin
    recipe: Recipe
    summary: dict[str, Any]
    build: Callable[[], nn.Module]
    """makes the dense network, with fresh weights"""
    small: nn.Module
    """the pruned network, in evaluation mode"""


def read_run(path: str | Path, otherwise: str = "", *, trust: bool = False) -> FinishedRun:
    """Read a finished run; `otherwise` ends the sentence that says there is none.

    Code that its recipe names is imported only with `trust`.
    """
    folder = RunFolder(Path(path))
    if not folder.begun:
        raise RunError(f"there is no run in {path}; name the folder of a finished run{otherwise}")
    if not folder.finished:
        raise RunError(f"the run in {path} is not finished; let it end (sbf run ... --resume)")
    recipe = folder.read_recipe()
    origin = folder.origin(trust=trust)
    build = partial(build_dense, recipe, origin)
    summary = folder.read_summary()
    return FinishedRun(folder.path, origin, recipe, summary, build, load(folder.path, build).eval())


def build_dense(recipe: Recipe, origin: Origin = UNTRUSTED) -> nn.Module:
    """Build the dense network of a recipe, with fresh weights; code of the user's only if `origin` is trusted."""
    config = recipe.model
    torch.manual_seed(recipe.seed)
    given = {"num_classes": config.num_classes, "in_channels": config.in_channels, **config.options}
    return build_network(config.name, given, origin)

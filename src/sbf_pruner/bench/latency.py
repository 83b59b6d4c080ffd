"""`sbf latency`: what a network's time is made of here, how well it is foretold, and what a target would leave.

A network, or a recipe, enters; plain data leaves, all of it JSON, and the file that `latency.table` takes.  What
holds: the errors stated are of networks that were really cut, and that the fit had not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..budget.guards import Guards
from ..budget.targets import Budget
from ..callables import NAMED
from ..errors import PruningError, nearest
from ..latency.model import LatencyModel
from ..latency.ways import choose_way
from ..models import resolve
from ..stopwatch.runtimes import RUNTIMES
from ..stopwatch.source import get_model, here
from ..training.data import load_data
from ..training.finished import build_dense
from ..training.recipe import bundled_recipes, load_recipe

TARGETS = (0.8, 0.6, 0.4)  # of the dense network's time
Report = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    runtime: str = "onnxruntime"
    batch: int = 64
    threads: int | None = None
    fresh: bool = False
    """measure again what is known already"""

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise PruningError(f"--runtime: none is called {self.runtime!r}; {nearest(self.runtime, RUNTIMES)}")
        for flag, number in (("--batch", self.batch), ("--threads", self.threads)):
            if number is not None and number < 1:
                raise PruningError(f"{flag} must be at least 1")


def known_by(
    subject: str, shapes: Sequence[Sequence[int]], options: Mapping[str, Any], usual: Sequence[int]
) -> tuple[nn.Module, tuple[Tensor, ...], tuple[str, ...]]:
    """The network that a model's or a recipe's name stands for, inputs for it, and the layers to leave alone.

    `shapes` are the sizes of its inputs that were given, `usual` is that of the only one where none was.
    """
    if Path(subject).suffix == ".toml" or subject in bundled_recipes():
        if shapes or options:
            raise PruningError("--input and --option belong to a model; a recipe knows its own")
        recipe = load_recipe(subject)
        data = load_data(recipe.data, recipe.model.num_classes, recipe.seed, NAMED)
        return build_dense(recipe, NAMED).eval(), (torch.zeros(1, *data.test.shape),), recipe.guards.ignore
    torch.manual_seed(0)
    given = shapes or [usual]
    network = resolve(subject, **{"in_channels": given[0][0], **options}).eval()
    return network, tuple(torch.zeros(1, *shape) for shape in given), ()


def measured(
    network: nn.Module, example: Any, ignore: tuple[str, ...], request: Request, report: Report
) -> LatencyModel:
    """What there is to know of a network's time on this machine."""
    conditions = here(request.runtime, request.batch, request.threads or torch.get_num_threads())
    return get_model(network, example, conditions, ignore=ignore, fresh=request.fresh, report=report)


def latency(subject: str, model: LatencyModel) -> dict[str, Any]:
    """What was found, as plain data."""
    held = model.conditions
    targets = []
    for share in TARGETS:
        chosen = choose_way(model.graph, model, Budget(latency=share), Guards())
        targets.append({"asked": share, **chosen.to_dict()})
    networks = [
        {key: one[key] for key in ("way", "share", "measured", "foretold")} for one in model.calibration["networks"]
    ]
    return {
        "subject": subject,
        "runtime": held.runtime,
        "batch": held.batch,
        "threads": held.threads,
        "machine": dict(held.machine),
        "load": model.calibration.get("load"),
        "dense_ms": 1e3 * model.dense_seconds,
        "layers": sum(map(len, model.table.points.values())),
        "networks": networks,
        "mean_error": model.calibration.get("mean_error"),
        "worst_error": model.calibration.get("worst_error"),
        "targets": targets,
    }

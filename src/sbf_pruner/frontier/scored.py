"""The network of a run as its cycles left it: dense, with a score for every filter, and nothing cut yet.

A run's folder enters; the network, its scores, the guards and the images to try it on leave.  What holds: a run
that has no such network is said to have none, why, and what to do; no file is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ..budget.landing import Values
from ..errors import RunError
from ..plan import Plan
from ..report.data import Record
from ..report.data import read_run as read_records
from ..training.batches import Batches
from ..training.checkpoint import REMEDY, load_checkpoint
from ..training.data import load_data
from ..training.feed import Feed
from ..training.finished import build_dense
from ..training.folder import SCORED, RunFolder
from ..training.machine import choose_device
from ..training.networks import Networks
from ..training.recipe import Recipe
from ..training.schedule import cycles_end


@dataclass(frozen=True)
class Scored:
    """A dense network, the score of each of its filters, and what a run made of them."""

    folder: RunFolder
    recipe: Recipe
    networks: Networks
    scores: dict[str, Values]
    plan: Plan
    """the filters that the run itself kept"""
    train: Batches
    judged: Batches
    """what accuracy is taken on: the validation images, or those of the test where none are held out"""
    judged_on: str
    records: list[Record]
    summary: Record | None

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return self.train.device

    def accuracy_of(self, record: Record) -> float | None:
        """The accuracy in a record of the run, on the same images."""
        key = "validation_accuracy" if self.judged_on == "validation" else "test_accuracy"
        found: float | None = record[key]
        return found


def find_run(path: str | Path, device: str | None = None) -> tuple[RunFolder, Recipe, torch.device]:
    """The folder of a run, its recipe, and where to look at it; `device` is another than the recipe says."""
    folder = RunFolder(Path(path))
    if not folder.begun:
        raise RunError(f"there is no run in {path}; name the folder of a run")
    recipe = folder.read_recipe()
    # A run that was made on a GPU may be looked at without one.
    return folder, recipe, choose_device(device or ("auto" if recipe.device == "cuda" else recipe.device))


def read_scored(path: str | Path, device: str | None = None, *, trust: bool = False) -> Scored:
    """Read a run that is past its cycles, finished or not; `device` is another than its recipe says.

    Code that its recipe names is imported only with `trust`.
    """
    folder, recipe, where = find_run(path, device)
    _check_far_enough(folder, recipe)
    state = load_checkpoint(folder.checkpoints, SCORED)
    origin = folder.origin(trust=trust)
    data = load_data(recipe.data, recipe.model.num_classes, recipe.seed, origin)
    model = build_dense(recipe, origin)
    feed = Feed(recipe, data, where, model)
    # The weights the run began with are not needed: the file holds those it came to.
    bare = replace(recipe, model=replace(recipe.model, weights=""))
    networks = Networks(model, bare, data, feed, where, folder.latency)
    _load(networks.dense, state["dense"], folder)
    known = read_records(folder.path)
    return Scored(
        folder,
        recipe,
        networks,
        {name: np.asarray(held.cpu()) for name, held in state["scores"].items()},
        Plan(state["plan"]),
        feed.train,
        feed.test if feed.validation is None else feed.validation,
        "test" if feed.validation is None else "validation",
        known.records,
        known.summary,
    )


def _check_far_enough(folder: RunFolder, recipe: Recipe) -> None:
    if folder.has_checkpoint(SCORED):
        return
    end = cycles_end(recipe)
    if end is None:
        raise RunError(
            f"the run in {folder.path} has no cycles (phases.cycles = {recipe.phases.cycles}, phases.score = "
            f"{recipe.phases.score}), so it has no scores to choose by; name one that has"
        )
    lines = folder.metrics.read_text("utf-8").count("\n") if folder.metrics.is_file() else 0
    if not folder.finished and lines <= end:
        raise RunError(
            f"the run in {folder.path} has come to epoch {lines}, and its scores are ready after {end}; let it "
            "go on (sbf run ... --resume)"
        )
    raise RunError(
        f"the run in {folder.path} has no checkpoints/{SCORED}: an older version made it, or the file was left "
        f"behind when it was moved; {REMEDY}"
    )


def _load(network: nn.Module, weights: dict[str, torch.Tensor], folder: RunFolder) -> None:
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(
            f"the network that the recipe builds is no longer that of the run in {folder.path}; put its code back"
        ) from error

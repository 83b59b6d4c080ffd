"""The dense stage of another run, taken over instead of trained again: many sizes from one warm-up.

A recipe and the folder of a run that is past its warm-up enter; the weights the warm-up left and its records leave.
What holds: the two recipes agree in all that a warm-up depends on, so a run that takes one over ends as if it had
trained it itself, on the CPU to the last bit; nothing is written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import RunError
from ..files import flat
from .checkpoint import load_checkpoint
from .folder import DENSE, RunFolder
from .recipe import Recipe
from .schedule import total_epochs

DECIDES = ("seed", "model.", "data.", "warmup.", "phases.warmup")  # settings that the dense stage follows from


@dataclass(frozen=True)
class DenseStage:
    """What a warm-up came to."""

    run: str
    """the folder of the run that trained it"""
    weights: dict[str, Tensor]
    records: list[dict[str, Any]]

    @property
    def accuracy(self) -> float:
        """On the test images, after its last epoch."""
        accuracy = self.records[-1]["test_accuracy"]
        assert isinstance(accuracy, float)
        return accuracy

    @property
    def seconds(self) -> float:
        """What its training took."""
        return float(sum(record["seconds"] for record in self.records))


def read_dense_stage(path: str | Path, recipe: Recipe) -> DenseStage:
    """The dense stage of the run in `path`, as `recipe` would train it; a RunError where it would train another."""
    source = RunFolder(Path(path))
    if not source.begun:
        raise RunError(f"there is no run in {path} to take the dense stage from; name the folder of a run")
    theirs, ours = (flat(each.to_dict()) for each in (source.read_recipe(), recipe))
    for key in (key for key in [*ours, *theirs] if key.startswith(DECIDES)):
        if theirs.get(key) != ours.get(key):
            raise RunError(
                f"the dense stage of {path} was trained with {key} = {theirs.get(key)!r}, not {ours.get(key)!r}; "
                "take over one of the same network, data, warm-up and seed, or train it (leave out --dense-from)"
            )
    epochs = recipe.phases.warmup
    if not epochs:
        raise RunError("the recipe has no dense stage to take over (phases.warmup = 0); leave out --dense-from")
    records = source.read_metrics()[:epochs]
    if not source.has_checkpoint(DENSE):
        raise RunError(
            f"the run in {path} has no checkpoints/{DENSE}: it is not past its warm-up, or the file was not copied "
            "along; wait for it, or leave out --dense-from"
        )
    if len(records) < epochs:
        raise RunError(
            f"{source.metrics} tells of {len(records)} of the {epochs} epochs of the warm-up; put the file back, "
            "or leave out --dense-from"
        )
    total = total_epochs(recipe)
    weights = load_checkpoint(source.checkpoints, DENSE, "take over another run's, or leave out --dense-from")
    return DenseStage(str(path), weights, [{**record, "total": total} for record in records])

"""Phases of a run, their order and lengths, and the format strings of the files in its folder.

Used by training and by reports. Reports read the recipe from the run folder as a nested dict, so `phases_of` takes
a mapping instead of a `Recipe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from .criteria import METHODS, OWN

RECIPE_FORMAT = "sbf-pruner recipe 1"
RUN_FORMAT = "sbf-pruner run 1"  # in summary.json and network.json

Kind = Literal["warmup", "score", "weights", "joint", "finetune", "control"]
SCORE_KINDS = ("score", "joint")  # kinds of phases that train scores


class Phase(NamedTuple):
    """Consecutive epochs that train the same parameters in the same way."""

    kind: Kind
    cycle: int
    """Number of the cycle that the phase belongs to, counted from 1; 0 if it belongs to none."""
    epochs: int
    first: int
    """Number of the first epoch of the phase, counted from 0 over the whole run."""

    @property
    def end(self) -> int:
        """Number of the first epoch after the phase."""
        return self.first + self.epochs

    @property
    def trains_scores(self) -> bool:
        """Return True if the phase trains scores."""
        return self.kind in SCORE_KINDS

    @property
    def trains_weights(self) -> bool:
        """Return True if the phase trains weights."""
        return self.kind != "score"

    def __str__(self) -> str:
        return f"{self.kind} {self.cycle}" if self.cycle else self.kind


def phases_of(recipe: Mapping[str, Any]) -> list[Phase]:
    """Return the phases of a run in order, without those of zero epochs; `recipe` is a result of `Recipe.to_dict`.

    The dense control gets as many epochs as all other phases together. Under a soft method (such as sfp) all epochs
    of a cycle train weights, under another method that learns scores (such as dmc) all train scores. Under a method
    that ranks filters once (such as l1) the epochs of the cycles are added to fine-tuning.

    >>> lengths = {"warmup": 2, "cycles": 2, "score": 1, "weights": 2, "finetune": 3}
    >>> [(phase.kind, phase.epochs) for phase in phases_of({"phases": lengths, "method": "l1"})]
    [('warmup', 2), ('finetune', 9)]
    >>> [(phase.kind, phase.first) for phase in phases_of({"phases": lengths, "method": "sfp"})]
    [('warmup', 0), ('weights', 2), ('weights', 5), ('finetune', 8)]
    """
    lengths, name = recipe["phases"], recipe.get("method", OWN)
    method, each = METHODS.get(name), lengths["score"] + lengths["weights"]
    cycle: list[tuple[Kind, int]] = [("score", lengths["score"]), ("weights", lengths["weights"])]
    if method is not None and (method.soft or method.learned):
        cycle = [("weights" if method.soft else "score", each)]
    elif name == OWN and recipe.get("scores", {}).get("joint"):
        cycle = [("joint", each)]
    ranked = name != OWN and (method is None or not (method.soft or method.learned))
    cycles = 0 if ranked else lengths["cycles"]
    order: list[tuple[Kind, int, int]] = [("warmup", 0, lengths["warmup"])]
    order += [(kind, number, epochs) for number in range(1, cycles + 1) for kind, epochs in cycle]
    order.append(("finetune", 0, lengths["finetune"] + (lengths["cycles"] - cycles) * each))
    if recipe.get("dense_control"):
        order.append(("control", 0, sum(epochs for _, _, epochs in order)))
    found, first = [], 0
    for kind, number, epochs in order:
        if epochs:
            found.append(Phase(kind, number, epochs, first))
        first += epochs
    return found

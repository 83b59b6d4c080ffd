"""What the penalty of the digits recipe was chosen by: a fifth of the training images, held out.

The rule, fixed before the runs: the strongest penalty that loses at most half a point to the dense control of equal
epochs, in the mean over all seeds.  Every run is saved as it ends; one that is there is not made again.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from typing import Any

import sbf_pruner as sbf
from saving import held, held_runs, save_result
from sbf_pruner.training import build_dense

PENALTIES = (6e-4, 1.2e-3, 2.4e-3, 4.8e-3)
SEEDS = tuple(range(5))
POINTS_LOST = 0.5
HELD_OUT = ["data.validation=0.2"]
NAME = "digits_choice"


def main() -> int:
    for seed in SEEDS:
        for penalty in PENALTIES:
            asked = {"penalty": penalty, "seed": seed}
            if held(held_runs(NAME), asked) is None:
                save([*held_runs(NAME), {**asked, **figures(penalty, seed)}])
    return 0


def figures(penalty: float, seed: int) -> dict[str, Any]:
    """One run, judged on the images that were held out; the first of a seed has the dense control."""
    controlled = penalty == PENALTIES[0]
    changes = [*HELD_OUT, f"scores.penalty={penalty}", f"seed={seed}", f"dense_control={str(controlled).lower()}"]
    recipe = sbf.Recipe.load("digits", changes)
    with tempfile.TemporaryDirectory() as folder:
        summary = sbf.fit(build_dense(recipe), recipe, run=f"{folder}/run").summary
    dense, pruned = summary["dense"], summary["pruned"]
    return {
        "dense_accuracy": dense["validation_accuracy"] if controlled else None,
        "accuracy": pruned["validation_accuracy"],
        "macs_removed": 100 * (1 - pruned["macs"] / dense["macs"]),
        "params_removed": 100 * (1 - pruned["params"] / dense["params"]),
    }


def save(runs: list[dict[str, Any]]) -> None:
    """All runs so far and, once there are all, what the rule makes of them."""
    recipe = sbf.Recipe.load("digits", HELD_OUT)
    chosen = choose(runs) if len(runs) == len(PENALTIES) * len(SEEDS) else None
    save_result(NAME, {"rule": POINTS_LOST, "chosen": chosen, "runs": runs, "recipe": recipe.to_dict()})
    print(runs[-1], "chosen:", chosen, flush=True)


def choose(runs: list[dict[str, Any]]) -> float | None:
    """The strongest penalty that loses no more than the rule allows."""
    dense = statistics.fmean(run["dense_accuracy"] for run in runs if run["dense_accuracy"] is not None)
    means = {
        penalty: statistics.fmean(run["accuracy"] for run in runs if run["penalty"] == penalty)
        for penalty in PENALTIES
    }
    return max((penalty for penalty, mean in means.items() if mean >= dense - POINTS_LOST), default=None)


if __name__ == "__main__":
    sys.exit(main())

"""Methods against each other: what `sbf compare` is for, on scales that fit a lunch break or an afternoon.

python benchmarks/methods.py        every method on the digits, 0.3 and 0.1 of the MACs, three seeds
python benchmarks/methods.py few    some of them on 10,000 images of CIFAR-10 (benchmarks/few.toml), 0.2 of the MACs

The second takes the images from where `sbf data cifar10` has put them.  Every run is saved as it ends; one that is
there is not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import sbf_pruner as sbf
from saving import held, held_runs, save_result
from sbf_pruner.compare import plan_runs
from sbf_pruner.criteria import METHODS, OWN
from sbf_pruner.training.data import load_cifar10

HERE = Path(__file__).parent
OF_EACH_CLASS = 1_000


@dataclass(frozen=True)
class Contest:
    """Who competes, at which sizes, with which seeds."""

    result: str
    recipe: str
    methods: tuple[str, ...]
    shares: tuple[float, ...]
    seeds: tuple[int, ...]


CONTESTS = {
    "digits": Contest("methods", "digits", (OWN, *METHODS), (0.3, 0.1), (0, 1, 2)),
    "few": Contest(
        "few_methods",
        str(HERE / "few.toml"),
        (OWN, "l1", "chip", "taylor", "random"),
        (0.2,),
        (0, 1, 2),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("contest", nargs="?", choices=CONTESTS, default="digits")
    parser.add_argument("--seeds", help="some of the seeds, as 0,1; the others are made another time")
    arguments = parser.parse_args()
    contest = CONTESTS[arguments.contest]
    seeds = contest.seeds if arguments.seeds is None else [int(seed) for seed in arguments.seeds.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        changes = []
        if arguments.contest == "few":
            changes.append(f"data.path={few(Path(folder) / 'few.npz')}")
        for share in contest.shares:
            for seed in seeds:
                compete(contest, share, seed, changes, Path(folder) / f"{share}-{seed}")
    return 0


def compete(contest: Contest, share: float, seed: int, changes: list[str], folder: Path) -> None:
    """Make the runs of one size and seed that are not there yet."""
    recipe = sbf.Recipe.load(contest.recipe, [f"budget.macs={share}", *changes])
    asked = {method: {"share": share, "seed": seed, "method": method} for method in contest.methods}
    runs = held_runs(contest.result)
    if all(held(runs, what) for what in asked.values()):
        return
    for entrant in plan_runs(
        recipe, list(contest.methods), [seed], folder
    ):  # the first trains what the others share
        before = held(held_runs(contest.result), asked[entrant.method])
        if entrant.method != OWN and before is not None:
            continue
        summary = entrant.run().summary
        runs = [run for run in held_runs(contest.result) if run != before]
        runs.append({**asked[entrant.method], **_figures(summary)})
        print(json.dumps(runs[-1]), flush=True)
        told = {**recipe.to_dict(), "data": {**recipe.to_dict()["data"], "path": ""}}
        save_result(contest.result, {"runs": runs, "recipe": told, "environment": summary["environment"]})


def few(target: Path) -> Path:
    """The first images of each class for training, and all test images, as a file that recipes read."""
    held = load_cifar10()
    images, labels = held["train"]
    chosen = np.sort(np.concatenate([np.flatnonzero(labels == label)[:OF_EACH_CLASS] for label in range(10)]))
    x_test, y_test = held["test"]
    np.savez(target, x_train=images[chosen], y_train=labels[chosen], x_test=x_test, y_test=y_test)
    return target


def _figures(summary: dict[str, Any]) -> dict[str, Any]:
    dense, pruned = summary["dense"], summary["pruned"]
    return {
        "accuracy": pruned["accuracy"],
        "dense_accuracy": dense["accuracy"],
        "warmup_accuracy": dense["warmup_accuracy"],
        "params_left": pruned["params"] / dense["params"],
        "macs_left": pruned["macs"] / dense["macs"],
        "cut_error": summary["cut_error"],
        "epochs": summary["epochs"],
        "seconds": summary["seconds"],
    }


if __name__ == "__main__":
    sys.exit(main())

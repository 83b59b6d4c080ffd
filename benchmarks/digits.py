"""The claim of the demo: `sbf run digits` removes most of the work and keeps the accuracy.

Six seeds of the bundled recipe, each next to a dense control trained for as many epochs.  Saved are every
seed's figures, their mean and standard deviation, the resolved recipe, the machine and the versions.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import sbf_pruner as sbf
from saving import save_result
from sbf_pruner.training import build_dense

SEEDS = tuple(range(6))
FEWER_MACS = 45.0  # percent, of every seed
POINTS_LOST = 1.0  # in the mean


def main() -> int:
    runs, environment, recipe = [], {}, sbf.Recipe.load("digits")
    for seed in SEEDS:
        recipe = sbf.Recipe.load("digits", [f"seed={seed}"])
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            summary = sbf.fit(build_dense(recipe), recipe, run=f"{folder}/run").summary
        environment = summary["environment"]
        runs.append({**_figures(summary), "seconds": round(time.perf_counter() - began, 1)})
        print(f"seed {seed}: " + ", ".join(f"{key} {value:.4g}" for key, value in runs[-1].items()), flush=True)
    keys = [key for key in runs[0] if key != "seed"]
    spread = {key: _spread([run[key] for run in runs]) for key in keys}
    met = min(run["macs_removed"] for run in runs) >= FEWER_MACS
    met &= spread["accuracy_change"]["mean"] >= -POINTS_LOST
    figures = {
        "targets": {"macs_removed, every seed": FEWER_MACS, "accuracy lost, mean": POINTS_LOST, "met": met},
        "n": len(runs),
        "seeds": list(SEEDS),
        "spread": spread,
        "runs": runs,
        "environment": environment,
        "recipe": {**recipe.to_dict(), "seed": list(SEEDS)},
    }
    save_result("digits", figures)
    for key, held in spread.items():
        print(f"{key:18} {held['mean']:9.3f} +- {held['deviation']:.3f}")
    return 0 if met else 1


def _figures(summary: dict[str, Any]) -> dict[str, Any]:
    dense, pruned = summary["dense"], summary["pruned"]
    return {
        "seed": summary["seed"],
        "dense_accuracy": dense["accuracy"],
        "pruned_accuracy": pruned["accuracy"],
        "accuracy_change": pruned["accuracy"] - dense["accuracy"],
        "params_removed": 100 * (1 - pruned["params"] / dense["params"]),
        "macs_removed": 100 * (1 - pruned["macs"] / dense["macs"]),
        "latency_ratio": pruned["latency_ms"] / dense["latency_ms"],
        "cut_error": summary["cut_error"],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "deviation": statistics.stdev(values)}


if __name__ == "__main__":
    sys.exit(main())

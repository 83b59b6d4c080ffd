"""The claim of --target: a size asked for is a size delivered, without touching lambda.

The bundled digits recipe for 0.7, 0.5, 0.3 and 0.15 of the MACs and of the parameters, three seeds each; and
beside the paper's fixed lambda: each seed of the recipe as it is, then the same seed asked for the MACs that came
out.  Every run is saved as it ends, and one that is there already is not made again.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from typing import Any

import sbf_pruner as sbf
from saving import held, held_runs, save_result
from sbf_pruner.training import build_dense

SEEDS = (0, 1, 2)
SHARES = (0.7, 0.5, 0.3, 0.15)
POINT = 0.01


def main() -> int:
    runs = held_runs("targets")
    asked = [(key, share, seed) for key in ("macs", "params") for share in SHARES for seed in SEEDS]
    for key, share, seed in asked:
        _make(runs, {"kind": "target", "of": key, "share": share, "seed": seed}, [f"budget.{key}={share}"])
    for seed in SEEDS:
        plain = _make(runs, {"kind": "fixed lambda", "seed": seed}, [])
        share = round(plain["macs"], 6)
        _make(runs, {"kind": "beside", "of": "macs", "share": share, "seed": seed}, [f"budget.macs={share}"])
    landed = [run for run in runs if run["kind"] == "target"]
    missed = [run for run in landed if not 0 <= run["share"] - run[run["of"]] <= POINT]
    fixed, beside = ([r["accuracy"] for r in runs if r["kind"] == kind] for kind in ("fixed lambda", "beside"))
    print(
        f"{len(landed) - len(missed)} of {len(landed)} landed at most a point below what was asked for, none above"
    )
    print(f"at equal MACs: fixed lambda {statistics.fmean(fixed):.2f}, target {statistics.fmean(beside):.2f}")
    return 1 if missed else 0


def _make(runs: list[dict[str, Any]], what: dict[str, Any], sets: list[str]) -> dict[str, Any]:
    if (run := held(runs, what)) is not None:
        return run
    recipe = sbf.Recipe.load("digits", ["dense_control=false", f"seed={what['seed']}", *sets])
    with tempfile.TemporaryDirectory() as folder:
        summary = sbf.fit(build_dense(recipe), recipe, run=f"{folder}/run").summary
    dense, pruned = summary["dense"], summary["pruned"]
    left = {key: pruned[key] / dense[key] for key in ("macs", "params")}
    run = {**what, **left, "accuracy": pruned["accuracy"], "cut_error": summary["cut_error"]}
    runs.append(run)
    print(json.dumps(run), flush=True)
    save_result("targets", {"runs": runs, "environment": summary["environment"], "recipe": recipe.to_dict()})
    return run


if __name__ == "__main__":
    sys.exit(main())

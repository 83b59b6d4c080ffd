"""Methods against each other on the digits: what `sbf compare` is for, on a scale that fits a lunch break.

The bundled recipe asked for 0.3 and 0.1 of the MACs, by every method there is and with three seeds, each next to a
dense control of as many epochs.  Every run is saved as it ends; one that is there is not made again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from saving import held, held_runs, save_result
from targets import AIMED

import sbf_pruner as sbf
from sbf_pruner.contest import enter
from sbf_pruner.methods import METHODS, OWN

SHARES = (0.3, 0.1)
SEEDS = (0, 1, 2)


def main() -> int:
    runs = held_runs("methods")
    for share in SHARES:
        recipe = sbf.Recipe.load("digits", [*AIMED, f"budget.macs={share}"])
        for seed in SEEDS:
            asked = {method: {"share": share, "seed": seed, "method": method} for method in (OWN, *METHODS)}
            if all(held(runs, what) for what in asked.values()):
                continue
            with tempfile.TemporaryDirectory() as folder:  # the first of a seed trains what the others share
                for entrant in enter(recipe, [OWN, *METHODS], [seed], Path(folder)):
                    before = held(runs, asked[entrant.method])
                    if entrant.method != OWN and before is not None:
                        continue
                    summary = entrant.run().summary
                    runs = [run for run in runs if run is not before]
                    runs.append({**asked[entrant.method], **_figures(summary)})
                    print(json.dumps(runs[-1]), flush=True)
                    figures = {"runs": runs, "recipe": recipe.to_dict(), "environment": summary["environment"]}
                    save_result("methods", figures)
    return 0


def _figures(summary: dict[str, Any]) -> dict[str, Any]:
    dense, pruned = summary["dense"], summary["pruned"]
    return {
        "accuracy": pruned["accuracy"],
        "dense_accuracy": dense["accuracy"],
        "params_left": pruned["params"] / dense["params"],
        "macs_left": pruned["macs"] / dense["macs"],
        "cut_error": summary["cut_error"],
        "epochs": summary["epochs"],
        "seconds": summary["seconds"],
    }


if __name__ == "__main__":
    sys.exit(main())

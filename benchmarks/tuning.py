"""What it is worth that norms are tuned to the scores after a landing (`scores.recalibrate`).

ResNet-32 on the digits, asked for 0.3 and 0.15 of the MACs, with and without it, for several seeds.  Beside the
accuracy stand the loss that the last scores were trained on, and that of the last weights under gates: both from
before fine-tuning, which hides much.  Every run is saved as it ends; one that is there is not made again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import sbf_pruner as sbf
from saving import held, held_runs, save_result
from sbf_pruner.training import build_dense

SEEDS = range(5)
SHARES = (0.3, 0.15)
BATCHES = (20, 0)
# A deeper network than the recipe's needs smaller steps and a longer warm-up to learn the digits at all.
RECIPE = ["model.name=resnet32", "warmup.lr=0.02", "finetune.lr=0.02", "phases.warmup=20", "dense_control=false"]


def main() -> int:
    runs = held_runs("tuning")
    for seed in SEEDS:
        for share in SHARES:
            for batches in BATCHES:
                what = {"share": share, "batches": batches, "seed": seed}
                if held(runs, what) is not None:
                    continue
                figures, recipe, environment = measured(what)
                runs.append(what | figures)
                print(json.dumps(runs[-1]), flush=True)
                save_result("tuning", {"runs": runs, "environment": environment, "recipe": recipe})
    return 0


def measured(what: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any], dict[str, Any]]:
    """One run: its figures, its recipe, and where it was made."""
    changes = [f"seed={what['seed']}", f"budget.macs={what['share']}", f"scores.recalibrate={what['batches']}"]
    recipe = sbf.Recipe.load("digits", [*RECIPE, *changes])
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        summary = sbf.fit(build_dense(recipe), recipe, run=run).summary
        epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    last = {epoch["phase"]: epoch["loss"] for epoch in epochs}  # the last epoch of a phase stays
    figures = {
        "accuracy": summary["pruned"]["accuracy"],
        "macs": summary["pruned"]["macs"] / summary["dense"]["macs"],
        "score_loss": last["score"],
        "gated_loss": last["weights"],
    }
    return figures, recipe.to_dict(), summary["environment"]


if __name__ == "__main__":
    sys.exit(main())

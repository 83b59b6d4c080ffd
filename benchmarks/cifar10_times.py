"""What the networks of benchmarks/cifar10_latency.toml really take, on the machine their clock was measured on.

Finished runs enter, wherever they were trained; each plan is cut and timed beside the dense network, in turns, in
the runtime that its clock knows.  Time does not depend on weights, so the plan is enough.  Saves after every run.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
from jobs import read_runs
from latency import timed_pairs

from saving import save_result
from sbf_pruner import Plan
from sbf_pruner.graph import trace
from sbf_pruner.measurement import PlanTimer, comparable_conditions, conditions_here, read_model
from sbf_pruner.models import resolve

HERE = Path(__file__).resolve().parent
CLOCK = HERE / "clocks" / "resnet56-onnxruntime.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", default=str(HERE / "cifar10_latency.toml"))
    parser.add_argument("--root", default="runs/cifar10_latency")
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for a quiet machine")
    args = parser.parse_args()
    network, example = resolve("resnet56").eval(), torch.zeros(1, 3, 32, 32)
    clock = read_model(str(CLOCK), trace(network, example))
    held = clock.conditions
    if not comparable_conditions(held, conditions_here(held.runtime, held.batch, held.threads)):
        print(f"{CLOCK.name} was measured elsewhere ({held.told()}); make one: sbf latency resnet56 --out FILE")
        return 2
    pairs = PlanTimer(network, example, held)
    found: list[dict[str, Any]] = []
    for run in (run for run in read_runs(Path(args.jobs), Path(args.root), []) if run.finished):
        plan = Plan.load(run.folder / "plan.json")
        foretold = clock.ratio(plan.masks(clock.graph))
        summary = json.loads((run.folder / "summary.json").read_text("utf-8"))
        found.append(
            {
                "name": run.name,
                "group": run.group,
                "accuracy": summary["pruned"]["accuracy"],
                "macs": summary["pruned"]["macs"] / summary["dense"]["macs"],
                "way": summary.get("latency", {}).get("way", "filters"),
                "trained": {"date": _day(run.folder / "summary.json"), "gpu": summary["environment"]["gpu"]},
                "foretold": foretold,
                "pairs": timed_pairs(pairs, plan, args.pairs, args.patience),
            }
        )
        print(found[-1], flush=True)
        save_result("cifar10_times", {"network": "ResNet-56", "conditions": held.told(), "runs": found})
    return 0


def _day(path: Path) -> str:
    return date.fromtimestamp(path.stat().st_mtime).isoformat()


if __name__ == "__main__":
    sys.exit(main())

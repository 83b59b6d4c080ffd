"""Write the golden files of tests/golden: one file or folder of every format, and what reading it gives.

    python tools/golden.py            # all of them, into tests/golden

`tests/test_golden.py` reads them. A committed file must go on loading, so write them anew only when a format gets a
new version, and from the first release on keep the old ones beside the new ones.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

import sbf_pruner as sbf  # noqa: E402
from clocks import clock_of  # noqa: E402
from golden import RECIPE, Tiny, images  # noqa: E402
from sbf_pruner.export import ExportOptions, export_run  # noqa: E402
from sbf_pruner.training import Recipe, fit, load_checkpoint  # noqa: E402

GOLDEN = TESTS / "golden"
LEFT_OUT = ("report.html", "checkpoints/initial.safetensors", "checkpoints/scored.safetensors")  # of a finished run
STOPPED = 3  # epochs after which a run is stopped: its score phase has ended


class _Stop(Exception):
    """Raised to stop a run."""


def stop(record: Any) -> None:
    if record["done"] == STOPPED:
        raise _Stop


def train(folder: Path, report: Any = None) -> None:
    torch.manual_seed(0)
    fit(Tiny(), Recipe.from_dict(RECIPE), run=folder, report=report)


def scored_pruner() -> sbf.Pruner:
    """A pruner after a few steps of its scores."""
    torch.manual_seed(0)
    model = Tiny()
    pruner = sbf.Pruner(model, images(), budget=sbf.Budget(macs=0.5), scores=sbf.Scores(speed=0.05))
    with pruner.scoring():
        for _ in range(3):
            model(images()).square().mean().backward()
            pruner.step()
    return pruner


def main() -> None:
    for path in GOLDEN.iterdir():
        if path.name not in ("__init__.py", "__pycache__"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    told: dict[str, Any] = {"torch": torch.__version__.partition("+")[0]}
    run = GOLDEN / "run"
    train(run)
    export_run(run, GOLDEN / "export", ExportOptions(("pt2", "safetensors"), seconds=0.1, batch=2, trust=True))
    for name in LEFT_OUT:
        (run / name).unlink(missing_ok=True)
    try:
        train(GOLDEN / "stopped", stop)
    except _Stop:
        told["stopped"] = load_checkpoint(GOLDEN / "stopped" / "checkpoints")["done"]
    torch.manual_seed(0)
    model = Tiny().eval()
    graph = sbf.trace(model, images(1))
    plan = sbf.Plan({"stem": [0, 2, 3, 5], "branch.0": [1, 4]})
    small = sbf.extract(model, images(1), plan, graph)
    sbf.save(small, GOLDEN / "saved")
    pruner = scored_pruner()
    torch.save(pruner.state_dict(), GOLDEN / "state.pt")
    clock = clock_of(graph)
    clock.write(GOLDEN / "latency.json")
    with torch.no_grad():
        told["saved"] = small(images()).tolist()
        told["run"] = sbf.load(run, Tiny).eval()(images()).tolist()
    told["plan"] = {name: list(kept) for name, kept in sbf.Plan.load(GOLDEN / "saved" / "plan.json").keep.items()}
    told["state"] = {name: scores.tolist() for name, scores in pruner.scores().items()}
    told["latency"] = {"dense_seconds": clock.dense_seconds, "ratio": clock.ratio(plan.masks(graph))}
    (GOLDEN / "expected.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()

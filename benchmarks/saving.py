"""Where benchmarks put their figures: dated JSON under results/, with the machine and the versions.

A benchmark may save again and again as its figures come: a file is replaced in one step, so one that is killed
leaves what it had.
"""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import torch

from sbf_pruner.utils import environment, pluralize, write_text

RESULTS = Path(__file__).parent / "results"


def save_result(name: str, figures: dict[str, Any], device: str = "cpu") -> Path:
    """Write one benchmark's figures; the environment is added unless they bring their own."""
    path = RESULTS / f"{name}.json"
    head = {"benchmark": name, "date": date.today().isoformat()}
    held = {**head, **figures, "environment": figures.get("environment") or environment(torch.device(device))}
    write_text(path, json.dumps(held, indent=2) + "\n")
    return path


def held_runs(name: str) -> list[dict[str, Any]]:
    """The runs that a benchmark has saved so far."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text("utf-8"))["runs"] if path.is_file() else []


def held(runs: list[dict[str, Any]], what: dict[str, Any]) -> dict[str, Any] | None:
    """The run that was asked for so, if it is there."""
    return next((run for run in runs if what.items() <= run.items()), None)


def origin(result: dict[str, Any]) -> list[str]:
    """The line under a table that says which run it shows."""
    machine = result["environment"]
    where = machine["gpu"] or f"{machine['cpu']}, {pluralize(machine['threads'], 'thread')}"
    return [
        "",
        f"`benchmarks/results/{result['benchmark']}.json`: {where}, torch {machine['torch']}, {result['date']}.",
    ]

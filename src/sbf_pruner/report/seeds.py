"""Runs that differ in nothing but their seed, taken together: means and deviations.

Runs enter; a table leaves with a row for each recipe, the best first, or nothing where no recipe has several seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .chart import Figure, Table, scroll
from .data import Run
from .numbers import percent


def over_seeds(runs: Sequence[Run]) -> Figure | None:
    """What recipes come to over their seeds; runs that are not finished do not count."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.finished:
            # A control changes nothing of what is pruned, and is often trained for one run of several.
            own = {key: value for key, value in run.recipe.items() if key not in ("seed", "dense_control")}
            groups.setdefault(repr(own), []).append(run)
    found = [group for group in groups.values() if len({run.recipe.get("seed") for run in group}) == len(group)]
    if not any(len(group) > 1 for group in found):
        return None
    rows = [_row(group) for group in sorted(found, key=lambda group: -_mean(_accuracies(group)))]
    head = ["recipe", "seeds", "accuracy", "deviation", "parameters left", "MACs left"]
    table = Table(head, rows)
    body = scroll(table.html(), "Over seeds")
    return Figure("seeds", "Over seeds", "Means of runs that differ in nothing but the seed.", body, wide=True)


def _row(group: Sequence[Run]) -> list[str]:
    accuracies = _accuracies(group)
    spread = f"{statistics.stdev(accuracies):.2f}" if len(group) > 1 else ""
    sizes = [percent(100 * _mean([_left(run, key) for run in group]), 1) for key in ("params", "macs")]
    return [group[0].name, str(len(group)), percent(_mean(accuracies)), spread, *sizes]


def _accuracies(group: Sequence[Run]) -> list[float]:
    return [_part(run, "pruned")["accuracy"] for run in group]


def _left(run: Run, key: str) -> float:
    return float(_part(run, "pruned")[key] / _part(run, "dense")[key])


def _part(run: Run, name: str) -> dict[str, Any]:
    assert run.summary is not None
    part: dict[str, Any] = run.summary[name]
    return part


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)

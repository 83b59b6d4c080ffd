"""How methods did: each with the mean and the deviation over its seeds, the best first.

Summaries of finished runs enter; rows leave, and the same as plain data to be stored.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import write_text
from ..methods import judged_by
from ..report import write_report

PAGE = "comparison.html"
Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Standing:
    """One method over all its seeds."""

    method: str
    accuracy: tuple[float, ...]
    """after the last epoch on the test images, for each seed in order"""
    validation: tuple[float, ...]
    """the same on images that were held out; none where none were"""
    params: float
    macs: float
    """the part that is left of each, on average"""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracy)

    @property
    def deviation(self) -> float | None:
        """Between seeds; of one nothing is known."""
        return statistics.stdev(self.accuracy) if len(self.accuracy) > 1 else None


def standings(summaries: Sequence[Summary]) -> list[Standing]:
    """All methods, the best first.

    >>> size = {"params": 100, "macs": 100}
    >>> half = {"params": 40, "macs": 50, "validation_accuracy": None}
    >>> runs = [("l1", 90.0), ("l1", 92.0), ("chip", 93.0)]
    >>> found = standings([{"method": m, "dense": size, "pruned": {**half, "accuracy": a}} for m, a in runs])
    >>> [(one.method, one.mean, one.params) for one in found]
    [('chip', 93.0, 0.4), ('l1', 91.0, 0.4)]
    """
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary["method"], []).append(summary)
    found = [_standing(method, group) for method, group in groups.items()]
    return sorted(found, key=lambda one: -one.mean)


def _standing(method: str, group: Sequence[Summary]) -> Standing:
    held_out = [summary["pruned"]["validation_accuracy"] for summary in group]
    params, macs = (
        statistics.fmean(summary["pruned"][key] / summary["dense"][key] for summary in group)
        for key in ("params", "macs")
    )
    return Standing(
        method,
        tuple(summary["pruned"]["accuracy"] for summary in group),
        tuple(value for value in held_out if value is not None),
        params,
        macs,
    )


def leave(root: Path, runs: Sequence[Path], summaries: Sequence[Summary]) -> dict[str, Any]:
    """Write what came of a comparison beside its runs, as JSON and as a page; returns what the JSON holds."""
    result = to_json(summaries)
    write_text(root / "comparison.json", json.dumps(result, indent=2) + "\n")
    write_report(runs, root / PAGE)
    return result


def to_json(summaries: Sequence[Summary]) -> dict[str, Any]:
    """What was compared and what came of it; `runs` holds every summary."""
    controls = [summary["dense"]["accuracy"] for summary in summaries]
    return {
        "methods": [
            {
                "method": one.method,
                "judged_by": judged_by(one.method),
                "accuracy": list(one.accuracy),
                "mean": one.mean,
                "deviation": one.deviation,
                "validation_accuracy": list(one.validation),
                "params_left": one.params,
                "macs_left": one.macs,
            }
            for one in standings(summaries)
        ],
        "dense_accuracy": [value for value in controls if value is not None],
        "epochs": summaries[0]["epochs"],
        "runs": list(summaries),
    }

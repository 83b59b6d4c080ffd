"""The time that a run was asked for, as far as its folder tells: what was asked, foretold and measured, and where.

A folder, its recipe and its summary enter; plain values leave, those of `summary.json` once there is one, before
that what `latency.json` holds already; None where no time was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..budget.targets import MICROSECONDS

KNOWN = "latency.json"


def asked_time(folder: Path, recipe: Mapping[str, Any], summary: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What is known of the time asked for; "foretold" and "measured" are None as long as they are not."""
    if summary is not None and "latency" in summary:
        return dict(summary["latency"])
    wanted = float(recipe.get("budget", {}).get("latency", 1.0))
    if wanted == 1 or summary is not None:
        return None
    try:
        held = json.loads((folder / KNOWN).read_text("utf-8"))
        return _so_far(held, wanted)
    except (OSError, ValueError, KeyError, TypeError):  # it is being written, or the run has not come to it
        return None


def _so_far(held: Mapping[str, Any], wanted: float) -> dict[str, Any]:
    dense = float(held["dense_seconds"])
    asked = wanted if wanted < 1 else min(wanted / MICROSECONDS / dense, 1.0)
    landings = [{key: one[key] for key in ("foretold", "measured")} for one in held["rounds"]]
    found = [float(one["measured"]) for one in landings]
    return {
        "asked": asked,
        "foretold": None,
        "measured": min(found, key=lambda ratio: abs(ratio / asked - 1)) if found else None,
        "dense_ms": 1e3 * dense,
        "asked_ms": 1e3 * asked * dense,
        **{key: held[key] for key in ("runtime", "batch", "threads", "machine")},
        **held["chosen"],
        **{key: error for key, error in held["calibration"].items() if key.endswith("_error")},
        "landings": landings,
    }

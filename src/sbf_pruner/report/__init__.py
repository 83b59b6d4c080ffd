"""A run folder in; one self-contained HTML page out, of one run or of several side by side."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..utils.files import write_text
from ..utils.lazy import lazy_exports
from ..utils.paths import why_not_writable
from .comparison import comparison_page
from .page import run_page
from .run_data import read_run

NAME = "report.html"
COMPARISON = "comparison.html"


def write_report(folders: Sequence[str | Path], to: str | Path | None = None) -> Path:
    """Draw one run, into its own folder, or several beside each other; `to` names another file."""
    named: dict[Path, str | Path] = {}
    for folder in folders:
        named.setdefault(Path(folder).resolve(), folder)  # a run that is named twice is one run
    runs = list(map(read_run, named.values()))
    target = Path(to) if to is not None else runs[0].folder / NAME if len(runs) == 1 else Path(COMPARISON)
    if (reason := why_not_writable(target)) is not None:
        raise RunError(f"{target} cannot be written, because {reason}; name another file (--to)")
    write_text(target, run_page(runs[0]) if len(runs) == 1 else comparison_page(runs))
    return target


def leave_report(folder: Path, summary: dict[str, Any]) -> None:
    """Draw a run whose summary is about to be written; whatever goes wrong, the run goes on."""
    try:
        write_text(folder / NAME, run_page(read_run(folder, summary)))
    except Exception as error:
        logging.getLogger("sbf_pruner").warning("no report was drawn (%s: %s)", type(error).__name__, error)


__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "comparison": (
            "Point",
            "against",
            "comparison_page",
        ),
        "curves": ("course",),
        "graph_drawing": (
            "arrange",
            "draw",
        ),
        "html": (
            "Scale",
            "Table",
            "element",
            "together",
        ),
        "inspection": (
            "Box",
            "FOLLOWER",
            "GATE",
            "JOINT",
            "LAYER",
            "SKIPPED",
            "compose",
            "inspect_model",
            "overview",
        ),
        "live": (
            "live_view",
            "tensorboard_log",
        ),
        "page": (
            "FIGURES",
            "SECTIONS",
            "WIDE",
            "headline",
            "run_page",
            "run_parts",
            "sentence",
        ),
        "run_data": (
            "LayerKept",
            "Run",
            "checkpointed_plan",
            "read_run",
        ),
        "sections": (
            "kept",
            "marked",
            "network",
            "recipe",
            "refinement",
            "scores",
            "skipped",
            "timed",
        ),
    },
)

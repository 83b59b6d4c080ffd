"""Draw run folders as self-contained HTML pages: a report of one run, or a comparison of several."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..utils import lazy_exports
from ..utils.files import why_not_writable, write_text
from .comparison import comparison_page
from .page import run_page
from .run_data import read_run

NAME = "report.html"
COMPARISON = "comparison.html"


def write_report(folders: Sequence[str | Path], to: str | Path | None = None) -> Path:
    """Write the page of one run or the comparison of several, and return its path.

    One run is written to `report.html` in its folder, several to `comparison.html` in the working directory; `to`
    overrides the path. Raises RunError if a run cannot be read or the file cannot be written.
    """
    named: dict[Path, str | Path] = {}
    for folder in folders:
        named.setdefault(Path(folder).resolve(), folder)  # ignore folders given twice
    runs = list(map(read_run, named.values()))
    single = len(runs) == 1
    target = Path(to) if to is not None else runs[0].folder / NAME if single else Path(COMPARISON)
    if (reason := why_not_writable(target)) is not None:
        raise RunError(f"{target} cannot be written, because {reason}; name another file (--to)")
    write_text(target, run_page(runs[0]) if single else comparison_page(runs))
    return target


def write_own_report(folder: Path, summary: dict[str, Any]) -> None:
    """Write the report of a run whose summary is about to be written.

    An error is logged as a warning, so that a report that cannot be drawn never fails the run.
    """
    try:
        write_text(folder / NAME, run_page(read_run(folder, summary)))
    except Exception as error:
        logging.getLogger("sbf_pruner").warning("no report was drawn (%s: %s)", type(error).__name__, error)


__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "comparison": ("Point", "accuracy_plot", "comparison_page"),
        "graph_drawing": ("layout_graph", "draw"),
        "html": ("Scale", "Table", "element", "concat"),
        "inspection": (
            *("Box", "FOLLOWER", "GATE", "JOINT", "LAYER", "SKIPPED"),
            *("to_boxes", "inspect_model", "overview"),
        ),
        "live": ("live_view", "tensorboard_log"),
        "page": ("FIGURES", "SECTIONS", "WIDE_SECTIONS", "headline", "run_page", "run_parts", "sentence"),
        "run_data": ("LayerKept", "Run", "checkpointed_plan", "read_run"),
        "sections": (
            *("training_curves", "kept_figure", "with_kept", "network", "recipe", "refinement"),
            *("scores_figure", "skipped", "latency_section"),
        ),
    },
)

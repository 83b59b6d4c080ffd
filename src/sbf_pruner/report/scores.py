"""Scores over time: for every layer, how the scores of its filters spread from one epoch of scores to the next.

A run's scores enter; one small picture per layer leaves: all scores, the middle half of them, the median,
and the threshold a filter must reach to stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from ..budget.targets import Budget
from ..drawing.markup import Markup, element
from ..phases import SCORED
from .chart import Figure, Table, tick, way
from .data import Run

_WIDE, _HIGH = 300.0, 140.0  # fine enough for whole numbers
_LEVELS = (0, 25, 50, 75, 100)


def scores(run: Run) -> Figure:
    """The figure."""
    key, title = "scores", "Scores over time"
    if not run.scores:
        return Figure(key, title, missing=run.missing["scores"], wide=True)
    last = run.scores[-1]
    names = list(last["scores"])
    # There may be epochs of scores still to come, and some that an older version did not store.
    planned = sum(phase.epochs for phase in run.schedule if phase.trains_scores)
    missed = max(sum(record["phase"] in SCORED for record in run.records) - len(run.scores), 0)
    times = max(planned, len(run.scores))
    threshold = float(run.recipe.get("scores", {}).get("threshold", 0.5))
    held = {name: [np.percentile(line["scores"][name], _LEVELS) for line in run.scores] for name in names}
    high = max(1.1, *(float(levels[-1][-1]) for levels in held.values()))
    kept = {one.name: one for one in run.layers}
    tiles, rows = [], []
    for row, name in enumerate(names):
        now = held[name][-1]
        over = sum(score >= threshold for score in last["scores"][name])
        width = len(last["scores"][name])
        after = f"{kept[name].after}/{width}" if name in kept else f"{over}/{width}"
        tile = _tile(held[name], times, missed, high, threshold)
        tiles.append(
            element("div", tile, element("b", name), element("span", after), class_="tile hit", data_row=row)
        )
        rows.append([name, str(width), str(over), *(f"{level:.2f}" for level in now)])
    said = (
        f"Each picture is a layer and runs over {len(run.scores)} epochs of scores, from the start at 1 on the "
        f"left; below {tick(threshold)} (the dotted line) a filter is closed"
    )
    budget = run.recipe.get("budget", {})
    asked = any(budget.get(target.name, 1) != 1 for target in fields(Budget))
    said += ", unless the size or time that was asked for puts the cut elsewhere." if asked else "."
    if missed:
        said += f" The first {missed} epochs were run by an older version, which did not store them."
    head = ["layer", "filters", f"scores of {tick(threshold)} or more", "lowest", "lower quarter", "median"]
    table = Table([*head, "upper quarter", "highest"], rows)
    legend = [("block span", "all scores"), ("block half", "the middle half"), ("line accent", "median")]
    return Figure(key, title, said, element("div", tiles, class_="tiles"), table, legend, wide=True)


def _tile(levels: Sequence[Sequence[float]], times: int, missed: int, high: float, threshold: float) -> Markup:
    # Every score starts at 1, if the start is known.
    held, first = (levels, missed + 1) if missed else ([[1.0] * len(_LEVELS), *levels], 0)
    across = [_WIDE * (first + time) / times for time in range(len(held))]

    def edge(level: int) -> list[tuple[float, float]]:
        return [(x, _HIGH * (1 - line[level] / high)) for x, line in zip(across, held, strict=True)]

    return element(
        "svg",
        element("path", class_="span", d=f"{way([*edge(4), *reversed(edge(0))])}z"),
        element("path", class_="half", d=f"{way([*edge(3), *reversed(edge(1))])}z"),
        element("path", class_="curve accent", d=way(edge(2))),
        element("path", class_="threshold", d=f"M0 {_HIGH * (1 - threshold / high):.0f}h{_WIDE:.0f}"),
        viewBox=f"0 0 {_WIDE:.0f} {_HIGH:.0f}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )

"""Compare runs on one HTML page: accuracy against size, means over seeds, filters kept, and settings that differ.

Unfinished runs are included with what they have so far and are marked as such. `accuracy_plot` and `plot_as_svg`
also draw the plots of `sbf frontier`: the SVG is well-formed XML, so it works inside HTML and as a file of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..utils.files import flatten_keys
from ..utils.formatting import DASH, change, count, milliseconds, percent, scientific, si_number
from .html import (
    FRAME_WIDTH,
    Figure,
    Markup,
    Scale,
    Table,
    concat,
    curve,
    element,
    grid,
    nested_svg,
    palette,
    scroll,
    svg_figure,
)
from .page import HEADLINE, figure_parts, page
from .run_data import Run
from .sections import bars, best_known_time, format_setting, latency_conditions, numbers


@dataclass(frozen=True)
class Entry:
    """A run in the comparison, with the accuracies and sizes known so far."""

    sign: str  # letter that marks the run in the figures
    name: str
    run: Run
    accuracy: float | None
    dense_accuracy: float | None
    dense: Mapping[str, Any]
    pruned: Mapping[str, Any]


def comparison_page(runs: Sequence[Run]) -> str:
    """Return the HTML page that compares the runs."""
    entries = [_entry(place, run, _names(runs)[place]) for place, run in enumerate(runs)]
    figures = [
        _against(entries, "macs", "multiply-accumulates"),
        _against(entries, "params", "parameters"),
        *filter(None, [over_seeds(runs)]),
        _table(entries),
        *_kept(entries),
        _settings(entries),
    ]
    title = f"{len(runs)} runs compared"
    said = _sentence(entries)
    head = concat(
        element("p", " · ".join(dict.fromkeys(run.title for run in runs)), class_="facts"),
        element("h1", title),
        element("p", said, class_="lead"),
    )
    parts = {HEADLINE: head} | figure_parts(figures)
    return page(title, said, parts, {figure.key for figure in figures if figure.wide})


def _names(runs: Sequence[Run]) -> list[str]:
    """Return a distinct name for each run: with its seed, and with its folder where that is ambiguous."""
    short_names = [f"{run.name}, seed {run.recipe.get('seed', 0)}" for run in runs]
    folders = [str(run.folder) for run in runs]
    return [
        name if short_names.count(name) == 1 else f"{name} ({folder})"
        for name, folder in zip(short_names, folders, strict=True)
    ]


def _entry(place: int, run: Run, name: str) -> Entry:
    sign = chr(ord("A") + place) if place < 26 else str(place + 1)
    if run.summary is not None:
        dense, pruned = run.summary["dense"], run.summary["pruned"]
        return Entry(sign, name, run, pruned["accuracy"], dense["accuracy"], dense, pruned)
    judged = [record for record in run.records if record["test_accuracy"] is not None]
    first, last = (run.records[0], run.records[-1]) if run.records else ({}, {})
    sizes = [{key: record.get(key) for key in ("params", "macs")} for record in (first, last)]
    control = next((r["test_accuracy"] for r in reversed(run.control) if r["test_accuracy"] is not None), None)
    return Entry(sign, name, run, judged[-1]["test_accuracy"] if judged else None, control, *sizes)


def _sentence(entries: Sequence[Entry]) -> str:
    done = [e for e in entries if e.run.finished and e.accuracy is not None]
    said = f"{len(done)} of {len(entries)} runs are finished."
    if not done:
        return said + " The values below are preliminary."
    best = max(done, key=lambda e: e.accuracy or 0)
    least = min(done, key=lambda e: e.pruned["macs"])
    said += f" {best.sign} has the highest accuracy ({percent(best.accuracy)})"
    if least is best:
        return said + " and has the fewest multiply-accumulates left."
    part = 100 * least.pruned["macs"] / least.dense["macs"]
    return (
        f"{said}; {least.sign} has the fewest multiply-accumulates ({percent(part, 0)}, {percent(least.accuracy)})."
    )


def _table(entries: Sequence[Entry]) -> Figure:
    head = [
        "run",
        "state",
        "accuracy",
        "dense control",
        "parameters",
        "change",
        "MACs",
        "change",
        "file",
        "latency",
    ]
    head += ["change", "filters kept", "gated = extracted"]
    timed = any(one.run.time is not None for one in entries)
    head += ["latency target", "latency", "measured with"] if timed else []
    rows = []
    for one in entries:
        last = one.run.last
        state = "finished" if one.run.finished else f"{last['done']}/{last['total']}" if last else "not begun"
        kept = [sum(getattr(layer, when) for layer in one.run.layers) for when in ("after", "before")]
        dense, pruned = one.dense, one.pruned
        rows.append(
            [
                f"{one.sign}  {one.name}",
                state,
                percent(one.accuracy),
                percent(one.dense_accuracy),
                count(pruned.get("params")),
                change(dense.get("params"), pruned.get("params")),
                count(pruned.get("macs")),
                change(dense.get("macs"), pruned.get("macs")),
                si_number(pruned.get("file_bytes"), "B"),
                milliseconds(pruned.get("latency_ms")),
                change(dense.get("latency_ms"), pruned.get("latency_ms")),
                f"{kept[0]:,} of {kept[1]:,}" if kept[1] else DASH,
                scientific(one.run.summary.get("cut_error")) if one.run.summary else DASH,
                *(_time(one.run) if timed else ()),
            ]
        )
    table = Table(head, rows, words=2)
    return Figure("table", "All runs", picture=scroll(table.html(), "All runs"), wide=True)


def _time(run: Run) -> list[str]:
    """Table cells of the latency: target and result relative to the dense network, and the conditions."""
    if run.time is None:
        return [DASH] * 3
    share, how = best_known_time(run.time, run.finished)
    known = how if share is None else f"{percent(100 * share, 1)} {how}"
    return [percent(100 * run.time["asked"], 1), known, latency_conditions(run.time)]


def _against(entries: Sequence[Entry], key: str, words: str) -> Figure:
    points = []
    for place, one in enumerate(entries):
        for what, accuracy, size in (
            ("dense control", one.dense_accuracy, one.dense.get(key)),
            ("pruned", one.accuracy, one.pruned.get(key)),
        ):
            if accuracy is not None and size:
                name = f"{one.sign}  {one.name}, {what}{'' if one.run.finished else ' so far'}"
                kind = f"h{place % 10}{' dense' if what != 'pruned' else ''}"
                points.append(Point(name, accuracy, size, kind, one.sign))
    said = "Up and to the left is better. A hollow point is the dense control of the run with the same letter."
    return accuracy_plot(f"against-{key}", words, points, said)


def _kept(entries: Sequence[Entry]) -> list[Figure]:
    """One bar chart per run, scaled to the dense widths, so that runs of one network share a scale."""
    found = []
    for one in entries:
        key, title = f"kept-{one.sign}", f"{one.sign}: filters kept"
        if not one.run.layers:
            found.append(Figure(key, title, missing=one.run.missing["kept"]))
            continue
        before, after = (sum(getattr(layer, when) for layer in one.run.layers) for when in ("before", "after"))
        gone = sum(not layer.after for layer in one.run.layers)
        said = f"{one.name}: {after:,} of {before:,}" + (f", {gone} layers gone." if gone else ".")
        found.append(Figure(key, title, said, bars(one.run.layers, title, 130), numbers(one.run.layers)))
    return found


def _settings(entries: Sequence[Entry]) -> Figure:
    told = [{key: format_setting(value) for key, value in flatten_keys(one.run.recipe).items()} for one in entries]
    keys = [key for key in dict.fromkeys(k for table in told for k in table) if len({t.get(key) for t in told}) > 1]
    title = "Settings that differ"
    if not keys:
        return Figure("settings", title, missing="None: these are runs of the same recipe.", wide=True)
    rows = [[key, *(table.get(key, DASH) for table in told)] for key in keys]
    table = Table(["setting", *(one.sign for one in entries)], rows).html()
    return Figure("settings", title, picture=scroll(table, title), wide=True)


def over_seeds(runs: Sequence[Run]) -> Figure | None:
    """Return a table of means and deviations per recipe, the best first, or None if no recipe has several seeds.

    Runs belong together if their recipes differ in nothing but `seed` and `dense_control`. Unfinished runs are left
    out, and so are groups in which a seed occurs twice.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.finished:
            # The dense control does not affect the pruned network and is often trained for only one of the seeds.
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


Spell = Callable[[float], str]
_HEIGHT = 250.0
_WIDTH, _LEFT, _TOP, _BELOW = 760, 66, 104, 54  # pixels, in a standalone SVG


@dataclass(frozen=True)
class Point:
    """A network in a plot of accuracy against size."""

    name: str
    accuracy: float
    size: float
    kind: str  # CSS classes of the mark
    sign: str = ""  # label above the mark
    beside: bool = False  # put the label at the lower right, where a rising line leaves room


def accuracy_plot(
    key: str,
    words: str,
    points: Sequence[Point],
    caption: str,
    *,
    first: str = "run",
    joined: Sequence[tuple[str, Sequence[Point]]] = (),
    legend: Sequence[tuple[str, str]] = (),
    spelled: tuple[Spell, Spell] = (si_number, count),
) -> Figure:
    """Plot accuracy against size, with a table that has a row for each point.

    `words` names the size and `first` the table's first column. `joined` are lines, each with its CSS class and its
    points in order. `format_setting` formats sizes, first for the axis and then for the table.
    """
    title = f"Accuracy against {words}"
    if not points:
        return Figure(key, title, missing="No accuracy has been measured yet.")
    accuracies = [point.accuracy for point in points]
    room = max(0.4, (max(accuracies) - min(accuracies)) * 0.15)
    down = Scale(min(accuracies) - room, min(100.0, max(accuracies) + room), _HEIGHT)
    widest = max(point.size for point in points) * 1.08
    parts = [grid(down, 0, " %")]
    for value in Scale(0, widest, 1).ticks(5):
        at = f"{100 * value / widest:.2f}%"
        parts.append(element("line", class_="grid", x1=at, x2=at, y1=0, y2=f"{_HEIGHT:.0f}"))
        parts.append(element("text", spelled[0](value), class_="tick middle", x=at, y=f"{_HEIGHT + 16:.0f}"))
    lines = [
        curve(kind, [(FRAME_WIDTH * p.size / widest, down(p.accuracy)) for p in line]) for kind, line in joined
    ]
    if lines:
        parts.append(nested_svg(0, _HEIGHT, lines))
    above = _shared(points, down, widest)
    for row, point in enumerate(points):
        x, y = f"{100 * point.size / widest:.2f}%", down(point.accuracy)
        parts.append(element("circle", class_=f"hit point {point.kind}", data_row=row, cx=x, cy=y, r=6))
        sign = above[row] if not point.beside else "" if _crowded(points[:row], point, down, widest) else point.sign
        if sign and point.beside:
            parts.append(element("text", sign, class_="sign beside", dx=8, y=y + 15, x=x))
        elif sign:
            parts.append(element("text", sign, class_="sign", y=y - 10, x=x))
    rows = [[point.name, percent(point.accuracy), spelled[1](point.size)] for point in points]
    drawn = svg_figure("against", _HEIGHT, title, parts)
    return Figure(key, title, caption, drawn, Table([first, "accuracy", words], rows), legend)


def _shared(points: Sequence[Point], down: Scale, widest: float) -> list[str]:
    """Return the label above each point; the first of several overlapping points carries all their labels."""
    first: dict[int, list[str]] = {}
    for row, point in enumerate(points):
        near = (
            other
            for other in first
            if abs(point.size - points[other].size) < 0.02 * widest
            and abs(down(point.accuracy) - down(points[other].accuracy)) < 12
        )
        first.setdefault(next(near, row), []).append(point.sign)
    return [", ".join(filter(None, first.get(row, []))) for row in range(len(points))]


def _crowded(before: Sequence[Point], point: Point, down: Scale, widest: float) -> bool:
    """Return True if a label beside the point would overlap that of an earlier point."""
    return any(
        abs(point.size - other.size) < 0.07 * widest and abs(down(point.accuracy) - down(other.accuracy)) < 14
        for other in before
    )


def plot_as_svg(figure: Figure, title: str, axis: str) -> str:
    """Return a figure that `accuracy_plot` made as the text of an SVG file, light and dark, without a script."""
    height = _TOP + _HEIGHT + _BELOW
    signs = [element("text", title, class_="title", x=_LEFT, y=28)]
    for number, (sign, words) in enumerate(figure.legend):
        x, y = _LEFT + 5 + 220 * (number // 2), 48 + 17 * (number % 2)
        signs.append(element("circle", class_=f"point {sign.rpartition(' ')[2]}", cx=x, cy=y, r=5))
        signs.append(element("text", words, class_="start", x=x + 11, y=y + 4))
    plot = {"x": _LEFT, "y": _TOP, "width": _WIDTH - _LEFT - 24, "height": f"{_HEIGHT:.0f}"}
    across, down = f"{(_LEFT + _WIDTH - 24) / 2:.0f}", f"{height - 14:.0f}"
    return concat(
        element(
            "svg",
            element("style", Markup(_style())),
            element("rect", class_="paper", width="100%", height="100%"),
            signs,
            element("svg", figure.picture, class_="plot", **plot),
            element("text", axis, class_="middle", x=across, y=down),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {_WIDTH} {height:.0f}",
            width=_WIDTH,
            height=f"{height:.0f}",
            role="img",
            aria_label=title,
        ),
        "\n",
    )


def _style() -> str:
    shapes = (
        "text{font:11px ui-sans-serif,system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;text-anchor:end}"
        ".middle,.sign{text-anchor:middle}.start,.title,.beside{text-anchor:start}.title{font-size:14px;font-weight:600}"
        ".sign{font-weight:600}.plot{overflow:visible}.curve{fill:none;stroke-width:2;vector-effect:non-scaling-stroke}"
        ".curve.dashed{stroke-dasharray:4 4}.point{stroke-width:2}"
    )
    return f"{shapes}{_colours(dark=False)}@media (prefers-color-scheme:dark){{{_colours(dark=True)}}}"


def _colours(*, dark: bool) -> str:
    tone = palette(dark=dark)
    rules = {
        ".paper": f"fill:{tone['paper']}",
        "text": f"fill:{tone['soft']}",
        ".title,.sign": f"fill:{tone['ink']}",
        ".grid": f"stroke:{tone['wire']};stroke-opacity:.35",
        ".curve.accent": f"stroke:{tone['fill']}",
        ".curve.dashed": f"stroke:{tone['gate']}",
        ".point.chosen": f"fill:{tone['fill']};stroke:{tone['fill']}",
        ".point.whole": f"fill:{tone['paper']};stroke:{tone['ink']}",
        ".point.own": f"fill:{tone['paper']};stroke:{tone['gate']}",
        ".point.tuned": f"fill:{tone['gate']};stroke:{tone['gate']}",
    }
    return "".join(f"{key}{{{rule}}}" for key, rule in rules.items())

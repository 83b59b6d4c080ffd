"""Compare runs on one HTML page: accuracy against size, means over seeds, filters kept, and settings that differ.

Unfinished runs are included with their values so far and marked as unfinished. `accuracy_plot` and `plot_as_svg`
also draw the plots of `sbf frontier`. Their SVG is well-formed XML, so it can be part of a page or a separate file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev
from typing import Any

from ..criteria import describe_method
from ..utils.files import flatten_keys
from ..utils.formatting import DASH, change, count, milliseconds, percent, scientific, si_number
from .html import (
    DARK,
    FRAME_WIDTH,
    LIGHT,
    Figure,
    Scale,
    Table,
    curve,
    element,
    grid,
    nested_svg,
    scroll,
    svg_figure,
    svg_file,
)
from .page import figures_page
from .run_data import Run, last_known
from .sections import bars, best_known_time, format_setting, kept_totals, latency_conditions, numbers


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
    entries = [_entry(number, run, name) for number, (run, name) in enumerate(zip(runs, _names(runs), strict=True))]
    figures = [_against(entries, "macs", "multiply-accumulates"), _against(entries, "params", "parameters")]
    figures += [*over_seeds(runs), _table(entries), *map(_kept, entries), _settings(entries)]
    facts = " · ".join(dict.fromkeys(run.title for run in runs))
    return figures_page(f"{len(runs)} runs compared", facts, _sentence(entries), figures)


def _names(runs: Sequence[Run]) -> list[str]:
    """Return a distinct name for each run: its name and seed, and its folder if another run has the same two."""
    names = [f"{run.name}, seed {run.recipe.get('seed', 0)}" for run in runs]
    named = zip(names, runs, strict=True)
    return [name if names.count(name) == 1 else f"{name} ({run.folder})" for name, run in named]


def _entry(number: int, run: Run, name: str) -> Entry:
    sign = chr(ord("A") + number) if number < 26 else str(number + 1)
    if run.summary is not None:
        dense, pruned = run.summary["dense"], run.summary["pruned"]
        return Entry(sign, name, run, pruned["accuracy"], dense["accuracy"], dense, pruned)
    accuracy, control = (last_known(records, "test_accuracy") for records in (run.records, run.control))
    first, last = (run.records[0], run.records[-1]) if run.records else ({}, {})
    sizes = [{key: record.get(key) for key in ("params", "macs")} for record in (first, last)]
    return Entry(sign, name, run, accuracy, control, *sizes)


def _sentence(entries: Sequence[Entry]) -> str:
    done = [e for e in entries if e.run.finished and e.accuracy is not None]
    text = f"{len(done)} of {len(entries)} runs are finished."
    if not done:
        return text + " The values below are preliminary."
    best = max(done, key=lambda e: e.accuracy or 0)
    least = min(done, key=lambda e: e.pruned["macs"])
    text += f" {best.sign} has the highest accuracy ({percent(best.accuracy)})"
    if least is best:
        return text + " and has the fewest multiply-accumulates left."
    share = percent(100 * least.pruned["macs"] / least.dense["macs"], 0)
    return f"{text}; {least.sign} has the fewest multiply-accumulates ({share}, {percent(least.accuracy)})."


def _table(entries: Sequence[Entry]) -> Figure:
    head = ["run", "state", "accuracy", "dense control", "parameters", "change", "MACs", "change", "file"]
    head += ["latency", "change", "filters kept", "gated = extracted"]
    timed = any(one.run.time is not None for one in entries)
    head += ["latency target", "latency", "measured with"] if timed else []
    rows = []
    for one in entries:
        last, dense, pruned = one.run.last, one.dense, one.pruned
        state = "finished" if one.run.finished else f"{last['done']}/{last['total']}" if last else "not begun"
        row = [f"{one.sign}  {one.name}", state, percent(one.accuracy), percent(one.dense_accuracy)]
        for key in ("params", "macs"):
            row += [count(pruned.get(key)), change(dense.get(key), pruned.get(key))]
        row += [si_number(pruned.get("file_bytes"), "B"), milliseconds(pruned.get("latency_ms"))]
        row.append(change(dense.get("latency_ms"), pruned.get("latency_ms")))
        before, after, _ = kept_totals(one.run.layers)
        row.append(f"{after:,} of {before:,}" if before else DASH)
        row.append(scientific(one.run.summary.get("cut_error")) if one.run.summary else DASH)
        rows.append([*row, *_latency_cells(one.run)] if timed else row)
    table = Table(head, rows, words=2)
    methods = dict.fromkeys(one.run.method for one in entries if one.run.method is not None)
    caption = f"Filters chosen by {', '.join(map(describe_method, methods))}." if methods else ""
    return Figure("table", "All runs", caption, scroll(table.html(), "All runs"), wide=True)


def _latency_cells(run: Run) -> list[str]:
    if run.time is None:
        return [DASH] * 3
    share, how = best_known_time(run.time, run.finished)
    known = how if share is None else f"{percent(100 * share, 1)} {how}"
    return [percent(100 * run.time["asked"], 1), known, latency_conditions(run.time)]


def _against(entries: Sequence[Entry], key: str, words: str) -> Figure:
    points = []
    for number, one in enumerate(entries):
        state = "" if one.run.finished else " so far"
        for what, kind, accuracy, sizes in (
            ("dense control", " dense", one.dense_accuracy, one.dense),
            ("pruned", "", one.accuracy, one.pruned),
        ):
            if accuracy is not None and (size := sizes.get(key)):
                name = f"{one.sign}  {one.name}, {what}{state}"
                points.append(Point(name, accuracy, size, f"h{number % 10}{kind}", one.sign))
    caption = "Up and to the left is better. A hollow point is the dense control of the run with the same letter."
    return accuracy_plot(f"against-{key}", words, points, caption)


def _kept(one: Entry) -> Figure:
    """Return a bar chart of kept filters, scaled to the dense widths so that runs of one network share a scale."""
    key, title, layers = f"kept-{one.sign}", f"{one.sign}: filters kept", one.run.layers
    if not layers:
        return Figure(key, title, missing=one.run.missing["kept"])
    before, after, removed = kept_totals(layers)
    caption = f"{one.name}: {after:,} of {before:,}" + (f", {removed} layers removed." if removed else ".")
    return Figure(key, title, caption, bars(layers, title, 130), numbers(layers))


def _settings(entries: Sequence[Entry]) -> Figure:
    tables = [{key: format_setting(value) for key, value in flatten_keys(e.run.recipe).items()} for e in entries]
    rows = [[key, *(table.get(key, DASH) for table in tables)] for key in dict.fromkeys(chain(*tables))]
    differing = [[key, *values] for key, *values in rows if len(set(values)) > 1]
    title = "Settings that differ"
    if not differing:
        return Figure("settings", title, missing="None: these are runs of the same recipe.", wide=True)
    table = Table(["setting", *(one.sign for one in entries)], differing).html()
    return Figure("settings", title, picture=scroll(table, title), wide=True)


def over_seeds(runs: Sequence[Run]) -> list[Figure]:
    """Return a table of means and standard deviations per recipe, best first; [] if no recipe has several seeds.

    Runs are grouped if their recipes differ at most in `seed` and `dense_control`. Unfinished runs are left out,
    and so are groups in which a seed occurs twice.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.finished:
            # The dense control does not affect the pruned network and is often trained for only one of the seeds.
            own = {key: value for key, value in run.recipe.items() if key not in ("seed", "dense_control")}
            groups.setdefault(repr(own), []).append(run)
    found = [group for group in groups.values() if len({run.recipe.get("seed") for run in group}) == len(group)]
    if not any(len(group) > 1 for group in found):
        return []
    rows = []
    for group in found:
        summaries = [run.summary for run in group if run.summary is not None]
        accuracies = [summary["pruned"]["accuracy"] for summary in summaries]
        mean, spread = fmean(accuracies), f"{stdev(accuracies):.2f}" if len(group) > 1 else ""
        left = [fmean(s["pruned"][key] / s["dense"][key] for s in summaries) for key in ("params", "macs")]
        sizes = [percent(100 * part, 1) for part in left]
        rows.append((mean, [group[0].name, str(len(group)), percent(mean), spread, *sizes]))
    rows.sort(key=lambda row: -row[0])
    head = ["recipe", "seeds", "accuracy", "deviation", "parameters left", "MACs left"]
    body = scroll(Table(head, [row for _, row in rows]).html(), "Over seeds")
    return [Figure("seeds", "Over seeds", "Means of runs that differ in nothing but the seed.", body, wide=True)]


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
    beside: bool = False  # put the label at the lower right, where a rising curve leaves room


def accuracy_plot(
    key: str,
    words: str,
    points: Sequence[Point],
    caption: str,
    first: str = "run",
    *,
    joined: Sequence[tuple[str, Sequence[Point]]] = (),
    legend: Sequence[tuple[str, str]] = (),
    formats: tuple[Callable[[float], str], Callable[[float], str]] = (si_number, count),
) -> Figure:
    """Plot accuracy against size, with a table that has a row for each point.

    `words` is the name of the size and `first` the header of the table's first column. `joined` lists curves, each
    as its CSS class and its points in order. `formats` are two formatters of sizes: for the axis and for the table.
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
        parts.append(element("text", formats[0](value), class_="tick middle", x=at, y=f"{_HEIGHT + 16:.0f}"))
    lines = []
    for kind, line in joined:
        lines.append(curve(kind, [(FRAME_WIDTH * p.size / widest, down(p.accuracy)) for p in line]))
    parts += [nested_svg(0, _HEIGHT, lines)] if lines else []

    def near(point: Point, others: Iterable[int], part: float, pixels: float) -> Iterator[int]:
        for row in others:
            apart = abs(down(point.accuracy) - down(points[row].accuracy))
            if abs(point.size - points[row].size) < part * widest and apart < pixels:
                yield row

    # The first of several overlapping points carries the labels of all of them.
    labels: dict[int, list[str]] = {}
    for row, point in enumerate(points):
        labels.setdefault(next(near(point, labels, 0.02, 12), row), []).append(point.sign)
    for row, point in enumerate(points):
        x, y = f"{100 * point.size / widest:.2f}%", down(point.accuracy)
        parts.append(element("circle", class_=f"hit point {point.kind}", data_row=row, cx=x, cy=y, r=6))
        label = point.sign if point.beside else ", ".join(filter(None, labels.get(row, ())))
        if label and not point.beside:
            parts.append(element("text", label, class_="sign", y=y - 10, x=x))
        elif label and next(near(point, range(row), 0.07, 14), None) is None:
            parts.append(element("text", label, class_="sign beside", dx=8, y=y + 15, x=x))
    rows = [[point.name, percent(point.accuracy), formats[1](point.size)] for point in points]
    picture = svg_figure("against", _HEIGHT, title, parts)
    return Figure(key, title, caption, picture, Table([first, "accuracy", words], rows), legend)


def plot_as_svg(figure: Figure, title: str, axis: str) -> str:
    """Return a figure of `accuracy_plot` as the text of an SVG file with light and dark colors and no script."""
    height = _TOP + _HEIGHT + _BELOW
    signs = [element("text", title, class_="title", x=_LEFT, y=28)]
    for number, (sign, words) in enumerate(figure.legend):
        x, y = _LEFT + 5 + 220 * (number // 2), 48 + 17 * (number % 2)
        signs.append(element("circle", class_=f"point {sign.rpartition(' ')[2]}", cx=x, cy=y, r=5))
        signs.append(element("text", words, class_="start", x=x + 11, y=y + 4))
    plot = {"x": _LEFT, "y": _TOP, "width": _WIDTH - _LEFT - 24, "height": f"{_HEIGHT:.0f}"}
    below = {"x": f"{(_LEFT + _WIDTH - 24) / 2:.0f}", "y": f"{height - 14:.0f}"}
    parts = [*signs, element("svg", figure.picture, class_="plot", **plot)]
    parts.append(element("text", axis, class_="middle", **below))
    style = f"{_PLOT_SHAPES}{_colors(LIGHT)}@media (prefers-color-scheme:dark){{{_colors(DARK)}}}"
    return svg_file(title, _WIDTH, height, style, parts)


_PLOT_SHAPES = (
    "text{font:11px ui-sans-serif,system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;text-anchor:end}"
    ".middle,.sign{text-anchor:middle}.start,.title,.beside{text-anchor:start}.title{font-size:14px;font-weight:600}"
    ".sign{font-weight:600}.plot{overflow:visible}.curve{fill:none;stroke-width:2;vector-effect:non-scaling-stroke}"
    ".curve.dashed{stroke-dasharray:4 4}.point{stroke-width:2}"
)


def _colors(tone: Mapping[str, str]) -> str:
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

"""Several runs beside each other: a table, accuracy against what is left, filters kept, and settings that differ.

Runs enter; a page leaves.  Runs that are not finished show what they have by now, and say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..drawing.markup import element, together
from ..files import flat
from .against import Point, against
from .chart import Figure, Table, scroll
from .data import Run
from .kept import bars, numbers
from .numbers import DASH, change, count, milliseconds, percent, short, tiny
from .page import HEADLINE, figure_parts, page
from .seeds import over_seeds
from .settings import spelled
from .timed import found, where


@dataclass(frozen=True)
class Entry:
    """What a run has come to, as far as it is known."""

    sign: str  # a letter that stands for it in the figures
    name: str
    run: Run
    accuracy: float | None
    dense_accuracy: float | None
    dense: Mapping[str, Any]
    pruned: Mapping[str, Any]


def comparison_page(runs: Sequence[Run]) -> str:
    """The page as text."""
    entries = [_entry(place, run, _names(runs)[place]) for place, run in enumerate(runs)]
    figures = [
        _against(entries, "macs", "multiply-accumulates"),
        _against(entries, "params", "parameters"),
        *filter(None, [over_seeds(runs)]),
        _table(entries),
        *_kept(entries),
        _settings(entries),
    ]
    title = f"{len(runs)} runs beside each other"
    said = _sentence(entries)
    head = together(
        element("p", " · ".join(dict.fromkeys(run.title for run in runs)), class_="facts"),
        element("h1", title),
        element("p", said, class_="lead"),
    )
    parts = {HEADLINE: head} | figure_parts(figures)
    return page(title, said, parts, {figure.key for figure in figures if figure.wide})


def _names(runs: Sequence[Run]) -> list[str]:
    """Names that tell the runs apart: with the seed, and the folder if that is not enough."""
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
        return said + " What stands here is what they have by now."
    best = max(done, key=lambda e: e.accuracy or 0)
    least = min(done, key=lambda e: e.pruned["macs"])
    said += f" {best.sign} is right most often ({percent(best.accuracy)})"
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
    head += ["time asked for", "time found", "time taken in"] if timed else []
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
                short(pruned.get("file_bytes"), "B"),
                milliseconds(pruned.get("latency_ms")),
                change(dense.get("latency_ms"), pruned.get("latency_ms")),
                f"{kept[0]:,} of {kept[1]:,}" if kept[1] else DASH,
                tiny(one.run.summary.get("cut_error")) if one.run.summary else DASH,
                *(_time(one.run) if timed else ()),
            ]
        )
    table = Table(head, rows, words=2)
    return Figure("table", "All runs", picture=scroll(table.html(), "All runs"), wide=True)


def _time(run: Run) -> list[str]:
    """Asked, found, and where, of the dense network's time."""
    if run.time is None:
        return [DASH] * 3
    share, how = found(run.time, run.finished)
    known = how if share is None else f"{percent(100 * share, 1)} {how}"
    return [percent(100 * run.time["asked"], 1), known, where(run.time)]


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
    return against(f"against-{key}", words, points, said)


def _kept(entries: Sequence[Entry]) -> list[Figure]:
    """A figure of bars per run, on the same scale where the networks are the same."""
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
    told = [{key: spelled(value) for key, value in flat(one.run.recipe).items()} for one in entries]
    keys = [key for key in dict.fromkeys(k for table in told for k in table) if len({t.get(key) for t in told}) > 1]
    title = "Settings that differ"
    if not keys:
        return Figure("settings", title, missing="None: these are runs of one and the same recipe.", wide=True)
    rows = [[key, *(table.get(key, DASH) for table in told)] for key in keys]
    table = Table(["setting", *(one.sign for one in entries)], rows).html()
    return Figure("settings", title, picture=scroll(table, title), wide=True)

"""Sections of a run report: one function per section, which takes a `Run` and returns a `Figure`.

If the data of a section is not stored, its figure shows the reason from `Run.missing` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ..budget.targets import Budget
from ..criteria import METHODS, describe_method
from ..schedule import SCORE_KINDS
from ..utils.formatting import DASH, count, milliseconds, percent, pluralize
from .graph_drawing import drawing
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
    hit_area,
    module_axis,
    nested_svg,
    pairs,
    path_data,
    scroll,
    svg_figure,
    tick,
)
from .inspection import Box
from .run_data import LayerKept, Record, Run

STAGES = {"warmup": "warm-up", "score": "scores", "weights": "gated weights"}
STAGES |= {"joint": "scores and weights", "finetune": "fine-tuning"}
_PANEL_GAP = 30.0

Points = list[tuple[int, float]]  # (epoch, value)
Panel = tuple[
    str, str, list[tuple[str, Points]], Scale
]  # name, unit, curves with their CSS classes, vertical scale


def training_curves(run: Run) -> Figure:
    """Return panels for test accuracy, loss and remaining filters per epoch, with the phases shaded.

    The dense control is trained for as many epochs as the pruned network, so both share the horizontal axis.
    """
    key, title = "course", "The course of the run"
    if not run.records:
        return Figure(key, title, missing="No epoch has ended yet.")
    top, panels = 0.0, []
    for name, unit, curves, scale in _panels(run):
        lines = [
            curve(kind, [(FRAME_WIDTH * (epoch - 0.5) / run.epochs, scale(value)) for epoch, value in points])
            for kind, points in curves
        ]
        panels += [grid(scale, top, unit, 4 if scale.height > 100 else 3), nested_svg(top, scale.height, lines)]
        panels.append(element("text", name, class_="panel", x=0, y=f"{top - 7:.0f}"))
        top += scale.height + _PANEL_GAP
    height = top - _PANEL_GAP
    marks = (
        hit_area("epoch", row, 100 * (record["done"] - 1) / run.epochs, 100 / run.epochs, 0, height)
        for row, record in enumerate(run.records)
    )
    legend = [("line accent", "test"), ("line soft", "training")]
    legend += [("line dashed", "dense control")] if run.control else []
    legend += [("shade score", "scores")] if run.method is None else []
    legend.append(("shade tune", "fine-tuning"))
    picture = concat(svg_figure(key, height, title, _shades(run, height), panels, marks), _stage_labels(run))
    return Figure(key, title, _course_caption(run), picture, _epochs_table(run), legend)


def _panels(run: Run) -> list[Panel]:
    test, control = _points(run.records, "test_accuracy"), _points(run.control, "test_accuracy", "epoch")
    train = _points(run.records, "train_accuracy")
    seen = sorted(value for _, value in test + control) or sorted(value for _, value in train)
    best, usual = seen[-1], seen[len(seen) // 10]
    # The first epochs are far below the rest; a scale that includes them would flatten the differences after them.
    low = max(0.0, 5 * ((usual - 0.6 * (best - usual) - 1) // 5))
    accuracies = [("soft", train), ("dashed", control), ("accent", test)]

    losses = [("dashed", _points(run.control, "loss", "epoch")), ("soft", _points(run.records, "loss"))]
    values = [value for _, points in losses for _, value in points if value > 0] or [1.0]
    logarithmic = max(values) / min(values) > 30
    bounds = (min(values) * 0.8, max(values) * 1.1) if logarithmic else (0.0, max(values) * 1.05)

    total = run.records[-1]["filters_total"]
    return [
        ("test accuracy", " %", accuracies, Scale(low, 100.0, 150.0)),
        ("loss", "", losses, Scale(*bounds, 84.0, logarithmic)),
        ("filters alive", "", [("accent", _points(run.records, "filters"))], Scale(0, total * 1.04, 84.0)),
    ]


def _points(records: Iterable[Record], key: str, epoch: str = "done") -> Points:
    return [(record[epoch], record[key]) for record in records if record[key] is not None]


def _shades(run: Run, height: float) -> list[Markup]:
    kinds = {"score": "score", "joint": "score", "finetune": "tune"}
    shades = []
    for phase in run.schedule:
        if phase.kind in kinds:
            left, width = (f"{100 * epochs / run.epochs:.3f}%" for epochs in (phase.first, phase.epochs))
            place = {"x": left, "y": 0, "width": width, "height": f"{height:.0f}"}
            shades.append(element("rect", class_=f"shade {kinds[phase.kind]}", **place))
    return shades


def _stage_labels(run: Run) -> Markup:
    spans: dict[str, tuple[int, int]] = {}
    for phase in run.schedule:
        if phase.kind != "control":
            stage = "cycles" if phase.cycle else STAGES[phase.kind]
            spans[stage] = spans.get(stage, (phase.first,))[0], phase.end
    labels = []
    for stage, (first, end) in spans.items():
        content = element("b", stage), " ", element("i", f"{first + 1}{DASH}{end}")
        labels.append(element("span", *content, style=f"flex:{(end - first) / run.epochs:.4f}"))
    return element("div", labels, class_="stages", aria_hidden="true")


def _course_caption(run: Run) -> str:
    kinds = {phase.kind for phase in run.schedule}
    if run.method is None:
        weights = "are trained with them" if "joint" in kinds else "are frozen"
        how = f"In the shaded phases the scores are trained and the weights {weights}."
    elif run.method in METHODS and METHODS[run.method].soft and any(phase.cycle for phase in run.schedule):
        how = "After every epoch of the cycles filters are set to zero, and may come back; "
        how += "at the end of the cycles they are removed."
    else:
        when = "when the warm-up is over" if "warmup" in kinds else "before the first epoch"
        how = f"The filters are removed at once, {when}."
    control = " The dense control is another network, trained for as many epochs." if run.control else ""
    return f"Epochs 1 to {run.epochs}. {how}{control}"


def _epochs_table(run: Run) -> Table:
    control = {record["epoch"]: record["test_accuracy"] for record in run.control}
    head = ["epoch", "phase", "loss", "training", "test", "filters", "parameters", "MACs", "learning rate"]
    rows = []
    for record in run.records:
        cycle = f" {record['cycle']}" if record["cycle"] else ""
        row = [str(record["done"]), STAGES[record["phase"]] + cycle, f"{record['loss']:.4f}"]
        row += [percent(record["train_accuracy"]), percent(record["test_accuracy"])]
        row += [count(record[key]) for key in ("filters", "params", "macs")]
        row.append(f"{record['lr']:.3g}")
        rows.append([*row, percent(control.get(record["done"]))] if control else row)
    return Table([*head, "dense control"] if control else head, rows, words=2)


_HEIGHT = 190.0
_LABELLED = 26  # maximum number of bars that have room for a number each


def kept_figure(run: Run) -> Figure:
    """Return a bar chart of the filters that each layer keeps, as in Figure 4 of the paper."""
    key, title = "kept", "Filters kept per layer"
    if not run.layers:
        return Figure(key, title, missing=run.missing["kept"])
    before, after, removed = kept_totals(run.layers)
    caption = f"{after:,} of {before:,} filters are kept"
    caption += f"; {removed} of {len(run.layers)} layers are removed entirely. " if removed else ". "
    legend = [("block kept", "kept"), ("block before", "removed")]
    legend += [("cross", "layer removed")] if removed else []
    return Figure(key, title, caption + _chosen(run), bars(run.layers, title), numbers(run.layers), legend)


def kept_totals(layers: Sequence[LayerKept]) -> tuple[int, int, int]:
    """Return the filters before and after pruning, and the number of layers that are removed entirely."""
    return sum(one.before for one in layers), sum(one.after for one in layers), sum(not one.after for one in layers)


def _chosen(run: Run) -> str:
    if run.method is None:
        return "The learned scores determine the widths."
    across = run.method in METHODS and METHODS[run.method].across
    by = "comparing filters of all layers" if across else "the same part of every layer"
    return f"They were chosen by {describe_method(run.method)}, {by}, as many as the target size allows."


def bars(layers: Sequence[LayerKept], label: str, height: float = _HEIGHT) -> Markup:
    """Draw a bar per layer, outlined to its dense width and filled to its kept filters, with a cross if removed."""
    each = 100 / len(layers)
    scale = Scale(0, max(one.before for one in layers) * 1.06, height)
    parts = [grid(scale, 0, most=4)]
    for column, one in enumerate(layers):
        left, width = each * (column + 0.12), each * 0.76
        before, after = scale(one.before), scale(one.after)
        across = {"x": f"{left:.3f}%", "width": f"{width:.3f}%"}
        middle = f"{left + width / 2:.3f}%"
        parts.append(element("rect", class_="before", **across, y=before, height=height - before))
        if one.after:
            parts.append(element("rect", class_="kept", **across, y=after, height=height - after))
            if len(layers) <= _LABELLED:
                parts.append(element("text", str(one.after), class_="value", x=middle, y=after - 4))
        else:
            parts.append(element("text", "\u00d7", class_="cross", x=middle, y=height - 4))
    parts += [hit_area("", column, each * column, each, 0, height) for column in range(len(layers))]
    parts.append(module_axis([one.name for one in layers], height))
    return svg_figure("bars", height, label, parts)


def numbers(layers: Sequence[LayerKept]) -> Table:
    """Return the table of kept filters, with a row per layer."""
    rows = []
    for one in layers:
        shares = percent(100 * one.after / one.before, 0), percent(one.macs_share, 1)
        rows.append([one.name, str(one.after), str(one.before), *shares])
    return Table(["layer", "filters kept", "filters before", "share kept", "share of the dense MACs"], rows)


def network(run: Run) -> Figure:
    """Draw the channel graph; each layer is filled in proportion to its kept filters, removed layers are dashed."""
    key, title = "network", "The network, before and after"
    if not run.boxes:
        return Figure(key, title, missing=run.missing["network"], wide=True)
    boxes = with_kept(run.boxes, _kept(run))
    body, width, height = drawing(boxes)
    caption = "Channels flow from top to bottom, column by column. A box is filled as far as its filters are kept."
    if removed := sum(box.kept == 0 for box in boxes):
        caption += f" {removed} layers are removed (dashed): only their shortcuts remain."
    frame = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "width": f"{width:.0f}", "height": f"{height:.0f}"}
    # The drawing scales with the page, up to slightly above its own size; if narrower than `least`, it scrolls.
    least = min(width, 560 + 0.35 * max(width - 560, 0))
    limits = f"min-width:{least:.0f}px;max-width:{1.15 * width:.0f}px"
    picture = element("svg", body, class_="graph", **frame, style=limits)
    legend = [("block kept", "filters kept"), ("block before", "removed")]
    legend += [("block skipped", "left alone"), ("diamond", "gate")]
    return Figure(key, title, caption, scroll(picture, title), legend=legend, wide=True)


def _kept(run: Run) -> dict[str, int]:
    """Return the filters kept by every prunable layer, and by followers for which they can be derived."""
    layers = {one.name: one for one in run.layers}
    kept = {one.name: one.after for one in run.layers}
    for name, leaders in run.followers.items():
        leading = [layers[leader] for leader in leaders if leader in layers]
        widths = {box.filters for box in run.boxes if box.layer == name}
        if leading and not any(one.after for one in leading):
            kept[name] = 0
        elif len(leading) == len(leaders) == 1 and widths == {leading[0].before}:
            kept[name] = leading[0].after
    return kept


def with_kept(boxes: list[Box], kept: dict[str, int]) -> list[Box]:
    """Return copies of the boxes, in the same order, with the number of kept filters, also in note and tooltip."""
    copies: dict[Box, Box] = {}
    for box in boxes:
        copies[box] = replace(box, sources=[copies[source] for source in box.sources])
        if box.layer and (left := kept.get(box.layer)) is not None:
            _, separator, rest = box.note.partition(" · ")
            note = f"{box.filters} \u2192 {left}{separator}{rest}"
            tip = (box.tip[0], f"{left} of {box.filters} filters kept", *box.tip[1:])
            copies[box] = replace(copies[box], kept=left, note=note, tip=tip)
    return list(copies.values())


_WHEN = {"scored": "Under the scores", "pruned": "At the end"}
_CAPTION = (
    "The energy a block adds, as a part of what arrives: |S·f(x)|² / |x|² on test images. Under continuous scores "
    "it must lie between δ² and (1+ε)² times the value without scores, where δ and 1+ε are the least and the "
    "greatest score of the branch's last layer: the paper's Lemma 1, corrected."
)


def refinement(run: Run) -> Figure:
    """Plot the refinement |f(x)|^2 / |x|^2 of each residual block x + f(x), with the bounds of a corrected Lemma 1.

    With scores S applied before the addition, |S.f(x)|^2 / |x|^2 lies between delta^2 and (1 + eps)^2 times its
    value without scores, where delta and 1 + eps are the least and the greatest score of the branch's last layer.
    docs/method.md explains why the lemma is wrong as the paper states it.
    """
    key, title = "refinement", "How much each residual block refines"
    blocks = run.refinement
    if not blocks:
        return Figure(key, title, missing=run.missing["refinement"])
    measured = [block.get(when) for block in blocks for when in ("unscored", "scored", "pruned")]
    seen = list(filter(None, measured)) or [1.0]
    # Lower bounds can be close to zero, so the measured values set the scale and lower bounds are cut off.
    highest = max(_bounds(block)[1] or 0.0 for block in blocks)
    scale = Scale(min(seen) / 3, max(*seen, highest) * 1.4, _HEIGHT, logarithmic=True)
    each = 100 / len(blocks)
    width = min(each * 0.6, 4.0)
    parts = [grid(scale, 0)]
    for column, block in enumerate(blocks):
        center = each * (column + 0.5)
        middle = f"{center:.3f}%"
        low, high = _bounds(block)
        if low is not None and high is not None:
            left, right = (f"{center + side * width / 2:.3f}%" for side in (-1, 1))
            top, bare = scale(high), scale(block["unscored"])
            bar = {"x": left, "width": f"{width:.3f}%", "y": top}
            bar["height"] = max(scale(max(low, scale.low)) - top, 1)
            parts.append(element("rect", class_="bounds", **bar, rx=3))
            parts.append(element("line", class_="bare", x1=left, x2=right, y1=bare, y2=bare))
            parts.append(element("circle", class_="scored", cx=middle, cy=scale(block["scored"]), r=3.5))
        if pruned := block.get("pruned"):
            parts.append(element("circle", class_="final", cx=middle, cy=scale(pruned), r=3.5))
        elif pruned == 0:
            parts.append(element("text", "\u00d7", class_="cross", x=middle, y=f"{_HEIGHT - 3:.0f}"))
    parts += [hit_area("", column, each * column, each, 0, _HEIGHT) for column in range(len(blocks))]
    parts.append(module_axis([block["block"] for block in blocks], _HEIGHT))
    legend = [("block bounds", "the lemma's bounds"), ("bar bare", "without scores")]
    legend.append(("dot scored", "under the scores"))
    if any(block.get("pruned") is not None for block in blocks):
        legend.append(("dot final", "at the end, pruned and fine-tuned"))
    if any(block.get("pruned") == 0 for block in blocks):
        legend.append(("cross", "block removed"))
    caption = _CAPTION + "".join(
        f" {_WHEN[which]} nothing could be measured: {why}." for which, why in run.unmeasured.items()
    )
    head = ["block", "lower bound", "under the scores", "upper bound", "without scores", "least score"]
    rows = []
    for block in blocks:
        low, high = _bounds(block)
        row = [low, block.get("scored"), high, *(block.get(key) for key in ("unscored", "delta", "top", "pruned"))]
        rows.append([block["block"], *(DASH if value is None else f"{value:.3g}" for value in row)])
    table = Table([*head, "greatest score", "at the end"], rows)
    return Figure(key, title, caption, svg_figure(key, _HEIGHT, title, parts), table, legend)


def _bounds(block: Record) -> tuple[float, float] | tuple[None, None]:
    if "unscored" not in block:
        return None, None
    return block["delta"] ** 2 * block["unscored"], block["top"] ** 2 * block["unscored"]


_TILE_WIDTH, _TILE_HEIGHT = 300.0, 140.0  # size of a plot in SVG units, for integer coordinates
_LEVELS = (0, 25, 50, 75, 100)


def scores_figure(run: Run) -> Figure:
    """Return the distribution of each layer's scores over the score epochs, as one small plot per layer.

    A plot shows the range of the scores, their interquartile range, their median, and the threshold of the gates.
    """
    key, title = "scores", "Scores over time"
    if not run.scores:
        return Figure(key, title, missing=run.missing["scores"], wide=True)
    last = run.scores[-1]["scores"]
    # Reserve room for score epochs still to come, and for those that an older version did not store.
    planned = sum(phase.epochs for phase in run.schedule if phase.trains_scores)
    unstored = max(sum(record["phase"] in SCORE_KINDS for record in run.records) - len(run.scores), 0)
    epochs = max(planned, len(run.scores))
    threshold = float(run.recipe.get("scores", {}).get("threshold", 0.5))
    levels = {name: [np.percentile(line["scores"][name], _LEVELS) for line in run.scores] for name in last}
    high = max(1.1, *(float(over_epochs[-1][-1]) for over_epochs in levels.values()))
    kept = {one.name: one.after for one in run.layers}
    tiles, rows = [], []
    for row, (name, scores) in enumerate(last.items()):
        over, width = sum(score >= threshold for score in scores), len(scores)
        tile = _tile(levels[name], epochs, unstored, high, threshold)
        label = (element("b", name), element("span", f"{kept.get(name, over)}/{width}"))
        tiles.append(element("div", tile, *label, class_="tile hit", data_row=row))
        rows.append([name, str(width), str(over), *(f"{level:.2f}" for level in levels[name][-1])])
    caption = (
        f"Each picture is a layer and runs over {len(run.scores)} epochs of scores, from the start at 1 on the "
        f"left; below {tick(threshold)} (the dotted line) a filter is closed"
    )
    budget = run.recipe.get("budget", {})
    targeted = any(budget.get(target.name, 1) != 1 for target in fields(Budget))
    caption += ", unless a target size or latency sets another threshold." if targeted else "."
    if unstored:
        caption += f" The first {unstored} epochs were run by an older version, which did not store them."
    head = ["layer", "filters", f"scores of {tick(threshold)} or more", "lowest", "lower quarter", "median"]
    table = Table([*head, "upper quarter", "highest"], rows)
    legend = [("block span", "all scores"), ("block half", "the middle half"), ("line accent", "median")]
    return Figure(key, title, caption, element("div", tiles, class_="tiles"), table, legend, wide=True)


def _tile(levels: Sequence[Sequence[float]], epochs: int, unstored: int, high: float, threshold: float) -> Markup:
    # All scores start at 1. The starting point is drawn unless the first score epochs were not stored.
    shown, first = (levels, unstored + 1) if unstored else ([[1.0] * len(_LEVELS), *levels], 0)

    def edge(level: int) -> list[tuple[float, float]]:
        return [
            (_TILE_WIDTH * epoch / epochs, _TILE_HEIGHT * (1 - line[level] / high))
            for epoch, line in enumerate(shown, first)
        ]

    paths = {
        "span": f"{path_data([*edge(4), *reversed(edge(0))])}z",
        "half": f"{path_data([*edge(3), *reversed(edge(1))])}z",
        "curve accent": path_data(edge(2)),
        "threshold": f"M0 {_TILE_HEIGHT * (1 - threshold / high):.0f}h{_TILE_WIDTH:.0f}",
    }
    frame = {"viewBox": f"0 0 {_TILE_WIDTH:.0f} {_TILE_HEIGHT:.0f}", "preserveAspectRatio": "none"}
    parts = (element("path", class_=kind, d=path) for kind, path in paths.items())
    return element("svg", parts, **frame, aria_hidden="true")


def skipped(run: Run) -> Figure:
    """Return the list of layers without scores: skipped layers with the reason, and followers.

    A second list gives the reason for each other section that is missing from the report.
    """
    rows = [*run.skipped.items()]
    rows += [(name, f"follows {', '.join(leaders)}") for name, leaders in run.followers.items()]
    if not rows and "network" in run.missing and not run.summary:
        return Figure("skipped", "Left alone", missing="Which layers are left alone is not stored in this folder.")
    parts = [pairs(rows) if rows else element("p", "Nothing: every layer with filters can be pruned.")]
    if missing := [element("li", why) for part, why in run.missing.items() if part != "network"]:
        parts += [element("h3", "Not in this report"), element("ul", missing)]
    return Figure("skipped", "Left alone", text=concat(parts))


def environment(run: Run) -> Figure:
    """Return the machine and the versions of the software."""
    key, title = "environment", "Environment"
    if not run.environment:
        return Figure(key, title, missing="It is stored when a run ends, and this one has not ended.")
    rows = ((str(name), str(value)) for name, value in run.environment.items() if value is not None)
    return Figure(key, title, text=pairs(rows))


def recipe(run: Run) -> Figure:
    """Return every setting of the resolved recipe."""
    sections: dict[str, Mapping[str, Any]]
    sections = {"": {key: value for key, value in run.recipe.items() if not isinstance(value, Mapping)}}
    sections |= {key: value for key, value in run.recipe.items() if isinstance(value, Mapping)}
    parts = []
    for name, values in sections.items():
        rows = pairs((key, format_setting(value)) for key, value in values.items())
        parts.append(element("div", element("h3", name) if name else "", rows))
    return Figure("recipe", "Recipe", text=element("div", parts, class_="sections"), wide=True)


def format_setting(value: Any) -> str:
    """Format a setting as text; empty values become "none".

    >>> [format_setting(value) for value in (True, "", [0.5, 0.75], [], {})]
    ['yes', 'none', '0.5, 0.75', 'none', 'none']
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(format_setting, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {format_setting(item)}" for key, item in value.items()) or "none"
    return str(value) if value != "" else "none"


_ROW = 38.0  # pixels
ELSEWHERE = "not measured here: the latency model is from another machine, or its runtime is not installed"


def latency_section(run: Run) -> Figure | None:
    """Return a bar chart of target, predicted and measured latency, or None for a run without a latency target."""
    time = run.time
    if time is None:
        return None
    shares = [
        ("dense, in its fastest form", 1.0, "before"),
        ("target", time["asked"], "before"),
        ("predicted by the latency model", time["foretold"], "before"),
        ("measured against the dense network", time["measured"], "kept"),
    ]
    rows: list[list[str]] = []
    parts = []
    for name, share, kind in shares:
        if share is not None:
            top, width = _ROW * len(rows), f"{min(100 * share, 100):.2f}%"
            row = [name, _percentage(share), milliseconds(share * time["dense_ms"])]
            parts.append(element("text", name, class_="start", x=0, y=f"{top + 14:.0f}"))
            parts.append(element("text", " · ".join(row[1:]), x="100%", y=f"{top + 14:.0f}"))
            parts.append(element("rect", class_=kind, x=0, width=width, y=f"{top + 19:.0f}", height=12))
            rows.append(row)
    at, height = f"{100 * time['asked']:.2f}%", _ROW * len(rows)
    parts.append(element("line", class_="bound", x1=at, x2=at, y1=0, y2=f"{height:.0f}"))
    parts += [hit_area("", row, 0, 100, _ROW * row, _ROW) for row in range(len(rows))]
    title = "Latency against the target"
    picture = concat(svg_figure("times", height, title, parts), _latency_facts(time))
    table = Table(["a pass of the network", "share of the dense network's time", "time"], rows)
    return Figure("time", title, _latency_caption(run, time), picture, table, [("line dashed", "target")])


def latency_conditions(time: Mapping[str, Any]) -> str:
    """Describe the conditions of a latency: runtime, batch size and threads."""
    return f"{time['runtime']}, batch {time['batch']}, {pluralize(time['threads'], 'thread')}"


def best_known_time(time: Mapping[str, Any], finished: bool) -> tuple[float | None, str]:
    """Return the best known time of the pruned network, relative to the dense one, and how it is known."""
    if time["measured"] is not None:
        return time["measured"], "measured"
    return time["foretold"], "predicted" if finished else "filters not chosen yet"


def _latency_caption(run: Run, time: Mapping[str, Any]) -> str:
    share = f"{_percentage(time['asked'])} of the dense network's {milliseconds(time['dense_ms'])}"
    target = f"The target was {share}, {milliseconds(time['asked_ms'])}, in {latency_conditions(time)}"
    if time["measured"] is not None:
        how = "extracted and timed alternately with the dense network, the pruned one takes"
        return f"{target}; {how} {_percentage(time['measured'])} of its time."
    if not run.finished:
        return f"{target}; the filters that meet it are chosen after the last score phase."
    return f"{target}. That was {ELSEWHERE}; the latency model predicts {_percentage(time['foretold'])}."


def _latency_facts(time: Mapping[str, Any]) -> Markup:
    facts = {"way": _way(time)}
    machine = [
        str(value) if key in ("cpu", "gpu") else f"{value} cores" if key == "cores" else f"{key} {value}"
        for key, value in time["machine"].items()
        if value is not None
    ]
    facts["measured on"] = ", ".join(machine) or "a machine that the latency model does not name"
    if time.get("mean_error") is not None:
        mean, worst = (_percentage(time[key]) for key in ("mean_error", "worst_error"))
        facts["the latency model"] = f"off by {mean} on average, {worst} at most, for held-out networks"
    if time["landings"]:
        shares = ([_percentage(landing[key]) for key in ("measured", "foretold")] for landing in time["landings"])
        facts["landings"] = ", then ".join(f"{measured} (predicted {predicted})" for measured, predicted in shares)
    return pairs(facts.items())


def _way(time: Mapping[str, Any]) -> str:
    """Describe the way of removal: set in the recipe, or predicted to keep the most MACs at the latency target."""
    chosen, left = time["way"], time["macs_left"]
    if not left:
        return f"{chosen}, set in the recipe"
    own = left.get(chosen)
    parts = [chosen if own is None else f"{chosen}, predicted to keep {_percentage(own)} of the MACs"]
    for name, share in left.items():
        if name != chosen:
            parts.append(
                f"{name} {'cannot reach the target' if share is None else f'would keep {_percentage(share)}'}"
            )
    return "; ".join(parts)


def _percentage(share: float) -> str:
    return percent(100 * share, 1)

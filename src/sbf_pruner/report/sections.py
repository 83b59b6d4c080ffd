"""Sections of a run report, one function each, from a `Run` to a `Figure`.

A section whose data is not stored is a figure that gives the reason, from `Run.missing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ..budget.targets import Budget
from ..criteria import METHODS, describe_method
from ..schedule import SCORE_KINDS
from ..utils.formatting import DASH, milliseconds, percent
from .graph_drawing import drawing
from .html import (
    Figure,
    Markup,
    Scale,
    Table,
    concat,
    element,
    grid,
    hit_area,
    module_axis,
    pairs,
    path_data,
    scroll,
    svg_figure,
    tick,
)
from .inspection import Box
from .run_data import LayerKept, Run

_HEIGHT = 190.0
_LABELLED = 26  # with more bars, there is no room for a number on each


def kept_figure(run: Run) -> Figure:
    """Return the filters that each layer keeps, as in Figure 4 of the paper."""
    key, title = "kept", "Filters kept per layer"
    if not run.layers:
        return Figure(key, title, missing=run.missing["kept"])
    before, after = sum(one.before for one in run.layers), sum(one.after for one in run.layers)
    gone = sum(not one.after for one in run.layers)
    said = f"{after:,} of {before:,} filters are kept"
    said += f"; {gone} of {len(run.layers)} layers are removed entirely." if gone else "."
    said += f" {_chosen(run)}"
    legend = [("block kept", "kept"), ("block before", "removed")]
    if gone:
        legend.append(("cross", "layer gone"))
    return Figure(key, title, said, bars(run.layers, title), numbers(run.layers), legend)


def _chosen(run: Run) -> str:
    """Describe how the widths of the layers were chosen."""
    if run.method is None:
        return "The learned scores determine the widths."
    across = run.method in METHODS and METHODS[run.method].across
    by = "comparing filters of all layers" if across else "the same part of every layer"
    return f"They were chosen by {describe_method(run.method)}, {by}, as many as the target size allows."


def bars(layers: Sequence[LayerKept], label: str, height: float = _HEIGHT) -> Markup:
    """Draw a bar per layer: the outline is its dense width, the filling what is kept, a cross a removed layer."""
    each = 100 / len(layers)
    scale = Scale(0, max(one.before for one in layers) * 1.06, height)
    parts = [grid(scale, 0, most=4)]
    for place, one in enumerate(layers):
        left, width = each * (place + 0.12), each * 0.76
        whole, rest = scale(one.before), scale(one.after)
        across = {"x": f"{left:.3f}%", "width": f"{width:.3f}%"}
        middle = f"{left + width / 2:.3f}%"
        parts.append(element("rect", class_="before", **across, y=whole, height=height - whole))
        if one.after:
            parts.append(element("rect", class_="kept", **across, y=rest, height=height - rest))
            if len(layers) <= _LABELLED:
                parts.append(element("text", str(one.after), class_="value", x=middle, y=rest - 4))
        else:
            parts.append(element("text", "\u00d7", class_="cross", x=middle, y=height - 4))
    for place in range(len(layers)):
        parts.append(hit_area("", place, each * place, each, 0, height))
    parts.append(module_axis([one.name for one in layers], height))
    return svg_figure("bars", height, label, parts)


def numbers(layers: Sequence[LayerKept]) -> Table:
    """Return the table of kept filters, with a row per layer."""
    rows = [
        [
            one.name,
            str(one.after),
            str(one.before),
            percent(100 * one.after / one.before, 0),
            DASH if one.macs_share is None else percent(one.macs_share, 1),
        ]
        for one in layers
    ]
    return Table(["layer", "filters kept", "filters before", "share kept", "share of the dense MACs"], rows)


def network(run: Run) -> Figure:
    """Return the channel graph, with each layer filled by its kept share and removed layers dashed."""
    key, title = "network", "The network, before and after"
    if not run.boxes:
        return Figure(key, title, missing=run.missing["network"], wide=True)
    boxes = with_kept(run.boxes, _kept(run))
    body, width, height = drawing(boxes)
    gone = [box for box in boxes if box.kept == 0]
    said = "Channels flow from top to bottom, column by column. A box is filled as far as its filters are kept."
    if gone:
        said += f" {len(gone)} layers are removed (dashed): only their shortcuts remain."
    # The drawing scales with the page, up to slightly above its own size; below the least width it is scrolled.
    least = min(width, 560 + 0.35 * max(width - 560, 0))
    picture = element(
        "svg",
        body,
        class_="graph",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        style=f"min-width:{least:.0f}px;max-width:{1.15 * width:.0f}px",
    )
    legend = [
        ("block kept", "filters kept"),
        ("block before", "removed"),
        ("block skipped", "left alone"),
        ("diamond", "gate"),
    ]
    return Figure(key, title, said, scroll(picture, title), legend=legend, wide=True)


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
    """Return copies of the boxes with the filters kept of each, in the same order."""
    made: dict[Box, Box] = {}
    for box in boxes:
        left = kept.get(box.layer) if box.layer else None
        sources = [made[source] for source in box.sources]
        if left is None:
            made[box] = replace(box, sources=sources)
            continue
        _, _, rest = box.note.partition(" · ")
        note = f"{box.filters} \u2192 {left}" + (f" · {rest}" if rest else "")
        tip = (box.tip[0], f"{left} of {box.filters} filters kept", *box.tip[1:])
        made[box] = replace(box, sources=sources, kept=left, note=note, tip=tip)
    return list(made.values())


_REFINEMENT_HEIGHT = 190.0
_WHEN = {"scored": "Under the scores", "pruned": "At the end"}
_CAPTION = (
    "The energy a block adds, as a part of what arrives: |S·f(x)|² / |x|² on test images. Under continuous scores "
    "it must lie between δ² and (1+ε)² times the value without scores, where δ and 1+ε are the least and the "
    "greatest score of the branch's last layer: the paper's Lemma 1, corrected."
)


def refinement(run: Run) -> Figure:
    """Return the measured refinement of residual blocks beside the bounds of a corrected Lemma 1.

    With scores S applied before the addition, |S.f(x)|^2 / |x|^2 lies between delta^2 and (1 + eps)^2 times its
    value without scores, where delta and 1 + eps are the least and the greatest score of the branch's last layer.
    The lemma is wrong as the paper states it: docs/method.md says why.
    """
    key, title = "refinement", "How much each residual block refines"
    blocks = run.refinement
    if not blocks:
        return Figure(key, title, missing=run.missing["refinement"])
    seen = [value for block in blocks for value in _measured(block) if value] or [1.0]
    # Lower bounds can be close to zero, so the measured values set the scale and lower bounds are cut off.
    high = max(block["top"] ** 2 * block["unscored"] if "top" in block else 0.0 for block in blocks)
    scale = Scale(min(seen) / 3, max(*seen, high) * 1.4, _REFINEMENT_HEIGHT, logarithmic=True)
    each = 100 / len(blocks)
    parts = [grid(scale, 0)]
    for place, block in enumerate(blocks):
        middle = f"{each * (place + 0.5):.3f}%"
        low, high, bare = _bounds(block)
        if high is not None and low is not None and bare is not None:
            top, bottom = scale(high), scale(max(low, scale.low))
            width = min(each * 0.6, 4.0)
            left, right = (f"{each * (place + 0.5) + side * width / 2:.3f}%" for side in (-1, 1))
            height = max(bottom - top, 1)
            parts.append(
                element("rect", class_="bounds", x=left, width=f"{width:.3f}%", y=top, height=height, rx=3)
            )
            parts.append(element("line", class_="bare", x1=left, x2=right, y1=scale(bare), y2=scale(bare)))
            parts.append(element("circle", class_="scored", cx=middle, cy=scale(block["scored"]), r=3.5))
        pruned = block.get("pruned")
        if pruned:
            parts.append(element("circle", class_="final", cx=middle, cy=scale(pruned), r=3.5))
        elif pruned == 0:
            parts.append(element("text", "\u00d7", class_="cross", x=middle, y=f"{_REFINEMENT_HEIGHT - 3:.0f}"))
    parts += [hit_area("", row, each * row, each, 0, _REFINEMENT_HEIGHT) for row in range(len(blocks))]
    parts.append(module_axis([block["block"] for block in blocks], _REFINEMENT_HEIGHT))
    legend = [
        ("block bounds", "the lemma's bounds"),
        ("bar bare", "without scores"),
        ("dot scored", "under the scores"),
    ]
    if any(block.get("pruned") is not None for block in blocks):
        legend += [("dot final", "at the end, pruned and fine-tuned")]
    if any(block.get("pruned") == 0 for block in blocks):
        legend += [("cross", "block gone")]
    caption = _CAPTION + "".join(
        f" {_WHEN[which]} nothing could be measured: {why}." for which, why in run.unmeasured.items()
    )
    return Figure(key, title, caption, svg_figure(key, _REFINEMENT_HEIGHT, title, parts), _table(run), legend)


def _bounds(block: Mapping[str, Any]) -> tuple[float | None, float | None, float | None]:
    if "unscored" not in block:
        return None, None, None
    bare = block["unscored"]
    return block["delta"] ** 2 * bare, block["top"] ** 2 * bare, bare


def _measured(block: Mapping[str, Any]) -> tuple[float | None, ...]:
    return block.get("unscored"), block.get("scored"), block.get("pruned")


def _table(run: Run) -> Table:
    def said(value: float | None) -> str:
        return DASH if value is None else f"{value:.3g}"

    head = ["block", "lower bound", "under the scores", "upper bound", "without scores", "least score"]
    rows = []
    for block in run.refinement:
        low, high, bare = _bounds(block)
        row = [low, block.get("scored"), high, bare, block.get("delta"), block.get("top"), block.get("pruned")]
        rows.append([block["block"], *map(said, row)])
    return Table([*head, "greatest score", "at the end"], rows)


_WIDE, _HIGH = 300.0, 140.0  # units of a picture, fine enough for whole coordinates
_LEVELS = (0, 25, 50, 75, 100)


def scores_figure(run: Run) -> Figure:
    """Return how the scores of each layer spread over the epochs of scores, as one small picture per layer.

    A picture shows all scores, the middle half, the median, and the threshold that a filter must reach to be kept.
    """
    key, title = "scores", "Scores over time"
    if not run.scores:
        return Figure(key, title, missing=run.missing["scores"], wide=True)
    last = run.scores[-1]
    names = list(last["scores"])
    # Reserve room for score epochs still to come, and for those that an older version did not store.
    planned = sum(phase.epochs for phase in run.schedule if phase.trains_scores)
    missed = max(sum(record["phase"] in SCORE_KINDS for record in run.records) - len(run.scores), 0)
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
    said += ", unless a target size or latency sets another threshold." if asked else "."
    if missed:
        said += f" The first {missed} epochs were run by an older version, which did not store them."
    head = ["layer", "filters", f"scores of {tick(threshold)} or more", "lowest", "lower quarter", "median"]
    table = Table([*head, "upper quarter", "highest"], rows)
    legend = [("block span", "all scores"), ("block half", "the middle half"), ("line accent", "median")]
    return Figure(key, title, said, element("div", tiles, class_="tiles"), table, legend, wide=True)


def _tile(levels: Sequence[Sequence[float]], times: int, missed: int, high: float, threshold: float) -> Markup:
    # All scores start at 1; this point is drawn unless the epochs after it were not stored.
    held, first = (levels, missed + 1) if missed else ([[1.0] * len(_LEVELS), *levels], 0)
    across = [_WIDE * (first + time) / times for time in range(len(held))]

    def edge(level: int) -> list[tuple[float, float]]:
        return [(x, _HIGH * (1 - line[level] / high)) for x, line in zip(across, held, strict=True)]

    return element(
        "svg",
        element("path", class_="span", d=f"{path_data([*edge(4), *reversed(edge(0))])}z"),
        element("path", class_="half", d=f"{path_data([*edge(3), *reversed(edge(1))])}z"),
        element("path", class_="curve accent", d=path_data(edge(2))),
        element("path", class_="threshold", d=f"M0 {_HIGH * (1 - threshold / high):.0f}h{_WIDE:.0f}"),
        viewBox=f"0 0 {_WIDE:.0f} {_HIGH:.0f}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def skipped(run: Run) -> Figure:
    """Return layers without scores of their own: those left alone, with the reason, and followers.

    Reasons for other sections that are missing are listed too.
    """
    rows = [(name, reason) for name, reason in run.skipped.items()]
    rows += [(name, f"follows {', '.join(leaders)}") for name, leaders in run.followers.items()]
    if not rows and "network" in run.missing and not run.summary:
        return Figure("skipped", "Left alone", missing="Which layers are left alone is not stored in this folder.")
    parts = [pairs(rows) if rows else element("p", "Nothing: every layer with filters can be pruned.")]
    missing = [why for part, why in run.missing.items() if part != "network"]
    if missing:
        parts.append(element("h3", "Not in this report"))
        parts.append(element("ul", (element("li", why) for why in missing)))
    return Figure("skipped", "Left alone", text=concat(parts))


def environment(run: Run) -> Figure:
    """Return the machine and the versions of the software."""
    if not run.environment:
        return Figure(
            "environment", "Environment", missing="It is stored when a run ends, and this one has not ended."
        )
    rows = [(str(key), str(value)) for key, value in run.environment.items() if value is not None]
    return Figure("environment", "Environment", text=pairs(rows))


def recipe(run: Run) -> Figure:
    """Return every setting of the resolved recipe."""
    plain = {key: value for key, value in run.recipe.items() if not isinstance(value, Mapping)}
    parts = [_section("", plain)]
    parts += [_section(key, value) for key, value in run.recipe.items() if isinstance(value, Mapping)]
    return Figure("recipe", "Recipe", text=element("div", parts, class_="sections"), wide=True)


def _section(name: str, values: Mapping[str, Any]) -> Markup:
    rows = pairs((key, format_setting(value)) for key, value in values.items())
    return element("div", element("h3", name) if name else "", rows)


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


_EACH, _BAR = 38.0, 12.0  # pixels: height of a row, and of the bar in it
ELSEWHERE = "not measured here: the latency model is from another machine, or its runtime is not installed"


def latency_section(run: Run) -> Figure | None:
    """Return the latency target beside the predicted and the measured time, or None for a run without a target."""
    time = run.time
    if time is None:
        return None
    bars = [
        ("dense, in its fastest form", 1.0, "before"),
        ("target", time["asked"], "before"),
        ("predicted by the latency model", time["foretold"], "before"),
        ("measured against the dense network", time["measured"], "kept"),
    ]
    rows = [
        [name, percent(100 * share, 1), milliseconds(share * time["dense_ms"])]
        for name, share, _ in bars
        if share is not None
    ]
    parts = [
        _bar(place, name, share, kind, row)
        for place, ((name, share, kind), row) in enumerate(
            zip((bar for bar in bars if bar[1] is not None), rows, strict=True)
        )
    ]
    at, high = f"{100 * time['asked']:.2f}%", _EACH * len(rows)
    parts.append(element("line", class_="bound", x1=at, x2=at, y1=0, y2=f"{high:.0f}"))
    parts += [hit_area("", row, 0, 100, _EACH * row, _EACH) for row in range(len(rows))]
    drawn = svg_figure("times", high, "Latency against the target", parts)
    legend = [("line dashed", "target")]
    table = Table(["a pass of the network", "share of the dense network's time", "time"], rows)
    return Figure(
        "time", "Latency against the target", _said(run, time), concat(drawn, _facts(time)), table, legend
    )


def latency_conditions(time: Mapping[str, Any]) -> str:
    """Describe the conditions of a latency: runtime, batch size and threads."""
    threads = f"{time['threads']} thread{'' if time['threads'] == 1 else 's'}"
    return f"{time['runtime']}, batch {time['batch']}, {threads}"


def best_known_time(time: Mapping[str, Any], finished: bool) -> tuple[float | None, str]:
    """Return the best known time of the pruned network, relative to the dense one, and how it is known."""
    if time["measured"] is not None:
        return time["measured"], "measured"
    return time["foretold"], "predicted" if finished else "filters not chosen yet"


def _bar(place: int, name: str, share: float, kind: str, row: list[str]) -> Markup:
    top = _EACH * place
    words, bar = {"y": f"{top + 14:.0f}"}, {"y": f"{top + 19:.0f}", "height": f"{_BAR:.0f}"}
    return concat(
        element("text", name, class_="start", x=0, **words),
        element("text", f"{row[1]} · {row[2]}", x="100%", **words),
        element("rect", class_=kind, x=0, width=f"{min(100 * share, 100):.2f}%", **bar),
    )


def _said(run: Run, time: Mapping[str, Any]) -> str:
    asked = f"{percent(100 * time['asked'], 1)} of the dense network's {milliseconds(time['dense_ms'])}"
    said = f"The target was {asked}, {milliseconds(time['asked_ms'])}, in {latency_conditions(time)}"
    if time["measured"] is not None:
        beside = (
            "extracted and timed alternately with the dense network, the pruned one takes "
            f"{_part(time['measured'])} of its time"
        )
        return f"{said}; {beside}."
    if not run.finished:
        return f"{said}; the filters that meet it are chosen after the last score phase."
    return f"{said}. That was {ELSEWHERE}; the latency model predicts {_part(time['foretold'])}."


def _facts(time: Mapping[str, Any]) -> Markup:
    facts = {"way": _way(time)}
    machine = ", ".join(_named(key, value) for key, value in time["machine"].items() if value is not None)
    facts["measured on"] = machine or "a machine that the latency model does not name"
    if time.get("mean_error") is not None:
        mean, worst = (percent(100 * time[key], 1) for key in ("mean_error", "worst_error"))
        facts["the latency model"] = f"off by {mean} on average, {worst} at most, for held-out networks"
    if time["landings"]:
        each = [f"{_part(one['measured'])} (predicted {_part(one['foretold'])})" for one in time["landings"]]
        facts["landings"] = ", then ".join(each)
    return pairs(facts.items())


def _way(time: Mapping[str, Any]) -> str:
    """Describe the way of removal: chosen because it keeps the most MACs in the time, or set in the recipe."""
    left = time["macs_left"]
    if not left:
        return f"{time['way']}, set in the recipe"
    others = [
        f"{name} {'cannot reach the target' if share is None else f'would keep {_part(share)}'}"
        for name, share in left.items()
        if name != time["way"]
    ]
    own = left.get(time["way"])
    kept = "" if own is None else f", predicted to keep {_part(own)} of the MACs"
    return "; ".join([f"{time['way']}{kept}", *others])


def _named(key: str, value: Any) -> str:
    return str(value) if key in ("cpu", "gpu") else f"{value} cores" if key == "cores" else f"{key} {value}"


def _part(share: float) -> str:
    return percent(100 * share, 1)

"""The figures of a frontier in; a picture (.svg) or a page (.html) out.

Every size that was reached is a point on one line; the run's own filters stand beside it, before and, if the
run is finished, after fine-tuning, and so does the dense network as it was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..drawing.markup import element, together
from ..figures import rounded
from ..report.against import Point, against, standalone
from ..report.chart import Figure, tick
from ..report.numbers import milliseconds
from ..report.page import HEADLINE, figure_parts, page

_WORDS = {"macs": "multiply-accumulates", "params": "parameters"}
_ASKED = {**_WORDS, "size": "file", "latency": "time"}
_TIME = "latency_ms"
_SPELLED = {_TIME: (lambda value: f"{tick(value)} ms", milliseconds)}


def draw_frontier(result: Mapping[str, Any], ending: str) -> str:
    """The drawing as the text of a file with this ending."""
    timed = result["of"] == "latency"
    title = f"{result['name']}, seed {result['seed']}: accuracy against {'time' if timed else 'size'}"
    words = {**_WORDS, **({_TIME: _time(result["clock"])} if result["clock"] else {})}
    if ending == ".svg":
        key = _TIME if timed else "macs"
        axis = words[key] if timed else f"{words[key]} of one image"
        return standalone(_figure(result, key, words[key]), title, axis)
    first = [_TIME] if timed else []
    figures = [_figure(result, key, words[key]) for key in dict.fromkeys([*first, *words])]
    facts = f"{result['judged_images']:,} {result['judged_on']} images · nothing retrained"
    facts += " · no images were held out to choose by" if result["judged_on"] == "test" else ""
    head = together(
        element("p", facts, class_="facts"), element("h1", title), element("p", result["said"], class_="lead")
    )
    return page(title, result["said"], {HEADLINE: head} | figure_parts(figures), wide=())


def _time(clock: Mapping[str, Any]) -> str:
    return f"the time foretold ({clock['runtime']}, batch {clock['batch']})"


def _figure(result: Mapping[str, Any], key: str, words: str) -> Figure:
    dense, own = result["dense"], result["own"]
    chosen = [
        Point(
            f"{100 * p['share']:.4g} % asked for",
            p["accuracy"],
            p[key],
            "chosen",
            f"{100 * p['share']:.3g} %",
            True,
        )
        for p in result["points"]
        if p["reached"]
    ]
    whole = Point("all filters", dense["accuracy"], dense[key], "chosen", "all", True)
    line = sorted([whole, *chosen], key=lambda point: point.size)
    legend = [("dot chosen", "chosen by score, recalibrated")]
    points, joined = [*line], [("accent", line)]
    trained, known = "dense control", dense["control_accuracy"]
    if known is None:
        trained, known = "dense, after the warm-up", dense["warmup_accuracy"]
    if known is not None:
        points.append(Point(trained, known, dense[key], "whole"))
        legend.append(("dot whole", trained))
    before = Point("the run's own filters", own["accuracy"], own[key], "own")
    points.append(before)
    legend.append(("dot own", "the run's own filters, recalibrated"))
    if own["finetuned_accuracy"] is not None:
        after = Point("the run's own filters, fine-tuned", own["finetuned_accuracy"], own[key], "tuned")
        points.append(after)
        joined.append(("dashed", [before, after]))
        legend.append(("dot tuned", "the same, fine-tuned"))
    caption = (
        "Up and to the left is better. The line holds for the weights as the cycles left them, without a step of "
        "training after the cut; what fine-tuning does is shown for the run's own filters alone."
    )
    if key.removesuffix("_ms") != result["of"]:  # 30 % of the MACs do not stand at 30 % of the parameters
        caption += f" The percentages are what was asked for, of the {_ASKED[result['of']]}."
    if key == _TIME:
        caption += _trusted(result["clock"])
    more = {"spelled": _SPELLED[key]} if key in _SPELLED else {}
    return against(f"against-{key}", words, points, caption, first="filters", joined=joined, legend=legend, **more)


def _trusted(clock: Mapping[str, Any]) -> str:
    """How far the foretold times can be trusted."""
    said = ""
    if clock["mean_error"] is not None:
        mean, worst = (f"{rounded(100 * clock[key])} %" for key in ("mean_error", "worst_error"))
        said += f" Such times were off by {mean} on average and {worst} at most."
    if clock["measured"] is not None:
        part = f"{rounded(100 * clock['measured'])} %"
        said += f" Cut for real, the run's own network took {part} of the dense one's time."
    return said

"""The filters each layer keeps: the paper's Figure 4, with the numbers on every bar.

Layers before and after enter; a bar per layer leaves: its outline is what there was, its filling what is
kept, and a layer that is gone is a sign at the bottom.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..drawing.markup import Markup, element
from ..methods import METHODS, told
from .chart import Figure, Scale, Table, column, grid, parts_of_the_network, picture
from .data import LayerKept, Run
from .numbers import DASH, percent

_HEIGHT = 190.0
_LABELLED = 26  # so many bars have room for a number each


def kept(run: Run) -> Figure:
    """The figure of one run."""
    key, title = "kept", "Filters kept per layer"
    if not run.layers:
        return Figure(key, title, missing=run.missing["kept"])
    before, after = sum(one.before for one in run.layers), sum(one.after for one in run.layers)
    gone = sum(not one.after for one in run.layers)
    said = f"{after:,} of {before:,} filters are kept"
    said += f"; {gone} of {len(run.layers)} layers are gone altogether." if gone else "."
    said += f" {_chosen(run)}"
    legend = [("block kept", "kept"), ("block before", "removed")]
    if gone:
        legend.append(("cross", "layer gone"))
    return Figure(key, title, said, bars(run.layers, title), numbers(run.layers), legend)


def _chosen(run: Run) -> str:
    """Who decided how wide each layer is."""
    if run.method is None:
        return "Nobody set these widths: they come out of the scores."
    across = run.method in METHODS and METHODS[run.method].across
    by = "comparing filters of all layers" if across else "the same part of every layer"
    return f"They were chosen by {told(run.method)}, {by}, as many as the size asked for allows."


def bars(layers: Sequence[LayerKept], label: str, height: float = _HEIGHT) -> Markup:
    """A bar per layer."""
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
        parts.append(column("", place, each * place, each, 0, height))
    parts.append(parts_of_the_network([one.name for one in layers], height))
    return picture("bars", height, label, parts)


def numbers(layers: Sequence[LayerKept]) -> Table:
    """A row per layer."""
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

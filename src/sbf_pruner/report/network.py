"""The network as a graph, with the filters of each layer before and after, and the blocks that are gone.

A run's boxes and kept layers enter; the drawing of `sbf inspect --graph` leaves, with each layer filled as
far as it is kept.
"""

from __future__ import annotations

from dataclasses import replace

from ..drawing.markup import element
from ..drawing.scene import Box
from ..drawing.svg import drawing
from .chart import Figure, scroll
from .data import Run


def network(run: Run) -> Figure:
    """The figure."""
    key, title = "network", "The network, before and after"
    if not run.boxes:
        return Figure(key, title, missing=run.missing["network"], wide=True)
    boxes = marked(run.boxes, _kept(run))
    body, width, height = drawing(boxes)
    gone = [box for box in boxes if box.kept == 0]
    said = "Channels flow from top to bottom, column by column. A box is filled as far as its filters are kept."
    if gone:
        said += f" {len(gone)} layers are gone (dashed): what stood beside them goes on alone."
    # Drawn at its own size and scrolled if it must be, but never larger than the page leaves room for.
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
    """The filters that are left of every layer, and of those that follow one."""
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


def marked(boxes: list[Box], kept: dict[str, int]) -> list[Box]:
    """The boxes with what is left of each, in the same order."""
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

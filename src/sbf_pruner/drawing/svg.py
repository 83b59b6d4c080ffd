"""Boxes in; the text of an SVG picture out.

Plain SVG with a small style sheet inside, light and dark, no script: it opens in any browser and can be
committed beside a document.  The page for the browser (`page`) embeds the same drawing without its heading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2
from typing import Any

from .colours import HUES, style
from .markup import Markup, element, together
from .place import MARGIN, arrange
from .rows import Cell
from .scene import FOLLOWER, GATE, INPUT, JOINT, LAYER, OPAQUE, OUTPUT, SKIPPED, Box

LAYOUT = "layout"
_LONGEST = 30  # letters of a name that are shown
_HEAD = 62.0
_NARROWEST = 610.0  # what the heading needs
_LEGEND = (
    (LAYER, "prunable, the bluer the more filters", 214),
    (FOLLOWER, "follows another layer", 138),
    (SKIPPED, "left alone", 78),
    (GATE, "gate", 48),
    (LAYOUT, "shares a layout", 90),
)


def draw_svg(boxes: Sequence[Box], facts: Mapping[str, Any]) -> str:
    """The whole picture, with a heading, as one file."""
    body, width, height = drawing(boxes)
    aside = max(_NARROWEST - width, 0) / 2
    width, height = width + 2 * aside, height + _HEAD
    return together(
        element(
            "svg",
            element("style", Markup(style())),
            element("rect", class_="paper", width="100%", height="100%"),
            _head(facts),
            element("g", body, transform=f"translate({aside:.0f} {_HEAD:.0f})"),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {width:.0f} {height:.0f}",
            width=f"{width:.0f}",
            height=f"{height:.0f}",
            role="img",
            aria_label=heading(facts),
        ),
        "\n",
    )


def heading(facts: Mapping[str, Any]) -> str:
    """One line about the network."""
    counts = f"{len(facts['layers'])} prunable layers with {facts['filters']:,} filters"
    return f"{facts['model']}: {counts}; {facts['params']:,} parameters, {facts['macs']:,} MACs"


def drawing(boxes: Sequence[Box]) -> tuple[Markup, float, float]:
    """The elements of the drawing, its width and its height."""
    picture = arrange(boxes, _size)
    number = {box: place for place, box in enumerate(boxes)}
    most = max((box.filters for box in boxes if box.kind == LAYER), default=1)
    parts = []
    for wire, path in picture.wires:
        upper, lower = wire.cells[0].box, wire.cells[-1].box
        assert upper is not None and lower is not None
        hue = _hue(upper.group) if upper.group == lower.group else ""
        gone = " gone" if 0 in (upper.kept, lower.kept) else ""
        parts.append(
            element("path", class_=f"wire{hue}{gone}", data_ends=f"{number[upper]} {number[lower]}", d=path)
        )
    parts += [_box(cell, number[cell.box], most) for cell in picture.cells if cell.box is not None]
    return together(parts), picture.width, picture.height


def _size(box: Box) -> tuple[float, float]:
    if box.kind == JOINT:
        return (18.0, 18.0) if len(box.label) == 1 else (14 + 6.0 * len(box.label), 18.0)
    letters = 6.9 * len(short(box.label))
    if box.kind in (INPUT, OUTPUT):
        return letters + 22, 22.0
    if box.kind in (GATE, OPAQUE):
        return 5.9 * len(short(box.label)) + 28, 18.0
    return max(letters + 24, 5.0 * len(box.note) + 24, 64 + 12 * log2(max(box.filters, 1))), 36.0


def _box(cell: Cell, number: int, most: int) -> Markup:
    box = cell.box
    assert box is not None
    kind = f"{box.kind} gone" if box.kept == 0 else box.kind
    return element(
        "g",
        element("title", "\n".join(box.tip)),
        _shape(box, cell.x - cell.width / 2, cell.y, cell.width, cell.height, most),
        class_=f"box {kind}{_hue(box.group)}",
        id=f"b{number}",
        data_group=box.group,
    )


def _shape(box: Box, x: float, y: float, w: float, h: float, most: int) -> Markup:
    middle = x + w / 2
    where = {"x": x, "y": y, "width": w, "height": h}
    if box.kind in (JOINT, INPUT, OUTPUT):
        shape = element("rect", class_="shape", **where, rx=h / 2, stroke_width="1.4")
        return together(shape, element("text", box.label, x=middle, y=y + h / 2 + 3.8))
    if box.kind in (GATE, OPAQUE):
        at = middle + 7 if box.kind == GATE else middle
        text = element("text", short(box.label), class_="note", x=at, y=y + 12.5)
        if box.kind == GATE:
            back = element("rect", class_="back pill", **where, rx=9)
            return together(back, element("path", class_="shape", d=_diamond(x + 9.5, y + 9, 4.5)), text)
        back = element("rect", class_="back", **where, rx=4)
        return together(back, element("rect", class_="shape", **where, rx=4, fill_opacity=".25"), text)
    strength = 0.06 + 0.54 * (box.filters / most) ** 0.5 if box.kind == LAYER else 0.06
    if box.kind == SKIPPED:
        strength = 0.18
    if box.kept is not None:
        strength = 0.07  # the part that is kept is drawn over it
    parts = [
        element("rect", class_="back", **where, rx=6),
        element("rect", class_="shape", **where, rx=6, fill_opacity=f"{min(strength, 0.62):.2f}"),
    ]
    if box.kept:
        left = {**where, "width": w * box.kept / box.filters}
        parts.append(element("rect", class_="kept", **left, rx=6, fill_opacity=".38"))
    if box.group is not None:
        parts.append(element("rect", class_="stripe", x=x, y=y + 5, width=4, height=h - 10, rx=2))
    parts.append(element("text", short(box.label), class_="name", x=middle, y=y + 15))
    parts.append(element("text", box.note, class_="note", x=middle, y=y + 28))
    if box.gate:
        parts.append(
            element("path", class_="mark" if box.gate == "affine" else "mark map", d=_diamond(middle, y + h, 4.5))
        )
    return together(parts)


def _diamond(x: float, y: float, r: float) -> str:
    return f"M{x - r:.1f} {y:.1f}l{r:.1f} {-r:.1f} {r:.1f} {r:.1f} {-r:.1f} {r:.1f}z"


def _head(facts: Mapping[str, Any]) -> Markup:
    name, _, rest = heading(facts).partition(": ")
    parts = [
        element("text", name, class_="title", x=f"{MARGIN:.0f}", y=26),
        element("text", rest, class_="note left", x=f"{MARGIN + 9 * len(name) + 14:.0f}", y=26),
    ]
    at = MARGIN
    for sign, words, room in legend():
        said = element("text", words, class_="note left", x=21, y=50.5)
        parts.append(element("g", sign, said, transform=f"translate({at:.0f} 0)"))
        at += room
    return together(parts)


def legend(x: float = 0.0) -> list[tuple[Markup, str, float]]:
    """The signs at a given place, each with what it means and the room both take."""
    found: list[tuple[Markup, str, float]] = []
    for kind, words, room in _LEGEND:
        if kind == GATE:
            sign = element("g", element("path", class_="shape", d=_diamond(x + 8, 47, 5)), class_="gate")
        elif kind == LAYOUT:
            stripe = element("rect", class_="stripe", x=f"{x + 8:.0f}", y=40, width=4, height=14, rx=2)
            sign = element("g", stripe, class_="g0")
        else:
            opacity = {LAYER: ".45", FOLLOWER: ".06"}.get(kind, ".2")
            at = {"x": f"{x:.0f}", "y": 41, "width": 16, "height": 12}
            sign = element("g", element("rect", class_="shape", **at, rx=3, fill_opacity=opacity), class_=kind)
        found.append((sign, words, room))
    return found


def _hue(group: int | None) -> str:
    return "" if group is None else f" g{group % len(HUES)}"


def short(name: str) -> str:
    """A long name without its beginning.

    >>> short("features.denseblock4.denselayer32.conv2")
    '…denselayer32.conv2'
    """
    if len(name) <= _LONGEST:
        return name
    words = name.split(".")
    while len(words) > 1 and len(".".join(words)) > _LONGEST - 1:
        words = words[1:]
    return "…" + ".".join(words)[-_LONGEST + 1 :]

"""Boxes in; the text of an SVG picture out.

Plain SVG with a small style sheet inside, light and dark, no script: it opens in any browser and can be
committed beside a document.  The page for the browser (`page`) embeds the same drawing without its heading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log2
from typing import Any

from .colours import HUES, style
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
    width += 2 * aside
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height + _HEAD:.0f}" '
        f'width="{width:.0f}" height="{height + _HEAD:.0f}" role="img" aria-label="{escape(heading(facts))}">'
        f"<style>{style()}</style>"
        f'<rect class="paper" width="100%" height="100%"/>{_head(facts)}'
        f'<g transform="translate({aside:.0f} {_HEAD:.0f})">{body}</g></svg>\n'
    )


def heading(facts: Mapping[str, Any]) -> str:
    """One line about the network."""
    counts = f"{len(facts['layers'])} prunable layers with {facts['filters']:,} filters"
    return f"{facts['model']}: {counts}; {facts['params']:,} parameters, {facts['macs']:,} MACs"


def drawing(boxes: Sequence[Box]) -> tuple[str, float, float]:
    """The elements of the drawing, its width and its height."""
    picture = arrange(boxes, _size)
    number = {box: place for place, box in enumerate(boxes)}
    most = max((box.filters for box in boxes if box.kind == LAYER), default=1)
    parts = []
    for wire, path in picture.wires:
        upper, lower = wire.cells[0].box, wire.cells[-1].box
        assert upper is not None and lower is not None
        hue = _hue(upper.group) if upper.group == lower.group else ""
        ends = f'data-ends="{number[upper]} {number[lower]}"'
        gone = " gone" if 0 in (upper.kept, lower.kept) else ""
        parts.append(f'<path class="wire{hue}{gone}" {ends} d="{path}"/>')
    parts += [_box(cell, number[cell.box], most) for cell in picture.cells if cell.box is not None]
    return "".join(parts), picture.width, picture.height


def _size(box: Box) -> tuple[float, float]:
    if box.kind == JOINT:
        return (18.0, 18.0) if len(box.label) == 1 else (14 + 6.0 * len(box.label), 18.0)
    letters = 6.9 * len(short(box.label))
    if box.kind in (INPUT, OUTPUT):
        return letters + 22, 22.0
    if box.kind in (GATE, OPAQUE):
        return 5.9 * len(short(box.label)) + 28, 18.0
    return max(letters + 24, 5.0 * len(box.note) + 24, 64 + 12 * log2(max(box.filters, 1))), 36.0


def _box(cell: Cell, number: int, most: int) -> str:
    box = cell.box
    assert box is not None
    x, y, w, h = cell.x - cell.width / 2, cell.y, cell.width, cell.height
    tip = escape("\n".join(box.tip))
    group = "" if box.group is None else f' data-group="{box.group}"'
    kind = f"{box.kind} gone" if box.kept == 0 else box.kind
    open_tag = f'<g class="box {kind}{_hue(box.group)}" id="b{number}"{group}><title>{tip}</title>'
    return f"{open_tag}{_shape(box, x, y, w, h, most)}</g>"


def _shape(box: Box, x: float, y: float, w: float, h: float, most: int) -> str:
    middle = x + w / 2
    where = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}"'
    if box.kind in (JOINT, INPUT, OUTPUT):
        shape = f'<rect class="shape" {where} rx="{h / 2:.1f}" stroke-width="1.4"/>'
        return f'{shape}<text x="{middle:.1f}" y="{y + h / 2 + 3.8:.1f}">{escape(box.label)}</text>'
    if box.kind in (GATE, OPAQUE):
        at = middle + 7 if box.kind == GATE else middle
        text = f'<text class="note" x="{at:.1f}" y="{y + 12.5:.1f}">{escape(short(box.label))}</text>'
        if box.kind == GATE:
            back = f'<rect class="back pill" {where} rx="9"/>'
            return f'{back}<path class="shape" d="{_diamond(x + 9.5, y + 9, 4.5)}"/>{text}'
        return f'<rect class="back" {where} rx="4"/><rect class="shape" {where} rx="4" fill-opacity=".25"/>{text}'
    strength = 0.06 + 0.54 * (box.filters / most) ** 0.5 if box.kind == LAYER else 0.06
    if box.kind == SKIPPED:
        strength = 0.18
    if box.kept is not None:
        strength = 0.07  # the part that is kept is drawn over it
    parts = [
        f'<rect class="back" {where} rx="6"/>',
        f'<rect class="shape" {where} rx="6" fill-opacity="{min(strength, 0.62):.2f}"/>',
    ]
    if box.kept:
        left = f'x="{x:.1f}" y="{y:.1f}" width="{w * box.kept / box.filters:.1f}" height="{h:.1f}"'
        parts.append(f'<rect class="kept" {left} rx="6" fill-opacity=".38"/>')
    if box.group is not None:
        parts.append(f'<rect class="stripe" x="{x:.1f}" y="{y + 5:.1f}" width="4" height="{h - 10:.1f}" rx="2"/>')
    parts.append(f'<text class="name" x="{middle:.1f}" y="{y + 15:.1f}">{escape(short(box.label))}</text>')
    parts.append(f'<text class="note" x="{middle:.1f}" y="{y + 28:.1f}">{escape(box.note)}</text>')
    if box.gate:
        hollow = " map" if box.gate != "affine" else ""
        parts.append(f'<path class="mark{hollow}" d="{_diamond(middle, y + h, 4.5)}"/>')
    return "".join(parts)


def _diamond(x: float, y: float, r: float) -> str:
    return f"M{x - r:.1f} {y:.1f}l{r:.1f} {-r:.1f} {r:.1f} {r:.1f} {-r:.1f} {r:.1f}z"


def _head(facts: Mapping[str, Any]) -> str:
    name, _, rest = heading(facts).partition(": ")
    parts = [f'<text class="title" x="{MARGIN:.0f}" y="26">{escape(name)}</text>']
    parts.append(f'<text class="note left" x="{MARGIN + 9 * len(name) + 14:.0f}" y="26">{escape(rest)}</text>')
    at = MARGIN
    for sign, words, room in legend():
        parts.append(f'<g transform="translate({at:.0f} 0)">{sign}')
        parts.append(f'<text class="note left" x="21" y="50.5">{words}</text></g>')
        at += room
    return "".join(parts)


def legend(x: float = 0.0) -> list[tuple[str, str, float]]:
    """The signs at a given place, each with what it means and the room both take."""
    found: list[tuple[str, str, float]] = []
    for kind, words, room in _LEGEND:
        if kind == GATE:
            sign = f'<g class="gate"><path class="shape" d="{_diamond(x + 8, 47, 5)}"/></g>'
        elif kind == LAYOUT:
            sign = f'<g class="g0"><rect class="stripe" x="{x + 8:.0f}" y="40" width="4" height="14" rx="2"/></g>'
        else:
            opacity = {LAYER: ".45", FOLLOWER: ".06"}.get(kind, ".2")
            box = f'<rect class="shape" x="{x:.0f}" y="41" width="16" height="12" rx="3" fill-opacity="{opacity}"/>'
            sign = f'<g class="{kind}">{box}</g>'
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

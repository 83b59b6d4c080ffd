"""Pictures drawn as SVG by a few lines of text: bars of the filters each layer keeps.

Counts per layer enter, before and after; the text of an SVG file leaves, the same for the same counts, that
is readable on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

BAR, GAP, HEIGHT = 7, 2, 64
LEFT, TOP, BETWEEN = 34, 30, 46
COLOURS = ("#2563eb", "#ea7317")
GREY = "#94a3b8"


def kept_filters(title: str, panels: Mapping[str, Mapping[str, tuple[int, float]]]) -> str:
    """One panel per name; in each, a bar per layer: all its filters in grey, the kept ones in colour.

    >>> kept_filters("x", {"a": {"conv1": (16, 8.0)}}).startswith("<svg")
    True
    """
    layers = max(len(panel) for panel in panels.values())
    width = LEFT + layers * (BAR + GAP) + 12
    height = TOP + len(panels) * (HEIGHT + BETWEEN)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="10" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="14" fill="{GREY}" font-size="12">{escape(title)}</text>',
    ]
    for number, (name, panel) in enumerate(panels.items()):
        bottom = TOP + number * (HEIGHT + BETWEEN) + HEIGHT + 12
        lines += _panel(name, panel, bottom, COLOURS[number % len(COLOURS)])
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(name: str, panel: Mapping[str, tuple[int, float]], bottom: int, colour: str) -> list[str]:
    most = max(before for before, _ in panel.values())
    lines = [f'<text x="{LEFT}" y="{bottom - HEIGHT - 6}" fill="{colour}">{escape(name)}</text>']
    for value in (0, most // 2, most):
        y = bottom - HEIGHT * value / most
        lines.append(f'<text x="{LEFT - 4}" y="{y + 3:.1f}" text-anchor="end" fill="{GREY}">{value}</text>')
    for number, (layer, (before, after)) in enumerate(panel.items()):
        x = LEFT + number * (BAR + GAP)
        lines += [
            _bar(x, bottom, HEIGHT * before / most, f"{GREY}", 0.35, f"{layer}: {round(after, 1):g} of {before}"),
            _bar(x, bottom, HEIGHT * after / most, colour, 1.0, f"{layer}: {round(after, 1):g} of {before}"),
        ]
    lines += _stages(list(panel), bottom)
    return lines


def _bar(x: float, bottom: float, height: float, colour: str, opacity: float, said: str) -> str:
    return (
        f'<rect x="{x}" y="{bottom - height:.1f}" width="{BAR}" height="{height:.1f}" fill="{colour}" '
        f'fill-opacity="{opacity}"><title>{escape(said)}</title></rect>'
    )


def _stages(layers: Sequence[str], bottom: int) -> list[str]:
    """The name of each stage below its first layer."""
    lines, seen = [], ""
    for number, layer in enumerate(layers):
        stage = layer.partition(".")[0]
        if stage != seen and "." in layer:
            seen = stage
            lines.append(f'<text x="{LEFT + number * (BAR + GAP)}" y="{bottom + 12}" fill="{GREY}">{stage}</text>')
    return lines

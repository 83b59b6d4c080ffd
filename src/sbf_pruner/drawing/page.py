"""Boxes in; one self-contained HTML page out, to pan, zoom and search in a browser without a network.

The drawing is that of the SVG; page.html, page.css and page.js beside this file are put into one text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from .colours import SHAPES, colours
from .markup import Markup, document, element
from .scene import Box
from .svg import drawing, heading, legend


def draw_page(boxes: Sequence[Box], facts: Mapping[str, Any]) -> str:
    """The page as text."""
    body, width, height = drawing(boxes)
    model, _, rest = heading(facts).partition(": ")
    colour = colours("") + colours(':root[data-theme="dark"]', dark=True)
    swatches = [
        element(
            "p",
            element("svg", element("g", sign, transform="translate(0 -38)"), width=20, height=18),
            words,
            class_="key",
        )
        for sign, words, _ in legend(2.0)
    ]
    return document(
        _read("page.html"),
        _read("page.js"),
        title=f"{model}: channel graph",
        model=model,
        heading=rest,
        style=Markup(_read("page.css") + SHAPES + colour),
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        body=body,
        legend=swatches,
    )


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")

"""An inspected network in; a picture of its channel graph out, as SVG or as a page for the browser."""

from __future__ import annotations

from ..overview import Inspection
from .page import draw_page
from .scene import compose
from .svg import draw_svg


def draw(seen: Inspection, ending: str) -> str:
    """The text of a file with the given ending, ".svg" or ".html"."""
    boxes = compose(seen)
    return draw_page(boxes, seen.facts) if ending == ".html" else draw_svg(boxes, seen.facts)

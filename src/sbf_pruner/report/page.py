"""Parts in; one self-contained HTML page out, that opens without a network and asks for nothing.

page.html, page.css and page.js beside this file are put into one text.  Every part stands in a section of its
own, so that a live page can put a new one in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.resources import files

from ..drawing.colours import DARK_HUES, HUES, colours, scoped
from ..drawing.markup import NOTHING, Markup, document, element, policy
from .chart import Figure
from .course import course
from .data import Run
from .headline import headline, sentence
from .kept import kept
from .network import network
from .refinement import refinement
from .scores import scores
from .settings import environment, recipe, skipped
from .timed import timed

HEADLINE = "headline"
FIGURES: dict[str, Callable[[Run], Figure | None]] = {
    "course": course,
    "time": timed,
    "kept": kept,
    "refinement": refinement,
    "scores": scores,
    "network": network,
    "skipped": skipped,
    "environment": environment,
    "recipe": recipe,
}
SECTIONS = tuple(FIGURES)
_FROM_ITSELF = "'self'"  # what a live page fetches
WIDE = ("scores", "network", "recipe")  # a live page must know before any of them is drawn


def run_parts(run: Run) -> dict[str, Markup]:
    """The inside of every section of a run's page, in order."""
    figures = {key: draw(run) for key, draw in FIGURES.items()}
    return {HEADLINE: headline(run)} | {key: NOTHING if one is None else one.html() for key, one in figures.items()}


def run_page(run: Run) -> str:
    """A run's page."""
    return page(page_title(run), sentence(run), run_parts(run))


def page_title(run: Run) -> str:
    """What the browser calls the page."""
    return f"{run.name}: {run.title}"


def page(
    title: str,
    description: str,
    parts: Mapping[str, Markup],
    wide: Collection[str] = WIDE,
    *,
    live: str = "",
    version: str = "",
) -> str:
    """The page as text; `live` is where, on the page's own server, newer parts than `version` are to be had."""
    head, *rest = parts
    sections = [element("section", parts[key], id=key, class_="wide" if key in wide else None) for key in rest]
    dark = colours(".graph", dark=True) + _points(DARK_HUES)
    style = _read("page.css") + scoped(".graph") + colours(".graph") + _points(HUES)
    return document(
        _read("page.html"),
        _read("page.js"),
        _FROM_ITSELF if live else "'none'",
        title=title,
        description=description,
        style=Markup(f"{style}@media screen and (prefers-color-scheme:dark){{{dark}}}"),
        live=live,
        version=version,
        headline=parts[head],
        sections=sections,
    )


def live_policy() -> str:
    """The Content-Security-Policy of a live page."""
    return policy(_read("page.js"), _FROM_ITSELF)


def figure_parts(figures: Sequence[Figure]) -> dict[str, Markup]:
    """The inside of the figures' sections."""
    return {figure.key: figure.html() for figure in figures}


def _points(hues: Sequence[str]) -> str:
    """The colours of points in a figure; a hollow one is the dense network."""
    return "".join(
        f".point.h{n}{{fill:{hue};stroke:{hue}}}.point.dense.h{n}{{fill:none;stroke-width:2}}"
        for n, hue in enumerate(hues)
    )


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")

"""Build HTML and SVG: elements with escaping, colors, tables, and the parts of a figure.

`element` returns `Markup`. Any other string given to it, as content or as an attribute, is text and is escaped.
Operations of `str` on a `Markup` (`+`, `join`, f-strings) return a plain string, which is escaped again where it is
used, so text cannot become markup by accident; `concat` concatenates.

Figures use percentages horizontally and pixels vertically, so that they fit any width while text keeps its size;
curves are in nested frames that stretch. The tooltip of a mark shows its row of the figure's table.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby, pairwise
from string import Template
from typing import Any

_SHAPES = frozenset(["circle", "line", "path", "rect"])  # written self-closed when they have no content
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")  # not allowed in HTML or XML


class Markup(str):
    """HTML or SVG source."""

    __slots__ = ()


NOTHING = Markup()
Content = str | Iterable[str]


def element(tag: str, *content: Content, **attributes: Any) -> Markup:
    """Return an element; attributes that are None are left out, and floats are written with one decimal.

    Underscores in an attribute's name become hyphens, except that one at the end is dropped.

    >>> element("b", "a < b", element("i", "c"), class_='"x"', data_row=3, title=None)
    '<b class="&quot;x&quot;" data-row="3">a &lt; b<i>c</i></b>'
    >>> element("rect", x=0.25, width="50%")
    '<rect x="0.2" width="50%"/>'
    """
    opened = tag
    for name, value in attributes.items():
        if value is not None:
            text = f"{value:.1f}" if isinstance(value, float) else _escaped(str(value))
            opened += f' {name.rstrip("_").replace("_", "-")}="{text}"'
    inside = concat(*content)
    return Markup(f"<{opened}/>" if tag in _SHAPES and not inside else f"<{opened}>{inside}</{tag}>")


def concat(*content: Content) -> Markup:
    """Concatenate content into one `Markup`, escaping plain strings.

    >>> concat("a & ", element("b", "c"), [element("i"), "<"])
    'a &amp; <b>c</b><i></i>&lt;'
    """
    parts = (part for item in content for part in ([item] if isinstance(item, str) else item))
    return Markup("".join(part if isinstance(part, Markup) else _escaped(part) for part in parts))


def document(name: str, connect: str = "'none'", *, style: str, **content: Content) -> str:
    """Fill the template NAME.html with `content`, NAME.css followed by `style`, NAME.js, and the page's policy.

    `connect` is the Content-Security-Policy source that the script may fetch from.
    """
    parts: dict[str, str] = {key: concat(part) for key, part in content.items()}
    parts |= {"policy": concat(policy(name, connect)), "script": _read(f"{name}.js")}
    return Template(_read(f"{name}.html")).substitute(parts, style=_read(f"{name}.css") + style)


def policy(name: str, connect: str = "'none'") -> str:
    """Return the Content-Security-Policy of a page: nothing is loaded, and no script but NAME.js runs."""
    digest = base64.b64encode(hashlib.sha256(_read(f"{name}.js").encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _escaped(text: str) -> str:
    return html.escape(_UNPRINTABLE.sub("\ufffd", text))


HUES = ["#d9730d", "#0f8a5f", "#b5379b", "#5b5bd6", "#b08900"]
HUES += ["#c93a3a", "#0b84a5", "#6f9a1d", "#8d5524", "#7a7a8c"]
DARK_HUES = ["#ff9a3d", "#3fcf9b", "#f07ad6", "#9d9dff", "#e6c229"]
DARK_HUES += ["#ff7b7b", "#4cc3e6", "#a8d44b", "#d29b68", "#b0b0c4"]
# Colors by role.
LIGHT = {"paper": "#ffffff", "ink": "#17202b", "soft": "#5a6675", "wire": "#a3adba", "line": "#8492a3"}
LIGHT |= {"fill": "#2f6fde", "grey": "#9aa4b1", "gate": "#e0457b"}
DARK = {"paper": "#12161c", "ink": "#e8edf3", "soft": "#9fabba", "wire": "#5b6776", "line": "#76859a"}
DARK |= {"fill": "#4d8dff", "grey": "#79848f", "gate": "#ff6f9f"}
SHAPES = (
    "text{font:11px ui-sans-serif,system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;text-anchor:middle}"
    ".note{font-size:9.5px}.left{text-anchor:start}.title{font-size:14px;font-weight:600;text-anchor:start}"
    ".name{font-weight:600}.wire{fill:none;stroke-width:1.4}.follower .shape{stroke-dasharray:4 2.5}"
    ".gone .shape{stroke-dasharray:3 4;fill-opacity:0}.gone text{opacity:.65}"
    ".gone .name{text-decoration:line-through}"
    ".gone .mark,.gone .stripe{display:none}.wire.gone{stroke-dasharray:2 5;opacity:.7}"
)


def scoped(scope: str) -> str:
    """Return the CSS rules of `SHAPES` with the selector `scope` before each, for a page with other content too.

    >>> scoped(".graph").startswith(".graph text{font:")
    True
    """
    return _rules(scope, (rule.split("{") for rule in SHAPES.split("}")[:-1]))


def _rules(scope: str, rules: Iterable[Iterable[str]]) -> str:
    return "".join(
        ",".join(f"{scope} {selector}".strip() for selector in selectors.split(",")) + f"{{{body}}}"
        for selectors, body in rules
    )


def color_rules(scope: str, dark: bool = False) -> str:
    """Return the CSS color rules of light or dark mode, with the selector `scope` before each.

    The classes `g0`, `g1` and so on set the hue of a group of layers that share a layout.
    """
    tone = DARK if dark else LIGHT
    rules = {
        ".paper": f"fill:{tone['paper']}",
        "text": f"fill:{tone['ink']}",
        "text.note": f"fill:{tone['soft']}",
        ".wire": f"stroke:{tone['wire']}",
        ".back": f"fill:{tone['paper']}",
        ".pill": f"stroke:{tone['gate']}",
        ".shape": f"fill:{tone['fill']};stroke:{tone['line']}",
        ".follower .shape": f"fill:{tone['fill']};stroke:{tone['fill']}",
        ".skipped .shape,.opaque .shape": f"fill:{tone['grey']};stroke:{tone['grey']}",
        ".input .shape,.output .shape": f"fill:{tone['ink']};stroke:{tone['ink']}",
        ".input text,.output text": f"fill:{tone['paper']}",
        ".joint .shape": f"fill:{tone['paper']};stroke:{tone['line']}",
        ".kept": f"fill:{tone['fill']}",
        ".mark,.gate .shape": f"fill:{tone['gate']};stroke:{tone['paper']}",
        ".mark.map": f"fill:{tone['paper']};stroke:{tone['gate']}",
    }
    for number, hue in enumerate(DARK_HUES if dark else HUES):
        group = f".g{number}"
        rules[f"{group}.wire,{group}.joint .shape"] = f"stroke:{hue}"
        rules |= {f"{group} .stripe": f"fill:{hue}", f"{group}.joint text": f"fill:{hue}"}
    return _rules(scope, rules.items())


_RAISED = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
FRAME_WIDTH = 1000.0  # width of a nested SVG with curves, in its own units


@dataclass(frozen=True)
class Table:
    """The table of numbers of a figure."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1  # number of columns from the left that hold text

    def html(self) -> Markup:
        """Return the table as HTML; the first cell of each row is its header."""
        rows = []
        for first, *rest in self.rows:
            text, numbers = rest[: self.words - 1], rest[self.words - 1 :]
            cells = [element("td", cell, class_="w") for cell in text] + [element("td", cell) for cell in numbers]
            rows.append(element("tr", element("th", first, scope="row"), cells))
        head = element("tr", (element("th", cell, scope="col") for cell in self.head))
        return element("table", element("thead", head), element("tbody", rows))


@dataclass(frozen=True)
class Figure:
    """One section of a page: text, or a picture with marks and a table with a row for each mark."""

    key: str
    title: str
    caption: str = ""  # one paragraph
    picture: Markup = NOTHING  # for each row of the table, it has an element of class "hit" with data-row
    table: Table | None = None
    legend: Sequence[tuple[str, str]] = ()  # CSS class of the symbol, label
    missing: str = ""  # why there is no picture
    wide: bool = False  # takes the whole width of the page
    text: Markup = NOTHING  # paragraphs and lists

    def html(self) -> Markup:
        """Return the content of the figure's section."""
        name = f"{self.key}-title"
        parts = [element("h2", self.title, id=name)]
        if self.missing:
            return concat(parts, element("p", self.missing, class_="missing"))
        if self.caption:
            parts.append(element("p", self.caption, class_="caption"))
        if self.text:
            parts.append(element("div", self.text, class_="caption"))
        if self.legend:
            signs = (element("li", element("i", class_=sign), words) for sign, words in self.legend)
            parts.append(element("ul", signs, class_="legend"))
        if self.picture:
            parts.append(element("figure", self.picture, data_marks="", aria_labelledby=name))
        if self.table is not None:
            content = element("summary", "The numbers"), scroll(self.table.html(), f"{self.title}: the numbers")
            parts.append(element("details", *content, data_key=f"{self.key}-numbers"))
        return concat(parts)


def scroll(inside: Content, label: str) -> Markup:
    """Wrap content that may be wider than the page in a container that scrolls on its own."""
    return element("div", inside, class_="scroll", tabindex=0, role="region", aria_label=label)


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic map from values to pixels, with the lowest value at the bottom."""

    low: float
    high: float
    height: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the distance of a value from the top, in pixels."""
        low, high, at = float(self.low), float(self.high), float(value)
        if self.logarithmic:
            low, high, at = math.log(low), math.log(high), math.log(max(at, low))
        return self.height * (1 - (at - low) / (high - low if high > low else 1))

    def ticks(self, most: int = 5) -> list[float]:
        """Return about `most` round values to label the axis with.

        >>> Scale(0, 70, 100).ticks(), Scale(0.002, 3, 100, True).ticks()
        ([0.0, 20.0, 40.0, 60.0], [0.01, 0.1, 1.0])
        """
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            each = max(1, -(-(last - first + 1) // most))
            return [10.0**power for power in range(first, last + 1, each)]
        rough = (self.high - self.low) / most
        size = math.pow(10.0, math.floor(math.log10(rough))) if rough > 0 else 1.0
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def grid(scale: Scale, top: float, unit: str = "", most: int = 5) -> Markup:
    """Draw horizontal grid lines with their values at the left."""
    parts = []
    for value in scale.ticks(most):
        y = top + scale(value)
        parts.append(element("line", class_="grid", x1=0, x2="100%", y1=y, y2=y))
        parts.append(element("text", f"{tick(value)}{unit}", class_="tick", x=-8, y=y + 3.5))
    return concat(parts)


def tick(value: float) -> str:
    """Format a value on an axis.

    >>> tick(20.0), tick(0.001), tick(2000.0), tick(1e-6), tick(1e6), tick(2e6)
    ('20', '0.001', '2,000', '10⁻⁶', '10⁶', '2,000,000')
    """
    if value > 0 and not 1e-3 <= value < 1e6 and math.log10(value).is_integer():
        return f"10{str(round(math.log10(value))).translate(_RAISED)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def curve(kind: str, points: Sequence[tuple[float, float]]) -> Markup:
    """Draw a line through points, with x from 0 to FRAME_WIDTH and y in pixels; a single point becomes a dot."""
    if not points:
        return NOTHING
    dot = "h.01" if len(points) == 1 else ""
    return element("path", class_=f"curve {kind}", d=path_data(points, 1) + dot)


def path_data(points: Sequence[tuple[float, float]], digits: int = 0) -> str:
    """Return SVG path data through points, in relative coordinates to keep it short.

    >>> path_data([(0, 10), (5.2, 10), (10.4, 7)], 1)
    'M0 10l5.2 0 5.2 -3'
    """
    unit = 10**digits
    places = [(round(x * unit), round(y * unit)) for x, y in points]
    steps = [(x - x0, y - y0) for (x0, y0), (x, y) in pairwise(places)]
    start, *rest = [f"{x / unit:g} {y / unit:g}" for x, y in [places[0], *steps]]
    return f"M{start}" + (f"l{' '.join(rest)}" if rest else "")


def nested_svg(top: float, height: float, *inside: Content) -> Markup:
    """Return a nested SVG that stretches with the figure's width and clips what goes beyond it."""
    frame = {"width": "100%", "height": f"{height:.0f}", "viewBox": f"0 0 {FRAME_WIDTH:.0f} {height:.0f}"}
    return element("svg", *inside, y=f"{top:.0f}", **frame, preserveAspectRatio="none")


def svg_figure(kind: str, height: float, label: str, *inside: Content) -> Markup:
    """Return the outer SVG of a figure, as wide as the page allows; the style sheet leaves room below it."""
    return element("svg", *inside, class_=f"plot {kind}", height=f"{height:.0f}", role="group", aria_label=label)


def svg_file(label: str, width: float, height: float, style: str, *inside: Content) -> str:
    """Return the text of an SVG file with a style sheet, on a background of class "paper"."""
    paper = element("rect", class_="paper", width="100%", height="100%")
    frame = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "width": f"{width:.0f}", "height": f"{height:.0f}"}
    namespace = "http://www.w3.org/2000/svg"
    parts = (element("style", Markup(style)), paper, *inside)
    return element("svg", *parts, xmlns=namespace, **frame, role="img", aria_label=label) + "\n"


def hit_area(kind: str, row: int, left: float, width: float, top: float, height: float) -> Markup:
    """Return a transparent rectangle as the mark of a table row; x in percent and y in pixels."""
    area = {"x": f"{left:.2f}%", "y": f"{top:.0f}", "width": f"{width:.2f}%", "height": f"{height:.0f}"}
    return element("rect", class_=f"hit {kind}".rstrip(), data_row=row, **area)


def module_axis(names: Sequence[str], height: float) -> Markup:
    """Label the top-level modules below a figure that has a column per layer name."""
    parts, each, first = [], 100 / len(names), 0
    for module, columns in groupby(name.partition(".")[0] for name in names):
        end = first + len(list(columns))
        left, right, y = each * (first + 0.12), each * (end - 0.12), f"{height + 5:.0f}"
        parts.append(element("line", class_="axis", x1=f"{left:.3f}%", x2=f"{right:.3f}%", y1=y, y2=y))
        if right - left > 9:
            at = f"{(left + right) / 2:.3f}%"
            parts.append(element("text", module, class_="tick middle", x=at, y=f"{height + 18:.0f}"))
        first = end
    return concat(parts)


def pairs(rows: Iterable[tuple[str, str]]) -> Markup:
    """Return a definition list of names and their descriptions."""
    return element("dl", (concat(element("dt", name), element("dd", text)) for name, text in rows), class_="pairs")

"""The style sheet of a drawing, light and dark.

Nothing enters; CSS leaves.  Groups of layers that share a layout take turns with the hues.
"""

from __future__ import annotations

HUES = [
    "#d9730d",
    "#0f8a5f",
    "#b5379b",
    "#5b5bd6",
    "#b08900",
    "#c93a3a",
    "#0b84a5",
    "#6f9a1d",
    "#8d5524",
    "#7a7a8c",
]
DARK_HUES = [
    "#ff9a3d",
    "#3fcf9b",
    "#f07ad6",
    "#9d9dff",
    "#e6c229",
    "#ff7b7b",
    "#4cc3e6",
    "#a8d44b",
    "#d29b68",
    "#b0b0c4",
]
_LIGHT = {"paper": "#ffffff", "ink": "#17202b", "soft": "#5a6675", "wire": "#a3adba", "line": "#8492a3"}
_LIGHT |= {"fill": "#2f6fde", "grey": "#9aa4b1", "gate": "#e0457b"}
_DARK = {"paper": "#12161c", "ink": "#e8edf3", "soft": "#9fabba", "wire": "#5b6776", "line": "#76859a"}
_DARK |= {"fill": "#4d8dff", "grey": "#79848f", "gate": "#ff6f9f"}


SHAPES = (
    "text{font:11px ui-sans-serif,system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;text-anchor:middle}"
    ".note{font-size:9.5px}.left{text-anchor:start}.title{font-size:14px;font-weight:600;text-anchor:start}"
    ".name{font-weight:600}.wire{fill:none;stroke-width:1.4}.follower .shape{stroke-dasharray:4 2.5}"
    ".gone .shape{stroke-dasharray:3 4;fill-opacity:0}.gone text{opacity:.65}"
    ".gone .name{text-decoration:line-through}"
    ".gone .mark,.gone .stripe{display:none}.wire.gone{stroke-dasharray:2 5;opacity:.7}"
)


def tones(*, dark: bool = False) -> dict[str, str]:
    """The colours by what they are for: paper, ink, soft, wire, line, fill, grey, gate."""
    return _DARK if dark else _LIGHT


def scoped(scope: str) -> str:
    """The shapes' rules under a selector, for a page that holds other things too.

    >>> scoped(".graph").startswith(".graph text{font:")
    True
    """
    text = ""
    for rule in SHAPES.split("}")[:-1]:
        selectors, _, body = rule.partition("{")
        text += ",".join(f"{scope} {one}" for one in selectors.split(",")) + f"{{{body}}}"
    return text


def style() -> str:
    """The style sheet of a picture that stands alone."""
    return f"{SHAPES}{colours('')}@media (prefers-color-scheme:dark){{{colours('', dark=True)}}}"


def colours(scope: str, dark: bool = False) -> str:
    """The rules that differ between light and dark, under a selector."""
    tone, hues = tones(dark=dark), DARK_HUES if dark else HUES
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
    text = ""
    for key, rule in rules.items():
        text += ",".join(f"{scope} {one}".strip() for one in key.split(",")) + f"{{{rule}}}"
    for place, hue in enumerate(hues):
        at = f"{scope} .g{place}".strip()
        text += (
            f"{at}.wire,{at}.joint .shape{{stroke:{hue}}}{at} .stripe{{fill:{hue}}}{at}.joint text{{fill:{hue}}}"
        )
    return text

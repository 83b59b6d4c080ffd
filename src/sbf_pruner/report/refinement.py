"""How residual blocks refine what passes them: Lemma 1 of the paper, put right, beside what was measured.

Records per block enter; one figure leaves.  With scores S in front of the addition, |S.f(x)|^2 / |x|^2 lies
between delta^2 and (1 + eps)^2 times what it would be without scores, where delta and 1 + eps are the least
and the greatest score of the branch's last layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..drawing.markup import element
from .chart import Figure, Scale, Table, column, grid, parts_of_the_network, picture
from .data import Run
from .numbers import DASH

_HEIGHT = 190.0
_WHEN = {"scored": "Under the scores", "pruned": "At the end"}
_CAPTION = (
    "The energy a block adds, as a part of what arrives: |S·f(x)|² / |x|² on test images. Under continuous scores "
    "it must lie between δ² and (1+ε)² times the value without scores, where δ and 1+ε are the least and the "
    "greatest score of the branch's last layer: the paper's Lemma 1, put right."
)


def refinement(run: Run) -> Figure:
    """The figure."""
    key, title = "refinement", "How much each residual block refines"
    blocks = run.refinement
    if not blocks:
        return Figure(key, title, missing=run.missing["refinement"])
    seen = [value for block in blocks for value in _measured(block) if value] or [1.0]
    # Lower bounds may be next to nothing: what was measured sets the scale, and they go on below it.
    high = max(block["top"] ** 2 * block["unscored"] if "top" in block else 0.0 for block in blocks)
    scale = Scale(min(seen) / 3, max(*seen, high) * 1.4, _HEIGHT, logarithmic=True)
    each = 100 / len(blocks)
    parts = [grid(scale, 0)]
    for place, block in enumerate(blocks):
        middle = f"{each * (place + 0.5):.3f}%"
        low, high, bare = _bounds(block)
        if high is not None and low is not None and bare is not None:
            top, bottom = scale(high), scale(max(low, scale.low))
            width = min(each * 0.6, 4.0)
            left, right = (f"{each * (place + 0.5) + side * width / 2:.3f}%" for side in (-1, 1))
            height = max(bottom - top, 1)
            parts.append(
                element("rect", class_="bounds", x=left, width=f"{width:.3f}%", y=top, height=height, rx=3)
            )
            parts.append(element("line", class_="bare", x1=left, x2=right, y1=scale(bare), y2=scale(bare)))
            parts.append(element("circle", class_="scored", cx=middle, cy=scale(block["scored"]), r=3.5))
        pruned = block.get("pruned")
        if pruned:
            parts.append(element("circle", class_="final", cx=middle, cy=scale(pruned), r=3.5))
        elif pruned == 0:
            parts.append(element("text", "\u00d7", class_="cross", x=middle, y=f"{_HEIGHT - 3:.0f}"))
    parts += [column("", row, each * row, each, 0, _HEIGHT) for row in range(len(blocks))]
    parts.append(parts_of_the_network([block["block"] for block in blocks], _HEIGHT))
    legend = [
        ("block bounds", "the lemma's bounds"),
        ("bar bare", "without scores"),
        ("dot scored", "under the scores"),
    ]
    if any(block.get("pruned") is not None for block in blocks):
        legend += [("dot final", "at the end, pruned and fine-tuned")]
    if any(block.get("pruned") == 0 for block in blocks):
        legend += [("cross", "block gone")]
    caption = _CAPTION + "".join(
        f" {_WHEN[which]} nothing could be measured: {why}." for which, why in run.unmeasured.items()
    )
    return Figure(key, title, caption, picture(key, _HEIGHT, title, parts), _table(run), legend)


def _bounds(block: Mapping[str, Any]) -> tuple[float | None, float | None, float | None]:
    if "unscored" not in block:
        return None, None, None
    bare = block["unscored"]
    return block["delta"] ** 2 * bare, block["top"] ** 2 * bare, bare


def _measured(block: Mapping[str, Any]) -> tuple[float | None, ...]:
    return block.get("unscored"), block.get("scored"), block.get("pruned")


def _table(run: Run) -> Table:
    def said(value: float | None) -> str:
        return DASH if value is None else f"{value:.3g}"

    head = ["block", "lower bound", "under the scores", "upper bound", "without scores", "least score"]
    rows = []
    for block in run.refinement:
        low, high, bare = _bounds(block)
        row = [low, block.get("scored"), high, bare, block.get("delta"), block.get("top"), block.get("pruned")]
        rows.append([block["block"], *map(said, row)])
    return Table([*head, "greatest score", "at the end"], rows)

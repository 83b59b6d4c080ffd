"""Rows of cells as lines of text, and numbers as a table on a terminal shows them.

Text enters, a line for each row leaves; with a frame around them where rich is installed to draw it.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence

from ..figures import rounded


def table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Rows as lines with aligned columns, "<" to the left or ">" to the right.

    >>> table([["a", "10"], ["bc", "7"]], "<>")
    ['a   10', 'bc   7']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(align))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    ]


def boxed(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """The same as `table`, drawn by rich if it is there."""
    try:
        drawn, console = (importlib.import_module(f"rich.{name}") for name in ("table", "console"))
    except ImportError:
        return table(rows, align)
    box = drawn.Table(header_style="bold")
    for head, side in zip(rows[0], align, strict=True):
        box.add_column(head, justify="left" if side == "<" else "right", no_wrap=True)
    for row in rows[1:]:
        box.add_row(*row)
    width = max(len(line) for line in table(rows, align)) + 4 * len(align)
    out = console.Console(width=width, force_terminal=True, file=io.StringIO())
    with out.capture() as said:
        out.print(box)
    text: str = said.get()
    return text.rstrip("\n").splitlines()


def percent(value: float | None) -> str:
    """An accuracy, or a dash where there is none."""
    return "-" if value is None else f"{rounded(value, 2)} %"


def share(part: float, digits: int = 1) -> str:
    """A part of the whole, in percent."""
    return f"{rounded(100 * part, digits)}%"


def change(before: float, after: float) -> str:
    """By how much a number changed, in percent; a dash where there was none."""
    sign = "+" if after >= before else ""
    return f"{sign}{rounded(100 * (after / before - 1))} %" if before else "-"

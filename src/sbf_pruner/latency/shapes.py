"""Layers as a clock sees them: what is computed on which map, and the widths worth measuring.

A convolution or linear layer of a channel graph enters; a `Site` leaves, which is all that its time depends on but
for its two widths.  What holds: layers with equal sites and equal widths take equal time, so one measurement serves
all of them, in any network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..graph.weighted import Contract

Sizes = tuple[int, ...]
WIDE = 64  # from here on widths are measured sparsely
UNIT = 8  # of narrow widths all multiples of this
SMALL, FINE = 16, 4  # and of the smallest, below SMALL, all multiples of FINE
_PARTS = (0.125, 0.25, 0.5, 0.75, 1.0)  # of a wide one these
_NAME = re.compile(r"(\w+) (\S+) stride (\S+) padding (\S+) dilation (\S+) groups (\d+) on (\S+)")


@dataclass(frozen=True)
class Site:
    """A layer without its widths."""

    kind: str
    """"conv", "transposed" or "linear" """
    kernel: Sizes = ()
    stride: Sizes = ()
    padding: Sizes = ()
    dilation: Sizes = ()
    groups: int = 1
    """0: as many as there are channels (depthwise)"""
    size: Sizes = ()
    """height and width of the map that is read; of a linear layer, rows per sample"""

    def __str__(self) -> str:
        return (
            f"{self.kind} {_times(self.kernel)} stride {_times(self.stride)} padding {_times(self.padding)} "
            f"dilation {_times(self.dilation)} groups {self.groups} on {_times(self.size)}"
        )

    @classmethod
    def parse(cls, text: str) -> Site:
        """A site from how it is written.

        >>> site = Site("conv", (3, 3), (1, 1), (1, 1), (1, 1), 1, (32, 32))
        >>> Site.parse(str(site)) == site
        True
        """
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(text)
        kernel, stride, padding, dilation = (_sizes(match[place]) for place in (2, 3, 4, 5))
        return cls(match[1], kernel, stride, padding, dilation, int(match[6]), _sizes(match[7]))

    @classmethod
    def of(cls, node: Contract, samples: int) -> Site:
        """What a layer of a channel graph computes, and on what; the graph saw so many samples."""
        if node.op.name != "aten.convolution":
            return cls("linear", size=(max(node.x.shape[0] // samples, 1),))
        stride, padding, dilation = (tuple(node.op.args[i]) for i in (3, 4, 5))
        return cls(
            "transposed" if node.transposed else "conv",
            tuple(node.weight.shape[2:]),
            stride,
            padding,
            dilation,
            0 if node.depthwise and node.filters == node.groups else node.groups,
            tuple(node.x.shape[2:]),
        )


def widths_of(full: int, may_shrink: bool, multiple: int = 1) -> list[int]:
    """The widths at which a side of a layer is measured: all steps of a narrow one, few of a wide one.

    >>> widths_of(20, True), widths_of(256, True), widths_of(3, False)
    ([4, 8, 12, 16, 20], [32, 64, 128, 192, 256], [3])
    """
    if not may_shrink:
        return [full]
    if full <= WIDE:
        found = [*range(FINE, min(SMALL, full), FINE), *range(SMALL, full, UNIT), full]
    else:
        found = [round_up(round(full * part), 2 * UNIT) for part in _PARTS[:-1]] + [full]
    multiple = max(multiple, 1)
    return sorted({min(round_up(width, multiple), full) for width in found})


def stepped(width: int) -> int:
    """The width that a runtime which works in blocks computes, as far as widths are measured.

    >>> [stepped(width) for width in (3, 13, 17, 25)]
    [4, 16, 24, 32]
    """
    return round_up(width, FINE if width <= SMALL else UNIT)


def round_up(width: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-width // unit) * unit


def _times(sizes: Sizes) -> str:
    return "x".join(map(str, sizes)) or "-"


def _sizes(text: str) -> Sizes:
    return () if text == "-" else tuple(int(part) for part in text.split("x"))

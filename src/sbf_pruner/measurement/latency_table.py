"""Tables of measured layer times, and the operators of a network that they are looked up for.

A `LayerSpec` is everything that the time of a layer depends on except its two widths, so one measurement serves
equal layers of any network. A `Table` interpolates between widths. A narrower layer never takes longer than a wider
one, because it can be padded with zeros; runtimes that compute in blocks round widths up. `Operators` follows how
`runtimes.forms` writes networks: norms are folded into the layer before them; a layer reads the whole residual
stream, with zero columns for channels that it does not need; a branch with fewer filters than its stream either
computes all channels (zero rows) or has its channels moved.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..graph.channel_graph import ChannelGraph
from ..graph.cost import LaidOut
from ..graph.nodes import Boundary, ChannelMove, Elementwise, Node
from ..graph.operators.layers import LayerNode, Norm, weight_owner
from ..graph.records import Value

Sizes = tuple[int, ...]
WIDE = 64  # Sides wider than this are measured sparsely, at _PARTS of their width.
UNIT = 8  # Narrower ones are measured at all multiples of this,
SMALL, FINE = 16, 4  # and below SMALL at all multiples of FINE.
_PARTS = (0.125, 0.25, 0.5, 0.75, 1.0)
_NAME = re.compile(r"(\w+) (\S+) stride (\S+) padding (\S+) dilation (\S+) groups (\d+) on (\S+)")


@dataclass(frozen=True)
class LayerSpec:
    """A layer without its widths: all else that its time depends on."""

    kind: str
    """"conv", "transposed" or "linear"."""
    kernel: Sizes = ()
    stride: Sizes = ()
    padding: Sizes = ()
    dilation: Sizes = ()
    groups: int = 1
    """0 means depthwise: as many groups as channels."""
    size: Sizes = ()
    """Spatial size of the input feature map; for a linear layer, rows per sample."""

    def __str__(self) -> str:
        return (
            f"{self.kind} {_times(self.kernel)} stride {_times(self.stride)} padding {_times(self.padding)} "
            f"dilation {_times(self.dilation)} groups {self.groups} on {_times(self.size)}"
        )

    @classmethod
    def parse(cls, text: str) -> LayerSpec:
        """Parse what `str` returned; raises a ValueError for any other text.

        >>> site = LayerSpec("conv", (3, 3), (1, 1), (1, 1), (1, 1), 1, (32, 32))
        >>> LayerSpec.parse(str(site)) == site
        True
        """
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(text)
        kernel, stride, padding, dilation = (_sizes(match[place]) for place in (2, 3, 4, 5))
        return cls(match[1], kernel, stride, padding, dilation, int(match[6]), _sizes(match[7]))

    @classmethod
    def of(cls, node: LayerNode, samples: int) -> LayerSpec:
        """Return the site of a layer in a channel graph that was traced with `samples` samples."""
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


def measured_widths(full: int, may_shrink: bool, multiple: int = 1) -> list[int]:
    """Return the widths at which the input or output channels of a layer are measured, few if there are many.

    >>> measured_widths(20, True), measured_widths(256, True), measured_widths(3, False)
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
    """Round a width up to the block that a runtime computes, as finely as widths are measured.

    >>> [stepped(width) for width in (3, 13, 17, 25)]
    [4, 16, 24, 32]
    """
    return round_up(width, FINE if width <= SMALL else UNIT)


def round_up(width: int, unit: int) -> int:
    """Round a width up to a multiple of `unit`."""
    return -(-width // unit) * unit


def _times(sizes: Sizes) -> str:
    return "x".join(map(str, sizes)) or "-"


def _sizes(text: str) -> Sizes:
    return () if text == "-" else tuple(int(part) for part in text.split("x"))


Widths = tuple[int, int]  # input channels, filters


class Table:
    """Measured layers: site -> widths -> seconds.

    >>> table = Table({LayerSpec("linear", size=(1,)): {(8, 8): 1.0, (16, 8): 2.0, (8, 16): 2.0, (16, 16): 4.0}})
    >>> table.seconds(LayerSpec("linear", size=(1,)), 12, 8)
    1.5
    """

    def __init__(
        self, points: Mapping[LayerSpec, Mapping[Widths, float]] | None = None, blocks: bool = False
    ) -> None:
        self.points = {site: dict(held) for site, held in (points or {}).items()}
        self.blocks = blocks
        """Whether input channels are rounded up to blocks, too; filters always are."""
        self._grids: dict[LayerSpec, tuple[list[int], list[int], dict[Widths, float]]] = {}
        self._known: dict[tuple[LayerSpec, int, int], float] = {}

    def missing(self, wanted: Mapping[LayerSpec, Iterable[Widths]]) -> dict[LayerSpec, list[Widths]]:
        """Return the wanted points that have not been measured yet."""
        found = {s: [w for w in widths if w not in self.points.get(s, {})] for s, widths in wanted.items()}
        return {site: widths for site, widths in found.items() if widths}

    def of(self, wanted: Mapping[LayerSpec, Iterable[Widths]]) -> Table:
        """Return a table of these points alone: the widths of other networks would leave gaps in the grid."""
        return Table(
            {site: {w: self.points[site][w] for w in widths} for site, widths in wanted.items()}, self.blocks
        )

    def add(self, site: LayerSpec, seconds: Mapping[Widths, float]) -> None:
        """Add measured points of a site."""
        self.points.setdefault(site, {}).update(seconds)
        self._grids.pop(site, None)
        self._known = {key: value for key, value in self._known.items() if key[0] != site}

    def seconds(self, site: LayerSpec, inputs: int, filters: int) -> float:
        """Return the interpolated seconds of a layer of these widths."""
        key = site, inputs, filters
        if key not in self._known:
            self._known[key] = self._between(site, inputs, filters)
        return self._known[key]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values."""
        return {str(site): [[*w, s] for w, s in sorted(held.items())] for site, held in self.points.items()}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any], blocks: bool = False) -> Table:
        """Restore what `to_dict` returned; raises a ValueError for anything else."""
        points = {LayerSpec.parse(name): dict(_point(*row) for row in held) for name, held in written.items()}
        if not all(points.values()):
            raise ValueError("a layer without any time")
        return cls(points, blocks)

    def _grid(self, site: LayerSpec) -> tuple[list[int], list[int], dict[Widths, float]]:
        if site not in self._grids:
            held = self.points[site]
            rows, columns = sorted({i for i, _ in held}), sorted({o for _, o in held})
            if site.groups == 0:  # Depthwise layers are measured with as many filters as input channels.
                least = {(n, n): min(s for (i, _), s in held.items() if i >= n) for n in rows}
                full = {(i, o): least[max(i, o), max(i, o)] for i in rows for o in columns}
            else:
                full = {}
                for i in reversed(rows):
                    for o in reversed(columns):
                        wider = [full[w] for w in ((_next(rows, i), o), (i, _next(columns, o))) if w in full]
                        full[i, o] = min([held[i, o], *wider])
            self._grids[site] = rows, columns, full
        return self._grids[site]

    def _between(self, site: LayerSpec, inputs: int, filters: int) -> float:
        rows, columns, full = self._grid(site)
        if self.blocks:
            inputs = _stepped(inputs, rows)
        filters = _stepped(filters, columns)
        (i0, i1, a), (o0, o1, b) = _bracket(rows, inputs), _bracket(columns, filters)
        near, far = (full[i, o0] + b * (full[i, o1] - full[i, o0]) for i in (i0, i1))
        return near + a * (far - near)


def _point(inputs: Any, filters: Any, seconds: Any) -> tuple[Widths, float]:
    if not (isinstance(inputs, int) and isinstance(filters, int) and 0 < float(seconds) < math.inf):
        raise ValueError(f"no widths with their time: {inputs}, {filters}, {seconds}")
    return (inputs, filters), float(seconds)


def _stepped(width: int, known: list[int]) -> int:
    """Round up to a block, but not beyond the full width."""
    return min(stepped(width), known[-1])


def _bracket(known: list[int], width: int) -> tuple[int, int, float]:
    """Return the measured widths around `width`, and its relative position between them."""
    place = bisect_left(known, width)
    if place == 0:
        return known[0], known[0], 0.0  # Thinner than any measured: it costs as much as the thinnest, not less.
    if place == len(known):
        return known[-1], known[-1], 0.0
    low, high = known[place - 1], known[place]
    return low, high, (width - low) / (high - low)


def _next(known: list[int], width: int) -> int:
    place = known.index(width) + 1
    return known[place] if place < len(known) else -1


# Views, which take no time of their own.
FREE = ("aten.view", "aten._unsafe_view", "aten.t", "aten.detach", "aten.alias", "aten.expand", "aten.slice")


@dataclass(frozen=True, eq=False)
class Layer:
    """One call of a convolution or linear layer."""

    node: LayerNode
    site: LayerSpec
    before: Value
    """Its input before any remap that selects channels: the whole residual stream, for example."""
    behind: Value
    """Its output behind norms and activations, in the layout of the tensors that it is added to."""

    def widths(self, laid: LaidOut) -> tuple[int, int, int]:
        """Return its input channels, its output channels in the layout of the stream, and its own filters."""
        sizes = laid.layout.sizes
        return sizes(self.before)[1], sizes(self.behind)[1], sizes(self.node.out)[1]

    def runs(self, laid: LaidOut) -> bool:
        """Return True if the pruned network still contains the layer."""
        return weight_owner(self.node.op) not in laid.gone

    @cached_property
    def pixels(self) -> int:
        """Output elements per channel and sample."""
        return math.prod(self.node.out.shape[2:])


class Operators:
    """The operators of a deployed network that take time: `layers`, `joins` (where tensors meet) and `rest`."""

    def __init__(self, graph: ChannelGraph) -> None:
        self.graph = graph
        self.samples = graph.trace.samples
        self._readers: dict[Value, list[Node]] = defaultdict(list)
        self._maker: dict[Value, Node] = {}
        for node in graph.nodes:
            for value in dict.fromkeys(node.inputs):
                self._readers[value].append(node)
            for value in node.outputs:
                self._maker[value] = node
        self.layers = [self._layer(node) for node in graph.nodes if isinstance(node, LayerNode)]
        self.joins = [node for node in graph.nodes if isinstance(node, Elementwise) and self._joins(node)]
        joined = set(map(id, self.joins))  # By identity: `==` would compare every field of the nodes.
        self.rest = [node for node in graph.nodes if id(node) not in joined and self._costs(node)]

    def elements(self, value: Value, laid: LaidOut) -> float:
        """Return the number of elements per sample that are left of a tensor."""
        return math.prod(laid.layout.sizes(value)) / self.samples

    @staticmethod
    def alive(value: Value, laid: LaidOut) -> bool:
        """Return True if any channel of the tensor is both alive and needed."""
        needed = laid.flow.needed.get(value)
        return needed is not None and bool((needed & laid.flow.alive[value]).any())

    def _layer(self, node: LayerNode) -> Layer:
        before = self._outside(node.x)
        behind, reader = node.out, self._only_reader(node.out)
        while isinstance(reader, Boundary | Norm) or (isinstance(reader, Elementwise) and not self._joins(reader)):
            behind = reader.outputs[0]
            reader = self._only_reader(behind)
        return Layer(node, LayerSpec.of(node, self.samples), before, behind)

    def _outside(self, value: Value) -> Value:
        """Trace a tensor back through the module boundaries that it has passed."""
        while isinstance(edge := self._maker.get(value), Boundary):
            value = edge.x
        return value

    def _only_reader(self, value: Value) -> Node | None:
        readers = self._readers[value]
        return readers[0] if len(readers) == 1 and value not in self.graph.outputs else None

    @staticmethod
    def _joins(node: Elementwise) -> bool:
        """Return True if two tensors meet that do not come from parameters and buffers alone."""
        return sum(v.roots is None for v in dict.fromkeys(node.inputs)) > 1

    def _costs(self, node: Node) -> bool:
        """Return True if the operator takes time of its own."""
        if isinstance(node, LayerNode | Boundary) or not node.outputs or node.op.name in FREE:
            return False
        if (
            isinstance(node, ChannelMove)
            and len(node.inputs) == 1
            and node.op.name.endswith(("reshape", "flatten"))
        ):
            return False
        if isinstance(node, Norm):  # A norm is folded into the layer before it, if there is one.
            return not isinstance(self._maker.get(self._outside(node.x)), LayerNode)
        return any(v.roots is None for v in node.inputs)

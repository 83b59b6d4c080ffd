"""Latency models: predict the time of any choice of filters from measured layer times, without cutting the network.

A `LayerSpec` is everything that the time of a layer depends on except its two widths, so one measurement serves
equal layers of any network. A `Table` interpolates between widths. A narrower layer never takes longer than a wider
one, because it can be padded with zeros; runtimes that compute in blocks round widths up. `Operators` lists the
operators of a network as `runtimes.forms` writes it: norms are folded into the layer before them; a layer reads the
whole residual stream, with zero columns for channels that it does not need; a branch with fewer filters than its
stream either computes all channels (form "zeros", zero rows) or copies its channels to their positions ("moves").

`Predictor` describes a network by six terms: layer times from a `Table`, elements of additions, elements written by
other operators, elements copied, number of operators, and a constant. `fit` finds their coefficients, none of which
is negative, because no operator takes negative time. Networks are deployed in their fastest form, so both ways of
joining a branch to the residual stream are predicted and the smaller time counts. `LatencyModel` scales predictions
so that the dense network takes exactly its measured time. Its JSON file can be used without the runtime.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..budget.controller import LatencyPredictor
from ..errors import PruningError, check_version
from ..graph.channel_graph import ChannelGraph
from ..graph.cost import LaidOut, lay_out
from ..graph.nodes import Boundary, ChannelMove, Elementwise, Mask, Node
from ..graph.operators.layers import LayerNode, Norm, weight_owner
from ..graph.records import Value
from ..utils.files import write_text
from ..utils.formatting import pluralize

Sizes = tuple[int, ...]
WIDE = 64  # Channel counts above this are measured only at _PARTS of the full count,
UNIT = 8  # smaller ones at all multiples of UNIT,
SMALL, FINE = 16, 4  # and below SMALL at all multiples of FINE.
_PARTS = (0.125, 0.25, 0.5, 0.75, 1.0)
_NAME = re.compile(r"(\w+) (\S+) stride (\S+) padding (\S+) dilation (\S+) groups (\d+) on (\S+)")


@dataclass(frozen=True)
class LayerSpec:
    """A layer without its widths: all else that its time depends on."""

    kind: str  # "conv", "transposed" or "linear"
    kernel: Sizes = ()
    stride: Sizes = ()
    padding: Sizes = ()
    dilation: Sizes = ()
    groups: int = 1  # 0 means depthwise: as many groups as channels
    size: Sizes = ()  # spatial size of the input feature map; for a linear layer, rows per sample

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
        kernel, stride, padding, dilation = map(_sizes, match.group(2, 3, 4, 5))
        return cls(match[1], kernel, stride, padding, dilation, int(match[6]), _sizes(match[7]))

    def weight_shape(self, inputs: int, filters: int) -> tuple[int, ...]:
        """Return the shape of the weight of a convolution with these widths."""
        groups = self.groups or inputs
        if self.kind == "transposed":
            return (inputs, max(filters // groups, 1), *self.kernel)
        return (filters, max(inputs // groups, 1), *self.kernel)

    @classmethod
    def of(cls, node: LayerNode, samples: int) -> LayerSpec:
        """Return the specification of a layer in a channel graph that was traced with `samples` samples."""
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
    """Return the numbers of input or output channels at which a layer with `full` channels is measured.

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


def _block_width(width: int, full: int) -> int:
    """Round a width up to a multiple of FINE or UNIT, the assumed block size of a runtime.

    >>> [_block_width(width, full=30) for width in (3, 13, 17, 25)]
    [4, 16, 24, 30]
    """
    return min(round_up(width, FINE if width <= SMALL else UNIT), full)


def round_up(width: int, unit: int) -> int:
    """Round a width up to a multiple of `unit`."""
    return -(-width // unit) * unit


def _times(sizes: Sizes) -> str:
    return "x".join(map(str, sizes)) or "-"


def _sizes(text: str) -> Sizes:
    return () if text == "-" else tuple(int(part) for part in text.split("x"))


Widths = tuple[int, int]  # input channels, filters


class Table:
    """Measured seconds of layers, by `LayerSpec` and widths, with interpolation between widths.

    >>> table = Table({LayerSpec("linear", size=(1,)): {(8, 8): 1.0, (16, 8): 2.0, (8, 16): 2.0, (16, 16): 4.0}})
    >>> table.seconds(LayerSpec("linear", size=(1,)), 12, 8)
    1.5
    """

    def __init__(
        self, points: Mapping[LayerSpec, Mapping[Widths, float]] | None = None, blocks: bool = False
    ) -> None:
        self.points = {site: dict(seconds) for site, seconds in (points or {}).items()}
        self.blocks = blocks  # whether input channels are rounded up to blocks, too; filters always are
        self._grids: dict[LayerSpec, tuple[list[int], list[int], dict[Widths, float]]] = {}
        self._known: dict[tuple[LayerSpec, int, int], float] = {}

    def missing(self, wanted: Mapping[LayerSpec, Iterable[Widths]]) -> dict[LayerSpec, list[Widths]]:
        """Return the wanted widths, by `LayerSpec`, that have not been measured yet."""
        found = {s: [w for w in widths if w not in self.points.get(s, {})] for s, widths in wanted.items()}
        return {site: widths for site, widths in found.items() if widths}

    def of(self, wanted: Mapping[LayerSpec, Iterable[Widths]]) -> Table:
        """Return a table of only these widths: `_grid` needs all pairs, and other networks add incomplete ones."""
        points = {site: {pair: self.points[site][pair] for pair in widths} for site, widths in wanted.items()}
        return Table(points, self.blocks)

    def add(self, site: LayerSpec, seconds: Mapping[Widths, float]) -> None:
        """Add measured seconds of a layer at several widths."""
        self.points.setdefault(site, {}).update(seconds)
        self._grids.pop(site, None)
        self._known = {key: value for key, value in self._known.items() if key[0] != site}

    def seconds(self, site: LayerSpec, inputs: int, filters: int) -> float:
        """Return the interpolated seconds of a layer of these widths."""
        key = site, inputs, filters
        if key not in self._known:
            rows, columns, full = self._grid(site)
            if self.blocks:
                inputs = _block_width(inputs, rows[-1])
            filters = _block_width(filters, columns[-1])
            (i0, i1, a), (o0, o1, b) = _bracket(rows, inputs), _bracket(columns, filters)
            near, far = (full[i, o0] + b * (full[i, o1] - full[i, o0]) for i in (i0, i1))
            self._known[key] = near + a * (far - near)
        return self._known[key]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values."""
        return {str(site): [[*w, s] for w, s in sorted(seconds.items())] for site, seconds in self.points.items()}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any], blocks: bool = False) -> Table:
        """Restore what `to_dict` returned; raises a ValueError for anything else."""
        points = {LayerSpec.parse(name): dict(_point(*row) for row in rows) for name, rows in written.items()}
        if not all(points.values()):
            raise ValueError("a layer without any time")
        return cls(points, blocks)

    def _grid(self, site: LayerSpec) -> tuple[list[int], list[int], dict[Widths, float]]:
        if site not in self._grids:
            points = self.points[site]
            rows, columns = sorted({i for i, _ in points}), sorted({o for _, o in points})
            # Depthwise layers are measured with as many filters as input channels.
            measured = [(n, n) for n in rows] if site.groups == 0 else list(product(rows, columns))
            full = {
                (i, o): min(points[a, b] for a, b in measured if a >= i and b >= o)
                for i, o in product(rows, columns)
            }
            self._grids[site] = rows, columns, full
        return self._grids[site]


def _point(inputs: Any, filters: Any, seconds: Any) -> tuple[Widths, float]:
    if not (isinstance(inputs, int) and isinstance(filters, int) and 0 < float(seconds) < math.inf):
        raise ValueError(f"no widths with their time: {inputs}, {filters}, {seconds}")
    return (inputs, filters), float(seconds)


def _bracket(known: list[int], width: int) -> tuple[int, int, float]:
    """Return the measured widths around `width`, and its relative position between them."""
    index = bisect_left(known, width)
    if index in (0, len(known)):  # A width outside the measured range costs as much as the nearest measured one.
        nearest = known[0] if index == 0 else known[-1]
        return nearest, nearest, 0.0
    low, high = known[index - 1], known[index]
    return low, high, (width - low) / (high - low)


# Views, which take no time of their own.
FREE = ("aten.view", "aten._unsafe_view", "aten.t", "aten.detach", "aten.alias", "aten.expand", "aten.slice")


@dataclass(frozen=True, eq=False)
class Layer:
    """One call of a convolution or linear layer."""

    node: LayerNode
    site: LayerSpec
    before: Value  # its input before a remap selects channels, for example the whole residual stream
    behind: Value  # its output after norms and activations, in the layout of the tensors that it is added to

    def widths(self, laid: LaidOut) -> tuple[int, int, int]:
        """Return the numbers of input channels, of output channels in the residual stream, and of own filters."""
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
    """The operators of a deployed network that take time: `layers`, `joins` (which combine tensors), and `rest`."""

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
        joins = set(map(id, self.joins))  # By identity: `==` would compare every field of the nodes.
        self.rest = [node for node in graph.nodes if id(node) not in joins and self._costs(node)]

    def elements(self, value: Value, laid: LaidOut) -> float:
        """Return the number of elements per sample of a tensor in the pruned network."""
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
        """Return the value that a tensor had before it passed through module boundaries."""
        while isinstance(boundary := self._maker.get(value), Boundary):
            value = boundary.x
        return value

    def _only_reader(self, value: Value) -> Node | None:
        readers = self._readers[value]
        return readers[0] if len(readers) == 1 and value not in self.graph.outputs else None

    @staticmethod
    def _joins(node: Elementwise) -> bool:
        """Return True if at least two inputs are not computed from parameters and buffers alone."""
        return sum(v.roots is None for v in dict.fromkeys(node.inputs)) > 1

    def _costs(self, node: Node) -> bool:
        """Return True if the operator takes time that is not part of another one's."""
        if isinstance(node, LayerNode | Boundary) or not node.outputs or node.op.name in FREE:
            return False
        reshapes = isinstance(node, ChannelMove) and node.op.name.endswith(("reshape", "flatten"))
        if reshapes and len(node.inputs) == 1:
            return False
        if isinstance(node, Norm):  # A norm is folded into the layer before it, if there is one.
            return not isinstance(self._maker.get(self._outside(node.x)), LayerNode)
        return any(v.roots is None for v in node.inputs)


# -- Coefficients ----------------------------------------------------------------------------------------------

Row = Mapping[str, float]
_ROUNDS = 20
PRIOR_WEIGHT = 1.0  # weight of the expected coefficients in a fit, in which every measured network has the weight 1
HUBER_DELTA = 0.03  # relative error beyond which the loss is linear, because single timings may be disturbed


def fit(
    rows: Sequence[Row], seconds: Sequence[float], terms: Sequence[str], expected: Row | None = None
) -> dict[str, float]:
    """Fit nonnegative coefficients of the terms to measured seconds, one row of terms per network.

    Minimizes the relative error, so fast networks count as much as slow ones, with a Huber loss. Coefficients that
    the rows hardly determine stay near `expected`.

    >>> found = fit([{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 2.0}], [3.0, 4.0], ["a", "b"])
    >>> {name: round(value, 6) for name, value in found.items()}
    {'a': 3.0, 'b': 0.5}
    """
    matrix = (
        np.array([[row.get(name, 0.0) for name in terms] for row in rows]) / np.asarray(seconds, float)[:, None]
    )
    ones = np.ones(len(rows))
    scale = np.maximum(np.abs(matrix).mean(axis=0), 1e-300)
    matrix = matrix / scale  # Now a coefficient is the share of a typical network's time due to its term.
    pulled, towards = np.zeros((0, len(terms))), np.zeros(0)
    if expected is not None:
        pulled = PRIOR_WEIGHT * np.eye(len(terms))
        towards = PRIOR_WEIGHT * np.array([expected.get(name, 0.0) for name in terms]) * scale
    weights = ones
    for _ in range(_ROUNDS):
        found = nnls(np.concatenate([matrix * weights[:, None], pulled]), np.concatenate([ones * weights, towards]))
        weights = np.sqrt(HUBER_DELTA / np.maximum(np.abs(matrix @ found - ones), HUBER_DELTA))
    return {name: float(value) for name, value in zip(terms, found / scale, strict=True)}


def nnls(matrix: NDArray[np.floating], target: NDArray[np.floating]) -> NDArray[np.floating]:
    """Solve nonnegative least squares with the active-set method of Lawson and Hanson."""
    size = matrix.shape[1]
    free = np.zeros(size, bool)
    found = np.zeros(size)
    for _ in range(10 * size):
        slope = matrix.T @ (target - matrix @ found)
        slope[free] = -np.inf
        best = int(slope.argmax())
        if slope[best] <= 1e-9:
            break
        free[best] = True
        while True:
            tried = np.zeros(size)
            tried[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if (tried[free] > 0).all():
                found = tried
                break
            low = free & (tried <= 0)
            step = np.min(found[low] / np.maximum(found[low] - tried[low], 1e-300))
            found = found + step * (tried - found)
            free &= found > 1e-12
            if not free.any():
                break
    return found


TERMS = ("layers", "added", "touched", "moved", "operators", "pass")
FORMS = ("zeros", "moves")
UNCALIBRATED = {"layers": 1.0}  # uncalibrated: the sum of the layer times
Terms = dict[str, float]


@dataclass
class TimeTerms:
    """Terms of a network's time for each of FORMS, and the seconds of its layers."""

    terms: dict[str, Terms]
    layers: dict[str, dict[int, float]]  # per form: seconds from the table, by index in `Operators.layers`


class Predictor:
    """Predicts the time of a network as the sum of its TERMS, weighted by `coefficients`."""

    def __init__(self, graph: ChannelGraph, table: Table, batch: int) -> None:
        self.graph, self.table, self.batch = graph, table, batch
        self.operators = Operators(graph)
        self.coefficients: Mapping[str, float] = UNCALIBRATED

    def wanted(self, least: LaidOut) -> dict[LayerSpec, list[Widths]]:
        """Return the widths at which every `LayerSpec` must be measured; `least` is the smallest network allowed.

        Numbers of channels that are not smaller in that network are measured only at full width.
        """
        dense = lay_out(self.graph, {})
        sides: dict[LayerSpec, tuple[set[int], set[int]]] = {}
        for layer in self.operators.layers:
            (i, o, _), (low, high, _) = layer.widths(dense), layer.widths(least)
            vanishes, groups = not layer.runs(least), layer.site.groups
            rows, columns = sides.setdefault(layer.site, (set(), set()))
            rows.update(measured_widths(i, vanishes or low < i, groups))
            prunable = layer.node.layer in self.graph.layers
            columns.update(measured_widths(o, vanishes or high < o or prunable, groups))
        grids = {site: list(product(sorted(rows), sorted(columns))) for site, (rows, columns) in sides.items()}
        depthwise = {site: [(n, n) for n in sorted(rows)] for site, (rows, _) in sides.items() if site.groups == 0}
        return grids | depthwise

    def terms_of(self, laid: LaidOut) -> TimeTerms:
        """Return the terms and layer times of a network, given its layout."""
        operators = self.operators
        layers: dict[str, dict[int, float]] = {form: {} for form in FORMS}
        moved = 0.0
        for index, layer in enumerate(operators.layers):
            if not layer.runs(laid):
                continue
            inputs, filters, own = layer.widths(laid)
            layers["zeros"][index] = self.table.seconds(layer.site, inputs, filters)
            layers["moves"][index] = self.table.seconds(layer.site, inputs, own)
            if own < filters:
                moved += filters * layer.pixels
        joins = [n for n in operators.joins if sum(operators.alive(v, laid) for v in n.inputs) > 1]
        rest = [n for n in operators.rest if operators.alive(n.outputs[0], laid)]
        shared = {
            "added": self.batch * sum(operators.elements(n.outputs[0], laid) for n in joins),
            "touched": self.batch * sum(operators.elements(n.outputs[0], laid) for n in rest),
            "operators": float(len(layers["zeros"]) + len(joins) + len(rest)),
            "pass": 1.0,
        }
        extra = {"zeros": 0.0, "moves": self.batch * moved}
        terms = {form: {**shared, "layers": sum(layers[form].values()), "moved": extra[form]} for form in FORMS}
        return TimeTerms(terms, layers)

    def total(self, terms: Terms) -> float:
        """Return the predicted seconds: the sum of the terms, weighted by `coefficients`."""
        return sum(self.coefficients.get(name, 0.0) * value for name, value in terms.items())

    def seconds(self, laid: LaidOut) -> float:
        """Return the seconds of one pass in the faster form."""
        return min(self.total(terms) for terms in self.terms_of(laid).terms.values())

    def shares(self, laid: LaidOut) -> dict[int, float]:
        """Return the seconds of every layer that runs, in the faster form, by its index in `Operators.layers`."""
        found = self.terms_of(laid)
        form = min(found.terms, key=lambda name: self.total(found.terms[name]))
        return {index: self.coefficients.get("layers", 0.0) * s for index, s in found.layers[form].items()}


FORMAT = "sbf-pruner latency 1"
_REMEDY = "measure again with `sbf latency`"
BLOCKWISE = ("onnxruntime",)  # runtimes that compute the input channels of a layer in blocks


@dataclass(frozen=True)
class Conditions:
    """Conditions of a measurement: everything that two times must have in common to be comparable."""

    runtime: str
    batch: int
    threads: int
    machine: Mapping[str, Any] = field(default_factory=dict)

    def told(self) -> str:
        """Describe the conditions, without the machine."""
        return f"{self.runtime}, batch {self.batch}, {pluralize(self.threads, 'thread')}"


class LatencyModel:
    """Predicts the time of a network; a `Predictor` scaled to the measured time of the dense network."""

    def __init__(
        self,
        graph: ChannelGraph,
        table: Table,
        conditions: Conditions,
        dense_seconds: float | None = None,
        coefficients: Mapping[str, float] = UNCALIBRATED,
        calibration: Mapping[str, Any] | None = None,
    ) -> None:
        self.graph, self.table, self.conditions = graph, table, conditions
        self.predictor = Predictor(graph, table, conditions.batch)
        self.predictor.coefficients = dict(coefficients)
        self.calibration = dict(calibration or {})
        self._dense = lay_out(graph, {})
        predicted = self.predictor.seconds(self._dense)
        self.dense_seconds = predicted if dense_seconds is None else dense_seconds
        self._unit = self.dense_seconds / predicted
        self.correction = 1.0
        """Factor on every prediction: the ratio of measured to predicted time of networks near the target."""

    def seconds(self, laid: LaidOut) -> float:
        """Return the seconds of one pass."""
        return self.correction * self._unit * self.predictor.seconds(laid)

    def ratio(self, keep: Mapping[str, Mask]) -> float:
        """Return the time of a choice of filters relative to the dense network."""
        return self.seconds(lay_out(self.graph, keep)) / self.dense_seconds

    def prices(self, laid: LaidOut, keep: Mapping[str, Mask]) -> dict[str, float]:
        """Return for each layer the share of the dense network's time that one of its filters takes.

        A single filter may cost nothing where a runtime computes in blocks, so the price is the time saved by
        removing the whole layer, divided by the number of filters it has.
        """
        now, dense = self.predictor.shares(laid), self.predictor.shares(self._dense)
        whole = self.predictor.seconds(self._dense)
        found = {}
        for name, parts in self._saved.items():
            filters = self.graph.layers[name].filters
            left = int(np.asarray(keep[name]).sum()) if name in keep else filters
            times = now if left else dense
            seconds = sum(part * times.get(index, 0.0) for index, part in parts.items())
            found[name] = seconds / max(left or filters, 1) / whole
        return found

    @cached_property
    def _saved(self) -> dict[str, dict[int, float]]:
        """By prunable layer, the fractions of the times of `Operators.layers` (by index) that its removal saves.

        A layer without which the network would be disconnected keeps one filter instead.
        """
        dense = self.predictor.shares(self._dense)
        found: dict[str, dict[int, float]] = {}
        for name, layer in self.graph.layers.items():
            keep = {name: np.zeros(layer.filters, bool)}
            if not self.graph.connected(keep):
                keep[name][0] = True
            left = self.predictor.shares(lay_out(self.graph, keep))
            parts = {index: 1 - left.get(index, 0.0) / seconds for index, seconds in dense.items() if seconds}
            found[name] = {index: part for index, part in parts.items() if part > 0}
        return found

    # -- files -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values."""
        return {
            "format": FORMAT,
            **asdict(self.conditions),
            "network": signature(self.predictor),
            "dense_seconds": self.dense_seconds,
            "coefficients": dict(self.predictor.coefficients),
            "calibration": self.calibration,
            "table": self.table.to_dict(),
        }

    def write(self, path: Path) -> None:
        """Write the model atomically to a JSON file, for `latency.table` in a recipe."""
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")


def read_model(path: str | PathLike[str], graph: ChannelGraph) -> LatencyModel:
    """Read a latency model from a file; raises a PruningError if it was measured for another network."""
    try:
        written = json.loads(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        raise PruningError(f"latency.table: {path} does not exist; make it with `sbf latency --out`") from None
    except (OSError, ValueError) as error:
        raise PruningError(f"latency.table: {path} cannot be read ({error}); {_REMEDY}") from None
    return from_dict(written, graph, str(path))


def from_dict(written: Any, graph: ChannelGraph, source: str = "what was measured") -> LatencyModel:
    """Restore what `to_dict` returned; raises a PruningError if it was measured for another network.

    `source` names the origin in error messages.
    """
    if isinstance(written, dict):
        check_version(written.get("format"), FORMAT, f"latency.table: {source}")
    try:
        if written["format"] != FORMAT:
            raise ValueError(written["format"])
        table = Table.from_dict(written["table"], written["runtime"] in BLOCKWISE)
        conditions = Conditions(written["runtime"], written["batch"], written["threads"], written["machine"])
        dense = float(written["dense_seconds"])
        if not 0 < dense < math.inf:
            raise ValueError(f"a dense network that takes {dense} s")
        if written["network"] == signature(Predictor(graph, table, conditions.batch)):
            return LatencyModel(graph, table, conditions, dense, written["coefficients"], written["calibration"])
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise PruningError(
            f"latency.table: {source} was not written by `sbf latency` ({error!r}); {_REMEDY}"
        ) from None
    raise PruningError(f"latency.table: {source} was measured for another network, or other images; {_REMEDY}")


def bind_clock(
    clock: LatencyPredictor | str | PathLike[str] | None, graph: ChannelGraph
) -> LatencyPredictor | None:
    """Return a latency model for `graph`: read a file, or rebind a model of another trace of the network."""
    if isinstance(clock, (str, PathLike)):
        return read_model(clock, graph)
    if isinstance(clock, LatencyModel) and clock.graph is not graph:
        return from_dict(clock.to_dict(), graph)
    return clock


def signature(predictor: Predictor) -> str:
    """Return a hash that identifies a network: its layers with their widths, and its prunable layers."""
    dense = lay_out(predictor.graph, {})
    layers = [f"{layer.node.layer} {layer.site} {layer.widths(dense)}" for layer in predictor.operators.layers]
    text = "\n".join([*layers, *predictor.graph.layers])
    return hashlib.sha256(text.encode()).hexdigest()[:16]

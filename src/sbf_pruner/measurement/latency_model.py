"""Latency models: predict the time of any choice of filters from measured layer times, without cutting the network.

`Predictor` describes a network by six terms: layer times from a `Table`, elements added, elements touched by other
operators, elements moved, number of operators, and one per pass. `fit` finds their coefficients, none of which is
negative, because no operator gives time back. Networks are deployed in their fastest form, so both ways of joining
a branch to the residual stream are predicted and the smaller time counts. `LatencyModel` scales predictions so that
the dense network takes exactly its measured time; its JSON file also serves machines without the runtime.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..budget.controller import LatencyClock
from ..errors import PruningError, check_version
from ..graph.channel_graph import ChannelGraph
from ..graph.cost import LaidOut, lay_out
from ..graph.nodes import Mask
from ..utils.files import write_text
from ..utils.formatting import pluralize
from .latency_table import LayerSpec, Operators, Table, Widths, measured_widths

Row = Mapping[str, float]


_ROUNDS = 20
PRIOR_WEIGHT = 1.0  # weight of the prior: that of one more network
HUBER_DELTA = (
    0.03  # relative error beyond which the loss is linear (Huber), because single timings may be disturbed
)


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
    wanted = np.asarray(seconds, float)
    matrix = np.array([[row.get(name, 0.0) for name in terms] for row in rows]) / wanted[:, None]
    ones = np.ones(len(wanted))
    scale = np.maximum(np.abs(matrix).mean(axis=0), 1e-300)
    matrix = matrix / scale  # Now a coefficient is the share of a typical network's time due to its term.
    pulled, towards = np.zeros((0, len(terms))), np.zeros(0)
    if expected is not None:
        pulled = PRIOR_WEIGHT * np.eye(len(terms))
        towards = PRIOR_WEIGHT * np.array([expected.get(name, 0.0) for name in terms]) * scale
    weights = np.ones(len(wanted))
    for _ in range(_ROUNDS):
        found = nnls(np.concatenate([matrix * weights[:, None], pulled]), np.concatenate([ones * weights, towards]))
        weights = np.sqrt(HUBER_DELTA / np.maximum(np.abs(matrix @ found - ones), HUBER_DELTA))
    return {name: float(value) for name, value in zip(terms, found / scale, strict=True)}


def nnls(matrix: NDArray[np.floating], wanted: NDArray[np.floating]) -> NDArray[np.floating]:
    """Solve nonnegative least squares with the active-set method of Lawson and Hanson."""
    size = matrix.shape[1]
    free = np.zeros(size, bool)
    found = np.zeros(size)
    for _ in range(10 * size):
        slope = matrix.T @ (wanted - matrix @ found)
        slope[free] = -np.inf
        best = int(slope.argmax())
        if slope[best] <= 1e-9:
            break
        free[best] = True
        while True:
            tried = np.zeros(size)
            tried[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
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
    layers: dict[str, dict[int, float]] = field(default_factory=dict)
    """Per form: index in `Operators.layers` -> seconds from the table."""


class Predictor:
    """Predicts the time of a network as the sum of its TERMS, weighted by `coefficients`."""

    def __init__(self, graph: ChannelGraph, table: Table, batch: int) -> None:
        self.graph, self.table, self.batch = graph, table, batch
        self.operators = Operators(graph)
        self.coefficients: Mapping[str, float] = UNCALIBRATED

    def wanted(self, least: LaidOut) -> dict[LayerSpec, list[Widths]]:
        """Return the widths at which every site must be measured; `least` is the smallest network allowed.

        Input or output channels that even this network keeps in full are measured in full only.
        """
        dense = lay_out(self.graph, {})
        sides: dict[LayerSpec, tuple[set[int], set[int]]] = {}
        for layer in self.operators.layers:
            (i, o, _), (low, high, _) = layer.widths(dense), layer.widths(least)
            gone, groups = not layer.runs(least), layer.site.groups
            rows, columns = sides.setdefault(layer.site, (set(), set()))
            rows.update(measured_widths(i, gone or low < i, groups))
            columns.update(measured_widths(o, gone or high < o or layer.node.layer in self.graph.layers, groups))
        grids = {site: list(product(sorted(rows), sorted(columns))) for site, (rows, columns) in sides.items()}
        depthwise = {site: [(n, n) for n in sorted(rows)] for site, (rows, _) in sides.items() if site.groups == 0}
        return grids | depthwise

    def terms_of(self, laid: LaidOut) -> TimeTerms:
        """Return the terms and layer times of a network, given its layout."""
        held = self.operators
        layers: dict[str, dict[int, float]] = {form: {} for form in FORMS}
        moved = 0.0
        running = 0
        for place, layer in enumerate(held.layers):
            if not layer.runs(laid):
                continue
            running += 1
            inputs, filters, own = layer.widths(laid)
            layers["zeros"][place] = self.table.seconds(layer.site, inputs, filters)
            layers["moves"][place] = self.table.seconds(layer.site, inputs, own)
            if own < filters:
                moved += filters * layer.pixels
        joins = [n for n in held.joins if sum(held.alive(v, laid) for v in n.inputs) > 1]
        rest = [n for n in held.rest if held.alive(n.outputs[0], laid)]
        shared = {
            "added": self.batch * sum(held.elements(n.outputs[0], laid) for n in joins),
            "touched": self.batch * sum(held.elements(n.outputs[0], laid) for n in rest),
            "operators": float(running + len(joins) + len(rest)),
            "pass": 1.0,
        }
        extra = {"zeros": 0.0, "moves": self.batch * moved}
        terms = {form: {**shared, "layers": sum(layers[form].values()), "moved": extra[form]} for form in FORMS}
        return TimeTerms(terms, layers)

    def total(self, terms: Terms) -> float:
        """Return the seconds that terms add up to."""
        return sum(self.coefficients.get(name, 0.0) * value for name, value in terms.items())

    def seconds(self, laid: LaidOut) -> float:
        """Return the seconds of one pass in the faster form."""
        return min(self.total(terms) for terms in self.terms_of(laid).terms.values())

    def shares(self, laid: LaidOut) -> dict[int, float]:
        """Return the seconds of every layer that runs, in the faster form, by its index in `Operators.layers`."""
        found = self.terms_of(laid)
        form = min(found.terms, key=lambda name: self.total(found.terms[name]))
        return {place: self.coefficients.get("layers", 0.0) * s for place, s in found.layers[form].items()}


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
        reckoned = self.predictor.seconds(self._dense)
        self.dense_seconds = reckoned if dense_seconds is None else dense_seconds
        self._unit = self.dense_seconds / reckoned
        self.correction = 1.0
        """Measured over predicted time of networks near the target; multiplies every prediction."""

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
            left = int(np.asarray(keep[name]).sum()) if name in keep else self.graph.layers[name].filters
            times = now if left else dense
            seconds = sum(part * times.get(place, 0.0) for place, part in parts.items())
            found[name] = seconds / max(left or self.graph.layers[name].filters, 1) / whole
        return found

    @cached_property
    def _saved(self) -> dict[str, dict[int, float]]:
        """For every layer, the share of each operator's time that is saved by removing it (by operator index).

        A layer that connects inputs and outputs keeps one filter instead.
        """
        dense = self.predictor.shares(self._dense)
        found: dict[str, dict[int, float]] = {}
        for name, layer in self.graph.layers.items():
            keep = {name: np.zeros(layer.filters, bool)}
            if not self.graph.connected(keep):
                keep[name][0] = True
            left = self.predictor.shares(lay_out(self.graph, keep))
            parts = {place: 1 - left.get(place, 0.0) / seconds for place, seconds in dense.items() if seconds}
            found[name] = {place: part for place, part in parts.items() if part > 0}
        return found

    # -- files -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values."""
        held = self.conditions
        return {
            "format": FORMAT,
            "runtime": held.runtime,
            "batch": held.batch,
            "threads": held.threads,
            "machine": dict(held.machine),
            "network": signature(self.predictor),
            "dense_seconds": self.dense_seconds,
            "coefficients": dict(self.predictor.coefficients),
            "calibration": self.calibration,
            "table": self.table.to_dict(),
        }

    def write(self, path: Path) -> None:
        """Write the file that `latency.table` in a recipe takes, atomically."""
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


def bind_clock(clock: LatencyClock | str | PathLike[str] | None, graph: ChannelGraph) -> LatencyClock | None:
    """Return the clock for this very graph: reads a file, or rebinds a model of another trace of the network."""
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

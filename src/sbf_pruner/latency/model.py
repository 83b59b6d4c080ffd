"""What is known of a network's time on one machine: the clock that a target in milliseconds is reckoned by.

A table of layers, coefficients and the dense network's measured time enter, or the file that holds them; seconds
leave for any choice of filters, and what a filter of each layer costs.  What holds: the dense network takes what
was measured; the file is plain JSON, and serves machines that have no such runtime.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..budget.aim import Clock
from ..errors import PruningError
from ..figures import counted
from ..files import write_text
from ..graph.channels import ChannelGraph
from ..graph.costs import Laid, lay_out
from ..graph.masks import Mask
from .predictor import PLAIN, Predictor
from .table import Table

KIND = "sbf-pruner latency"
_REMEDY = "measure again with `sbf latency`"
BLOCKWISE = ("onnxruntime",)  # runtimes in which the inputs of a layer count in blocks


@dataclass(frozen=True)
class Conditions:
    """Under which times were taken: all that two figures must have in common to be compared."""

    runtime: str
    batch: int
    threads: int
    machine: Mapping[str, Any] = field(default_factory=dict)

    def told(self) -> str:
        """In words."""
        return f"{self.runtime}, batch {self.batch}, {counted(self.threads, 'thread')}"


class LatencyModel:
    """Foretells the time of a network; see `Predictor`."""

    def __init__(
        self,
        graph: ChannelGraph,
        table: Table,
        conditions: Conditions,
        dense_seconds: float | None = None,
        coefficients: Mapping[str, float] = PLAIN,
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
        """what networks near the target really take, as a multiple of what is foretold"""

    def seconds(self, laid: Laid) -> float:
        """Seconds of one pass."""
        return self.correction * self._unit * self.predictor.seconds(laid)

    def ratio(self, keep: Mapping[str, Mask]) -> float:
        """What a choice of filters leaves of the dense network's time."""
        return self.seconds(lay_out(self.graph, keep)) / self.dense_seconds

    def prices(self, laid: Laid, keep: Mapping[str, Mask]) -> dict[str, float]:
        """By layer, the part of the dense network's time that one of its filters takes.

        A filter alone may cost nothing where a runtime computes in blocks, so a layer's price is what would go if
        all of it went, divided among the filters it has.
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
        """For every layer: of which layers' time what part goes with it."""
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
        """As plain values."""
        held = self.conditions
        return {
            "kind": KIND,
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
        """Write the file, in one step."""
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")


def read_model(path: str | PathLike[str], graph: ChannelGraph) -> LatencyModel:
    """The model in a file, for a network it was measured for."""
    try:
        written = json.loads(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        raise PruningError(f"latency.table: {path} does not exist; make it with `sbf latency --out`") from None
    except (OSError, ValueError) as error:
        raise PruningError(f"latency.table: {path} cannot be read ({error}); {_REMEDY}") from None
    return from_dict(written, graph, str(path))


def from_dict(written: Any, graph: ChannelGraph, source: str = "what was measured") -> LatencyModel:
    """The model that `to_dict` wrote, for a network it was measured for."""
    try:
        if written["kind"] != KIND:
            raise ValueError(written["kind"])
        table = Table.from_dict(written["table"], written["runtime"] in BLOCKWISE)
        conditions = Conditions(written["runtime"], written["batch"], written["threads"], written["machine"])
        dense = float(written["dense_seconds"])
        if not 0 < dense < math.inf:
            raise ValueError(f"a dense network that takes {dense} s")
        if written["network"] == signature(Predictor(graph, table, conditions.batch)):
            return LatencyModel(graph, table, conditions, dense, written["coefficients"], written["calibration"])
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise PruningError(f"latency.table: {source} is no file of `sbf latency` ({error!r}); {_REMEDY}") from None
    raise PruningError(f"latency.table: {source} was measured for another network, or other images; {_REMEDY}")


def bound(clock: Clock | str | PathLike[str] | None, graph: ChannelGraph) -> Clock | None:
    """A clock for this very graph, also where it comes as a file or knows another trace of the network."""
    if isinstance(clock, (str, PathLike)):
        return read_model(clock, graph)
    if isinstance(clock, LatencyModel) and clock.graph is not graph:
        return from_dict(clock.to_dict(), graph)
    return clock


def signature(predictor: Predictor) -> str:
    """What tells one network from another: its layers with their widths, and those that can be pruned."""
    dense = lay_out(predictor.graph, {})
    layers = [f"{layer.node.layer} {layer.site} {layer.widths(dense)}" for layer in predictor.operators.layers]
    text = "\n".join([*layers, *predictor.graph.layers])
    return hashlib.sha256(text.encode()).hexdigest()[:16]

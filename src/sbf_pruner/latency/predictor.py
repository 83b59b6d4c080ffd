"""Seconds of a whole network from those of its layers, for any choice of filters, without cutting it.

Operators, a table and a few coefficients enter; seconds leave.  A network is deployed in the way that is quickest
for it, so both ways to bring a branch into its stream are reckoned, and the quicker one counts.  The coefficients
are those of a sum: time of the layers by the table, numbers that are added up, numbers that other operators touch,
numbers that are moved, operators, and passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

from ..graph.channels import ChannelGraph
from ..graph.costs import Laid, lay_out
from .operators import Operators
from .shapes import Site, widths_of
from .table import Table, Widths

TERMS = ("layers", "added", "touched", "moved", "operators", "pass")
FORMS = ("zeros", "moves")
PLAIN = {"layers": 1.0}  # nothing but the table
Terms = dict[str, float]


@dataclass
class Reckoned:
    """What a network is made of, in either form: the terms of the sum, and the seconds of each layer."""

    terms: dict[str, Terms]
    layers: dict[str, dict[int, float]] = field(default_factory=dict)
    """by form: place among the layers -> seconds by the table"""


class Predictor:
    """Foretells how long a network takes; `coefficients` are those of TERMS."""

    def __init__(self, graph: ChannelGraph, table: Table, batch: int) -> None:
        self.graph, self.table, self.batch = graph, table, batch
        self.operators = Operators(graph)
        self.coefficients: Mapping[str, float] = PLAIN

    def wanted(self, least: Laid) -> dict[Site, list[Widths]]:
        """The widths at which every kind of layer has to be measured; `least` is the smallest network there may be.

        A side that even that network has in full is measured in full alone.
        """
        dense = lay_out(self.graph, {})
        sides: dict[Site, tuple[set[int], set[int]]] = {}
        for layer in self.operators.layers:
            (i, o, _), (low, high, _) = layer.widths(dense), layer.widths(least)
            gone, groups = not layer.runs(least), layer.site.groups
            rows, columns = sides.setdefault(layer.site, (set(), set()))
            rows.update(widths_of(i, gone or low < i, groups))
            columns.update(widths_of(o, gone or high < o or layer.node.layer in self.graph.layers, groups))
        grids = {site: list(product(sorted(rows), sorted(columns))) for site, (rows, columns) in sides.items()}
        depthwise = {site: [(n, n) for n in sorted(rows)] for site, (rows, _) in sides.items() if site.groups == 0}
        return grids | depthwise

    def reckon(self, laid: Laid) -> Reckoned:
        """The terms of a network that is laid out."""
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
        return Reckoned(terms, layers)

    def total(self, terms: Terms) -> float:
        """What the terms come to."""
        return sum(self.coefficients.get(name, 0.0) * value for name, value in terms.items())

    def seconds(self, laid: Laid) -> float:
        """How long the network takes in the form that is quicker."""
        return min(self.total(terms) for terms in self.reckon(laid).terms.values())

    def shares(self, laid: Laid) -> dict[int, float]:
        """Seconds of every layer that runs, in the quicker form."""
        found = self.reckon(laid)
        form = min(found.terms, key=lambda name: self.total(found.terms[name]))
        return {place: self.coefficients.get("layers", 0.0) * s for place, s in found.layers[form].items()}

"""From a table of layers to a model that is right about whole networks, and says how right.

A network enters; its layers are measured, then some networks that are really cut from it, in all three ways and
several sizes, each in its compact forms and in turns with the dense one; a `LatencyModel` leaves with the
coefficients that fit them.  Its error is stated for networks it has not seen: each is foretold by a fit to all the
others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from ..budget.aim import Aim
from ..budget.guards import Guards
from ..graph.channels import ChannelGraph
from ..graph.costs import lay_out
from ..graph.masks import Mask
from ..latency.fitting import fit
from ..latency.model import Conditions, LatencyModel
from ..latency.predictor import TERMS, Predictor, Terms
from ..latency.shapes import Site
from ..latency.table import Table, Widths
from ..latency.ways import WAYS, guarded, made_up
from ..plan import Plan
from ..surgery import extract
from ..timing import using_threads
from .layers import time_layers
from .runtimes import RUNTIMES
from .whole import passes, time_beside

SHARES = (0.75, 0.5, 0.25)  # of the filters, or of the branches, in the networks it is fitted to
SWEEPS = 3  # times that every layer is measured, far apart: what else the machine does comes in bursts
Report = Callable[[str], None]
Wanted = Mapping[Site, Sequence[Widths]]


@dataclass(frozen=True)
class Timed:
    """A network that was really cut and timed."""

    way: str
    share: float
    terms: dict[str, Terms]
    seconds: dict[str, float]
    """measured, by form"""


def measure_layers(table: Table, wanted: Wanted, conditions: Conditions, report: Report) -> int:
    """Measure what the table lacks; how many layers that were."""
    missing = table.missing(wanted)
    count = sum(map(len, missing.values()))
    if not count:
        return 0
    report(f"measuring {count} layers in {conditions.told()}")
    held = conditions
    found: dict[Any, dict[Any, float]] = {site: {} for site in missing}
    with using_threads(held.threads):
        for _ in range(SWEEPS):
            for site, widths in missing.items():
                taken = time_layers(held.runtime, site, widths, held.batch, held.threads)
                found[site] = {pair: min(s, found[site].get(pair, s)) for pair, s in taken.items()}
    for site, seconds in found.items():
        table.add(site, seconds)
    return count


def calibrate(
    model: nn.Module,
    example: Any,
    graph: ChannelGraph,
    table: Table,
    conditions: Conditions,
    report: Report = lambda line: None,
) -> LatencyModel:
    """The model of a network's time, fitted to networks that were cut from it."""
    predictor = Predictor(graph, table, conditions.batch)
    found: list[tuple[str, float, dict[str, Mask], dict[str, float]]] = []
    dense_seconds = float("inf")
    with using_threads(conditions.threads):
        timer = Timer(model, example, graph, conditions)
        for way, share, keep in samples(graph):
            report(f"timing {way}, {share:.0%} left")
            ratios, beside = timer.joins(keep)
            found.append((way, share, keep, ratios))
            dense_seconds = min(dense_seconds, beside)
    timed: list[Timed] = []
    for way, share, keep, ratios in found:
        terms = predictor.reckon(lay_out(graph, graph.settle(keep))).terms
        seconds = {form: ratio * dense_seconds for form, ratio in ratios.items()}
        timed.append(Timed(way, share, {form: terms[form] for form in seconds}, seconds))
    dense = predictor.reckon(lay_out(graph, {})).terms
    timed.append(Timed("dense", 1.0, {"zeros": dense["zeros"]}, {"zeros": dense_seconds}))
    coefficients = _fitted(timed)
    networks = _foretold(timed)
    calibration = {"networks": networks, **_errors(networks)}
    return LatencyModel(graph, table, conditions, dense_seconds, coefficients, calibration)


class Timer:
    """Cuts networks for real and times them beside the dense one."""

    def __init__(self, model: nn.Module, example: Any, graph: ChannelGraph, conditions: Conditions) -> None:
        self.model, self.example, self.graph, self.conditions = model, example, graph, conditions
        self.dense = next(iter(self._passes(model).values()))

    def joins(self, keep: dict[str, Mask]) -> tuple[dict[str, float], float]:
        """The time of a cut network by the way branches are joined, as a part of the dense one's, and that."""
        small = extract(self.model, self.example, Plan.from_masks(self.graph.settle(keep)), self.graph)
        found, dense = time_beside(self.dense, self._passes(small))
        least: dict[str, float] = {}
        for name, seconds in found.items():
            join = name.partition(" ")[0]
            least[join] = min(seconds / dense, least.get(join, float("inf")))
        return least, dense

    def _passes(self, network: nn.Module) -> dict[str, Callable[[], Any]]:
        held = self.conditions
        forms = {f"{join} {form}": form for join, group in RUNTIMES[held.runtime].joins.items() for form in group}
        return passes(network.eval(), self.example, forms, held.runtime, held.batch, held.threads)


def samples(graph: ChannelGraph) -> list[tuple[str, float, dict[str, Mask]]]:
    """The networks to time: in every way there is, several sizes."""
    found = []
    for way in WAYS:
        guards = guarded(graph, Guards(), way)
        if guards is None:
            continue
        scores = guards.leveled(made_up(graph, guards))
        aim = Aim(graph, guards=guards)
        for share in SHARES:
            # Of all filters that may go in this way, the highest scores: the level that leaves the share.
            inside = {n for branch in guards.branches for n in branch} or set(scores)
            level = float(np.quantile(np.concatenate([scores[n] for n in inside]), 1 - share))
            found.append((way, share, aim.choose(scores, level).masks))
    return found


def _fitted(timed: Sequence[Timed]) -> dict[str, float]:
    rows = [terms for one in timed for terms in one.terms.values()]
    seconds = [one.seconds[form] for one in timed for form in one.terms]
    # Expected is that time goes with the table, whatever the clock of the processor did meanwhile.
    usual = statistics.median(s / row["layers"] for s, row in zip(seconds, rows, strict=True))
    return fit(rows, seconds, TERMS, {"layers": usual})


def _foretold(timed: Sequence[Timed]) -> list[dict[str, Any]]:
    """Every cut network, as measured and as a fit to all the others foretells it, as parts of the dense one."""
    (dense,) = (one for one in timed if one.way == "dense")
    found = []
    for one in timed:
        if one is dense:
            continue
        others = _fitted([other for other in timed if other is not one])

        def reckoned(terms: Terms, coefficients: dict[str, float] = others) -> float:
            return sum(coefficients[name] * value for name, value in terms.items())

        found.append(
            {
                "way": one.way,
                "share": one.share,
                "measured": min(one.seconds.values()) / dense.seconds["zeros"],
                "foretold": min(map(reckoned, one.terms.values())) / reckoned(dense.terms["zeros"]),
                "seconds": dict(one.seconds),
                "terms": one.terms,
            }
        )
    return found


def _errors(networks: Sequence[dict[str, Any]]) -> dict[str, float]:
    apart = [abs(one["foretold"] / one["measured"] - 1) for one in networks]
    return {"mean_error": statistics.fmean(apart), "worst_error": max(apart)} if apart else {}

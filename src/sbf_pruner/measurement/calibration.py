"""Calibrated latency models: measure layers, time pruned networks, fit, and cache the result.

`calibrate` extracts networks of several sizes for every way of pruning (`COUPLINGS`), times each in alternation
with the dense network, and fits the coefficients of a `LatencyModel` to the times. The stored errors are
leave-one-out: each network is predicted by a fit to all the others. `load_or_calibrate` keeps measurements in the
user's cache: layer times per machine, and models per machine and network. Files are written atomically, and an
unusable one is replaced. `choose_coupling` returns the way of pruning that keeps the most MACs within a budget.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..budget.constraints import Constraints
from ..budget.controller import Selector
from ..budget.file_size import FileSize
from ..budget.search import Values
from ..budget.targets import Budget
from ..budget.widths import ResolvedConstraints, resolve
from ..errors import PruningError
from ..graph.build import trace
from ..graph.channel_graph import ChannelGraph
from ..graph.cost import lay_out
from ..graph.nodes import Mask
from ..plan import Plan
from ..runtimes.table import RUNTIMES, latency_runtime
from ..surgery.extract import extract
from ..utils.files import user_cache, write_text
from ..utils.timing import busy_cores, torch_threads
from ..utils.user_model import real_copy
from .latency_model import (
    BLOCKWISE,
    TERMS,
    Conditions,
    LatencyModel,
    LayerSpec,
    Predictor,
    Table,
    Terms,
    Widths,
    fit,
    from_dict,
    read_model,
    signature,
)
from .stopwatch import passes, rehearse, time_against_dense, time_layers

SHARES = (0.75, 0.5, 0.25)  # of the filters, or of the branches, kept in the networks that the model is fitted to
SWEEPS = 3  # measurements of every layer, far apart in time, because other load on the machine comes in bursts
Report = Callable[[str], None]
Wanted = Mapping[LayerSpec, Sequence[Widths]]


@dataclass(frozen=True)
class Timed:
    """A network that was cut and timed, with the terms that predict its time."""

    way: str
    share: float
    terms: dict[str, Terms]
    seconds: dict[str, float]  # measured seconds, per form


def measure_layers(table: Table, wanted: Wanted, conditions: Conditions, report: Report) -> int:
    """Measure the layers that the table lacks, add them to it, and return their number."""
    missing = table.missing(wanted)
    count = sum(map(len, missing.values()))
    if not count:
        return 0
    report(f"measuring {count} layers in {conditions.told()}")
    least: dict[LayerSpec, dict[Widths, float]] = {site: {} for site in missing}
    with torch_threads(conditions.threads):
        for _ in range(SWEEPS):
            for site, widths in missing.items():
                times = time_layers(conditions.runtime, site, widths, conditions.batch, conditions.threads)
                least[site] = {pair: min(s, least[site].get(pair, s)) for pair, s in times.items()}
    for site, seconds in least.items():
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
    """Extract and time pruned networks of `model`, and return a latency model that is fitted to the times."""
    predictor = Predictor(graph, table, conditions.batch)
    found: list[tuple[str, float, dict[str, Mask], dict[str, float]]] = []
    dense_seconds = float("inf")
    with torch_threads(conditions.threads):
        timer = Timer(model, example, graph, conditions)
        for way, share, keep in samples(graph):
            report(f"timing {way}, {share:.0%} left")
            ratios, dense_now = timer.joins(keep)
            found.append((way, share, keep, ratios))
            dense_seconds = min(dense_seconds, dense_now)
    cut: list[Timed] = []
    for way, share, keep, ratios in found:
        terms = predictor.terms_of(lay_out(graph, graph.settle(keep))).terms
        seconds = {form: ratio * dense_seconds for form, ratio in ratios.items()}
        cut.append(Timed(way, share, {form: terms[form] for form in seconds}, seconds))
    dense_terms = predictor.terms_of(lay_out(graph, {})).terms["zeros"]
    dense = Timed("dense", 1.0, {"zeros": dense_terms}, {"zeros": dense_seconds})
    networks = _leave_one_out(cut, dense)
    calibration: dict[str, Any] = {"networks": networks}
    if networks:
        errors = [abs(one["foretold"] / one["measured"] - 1) for one in networks]
        calibration |= {"mean_error": statistics.fmean(errors), "worst_error": max(errors)}
    return LatencyModel(graph, table, conditions, dense_seconds, _fitted([*cut, dense]), calibration)


class Timer:
    """Extracts networks and times them in alternation with the dense one."""

    def __init__(self, model: nn.Module, example: Any, graph: ChannelGraph, conditions: Conditions) -> None:
        self.model, self.example, self.graph, self.conditions = model, example, graph, conditions
        self.dense = next(iter(self._passes(model).values()))

    def joins(self, keep: dict[str, Mask]) -> tuple[dict[str, float], float]:
        """Time the network that keeps these filters.

        Returns its time relative to the dense network for each way of joining branches, in the fastest form of each
        way, and the seconds of the dense network in the same session.
        """
        small = extract(self.model, self.example, Plan.from_masks(self.graph.settle(keep)), self.graph)
        found, dense = time_against_dense(self.dense, self._passes(small))
        least: dict[str, float] = {}
        for name, seconds in found.items():
            join = name.partition(" ")[0]
            least[join] = min(seconds / dense, least.get(join, float("inf")))
        return least, dense

    def _passes(self, network: nn.Module) -> dict[str, Callable[[], Any]]:
        joins = RUNTIMES[latency_runtime(self.conditions.runtime)[0]].joins or {}
        forms = {f"{join} {form}": form for join, group in joins.items() for form in group}
        return passes(network, self.example, forms, self.conditions)


def samples(graph: ChannelGraph) -> list[tuple[str, float, dict[str, Mask]]]:
    """Return (way, share kept, masks) of the networks to time: every way of pruning possible, at each of SHARES."""
    found = []
    for way in COUPLINGS:
        constraints = constraints_for(graph, Constraints(), way)
        if constraints is None:
            continue
        scores = constraints.level_branches(synthetic_scores(graph, constraints))
        selector = Selector(graph, constraints=constraints)
        for share in SHARES:
            # The threshold that keeps `share` of the filters that this way of pruning can remove.
            inside = {n for branch in constraints.branches for n in branch} or set(scores)
            level = float(np.quantile(np.concatenate([scores[n] for n in inside]), 1 - share))
            found.append((way, share, selector.choose(scores, level).masks))
    return found


def _fitted(timed: Sequence[Timed]) -> dict[str, float]:
    rows = [terms for one in timed for terms in one.terms.values()]
    seconds = [one.seconds[form] for one in timed for form in one.terms]
    # The prior: total time is proportional to the sum of the layer times. The median ratio absorbs a change of the
    # processor's clock frequency since the layers were measured.
    usual = statistics.median(s / row["layers"] for s, row in zip(seconds, rows, strict=True))
    return fit(rows, seconds, TERMS, {"layers": usual})


def _leave_one_out(cut: Sequence[Timed], dense: Timed) -> list[dict[str, Any]]:
    """Return each cut network's measured time, and its prediction by a fit to the others, relative to dense."""
    found = []
    for one in cut:
        coefficients = _fitted([*(other for other in cut if other is not one), dense])
        predicted = [
            sum(coefficients[name] * value for name, value in terms.items())
            for terms in (dense.terms["zeros"], *one.terms.values())
        ]
        found.append(
            {
                "way": one.way,
                "share": one.share,
                "measured": min(one.seconds.values()) / dense.seconds["zeros"],
                "foretold": min(predicted[1:]) / predicted[0],
                "seconds": dict(one.seconds),
                "terms": one.terms,
            }
        )
    return found


BUSY = 0.5  # number of cores that other processes use, above which timings are unreliable


def conditions_here(runtime: str, batch: int, threads: int) -> Conditions:
    """Return the conditions of a measurement on this machine."""
    name, device = latency_runtime(runtime)
    return Conditions(runtime, batch, threads, RUNTIMES[name].facts(device))


def comparable_conditions(one: Conditions, other: Conditions) -> bool:
    """Return True if times under both conditions are comparable; an unknown fact (None) makes them different."""
    return one == other and None not in other.machine.values()


def load_or_calibrate(
    network: nn.Module,
    example: Any,
    conditions: Conditions,
    *,
    ignore: tuple[str, ...] = (),
    fresh: bool = False,
    report: Report = lambda line: None,
) -> LatencyModel:
    """Return the latency model of a network under these conditions, from the cache or measured now.

    If `fresh` is true, everything is measured again. Calls `report` with a warning if other processes use more than
    `BUSY` cores now, or did when the cached model was measured.
    """
    graph = trace(network, example, ignore=ignore)
    mine = signature(Predictor(graph, Table(), conditions.batch))
    kept = cache_folder() / f"latency-{_digest(conditions)}-{mine}.json"
    if kept.is_file() and not fresh:
        with suppress(PruningError):  # A file of another version, or a damaged one, is measured again.
            known = read_model(kept, graph)
            if (known.calibration.get("load") or 0.0) > BUSY:
                report(
                    "the cached latency model was measured while the machine was busy; `sbf latency --again` "
                    "measures it anew"
                )
            return known
    rehearse(network, example, conditions)
    busy = busy_cores()
    if busy is not None and busy > BUSY:
        report(f"the machine is busy (load {busy:.1f}); times measured now are unreliable")
    table = _layers(conditions, fresh)
    wanted = Predictor(graph, table, conditions.batch).wanted(lay_out(graph, Selector(graph).least()))
    if measure_layers(table, wanted, conditions, report):
        _keep_layers(table, conditions, fresh)
    found = calibrate(network, example, graph, table.of(wanted), conditions, report)
    found.calibration["load"] = busy
    found.write(kept)
    return found


def measure_latency_model(
    network: nn.Module,
    images: Tensor,
    graph: ChannelGraph,
    conditions: Conditions,
    *,
    ignore: tuple[str, ...] = (),
    report: Report = lambda line: None,
) -> LatencyModel:
    """Like `load_or_calibrate`, for a network on any device: measure a copy and bind the model to `graph`."""
    dense = real_copy(network).cpu().eval()
    found = load_or_calibrate(dense, images[:1].cpu(), conditions, ignore=ignore, report=report)
    return from_dict(found.to_dict(), graph)


def cache_folder() -> Path:
    """Return the folder of cached measurements: $SBF_CACHE, or the user's cache."""
    given = os.environ.get("SBF_CACHE")
    return Path(given).expanduser() if given else user_cache()


def _layers(conditions: Conditions, fresh: bool) -> Table:
    blocks = conditions.runtime in BLOCKWISE
    if not fresh:
        with suppress(OSError, ValueError, TypeError, AttributeError):  # if missing or damaged, start empty
            return Table.from_dict(json.loads(_layers_file(conditions).read_text("utf-8")), blocks)
    return Table(blocks=blocks)


def _keep_layers(table: Table, conditions: Conditions, fresh: bool) -> None:
    """Merge the table into the file as it is now: another process may have added layers since it was read."""
    stored = _layers(conditions, fresh=False)
    for site, seconds in table.points.items():
        if fresh:  # Times of one layer are compared with each other, so old and new ones must not mix.
            stored.points.pop(site, None)
        stored.add(site, seconds)
    write_text(_layers_file(conditions), json.dumps(stored.to_dict()) + "\n")


def _layers_file(conditions: Conditions) -> Path:
    return cache_folder() / f"layers-{_digest(conditions)}.json"


def _digest(conditions: Conditions) -> str:
    facts = [conditions.runtime, conditions.batch, conditions.threads, sorted(conditions.machine.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


# Ways of pruning, which differ widely in time at equal MACs, with the `couple` setting of each: "filters" of every
# layer independently, "streams" (layers that are added up keep the same filters, so the residual stream itself gets
# narrower), or "blocks" (whole residual branches).
COUPLINGS: dict[str, tuple[str, ...]] = {"filters": (), "streams": ("streams",), "blocks": ("blocks",)}


@dataclass(frozen=True)
class CouplingChoice:
    """The chosen way of pruning, and the share of the MACs that each way keeps (None: cannot meet the budget)."""

    way: str
    macs: Mapping[str, float | None]

    def told(self) -> str:
        """Describe the choice in one line."""
        shares = {name: "cannot reach the target" if s is None else f"{s:.1%}" for name, s in self.macs.items()}
        others = [f"{name} {share}" for name, share in shares.items() if name != self.way]
        own = self.macs.get(self.way)
        kept = "" if own is None else f", which keeps {own:.1%} of the MACs"
        return f"way: {self.way}{kept}" + (f" ({', '.join(others)})" if others else "")

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible values."""
        return {"way": self.way, "macs_left": dict(self.macs)}


def constraints_for(graph: ChannelGraph, constraints: Constraints, way: str) -> ResolvedConstraints | None:
    """Return the constraints of a way of pruning, or None if the network has nothing that it could couple."""
    try:
        found = resolve(replace(constraints, couple=COUPLINGS[way]), graph)
    except PruningError:
        return None
    return found if way == "filters" or found.groups or found.branches else None


def choose_coupling(
    graph: ChannelGraph,
    clock: LatencyModel,
    budget: Budget,
    constraints: Constraints,
    stored: FileSize | None = None,
) -> CouplingChoice:
    """Choose the way of pruning that keeps the most MACs within the budget.

    There are no trained scores yet, so synthetic scores remove equal shares of all layers, and only the latency
    model matters. Ties go to the first way in `COUPLINGS`; if no way meets the budget, the choice is "filters".
    """
    found: dict[str, float | None] = {}
    for way in COUPLINGS:
        resolved = constraints_for(graph, constraints, way)
        if resolved is None:
            continue
        try:
            selector = Selector(graph, budget, resolved, clock, stored)
            found[way] = selector.choose(synthetic_scores(graph, resolved)).usage["macs"] / selector.whole["macs"]
        except PruningError:
            found[way] = None
    reached = {way: share for way, share in found.items() if share is not None}
    return CouplingChoice(max(reached, key=reached.__getitem__) if reached else "filters", found)


def synthetic_scores(graph: ChannelGraph, constraints: ResolvedConstraints) -> dict[str, Values]:
    """Return synthetic scores with which any threshold removes the same share of every layer.

    If branches are coupled, they have the lowest scores, in an order that is spread evenly over the network.
    """
    rng = np.random.default_rng(0)
    scores: dict[str, Values] = {}
    for name, layer in graph.layers.items():
        scores[name] = (rng.permutation(layer.filters) + 0.5) / layer.filters
    for group in constraints.groups:
        scores |= dict.fromkeys(group, scores[group[0]])
    if constraints.branches:
        inside = {name for branch in constraints.branches for name in branch}
        scores |= {name: 2 + values for name, values in scores.items() if name not in inside}
    for number, branch in enumerate(constraints.branches, start=1):
        share = _scattered(number)
        scores |= {name: share + 1e-3 * (scores[name] - 0.5) for name in branch}
    return scores


def _scattered(number: int) -> float:
    """Return an element of the van der Corput sequence (bits mirrored), which spreads evenly between 0 and 1.

    >>> [_scattered(n) for n in (1, 2, 3, 4)]
    [0.5, 0.25, 0.75, 0.125]
    """
    return int(f"{number:b}"[::-1], 2) / 2 ** number.bit_length()

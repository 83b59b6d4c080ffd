"""From a table of layers to a model that is right about whole networks, and says how right.

A network enters; its layers are measured, then some networks that are really cut from it, in all three ways and
several sizes, each in its compact forms and in turns with the dense one; a `LatencyModel` leaves with the
coefficients that fit them.  Its error is stated for networks it has not seen: each is foretold by a fit to all the
others.

Where knowledge of a network's time comes from: a file, the cache, or the clock.

A network and conditions enter; a `LatencyModel` leaves.  What was measured is kept in the user's cache, layers by
machine, whole networks by machine and network, so nothing is measured twice.  What holds: a file is whole or not
there, and one that does not fit is measured anew.

Three ways to take filters away, worth very different time at equal MACs: which keeps the most in a given time.

A graph, a clock and limits enter; a way leaves, with what each would keep: "filters" of every layer by itself,
"streams" (layers that are added up keep the same ones, so the stream gets narrower), or "blocks" (whole residual
branches).  Nothing is trained yet, so the scores are made up, alike for all layers; what holds: a way that cannot
come to what is asked for is not chosen, and the choice follows from the clock alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..budget.constraints import Couple, Guards, with_coupled
from ..budget.controller import Aim
from ..budget.search import Values
from ..budget.targets import Budget, Stored
from ..errors import PruningError
from ..graph.build import trace
from ..graph.channel_graph import ChannelGraph
from ..graph.cost import lay_out
from ..graph.nodes import Mask
from ..plan import Plan
from ..surgery.extract import extract
from ..utils.files import user_cache, write_text
from ..utils.timing import load, using_threads
from ..utils.user_model import real_copy
from .latency_model import (
    BLOCKWISE,
    TERMS,
    Conditions,
    LatencyModel,
    Predictor,
    Terms,
    fit,
    from_dict,
    read_model,
    signature,
)
from .latency_table import Site, Table, Widths
from .runtimes import RUNTIMES
from .stopwatch import passes, rehearse, time_beside, time_layers

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


BUSY = 0.5  # of a core: more than that is somebody else's work


def here(runtime: str, batch: int, threads: int) -> Conditions:
    """The conditions on this machine."""
    return Conditions(runtime, batch, threads, RUNTIMES[runtime].facts())


def same_place(one: Conditions, other: Conditions) -> bool:
    """Would both measure the same?"""
    return one == other and None not in other.machine.values()


def get_model(
    network: nn.Module,
    example: Any,
    conditions: Conditions,
    *,
    ignore: tuple[str, ...] = (),
    fresh: bool = False,
    report: Report = lambda line: None,
) -> LatencyModel:
    """What is known of a network under these conditions, from the cache or measured now."""
    graph = trace(network, example, ignore=ignore)
    mine = signature(Predictor(graph, Table(), conditions.batch))
    kept = cache_folder() / f"latency-{_digest(conditions)}-{mine}.json"
    if kept.is_file() and not fresh:
        try:
            known = read_model(kept, graph)
            if (known.calibration.get("load") or 0.0) > BUSY:
                report("this clock was measured while the machine was busy; `sbf latency --again` measures it anew")
            return known
        except PruningError:  # written by another version, or damaged: it is only a cache
            pass
    rehearse(network, example, conditions)
    busy = load()
    if busy is not None and busy > BUSY:
        report(f"the machine is busy (load {busy:.1f}); times that are taken now will be worth less")
    table = _layers(conditions, fresh)
    wanted = Predictor(graph, table, conditions.batch).wanted(lay_out(graph, Aim(graph).least()))
    if measure_layers(table, wanted, conditions, report):
        _keep_layers(table, conditions, fresh)
    found = calibrate(network, example, graph, table.of(wanted), conditions, report)
    found.calibration["load"] = busy
    found.write(kept)
    return found


def clock_here(
    network: nn.Module,
    images: Tensor,
    graph: ChannelGraph,
    conditions: Conditions,
    *,
    ignore: tuple[str, ...] = (),
    report: Report = lambda line: None,
) -> LatencyModel:
    """The same for a network that is in use, wherever it is: a clock for its own graph."""
    dense = real_copy(network).cpu().eval()
    found = get_model(dense, images[:1].cpu(), conditions, ignore=ignore, report=report)
    return from_dict(found.to_dict(), graph)


def cache_folder() -> Path:
    """Where measurements are kept: $SBF_CACHE, or the user's cache."""
    given = os.environ.get("SBF_CACHE")
    return Path(given).expanduser() if given else user_cache()


def _layers(conditions: Conditions, fresh: bool) -> Table:
    blocks = conditions.runtime in BLOCKWISE
    path = _layers_file(conditions)
    if fresh or not path.is_file():
        return Table(blocks=blocks)
    try:
        return Table.from_dict(json.loads(path.read_text("utf-8")), blocks)
    except (OSError, ValueError, TypeError, AttributeError):
        return Table(blocks=blocks)


def _keep_layers(table: Table, conditions: Conditions, fresh: bool) -> None:
    """Write the layers beside those there now: another process may have kept some since ours were read."""
    held = _layers(conditions, fresh=False)
    for site, seconds in table.points.items():
        if fresh:  # times of one layer are compared with each other: none from before stays among them
            held.points.pop(site, None)
        held.add(site, seconds)
    write_text(_layers_file(conditions), json.dumps(held.to_dict()) + "\n")


def _layers_file(conditions: Conditions) -> Path:
    return cache_folder() / f"layers-{_digest(conditions)}.json"


def _digest(conditions: Conditions) -> str:
    held = [conditions.runtime, conditions.batch, conditions.threads, sorted(conditions.machine.items())]
    return hashlib.sha256(json.dumps(held).encode()).hexdigest()[:12]


WAYS: dict[str, Couple] = {"filters": "none", "streams": "streams", "blocks": "blocks"}


@dataclass(frozen=True)
class Chosen:
    """The way that was chosen, and what each would leave of the MACs (None: it does not reach the target)."""

    way: str
    macs: Mapping[str, float | None]

    def told(self) -> str:
        """In one line."""
        others = [
            f"{name} {'cannot reach it' if share is None else f'{share:.1%}'}"
            for name, share in self.macs.items()
            if name != self.way
        ]
        own = self.macs.get(self.way)
        kept = "" if own is None else f", which keeps {own:.1%} of the MACs"
        return f"way: {self.way}{kept}" + (f" ({', '.join(others)})" if others else "")

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"way": self.way, "macs_left": dict(self.macs)}


def guarded(graph: ChannelGraph, guards: Guards, way: str) -> Guards | None:
    """The guards of a way; None where the network has nothing that it could couple."""
    try:
        found = with_coupled(guards, graph, WAYS[way])
    except PruningError:
        return None
    return found if way == "filters" or found.groups or found.branches else None


def choose_way(
    graph: ChannelGraph, clock: LatencyModel, budget: Budget, guards: Guards, stored: Stored | None = None
) -> Chosen:
    """The way that keeps the most MACs within the budget; ties and targets none reaches go to single filters."""
    found: dict[str, float | None] = {}
    for way in WAYS:
        held = guarded(graph, guards, way)
        if held is not None:
            found[way] = _left(graph, clock, budget, held, stored)
    reached = {way: share for way, share in found.items() if share is not None}
    return Chosen(max(reached, key=reached.__getitem__) if reached else "filters", found)


def made_up(graph: ChannelGraph, guards: Guards) -> dict[str, Values]:
    """Scores that take as large a part of every layer as of any other, and of branches every other first."""
    rng = np.random.default_rng(0)
    scores: dict[str, Values] = {
        name: (rng.permutation(layer.filters) + 0.5) / layer.filters for name, layer in graph.layers.items()
    }
    for group in guards.groups:
        scores |= dict.fromkeys(group, scores[group[0]])
    if guards.branches:
        inside = {name for branch in guards.branches for name in branch}
        scores |= {name: 2 + values for name, values in scores.items() if name not in inside}
    for place, branch in enumerate(guards.branches):
        share = _scattered(place + 1)
        scores |= {name: share + 1e-3 * (scores[name] - 0.5) for name in branch}
    return scores


def _left(
    graph: ChannelGraph, clock: LatencyModel, budget: Budget, guards: Guards, stored: Stored | None
) -> float | None:
    try:
        aim = Aim(graph, budget, guards, clock, stored)
        usage = aim.choose(made_up(graph, guards)).usage
    except PruningError:
        return None
    return usage["macs"] / aim.whole["macs"]


def _scattered(number: int) -> float:
    """Numbers in a row, scattered evenly between 0 and 1 (the bits of each, mirrored).

    >>> [_scattered(n) for n in (1, 2, 3, 4)]
    [0.5, 0.25, 0.75, 0.125]
    """
    share, part = 0.0, 0.5
    while number:
        share, number, part = share + part * (number & 1), number >> 1, part / 2
    return share

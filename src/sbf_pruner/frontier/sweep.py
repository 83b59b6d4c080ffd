"""One set of scores, many sizes: what each would leave, and how good it is before any retraining.

A scored network and the sizes asked for enter; plain data leaves, all of it JSON.  For each size the filters
are chosen as a run with that budget would choose them, the network is really cut, its batch-norm statistics
are taken anew on training images, and it is judged.  A size that cannot be reached is listed with the smallest
that can; a time is the one that a clock foretells.  What holds: nothing is trained, and the run stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..budget.aim import Aim
from ..budget.landing import Masks
from ..budget.targets import MICROSECONDS, Budget, Usage
from ..errors import PruningError, RunError, nearest
from ..figures import rounded
from ..graph.costs import lay_out
from ..latency.model import LatencyModel
from ..measuring import measure
from ..plan import Plan
from ..stopwatch.runtimes import RUNTIMES
from ..stopwatch.source import clock_here, here
from ..stored import Stored, saved_bytes
from ..surgery import extract
from ..training.engine import Engine
from ..training.machine import cpu_threads
from .scored import Scored, find_run, read_scored

USUAL = ("0.9", "0.8", "0.7", "0.6", "0.5", "0.4", "0.3", "0.2", "0.1")
BATCHES = 32
RUNTIME, BATCH = "onnxruntime", 64  # of a clock that is measured now, where only one of them is given
RESOURCES = tuple(field.name for field in fields(Budget))
_HELD = {**{name: name for name in RESOURCES}, "latency": "latency_ms"}  # where a figure is in a point
NEAR = 1.0  # points of accuracy that count as no loss worth speaking of
Report = Callable[[str], None]
Point = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What is asked: of which resource how much is to be left, and how it is tried."""

    of: str = "macs"
    at: Sequence[str] = USUAL
    batches: int = BATCHES
    device: str | None = None
    runtime: str | None = None
    """of a clock to be measured now; None: the run's own"""
    batch: int | None = None
    trust: bool = False
    """import the code that the run's recipe names"""

    def __post_init__(self) -> None:
        if self.of not in RESOURCES:
            raise PruningError(f"--of: no resource is called {self.of!r}; {nearest(self.of, RESOURCES)}")
        if self.batches < 1:
            raise PruningError(f"--batches counts batches of training images: give at least 1, not {self.batches}")
        if self.of != "latency" and self.measures:
            raise PruningError("--runtime and --batch say whose time --of latency means; leave them out")
        if self.runtime is not None and self.runtime not in RUNTIMES:
            raise PruningError(f"--runtime: none is called {self.runtime!r}; {nearest(self.runtime, RUNTIMES)}")
        if self.batch is not None and self.batch < 1:
            raise PruningError(f"--batch counts the samples of a pass: give at least 1, not {self.batch}")
        if not self.at:
            raise PruningError("--at: name at least one size, such as 0.5,0.3")
        self.sizes()

    @property
    def measures(self) -> bool:
        """Is a clock to be measured, whether or not the run has one?"""
        return self.runtime is not None or self.batch is not None

    def sizes(self) -> list[float]:
        """The sizes as numbers: up to 1 a part, above 1 an amount."""
        read = (getattr(Budget(**{self.of: text}), self.of) for text in self.at)
        return list(dict.fromkeys(read))


def frontier(
    path: str | Path, request: Request | None = None, report: Report = lambda line: None
) -> dict[str, Any]:
    """Accuracy against size for the run in a folder."""
    request = request or Request()
    device = find_run(path, request.device)[-1]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # the caller's streams stay as they are
        report("reading the run")
        scored = read_scored(path, request.device, trust=request.trust)
        with cpu_threads(scored.recipe.threads):
            return _Sweep(scored, request, report).run()


class _Sweep:
    def __init__(self, scored: Scored, request: Request, report: Report) -> None:
        self.scored, self.request, self.report = scored, request, report
        pruner = scored.networks.pruner
        self.graph, self.guards, self.inputs = pruner.graph, pruner.aim.guards, pruner.example_inputs
        self.stored = Stored(scored.networks.bare_copy(), self.inputs, self.graph)
        self.free = Aim(self.graph, None, self.guards, stored=self.stored)
        self.clock = self._clock()
        self.tried: dict[Plan, Point] = {}
        self.smallest: Point | None = None

    def run(self) -> dict[str, Any]:
        scored = self.scored
        self.dense = self._figures(scored.networks.bare_copy(), self.graph.all_filters())
        whole = self._judged("all filters", self.graph.all_filters())
        warm = [record for record in scored.records if record["phase"] == "warmup"]
        summary = scored.summary
        points = [self._point(size) for size in sorted(self.request.sizes(), key=self._share, reverse=True)]
        own = self._judged("the run's own filters", scored.plan.masks(self.graph))
        own["finetuned_accuracy"] = scored.accuracy_of(_told(summary["pruned"])) if summary else None
        batches = min(self.request.batches, len(scored.train))
        result = {
            "run": os.fspath(scored.folder.path),
            "name": scored.recipe.name,
            "seed": scored.recipe.seed,
            "finished": summary is not None,
            "of": self.request.of,
            "judged_on": scored.judged_on,
            "judged_images": scored.judged.count,
            "recalibrated_on": {"batches": batches, "images": batches * scored.train.batch_size},
            "clock": self._clock_told(),
            "dense": {
                **whole,
                "warmup_accuracy": scored.accuracy_of(warm[-1]) if warm else None,
                "control_accuracy": scored.accuracy_of(_told(summary["dense"])) if summary else None,
            },
            "points": points,
            "own": own,
            "smallest": self.smallest,
        }
        return {**result, "said": _said(result)}

    def _point(self, size: float) -> Point:
        """What one size leaves."""
        asked: Point = {"asked": size, "share": self._share(size)}
        budget = Budget(**{self.request.of: size})
        aim = Aim(self.graph, budget, self.guards, self.clock, self.stored, refuse=False)
        if budget.asked and not aim.reachable:
            self.smallest = self.smallest or self._judged("the smallest", aim.smallest)
            return {**asked, "reached": False}
        masks = aim.choose(self.scored.scores).masks if budget.asked else self.graph.all_filters()
        return {**asked, "reached": True, **self._judged(f"{rounded(100 * asked['share'])}%", masks)}

    def _judged(self, name: str, masks: Masks) -> Point:
        """A choice of filters cut for real, recalibrated and judged; equal choices once."""
        masks = self.graph.settle(masks)
        plan = Plan.from_masks(masks)
        if plan not in self.tried:
            self.report(f"judging {name}")
            scored = self.scored
            small = extract(scored.networks.dense, self.inputs, plan, self.graph)
            engine = Engine(small, scored.device, order=scored.networks.order)
            engine.recalibrate(scored.train, 0, self.request.batches)
            self.tried[plan] = {
                **self._figures(small, masks),
                "accuracy": engine.evaluate(scored.judged).accuracy,
            }
        found = self.tried[plan]
        left = {key: found[held] / self.dense[held] for key, held in _HELD.items() if held in found}
        return {**found, "left": left}

    def _figures(self, network: nn.Module, masks: Masks) -> Point:
        cost = measure(network, self.scored.networks.images[:1])
        whole = all(mask.all() for mask in masks.values())
        return {
            "macs": cost.macs,
            "params": cost.params,
            "size": self.stored.dense if whole else saved_bytes(network, self.inputs, Plan.from_masks(masks)),
            "filters": sum(int(mask.sum()) for mask in masks.values()),
            **({} if self.clock is None else {"latency_ms": 1e3 * self.clock.seconds(lay_out(self.graph, masks))}),
        }

    def _count(self, masks: Masks) -> Usage:
        counted = self.free.count(masks)
        if self.clock is None:
            return counted
        return {**counted, "latency": MICROSECONDS * self.clock.seconds(lay_out(self.graph, masks))}

    def _share(self, size: float) -> float:
        whole = self._count({})[self.request.of]
        return size if size <= 1 else min(size / whole, 1.0)

    def _clock(self) -> LatencyModel | None:
        """One that is measured now, if asked for; else the run's own, if it has one."""
        networks, asked = self.scored.networks, self.request
        if asked.measures:
            place = here(asked.runtime or RUNTIME, asked.batch or BATCH, torch.get_num_threads())
            ignore = self.scored.recipe.guards.ignore
            network = networks.bare_copy()
            return clock_here(network, networks.images, self.graph, place, ignore=ignore, report=self.report)
        if networks.timed is not None:
            return networks.timed.clock
        if asked.of == "latency":
            raise RunError(
                f"the run in {self.scored.folder.path} has no clock, because it was asked for no time; have one "
                f"measured here with --runtime ({', '.join(RUNTIMES)}) and --batch"
            )
        return None

    def _clock_told(self) -> Point | None:
        """Whose time it is, how well it is foretold, and what the run's own network really took."""
        if self.clock is None:
            return None
        held, known = self.clock.conditions, (self.scored.summary or {}).get("latency", {})
        return {
            "runtime": held.runtime,
            "batch": held.batch,
            "threads": held.threads,
            "machine": dict(held.machine),
            "mean_error": self.clock.calibration.get("mean_error"),
            "worst_error": self.clock.calibration.get("worst_error"),
            "measured": None if self.request.measures else known.get("measured"),
        }


def _told(part: dict[str, Any]) -> dict[str, Any]:
    """A summary's part in the words of a record."""
    return {**part, "test_accuracy": part["accuracy"]}


def _said(result: dict[str, Any]) -> str:
    """One sentence: how far down it costs little."""
    reached = [point for point in result["points"] if point["reached"]]
    if not reached:
        return "None of these sizes can be reached."
    cut = [result["dense"], result["own"], *reached]
    best = max(point["accuracy"] for point in cut)
    near = [point for point in cut if point["accuracy"] >= best - NEAR]
    timed = result["of"] == "latency"
    least = min((point["left"] for point in near), key=lambda left: float(left["latency" if timed else "macs"]))
    macs = f"{rounded(100 * least['macs'], 0)} % of the MACs"
    best_said = f"of these within {NEAR:g} point of the best ({rounded(best, 2)} %)"
    if timed:
        time = f"{rounded(100 * least['latency'], 0)} % of the dense network's time, as foretold"
        return f"Before any retraining, the quickest {best_said} takes {time} ({macs})."
    params = f"{rounded(100 * least['params'], 0)} % of the parameters"
    return f"Before any retraining, the smallest {best_said} has {macs} ({params})."

"""Latency target of a run: the latency model, its correction by measurements, and the way of removing filters.

Model and way (`latency.way`) are fixed before training; by default the way is the one that keeps the most MACs.
After the last landing the extracted network is timed alternately with the dense one, the latency model is
corrected, and the filters are chosen again until the measured time is close to the target. Every measurement is
written to `latency.json` before it is used, so a run that is killed and resumed chooses the same filters. On a
machine other than the one the model was measured on, nothing is timed, and the summary has no measured time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..budget.constraints import Constraints
from ..budget.file_size import FileSize
from ..budget.targets import LATENCY_TOLERANCE, MICROSECONDS
from ..errors import PruningError, RecipeError, RunError
from ..graph.channel_graph import ChannelGraph
from ..graph.cost import lay_out
from ..measurement.calibration import (
    COUPLINGS,
    CouplingChoice,
    choose_coupling,
    comparable_conditions,
    conditions_here,
    measure_latency_model,
)
from ..measurement.latency_model import LatencyModel, from_dict, read_model
from ..measurement.stopwatch import PlanTimer
from ..plan import Plan
from ..pruner import Pruner
from ..runtimes.table import LATENCY_RUNTIMES
from ..scores.config import Scores
from ..utils.files import read_text, write_text
from ..utils.user_model import real_copy
from .recipe import Recipe
from .run_folder import REMEDY

TOLERANCE = 0.015  # relative error of the time below which the filters are not chosen again
# Largest factor by which one measurement corrects the latency model; a larger difference is measured again.
MAX_CORRECTION = 1.5
MAX_LANDINGS = 5  # maximum number of landings
AS_COUPLED = "as coupled"  # the way if the recipe itself couples layers or scores blocks

_log = logging.getLogger(__name__)
TimePlan = Callable[[Plan], float]


class LatencyTarget:
    """Latency model, chosen way of removing filters, and measurements of a run with a latency target."""

    def __init__(
        self, clock: LatencyModel, chosen: CouplingChoice, rounds: list[dict[str, Any]] | None = None
    ) -> None:
        self.clock, self.chosen = clock, chosen
        # one record per measurement: digest of the plan, predicted and measured time relative to the dense network
        self.rounds = rounds or []
        self._file: Path | None = None

    @classmethod
    def of(
        cls,
        network: nn.Module,
        images: Tensor,
        graph: ChannelGraph,
        recipe: Recipe,
        written: Path | None,
        constraints: Constraints,
    ) -> LatencyTarget:
        """Read the latency target of a resumed run from the file `written` if it exists, otherwise create one.

        A new one reads the latency model from `latency.table` if set, otherwise from the cache, or measures it.
        Raises a RecipeError if `latency.way` is set although the recipe couples layers or scores blocks.
        """
        config, budget = recipe.latency, recipe.budget
        coupled = recipe.constraints.couple or recipe.scores.blocks
        if config.way != "auto" and coupled:
            others = "constraints.couple or scores.blocks"
            raise RecipeError(f"latency.way: cannot be combined with {others}; set only one of them")
        if written is not None and written.is_file():
            return cls._read(written, graph)
        if config.table:
            clock = read_model(os.path.expanduser(config.table), graph)
        else:
            here = conditions_here(config.runtime, config.batch, config.threads or torch.get_num_threads())
            ignore = recipe.constraints.ignore
            clock = measure_latency_model(network, images, graph, here, ignore=ignore, report=_log.info)
        if coupled or config.way != "auto":
            return cls(clock, CouplingChoice(AS_COUPLED if coupled else config.way, {}))
        stored = FileSize(network, images[:2], graph) if budget.size != 1 else None
        chosen = choose_coupling(graph, clock, budget, constraints, stored)
        _log.info("%s", chosen.told())
        return cls(clock, chosen)

    @classmethod
    def _read(cls, path: Path, graph: ChannelGraph) -> LatencyTarget:
        try:
            written = json.loads(read_text(path))
            chosen = CouplingChoice(written["chosen"]["way"], dict(written["chosen"]["macs_left"]))
            rounds = [{key: one[key] for key in ("plan", "foretold", "measured")} for one in written["rounds"]]
        except (ValueError, LookupError, TypeError):
            raise RunError(f"{path} is damaged; {REMEDY}") from None
        return cls(from_dict(written, graph, str(path)), chosen, rounds)

    def keep_in(self, path: Path) -> None:
        """Write the state to `path`, now and after every measurement."""
        self._file = path
        self._write()

    def correct_by_measurement(self, pruner: Pruner, timer: TimePlan) -> None:
        """Time the extracted network, correct the latency model and choose filters, up to `MAX_LANDINGS` times.

        Ends early if the measured time is within `TOLERANCE` of the target, if a plan repeats, or if the network is
        faster and a limit other than latency keeps it from being larger. The gates are then set to the plan whose
        time is closest to the target. A clearly missed target is logged as a warning.
        """
        limits = pruner.selector.limits
        assert limits is not None
        target = limits.most["latency"] / limits.whole["latency"]
        tried: dict[str, tuple[float, Plan]] = {}
        for _ in range(MAX_LANDINGS):
            plan = pruner.plan()
            name = _digest(plan)
            if name in tried:
                break
            predicted = self.clock.ratio(plan.masks(pruner.graph))
            measured = self._measure(name, predicted, plan, timer)
            tried[name] = measured / target - 1, plan
            if abs(tried[name][0]) <= TOLERANCE or (measured < target and _other_limit_is_tighter(pruner, plan)):
                break
            self.clock.correction *= min(max(measured / predicted, 1 / MAX_CORRECTION), MAX_CORRECTION)
            try:
                pruner.land()
            except PruningError:  # Even the smallest network is predicted to be too slow: time that one.
                pruner.gate(Plan.from_masks(pruner.selector.smallest))
        off, best = min(tried.values(), key=lambda pair: abs(pair[0]))
        pruner.gate(best)
        miss = ""
        if off > LATENCY_TOLERANCE:
            miss = f"misses the latency target by {100 * off:.0f}%"
        elif off < -LATENCY_TOLERANCE and not _other_limit_is_tighter(pruner, best):
            miss = f"is {-100 * off:.0f}% faster than the latency target"
        if miss:
            _log.warning("the pruned network %s; no other plan came closer", miss)

    def summary(self, pruner: Pruner, plan: Plan) -> dict[str, Any]:
        """Return the latency entry of `summary.json`.

        Resets the correction of the latency model, so that "foretold" is the prediction without measurements.
        """
        limits, conditions = pruner.selector.limits, self.clock.conditions
        assert limits is not None
        self.clock.correction = 1.0
        layout = lay_out(pruner.graph, plan.masks(pruner.graph))
        measured = [one["measured"] for one in self.rounds if one["plan"] == _digest(plan)]
        errors = {k: v for k, v in self.clock.calibration.items() if k.endswith("_error")}
        return {
            "asked": limits.most["latency"] / limits.whole["latency"],
            "foretold": self.clock.seconds(layout) / self.clock.dense_seconds,
            "measured": measured[-1] if measured else None,
            "dense_ms": 1e3 * self.clock.dense_seconds,
            "asked_ms": 1e3 * limits.most["latency"] / MICROSECONDS,
            "runtime": conditions.runtime,
            "batch": conditions.batch,
            "threads": conditions.threads,
            "machine": dict(conditions.machine),
            **self.chosen.to_dict(),
            **errors,
            "landings": [{key: one[key] for key in ("foretold", "measured")} for one in self.rounds],
        }

    def _measure(self, name: str, predicted: float, plan: Plan, timer: TimePlan) -> float:
        for earlier in self.rounds:
            if earlier["plan"] == name:
                return float(earlier["measured"])
        measured = timer(plan)
        # Other load on the machine is more likely than such an error of the latency model, so measure again.
        if not 1 / MAX_CORRECTION < measured / predicted < MAX_CORRECTION:
            measured = min(measured, timer(plan), key=lambda time: abs(math.log(time / predicted)))
        self.rounds.append({"plan": name, "foretold": predicted, "measured": measured})
        self._write()
        percents = f"measured {100 * measured:.1f}% of the dense network's time, predicted {100 * predicted:.1f}%"
        _log.info("extracted network: %s", percents)
        return measured

    def _write(self) -> None:
        if self._file is not None:
            state = {**self.clock.to_dict(), "chosen": self.chosen.to_dict(), "rounds": self.rounds}
            write_text(self._file, json.dumps(state, indent=1) + "\n")


def make_plan_timer(clock: LatencyModel, network: nn.Module, images: Tensor) -> TimePlan | None:
    """Return a function that times plans on the machine and runtime of a latency model, or None elsewhere."""
    pairs = _pairs_here(clock, network, images)
    return None if pairs is None else pairs.ratio


def check_measurable(clock: LatencyModel, network: nn.Module, images: Tensor) -> None:
    """Raise a PruningError if this is the machine of the latency model but networks cannot be timed on it."""
    pairs = _pairs_here(clock, network, images)
    if pairs is not None:
        pairs.rehearse()


def _pairs_here(clock: LatencyModel, network: nn.Module, images: Tensor) -> PlanTimer | None:
    measured = clock.conditions
    if measured.runtime not in LATENCY_RUNTIMES:
        return None
    if not comparable_conditions(measured, conditions_here(measured.runtime, measured.batch, measured.threads)):
        return None
    return PlanTimer(real_copy(network).cpu().eval(), images[:1].cpu(), measured)


def with_way(way: str, scores: Scores, constraints: Constraints) -> tuple[Scores, Constraints]:
    """Return the settings changed for a way of removing filters; unchanged if `way` is `AS_COUPLED`."""
    if way not in COUPLINGS:
        return scores, constraints
    return replace(scores, blocks=way == "blocks"), replace(constraints, couple=COUPLINGS[way])


def _other_limit_is_tighter(pruner: Pruner, plan: Plan) -> bool:
    """Return True if a limit other than latency leaves less room for a larger network."""
    assert pruner.selector.limits is not None
    room = pruner.selector.limits.room(pruner.selector.count(plan.masks(pruner.graph)))
    return any(left < room["latency"] for name, left in room.items() if name != "latency")


def _digest(plan: Plan) -> str:
    text = json.dumps({name: list(kept) for name, kept in sorted(plan.keep.items())})
    return hashlib.sha256(text.encode()).hexdigest()[:16]

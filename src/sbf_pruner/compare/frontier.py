"""Accuracy against size for many sizes, from one trained set of scores (`sbf frontier`).

`read_scored` loads the dense network and the scores as they are after a run's cycles. For each size, filters are
chosen as a run with that budget would choose them, the network is extracted, its batch statistics are recomputed on
training images, and its accuracy is measured. Nothing is trained and the run's folder is not changed. If a size
cannot be reached, the smallest possible network is listed as well. Latency is predicted by a latency model.
`draw_frontier` plots the points as .svg or .html, with the run's own filters before and after fine-tuning, and the
trained dense network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..budget.controller import Selector
from ..budget.file_size import FileSize, saved_bytes
from ..budget.search import Masks, Values
from ..budget.targets import MICROSECONDS, Budget
from ..errors import PruningError, RunError, suggestion
from ..graph.cost import lay_out
from ..measurement.calibration import conditions_here, measure_latency_model
from ..measurement.counts import measure
from ..measurement.latency_model import LatencyModel
from ..plan import Plan
from ..report.comparison import Point, accuracy_plot, plot_as_svg
from ..report.html import Figure, tick
from ..report.page import figures_page
from ..report.run_data import Record, read_run
from ..runtimes.table import LATENCY_RUNTIMES, latency_runtime
from ..surgery.extract import extract
from ..training.data.batches import Batches, RunBatches
from ..training.data.datasets import load_data
from ..training.device import choose_device, cpu_threads
from ..training.engine.eager import Engine
from ..training.networks import Networks
from ..training.recipe import Recipe
from ..training.run_folder import REMEDY, SCORED, RunFolder, build_dense, load_checkpoint
from ..training.schedule import cycles_end
from ..utils.formatting import count, format_percentage, milliseconds, percent, si_number


@dataclass(frozen=True)
class Scored:
    """The dense network of a run, the scores of its filters, and the filters that the run kept."""

    folder: RunFolder
    recipe: Recipe
    networks: Networks
    scores: dict[str, Values]
    plan: Plan
    """Filters that the run itself kept."""
    train: Batches
    judged: Batches
    """Images that accuracy is measured on: the validation set, or the test set if nothing is held out."""
    judged_on: str
    records: list[Record]
    summary: Record | None

    def accuracy_of(self, record: Record) -> float | None:
        """Return the accuracy on the same images (`judged`) in a record, or in a part of the run's summary."""
        key = f"{self.judged_on}_accuracy"
        return record[key] if key in record else record["accuracy"]  # "accuracy" in a summary is the test accuracy


def find_run(path: str | Path, device: str | None = None) -> tuple[RunFolder, Recipe, torch.device]:
    """Return the folder of a run, its recipe, and the device to use; `device` overrides that of the recipe."""
    folder = RunFolder(Path(path))
    if not folder.begun:
        raise RunError(f"there is no run in {path}; name the folder of a run")
    recipe = folder.read_recipe()
    # "auto" makes a run from a GPU readable on a machine without one.
    return folder, recipe, choose_device(device or ("auto" if recipe.device == "cuda" else recipe.device))


def read_scored(path: str | Path, device: str | None = None, *, trust: bool = False) -> Scored:
    """Read a run that has completed its cycles, finished or not; `device` overrides that of its recipe.

    Code that its recipe names is imported only if `trust` is true. Raises a RunError, with the reason and a remedy,
    if the run has no scores.
    """
    folder, recipe, where = find_run(path, device)
    _check_far_enough(folder, recipe)
    state = load_checkpoint(folder.checkpoints, SCORED)
    origin = folder.origin(trust=trust)
    data = load_data(recipe.data, recipe.model.num_classes, recipe.seed, origin)
    model = build_dense(recipe, origin)
    feed = RunBatches(recipe, data, where, model)
    # The initial weights are not needed, because the checkpoint holds the trained ones.
    bare = replace(recipe, model=replace(recipe.model, weights=""))
    networks = Networks(model, bare, data, feed, where, folder.latency)
    try:
        networks.dense.load_state_dict(state["dense"])
    except RuntimeError as error:
        raise RunError(
            f"the network that the recipe builds is not that of the run in {folder.path}; restore its code"
        ) from error
    scores = {name: np.asarray(tensor.cpu()) for name, tensor in state["scores"].items()}
    judged, judged_on = (feed.test, "test") if feed.validation is None else (feed.validation, "validation")
    run = read_run(folder.path)
    plan = Plan(state["plan"])
    return Scored(folder, recipe, networks, scores, plan, feed.train, judged, judged_on, run.records, run.summary)


def _check_far_enough(folder: RunFolder, recipe: Recipe) -> None:
    if folder.has_checkpoint(SCORED):
        return
    end = cycles_end(recipe)
    if end is None:
        raise RunError(
            f"the run in {folder.path} has no cycles (phases.cycles = {recipe.phases.cycles}, phases.score = "
            f"{recipe.phases.score}), so it has no scores to choose by; name one that has"
        )
    lines = folder.metrics.read_text("utf-8").count("\n") if folder.metrics.is_file() else 0
    if not folder.finished and lines <= end:
        raise RunError(
            f"the run in {folder.path} has reached epoch {lines}, but its scores are ready after {end}; "
            "continue it (sbf run ... --resume)"
        )
    why = "it was made by an older version, or moved without this file"
    raise RunError(f"the run in {folder.path} has no checkpoints/{SCORED}: {why}; {REMEDY}")


USUAL = ("0.9", "0.8", "0.7", "0.6", "0.5", "0.4", "0.3", "0.2", "0.1")
RESOURCES = tuple(field.name for field in fields(Budget))
_POINT_KEYS = {**{name: name for name in RESOURCES}, "latency": "latency_ms"}  # key in a `SizePoint`, by resource
NEAR = 1.0  # percentage points of accuracy below the best that count as a small loss
Report = Callable[[str], None]
SizePoint = dict[str, Any]


@dataclass(frozen=True)
class FrontierOptions:
    """Options of `sbf frontier`; raises a PruningError if one is invalid."""

    of: str = "macs"
    """Resource that the sizes limit."""
    at: Sequence[str] = USUAL
    batches: int = 32
    """Training batches for new batch statistics."""
    device: str | None = None
    runtime: str | None = None
    """Runtime of a latency model that is measured now; None uses that of the run."""
    batch: int | None = None
    trust: bool = False
    """Import the code that the run's recipe names."""

    def __post_init__(self) -> None:
        if self.of not in RESOURCES:
            raise PruningError(f"--of: no resource is called {self.of!r}; {suggestion(self.of, RESOURCES)}")
        if self.batches < 1:
            raise PruningError(f"--batches counts batches of training images: give at least 1, not {self.batches}")
        if self.of != "latency" and self.measures:
            raise PruningError("--runtime and --batch apply only to --of latency; leave them out")
        if self.runtime is not None:
            latency_runtime(self.runtime, "--runtime")
        if self.batch is not None and self.batch < 1:
            raise PruningError(f"--batch counts the samples of a pass: give at least 1, not {self.batch}")
        if not self.at:
            raise PruningError("--at: name at least one size, such as 0.5,0.3")
        self.sizes()

    @property
    def measures(self) -> bool:
        """True if a latency model is measured now, even if the run has one."""
        return self.runtime is not None or self.batch is not None

    def sizes(self) -> list[float]:
        """Return the sizes as numbers: up to 1 a share of the dense network, above 1 an absolute amount."""
        return list(dict.fromkeys(getattr(Budget(**{self.of: text}), self.of) for text in self.at))


def run_frontier(
    path: str | Path, request: FrontierOptions | None = None, report: Report = lambda line: None
) -> dict[str, Any]:
    """Measure accuracy against size for the run in a folder; the result is JSON-compatible."""
    request = request or FrontierOptions()
    device = find_run(path, request.device)[-1]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # Keep the caller's random state.
        report("reading the run")
        scored = read_scored(path, request.device, trust=request.trust)
        with cpu_threads(scored.recipe.threads):
            return _Sweep(scored, request, report).run()


class _Sweep:
    def __init__(self, scored: Scored, request: FrontierOptions, report: Report) -> None:
        self.scored, self.request, self.report = scored, request, report
        pruner = scored.networks.pruner
        self.graph, self.constraints, self.inputs = pruner.graph, pruner.selector.constraints, pruner.example_inputs
        self.stored = FileSize(scored.networks.bare_copy(), self.inputs, self.graph)
        self.free = Selector(self.graph, None, self.constraints, stored=self.stored)
        self.clock = self._clock()
        self.evaluated: dict[Plan, SizePoint] = {}
        self.smallest: SizePoint | None = None

    def run(self) -> dict[str, Any]:
        scored, summary = self.scored, self.scored.summary
        self.dense = self._sizes(scored.networks.bare_copy(), self.graph.all_filters())
        whole = self._evaluate("all filters", self.graph.all_filters())
        warmup = [scored.accuracy_of(record) for record in scored.records if record["phase"] == "warmup"]
        warmed = warmup[-1] if warmup else None
        points = [self._measure(size) for size in sorted(self.request.sizes(), key=self._share, reverse=True)]
        own = self._evaluate("the run's own filters", scored.plan.masks(self.graph))
        control, own["finetuned_accuracy"] = (
            scored.accuracy_of(summary[part]) if summary else None for part in ("dense", "pruned")
        )
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
            "clock": self._clock_facts(),
            "dense": {**whole, "warmup_accuracy": warmed, "control_accuracy": control},
            "points": points,
            "own": own,
            "smallest": self.smallest,
        }
        return {**result, "said": _summary_sentence(result)}

    def _measure(self, size: float) -> SizePoint:
        target: SizePoint = {"asked": size, "share": self._share(size)}
        budget = Budget(**{self.request.of: size})
        selector = Selector(self.graph, budget, self.constraints, self.clock, self.stored, refuse=False)
        if budget.asked and not selector.reachable:
            self.smallest = self.smallest or self._evaluate("the smallest", selector.smallest)
            return {**target, "reached": False}
        masks = selector.choose(self.scored.scores).masks if budget.asked else self.graph.all_filters()
        return {**target, "reached": True, **self._evaluate(f"{format_percentage(100 * target['share'])}%", masks)}

    def _evaluate(self, name: str, masks: Masks) -> SizePoint:
        """Extract the network of `masks`, recompute its batch statistics and evaluate it; cached by plan."""
        masks = self.graph.settle(masks)
        plan = Plan.from_masks(masks)
        if plan not in self.evaluated:
            self.report(f"judging {name}")
            networks, train = self.scored.networks, self.scored.train
            small = extract(networks.dense, self.inputs, plan, self.graph)
            engine = Engine(small, train.device, order=networks.order)
            engine.recalibrate(train, 0, self.request.batches)
            accuracy = engine.evaluate(self.scored.judged).accuracy
            self.evaluated[plan] = {**self._sizes(small, masks), "accuracy": accuracy}
        point = self.evaluated[plan]
        left = {name: point[key] / self.dense[key] for name, key in _POINT_KEYS.items() if key in point}
        return {**point, "left": left}

    def _sizes(self, network: nn.Module, masks: Masks) -> SizePoint:
        cost = measure(network, self.scored.networks.images[:1])
        whole = all(mask.all() for mask in masks.values())
        return {
            "macs": cost.macs,
            "params": cost.params,
            "size": self.stored.dense if whole else saved_bytes(network, self.inputs, Plan.from_masks(masks)),
            "filters": sum(int(mask.sum()) for mask in masks.values()),
            **({} if self.clock is None else {"latency_ms": 1e3 * self.clock.seconds(lay_out(self.graph, masks))}),
        }

    def _share(self, size: float) -> float:
        """Return a size as a share of the dense network."""
        if size <= 1:
            return size
        if self.request.of == "latency" and self.clock is not None:
            return min(size / (MICROSECONDS * self.clock.seconds(lay_out(self.graph, {}))), 1.0)
        return min(size / self.free.count({})[self.request.of], 1.0)

    def _clock(self) -> LatencyModel | None:
        """Return a latency model measured now, if requested, else that of the run, or None if it has none."""
        networks, request = self.scored.networks, self.request
        if request.measures:
            here = conditions_here(request.runtime or "onnxruntime", request.batch or 64, torch.get_num_threads())
            ignore = self.scored.recipe.constraints.ignore
            network, images = networks.bare_copy(), networks.images
            return measure_latency_model(network, images, self.graph, here, ignore=ignore, report=self.report)
        if networks.timed is not None:
            return networks.timed.clock
        if request.of == "latency":
            raise RunError(
                f"the run in {self.scored.folder.path} has no latency model, because its recipe sets no "
                f"latency target; measure one here with --runtime ({', '.join(LATENCY_RUNTIMES)}) and --batch"
            )
        return None

    def _clock_facts(self) -> SizePoint | None:
        if self.clock is None:
            return None
        own = {} if self.request.measures else (self.scored.summary or {}).get("latency", {})
        return {
            **asdict(self.clock.conditions),
            **{key: self.clock.calibration.get(key) for key in ("mean_error", "worst_error")},
            "measured": own.get("measured"),
        }


def _summary_sentence(result: dict[str, Any]) -> str:
    """Name the smallest network (for latency targets, the fastest) whose accuracy is within NEAR of the best."""
    reached = [point for point in result["points"] if point["reached"]]
    if not reached:
        return "None of these sizes can be reached."
    cut = [result["dense"], result["own"], *reached]
    best = max(point["accuracy"] for point in cut)
    near = [point for point in cut if point["accuracy"] >= best - NEAR]
    timed = result["of"] == "latency"
    least = min((point["left"] for point in near), key=lambda left: float(left["latency" if timed else "macs"]))
    share = {resource: percent(100 * part, 0) for resource, part in least.items()}
    network = f"network within {NEAR:g} percentage point of the best accuracy ({percent(best)})"
    if timed:
        time = f"takes {share['latency']} of the dense network's time, as predicted"
        return f"Before any retraining, the quickest {network} {time} ({share['macs']} of the MACs)."
    size = f"has {share['macs']} of the MACs ({share['params']} of the parameters)"
    return f"Before any retraining, the smallest {network} {size}."


_WORDS = {"macs": "multiply-accumulates", "params": "parameters"}
_TARGET_WORDS = {**_WORDS, "size": "file", "latency": "time"}
_TIME = _POINT_KEYS["latency"]


def draw_frontier(result: Mapping[str, Any], ending: str) -> str:
    """Return the plot as the text of a file with this ending, ".svg" or ".html"."""
    timed = result["of"] == "latency"
    title = f"{result['name']}, seed {result['seed']}: accuracy against {'time' if timed else 'size'}"
    words = {**_WORDS, **({_TIME: _time(result["clock"])} if result["clock"] else {})}
    first = _TIME if timed else "macs"
    if ending == ".svg":
        axis = words[first] if timed else f"{words[first]} of one image"
        return plot_as_svg(_figure(result, first, words[first]), title, axis)
    figures = [_figure(result, key, words[key]) for key in dict.fromkeys([first, *words])]
    facts = f"{result['judged_images']:,} {result['judged_on']} images · nothing retrained"
    facts += " · no images were held out to choose by" if result["judged_on"] == "test" else ""
    return figures_page(title, facts, result["said"], figures)


def _time(clock: Mapping[str, Any]) -> str:
    return f"predicted time ({clock['runtime']}, batch {clock['batch']})"


def _figure(result: Mapping[str, Any], key: str, words: str) -> Figure:
    dense, own = result["dense"], result["own"]
    line = [Point("all filters", dense["accuracy"], dense[key], "chosen", "all", True)]
    for p in result["points"]:
        if p["reached"]:
            share = 100 * p["share"]
            name, label = f"target {share:.4g} %", f"{share:.3g} %"
            line.append(Point(name, p["accuracy"], p[key], "chosen", label, True))
    line.sort(key=lambda point: point.size)
    legend = [("dot chosen", "chosen by score, recalibrated")]
    points, joined = [*line], [("accent", line)]
    trained = {"dense control": "control_accuracy", "dense, after the warm-up": "warmup_accuracy"}
    for name, stage in trained.items():
        if dense[stage] is not None:
            points.append(Point(name, dense[stage], dense[key], "whole"))
            legend.append(("dot whole", name))
            break
    before = Point("the run's own filters", own["accuracy"], own[key], "own")
    points.append(before)
    legend.append(("dot own", "the run's own filters, recalibrated"))
    if own["finetuned_accuracy"] is not None:
        after = Point("the run's own filters, fine-tuned", own["finetuned_accuracy"], own[key], "tuned")
        points.append(after)
        joined.append(("dashed", [before, after]))
        legend.append(("dot tuned", "the same, fine-tuned"))
    caption = (
        "Up and to the left is better. The line is for the weights at the end of the cycles, without "
        "any training after the removal; the effect of fine-tuning is shown only for the run's own filters."
    )
    if key.removesuffix("_ms") != result["of"]:  # A point at 30 % of the MACs is not at 30 % of the parameters.
        caption += f" The percentages are the targets, as shares of the {_TARGET_WORDS[result['of']]}."
    formats: tuple[Callable[[float], str], Callable[[float], str]] = (si_number, count)
    if key == _TIME:
        formats = (lambda value: f"{tick(value)} ms"), milliseconds
        clock = result["clock"]
        if clock["mean_error"] is not None:
            mean, worst = (percent(100 * clock[error], 1) for error in ("mean_error", "worst_error"))
            caption += f" Predicted times were off by {mean} on average and {worst} at most."
        if clock["measured"] is not None:
            share = percent(100 * clock["measured"], 1)
            caption += f" Extracted and measured, the run's own network took {share} of the dense network's time."
    return accuracy_plot(
        f"against-{key}", words, points, caption, "filters", joined=joined, legend=legend, formats=formats
    )

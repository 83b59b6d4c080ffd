"""Runs that compare pruning methods under equal conditions (`sbf compare`).

There is one run per method and seed. The runs of one seed share the data split and the trained dense stage; all
runs have the same target, number of epochs, fine-tuning and constraints. The accuracy is that after the last
epoch, so nothing is selected on test images. Unusable methods and folders are refused before the first run starts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..criteria import OWN, judged_by
from ..criteria.ranking import REHEARSED, check_method, first_images
from ..criteria.subject import Subject
from ..errors import PruningError, RunError
from ..graph.build import trace
from ..report import write_report
from ..training.data.batches import RunBatches
from ..training.data.datasets import load_data
from ..training.device import cpu_threads
from ..training.networks import check_fit
from ..training.recipe import Recipe
from ..training.run import Report, Result, fit
from ..training.run_folder import RunFolder, build_dense
from ..utils.files import write_text
from ..utils.user_code import Origin


@dataclass(frozen=True)
class MethodRun:
    """The run of one method with one seed."""

    recipe: Recipe
    folder: RunFolder
    dense_from: Path | None
    """Folder of the run whose dense stage is reused; None if this run trains its own."""

    @property
    def method(self) -> str:
        return self.recipe.method

    @property
    def origin(self) -> Origin:
        """Origin of its recipe: trusted, as the user named it; nothing is imported from the folder of the runs."""
        return Origin(True, (self.folder.path.parent,))

    def run(self, report: Report | None = None) -> Result:
        """Start the run, or resume it if it was begun."""
        return fit(
            build_dense(self.recipe, self.origin),
            self.recipe,
            run=self.folder.path,
            resume=self.folder.begun,
            dense_from=self.dense_from,
            trust=True,
            report=report,
        )


def plan_runs(recipe: Recipe, methods: Sequence[str], seeds: Sequence[int], root: Path) -> list[MethodRun]:
    """Return all runs, grouped by seed; the first of a seed trains the dense stage that the others reuse.

    A dense stage that an earlier comparison trained in `root` is reused, even if its method is not in `methods`
    now. Raises a RunError if a folder cannot be used.

    >>> import tempfile
    >>> from ..training.recipe import load_recipe
    >>> recipe = load_recipe("digits", ["budget.macs=0.5"])
    >>> with tempfile.TemporaryDirectory() as root:
    ...     found = plan_runs(recipe, ["sbf", "l1"], [0, 1], Path(root))
    >>> [(one.method, one.recipe.seed, one.dense_from and one.dense_from.name) for one in found]
    [('sbf', 0, None), ('l1', 0, 'sbf-seed0'), ('sbf', 1, None), ('l1', 1, 'sbf-seed1')]
    """
    if root.exists() and not root.is_dir():
        raise RunError(f"{root} is a file; name a folder for the runs (--run)")
    if RunFolder(root).begun:
        raise RunError(f"{root} holds a run of its own; name another folder for those to compare (--run)")
    runs: list[MethodRun] = []
    for seed in seeds:
        folders = {method: RunFolder(root / f"{method}-seed{seed}") for method in methods}
        first = next((m for m in methods if _trained_dense(folders[m], recipe)), None)
        dense_from = None
        if first is None:
            earlier = (f for f, own in _finished(recipe, root) if own.seed == seed and _trained_dense(f, recipe))
            dense_from = next(earlier, None)
        if dense_from is None:
            first = first or methods[0]
            dense_from = folders[first]
        for method in sorted(methods, key=lambda method: method != first):
            # The dense control of a seed does not depend on the method, so it is trained once.
            own = _own(recipe, method, seed, recipe.dense_control and method == first)
            folder = folders[method]
            folder.check(own, resume=folder.begun, force=False)
            shared = dense_from.path if recipe.phases.warmup and method != first else None
            runs.append(MethodRun(own, folder, shared))
    return runs


def finished_before(recipe: Recipe, runs: Sequence[MethodRun], root: Path) -> list[RunFolder]:
    """Return the folders of finished runs of the same recipe in `root` that are not among `runs`."""
    known = {run.folder.path for run in runs}
    return [folder for folder, _ in _finished(recipe, root) if folder.path not in known]


def _finished(recipe: Recipe, root: Path) -> Iterator[tuple[RunFolder, Recipe]]:
    for folder in map(RunFolder, sorted(root.glob("*-seed*"))):
        with suppress(PruningError):  # A damaged run is reported when it is resumed.
            own = folder.read_recipe()
            if folder.finished and own == _own(recipe, own.method, own.seed, own.dense_control):
                yield folder, own


def _trained_dense(folder: RunFolder, recipe: Recipe) -> bool:
    """Return True if the folder holds a run whose dense stage other runs may have reused."""
    with suppress(RunError):  # `RunFolder.check` reports it later.
        return folder.begun and folder.read_recipe().dense_control == recipe.dense_control
    return False


def _own(recipe: Recipe, method: str, seed: int, control: bool) -> Recipe:
    return replace(recipe, name=f"{recipe.name}-{method}", method=method, seed=seed, dense_control=control)


def check_methods(runs: Sequence[MethodRun]) -> None:
    """Raise a PruningError if a method cannot rank the filters of this network; called before any training."""
    names = sorted({run.method for run in runs if run.method != OWN and not run.folder.begun})
    if not names:
        return
    recipe, origin = runs[0].recipe, runs[0].origin
    data = load_data(recipe.data, recipe.model.num_classes, recipe.seed, origin)
    model = build_dense(recipe, origin)
    images = first_images(RunBatches(recipe, data, torch.device("cpu"), model).train.epoch(0), REHEARSED)
    check_fit(model, images[0][0], data)
    graph = trace(model, images[0][0], recipe.constraints.ignore)
    # As in the runs: more threads do not speed up small operators, and slow them down if other processes run.
    with cpu_threads(recipe.threads):
        for name in names:
            check_method(name, Subject(model, graph, images))


PAGE = "comparison.html"
Summary = Mapping[str, Any]


@dataclass(frozen=True)
class MethodResult:
    """Results of one method over all its seeds."""

    method: str
    accuracy: tuple[float, ...]
    """Test accuracy after the last epoch, per seed."""
    validation: tuple[float, ...]
    """Validation accuracy after the last epoch, per seed; empty if no images are held out."""
    params: float
    """Mean share of the parameters that is left."""
    macs: float
    """Mean share of the MACs that is left."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracy)

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds; None for a single seed."""
        return statistics.stdev(self.accuracy) if len(self.accuracy) > 1 else None


def rank_methods(summaries: Sequence[Summary]) -> list[MethodResult]:
    """Summarize finished runs by method, highest mean test accuracy first.

    >>> size = {"params": 100, "macs": 100}
    >>> half = {"params": 40, "macs": 50, "validation_accuracy": None}
    >>> runs = [("l1", 90.0), ("l1", 92.0), ("chip", 93.0)]
    >>> found = rank_methods([{"method": m, "dense": size, "pruned": {**half, "accuracy": a}} for m, a in runs])
    >>> [(one.method, one.mean, one.params) for one in found]
    [('chip', 93.0, 0.4), ('l1', 91.0, 0.4)]
    """
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary["method"], []).append(summary)
    found = []
    for method, group in groups.items():
        pruned = [summary["pruned"] for summary in group]
        params, macs = (
            statistics.fmean(summary["pruned"][key] / summary["dense"][key] for summary in group)
            for key in ("params", "macs")
        )
        validation = tuple(one["validation_accuracy"] for one in pruned if one["validation_accuracy"] is not None)
        found.append(MethodResult(method, tuple(one["accuracy"] for one in pruned), validation, params, macs))
    return sorted(found, key=lambda one: -one.mean)


def write_comparison(root: Path, runs: Sequence[Path], summaries: Sequence[Summary]) -> dict[str, Any]:
    """Write the result of a comparison to `root`, as JSON and as an HTML page; return the JSON content."""
    methods = [
        {
            "method": one.method,
            "judged_by": judged_by(one.method),
            "accuracy": list(one.accuracy),
            "mean": one.mean,
            "deviation": one.deviation,
            "validation_accuracy": list(one.validation),
            "params_left": one.params,
            "macs_left": one.macs,
        }
        for one in rank_methods(summaries)
    ]
    controls = [summary["dense"]["accuracy"] for summary in summaries]
    result = {
        "methods": methods,
        "dense_accuracy": [value for value in controls if value is not None],
        "epochs": summaries[0]["epochs"],
        "runs": list(summaries),
    }
    write_text(root / "comparison.json", json.dumps(result, indent=2) + "\n")
    write_report(runs, root / PAGE)
    return result

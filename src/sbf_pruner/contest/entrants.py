"""Who runs: one run for each method and seed, in an order in which dense stages can be shared.

A recipe enters; the runs leave, each with its own recipe and folder.  What holds: whatever cannot run is refused
before the first one starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..callables import Origin
from ..errors import PruningError, RunError
from ..graph.build import trace
from ..methods import OWN
from ..methods.ranking import REHEARSED, rehearse, shown
from ..methods.subject import Subject
from ..training.data import load_data
from ..training.feed import Feed
from ..training.finished import build_dense
from ..training.folder import RunFolder
from ..training.loop import Result, fit
from ..training.machine import cpu_threads
from ..training.recipe import Recipe
from ..training.run import Report
from ..training.start import check_fit


@dataclass(frozen=True)
class Entrant:
    """One method with one seed."""

    recipe: Recipe
    folder: RunFolder
    dense_from: Path | None
    """the run whose dense stage it takes over"""

    @property
    def method(self) -> str:
        return self.recipe.method

    @property
    def origin(self) -> Origin:
        """That of its recipe: the user named it, and it is used in the folder of all runs."""
        return Origin(True, (self.folder.path.parent,))

    def run(self, report: Report | None = None) -> Result:
        """Run it, or what is left of it."""
        return fit(
            build_dense(self.recipe, self.origin),
            self.recipe,
            run=self.folder.path,
            resume=self.folder.begun,
            dense_from=self.dense_from,
            trust=True,
            report=report,
        )


def enter(recipe: Recipe, methods: Sequence[str], seeds: Sequence[int], root: Path) -> list[Entrant]:
    """All runs, those of a seed one after another: the first of them trains what they share.

    Where one of them was begun as such by an earlier comparison, it stays the first, also if it is not named now.

    >>> import tempfile
    >>> from ..training.recipe import load_recipe
    >>> recipe = load_recipe("digits", ["budget.macs=0.5"])
    >>> with tempfile.TemporaryDirectory() as root:
    ...     found = enter(recipe, ["sbf", "l1"], [0, 1], Path(root))
    >>> [(one.method, one.recipe.seed, one.dense_from and one.dense_from.name) for one in found]
    [('sbf', 0, None), ('l1', 0, 'sbf-seed0'), ('sbf', 1, None), ('l1', 1, 'sbf-seed1')]
    """
    if root.exists() and not root.is_dir():
        raise RunError(f"{root} is a file; name a folder for the runs (--run)")
    if RunFolder(root).begun:
        raise RunError(f"{root} holds a run of its own; name another folder for those to compare (--run)")
    entrants: list[Entrant] = []
    for seed in seeds:
        folders = {method: RunFolder(root / f"{method}-seed{seed}") for method in methods}
        first = next((m for m in methods if _leads(folders[m], recipe.dense_control)), None)
        elder = None if first is not None else _elder(recipe, seed, root)
        if elder is None:
            first = first or methods[0]
            elder = folders[first]
        for method in sorted(methods, key=lambda method: method != first):
            # The dense control of a seed is the same whoever prunes: it is trained once.
            control = recipe.dense_control and method == first
            own = _own(recipe, method, seed, control)
            folder = folders[method]
            folder.check(own, resume=folder.begun, force=False)
            shared = elder.path if recipe.phases.warmup and method != first else None
            entrants.append(Entrant(own, folder, shared))
    return entrants


def finished_before(recipe: Recipe, entrants: Sequence[Entrant], root: Path) -> list[RunFolder]:
    """What an earlier comparison in this folder has finished of the same recipe, with other methods or seeds."""
    known = {one.folder.path for one in entrants}
    return [folder for folder, _ in _finished(recipe, root) if folder.path not in known]


def _elder(recipe: Recipe, seed: int, root: Path) -> RunFolder | None:
    """The run of another method that has trained what those of a seed share."""
    found = [(folder, own) for folder, own in _finished(recipe, root) if own.seed == seed]
    return next((folder for folder, own in found if own.dense_control == recipe.dense_control), None)


def _finished(recipe: Recipe, root: Path) -> Iterator[tuple[RunFolder, Recipe]]:
    for folder in map(RunFolder, sorted(root.glob("*-seed*"))):
        with suppress(PruningError):  # what is damaged is told to those who want to go on with it
            held = folder.read_recipe()
            if folder.finished and held == _own(recipe, held.method, held.seed, held.dense_control):
                yield folder, held


def _own(recipe: Recipe, method: str, seed: int, control: bool) -> Recipe:
    return replace(recipe, name=f"{recipe.name}-{method}", method=method, seed=seed, dense_control=control)


def check_methods(entrants: Sequence[Entrant]) -> None:
    """Raise a PruningError if one of the methods to come cannot judge the network: before any has trained."""
    names = sorted({one.method for one in entrants if one.method != OWN and not one.folder.begun})
    if not names:
        return
    recipe = entrants[0].recipe
    origin = entrants[0].origin
    data = load_data(recipe.data, recipe.model.num_classes, recipe.seed, origin)
    model = build_dense(recipe, origin)
    images = shown(Feed(recipe, data, torch.device("cpu"), model).train.epoch(0), REHEARSED)
    check_fit(model, images[0][0], data)
    graph = trace(model, images[0][0], recipe.guards.ignore)
    # As in the runs: tiny steps are no faster with more threads, and on a busy machine far slower.
    with cpu_threads(recipe.threads):
        for name in names:
            rehearse(name, Subject(model, graph, images))


def _leads(folder: RunFolder, control: bool) -> bool:
    """Is it a run that others may have taken their dense stage from?"""
    if not folder.begun:
        return False
    try:
        return folder.read_recipe().dense_control == control
    except RunError:  # which is said when the folder is looked at more closely
        return False

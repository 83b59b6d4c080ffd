"""Who runs: one run for each method and seed, in an order in which dense stages can be shared.

A recipe enters; the runs leave, each with its own recipe and folder.  What holds: whatever cannot run is refused
before the first one starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..training.finished import build_dense
from ..training.folder import RunFolder
from ..training.loop import Result, fit
from ..training.recipe import Recipe
from ..training.run import Report


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

    def run(self, report: Report | None = None) -> Result:
        """Run it, or what is left of it."""
        return fit(
            build_dense(self.recipe),
            self.recipe,
            run=self.folder.path,
            resume=self.folder.begun,
            dense_from=self.dense_from,
            report=report,
        )


def enter(recipe: Recipe, methods: Sequence[str], seeds: Sequence[int], root: Path) -> list[Entrant]:
    """All runs, those of a seed one after another: the first of them trains what they share.

    >>> import tempfile
    >>> from ..training.recipe import load_recipe
    >>> recipe = load_recipe("digits", ["budget.macs=0.5"])
    >>> with tempfile.TemporaryDirectory() as root:
    ...     found = enter(recipe, ["sbf", "l1"], [0, 1], Path(root))
    >>> [(one.method, one.recipe.seed, one.dense_from and one.dense_from.name) for one in found]
    [('sbf', 0, None), ('l1', 0, 'sbf-seed0'), ('sbf', 1, None), ('l1', 1, 'sbf-seed1')]
    """
    entrants: list[Entrant] = []
    for seed in seeds:
        shared: Path | None = None
        for method in methods:
            # The dense control of a seed is the same whoever prunes: it is trained once.
            control = recipe.dense_control and shared is None
            own = replace(recipe, name=f"{recipe.name}-{method}", method=method, seed=seed, dense_control=control)
            folder = RunFolder(root / f"{method}-seed{seed}")
            folder.check(own, resume=folder.begun, force=False)
            entrants.append(Entrant(own, folder, shared if recipe.phases.warmup else None))
            shared = shared or folder.path
    return entrants

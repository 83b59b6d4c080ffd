"""The run folder: what is in it, and when it may be written.

A path and a recipe enter; a folder leaves that holds `recipe.toml`, `network.json`, `metrics.jsonl`,
`scores.jsonl`, `checkpoints/`, `latency.json` where a time was asked for, and at the end `plan.json`,
`model.safetensors`, `report.html` and `summary.json`, which comes last: a run with a summary is finished.  What
holds: `check` writes nothing; a folder that is not a run's is never touched, and of a run's folder only the files
named here are, and what `sbf export` wrote into it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..callables import Origin
from ..errors import RecipeError, RunError
from ..files import append_text, flat, is_there, locked, read_lines, read_text, write_text
from ..manifest import remove_export
from ..writable import why_not_writable
from .checkpoint import ELSEWHERE, NAME, REMEDY
from .recipe import Recipe, load_recipe
from .schedule import phases

INITIAL = "initial.safetensors"
DENSE = "dense.safetensors"  # as the warm-up left it: the teacher, and what other runs may begin from
SCORED = "scored.safetensors"
STARTS_OVER = "starting-over.partial"  # while an earlier run is removed: what is missing is not lost then
EXPORT = "export"  # where `sbf export` writes to, unless it is told
PUT_BACK = f"put back the run's own, {ELSEWHERE}"


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.toml"
        self.network = path / "network.json"
        self.metrics = path / "metrics.jsonl"
        self.scores = path / "scores.jsonl"
        self.checkpoints = path / "checkpoints"
        self.latency = path / "latency.json"
        self.summary = path / "summary.json"

    @classmethod
    def of(cls, recipe: Recipe, path: str | Path | None) -> RunFolder:
        """The folder given, or runs/NAME-seedN below the current one."""
        if path is not None:
            return cls(Path(path))
        if not recipe.name.strip() or Path(recipe.name).is_absolute() or ".." in Path(recipe.name).parts:
            raise RunError(f"name: a folder below runs cannot be called {recipe.name!r}; name one (--run)")
        return cls(Path("runs") / f"{recipe.name}-seed{recipe.seed}")

    def origin(self, *others: Path, trust: bool, resume: bool = False) -> Origin:
        """The origin of a recipe that is used with this folder: nothing is imported from in here, or from `others`.

        `trust` says that the recipe was named by the user, who may name it again to `resume`, or trusts this one.
        """
        named = f", or name the recipe that you began it with (sbf run RECIPE --run {self.path} --resume)"
        return Origin(trust, (self.path, *others), named if resume else "")

    @property
    def begun(self) -> bool:
        """Is there a run in it?"""
        return is_there(self.recipe)

    @property
    def finished(self) -> bool:
        """Has the run in it come to its end?"""
        return is_there(self.summary)

    def has_checkpoint(self, name: str = NAME) -> bool:
        """Is there a checkpoint of this name?"""
        return is_there(self.checkpoints / name)

    def check(self, recipe: Recipe, *, resume: bool, force: bool) -> None:
        """Raise a RunError unless a run of `recipe` may start, start over, or go on here."""
        if resume and force:
            raise RunError("a run either goes on (--resume) or starts over (--force), not both; choose one")
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; name a folder for the run")
        if (reason := why_not_writable(self.path)) is not None:
            raise RunError(f"{self.path} cannot be written, because {reason}; name another folder (--run)")
        if not self.begun:
            if resume:
                raise RunError(f"there is no run to resume in {self.path}; leave out --resume (resume=True)")
            found = self.path.iterdir() if self.path.is_dir() else ()
            if any(not name.name.endswith(".partial") for name in found):
                raise RunError(f"{self.path} holds files but no run; name a new folder for the run")
        elif resume:
            self._check_same(recipe)
            self._check_goes_on(recipe)
        elif not self._is_run():
            raise RunError(f"{self.path} holds a recipe.toml but no run; name a new folder for the run (--run)")
        elif not force:
            raise RunError(
                f"{self.path} holds a run already; go on with it (--resume), start over (--force), "
                "or name another folder (--run)"
            )
        else:
            self._check_links()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Keep every other process out, with a lock that goes with this process however it ends."""
        new = [path for path in (self.path, *self.path.parents) if not path.is_dir()]
        self.path.mkdir(parents=True, exist_ok=True)
        otherwise = f"another process works on the run in {self.path}; wait for it, or name another folder (--run)"
        try:
            with locked(self.path, RunError(otherwise)):
                for left in (*self.path.glob(".*.partial"), *self.checkpoints.glob(".*.partial")):  # by one killed
                    if not left.is_dir():  # an export's, which the next export removes
                        left.unlink(missing_ok=True)
                yield
        except BaseException:
            with suppress(OSError):  # only if nothing came of the run
                for path in new:
                    path.rmdir()
            raise

    def begin(self, recipe: Recipe) -> None:
        """Remove what an earlier run left here and write the recipe."""
        self._check_links()
        self.path.mkdir(parents=True, exist_ok=True)
        starts_over = self.path / STARTS_OVER
        starts_over.touch()
        # First what says that a run is finished, or can go on: killed here, a run has at worst to begin.
        stale = ["summary.json", *(f"checkpoints/{name}" for name in (NAME, INITIAL, DENSE, SCORED))]
        stale += ["network.json", "metrics.jsonl", "scores.jsonl", "plan.json", "model.safetensors"]
        stale += ["report.html", "bench.json", "latency.json"]
        logs = self.path.glob("tensorboard/events.out.tfevents.*")
        for path in (*(self.path / name for name in stale), *logs):
            path.unlink(missing_ok=True)
        remove_export(self.path / EXPORT)
        write_text(self.recipe, recipe.to_toml())
        starts_over.unlink()

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add records to the metrics, safely on disk before the checkpoint that counts them."""
        append_text(self.metrics, "".join(json.dumps(record) + "\n" for record in records))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records written so far."""
        return read_lines(self.metrics, REMEDY)

    def append_scores(self, line: Mapping[str, Any]) -> None:
        """Add the scores of one epoch."""
        append_text(self.scores, json.dumps(line, separators=(",", ":")) + "\n")

    def read_scores(self) -> list[dict[str, Any]]:
        """The scores written so far; a run begun by an older version has none of its first epochs."""
        return read_lines(self.scores, REMEDY)

    def rewind(self, records: int) -> None:
        """Forget metrics and scores written after the checkpoint, so that no epoch stands there twice."""
        written = read_lines(self.metrics, REMEDY, records)
        if len(written) < records:
            raise RunError(
                f"{self.metrics} has {len(written)} records but the checkpoint is of epoch {records}; {REMEDY}"
            )
        scores = [line for line in self.read_scores() if line["done"] <= records]
        if self.metrics.is_file():
            write_text(self.metrics, "".join(json.dumps(record) + "\n" for record in written))
        if self.scores.is_file():
            write_text(self.scores, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in scores))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, which marks the run as finished."""
        write_text(self.summary, json.dumps(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """The summary of a finished run."""
        try:
            summary = json.loads(read_text(self.summary))
        except ValueError:
            summary = None
        if not isinstance(summary, dict) or not {"dense", "pruned", "layers"} <= set(summary):
            raise RunError(f"{self.summary} is damaged; remove it and --resume to write it anew")
        return summary

    def read_recipe(self) -> Recipe:
        """The recipe of the run in it, which was written whole: what is missing was not left out."""
        try:
            text = read_text(self.recipe)
            recipe = load_recipe(self.recipe)
            written = flat(tomllib.loads(text))
        except (FileNotFoundError, RecipeError, ValueError) as error:
            raise RunError(f"{self.recipe} is damaged or was changed ({error}); {PUT_BACK}") from error
        last = list(flat(recipe.to_dict()))[-1]
        if last not in written:
            raise RunError(f"{self.recipe} is cut short ({last} is missing); {PUT_BACK}")
        return recipe

    def _is_run(self) -> bool:
        """Return True if a run wrote the recipe here: it is whole, or something else of a run lies beside it."""
        if any(path.exists() for path in (self.network, self.metrics, self.path / STARTS_OVER)):
            return True
        try:
            self.read_recipe()
        except RunError:
            return False
        return True

    def _check_links(self) -> None:
        """Files are removed from these folders when a run starts over, which must not happen somewhere else."""
        for path in (self.checkpoints, self.path / "tensorboard", self.path / EXPORT):
            if path.is_symlink():
                raise RunError(
                    f"{path} is a link, and starting over would remove files elsewhere; remove the link, "
                    f"{ELSEWHERE}"
                )

    def _check_goes_on(self, recipe: Recipe) -> None:
        """A run that is past its first phase has a checkpoint: without one it would begin again, and lose all."""
        if self.finished or self.has_checkpoint() or (self.path / STARTS_OVER).is_file():
            return
        records = self.metrics.read_text("utf-8").count("\n") if self.metrics.is_file() else 0
        first = next(iter(phases(recipe)), None)
        if (self.path / "model.safetensors").is_file() or (first is not None and records > first.end):
            raise RunError(
                f"the run in {self.path} has come to epoch {records}, but there is no checkpoints/{NAME} to go on "
                f"from; {REMEDY}"
            )

    def _check_same(self, recipe: Recipe) -> None:
        before, now = flat(self.read_recipe().to_dict()), flat(recipe.to_dict())
        for key in [*now, *before]:
            if now.get(key) != before.get(key):
                raise RunError(
                    f"{self.path} was run with {key} = {before.get(key)!r}, not {now.get(key)!r}; resume it "
                    f"as it is (sbf run --run {self.path} --resume), {ELSEWHERE}"
                )
        if _patterns(before) != _patterns(now):
            # Equal as settings, but of the patterns that match a layer the last one counts.
            raise RunError(
                f"{self.path} was run with the patterns of its guards in another order; resume it as it is "
                f"(sbf run --run {self.path} --resume), {ELSEWHERE}"
            )

    def check_unchanged(self, trained_with: Mapping[str, Any], recipe: Recipe) -> None:
        """Refuse to go on with another recipe than a checkpoint's; settings that it does not know are new ones."""
        now = flat(recipe.to_dict())
        for key, before in flat(trained_with).items():
            if now.get(key) != before:
                raise RunError(
                    f"{self.recipe} was changed since its last checkpoint: {key} was {before!r} and is "
                    f"{now.get(key)!r}; put it back, {ELSEWHERE}"
                )

    def check_same_data(self, trained_with: Mapping[str, int], counts: Mapping[str, int]) -> None:
        """Refuse to go on with more or fewer images than a checkpoint's."""
        for part, before in trained_with.items():
            if counts[part] != before:
                raise RunError(
                    f"the run in {self.path} began with {before:,} images for {part}, and now there are "
                    f"{counts[part]:,}; give the same images, {ELSEWHERE}"
                )


def _patterns(settings: Mapping[str, Any]) -> list[str]:
    """The keys of the guards, in their order."""
    return [key for key in settings if key.startswith("guards.")]

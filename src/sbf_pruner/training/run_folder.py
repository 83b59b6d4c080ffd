"""Run folders: write and check their files, save and load checkpoints, read finished runs and their dense stages.

A folder contains `recipe.toml`, `network.json`, `metrics.jsonl`, `scores.jsonl`, `checkpoints/`, `latency.json` if
there is a latency target, and at the end `plan.json`, `model.safetensors`, `report.html` and `summary.json`. The
summary is written last, so a run that has one is finished. A folder with other contents is never changed; in a run
folder only the files of the run, and those that `sbf export` wrote there, are replaced or removed.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import RecipeError, RunError, check_version
from ..models import build_network
from ..saving import load, remove_export
from ..schedule import RUN_FORMAT
from ..utils.files import (
    append_text,
    flatten_keys,
    from_plain,
    locked,
    path_exists,
    read_records,
    read_tensors,
    read_text,
    to_plain,
    why_not_writable,
    write_tensors,
    write_text,
)
from ..utils.user_code import UNTRUSTED, Origin
from .recipe import Recipe, load_recipe
from .schedule import phases, total_epochs

_FORMAT = "sbf-pruner checkpoint 1"
LAST_CHECKPOINT = "last.safetensors"
INITIAL = "initial.safetensors"
DENSE = "dense.safetensors"  # weights after the warm-up, for the teacher and for `dense_from` of other runs
SCORED = "scored.safetensors"
STARTS_OVER = "starting-over.partial"  # marks that an earlier run is being removed, so missing files are no error
EXPORT = "export"  # default folder of `sbf export`
ELSEWHERE = "or begin a run in another folder (--run)"
REMEDY = f"put the file back, {ELSEWHERE}"
PUT_BACK = f"put back the run's own, {ELSEWHERE}"
# Prefixes of the settings that determine the dense stage
DENSE_STAGE_KEYS = ("seed", "model.", "data.", "warmup.", "phases.warmup")


def save_checkpoint(folder: Path, state: dict[str, Any], name: str = LAST_CHECKPOINT) -> Path:
    """Write `state` to the checkpoint `name` in `folder` and return its path.

    A state consists of nested dicts, lists, tuples, tensors, numbers, strings and None, like a state dict of an
    optimizer.
    An existing safetensors file is replaced only when the new one is complete.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_checkpoint(Path(folder), {"done": 3, "weights": [torch.ones(2)]})
    ...     load_checkpoint(Path(folder))
    {'done': 3, 'weights': [tensor([1., 1.])]}
    """
    tensors: dict[str, Tensor] = {}

    def store(at: str, tensor: Tensor) -> str:
        while at in tensors:  # A key with a dot can give the same name as another entry.
            at += "'"
        tensors[at] = tensor
        return at

    skeleton = to_plain(state, store)
    path = Path(folder) / name
    write_tensors(path, tensors, {"format": _FORMAT, "state": skeleton})
    return path


def load_checkpoint(folder: Path, name: str = LAST_CHECKPOINT, remedy: str = REMEDY) -> dict[str, Any]:
    """Return the state in the checkpoint `name` in `folder`.

    Raises a RunError that ends with `remedy` if the file is missing, cut short or was changed.
    """
    path = Path(folder) / name
    tensors, header = read_tensors(path, remedy)
    check_version(header.get("format"), _FORMAT, path)
    if header.get("format") != _FORMAT:
        raise RunError(f"{path} is not a checkpoint of this version ({_FORMAT}); {remedy}")
    state = from_plain(header["state"], tensors.__getitem__)
    assert isinstance(state, dict)
    return state


class RunFolder:
    """Paths of the files of one run, and functions that check, read and write them."""

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
        """Return the folder at `path`, by default runs/NAME-seedN in the current directory."""
        if path is not None:
            return cls(Path(path))
        if not recipe.name.strip() or Path(recipe.name).is_absolute() or ".." in Path(recipe.name).parts:
            raise RunError(f"name: a folder below runs cannot be called {recipe.name!r}; name one (--run)")
        return cls(Path("runs") / f"{recipe.name}-seed{recipe.seed}")

    def origin(self, *others: Path, trust: bool, resume: bool = False) -> Origin:
        """Return the rules for importing code that a recipe names: nothing from inside this folder or `others`.

        If `trust` is false, all imports are refused. If `resume` is true, the message suggests naming the recipe.
        """
        named = f", or name the recipe that you began it with (sbf run RECIPE --run {self.path} --resume)"
        return Origin(trust, (self.path, *others), named if resume else "")

    @property
    def begun(self) -> bool:
        """True if the folder contains a run."""
        return path_exists(self.recipe)

    @property
    def finished(self) -> bool:
        """True if the run is finished."""
        return path_exists(self.summary)

    def has_checkpoint(self, name: str = LAST_CHECKPOINT) -> bool:
        return path_exists(self.checkpoints / name)

    def check(self, recipe: Recipe, *, resume: bool, force: bool) -> None:
        """Raise a RunError unless a run of `recipe` may start, start over or continue here. Writes nothing."""
        path = self.path
        if resume and force:
            raise RunError("a run either goes on (--resume) or starts over (--force), not both; choose one")
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file; name a folder for the run")
        if (reason := why_not_writable(path)) is not None:
            raise RunError(f"{path} cannot be written, because {reason}; name another folder (--run)")
        if not self.begun:
            if resume:
                raise RunError(f"there is no run to resume in {path}; leave out --resume (resume=True)")
            if path.is_dir() and any(file.suffix != ".partial" for file in path.iterdir()):
                raise RunError(f"{path} holds files but no run; name a new folder for the run")
        elif resume:
            self._check_same(recipe)
            self._check_goes_on(recipe)
        elif not self._is_run():
            raise RunError(f"{path} holds a recipe.toml but no run; name a new folder for the run (--run)")
        elif not force:
            remedy = "go on with it (--resume), start over (--force), or name another folder (--run)"
            raise RunError(f"{path} holds a run already; {remedy}")
        else:
            self._check_links()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Context that creates the folder and locks it against other processes; the lock ends with this process.

        Removes temporary files of killed processes. After an error, new folders that are still empty are removed.
        """
        new = [path for path in (self.path, *self.path.parents) if not path.is_dir()]
        self.path.mkdir(parents=True, exist_ok=True)
        busy = f"another process works on the run in {self.path}; wait for it, or name another folder (--run)"
        try:
            with locked(self.path, RunError(busy)):
                for partial_file in (*self.path.glob(".*.partial"), *self.checkpoints.glob(".*.partial")):
                    if not partial_file.is_dir():  # A folder belongs to an export; the next export removes it.
                        partial_file.unlink(missing_ok=True)
                yield
        except BaseException:
            with suppress(OSError):  # Raised for a folder that is not empty.
                for path in new:
                    path.rmdir()
            raise

    def begin(self, recipe: Recipe) -> None:
        """Remove the files of an earlier run and write the recipe."""
        self._check_links()
        self.path.mkdir(parents=True, exist_ok=True)
        starts_over = self.path / STARTS_OVER
        starts_over.touch()
        # Remove files that mark a run as finished or resumable first. If the process is killed here, the run then
        # starts over at worst.
        stale = ["summary.json", *(f"checkpoints/{name}" for name in (LAST_CHECKPOINT, INITIAL, DENSE, SCORED))]
        stale += ["network.json", "metrics.jsonl", "scores.jsonl", "plan.json", "model.safetensors"]
        stale += ["report.html", "bench.json", "latency.json"]
        logs = self.path.glob("tensorboard/events.out.tfevents.*")
        for path in (*(self.path / name for name in stale), *logs):
            path.unlink(missing_ok=True)
        remove_export(self.path / EXPORT)
        write_text(self.recipe, recipe.to_toml())
        starts_over.unlink()

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append records to `metrics.jsonl`, flushed to disk before the checkpoint that counts them is written."""
        append_text(self.metrics, "".join(json.dumps(record) + "\n" for record in records))

    def read_metrics(self) -> list[dict[str, Any]]:
        return read_records(self.metrics, REMEDY)

    def append_scores(self, line: Mapping[str, Any]) -> None:
        append_text(self.scores, json.dumps(line, separators=(",", ":")) + "\n")

    def read_scores(self) -> list[dict[str, Any]]:
        return read_records(self.scores, REMEDY)

    def rewind(self, records: int) -> None:
        """Drop metrics and scores of epochs after `records`, the checkpoint's epoch, because these run again."""
        written = read_records(self.metrics, REMEDY, records)
        if (count := len(written)) < records:
            raise RunError(f"{self.metrics} has {count} records but the checkpoint is of epoch {records}; {REMEDY}")
        scores = [line for line in self.read_scores() if line["done"] <= records]
        if self.metrics.is_file():
            write_text(self.metrics, "".join(json.dumps(record) + "\n" for record in written))
        if self.scores.is_file():
            write_text(self.scores, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in scores))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_text(self.summary, json.dumps(summary, indent=2) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Return the summary of a finished run; raise a RunError if it is damaged."""
        try:
            summary = json.loads(read_text(self.summary))
        except ValueError:
            summary = None
        if isinstance(summary, dict):
            check_version(summary.get("format"), RUN_FORMAT, self.summary)
        if not isinstance(summary, dict) or not {"dense", "pruned", "layers"} <= set(summary):
            raise RunError(f"{self.summary} is damaged; remove it and --resume to write it anew")
        return summary

    def read_recipe(self) -> Recipe:
        """Return the recipe of the run; raise a RunError if it is damaged, or lacks the last setting.

        A run writes every setting, so a missing one means that the file was cut short.
        """
        try:
            text = read_text(self.recipe)
            recipe = load_recipe(self.recipe)
            written = flatten_keys(tomllib.loads(text))
        except (FileNotFoundError, RecipeError, ValueError) as error:
            raise RunError(f"{self.recipe} is damaged or was changed ({error}); {PUT_BACK}") from error
        *_, last = flatten_keys(recipe.to_dict())
        if last not in written:
            raise RunError(f"{self.recipe} is cut short ({last} is missing); {PUT_BACK}")
        return recipe

    def _is_run(self) -> bool:
        """Return True if a run wrote `recipe.toml`: it is complete, or other files of a run exist."""
        if any(path.exists() for path in (self.network, self.metrics, self.path / STARTS_OVER)):
            return True
        with suppress(RunError):
            self.read_recipe()
            return True
        return False

    def _check_links(self) -> None:
        """Raise a RunError if a folder in which starting over removes files is a symbolic link."""
        for path in (self.checkpoints, self.path / "tensorboard", self.path / EXPORT):
            if path.is_symlink():
                why = "is a link, and starting over would remove files elsewhere"
                raise RunError(f"{path} {why}; remove the link, {ELSEWHERE}")

    def _check_goes_on(self, recipe: Recipe) -> None:
        """Raise a RunError if a run past its first phase has no checkpoint, since resuming would start it over."""
        if self.finished or self.has_checkpoint() or (self.path / STARTS_OVER).is_file():
            return
        records = self.metrics.read_text("utf-8").count("\n") if self.metrics.is_file() else 0
        first = next(iter(phases(recipe)), None)
        if (self.path / "model.safetensors").is_file() or (first is not None and records > first.end):
            missing = f"there is no checkpoints/{LAST_CHECKPOINT} to resume from"
            raise RunError(f"the run in {self.path} has reached epoch {records}, but {missing}; {REMEDY}")

    def _check_same(self, recipe: Recipe) -> None:
        before, now = flatten_keys(self.read_recipe().to_dict()), flatten_keys(recipe.to_dict())
        remedy = f"resume it as it is (sbf run --run {self.path} --resume), {ELSEWHERE}"
        for key in [*now, *before]:
            if now.get(key) != before.get(key):
                change = f"{key} = {before.get(key)!r}, not {now.get(key)!r}"
                raise RunError(f"{self.path} was run with {change}; {remedy}")
        # Compare the order of the patterns too: of those that match a layer, the last one applies.
        patterns = [[key for key in keys if key.startswith("constraints.")] for keys in (before, now)]
        if patterns[0] != patterns[1]:
            raise RunError(f"{self.path} was run with the patterns of its constraints in another order; {remedy}")

    def check_unchanged(self, checkpoint: Mapping[str, Any], recipe: Recipe, counts: Mapping[str, int]) -> None:
        """Raise a RunError if the recipe, or the number of images, differs from that of the checkpoint.

        Settings that the checkpoint lacks were introduced after it was written and are ignored.
        """
        now = flatten_keys(recipe.to_dict())
        for key, before in flatten_keys(checkpoint.get("recipe", {})).items():
            if now.get(key) != before:
                change = f"{key} was {before!r} and is {now.get(key)!r}"
                raise RunError(
                    f"{self.recipe} was changed since its last checkpoint: {change}; put it back, {ELSEWHERE}"
                )
        for part, before in checkpoint.get("images", {}).items():
            if counts[part] != before:
                change = f"began with {before:,} images for {part}, and now there are {counts[part]:,}"
                raise RunError(f"the run in {self.path} {change}; give the same images, {ELSEWHERE}")


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, read from its folder."""

    path: Path
    origin: Origin
    recipe: Recipe
    summary: dict[str, Any]
    build: Callable[[], nn.Module]  # builds the dense network with fresh weights
    small: nn.Module  # the pruned network, in evaluation mode


def read_run(path: str | Path, otherwise: str = "", *, trust: bool = False) -> FinishedRun:
    """Read a finished run; raise a RunError if there is none, with a message that ends with `otherwise`.

    Code that its recipe names is imported only if `trust` is true.
    """
    folder = RunFolder(Path(path))
    if not folder.begun:
        raise RunError(f"there is no run in {path}; name the folder of a finished run{otherwise}")
    if not folder.finished:
        raise RunError(f"the run in {path} is not finished; let it end (sbf run ... --resume)")
    recipe, origin = folder.read_recipe(), folder.origin(trust=trust)
    build, summary = partial(build_dense, recipe, origin), folder.read_summary()
    return FinishedRun(folder.path, origin, recipe, summary, build, load(folder.path, build).eval())


def build_dense(recipe: Recipe, origin: Origin = UNTRUSTED) -> nn.Module:
    """Build the dense network of a recipe with fresh weights; import user code only if `origin` is trusted.

    Sets the seed of torch's global generator.
    """
    config = recipe.model
    torch.manual_seed(recipe.seed)
    given = {"num_classes": config.num_classes, "in_channels": config.in_channels, **config.options}
    return build_network(config.name, given, origin)


class DenseStage(NamedTuple):
    """Result of the warm-up of another run, to be used instead of training the warm-up again."""

    run: str  # folder of the run that trained it
    weights: dict[str, Tensor]
    records: list[dict[str, Any]]


def read_dense_stage(path: str | Path, recipe: Recipe) -> DenseStage:
    """Read the dense stage of the run in `path`; raise a RunError if `recipe` would train a different one.

    A run that takes it over gives the same result as one that trains it; on the CPU, bit-identical weights.
    """
    source = RunFolder(Path(path))
    if not source.begun:
        raise RunError(f"there is no run in {path} to take the dense stage from; name the folder of a run")
    theirs, ours = (flatten_keys(each.to_dict()) for each in (source.read_recipe(), recipe))
    for key in [*ours, *theirs]:
        if key.startswith(DENSE_STAGE_KEYS) and theirs.get(key) != ours.get(key):
            raise RunError(
                f"the dense stage of {path} was trained with {key} = {theirs.get(key)!r}, not {ours.get(key)!r}; "
                "take over one of the same network, data, warm-up and seed, or train it (leave out --dense-from)"
            )
    epochs = recipe.phases.warmup
    if not epochs:
        raise RunError("the recipe has no dense stage to take over (phases.warmup = 0); leave out --dense-from")
    records = source.read_metrics()[:epochs]
    if not source.has_checkpoint(DENSE):
        raise RunError(
            f"the run in {path} has no checkpoints/{DENSE}: it has not finished its warm-up, or the file "
            "was not copied along; wait for it, or leave out --dense-from"
        )
    if len(records) < epochs:
        count = f"{len(records)} of the {epochs} epochs of the warm-up"
        raise RunError(f"{source.metrics} has records of only {count}; restore the file, or leave out --dense-from")
    total = total_epochs(recipe)
    weights = load_checkpoint(source.checkpoints, DENSE, "take over another run's, or leave out --dense-from")
    return DenseStage(str(path), weights, [{**record, "total": total} for record in records])

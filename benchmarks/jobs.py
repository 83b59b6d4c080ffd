"""The runs a driver is asked for, and how far each of them is.

A TOML file of jobs enters; `Run`s leave, one per job and seed, each with its folder.  What a run has done is
read from its own folder alone, so nothing has to be remembered between one driver and the next; that a run is
going on is told by a lock which its process holds for as long as it lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

SUMMARY = "summary.json"
DENSE = "checkpoints/dense.safetensors"  # other runs may begin from it


@dataclass(frozen=True)
class Run:
    """One recipe with one seed, and where it lies."""

    group: str
    recipe: str
    seed: int
    overrides: tuple[str, ...]
    root: Path
    beside: str = ""
    """another job of the file: this one is asked for the MACs that the run of its seed has left"""
    dense_from: str = ""
    """another job of the file: this one takes over the dense stage of the run of its seed"""

    @property
    def name(self) -> str:
        return f"{self.group}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        return self.root / self.name

    @property
    def log(self) -> Path:
        return self.root / "logs" / f"{self.name}.log"

    @property
    def begun(self) -> bool:
        return (self.folder / "recipe.toml").is_file()

    @property
    def finished(self) -> bool:
        return (self.folder / SUMMARY).is_file()

    @property
    def ready(self) -> bool:
        """May it start?  Not before the run that it is to be compared with has ended, or trained what it needs."""
        if self.beside and not (self._folder_of(self.beside) / SUMMARY).is_file():
            return False
        source = self._folder_of(self.dense_from)
        return not self.dense_from or any((source / name).is_file() for name in (DENSE, SUMMARY))

    def _folder_of(self, group: str) -> Path:
        return self.root / f"{group}-seed{self.seed}"

    @property
    def lock(self) -> Path:
        """A file that the process which works on the run has locked, and that holds its number."""
        return self.root / "locks" / self.name

    @property
    def going_on(self) -> bool:
        """Does a process work on it?"""
        return is_locked(self.lock)

    def words(self) -> list[str]:
        """What follows `sbf` to start the run, or to go on with it."""
        changes = [f"name={self.group}", *self.overrides]
        if self.beside:
            found = json.loads((self._folder_of(self.beside) / SUMMARY).read_text("utf-8"))
            changes.append(f"budget.macs={found['pruned']['macs'] / found['dense']['macs']:.6f}")
        options = [word for change in changes for word in ("--set", change)]
        words = ["run", self.recipe, "--seed", str(self.seed), "--run", str(self.folder), *options]
        source = self._folder_of(self.dense_from)
        if self.dense_from and (source / DENSE).is_file():  # else it came here without, and is trained again
            words += ["--dense-from", str(source)]
        return [*words, *(["--resume"] if self.begun else [])]

    def records(self) -> list[dict[str, Any]]:
        """The metrics so far; a line that is still being written is left out."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def take_lock(path: Path) -> int | None:
    """A descriptor that holds the lock until every process that has it is gone; None if one has it already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """Does some process hold the lock?"""
    descriptor = take_lock(path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def read_runs(path: Path, root: Path, only: Sequence[str] = ()) -> list[Run]:
    """The runs of a file of jobs in its order; `only` keeps those whose name matches one of the patterns."""
    runs = []
    for job in tomllib.loads(path.read_text("utf-8"))["job"]:
        unknown = job.keys() - {"recipe", "name", "seeds", "set", "beside", "dense_from"}
        if unknown or "recipe" not in job:
            raise SystemExit(
                f"{path}: a job has recipe, and may have name, seeds, set, beside and dense_from; "
                f"found {sorted(job)}"
            )
        if job.get("set") and "name" not in job:
            raise SystemExit(f"{path}: {job['recipe']} with settings of its own needs a name of its own")
        for seed in job.get("seeds", [0]):
            group = job.get("name", Path(job["recipe"]).stem)
            others = (job.get(key, "") for key in ("beside", "dense_from"))
            runs.append(Run(group, job["recipe"], seed, tuple(job.get("set", ())), root, *others))
    names = [run.name for run in runs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SystemExit(f"{path}: asks twice for {', '.join(sorted(twice))}")
    return [run for run in runs if not only or any(fnmatch(run.name, pattern) for pattern in only)]


def status_line(run: Run, failed: int | None = None) -> str:
    """One line: what the run is doing, how far it is, and its figures."""
    records = run.records()
    state = "finished" if run.finished else "running" if run.going_on else "cut off" if run.begun else "waiting"
    if failed is not None and state == "cut off":
        state = f"failed ({failed})"
    if not records:
        return f"{run.name:<44} {state}"
    first, last = records[0], records[-1]
    accuracies = [record["test_accuracy"] for record in records if record["test_accuracy"] is not None]
    accuracy = f"{accuracies[-1]:.2f} %" if accuracies else "-"
    removed = "/".join(f"{100 * (1 - last[key] / first[key]):.1f}" for key in ("params", "macs"))
    minutes = sum(record["seconds"] for record in records) / 60
    phase = f"{last['phase']} {last['cycle'] or ''}".strip()
    return (
        f"{run.name:<44} {state:<9} {last['done']:>4}/{last['total']} {phase:<10} {accuracy:>8}  "
        f"removed {removed} % (parameters/MACs)  {minutes:.1f} min"
    )

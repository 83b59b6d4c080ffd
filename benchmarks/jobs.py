"""The runs a driver is asked for, and how far each of them is.

A TOML file of jobs enters; `Run`s leave, one per job and seed, each with its folder.  What a run has done is
read from its own folder alone, so nothing has to be remembered between one driver and the next; that a run is
going on is told by a lock which its process holds for as long as it lives.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from locks import is_locked

SUMMARY = "summary.json"
LAST = "checkpoints/last.safetensors"
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
    background: bool = False
    """it leaves a device that is shared to the others, where both want it"""

    @property
    def environment(self) -> dict[str, str]:
        """What its process is told beside its command; to CUDA's multi-process service 1 is below normal."""
        return {"CUDA_MPS_CLIENT_PRIORITY": "1"} if self.background else {}

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
    def waits_for(self) -> list[str]:
        """The runs it cannot start without: the one it is compared with, and the one whose dense stage it needs."""
        waited = []
        if self.beside and not self._beside(self.beside).finished:
            waited.append(self._beside(self.beside).name)
        taken_over = not self.dense_from or (self.folder / LAST).is_file()
        if not taken_over and not self._beside(self.dense_from).gives_dense:
            waited.append(self._beside(self.dense_from).name)
        return list(dict.fromkeys(waited))

    @property
    def gives_dense(self) -> bool:
        """Is its dense stage over?  The weights are written a moment before the last record of it."""
        return self.finished or (
            (self.folder / DENSE).is_file()
            and any(record["phase"] != "warmup" or record["epoch"] == record["epochs"] for record in self.records())
        )

    def _beside(self, group: str) -> Run:
        """The run of another job with the same seed."""
        return Run(group, "", self.seed, (), self.root)

    @property
    def lock(self) -> Path:
        """What the process that works on the run has locked."""
        return self.root / "locks" / self.name

    @property
    def going_on(self) -> bool:
        """Does a process work on it?"""
        return is_locked(self.lock)

    def words(self) -> list[str]:
        """What follows `sbf` to start the run, or to go on with it."""
        changes = [f"name={self.group}", *self.overrides]
        if self.beside:
            found = json.loads((self._beside(self.beside).folder / SUMMARY).read_text("utf-8"))
            changes.append(f"budget.macs={found['pruned']['macs'] / found['dense']['macs']:.6f}")
        options = [word for change in changes for word in ("--set", change)]
        words = ["run", self.recipe, "--seed", str(self.seed), "--run", str(self.folder), *options]
        source = self._beside(self.dense_from).folder
        if self.dense_from and (source / DENSE).is_file():  # else it came here without, and is trained again
            words += ["--dense-from", str(source)]
        return [*words, *(["--resume"] if self.begun else [])]

    def records(self) -> list[dict[str, Any]]:
        """The metrics so far, up to a line that is still being written, or is damaged: its run will say so."""
        path = self.folder / "metrics.jsonl"
        found: list[dict[str, Any]] = []
        with suppress(ValueError):
            for line in (path.read_bytes() if path.is_file() else b"").split(b"\n")[:-1]:
                record = json.loads(line)
                if not isinstance(record, dict):
                    break
                found.append(record)
        return found


def read_runs(path: Path, root: Path, only: Sequence[str] = ()) -> list[Run]:
    """The runs of a file of jobs in its order; `only` keeps those whose name matches one of the patterns."""
    try:
        jobs = tomllib.loads(path.read_text("utf-8")).get("job")
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: cannot be read ({error!r})") from None
    if not jobs or not isinstance(jobs, list):
        raise SystemExit(f"{path}: asks for nothing; each job is a table [[job]]")
    runs = []
    for job in jobs:
        unknown = job.keys() - {"recipe", "name", "seeds", "set", "beside", "dense_from", "background"}
        if unknown or "recipe" not in job:
            raise SystemExit(
                f"{path}: a job has recipe, and may have name, seeds, set, beside, dense_from and background; "
                f"found {sorted(job)}"
            )
        if job.get("set") and "name" not in job:
            raise SystemExit(f"{path}: {job['recipe']} with settings of its own needs a name of its own")
        for seed in job.get("seeds", [0]):
            group = job.get("name", Path(job["recipe"]).stem)
            others = (job.get(key, "") for key in ("beside", "dense_from"))
            waits = job.get("background", False)
            runs.append(Run(group, job["recipe"], seed, tuple(job.get("set", ())), root, *others, waits))
    names = [run.name for run in runs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SystemExit(f"{path}: asks twice for {', '.join(sorted(twice))}")
    found = [run for run in runs if not only or any(fnmatch(run.name, pattern) for pattern in only)]
    if runs and not found:
        raise SystemExit(f"{path}: asks for no run called like {' or '.join(only)}")
    return found


def status_line(run: Run, failed: int | None = None) -> str:
    """One line: what the run is doing, how far it is, and its figures.

    The accuracy is that on images held out of training where there are any: what is chosen by them is not to be
    chosen by the test images.
    """
    records = run.records()
    state = "finished" if run.finished else "running" if run.going_on else "cut off" if run.begun else "waiting"
    if failed is not None and state in ("cut off", "waiting"):
        state = f"failed ({failed})"
    elif state == "waiting" and run.waits_for:
        state = f"waits for {', '.join(run.waits_for)}"
    if not records:
        return f"{run.name:<44} {state}"
    first, last = records[0], records[-1]
    judged = [record for record in records if record["test_accuracy"] is not None]
    held_out, test = ((judged[-1][f"{by}_accuracy"] if judged else None) for by in ("validation", "test"))
    accuracy = "-" if test is None else f"{test:.2f} %" if held_out is None else f"{held_out:.2f} % (validation)"
    removed = "/".join(f"{100 * (1 - last[key] / first[key]):.1f}" for key in ("params", "macs"))
    minutes = sum(record["seconds"] for record in records) / 60
    phase = f"{last['phase']} {last['cycle'] or ''}".strip()
    return (
        f"{run.name:<44} {state:<9} {last['done']:>4}/{last['total']} {phase:<10} {accuracy:>8}  "
        f"removed {removed} % (parameters/MACs)  {minutes:.1f} min"
    )

"""Runs in one tar file, to be carried from machine to machine.

Run folders enter and a file leaves with exactly what is needed to go on with each (or, of a finished one, what
it left), and the other way round.  Runs may go on meanwhile: the checkpoint is read first, and what belongs to
it, which is only ever added to, after it.  Unpacking never puts an older state over a newer one.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path

from jobs import DENSE, LAST, Run
from locks import take_lock

from sbf_pruner.utils import atomic_path, from_plain

SCORED = "checkpoints/scored.safetensors"  # nothing else can tell what other sizes the scores would have given
UNFINISHED = (
    LAST,
    "checkpoints/initial.safetensors",
    DENSE,
    SCORED,
    "metrics.jsonl",
    "scores.jsonl",
    "network.json",
    "latency.json",
    "recipe.toml",
)
FINISHED = (
    *("summary.json", "recipe.toml", "metrics.jsonl", "scores.jsonl", "network.json", "latency.json"),
    *("plan.json", "model.safetensors", "report.html", DENSE, SCORED),
)
ALL = 1 << 30  # epochs: a finished run is further than any other
MANIFEST = "manifest.json"


def pack(runs: Iterable[Run], path: Path) -> dict[str, int]:
    """Write the runs that have anything to carry; returns each one's bytes, 0 if its checkpoint is damaged."""
    sizes: dict[str, int] = {}
    manifest: dict[str, int] = {}
    with atomic_path(path) as partial, tarfile.open(partial, "w") as tar:
        for run in runs:
            names = FINISHED if run.finished else UNFINISHED
            if not (run.folder / names[0]).is_file():
                continue
            found = {name: run.folder / name for name in names}
            held = {name: file.read_bytes() for name, file in found.items() if file.is_file()}
            epochs = ALL if names is FINISHED else _epochs(held[LAST])
            if epochs < 0:
                sizes[run.name] = 0
                continue
            manifest[run.name] = epochs
            sizes[run.name] = sum(map(len, held.values()))
            for name, content in held.items():
                _add(tar, f"{run.name}/{name}", content, (run.folder / name).stat().st_mtime)
        _add(tar, MANIFEST, json.dumps(manifest).encode(), time.time())
    return sizes


def unpack(path: Path, root: Path) -> dict[str, str]:
    """Bring the runs of a packed file back below `root`; says of each what was done with it."""
    with tarfile.open(path) as tar:
        return {name: _bring(tar, name, epochs, root) for name, epochs in json.loads(_read(tar, MANIFEST)).items()}


def _bring(tar: tarfile.TarFile, name: str, epochs: int, root: Path) -> str:
    """Bring one run back unless there is one here that is as far; says what was done."""
    run = Run(name.rpartition("-seed")[0], "", int(name.rpartition("-seed")[2]), (), root)
    lock = take_lock(run.lock)
    if lock is None:
        return "left alone: it is going on here"
    try:
        last = run.folder / LAST
        if (ALL if run.finished else _epochs(last.read_bytes() if last.is_file() else b"")) >= epochs:
            return "left alone: this one is as far"
        # What marks the run as there comes last, so that a half unpacked one is unpacked again.
        for file in reversed(FINISHED if epochs == ALL else UNFINISHED):
            if (member := f"{name}/{file}") in tar.getnames():
                changed = tar.getmember(member).mtime  # a run keeps the day it was made on
                with atomic_path(run.folder / file) as partial:
                    partial.write_bytes(_read(tar, member))
                    os.utime(partial, (changed, changed))
        return "unpacked"
    finally:
        os.close(lock)


def _add(tar: tarfile.TarFile, name: str, content: bytes, changed: float) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(content), changed
    tar.addfile(member, io.BytesIO(content))


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None
    return file.read()


def _epochs(checkpoint: bytes) -> int:
    """How many epochs a checkpoint has behind it, from its header alone; -1 if it is none, or damaged."""
    length = int.from_bytes(checkpoint[:8], "little")
    try:
        entry = json.loads(json.loads(checkpoint[8 : 8 + length])["__metadata__"]["sbf"])
        return int(from_plain(json.loads(entry["header"])["state"], lambda tensor: None)["done"])
    except (ValueError, LookupError, TypeError):
        return -1

"""Runs in one tar file, to be carried from machine to machine.

Run folders enter and a file leaves with exactly what is needed to go on with each (or, of a finished one, what
it left), and the other way round.  Runs may go on meanwhile: the checkpoint is read first, and what belongs to
it, which is only ever added to, after it.  Unpacking never puts an older state over a newer one.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path

from jobs import DENSE, Run

from sbf_pruner.files import from_plain, replacing

LAST = "checkpoints/last.safetensors"
SCORED = "checkpoints/scored.safetensors"  # nothing else can tell what other sizes the scores would have given
UNFINISHED = (
    LAST,
    "checkpoints/initial.safetensors",
    DENSE,
    SCORED,
    "metrics.jsonl",
    "scores.jsonl",
    "network.json",
    "recipe.toml",
)
FINISHED = (
    *("summary.json", "recipe.toml", "metrics.jsonl", "scores.jsonl", "network.json"),
    *("plan.json", "model.safetensors", "report.html", DENSE, SCORED),
)
ALL = 1 << 30  # epochs: a finished run is further than any other
MANIFEST = "manifest.json"


def pack(runs: Iterable[Run], path: Path) -> dict[str, int]:
    """Write the runs that have anything to carry; returns each one's bytes."""
    sizes: dict[str, int] = {}
    manifest: dict[str, int] = {}
    with replacing(path) as partial, tarfile.open(partial, "w") as tar:
        for run in runs:
            names = FINISHED if run.finished else UNFINISHED
            if not (run.folder / names[0]).is_file():
                continue
            found = {name: run.folder / name for name in names}
            held = {name: file.read_bytes() for name, file in found.items() if file.is_file()}
            manifest[run.name] = ALL if names is FINISHED else _epochs(held[LAST])
            sizes[run.name] = sum(map(len, held.values()))
            for name, content in held.items():
                _add(tar, f"{run.name}/{name}", content, (run.folder / name).stat().st_mtime)
        _add(tar, MANIFEST, json.dumps(manifest).encode(), time.time())
    return sizes


def unpack(path: Path, root: Path) -> dict[str, str]:
    """Bring the runs of a packed file back below `root`; says of each what was done with it."""
    said: dict[str, str] = {}
    with tarfile.open(path) as tar:
        manifest = json.loads(_read(tar, MANIFEST))
        members = {member.name: member for member in tar.getmembers() if member.isreg()}
        for name, epochs in manifest.items():
            run = Run(name.rpartition("-seed")[0], "", int(name.rpartition("-seed")[2]), (), root)
            here = ALL if run.finished else _epochs_in(run.folder / LAST)
            if run.going_on:
                said[name] = "left alone: it is going on here"
            elif here >= epochs:
                said[name] = "left alone: this one is as far"
            else:
                # What marks the run as there comes last, so that a half unpacked one is unpacked again.
                for file in reversed(FINISHED if epochs == ALL else UNFINISHED):
                    if f"{name}/{file}" in members:
                        with replacing(run.folder / file) as partial:
                            partial.write_bytes(_read(tar, f"{name}/{file}"))
                said[name] = "unpacked"
    return said


def _add(tar: tarfile.TarFile, name: str, content: bytes, changed: float) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = len(content), changed
    tar.addfile(member, io.BytesIO(content))


def _read(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    assert file is not None
    return file.read()


def _epochs_in(path: Path) -> int:
    return _epochs(path.read_bytes()) if path.is_file() else -1


def _epochs(checkpoint: bytes) -> int:
    """How many epochs a checkpoint has behind it, from its header alone."""
    length = int.from_bytes(checkpoint[:8], "little")
    entry = json.loads(json.loads(checkpoint[8 : 8 + length])["__metadata__"]["sbf"])
    done = from_plain(json.loads(entry["header"])["state"], lambda tensor: None)["done"]
    assert isinstance(done, int)
    return done

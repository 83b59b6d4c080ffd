"""`sbf export`: a finished run as a folder of files that others can use.

A run's folder enters; a folder leaves with the network as ONNX and as a torch.export archive in the form that is
fastest on this machine, the weights as they were saved, a model card, and a manifest with the checksum of every
file.  What holds: every network file was run and gives what the saved network gives; all of it is written
beside its place and moved there in one step, so there is a whole export or none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..deploy.captured import exported
from ..deploy.choose import SECONDS, SMALLEST, TARGETS, choose
from ..deploy.int8 import accuracy, quantise
from ..deploy.onnx import require, run, session, to_onnx
from ..environment import environment, version_of
from ..errors import DataError, PruningError, RunError, nearest
from ..export import PROGRAM, save
from ..files import aside, is_there, write_text
from ..inputs import call, made_up_inputs
from ..manifest import MANIFEST, exported_files, write_manifest
from ..program import read_program, write_program
from ..training.data import Data, load_data
from ..training.feed import batches_of
from ..training.finished import FinishedRun, read_run
from ..training.folder import EXPORT
from ..training.splits import Split, Stream
from ..writable import why_not_writable
from .card import card

FORMATS = ("onnx", "pt2", "safetensors", "int8")
USUAL = ("onnx", "pt2", "safetensors")
ONNX, INT8, CARD, RECIPE = "network.onnx", "network-int8.onnx", "README.md", "recipe.toml"
TOLERANCE = 1e-4  # of the largest output, or of 1
_TESTED = (1, 3)  # batches that every network file is tried with
Report = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is asked of an export."""

    formats: Sequence[str] = USUAL
    target: str = ""
    """the runtime the form is for, or "size"; empty: onnxruntime, or eager where no ONNX is asked for"""
    batch: int = 64
    threads: int | None = None
    seconds: float = SECONDS
    """about how long forms are timed"""
    force: bool = False
    trust: bool = False
    """import the code that the run's recipe names"""

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in FORMATS:
                raise PruningError(f"no format is called {name!r}; {nearest(name, FORMATS)}")
        if not self.formats:
            raise PruningError(f"name at least one format: {', '.join(FORMATS)}")
        if self.target and self.target not in TARGETS:
            raise PruningError(f"no runtime is called {self.target!r}; {nearest(self.target, TARGETS)}")

    @property
    def runtime(self) -> str:
        """The runtime the form is for."""
        return self.target or ("onnxruntime" if self.onnx else "eager")

    @property
    def onnx(self) -> bool:
        """Is ONNX needed for any of it?"""
        return bool({"onnx", "int8"} & set(self.formats))


def export_run(
    path: str | Path,
    to: str | Path | None = None,
    request: Request | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Export a finished run; the manifest, with the folder it lies in."""
    request = request or Request()
    if request.onnx or request.target == "onnxruntime":
        require()
    finished = read_run(path, trust=request.trust)
    folder = Path(to) if to is not None else finished.path / EXPORT
    _check_place(folder, finished.path, request.force)
    place = folder.resolve()  # "." and ".." name no folder that something could be moved to
    work = aside(place)
    work.mkdir(parents=True)
    try:
        manifest = _Export(finished, request, work, report).write()
        _put(work, place, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {**manifest, "folder": os.fspath(folder)}


def _check_place(folder: Path, run_folder: Path, force: bool) -> None:
    if folder.resolve() == run_folder.resolve():
        raise RunError(f"{folder} is the run itself; name another folder (--to)")
    if Path.cwd().is_relative_to(folder.resolve()):  # it would be moved away under the user's feet
        raise RunError(
            f"{folder} is or holds the folder you are in, and an export takes the place of a whole one; "
            "name another one, which may be new (--to)"
        )
    if folder.is_symlink():
        raise RunError(f"{folder} is a link, and an export replaces a whole folder; name that folder itself (--to)")
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; name a folder (--to)")
    if (reason := why_not_writable(folder.resolve().parent)) is not None:  # it is moved there
        raise RunError(f"{folder} cannot be written, because {reason}; name another folder (--to)")
    if folder.is_dir() and any(folder.iterdir()):
        if not is_there(folder / MANIFEST):
            raise RunError(f"{folder} holds files but no export; name another folder (--to)")
        if not force:
            raise RunError(f"{folder} holds an export already; replace it (--force) or name another folder (--to)")
        exported_files(folder, folder)
        if (reason := why_not_writable(folder)) is not None:  # its files are removed
            raise RunError(f"{folder} cannot be replaced, because {reason}; name another folder (--to)")


def _put(work: Path, place: Path, shown: Path) -> None:
    """Move the finished folder to its place; an older export goes only then, and nothing else does."""
    if not place.exists():
        os.replace(work, place)
        return
    old = aside(place)
    os.replace(place, old)  # where nobody adds to it any more
    try:
        files = exported_files(old, shown) if any(old.iterdir()) else []
        os.replace(work, place)
    except BaseException:
        os.replace(old, place)
        raise
    with suppress(OSError):  # the new one is in its place
        for path in files:
            path.unlink()
        old.rmdir()


class _Export:
    def __init__(self, finished: FinishedRun, request: Request, folder: Path, report: Report) -> None:
        self.run, self.request, self.folder, self.report = finished, request, folder, report
        recipe = finished.recipe
        self.data: Data | None = None
        self.told: dict[str, Any] = finished.summary.get("data", {})
        if "int8" in request.formats or not self.told:  # a run of an older version does not tell of its data
            try:  # first: data that is not there is said before anything is timed
                self.data = load_data(recipe.data, recipe.model.num_classes, recipe.seed, finished.origin)
                self.told = self.data.told()
            except DataError as error:
                if "int8" in request.formats:
                    raise
                report(f"without the data, the card cannot say how images are scaled ({error})")

    def inputs(self, batch: int) -> Any:
        """Made-up inputs, so many samples at once."""
        return made_up_inputs(self.run.small.sbf_inputs, batch, seed=batch)

    def write(self) -> dict[str, Any]:
        request, facts = self.request, self._facts()
        if set(request.formats) - {"safetensors"}:
            if request.runtime != SMALLEST:
                self.report(f"timing forms of the network in {request.runtime}")
            chosen = choose(
                self.run.small,
                self.inputs(1),
                request.runtime,
                batch=request.batch,
                threads=request.threads,
                seconds=request.seconds,
            )
            facts |= {"target": request.runtime, "batch": request.batch, "chosen": chosen.to_dict()}
            facts["differences"] = self._networks(chosen.network)
        else:
            facts["chosen"] = {"form": None, "why": "only the weights were asked for", "milliseconds": {}}
        if "int8" in request.formats:
            facts["int8"] = self._int8()
        if "onnx" not in request.formats:
            (self.folder / ONNX).unlink(missing_ok=True)
        if "safetensors" in request.formats:
            save(self.run.small, self.folder)
        write_text(self.folder / RECIPE, self.run.recipe.to_toml())
        sizes = {path.name: path.stat().st_size for path in sorted(self.folder.iterdir())}
        write_text(self.folder / CARD, card(self.run, facts, sizes))
        return write_manifest(self.folder, facts)

    def _facts(self) -> dict[str, Any]:
        summary, recipe = self.run.summary, self.run.recipe
        keys = ("accuracy", "params", "macs")
        example: Tensor = self.inputs(1)
        scaled = {key: self.told[key] for key in ("mean", "std") if self.told.get(key)}
        return {
            "name": recipe.name,
            "model": recipe.model.name,
            "data": recipe.data.name,
            "dense": {key: summary["dense"][key] for key in keys},
            "pruned": {key: summary["pruned"][key] for key in keys},
            "input": {"shape": ["batch", *example.shape[1:]], **scaled},
            "classes": self.told.get("classes", []),
            "versions": _versions(),
        }

    def _networks(self, network: nn.Module) -> dict[str, float]:
        """Write the network in the formats asked for; how far each is from the saved one."""
        apart: dict[str, float] = {}
        if self.request.onnx:
            self.report(f"writing {ONNX}")
            ready = session(to_onnx(network, self.inputs(2), self.folder / ONNX))
            apart[ONNX] = self._apart(ONNX, lambda inputs: run(ready, inputs))
        if "pt2" in self.request.formats:
            self.report(f"writing {PROGRAM}")
            write_program(exported(network, self.inputs(2)), self.folder / PROGRAM)
            again = read_program(self.folder / PROGRAM)
            apart[PROGRAM] = self._apart(PROGRAM, lambda inputs: call(again, inputs))
        return apart

    @torch.no_grad()
    def _apart(self, name: str, again: Callable[[Any], Any]) -> float:
        """The largest difference to the saved network's outputs, over batches of several sizes."""
        worst = 0.0
        for batch in _TESTED:
            inputs = self.inputs(batch)
            for wanted, found in zip(_tensors(call(self.run.small, inputs)), _tensors(again(inputs)), strict=True):
                scale = max(1.0, wanted.abs().max().item())
                worst = max(worst, (found - wanted).abs().max().item() / scale)
        if not worst <= TOLERANCE:
            raise PruningError(
                f"{name} gives outputs that are {worst:.1e} from the network's own, more than {TOLERANCE:.0e}, and "
                "nothing was exported; leave that format out (--formats)"
            )
        return worst

    def _int8(self) -> dict[str, Any]:
        self.report(f"writing {INT8}")
        data = self.data
        assert data is not None

        def batches(split: Split | Stream) -> Iterator[tuple[Tensor, Tensor]]:
            return batches_of(split, 64, data).epoch(0)

        images = quantise(self.folder / ONNX, batches(data.train), self.folder / INT8)
        self.report("measuring the accuracy on the test images")
        both = [accuracy(self.folder / name, batches(data.test)) for name in (INT8, ONNX)]
        return {"images": images, "accuracy": both[0], "float_accuracy": both[1]}


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


def _versions() -> dict[str, Any]:
    exporters = {name: version_of(name) for name in ("onnx", "onnxscript", "onnxruntime")}
    there = {name: found for name, found in exporters.items() if found is not None}
    return {**environment(torch.device("cpu")), **there}

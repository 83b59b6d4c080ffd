"""Export a finished run as a folder: ONNX, torch.export archive, weights, eight-bit ONNX, model card and manifest.

Every network file is run and its outputs are compared with those of the saved network, except the eight-bit file,
whose accuracy is measured. All files are written to a temporary folder that is then moved into place, so an export
is complete or absent. All numbers on the model card come from the run's summary or were measured by the export.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .errors import DataError, PruningError, RunError, suggestion
from .runtimes.capture import export_program, suppress_exporter_output
from .runtimes.onnx import import_onnxruntime, run, session, to_onnx
from .runtimes.table import SMALLEST, TARGETS, TIMING_SECONDS, choose
from .saving import MANIFEST, MODEL, PROGRAM, exported_files, read_program, save, write_manifest, write_program
from .training.data.batches import Data, batches_of
from .training.data.datasets import load_data
from .training.run_folder import EXPORT, FinishedRun, read_run
from .utils.files import atomic_path, path_exists, temporary_path, why_not_writable, write_text
from .utils.formatting import first_names, format_percentage
from .utils.timing import environment, version_of
from .utils.user_model import call, random_inputs

IMAGES = 512  # training images used to calibrate activation ranges


def quantize_int8(source: Path, batches: Iterable[tuple[Tensor, Tensor]], path: Path) -> int:
    """Quantize an ONNX file to eight-bit integers, statically, and return the number of calibration images used.

    Use `accuracy` to measure the loss of accuracy, on images that were not used for calibration.
    """
    import_onnxruntime()
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    reader = _Reader(session(source, 1).get_inputs()[0].name, batches)
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))  # The quantizer logs advice to the root logger.
    try:
        with tempfile.TemporaryDirectory() as folder, suppress_exporter_output(), atomic_path(path) as temporary:
            prepared = Path(folder) / "prepared.onnx"
            quant_pre_process(str(source), str(prepared))
            quantization.quantize_static(
                str(prepared),
                str(temporary),
                reader,
                quant_format=quantization.QuantFormat.QDQ,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                per_channel=True,
            )
    finally:
        logging.disable(disabled)
    return reader.seen


def accuracy(path: Path, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the top-1 accuracy of an ONNX file in percent, in ONNX Runtime."""
    ready, hits, seen = session(path), 0, 0
    for images, labels in batches:
        (outputs,) = run(ready, images)
        hits += int((outputs.argmax(1) == labels).sum())
        seen += len(labels)
    if not seen:
        raise DataError("there is no test image to measure the accuracy on")
    return 100 * hits / seen


class _Reader:
    """Calibration data reader for ONNX Runtime that yields batches of up to `IMAGES` images in total."""

    def __init__(self, name: str, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        self.name, self.batches, self.seen = name, iter(batches), 0

    def get_next(self) -> dict[str, Any] | None:
        images = next(self.batches, (None, None))[0] if self.seen < IMAGES else None
        if images is None:
            return None
        images = images[: IMAGES - self.seen]
        self.seen += len(images)
        return {self.name: images.numpy()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.get_next, None)


_LISTED = 30  # maximum number of classes listed on the card

_ABOUT = {
    "network.onnx": "the network for ONNX Runtime, TensorRT, OpenVINO and others; any batch",
    "network.pt2": "the same for PyTorch, without the code of the model; any batch",
    "network-int8.onnx": "the same in eight-bit integers",
    "model.safetensors": "the weights of the pruned network, as trained; no pickle",
    "plan.json": "the filters that each layer of the dense network keeps",
    "recipe.toml": "the recipe of the run",
}


def card(run: FinishedRun, facts: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """Return the model card of an export, as Markdown."""
    recipe, summary = run.recipe, run.summary
    dense, pruned = summary["dense"], summary["pruned"]
    paragraphs = [
        f"# {recipe.name}, pruned",
        f"`{recipe.model.name}` for {recipe.model.num_classes} classes, trained on {recipe.data.name} and pruned "
        f"while it was trained, with sbf-pruner {facts['versions']['sbf-pruner']}.",
        "| | dense | pruned |\n|---|---|---|\n"
        f"| accuracy on the test images | {_percent(dense['accuracy'])} | {_percent(pruned['accuracy'])} |\n"
        f"| parameters | {dense['params']:,} | {pruned['params']:,} |\n"
        f"| multiply-accumulates of one image | {dense['macs']:,} | {pruned['macs']:,} |",
    ]
    if dense["accuracy"] is None:
        paragraphs += ["No dense network was trained beside it (`dense_control` of the recipe)."]
    if int8 := facts.get("int8"):
        paragraphs += [
            f"In eight-bit integers (ranges from {int8['images']} training images): {_percent(int8['accuracy'])} "
            f"of the test images, {_percent(int8['float_accuracy'])} in floating point."
        ]
    files = [f"| `{name}` | {size:,} | {_ABOUT.get(name, '')} |" for name, size in sizes.items()]
    paragraphs += ["## Files", "\n".join(["| file | bytes | |", "|---|---|---|", *files]), _input(facts["input"])]
    if classes := facts["classes"]:
        rest = " (the rest in `export.json`)" if len(classes) > _LISTED else ""
        paragraphs += [f"Outputs: one number per class, in this order: {first_names(classes, _LISTED)}{rest}."]
    networks = [f"`{name}`" for name in sizes if name.startswith("network")]
    instead = "load the weights with the model's code" if MODEL in sizes else "take the run's weights"
    compute = "computes" if len(networks) == 1 else "compute"
    inference_only = [f"- {' and '.join(networks)} {compute} outputs; to train on, {instead}."] if networks else []
    limits = [
        f"- The accuracy is that of one run (seed {recipe.seed}) on the test images of "
        f"{recipe.data.name}; accuracy on other images was not measured.",
        *inference_only,
        "- The form was chosen on one machine; on another one, a different form may be faster. The "
        "results are the same.",
        "- The checksums in `export.json` detect damaged files; they do not protect against tampering.",
    ]
    paragraphs += ["## Loading", _loading(run, sizes), "## Form", _form(facts)]
    paragraphs += ["## Recipe", f"```toml\n{recipe.to_toml().strip()}\n```", "## Limits", "\n".join(limits)]
    return "\n\n".join(paragraphs) + "\n"


def _loading(run: FinishedRun, sizes: Mapping[str, int]) -> str:
    blocks = []
    onnx = [name for name in ("network.onnx", "network-int8.onnx") if name in sizes]
    if onnx:
        blocks.append(
            f'import onnxruntime\nsession = onnxruntime.InferenceSession("{onnx[0]}")\n'
            "(outputs,) = session.run(None, {session.get_inputs()[0].name: images})  # a NumPy array"
        )
    if "network.pt2" in sizes:
        blocks.append('import sbf_pruner as sbf\nnetwork = sbf.load(".")  # checks the file, runs nothing it holds')
    if "model.safetensors" in sizes:
        config = run.recipe.model
        options = {"num_classes": config.num_classes, "in_channels": config.in_channels, **config.options}
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        blocks.append(
            "import sbf_pruner as sbf\nfrom sbf_pruner.models import resolve\n"
            f'network = sbf.load(".", lambda: resolve("{config.name}", {given}))  # can be trained on'
        )
    return "```python\n" + "\n\n".join(blocks) + "\n```"


def _input(given: Mapping[str, Any]) -> str:
    shape = " x ".join(map(str, given["shape"]))
    if "mean" not in given:
        return f"Input: float32, {shape}, scaled as in training."
    mean, deviation = (", ".join(f"{value:.4f}" for value in given[key]) for key in ("mean", "std"))
    return (
        f"Input: float32, {shape}; pixels in 0..1, less the mean ({mean}), over the deviation ({deviation}), "
        "by channel."
    )


def _form(facts: Mapping[str, Any]) -> str:
    chosen = facts["chosen"]
    if chosen["form"] is None:
        return f"The network as it was saved; {chosen['why']}."
    form = ", ".join(f"{key} {value}" for key, value in chosen["form"].items() if value and value != 1)
    zeros = ", some of them zeros that make widths even" if chosen["params"] > facts["pruned"]["params"] else ""
    purpose = "to be small" if facts["target"] == SMALLEST else f"for {facts['target']}"
    return (
        f"Written {purpose} ({form}): {chosen['why']}. It computes what the saved weights "
        f"compute, with {chosen['params']:,} numbers{zeros}."
    )


def _percent(accuracy: float | None) -> str:
    return "not measured" if accuracy is None else f"{format_percentage(accuracy, 2)} %"


USUAL = ("onnx", "pt2", "safetensors")
FORMATS = (*USUAL, "int8")
ONNX, INT8, CARD, RECIPE = "network.onnx", "network-int8.onnx", "README.md", "recipe.toml"
TOLERANCE = 1e-4  # output difference relative to the largest output, or to 1 if that is smaller
_TESTED = (1, 3)  # batch sizes with which every network file is checked
Report = Callable[[str], None]


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export."""

    formats: Sequence[str] = USUAL
    target: str = ""
    """target runtime of the form, or "size"; empty: onnxruntime, or eager if no ONNX file is requested"""
    batch: int = 64
    threads: int | None = None
    seconds: float = TIMING_SECONDS  # approximate time for timing forms
    force: bool = False
    trust: bool = False  # import the code that the recipe of the run names

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in FORMATS:
                raise PruningError(f"no format is called {name!r}; {suggestion(name, FORMATS)}")
        if not self.formats:
            raise PruningError(f"name at least one format: {', '.join(FORMATS)}")
        if self.target and self.target not in TARGETS:
            raise PruningError(f"no runtime is called {self.target!r}; {suggestion(self.target, TARGETS)}")

    @property
    def runtime(self) -> str:
        """Target runtime of the form, or "size"."""
        return self.target or ("onnxruntime" if self.onnx else "eager")

    @property
    def onnx(self) -> bool:
        """True if any requested format needs ONNX."""
        return bool({"onnx", "int8"} & set(self.formats))


def export_run(
    path: str | Path,
    to: str | Path | None = None,
    request: ExportOptions | None = None,
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Export a finished run to a folder, and return the manifest with the path of the folder."""
    request = request or ExportOptions()
    if request.onnx or request.target == "onnxruntime":
        import_onnxruntime()
    finished = read_run(path, trust=request.trust)
    folder = Path(to) if to is not None else finished.path / EXPORT
    _check_place(folder, finished.path, request.force)
    place = folder.resolve()  # A folder cannot be moved to "." or "..".
    work = temporary_path(place)
    work.mkdir(parents=True)
    try:
        manifest = _Export(finished, request, work, report).write()
        _move_into_place(work, place, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {**manifest, "folder": os.fspath(folder)}


def _check_place(folder: Path, run_folder: Path, force: bool) -> None:
    if folder.resolve() == run_folder.resolve():
        raise RunError(f"{folder} is the run itself; name another folder (--to)")
    if Path.cwd().is_relative_to(folder.resolve()):  # The current directory would be moved away.
        raise RunError(
            f"{folder} is or contains the current folder, and an export replaces the whole folder; name "
            "another one, which may be new (--to)"
        )
    if folder.is_symlink():
        raise RunError(f"{folder} is a link, and an export replaces a whole folder; name that folder itself (--to)")
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; name a folder (--to)")
    if (reason := why_not_writable(folder.resolve().parent)) is not None:  # The export is moved there.
        raise RunError(f"{folder} cannot be written, because {reason}; name another folder (--to)")
    if folder.is_dir() and any(folder.iterdir()):
        if not path_exists(folder / MANIFEST):
            raise RunError(f"{folder} holds files but no export; name another folder (--to)")
        if not force:
            raise RunError(f"{folder} holds an export already; replace it (--force) or name another folder (--to)")
        exported_files(folder, folder)
        if (reason := why_not_writable(folder)) is not None:  # The files of the old export are removed.
            raise RunError(f"{folder} cannot be replaced, because {reason}; name another folder (--to)")


def _move_into_place(work: Path, place: Path, shown: Path) -> None:
    """Move the finished folder `work` to `place`, then delete the files of the older export there and no others."""
    if not place.exists():
        os.replace(work, place)
        return
    old = temporary_path(place)
    os.replace(place, old)  # Moved away first, so that no file is added while it is checked.
    try:
        files = exported_files(old, shown) if any(old.iterdir()) else []
        os.replace(work, place)
    except BaseException:
        os.replace(old, place)
        raise
    with suppress(OSError):  # The new export is in place, so leftover files of the old one are no error.
        for path in files:
            path.unlink()
        old.rmdir()


class _Export:
    def __init__(self, finished: FinishedRun, request: ExportOptions, folder: Path, report: Report) -> None:
        self.run, self.request, self.folder, self.report = finished, request, folder, report
        recipe = finished.recipe
        self.data: Data | None = None
        self.data_facts: dict[str, Any] = finished.summary.get("data", {})
        if "int8" in request.formats or not self.data_facts:  # Older summaries lack facts about the data.
            try:  # Load it now to report missing data before anything is timed.
                self.data = load_data(recipe.data, recipe.model.num_classes, recipe.seed, finished.origin)
                self.data_facts = self.data.told()
            except DataError as error:
                if "int8" in request.formats:
                    raise
                report(f"without the data, the card cannot say how images are scaled ({error})")

    def inputs(self, batch: int) -> Any:
        """Return random inputs with `batch` samples."""
        return random_inputs(self.run.small.sbf_inputs, batch, seed=batch)

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
        found = {name: version_of(name) for name in ("onnx", "onnxscript", "onnxruntime")}
        exporters = {name: version for name, version in found.items() if version is not None}
        example: Tensor = self.inputs(1)
        scaled = {key: self.data_facts[key] for key in ("mean", "std") if self.data_facts.get(key)}
        return {
            "name": recipe.name,
            "model": recipe.model.name,
            "data": recipe.data.name,
            "dense": {key: summary["dense"][key] for key in keys},
            "pruned": {key: summary["pruned"][key] for key in keys},
            "input": {"shape": ["batch", *example.shape[1:]], **scaled},
            "classes": self.data_facts.get("classes", []),
            "versions": environment(torch.device("cpu")) | exporters,
        }

    def _networks(self, network: nn.Module) -> dict[str, float]:
        """Write the network in the requested formats; return the largest output difference of each."""
        differences: dict[str, float] = {}
        if self.request.onnx:
            self.report(f"writing {ONNX}")
            ready = session(to_onnx(network, self.inputs(2), self.folder / ONNX))
            differences[ONNX] = self._difference(ONNX, lambda inputs: run(ready, inputs))
        if "pt2" in self.request.formats:
            self.report(f"writing {PROGRAM}")
            write_program(export_program(network, self.inputs(2)), self.folder / PROGRAM)
            again = read_program(self.folder / PROGRAM)
            differences[PROGRAM] = self._difference(PROGRAM, lambda inputs: call(again, inputs))
        return differences

    @torch.no_grad()
    def _difference(self, name: str, again: Callable[[Any], Any]) -> float:
        """Return the largest relative output difference from the saved network, over several batch sizes.

        Raise a PruningError if it exceeds `TOLERANCE`.
        """
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
        training_images = batches_of(data.train, 64, data).epoch(0)
        images = quantize_int8(self.folder / ONNX, training_images, self.folder / INT8)
        self.report("measuring the accuracy on the test images")
        of_int8, of_float = (
            accuracy(self.folder / name, batches_of(data.test, 64, data).epoch(0)) for name in (INT8, ONNX)
        )
        return {"images": images, "accuracy": of_int8, "float_accuracy": of_float}


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]

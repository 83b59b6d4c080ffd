"""What holds of every format of `sbf export`. A new format needs a row in CONTRACTS, which says how it is read."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sbf_pruner as sbf
from exports import IMAGES, asked, dense, write_run
from sbf_pruner.errors import PruningError, RunError
from sbf_pruner.export import FORMATS, TOLERANCE, export_run
from sbf_pruner.runtimes import RUNTIMES, Form, run, session
from sbf_pruner.saving import MANIFEST, digest

pytest.importorskip("onnxruntime")

ONNX = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Contract:
    """What a format promises."""

    files: set[str]
    """the files it writes, beside the card and the recipe"""
    read: Callable[[Path], Callable[[Tensor], Tensor]]
    """from the folder to a function from images to outputs"""
    tolerance: float
    """of the outputs, relative to the largest"""
    packages: tuple[str, ...] = ()
    """the optional packages it needs"""


def in_onnxruntime(name: str) -> Callable[[Path], Callable[[Tensor], Tensor]]:
    def read(folder: Path) -> Callable[[Tensor], Tensor]:
        ready = session(folder / name)
        return lambda images: run(ready, images)[0]

    return read


CONTRACTS = {
    "onnx": Contract({"network.onnx"}, in_onnxruntime("network.onnx"), TOLERANCE, ONNX),
    "pt2": Contract({"network.pt2"}, lambda folder: sbf.load(folder), TOLERANCE),
    "safetensors": Contract(
        {"model.safetensors", "plan.json"}, lambda folder: sbf.load(folder, dense).eval(), tolerance=0.0
    ),
    "int8": Contract({"network-int8.onnx"}, in_onnxruntime("network-int8.onnx"), 0.2, ONNX),
}
formats = pytest.mark.parametrize("name", FORMATS)


def test_every_format_has_a_contract() -> None:
    assert set(CONTRACTS) == set(FORMATS)


@pytest.fixture(autouse=True, scope="module")
def one_form():
    """Fewer forms than there are: each takes a second to be written."""
    with pytest.MonkeyPatch.context() as patch:
        one = (Form("zeros", 4, shortcuts=True),)
        patch.setitem(RUNTIMES, "onnxruntime", replace(RUNTIMES["onnxruntime"], forms=one))
        patch.setitem(RUNTIMES, "eager", replace(RUNTIMES["eager"], forms=one))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "tiny")


def export(finished: Path, name: str, to: Path, force: bool = False) -> None:
    export_run(finished, to, asked(formats=(name,), seconds=0.05, batch=2, threads=1, force=force))


@pytest.fixture(scope="module")
def exported(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The exported folder of each format."""
    found: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in found:
            found[name] = tmp_path_factory.mktemp("exports") / name
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(logging.root.manager, "disable", logging.DEBUG)  # by the user, say
                export(finished, name, found[name])
                assert logging.root.manager.disable == logging.DEBUG
        return found[name]

    return folder


@formats
@pytest.mark.parametrize("batch", [1, 5])
def test_it_gives_what_the_saved_network_gives(
    name: str, batch: int, finished: Path, exported: Callable[[str], Path]
) -> None:
    contract = CONTRACTS[name]
    with torch.no_grad():
        wanted = sbf.load(finished, dense).eval()(IMAGES[:batch])
        found = contract.read(exported(name))(IMAGES[:batch])
    torch.testing.assert_close(found, wanted, rtol=0, atol=contract.tolerance * max(1.0, wanted.abs().max().item()))


@formats
def test_its_files_are_listed_with_their_checksums(name: str, exported: Callable[[str], Path]) -> None:
    folder = exported(name)
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert set(files) == CONTRACTS[name].files | {"recipe.toml", "README.md"}
    assert {path.name for path in folder.iterdir()} == {*files, MANIFEST}
    for file, listed in files.items():
        assert listed == {"bytes": (folder / file).stat().st_size, "sha256": digest(folder / file)}
    card = (folder / "README.md").read_text()
    assert all(f"`{file}`" in card for file in files if file != "README.md")


def test_integers_say_what_they_cost(exported: Callable[[str], Path]) -> None:
    folder = exported("int8")
    facts = json.loads((folder / MANIFEST).read_text())["int8"]
    assert facts["images"] == 64 and 0 <= facts["accuracy"] <= 100 and 0 <= facts["float_accuracy"] <= 100
    card = (folder / "README.md").read_text()
    assert f"{facts['accuracy']:.2f} % of the test images" in card
    assert 'InferenceSession("network-int8.onnx")' in card and "network.pt2" not in card  # what is not there
    assert "- `network-int8.onnx` computes outputs; to train on, take the run's weights." in card


@formats
@pytest.mark.parametrize("force", [False, True])
def test_a_folder_of_other_files_is_left_as_it_is(name: str, force: bool, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for file in (*CONTRACTS[name].files, "notes.txt"):
        (tmp_path / "mine" / file).write_text("mine")
    with pytest.raises(RunError, match="mine holds files but no export; name another folder"):
        export(finished, name, tmp_path / "mine", force)
    found = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == dict.fromkeys((*CONTRACTS[name].files, "notes.txt"), "mine")


@pytest.mark.parametrize(
    ("name", "package"), [(name, package) for name in FORMATS for package in CONTRACTS[name].packages]
)
def test_a_missing_package_is_one_sentence(
    name: str, package: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PruningError, match=rf'^[^\n]* needs {package}; run: pip install "sbf-pruner\[export\]"$'):
        export(finished, name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in FORMATS if not CONTRACTS[name].packages])
def test_no_other_package_is_needed(
    name: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ONNX:
        monkeypatch.setitem(sys.modules, package, None)
    export(finished, name, tmp_path / "out")
    assert CONTRACTS[name].files <= {path.name for path in (tmp_path / "out").iterdir()}

"""Files of every format in tests/golden, which `tools/golden.py` wrote, load and give what they gave then."""

from __future__ import annotations

import json
import shutil
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sbf_pruner as sbf
from golden import RECIPE, Tiny, images
from sbf_pruner.errors import RunError, VersionError
from sbf_pruner.measurement import read_model
from sbf_pruner.report import read_run as read_report
from sbf_pruner.report import run_page
from sbf_pruner.saving import read_manifest, read_program
from sbf_pruner.training import Recipe, RunFolder, fit, load_checkpoint
from sbf_pruner.training.run_folder import read_run
from sbf_pruner.utils.files import flatten_keys, read_tensors, write_tensors

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text("utf-8"))


def outputs(network: torch.nn.Module) -> torch.Tensor:
    return network(images()).detach()


def assert_gives(network: torch.nn.Module, key: str) -> None:
    torch.testing.assert_close(outputs(network), torch.tensor(EXPECTED[key]), rtol=1e-4, atol=1e-5)


def copied(name: str, to: Path) -> Path:
    path = GOLDEN / name
    return Path(shutil.copytree(path, to / name) if path.is_dir() else shutil.copy(path, to / name))


# -- what was written then is read now -----------------------------------------------------------------------


def test_a_saved_network() -> None:
    assert_gives(sbf.load(GOLDEN / "saved", Tiny).eval(), "saved")
    assert {name: list(kept) for name, kept in sbf.Plan.load(GOLDEN / "saved/plan.json").keep.items()} == EXPECTED[
        "plan"
    ]


def test_an_export() -> None:
    assert_gives(sbf.load(GOLDEN / "export", Tiny).eval(), "run")
    if torch.__version__.split(".")[:2] >= EXPECTED["torch"].split(".")[:2]:  # torch reads its own older archives
        assert_gives(sbf.load(GOLDEN / "export"), "run")


def test_a_run() -> None:
    run = read_run(GOLDEN / "run", trust=True)
    assert_gives(run.small, "run")
    assert run.summary["layers"].keys() == {"stem", "branch.0", "back"}
    assert sbf.measure(run.small, images(1)).macs == run.summary["pruned"]["macs"]
    assert "network" not in read_report(GOLDEN / "run").missing
    assert "<svg" in run_page(read_report(GOLDEN / "run"))


def test_a_recipe() -> None:
    written = flatten_keys(tomllib.loads((GOLDEN / "run/recipe.toml").read_text("utf-8")))
    found = Recipe.load(GOLDEN / "run/recipe.toml")
    assert written.pop("format") == "sbf-pruner recipe 1"
    settings = flatten_keys(found.to_dict())  # may have more by now
    assert {key: settings[key] for key in written} == written


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    folder = copied("stopped", tmp_path)
    assert load_checkpoint(folder / "checkpoints")["done"] == EXPECTED["stopped"]
    result = fit(Tiny(), Recipe.from_dict(RECIPE), run=folder, resume=True)
    assert len(RunFolder(folder).read_metrics()) == 5
    assert result.summary["pruned"]["macs"] <= 0.6 * result.summary["dense"]["macs"]


def test_the_state_of_a_pruner() -> None:
    pruner = sbf.Pruner(Tiny(), images(), budget=sbf.Budget(macs=0.5), scores=sbf.Scores(speed=0.05))
    pruner.load_state_dict(torch.load(GOLDEN / "state.pt", weights_only=True))
    for name, scores in pruner.scores().items():
        assert scores.tolist() == pytest.approx(EXPECTED["state"][name], rel=1e-6)


def test_a_latency_table() -> None:
    graph = sbf.trace(Tiny().eval(), images(1))
    clock = read_model(GOLDEN / "latency.json", graph)
    keep = sbf.Plan(EXPECTED["plan"]).masks(graph)
    assert clock.dense_seconds == EXPECTED["latency"]["dense_seconds"]
    assert clock.ratio(keep) == pytest.approx(EXPECTED["latency"]["ratio"])


def test_the_files_are_small() -> None:
    sizes = [path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()]
    assert max(sizes) < 100_000 and sum(sizes) < 400_000


# -- what a newer version wrote is refused ---------------------------------------------------------------------


def newer(text: str) -> str:
    """The text of a file with a format of version 9."""
    assert text.count("sbf-pruner ") == 1
    kind = text.partition("sbf-pruner ")[2].partition(" ")[0]
    assert f"sbf-pruner {kind} 1" in text
    return text.replace(f"sbf-pruner {kind} 1", f"sbf-pruner {kind} 9")


def make_newer(path: Path) -> None:
    if path.suffix == ".safetensors":
        tensors, header = read_tensors(path, "")
        write_tensors(path, tensors, {**header, "format": newer(header["format"])})
    elif path.suffix == ".pt":
        state = torch.load(path, weights_only=True)
        torch.save({**state, "format": newer(state["format"])}, path)
    else:
        first, *rest = path.read_text("utf-8").partition("\n" if path.suffix == ".toml" else ",")
        path.write_text("".join([newer(first), *rest]), "utf-8")


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "saved network": ("saved/model.safetensors", lambda path: sbf.load(path.parent, Tiny)),
    "plan of a saved network": ("saved/plan.json", lambda path: sbf.load(path.parent, Tiny)),
    "plan": ("run/plan.json", sbf.Plan.load),
    "manifest": ("export/export.json", lambda path: read_manifest(path.parent)),
    "checkpoint": ("stopped/checkpoints/last.safetensors", lambda path: load_checkpoint(path.parent)),
    "summary": ("run/summary.json", lambda path: RunFolder(path.parent).read_summary()),
    "summary for a report": ("run/summary.json", lambda path: read_report(path.parent)),
    "network of a run": ("run/network.json", lambda path: read_report(path.parent)),
    "recipe": ("run/recipe.toml", Recipe.load),
    "recipe of a run": ("run/recipe.toml", lambda path: RunFolder(path.parent).read_recipe()),
    "recipe for a report": ("run/recipe.toml", lambda path: read_report(path.parent)),
    "latency table": ("latency.json", lambda path: read_model(path, sbf.trace(Tiny().eval(), images(1)))),
    "state": (
        "state.pt",
        lambda path: sbf.Pruner(Tiny(), images()).load_state_dict(torch.load(path, weights_only=True)),
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_newer_file_is_one_sentence(kind: str, tmp_path: Path) -> None:
    name, read = READERS[kind]
    folder, _, rest = name.partition("/")
    path = copied(folder, tmp_path) / rest if rest else copied(folder, tmp_path)
    make_newer(path)
    with pytest.raises(VersionError) as caught:
        read(path)
    said = str(caught.value)
    assert " 9', and this version of sbf-pruner reads up to 'sbf-pruner " in said
    assert said.endswith("; update sbf-pruner") and "\n" not in said


def test_a_newer_archive_is_one_sentence(tmp_path: Path) -> None:
    """An archive has the version of torch's own format."""
    path, changed = GOLDEN / "export/network.pt2", tmp_path / "network.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w", zipfile.ZIP_STORED) as new:
        for member in old.infolist():
            content = old.read(member)
            if member.filename.endswith("models/model.json"):
                program = json.loads(content)
                program["schema_version"]["major"] += 1
                content = json.dumps(program).encode()
            new.writestr(member.filename, content)
    with pytest.raises(
        RunError, match=r"^[^\n]*network\.pt2, written by torch .*, cannot be read by torch .*; use [^\n]*$"
    ):
        read_program(changed)

"""A run as an exported folder: what is in it, that it is whole, and that damage is found before it is read."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import sbf_pruner as sbf
from exports import IMAGES, asked, dense, write_run
from sbf_pruner import export as bundle
from sbf_pruner.errors import DataError, PruningError, RunError
from sbf_pruner.export import ExportOptions, export_run
from sbf_pruner.runtimes import RUNTIMES, CapturedNetwork, Form, run, session, table
from sbf_pruner.saving import MANIFEST, digest

pytest.importorskip("onnxruntime")

QUICK = asked(seconds=0.1, batch=2, threads=1)


@pytest.fixture(autouse=True, scope="module")
def two_forms():
    """Fewer forms than there are: each takes a second to be written."""
    with pytest.MonkeyPatch.context() as patch:
        two = (Form("zeros", 4, shortcuts=True), Form("gather"))
        patch.setitem(RUNTIMES, "onnxruntime", replace(RUNTIMES["onnxruntime"], forms=two))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def exported(finished) -> Path:
    export_run(finished, request=QUICK)
    return finished / "export"


@pytest.fixture
def copy(exported, tmp_path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "export"))


def expected(finished) -> torch.Tensor:
    return sbf.load(finished, dense).eval()(IMAGES).detach()


def test_the_folder_holds_what_was_asked_for_and_the_manifest_knows_it(exported):
    names = {path.name for path in exported.iterdir()}
    wanted = {"network.onnx", "network.pt2", "model.safetensors", "plan.json", "recipe.toml", "README.md"}
    assert names == wanted | {MANIFEST}
    manifest = json.loads((exported / MANIFEST).read_text())
    assert set(manifest["files"]) == wanted
    assert manifest["target"] == "onnxruntime" and "the fastest of" in manifest["chosen"]["why"]
    assert manifest["chosen"]["form"]["branches"] in ("zeros", "gather")
    assert manifest["versions"]["torch"] == version("torch") and "onnxruntime" in manifest["versions"]
    assert max(manifest["differences"].values()) < 1e-4 and len(manifest["differences"]) == 2


def test_the_card_says_what_it_is(finished, exported):
    text = (exported / "README.md").read_text()
    summary = json.loads((finished / "summary.json").read_text())
    for part in (f"{summary['dense']['params']:,}", f"{summary['pruned']['macs']:,}", "50.00 %", "synthetic"):
        assert part in text
    assert 'sbf.load(".", lambda: resolve("zoo:OptionA", num_classes=4, in_channels=3))' in text
    assert f"| `network.onnx` | {(exported / 'network.onnx').stat().st_size:,} |" in text
    assert "batch x 3 x 8 x 8; pixels in 0..1, less the mean (" in text
    assert str(finished) not in text


@pytest.mark.parametrize("name", ["network.pt2", "model.safetensors", "plan.json"])
@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_damage_is_found_before_a_file_is_read(copy, name, damage):
    path = copy / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-10] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match=f"{name} is (missing|not the file that was exported)"):
        sbf.load(copy, None if name == "network.pt2" else dense)


def test_a_forged_archive_with_its_checksum_still_runs_nothing(copy, tmp_path):
    """Whoever can write the folder can write the manifest too: so the archive must be harmless by itself."""
    trap = tmp_path / "trap"

    class Payload:
        def __reduce__(self):
            return Path.touch, (trap,)

    torch.save(Payload(), copy / "network.pt2")
    manifest = json.loads((copy / MANIFEST).read_text())
    held = {"bytes": (copy / "network.pt2").stat().st_size, "sha256": digest(copy / "network.pt2")}
    manifest["files"]["network.pt2"] = held
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"is not read, because it holds 'data\.pkl', which no network needs"):
        sbf.load(copy)
    assert not trap.exists()


def test_a_damaged_manifest_is_named(copy):
    (copy / MANIFEST).write_text("{")
    with pytest.raises(
        RunError, match=r"export\.json is damaged; export the run into another folder with: sbf export RUN --to DIR"
    ):
        sbf.load(copy)
    (copy / MANIFEST).write_text("[]")
    with pytest.raises(RunError, match="is no manifest of this version"):
        sbf.load(copy)


def test_without_the_code_only_an_exported_folder_loads(finished, copy):
    with pytest.raises(RunError, match="is no exported folder; give the function that builds the dense network"):
        sbf.load(finished)
    manifest = json.loads((copy / MANIFEST).read_text())
    del manifest["files"]["network.pt2"]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"was exported without network\.pt2 \(it holds README.md, "):
        sbf.load(copy)


def test_an_export_is_replaced_only_when_asked_and_a_run_never(finished, exported, tmp_path):
    with pytest.raises(RunError, match=r"holds an export already; replace it \(--force\) or name another folder"):
        export_run(finished, request=QUICK)
    with pytest.raises(RunError, match="is the run itself"):
        export_run(finished, finished, QUICK)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file; name a folder"):
        export_run(finished, tmp_path / "file", QUICK)


def add(name, folder):
    (folder / name).write_text("mine")


def add_folder(folder):
    (folder / "more").mkdir()
    add("more/README.md", folder)


def add_link(folder):
    (folder / "plan.json").unlink()
    add("plan.json", folder.parent)
    (folder / "plan.json").symlink_to(folder.parent / "plan.json")


def name_in_manifest(folder):
    add("notes.txt", folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"]["notes.txt"] = {"bytes": 4, "sha256": digest(folder / "notes.txt")}
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (name_in_manifest, r"out/notes\.txt was not written by an export, and .*/out is not replaced"),
        (partial(add, "notes.txt"), r"out/notes\.txt was not written by an export, and .*/out is not replaced"),
        (add_folder, "out/more was not written by an export"),
        (add_link, r"out/plan\.json was not written by an export"),
        (partial(add, MANIFEST), r"out/export\.json is damaged; export the run into another folder"),
    ],
)
def test_what_no_export_wrote_is_never_removed(finished, tmp_path, monkeypatch, change, said):
    weights, out = asked(formats=("safetensors",), force=True), tmp_path / "out"
    export_run(finished, out, weights)
    change(out)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(bundle, "card", lambda *given: pytest.fail("it is to be said at once"))
        with pytest.raises(RunError, match=said):
            export_run(finished, out, weights)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_file_that_comes_while_an_export_is_written_stays(finished, tmp_path, monkeypatch):
    weights, out, real = asked(formats=("safetensors",), force=True), tmp_path / "out", bundle.card
    export_run(finished, out, weights)
    monkeypatch.setattr(bundle, "card", lambda *given: add("notes.txt", out) or real(*given))
    with pytest.raises(RunError, match=rf"^{out}/notes\.txt was not written by an export"):
        export_run(finished, out, weights)
    assert (out / "notes.txt").read_text() == "mine" and (out / MANIFEST).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_an_export_is_not_written_behind_a_link(finished, tmp_path, force):
    weights, run = asked(formats=("safetensors",), force=force), tmp_path / "run"
    shutil.copytree(finished, run, ignore=shutil.ignore_patterns("export"))
    export_run(finished, tmp_path / "elsewhere", weights)
    (run / "export").symlink_to(tmp_path / "elsewhere")
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    with pytest.raises(RunError, match="run/export is a link, and an export replaces a whole folder; name"):
        export_run(run, request=weights)
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == before


def test_the_weights_alone_need_no_onnx_and_take_no_time(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "choose", lambda *given, **named: pytest.fail("nothing is to be timed"))
    manifest = export_run(finished, tmp_path / "out", asked(formats=("safetensors",)))
    assert set(manifest["files"]) == {"model.safetensors", "plan.json", "recipe.toml", "README.md"}
    assert manifest["folder"] == str(tmp_path / "out")
    again = export_run(finished, tmp_path / "out", asked(formats=("safetensors",), force=True))
    assert again["files"] == manifest["files"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_folder_one_is_in_is_not_replaced(finished, tmp_path, monkeypatch):
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    weights = asked(formats=("safetensors",))
    for to in (".", "..", tmp_path / "here", "../below", ""):
        with pytest.raises(RunError, match=r"is or contains the current folder, .*; name another one, .* \(--to\)"):
            export_run(finished, to, weights)
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "below"]
    (tmp_path / "beside").mkdir()
    for to in ("new/./", "../../beside/../beside"):  # the second is there, and empty
        assert export_run(finished, to, weights)["folder"] == str(Path(to))
    assert (tmp_path / "here/below/new" / MANIFEST).is_file() and (tmp_path / "beside" / MANIFEST).is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside", "here"]


def test_exports_to_one_place_at_once_do_not_disturb_one_another(finished, tmp_path, monkeypatch):
    (tmp_path / ".out.0123456789ab.partial").mkdir()  # of a process that was killed long ago
    os.utime(tmp_path / ".out.0123456789ab.partial", (0, 0))
    weights, real = asked(formats=("safetensors",)), bundle.card

    def meanwhile(*given):
        monkeypatch.setattr(bundle, "card", real)
        export_run(finished, tmp_path / "out", weights)  # as another process would
        return real(*given)

    monkeypatch.setattr(bundle, "card", meanwhile)
    manifest = export_run(finished, tmp_path / "out", weights)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*manifest["files"], MANIFEST}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_where_bytes_count_the_smallest_form_is_written_and_nothing_timed(
    finished, exported, tmp_path, monkeypatch
):
    monkeypatch.setattr(table, "min_times", lambda *given: pytest.fail("nothing is to be timed"))
    manifest = export_run(finished, tmp_path / "out", asked(formats=("onnx",), target="size"))
    assert manifest["chosen"]["form"]["branches"] == "gather" and manifest["chosen"]["milliseconds"] == {}
    padded = CapturedNetwork(sbf.load(finished, dense).eval(), IMAGES[:1]).form(Form("zeros", 4, shortcuts=True))
    assert manifest["chosen"]["params"] < sum(p.numel() for p in padded.parameters())
    (found,) = run(session(tmp_path / "out" / "network.onnx"), IMAGES)
    torch.testing.assert_close(found, expected(finished), rtol=0, atol=1e-4)
    assert (
        "Written to be small (branches gather): the smallest of 2 forms" in (tmp_path / "out/README.md").read_text()
    )


def test_whoever_gets_the_network_learns_what_its_outputs_are_called(finished, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "test"):
        for name in ("ant", "bee", "cow", "dog"):
            (tmp_path / "pictures" / part / name).mkdir(parents=True)
            image.new("RGB", (8, 8), (9, 8, 7)).save(tmp_path / "pictures" / part / name / "1.png")
    own = Path(shutil.copytree(finished, tmp_path / "own", ignore=shutil.ignore_patterns("export")))
    text = (own / "recipe.toml").read_text().replace('name = "synthetic"', 'name = "folder"')
    (own / "recipe.toml").write_text(text.replace('path = ""', f'path = "{tmp_path / "pictures"}"'))
    manifest = export_run(own, request=asked(formats=("safetensors",)))
    assert manifest["classes"] == ["ant", "bee", "cow", "dog"]
    card = (own / "export" / "README.md").read_text()
    assert "Outputs: one number per class, in this order: ant, bee, cow, dog." in card
    assert "compute outputs" not in card  # there is no such file


def test_a_failure_leaves_nothing_behind_and_the_old_export_whole(finished, copy, monkeypatch):
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    monkeypatch.setattr(bundle, "card", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_run(finished, copy, asked(formats=("safetensors",), force=True))
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_a_file_that_gives_something_else_is_not_exported(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "TOLERANCE", 1e-12)
    with pytest.raises(PruningError, match=r"network\.pt2 gives outputs that are .* and nothing was exported"):
        export_run(finished, tmp_path / "out", asked(formats=("pt2",), seconds=0.1, batch=2))
    assert list(tmp_path.iterdir()) == []


def test_runs_that_cannot_be_exported_are_named(finished, tmp_path):
    with pytest.raises(RunError, match=r"there is no run in .*; name the folder of a finished run"):
        export_run(tmp_path)
    half = Path(
        shutil.copytree(finished, tmp_path / "half", ignore=shutil.ignore_patterns("summary.json", "export"))
    )
    with pytest.raises(RunError, match="is not finished; let it end"):
        export_run(half)
    away = Path(shutil.copytree(finished, tmp_path / "away", ignore=shutil.ignore_patterns("export")))
    text = (away / "recipe.toml").read_text().replace('name = "synthetic"', 'name = "npz"')
    (away / "recipe.toml").write_text(text.replace('path = ""', 'path = "nowhere.npz"'))
    with pytest.raises(DataError, match=r"nowhere\.npz"):
        export_run(away, request=asked(formats=("int8",)))
    # A run of today tells of its data in its summary; without that, and without the data, the card does without.
    export_run(away, request=asked(formats=("safetensors",)))
    assert "scaled as in training" in (away / "export" / "README.md").read_text()
    summary = json.loads((away / "summary.json").read_text())
    summary["data"] = {"mean": [0.25], "std": [0.5], "classes": ["ant", "bee", "cow", "doe"]}
    (away / "summary.json").write_text(json.dumps(summary))
    export_run(away, request=asked(formats=("safetensors",), force=True))
    card = (away / "export" / "README.md").read_text()
    assert "less the mean (0.2500), over the deviation (0.5000)" in card and "ant, bee, cow, doe" in card


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"formats": ("onx",)}, r"no format is called 'onx'; did you mean 'onnx'\?"),
        ({"formats": ()}, "name at least one format: onnx, pt2, safetensors, int8"),
        ({"target": "egaer"}, r"no runtime is called 'egaer'; did you mean 'eager'\?"),
    ],
)
def test_wrong_requests_are_one_sentence(given, sentence):
    with pytest.raises(PruningError, match=f"^{sentence}$"):
        ExportOptions(**given)

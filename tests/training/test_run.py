"""The whole schedule on a tiny network: what is written, what is refused, and what a killed run loses."""

from __future__ import annotations

import copy
import errno
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import sbf_pruner as sbf
from runs import made_by
from sbf_pruner.cli import summary_lines
from sbf_pruner.errors import PruningError, RecipeError, RunError, Stopped
from sbf_pruner.measurement import measure
from sbf_pruner.saving import MANIFEST, write_manifest
from sbf_pruner.scores import Penalty
from sbf_pruner.surgery import verify
from sbf_pruner.training import (
    Recipe,
    Result,
    RunFolder,
    Signals,
    fit,
    load_checkpoint,
    recording,
    restore_torch_settings,
    run,
    save_checkpoint,
    total_epochs,
)
from sbf_pruner.training.engine import CapturedEngine, Engine, EpochResult
from shares import mostly_slow

TABLE: dict[str, Any] = {
    "name": "tiny",
    "dense_control": True,
    "device": "cpu",
    "model": {"name": "tests:Tiny", "num_classes": 4, "in_channels": 1},
    "data": {"name": "synthetic", "image_size": 8, "channels": 1, "samples": 64, "batch_size": 16, "crop": 1},
    "phases": {"warmup": 2, "cycles": 2, "score": 2, "weights": 2, "finetune": 2},
    "scores": {"lr": 3e-3, "penalty": 0.02},
}
EPOCHS = 12


class Tiny(nn.Module):
    """A stem, one residual block whose two sides keep different filters, dropout, and a classifier."""

    def __init__(self, num_classes: int = 4, in_channels: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.conv1 = nn.Conv2d(8, 12, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return self.fc(self.dropout(torch.relu(x + out).mean((2, 3))))


class Killed(BaseException):
    """Not an Exception: nothing may catch it on the way."""


def recipe(**changes: Any) -> Recipe:
    table = copy.deepcopy(TABLE)
    for key, value in changes.items():
        section, _, inner = key.partition("__")
        if inner:
            table.setdefault(section, {})[inner] = value
        else:
            table[section] = value
    return Recipe.from_dict(table)


def model(seed: int = 0) -> Tiny:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Tiny()


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The records without the seconds, which no two runs share."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def weights(result: Result) -> list[Tensor]:
    return list(result.model.state_dict().values())


def kill_after(epoch: int) -> Any:
    def report(record: dict[str, Any]) -> None:
        if record["done"] == epoch:
            raise Killed

    return report


@pytest.fixture(scope="module", autouse=True)
def hurried() -> Iterator[None]:
    """Nobody looks at the latency here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "TIMED_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run that nothing interrupts."""
    return fit(model(), recipe(), run=tmp_path_factory.mktemp("runs") / "straight")


# -- what a run leaves ---------------------------------------------------------------------------------------


def test_the_run_folder_holds_what_it_should(straight: Result) -> None:
    names = sorted(str(p.relative_to(straight.folder)) for p in straight.folder.rglob("*") if p.is_file())
    assert names == [
        "checkpoints/dense.safetensors",
        "checkpoints/initial.safetensors",
        "checkpoints/last.safetensors",
        "checkpoints/scored.safetensors",
        "metrics.jsonl",
        "model.safetensors",
        "network.json",
        "plan.json",
        "recipe.toml",
        "report.html",
        "scores.jsonl",
        "summary.json",
    ]
    assert sbf.Recipe.load(straight.folder / "recipe.toml") == recipe()
    assert sbf.Plan.load(straight.folder / "plan.json") == straight.plan
    assert json.loads((straight.folder / "summary.json").read_text()) == straight.summary


def test_filters_are_really_gone_and_nothing_else_changed(straight: Result) -> None:
    dense, pruned = straight.summary["dense"], straight.summary["pruned"]
    images = torch.rand(1, 1, 8, 8)
    assert pruned["params"] == sum(p.numel() for p in straight.model.parameters()) < dense["params"]
    assert pruned["macs"] == measure(straight.model, images).macs < dense["macs"]
    assert dense["params"] == sum(p.numel() for p in model().parameters())
    assert 0 <= straight.summary["cut_error"] <= 1e-12
    assert {name: layer["after"] for name, layer in straight.summary["layers"].items()} == straight.plan.widths()
    assert isinstance(straight.model, Tiny)


def test_the_summary_tells_how_it_was_come_by(straight: Result) -> None:
    told = straight.summary
    assert told["name"] == "tiny" and told["seed"] == 0 and told["epochs"] == EPOCHS
    assert told["seconds"] > 0 and told["latency_batch"] == 16  # all the test images there are
    assert {"torch", "python", "cpu", "threads", "numpy", "sbf-pruner", "device"} <= set(told["environment"])
    records = metrics(straight.folder)
    assert told["pruned"]["accuracy"] == records[EPOCHS - 1]["test_accuracy"]
    assert told["dense"]["accuracy"] == records[-1]["test_accuracy"]
    assert told["dense"]["warmup_accuracy"] == records[1]["test_accuracy"]
    assert told["dense"]["latency_ms"] > 0 and told["pruned"]["latency_ms"] > 0


def test_every_epoch_has_one_record(straight: Result) -> None:
    records = metrics(straight.folder)
    assert [r["done"] for r in records] == list(range(1, 2 * EPOCHS + 1))
    assert {r["total"] for r in records} == {total_epochs(recipe())} == {2 * EPOCHS}
    spelled = [f"{r['phase']}{r['cycle'] or ''}" for r in records[::2]]
    assert spelled == ["warmup", "score1", "weights1", "score2", "weights2", "finetune", *["control"] * 6]
    filters = [r["filters"] for r in records]
    assert filters[0] == filters[2] == 28  # gates move at the end of a score phase
    assert filters[3] < 28 and filters[11] <= filters[3]
    assert {r["filters"] for r in records if r["phase"] == "control"} == {28}
    assert records[11]["macs"] == straight.summary["pruned"]["macs"]
    assert records[-1]["macs"] == straight.summary["dense"]["macs"]
    assert all((r["penalty"] > 0) == (r["phase"] == "score") for r in records)


def test_scores_are_written_after_every_epoch_of_them(straight: Result) -> None:
    lines = [json.loads(line) for line in (straight.folder / "scores.jsonl").read_text().splitlines()]
    records = metrics(straight.folder)
    assert [line["done"] for line in lines] == [r["done"] for r in records if r["phase"] == "score"] == [3, 4, 7, 8]
    assert [line["cycle"] for line in lines] == [1, 1, 2, 2]
    widths = {name: layer["before"] for name, layer in straight.summary["layers"].items()}
    for line in lines:
        assert {name: len(scores) for name, scores in line["scores"].items()} == widths
    assert ["kept" in line for line in lines] == [False, True, False, True]
    assert lines[-1]["kept"] == straight.plan.widths()
    # The gates are the scores against the threshold, but for filters that lost their inputs or readers.
    for name, kept in straight.plan.keep.items():
        assert all(lines[-1]["scores"][name][place] >= 0.5 for place in kept)
    assert lines[0]["scores"] != lines[1]["scores"]


def test_scores_are_written_by_the_captured_engine_too(
    straight: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "make_engine", made_by(CapturedEngine))
    result = fit(model(), recipe(dense_control=False), run=tmp_path / "run")
    lines, others = (
        [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
        for folder in (result.folder, straight.folder)
    )
    assert [line["done"] for line in lines] == [line["done"] for line in others]
    for name, scores in lines[0]["scores"].items():
        assert scores == pytest.approx(others[0]["scores"][name], abs=2e-3)
    assert lines[-1]["kept"] == result.plan.widths() and result.summary["refinement"]


def test_refinement_lies_within_the_bounds_of_the_lemma(straight: Result) -> None:
    (block,) = straight.summary["refinement"]
    assert block["layer"] == "conv2"
    low, high = (block[key] ** 2 * block["unscored"] for key in ("delta", "top"))
    assert 0 < low < block["scored"] < high
    assert block["pruned"] > 0


def test_the_summary_names_what_was_left_alone(straight: Result) -> None:
    assert straight.summary["skipped"] == {"fc": "its filters are the network's outputs"}


def test_the_size_of_a_file_is_that_of_the_one_written(straight: Result) -> None:
    size = (straight.folder / "model.safetensors").stat().st_size
    assert straight.summary["pruned"]["file_bytes"] == size < straight.summary["dense"]["file_bytes"]


def test_a_report_that_cannot_be_drawn_does_not_cost_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: Any) -> str:
        raise ZeroDivisionError("no pen")

    monkeypatch.setattr("sbf_pruner.report.run_page", broken)
    monkeypatch.setattr("sbf_pruner.training.recording.inspect_model", broken)
    monkeypatch.setattr("sbf_pruner.training.recording.scored_refinement", broken)
    monkeypatch.setattr("sbf_pruner.training.recording.pruned_refinement", broken)
    result = fit(model(), recipe(dense_control=False, phases__cycles=1), run=tmp_path / "run")
    assert result.summary["refinement"] == [] and (tmp_path / "run/summary.json").is_file()
    assert result.summary["unmeasured"] == dict.fromkeys(("scored", "pruned"), "ZeroDivisionError: no pen")
    lines = [json.loads(line) for line in (tmp_path / "run/scores.jsonl").read_text().splitlines()]
    assert lines[-1]["refinement"] == [] and lines[-1]["unmeasured"] == "ZeroDivisionError: no pen"
    assert not (tmp_path / "run/report.html").exists()
    assert "no report was drawn (ZeroDivisionError: no pen)" in caplog.text
    assert "no pen" in json.loads((tmp_path / "run/network.json").read_text())["undrawn"]


def test_a_run_begun_by_an_older_version_goes_on_and_stores_what_it_can(straight: Result, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fit(model(), recipe(), run=tmp_path / "run", report=kill_after(6))
    for name in ("network.json", "scores.jsonl"):
        (tmp_path / "run" / name).unlink()
    fit(model(), recipe(), run=tmp_path / "run", resume=True)
    lines = [json.loads(line) for line in (tmp_path / "run/scores.jsonl").read_text().splitlines()]
    assert [line["done"] for line in lines] == [7, 8]
    stored = [(folder / "network.json").read_bytes() for folder in (tmp_path / "run", straight.folder)]
    assert stored[0] == stored[1]


def test_the_run_folder_loads_again(straight: Result) -> None:
    again = sbf.load(straight.folder, Tiny)
    assert str(again) == str(straight.model)
    assert all(map(torch.equal, again.state_dict().values(), weights(straight)))


def test_the_users_model_and_random_stream_are_untouched(tmp_path: Path) -> None:
    net = model()
    net.bn1.eval()
    before = copy.deepcopy(net.state_dict())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fit(net, recipe(phases__cycles=1), run=tmp_path / "run")
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert net.training and not net.bn1.training and not net.bn1._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_network_with_the_old_weight_norm_is_trained_and_cut(tmp_path: Path) -> None:
    """It holds a tensor that was computed, which a plain deep copy refuses."""
    net = model()
    net.conv1 = nn.utils.weight_norm(net.conv1)
    made = recipe(phases__cycles=1, finetune_on="small", distill__alpha=0.5)
    result = fit(net, made, run=tmp_path / "run")
    assert 0 <= result.summary["cut_error"] <= 1e-12
    assert result.summary["pruned"]["macs"] < result.summary["dense"]["macs"]
    again = fit(net, made, run=tmp_path / "run", resume=True)
    assert again.was_finished and str(again.model) == str(result.model)


def test_a_recipe_may_set_the_threads_of_its_run(tmp_path: Path) -> None:
    before, seen = torch.get_num_threads(), []
    made = recipe(threads=before + 1, dense_control=False, phases__cycles=0)
    result = fit(model(), made, run=tmp_path / "run", report=lambda record: seen.append(torch.get_num_threads()))
    assert set(seen) == {before + 1} and torch.get_num_threads() == before
    assert result.summary["environment"]["threads"] == before + 1


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_settings_of_torch_that_an_engine_changes_are_put_back(precision: str, tmp_path: Path) -> None:
    def fast(record: dict[str, Any]) -> None:
        """As the engine for CUDA does."""
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")

    def settings() -> list[Any]:
        backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
        held = [backend.fp32_precision for backend in backends]
        return [torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision(), *held]

    torch.set_float32_matmul_precision(precision)
    try:
        before = settings()
        fit(model(), recipe(dense_control=False, phases__cycles=0), run=tmp_path / "run", report=fast)
        assert settings() == before
    finally:
        torch.backends.cudnn.benchmark = False
        torch.set_float32_matmul_precision("highest")


def test_precisions_that_have_no_one_word_are_put_back() -> None:
    """Set for one backend alone, torch refuses to say what holds for all."""
    mine = torch.backends.cuda.matmul
    try:
        torch.set_float32_matmul_precision("highest")
        mine.fp32_precision = "tf32"
        with restore_torch_settings():
            torch.set_float32_matmul_precision("highest")
            assert mine.fp32_precision == "ieee"
        assert mine.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_run_starts_where_its_name_and_seed_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = recipe(seed=3, dense_control=False, phases__warmup=1, phases__cycles=0, phases__finetune=0)
    assert fit(model(), short).folder == Path("runs/tiny-seed3")
    assert (tmp_path / "runs/tiny-seed3/summary.json").is_file()


def test_another_seed_is_another_run(straight: Result, tmp_path: Path) -> None:
    other = fit(model(), recipe(seed=1, dense_control=False), run=tmp_path / "run")
    assert metrics(other.folder)[0]["loss"] != metrics(straight.folder)[0]["loss"]


def test_accuracy_on_a_validation_split_is_told_beside_the_tests(tmp_path: Path) -> None:
    made = recipe(data__validation=0.25, dense_control=False, phases__cycles=1)
    result = fit(model(), made, run=tmp_path / "run")
    record = metrics(result.folder)[-1]
    assert 0 <= record["validation_accuracy"] <= 100
    assert result.summary["pruned"]["validation_accuracy"] == record["validation_accuracy"]


# -- averages, a teacher, statistics taken anew -----------------------------------------------------------------

EVERYTHING: dict[str, Any] = {
    "dense_control": False,
    "phases__cycles": 2,
    "phases__finetune": 4,
    "warmup__cutout": 3,
    "warmup__ema": 0.8,
    "warmup__nesterov": True,
    "warmup__ramp": 1,
    "weights__batch_size": 8,
    "weights__recalibrate": 2,
    "scores__speed": 0.1,
    "scores__balance": "cost",
    "scores__blocks": True,
    "scores__activation": "sigmoid",
    "scores__binary": True,
    "scores__freeze_norms": False,
    "budget__macs": 0.7,
    "scores__steer": True,
    "budget__settled": 0,
    "constraints__round_to": 2,
    "finetune__ema": 0.9,
    "finetune__mixup": 0.4,
    "finetune__recalibrate": 2,
    "finetune__decay_all": False,
    "distill__alpha": 0.7,
    "distill__fade": True,
    "distill__mirrored": True,
    "distill__during": "cycles",
}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run with every device there is, which nothing interrupts."""
    return fit(model(), recipe(**EVERYTHING), run=tmp_path_factory.mktemp("runs") / "full")


@pytest.mark.parametrize("finetune_on", mostly_slow(["small", "gated"], ["gated"]))
def test_a_run_with_everything_killed_three_times_ends_with_the_same_bits(
    finetune_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SAVING_SHARE", 1e9)
    made = recipe(**EVERYTHING, finetune_on=finetune_on)
    whole = fit(model(), made, run=tmp_path / "whole")
    for epoch in (1, 4, 13):  # in the warm-up, between scores and weights, in the fine-tuning
        with pytest.raises(Killed):
            fit(model(epoch - 1), made, run=tmp_path / "run", resume=epoch > 1, report=kill_after(epoch))
    assert_same_run(fit(model(9), made, run=tmp_path / "run", resume=True), whole)


# A budget brings these with it: to be without them takes a word.
INSTEAD: dict[str, dict[str, Any]] = {
    "scores__balance": {"scores__balance": "area"},
    "scores__steer": {"scores__steer": False},
}


@pytest.mark.parametrize("key", [key for key in EVERYTHING if "__" in key and not key.startswith("phases")])
def test_each_of_them_changes_the_run(key: str, full: Result, tmp_path: Path) -> None:
    """Were one of them not wired up, leaving it out would change nothing."""
    made = recipe(**{name: value for name, value in EVERYTHING.items() if name != key}, **INSTEAD.get(key, {}))
    losses = [record["loss"] for record in metrics(full.folder)]

    def stop_where_it_differs(record: dict[str, Any]) -> None:
        if record["loss"] != losses[record["done"] - 1]:
            raise Killed

    try:
        without = fit(model(), made, run=tmp_path / "run", report=stop_where_it_differs)
    except Killed:
        return
    # What only moves scores, or statistics that are taken anew later, may leave the same filters and weights.
    names = ("model.safetensors", "scores.jsonl", "checkpoints/scored.safetensors")
    left = [[(r.folder / name).read_bytes() for name in names] for r in (without, full)]
    assert left[0] != left[1]


def test_the_average_is_judged_and_stays(full: Result) -> None:
    """What is judged in the last epoch is what the run leaves."""
    assert full.summary["pruned"]["accuracy"] == metrics(full.folder)[-1]["test_accuracy"]


def test_the_teacher_is_the_dense_network_as_the_warm_up_left_it(full: Result, tmp_path: Path) -> None:
    short = recipe(**{**EVERYTHING, "phases__cycles": 0, "phases__finetune": 0, "budget__macs": 1.0})
    dense = fit(model(), short, run=tmp_path / "dense")
    teacher = load_checkpoint(full.folder / "checkpoints", "dense.safetensors")
    assert list(teacher) == list(model().state_dict())
    assert all(map(torch.equal, teacher.values(), weights(dense)))


def test_the_penalty_follows_the_budget_within_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(Penalty, "steer", lambda self, level, progress: seen.append(progress))
    made = recipe(dense_control=False, budget__macs=0.6, scores__steer=True, budget__settled=0)
    fit(model(), made, run=tmp_path / "run")
    # Two cycles of two epochs of four steps: after each step, and at the end of the phase with what it landed on.
    assert seen == [n / 16 for n in range(1, 17)]


# -- scores and weights in the same steps ------------------------------------------------------------------------

JOINT: dict[str, Any] = {
    "dense_control": False,
    "scores__joint": True,
    "scores__balance": "cost",
    "scores__lr": 1e-3,
    "weights__ema": 0.8,
    "weights__mixup": 1.0,
    "weights__batch_size": 8,
    "budget__macs": 0.6,
    "scores__steer": True,
    "budget__settled": 1,
    "distill__alpha": 0.3,
    "distill__during": "weights",
}


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return fit(model(), recipe(**JOINT), run=tmp_path_factory.mktemp("runs") / "joint")


def test_a_joint_run_has_one_phase_a_cycle_and_lands_as_any_other(joint: Result) -> None:
    records = metrics(joint.folder)
    spelled = [f"{r['phase']}{r['cycle'] or ''}" for r in records[::2]]
    assert spelled == ["warmup", "joint1", "joint1", "joint2", "joint2", "finetune"]
    assert all((r["penalty"] > 0) == (r["phase"] == "joint") for r in records)
    lines = [json.loads(line) for line in (joint.folder / "scores.jsonl").read_text().splitlines()]
    assert [line["done"] for line in lines] == list(range(3, 11))
    assert [line["done"] for line in lines if "kept" in line] == [6, 10]
    assert lines[-1]["kept"] == joint.plan.widths()
    pruned, dense = joint.summary["pruned"]["macs"], joint.summary["dense"]["macs"]
    assert 0.5 * dense < pruned <= 0.6 * dense
    assert joint.summary["cut_error"] <= 1e-12 and joint.summary["epochs"] == EPOCHS
    page = (joint.folder / "report.html").read_text()
    assert "the weights are trained with them" in page and "scores and weights 2" in page


@pytest.mark.parametrize(
    "epoch", mostly_slow([4, 6, 9, 10, 11], [4, 9])
)  # within and at the end of both cycles, in the fine-tuning
def test_a_joint_run_killed_ends_with_the_same_bits(
    epoch: int, joint: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SAVING_SHARE", 1e9)
    with pytest.raises(Killed):
        fit(model(), recipe(**JOINT), run=tmp_path / "run", report=kill_after(epoch))
    assert_same_run(fit(model(9), recipe(**JOINT), run=tmp_path / "run", resume=True), joint)


def test_a_joint_run_by_the_captured_engine_is_the_same(
    joint: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "make_engine", made_by(CapturedEngine))
    other = fit(model(), recipe(**JOINT), run=tmp_path / "run")
    for a, b in zip(metrics(other.folder), metrics(joint.folder), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_a_joint_loss_that_is_not_finite_names_the_weights_rate(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"in phase joint 1, epoch 1 of 4; lower weights\.lr"):
        fit(model(), recipe(scores__joint=True, weights__lr=1e37, weights__optimizer="sgd"), run=tmp_path / "run")


# -- schedules with holes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hole", ["warmup", "score", "weights", "finetune"])
def test_a_phase_may_have_no_epochs(hole: str, tmp_path: Path) -> None:
    made = recipe(dense_control=False, phases__cycles=1, **{f"phases__{hole}": 0})
    result = fit(model(), made, run=tmp_path / "run")
    assert len(metrics(result.folder)) == total_epochs(made)
    assert (result.summary["dense"]["warmup_accuracy"] is None) == (hole == "warmup")
    assert (result.summary["pruned"]["macs"] == result.summary["dense"]["macs"]) == (hole == "score")
    assert result.summary["dense"]["accuracy"] is None


def test_the_cut_comes_before_the_control_even_without_fine_tuning(tmp_path: Path) -> None:
    alone = fit(model(), recipe(phases__finetune=0, dense_control=False), run=tmp_path / "alone")
    controlled = fit(model(), recipe(phases__finetune=0), run=tmp_path / "controlled")
    assert all(map(torch.equal, weights(alone), weights(controlled)))
    assert alone.plan == controlled.plan


def test_no_cycles_are_dense_training_without_pruning(tmp_path: Path) -> None:
    result = fit(model(), recipe(phases__cycles=0, dense_control=False), run=tmp_path / "run")
    assert [r["phase"] for r in metrics(result.folder)] == ["warmup", "warmup", "finetune", "finetune"]
    assert result.summary["pruned"]["params"] == result.summary["dense"]["params"]
    assert all(layer["after"] == layer["before"] for layer in result.summary["layers"].values())


def test_no_epochs_at_all_only_measure(tmp_path: Path) -> None:
    made = recipe(phases__warmup=0, phases__cycles=0, phases__finetune=0)
    result = fit(model(), made, run=tmp_path / "run")
    assert not (result.folder / "metrics.jsonl").exists()
    assert all(torch.equal(a, b) for a, b in zip(weights(result), model().state_dict().values(), strict=True))


# -- killed and resumed --------------------------------------------------------------------------------------


def assert_same_run(result: Result, straight: Result) -> None:
    assert all(torch.equal(a, b) for a, b in zip(weights(result), weights(straight), strict=True))
    assert result.plan == straight.plan
    assert metrics(result.folder) == metrics(straight.folder)
    for part in ("dense", "pruned"):
        for key in ("accuracy", "params", "macs"):
            assert result.summary[part][key] == straight.summary[part][key]
    for key in ("cut_error", "layers", "skipped", "refinement"):
        assert result.summary[key] == straight.summary[key]
    for name in ("scores.jsonl", "network.json", "checkpoints/scored.safetensors"):
        assert (result.folder / name).read_bytes() == (straight.folder / name).read_bytes()
    files = [folder / "model.safetensors" for folder in (result.folder, straight.folder)]
    assert files[0].read_bytes() == files[1].read_bytes()


# 1, 2: warm-up; 3, 4: scores; 5, 6: weights; 7, 10: second cycle; 11, 12: fine-tuning; 13 to 24: control
@pytest.mark.parametrize("epoch", mostly_slow([1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 18, 23, 24], [4, 6, 11, 18]))
def test_a_run_killed_after_any_epoch_ends_with_the_same_bits(epoch: int, straight: Result, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fit(model(), recipe(), run=tmp_path / "run", report=kill_after(epoch))
    assert len(metrics(tmp_path / "run")) == epoch
    # Other weights than the first time: everything must come from the checkpoint.
    seen: list[int] = []
    resumed = fit(
        model(9),
        recipe(),
        run=tmp_path / "run",
        resume=True,
        report=lambda record: seen.append(record["done"]),
    )
    assert seen == list(range(2 * EPOCHS + 1 - len(seen), 2 * EPOCHS + 1)) and len(seen) >= 2 * EPOCHS - epoch
    assert_same_run(resumed, straight)


def test_a_run_killed_again_and_again_ends_with_the_same_bits(straight: Result, tmp_path: Path) -> None:
    for epoch in (1, 4, 5, 9, 12, 20):
        with pytest.raises(Killed):
            fit(model(), recipe(), run=tmp_path / "run", resume=epoch > 1, report=kill_after(epoch))
    assert_same_run(fit(model(), recipe(), run=tmp_path / "run", resume=True), straight)


@pytest.mark.parametrize("epoch", mostly_slow([1, 4, 8], [4]))
def test_a_run_killed_between_record_and_checkpoint_does_that_epoch_again(
    epoch: int, straight: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = run.save_checkpoint

    def killed(folder: Path, state: dict[str, Any], *name: str) -> Path:
        if state.get("done") == epoch:
            raise Killed
        return save(folder, state, *name)

    monkeypatch.setattr(run, "SAVING_SHARE", 1e9)  # every epoch, however long it takes
    monkeypatch.setattr(run, "save_checkpoint", killed)
    with pytest.raises(Killed):
        fit(model(), recipe(), run=tmp_path / "run")
    assert len(metrics(tmp_path / "run")) == epoch
    for name in ("metrics.jsonl", "scores.jsonl"):
        with (tmp_path / "run" / name).open("a") as file:
            file.write('{"half a rec')
    monkeypatch.undo()
    assert_same_run(fit(model(), recipe(), run=tmp_path / "run", resume=True), straight)


# -- stopped by a signal -------------------------------------------------------------------------------------

# Epoch, step and engine: in the warm-up, in both kinds of phases, in the fine-tuning; and after the last step of an
# epoch, as the network begins to be judged.
STOPS = [
    (1, 2, Engine),
    (3, 1, CapturedEngine),
    (6, 1, CapturedEngine),
    (8, 3, Engine),
    (12, 2, CapturedEngine),
    (13, 4, Engine),
    (14, 4, Engine),
]


def stop_at(patch: pytest.MonkeyPatch, epoch: int, step: int, number: int, judging: bool = False) -> None:
    """Send a signal after a step of an epoch; or, when that is the last one, at the start of the evaluation."""
    check, passed = run.Run._check_signals, []

    def checked(self: run.Run) -> None:
        if (self.done + 1, self.steps) == (epoch, step):
            passed.append(step)
            if len(passed) > judging:
                signal.raise_signal(number)
        check(self)

    patch.setattr(run.Run, "_check_signals", checked)


@pytest.mark.parametrize("stops", [[*STOPS[:2], STOPS[5]], pytest.param(STOPS, marks=pytest.mark.slow)])
def test_a_run_stopped_by_signals_goes_on_within_the_epoch_to_the_same_bits(
    stops: list[tuple[int, int, type[Engine]]], full: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, numbers = recipe(**EVERYTHING), itertools.cycle((signal.SIGTERM, signal.SIGINT))
    for (epoch, step, engine), number in zip(stops, numbers, strict=False):
        with monkeypatch.context() as patch, pytest.raises(Stopped) as stopped:
            patch.setattr(run, "make_engine", made_by(engine))
            stop_at(patch, epoch, step, number, judging=epoch > 12)
            fit(model(epoch - 1), made, run=tmp_path / "run", resume=epoch > 1)
        assert stopped.value.saved == f"saved after step {step} of epoch {epoch}"
        assert stopped.value.signal == number
    assert_same_run(fit(model(9), made, run=tmp_path / "run", resume=True), full)


def test_a_loss_that_is_not_finite_is_not_saved_by_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 2, 3, signal.SIGTERM)
    monkeypatch.setattr(Engine, "train_epoch", broken_after(Engine.train_epoch, 1))
    with pytest.raises(RunError, match=r"no longer finite in phase warmup, epoch 2 of 2; lower warmup.lr"):
        fit(model(), recipe(), run=tmp_path / "run")
    assert load_checkpoint(tmp_path / "run/checkpoints")["done"] == 1


def broken_after(train: Any, epochs: int) -> Any:
    def trained(engine: Engine, batches: Any, number: int, *given: Any) -> Any:
        if number >= epochs:
            next(engine.network.parameters()).data.fill_(torch.nan)
        return train(engine, batches, number, *given)

    return trained


def test_the_first_signal_is_noted_and_the_second_one_ends_the_process() -> None:
    with Signals() as signals:
        with signals.deferred():
            signal.raise_signal(signal.SIGTERM)
            assert signals.received == signal.SIGTERM
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            with pytest.raises(KeyboardInterrupt) as caught:
                signal.raise_signal(signal.SIGINT)
        assert not isinstance(caught.value, Stopped)
    with pytest.raises(Stopped) as stopped, Signals():
        signal.raise_signal(signal.SIGTERM)
    assert (stopped.value.signal, stopped.value.saved) == (signal.SIGTERM, "")
    before = signal.signal(signal.SIGTERM, handler := lambda *_: None)
    try:
        with Signals():
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_checkpoints_that_are_rare_change_nothing(
    straight: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SAVING_SHARE", 0.0)  # only the end of a phase is saved
    for epoch, kept in ((3, 2), (11, 10), (17, 12)):
        with pytest.raises(Killed):
            fit(model(), recipe(), run=tmp_path / "run", resume=epoch > 3, report=kill_after(epoch))
        assert load_checkpoint(tmp_path / "run/checkpoints")["done"] in (kept, kept + 1)
    assert_same_run(fit(model(), recipe(), run=tmp_path / "run", resume=True), straight)


@pytest.mark.parametrize(
    ("place", "weight_epochs"),
    mostly_slow([("small", 0), ("small", 2), ("gated", 0), ("gated", 2)], [("small", 0), ("gated", 2)]),
)
def test_the_scored_network_is_the_one_the_cycles_left(place: str, weight_epochs: int, tmp_path: Path) -> None:
    asked = recipe(phases__weights=weight_epochs, finetune_on=place, dense_control=False)
    end = 6 + 2 * weight_epochs
    with pytest.raises(Killed):
        fit(model(), asked, run=tmp_path / "run", report=kill_after(end))
    path = tmp_path / "run/checkpoints/scored.safetensors"
    last, scored = (load_checkpoint(path.parent, name) for name in ("last.safetensors", path.name))
    assert last["done"] == end and scored["plan"] == last["networks"]["plan"]
    for name, tensor in last["networks"]["dense"].items():
        assert torch.equal(scored["dense"][name], tensor), name
    assert torch.equal(torch.cat(list(scored["scores"].values())), last["networks"]["pruner"]["scores"])
    written = path.read_bytes()
    path.unlink()  # as if an older version had begun the run
    result = fit(model(9), asked, run=tmp_path / "run", resume=True)
    assert path.read_bytes() == written, "fine-tuning leaves it alone"
    assert result.plan == sbf.Plan(scored["plan"])


def test_a_run_resumed_in_its_fine_tuning_gets_no_scored_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SAVING_SHARE", 1e9)  # every epoch, however long it takes
    asked = recipe(finetune_on="gated", dense_control=False)
    with pytest.raises(Killed):
        fit(model(), asked, run=tmp_path / "run", report=kill_after(EPOCHS - 1))
    path = tmp_path / "run/checkpoints/scored.safetensors"
    path.unlink()
    fit(model(), asked, run=tmp_path / "run", resume=True)
    assert not path.exists(), "its weights are no longer those the scores were learned for"


def test_resuming_a_finished_run_gives_its_result(straight: Result) -> None:
    before = {p: p.read_bytes() for p in straight.folder.rglob("*") if p.is_file()}
    again = fit(model(), recipe(), run=straight.folder, resume=True, report=kill_after(1))
    assert again.was_finished and not straight.was_finished
    assert again.summary == straight.summary and again.plan == straight.plan
    assert all(torch.equal(a, b) for a, b in zip(weights(again), weights(straight), strict=True))
    assert before == {p: p.read_bytes() for p in straight.folder.rglob("*") if p.is_file()}


# -- refused -------------------------------------------------------------------------------------------------


def refused(match: str, folder: Path, net: nn.Module | None = None, **changes: Any) -> str:
    """The message of a run that must fail before it writes anything."""
    with pytest.raises(PruningError, match=match) as caught:
        fit(net or model(), recipe(**changes), run=folder / "run")
    assert not (folder / "run").exists()
    return str(caught.value)


def test_an_existing_run_is_refused_and_untouched(straight: Result) -> None:
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in straight.folder.rglob("*") if p.is_file()}
    with pytest.raises(RunError, match=r"holds a run already; go on with it \(--resume\), start over"):
        fit(model(), recipe(), run=straight.folder)
    with pytest.raises(RunError, match=r"was run with scores.penalty = 0.02, not 0.5; resume it as it is"):
        fit(model(), recipe(scores__penalty=0.5), run=straight.folder, resume=True)
    with pytest.raises(RunError, match="not both"):
        fit(model(), recipe(), run=straight.folder, resume=True, force=True)
    after = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in straight.folder.rglob("*") if p.is_file()}
    assert before == after


def test_nobody_else_may_write_into_a_run_that_goes_on(tmp_path: Path) -> None:
    """Two writers would spoil each other's checkpoints."""

    def meanwhile(record: dict[str, Any]) -> None:
        with pytest.raises(RunError, match=r"another process works on the run in .*; wait for it"):
            fit(model(), recipe(), run=tmp_path / "run", resume=True)
        raise Killed

    with pytest.raises(Killed):
        fit(model(), recipe(), run=tmp_path / "run", report=meanwhile)
    assert len(metrics(tmp_path / "run")) == 1
    fit(model(), recipe(phases__cycles=0), run=tmp_path / "run", force=True)  # the lock went with its owner


def test_a_caller_that_would_block_is_not_taken_for_another_process(tmp_path: Path) -> None:
    """Printing to a pipe that is full, say, raises what a lock that is taken raises."""

    def full(record: dict[str, Any]) -> None:
        raise BlockingIOError("the pipe is full")

    with pytest.raises(BlockingIOError, match="the pipe is full"):
        fit(model(), recipe(), run=tmp_path / "run", report=full)


def test_a_recipe_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(recipe(phases__cycles=0, dense_control=False).to_toml())
    assert fit(model(), tmp_path / "own.toml", run=tmp_path / "run").summary["epochs"] == 4
    with pytest.raises(RecipeError, match="did you mean 'digits'"):
        fit(model(), "digit", run=tmp_path / "other")


def test_force_starts_over_and_leaves_strangers_alone(tmp_path: Path) -> None:
    fit(model(), recipe(phases__cycles=1, dense_control=False), run=tmp_path / "run")
    assert (tmp_path / "run/checkpoints/scored.safetensors").is_file()
    (tmp_path / "run/notes.txt").write_text("mine")
    (tmp_path / "run/checkpoints/best.pt").write_text("mine too")
    other = recipe(phases__cycles=0, phases__warmup=1, dense_control=False)
    result = fit(model(), other, run=tmp_path / "run", force=True)
    assert len(metrics(result.folder)) == 3
    assert sbf.Recipe.load(result.folder / "recipe.toml") == other
    assert (tmp_path / "run/notes.txt").read_text() == "mine"
    assert (tmp_path / "run/checkpoints/best.pt").read_text() == "mine too"
    assert not (tmp_path / "run/checkpoints/scored.safetensors").exists(), "a run without cycles has no scores"


def test_force_removes_what_was_exported_and_no_other_file(tmp_path: Path) -> None:
    short = recipe(phases__cycles=0, phases__warmup=1, phases__finetune=0, dense_control=False)
    fit(model(), short, run=tmp_path / "run")
    export = tmp_path / "run/export"
    sbf.save(model(), export)
    write_manifest(export, {})
    fit(model(1), short, run=tmp_path / "run", force=True)
    assert not export.exists(), "it holds another network"
    sbf.save(model(), export)
    manifest = write_manifest(export, {})
    (export / "notes.txt").write_text("mine")
    manifest["files"] |= {"../notes.txt": {}, "..": {}, str(tmp_path / "run/notes.txt"): {}}
    (export / MANIFEST).write_text(json.dumps(manifest))
    (tmp_path / "run/notes.txt").write_text("mine too")
    fit(model(), short, run=tmp_path / "run", force=True)
    assert os.listdir(export) == ["notes.txt"] and (tmp_path / "run/notes.txt").is_file()
    (export / MANIFEST).write_text('{"format": "sbf-pruner export 1", "files": 5}')
    fit(model(), short, run=tmp_path / "run", force=True)
    assert sorted(os.listdir(export)) == [MANIFEST, "notes.txt"], "it is no export of ours"


def test_what_a_killed_process_was_writing_goes_when_the_run_goes_on(tmp_path: Path) -> None:
    short = recipe(phases__cycles=0, dense_control=False)
    with pytest.raises(Killed):
        fit(model(), short, run=tmp_path / "run", report=kill_after(1))
    left = tmp_path / "run/checkpoints/.last.safetensors.0123.partial"
    left.write_text("half of")
    export = tmp_path / "run/.export.0123456789ab.partial"
    export.mkdir()
    fit(model(), short, run=tmp_path / "run", resume=True)
    assert not left.exists() and export.exists()


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "export"])
def test_force_removes_nothing_behind_a_link(tmp_path: Path, straight: Result, name: str) -> None:
    shutil.copytree(straight.folder, tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    if (tmp_path / "run" / name).exists():
        (tmp_path / "run" / name).rename(elsewhere)
    else:
        elsewhere.mkdir()
    sbf.save(model(), elsewhere)
    write_manifest(elsewhere, {})
    (tmp_path / "run" / name).symlink_to(elsewhere)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match=rf"run/{name} is a link, and starting over would remove files elsewhere"):
        fit(model(), recipe(), run=tmp_path / "run", force=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_force_that_fails_leaves_the_old_run(tmp_path: Path) -> None:
    short = recipe(phases__cycles=0, dense_control=False)
    fit(model(), short, run=tmp_path / "run")
    before = (tmp_path / "run/summary.json").read_bytes()
    with pytest.raises(PruningError, match="gives 7 numbers per image"):
        fit(Tiny(7), short, run=tmp_path / "run", force=True)
    assert (tmp_path / "run/summary.json").read_bytes() == before


def test_a_network_that_no_file_would_hold_is_not_trained(tmp_path: Path) -> None:
    class Noted(Tiny):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 2}

    with pytest.raises(PruningError, match=r"^Noted puts a 'dict' into its state"):
        fit(Noted(), recipe(), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_no_run_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    for force in (False, True):
        with pytest.raises(RunError, match="holds files but no run; name a new folder"):
            fit(model(), recipe(), run=tmp_path, force=force)
    with pytest.raises(RunError, match="is a file; name a folder"):
        fit(model(), recipe(), run=tmp_path / "model.safetensors")
    with pytest.raises(RunError, match="there is no run to resume"):
        fit(model(), recipe(), run=tmp_path / "missing", resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    (tmp_path / "recipe.toml").write_text('[model]\nname = "resnet20"\n[data]\nname = "digits"\n')
    for force in (False, True):
        with pytest.raises(RunError, match=r"holds a recipe\.toml but no run; name a new folder for the run"):
            fit(model(), recipe(), run=tmp_path, force=force)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "recipe.toml"]


def test_a_damaged_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fit(model(), recipe(), run=tmp_path / "run", report=kill_after(3))
    path = tmp_path / "run/checkpoints/last.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RunError, match=r"is damaged or cut short .*; put the file back, or begin a run in another"):
        fit(model(), recipe(), run=tmp_path / "run", resume=True)


def test_a_checkpoint_that_cannot_be_read_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        fit(model(), recipe(), run=tmp_path / "run", report=kill_after(1))
    path = tmp_path / "run/checkpoints/last.safetensors"
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file() and file != path}
    path.rename(tmp_path / "kept")
    path.symlink_to(path)  # a loop, which root cannot read either
    said = r"last\.safetensors cannot be read: Too many levels of symbolic links; make it readable and try again$"
    with pytest.raises(RunError, match=said):
        fit(model(), recipe(), run=tmp_path / "run", resume=True)
    path.unlink()
    (tmp_path / "kept").rename(path)
    with monkeypatch.context() as patch:
        deny(patch, path, "stat")  # as in a folder that may not be searched
        with pytest.raises(RunError, match=r"last\.safetensors cannot be read: Permission denied"):
            fit(model(), recipe(), run=tmp_path / "run", resume=True)
    for name in ("recipe.toml", "metrics.jsonl", "checkpoints/last.safetensors"):
        with monkeypatch.context() as patch:
            deny(patch, tmp_path / "run" / name, "open")
            with pytest.raises(RunError, match=f"{name} cannot be read: Permission denied; make it readable"):
                fit(model(), recipe(), run=tmp_path / "run", resume=True)
    assert before == {file: file.read_bytes() for file in before}


def deny(patch: pytest.MonkeyPatch, path: Path, way: str) -> None:
    """Let a path be one that this user has no permission for, also where the user is root."""
    real = getattr(Path, way)

    def denied(self: Path, *given: Any, **named: Any) -> Any:
        if self == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(self, *given, **named)

    patch.setattr(Path, way, denied)


def test_another_network_cannot_go_on_with_a_run(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fit(model(), recipe(), run=tmp_path / "run", report=kill_after(3))
    wider = model()
    wider.conv1, wider.bn1 = nn.Conv2d(8, 13, 3, padding=1, bias=False), nn.BatchNorm2d(13)
    wider.conv2 = nn.Conv2d(13, 8, 3, padding=1, bias=False)
    with pytest.raises(RunError, match="the run was begun with another network"):
        fit(wider, recipe(), run=tmp_path / "run", resume=True)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed in its first cycle."""
    folder = tmp_path_factory.mktemp("runs") / "killed"
    with pytest.raises(Killed):
        fit(model(), recipe(), run=folder, report=kill_after(4))
    return folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "scores.jsonl"])
@pytest.mark.parametrize("damage", [b'{"done": 1,\n', b"\x80\xff\n", b"[1]\n", b'{"dome": 1}\n'])
def test_a_damaged_line_is_said_to_be_before_anything_is_trained(
    tmp_path: Path, killed: Path, name: str, damage: bytes
) -> None:
    shutil.copytree(killed, tmp_path / "run")
    lines = (tmp_path / "run" / name).read_bytes().splitlines(keepends=True)
    (tmp_path / "run" / name).write_bytes(b"".join([damage, *lines[1:]]))
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write("a record too many\n")
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.jsonl")}
    with pytest.raises(
        RunError, match=rf"{name}, line 1 is damaged; put the file back, or begin a run in another folder"
    ):
        fit(model(), recipe(), run=tmp_path / "run", resume=True)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").glob("*.jsonl")}


def test_a_run_killed_in_its_first_epoch_begins_again_with_the_weights_it_had(
    tmp_path: Path, straight: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("sbf_pruner.training.run.EpochRunner.run", killed)
        fit(model(), recipe(), run=tmp_path / "run")
    result = fit(model(seed=5), recipe(), run=tmp_path / "run", resume=True)
    assert all(map(torch.equal, weights(result), weights(straight)))
    assert metrics(result.folder) == metrics(straight.folder)


def test_a_run_killed_as_it_starts_over_can_begin(
    tmp_path: Path, straight: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is removed already, what is left is neither a finished run nor one that could go on."""
    unlink = Path.unlink
    for number in (0, 1, 2, 7):
        shutil.copytree(straight.folder, tmp_path / str(number))
        left = number

        def killed(path: Path, missing_ok: bool = False) -> None:
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            unlink(path, missing_ok)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Path, "unlink", killed)
            fit(model(), recipe(), run=tmp_path / str(number), force=True)
        result = fit(model(), recipe(), run=tmp_path / str(number), resume=True)
        assert result.was_finished == (number == 0)
        assert all(map(torch.equal, weights(result), weights(straight)))
        assert metrics(result.folder) == metrics(straight.folder)


@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_another_process_made_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    made = run.Run
    if again:
        with pytest.raises(Killed):
            fit(model(), recipe(), run=tmp_path / "run", report=kill_after(3))

    def slow(*given: Any) -> Any:
        found = made(*given)
        with monkeypatch.context() as patch:  # the other one, from beginning to end
            patch.setattr(run, "Run", made)
            fit(model(), recipe(), run=tmp_path / "run", resume=again)
        return found

    monkeypatch.setattr(run, "Run", slow)
    said = "another process continued the run in .*; resume it again" if again else "holds a run already"
    with pytest.raises(RunError, match=said):
        fit(model(), recipe(), run=tmp_path / "run", resume=again)
    assert fit(model(), recipe(), run=tmp_path / "run", resume=True).was_finished


@pytest.mark.parametrize("name", ["model.safetensors", "plan.json"])
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_what_a_finished_run_lost_can_be_written_anew(
    tmp_path: Path, straight: Result, name: str, left: float
) -> None:
    shutil.copytree(straight.folder, tmp_path / "run")
    path = tmp_path / "run" / name
    whole = path.read_bytes()
    path.write_bytes(whole[: int(left * len(whole))])
    with pytest.raises(RunError, match=f"{name} .*; remove summary.json from the run's folder, and --resume"):
        fit(model(), recipe(), run=tmp_path / "run", resume=True)
    (tmp_path / "run/summary.json").unlink()
    fit(model(), recipe(), run=tmp_path / "run", resume=True)
    assert path.read_bytes() == whole


def test_metrics_shorter_than_the_checkpoint_are_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        fit(model(), recipe(), run=tmp_path / "run", report=kill_after(4))
    (tmp_path / "run/metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="has 0 records but the checkpoint is of epoch 4"):
        fit(model(), recipe(), run=tmp_path / "run", resume=True)


def test_records_are_on_disk_before_the_checkpoint_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure the metrics may otherwise be shorter than the checkpoint, and the run is refused."""
    folder, held, safe, real = tmp_path / "run", ("metrics.jsonl", "scores.jsonl"), dict[int, int](), os.fsync

    def fsync(descriptor: int) -> None:
        safe[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size
        real(descriptor)

    def saved(*given: Any) -> Path:
        for path in (folder / name for name in held if (folder / name).exists()):
            assert safe.get(path.stat().st_ino) == path.stat().st_size
            assert folder.stat().st_ino in safe, "nor is the file's name only promised"
        return save_checkpoint(*given)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(run, "save_checkpoint", saved)
    with pytest.raises(Killed):
        fit(model(), recipe(), run=folder, report=kill_after(4))
    assert all((folder / name).stat().st_size for name in held)


@pytest.mark.parametrize(
    ("section", "phase", "good"),
    [("warmup", "warmup", 0), ("weights", "weights 1", 4), ("finetune", "finetune", 10)],
)
def test_a_loss_that_is_not_finite_stops_the_run(section: str, phase: str, good: int, tmp_path: Path) -> None:
    made = recipe(**{f"{section}__lr": 1e37, f"{section}__optimizer": "sgd"})
    with pytest.raises(RunError) as caught:
        fit(model(), made, run=tmp_path / "run")
    said = str(caught.value)
    assert f"no longer finite in phase {phase}, epoch 1 of 2; lower {section}.lr (it is 1e+37)" in said
    if good:
        state = load_checkpoint(tmp_path / "run/checkpoints")
        assert state["done"] == good == len(metrics(tmp_path / "run"))
        held = state["networks"]["small"] or state["networks"]["dense"]
        assert all(tensor.isfinite().all() for tensor in held.values())
    assert not (tmp_path / "run/summary.json").exists()


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, "lower scores.lr (it is 0.003)"),
        ({"scores__speed": 0.5}, "lower scores.speed (it is 0.5)"),
        # Three logits in two cycles of two epochs with four steps each.
        ({"scores__steer": True, "budget__macs": 0.5}, "lower scores.speed (it is 0.1875)"),
    ],
)
def test_scores_that_are_not_finite_name_what_says_how_fast_they_move(
    settings: dict[str, Any], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "score_epoch", lambda *given: EpochResult(float("nan"), 0.0))
    with pytest.raises(RunError, match=re.escape(f"in phase score 1, epoch 1 of 2; {remedy} and start over")):
        fit(model(), recipe(**settings), run=tmp_path / "run")


BROKEN = [(2, "warmup", "weights are"), (6, "score 1", "scores are"), (10, "weights 1", "weights are")]


@pytest.mark.parametrize(
    ("at", "phase", "what"),
    mostly_slow(BROKEN, BROKEN[1:]),
)
def test_what_the_last_step_of_an_epoch_broke_is_not_saved(
    at: int, phase: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No test is due after that epoch, whose own loss is fine."""
    whole = {"train_epoch": Engine.train_epoch, "score_epoch": Engine.score_epoch}

    def broken(name: str) -> Any:
        def epoch(engine: Engine, batches: Any, number: int, *given: Any) -> Any:
            tally = whole[name](engine, batches, number, *given)
            if number + 1 == at and engine.pruner is not None:
                scored = name == "score_epoch"
                (held, *_) = engine.pruner.score_parameters if scored else engine.network.parameters()
                held.data.view(-1)[0] = float("inf" if scored else "nan")
            return tally

        return epoch

    for name in whole:
        monkeypatch.setattr(Engine, name, broken(name))
    monkeypatch.setattr(run, "SAVING_SHARE", 1e9)
    lengths = {f"phases__{name}": 4 for name in ("warmup", "score", "weights")}
    made = recipe(evaluate_every=4, phases__cycles=1, **lengths)
    with pytest.raises(RunError, match=f"the {what} no longer finite in phase {phase}, epoch 2 of 4; lower"):
        fit(model(), made, run=tmp_path / "run")
    assert load_checkpoint(tmp_path / "run/checkpoints")["done"] == at - 1
    monkeypatch.undo()
    fit(model(), made, run=tmp_path / "run", resume=True)


def test_a_cut_that_changes_the_outputs_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_difference", lambda *given: float("inf"))
    monkeypatch.setattr(verify, "_is_unstable", lambda *given: False)
    with pytest.raises(RunError, match="the extracted network differs from the gated one by inf"):
        fit(model(), recipe(dense_control=False), run=tmp_path / "run")


class Viewed(nn.Module):
    """Takes a view of a map, which torch refuses where maps have their channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 8 * 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(torch.relu(self.stem(x))))
        return self.fc(x.view(len(x), -1))


@pytest.mark.parametrize("engine", [Engine, CapturedEngine])
def test_a_network_that_takes_views_of_maps_keeps_its_channels_first(
    engine: type[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "make_engine", made_by(engine))
    torch.manual_seed(0)
    made = recipe(distill__alpha=0.5, distill__mirrored=True)
    result = fit(Viewed(), made, run=tmp_path / "run")
    assert result.summary["pruned"]["macs"] < result.summary["dense"]["macs"]
    assert result.summary["cut_error"] < 1e-12
    assert result.model.fc.weight.is_contiguous() and result.model.conv.weight.is_contiguous()


def test_a_model_that_does_not_fit_the_data_is_refused(tmp_path: Path) -> None:
    said = refused("Tiny gives 7 numbers per image but synthetic has 4 classes", tmp_path, Tiny(7))
    assert "num_classes = 4" in said
    said = refused(r"Tiny does not run on the images of synthetic, 1x8x8", tmp_path, Tiny(4, 3))
    assert "build it for 1 channels (model.in_channels)" in said
    refused("needs a network that gives one row of 4 logits", tmp_path, nn.Conv2d(1, 4, 1))


def test_a_model_without_convolutions_is_refused(tmp_path: Path) -> None:
    refused("no convolution", tmp_path, nn.Sequential(nn.Flatten(), nn.Linear(64, 4)))


class Asking(nn.Module):
    """Its forward asks for the class of its layers, and does not know one that was cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.layers = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)])
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = out = self.stem(x)
        for layer in self.layers:
            out = layer(out) if isinstance(layer, nn.Conv2d) else torch.relu(out)
        return self.fc((x + out).mean((2, 3)))


def test_a_network_that_cannot_be_cut_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    refused(
        r"cannot run with fewer channels at test_run\.py:\d+ .*; exclude the layers that feed it",
        tmp_path,
        Asking(),
    )


def test_layers_that_a_network_cannot_do_without_keep_a_filter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hard = {"scores__lr": 3e-2, "scores__penalty": 1.0, "dense_control": False}
    emptied = fit(model(), recipe(**hard), run=tmp_path / "other")
    assert 0 in {layer["after"] for layer in emptied.summary["layers"].values()} and not caplog.records
    made = recipe(constraints__ignore=["stem", "layers.2"], **hard)
    left = fit(Asking(), made, run=tmp_path / "run")
    assert left.summary["layers"] == {"layers.0": {"before": 8, "after": 1}}
    assert "at least one filter, because with whole layers removed the network cannot run" in caplog.text


def test_a_target_that_the_dense_network_meets_is_refused(tmp_path: Path) -> None:
    refused(
        r"the dense network already meets the budget \([\d,]+ params \(100.0%\)\); set a smaller one",
        tmp_path,
        budget__params=1e9,
    )
    some = recipe(budget__params=1e9, budget__macs=0.5, dense_control=False)  # beside one that it does not meet
    assert fit(model(), some, run=tmp_path / "run").summary["pruned"]["macs"] > 0


def test_a_frozen_network_is_refused(tmp_path: Path) -> None:
    refused(r"all weights of Tiny are frozen, so nothing is trained; call", tmp_path, model().requires_grad_(False))


def test_arguments_of_a_wrong_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PruningError, match=r"a model is an nn.Module, not NoneType"):
        fit(None, recipe(), run=tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(PruningError, match=r"recipe is of type dict; give a name, a .toml file or an sbf.Recipe"):
        fit(model(), {"name": "x"}, run=tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(PruningError, match=r"data is of type Tensor; give {'train': dataset, 'test': dataset}"):
        fit(model(), recipe(), data=torch.zeros(2), run=tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(PruningError, match=r'overrides are a list of "key=value" texts'):
        Recipe.load("digits", "phases.warmup=1")
    assert not (tmp_path / "run").exists()


def test_missing_data_is_refused(tmp_path: Path) -> None:
    refused("no data set is called 'cifra'", tmp_path, data__name="cifra")
    refused("cannot read", tmp_path, data__name="npz", data__path="missing.npz")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a cuda device")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused("no cuda device", tmp_path, device="cuda")


# -- given weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "pth"])
def test_a_run_starts_from_given_weights(suffix: str, tmp_path: Path) -> None:
    given = model(7).state_dict()
    path = tmp_path / f"weights.{suffix}"
    save_file(given, path) if suffix == "safetensors" else torch.save(given, path)
    made = recipe(model__weights=str(path), phases__warmup=0, phases__cycles=0, phases__finetune=0)
    result = fit(model(), made, run=tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(weights(result), given.values(), strict=True))
    initial = load_checkpoint(tmp_path / "run/checkpoints", "initial.safetensors")
    assert all(torch.equal(initial[name], given[name]) for name in given)


class TwoHeaded(Tiny):
    """As networks with an auxiliary head are: two outputs while they are trained."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return (logits, logits) if self.training else logits


def test_auxiliary_outputs_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    refused("TwoHeaded gives tuple in training mode, .* build it without auxiliary", tmp_path, TwoHeaded())


def test_a_network_that_comes_trained_is_judged_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = fit(model(), recipe(phases__cycles=0, phases__finetune=0), run=tmp_path / "dense")
    torch.save(trained.model.state_dict(), tmp_path / "dense.pt")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # which is what Windows calls it
    made = recipe(model__weights="~/dense.pt", phases__warmup=0, dense_control=False)
    with pytest.raises(Killed):
        fit(model(3), made, run=tmp_path / "run", report=kill_after(1))
    result = fit(model(4), made, run=tmp_path / "run", resume=True)
    assert result.summary["dense"]["given_accuracy"] == trained.summary["pruned"]["accuracy"]
    assert result.summary["dense"]["accuracy"] is result.summary["dense"]["warmup_accuracy"] is None
    said = "\n".join(summary_lines(result.summary, "run"))
    assert "the accuracy is that of the network as it was given; set dense_control=true" in said
    assert f"{trained.summary['pruned']['accuracy']:.2f} %" in said
    assert "as it was given" in (result.folder / "report.html").read_text()


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"

    def given(state: Any) -> dict[str, Any]:
        torch.save(state, path)
        return {"model__weights": str(path)}

    good = model().state_dict()
    missing = {name: tensor for name, tensor in good.items() if not name.startswith("bn1.")}
    refused("has no 'bn1.weight' and 4 more", tmp_path, **given(missing))
    unknown = {**good, "head.weight": torch.ones(1)}
    refused("has 'head.weight', which the model does not have", tmp_path, **given(unknown))
    wrapped = {f"module.{name}": tensor for name, tensor in good.items()}
    refused("DataParallel wrapper; save model.module.state_dict", tmp_path, **given(wrapped))
    other = Tiny(9).state_dict()
    refused(r"fc.weight has shape \(9, 8\), the model's \(4, 8\)", tmp_path, **given(other))
    refused("something other than a state_dict", tmp_path, **given({"epoch": 3, "model": good}))
    refused(r"cannot be read \(it is damaged, or holds a whole model, which is never", tmp_path, **given(model()))
    for content in (b"nothing", b"hello", b""):
        path.write_bytes(content)
        refused("cannot be read", tmp_path, model__weights=str(path))
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(b"\x10")
    refused("cannot be read .*; save it with safetensors", tmp_path, model__weights=str(torn))
    broken = {**good, "bn1.weight": good["bn1.weight"] / 0}
    refused("bn1.weight contains NaN or infinity; give other weights", tmp_path, **given(broken))
    whole = {**good, "bn1.weight": good["bn1.weight"].long()}
    refused("bn1.weight has dtype torch.int64, but the model's is torch.float32", tmp_path, **given(whole))
    refused("does not exist", tmp_path, model__weights=str(tmp_path / "missing.pt"))


@pytest.mark.parametrize("name", ["", " ", "../../evil", "/evil", "a/../../b"])
def test_a_name_does_not_lead_elsewhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"^name: a folder below runs cannot be called .*; name one \(--run\)$"):
        fit(model(), recipe(name=name))
    assert not any(tmp_path.iterdir())


def test_a_recipe_that_was_changed_meanwhile_is_noticed(tmp_path: Path) -> None:
    made = recipe()
    with pytest.raises(Killed):
        fit(model(), made, run=tmp_path / "run", report=kill_after(3))
    held = tmp_path / "run" / "recipe.toml"
    before = held.read_text()
    held.write_text(before.replace(f"finetune = {made.phases.finetune}", f"finetune = {made.phases.finetune + 1}"))
    changed = Recipe.load(held)
    assert changed != made
    with pytest.raises(RunError, match=r"recipe.toml was changed since .*: phases.finetune was \d and is \d;"):
        fit(model(), changed, run=tmp_path / "run", resume=True)
    held.write_text(before)
    assert fit(model(), made, run=tmp_path / "run", resume=True).summary["epochs"]


# -- the forms that stand for the small network in fine-tuning ------------------------------------------------


def test_both_forms_end_with_the_same_network(tmp_path: Path) -> None:
    still = {"dense_control": False, "phases__cycles": 1}
    forms = ("small", "gated")
    results = [fit(undropped(), recipe(finetune_on=on, **still), run=tmp_path / on) for on in forms]
    small, other = (result.model.state_dict() for result in results)
    assert list(other) == list(small)
    for name, tensor in small.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)
    assert results[0].plan == results[1].plan
    assert (tmp_path / "gated/plan.json").read_bytes() == (tmp_path / "small/plan.json").read_bytes()


def undropped() -> Tiny:
    """Without dropout, whose random numbers follow from the widths."""
    made = model()
    made.dropout.p = 0.0
    return made


# -- what a folder has lost ------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_lost_its_checkpoint_is_not_begun_again(
    finished: bool, straight: Result, tmp_path: Path
) -> None:
    """It would be gone, with its network, without a word."""
    folder = tmp_path / "run"
    shutil.copytree(straight.folder, folder)
    (folder / "checkpoints/last.safetensors").unlink()
    (folder / "summary.json").unlink()
    if not finished:
        (folder / "model.safetensors").unlink()
    before = contents(folder)
    with pytest.raises(
        RunError, match=r"has reached epoch 24, but there is no checkpoints/last\.safetensors .*; put the file back"
    ):
        fit(model(), recipe(), run=folder, resume=True)
    assert contents(folder) == before


def test_a_run_without_a_checkpoint_yet_begins_again(
    tmp_path: Path, straight: Result, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "save_checkpoint", lambda *given: None)
    with pytest.raises(Killed):
        fit(model(), recipe(), run=tmp_path / "run", report=kill_after(1))
    monkeypatch.undo()
    with caplog.at_level("INFO", logger="sbf_pruner.training"):
        result = fit(model(), recipe(), run=tmp_path / "run", resume=True)
    assert "has no checkpoint yet, so it starts from the beginning" in caplog.text
    assert all(map(torch.equal, weights(result), weights(straight)))


@pytest.mark.parametrize(
    ("text", "said"), [("", "damaged or was changed"), ("cut", r"cut short \(distill\.during")]
)
def test_a_damaged_recipe_of_a_run_is_told_with_the_remedy(
    text: str, said: str, straight: Result, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(straight.folder, folder)
    lines = (folder / "recipe.toml").read_text().splitlines(keepends=True)
    (folder / "recipe.toml").write_text("".join(lines[:-1]) if text == "cut" else text)
    with pytest.raises(
        RunError, match=rf"recipe\.toml is {said}.*put back the run's own, or begin a run in another folder"
    ):
        RunFolder(folder).read_recipe()


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        RunError, match=r"file/run cannot be written, because .*file is a file; name another folder"
    ):
        fit(model(), recipe(), run=tmp_path / "file/run")


def test_a_network_of_another_type_is_told_so(tmp_path: Path) -> None:
    said = r"images are torch\.float32 and weights torch\.float64: build a network of torch\.float32"
    with pytest.raises(RunError, match=said):
        fit(model().double(), recipe(), run=tmp_path / "run")

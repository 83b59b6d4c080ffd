"""Accuracy against size: the figures are those of networks really cut, and a run is left as it was."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from clocks import clock_of
from runs import Small, small_run
from sbf_pruner.budget import Budget, Constraints, Selector, resolve
from sbf_pruner.cli import frontier_lines
from sbf_pruner.compare import FrontierOptions, draw_frontier, read_scored, run_frontier
from sbf_pruner.errors import PruningError, RunError
from sbf_pruner.graph import trace
from sbf_pruner.measurement import measure, read_model
from sbf_pruner.plan import Plan
from sbf_pruner.surgery import extract
from sbf_pruner.training import SCORED, DataConfig, load_checkpoint

MODEL = {"name": "runs:Small", "num_classes": 4, "in_channels": 1}
DATA = {"name": "synthetic", "image_size": 8, "channels": 1, "samples": 64, "batch_size": 16}
IMAGE = torch.zeros(1, 1, 8, 8)
CYCLES_END = 8
trusting = partial(FrontierOptions, trust=True)  # the recipe names a network of the tests
SIZES = ("0.8", "0.5", "30%")


class Killed(BaseException):
    """Not an Exception: nothing may catch it on the way."""


def killed_in_finetuning(record: dict[str, Any]) -> None:
    if record["done"] == CYCLES_END + 1:
        raise Killed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("frontier") / "run", model=MODEL).folder


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return run_frontier(folder, trusting(at=SIZES))


@pytest.fixture(scope="module")
def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_streams_of_devices_that_are_not_used_are_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, seen = torch.random.fork_rng, []

    def noted(devices: Any = None, *given: Any, **named: Any) -> Any:
        seen.append(devices)
        return whole(devices, *given, **named)

    monkeypatch.setattr(torch.random, "fork_rng", noted)
    before = torch.get_rng_state()
    run_frontier(folder, trusting(at=("0.5",), device="cpu"))
    assert seen and all(devices == [] for devices in seen), "none named means every GPU there is"
    assert torch.equal(torch.get_rng_state(), before)


# -- the figures ---------------------------------------------------------------------------------------------


def test_every_size_keeps_what_was_asked_and_wastes_little(result: dict[str, Any]) -> None:
    dense = result["dense"]
    assert [point["share"] for point in result["points"]] == [0.8, 0.5, 0.3]
    for point in result["points"]:
        assert point["reached"]
        assert point["share"] - 0.05 < point["left"]["macs"] <= point["share"]
        assert point["left"]["macs"] == point["macs"] / dense["macs"]
        assert point["filters"] < dense["filters"] == 40
        assert 0 <= point["accuracy"] <= 100
    assert [p["params"] for p in result["points"]] == sorted((p["params"] for p in result["points"]), reverse=True)


def test_the_runs_own_figures_are_those_of_its_summary(result: dict[str, Any], summary: dict[str, Any]) -> None:
    own, dense, pruned = result["own"], result["dense"], summary["pruned"]
    assert (own["params"], own["macs"], own["size"]) == (pruned["params"], pruned["macs"], pruned["file_bytes"])
    assert own["filters"] == sum(layer["after"] for layer in summary["layers"].values())
    assert own["finetuned_accuracy"] == pruned["accuracy"]
    assert (dense["params"], dense["macs"]) == (summary["dense"]["params"], summary["dense"]["macs"])
    assert dense["control_accuracy"] == summary["dense"]["accuracy"]
    assert dense["warmup_accuracy"] == summary["dense"]["warmup_accuracy"]
    assert result["finished"] and result["judged_on"] == "test" and result["smallest"] is None


def test_a_point_by_hand(folder: Path, result: dict[str, Any]) -> None:
    """The same network, cut and judged without the room's own code."""
    state = load_checkpoint(folder / "checkpoints", SCORED)
    dense = Small()
    dense.load_state_dict(state["dense"])
    graph = trace(dense, IMAGE)
    scores = {name: np.asarray(held) for name, held in state["scores"].items()}
    masks = Selector(graph, Budget(macs=0.5)).choose(scores).masks
    small = extract(dense, IMAGE, Plan.from_masks(masks), graph)
    scored = read_scored(folder, trust=True)
    norms = [m for m in small.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    small.train()
    with torch.no_grad():
        for images, _ in scored.train.epoch(0):
            small(images)
        small.eval()
        hits = sum(int((small(images).argmax(1) == labels).sum()) for images, labels in scored.judged.epoch(0))
    point = result["points"][1]
    assert point["macs"] == measure(small, IMAGE).macs
    assert point["accuracy"] == pytest.approx(100 * hits / len(scored.judged.labels))
    assert norms and result["recalibrated_on"] == {"batches": len(scored.train), "images": 64 - 64 % 16}


def test_numbers_and_parts_are_the_same_sizes(folder: Path, result: dict[str, Any]) -> None:
    macs = result["dense"]["macs"] // 2
    point = run_frontier(folder, trusting(at=(f"{macs}",)))["points"][0]
    assert point.pop("asked") == macs
    assert {**point, "asked": 0.5} == result["points"][1]


@pytest.mark.parametrize("of", ["params", "size"])
def test_other_resources(of: str, folder: Path) -> None:
    found = run_frontier(folder, trusting(of, ("1", "0.6")))
    whole, point = found["points"]
    assert whole["left"] == {"macs": 1.0, "params": 1.0, "size": 1.0} and whole["filters"] == 40
    assert 0.45 < point["left"][of] <= 0.6


def test_what_cannot_be_reached_is_listed_with_the_smallest_there_is(folder: Path) -> None:
    for of in ("macs", "size"):
        found = run_frontier(folder, trusting(of, ("0.5", "0.001")))
        assert [point["reached"] for point in found["points"]] == [True, False]
        smallest = found["smallest"]
        assert 0.001 < smallest["left"][of] < 0.5 and 0 < smallest["filters"] < 10
        lines = frontier_lines(found)
        assert any(line.split() == ["0.1", "%", *"------", "cannot", "be", "reached"] for line in lines)
        assert any(line.startswith("the smallest possible") for line in lines)
    assert run_frontier(folder, trusting(at=("0.001",)))["said"] == "None of these sizes can be reached."


def test_guards_hold_here_too(tmp_path: Path) -> None:
    short = {"warmup": 1, "cycles": 1, "score": 1, "weights": 1, "finetune": 1}
    guards = {"round_to": 4, "ignore": ["stem"], "couple": ["blocks.*.conv1"]}
    small_run(tmp_path / "run", model=MODEL, constraints=guards, phases=short, dense_control=False)
    scored = read_scored(tmp_path / "run", trust=True)
    aim = scored.networks.pruner.selector
    assert aim.constraints.groups == (("blocks.0.conv1", "blocks.1.conv1"),) and "stem" not in scored.scores
    found = run_frontier(tmp_path / "run", trusting(at=("0.6",)))
    (point,) = found["points"]
    assert point["reached"] and point["filters"] % 4 == 0 and found["dense"]["filters"] == 32


# -- times ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a clock on which a layer takes as long as it has multiply-accumulates."""
    place = tmp_path_factory.mktemp("timed")
    clock_of(trace(Small(), IMAGE), calibration={"mean_error": 0.04, "worst_error": 0.1}).write(place / "t.json")
    latency = {"table": str(place / "t.json"), "way": "blocks"}
    return small_run(place / "run", model=MODEL, budget={"latency": 0.7}, latency=latency).folder


def test_times_are_landed_on_by_the_runs_own_clock_and_in_its_way(timed: Path) -> None:
    found = run_frontier(timed, trusting("latency", ("0.8", "50%", "1%")))
    state = load_checkpoint(timed / "checkpoints", SCORED)
    graph = trace(Small(), IMAGE)
    clock = read_model(timed / "latency.json", graph)
    scores = {name: np.asarray(held) for name, held in state["scores"].items()}
    guards = resolve(Constraints(couple="blocks"), graph)
    for point, share in zip(found["points"], (0.8, 0.5), strict=False):
        masks = graph.settle(Selector(graph, Budget(latency=share), guards, clock).choose(scores).masks)
        assert (
            point["reached"]
            and point["left"]["latency"] == pytest.approx(clock.ratio(masks))
            and (share - 0.15 < point["left"]["latency"] <= share)
        )
        assert point["latency_ms"] == pytest.approx(1e3 * clock.dense_seconds * clock.ratio(masks))
        assert point["filters"] == sum(int(mask.sum()) for mask in masks.values())
    assert [point["reached"] for point in found["points"]] == [True, True, False]
    assert found["smallest"]["left"]["latency"] > 0.01 and found["dense"]["left"]["latency"] == 1
    summary = json.loads((timed / "summary.json").read_text())
    assert found["own"]["left"]["latency"] == pytest.approx(summary["latency"]["foretold"])
    assert found["clock"]["runtime"] == "torch" and found["clock"]["measured"] is None
    seconds = f"{0.8 * clock.dense_seconds:.9f}s"
    again = run_frontier(timed, trusting("latency", (seconds,)))
    assert again["points"][0]["filters"] == found["points"][0]["filters"]


def test_times_as_text_and_drawn(timed: Path) -> None:
    found = run_frontier(timed, trusting("latency", ("0.8", "0.01")))
    lines = frontier_lines(found)
    assert lines[0].startswith("target, time") and "time, predicted" in lines[0]
    assert any(line.split() == ["1", "%", *"--------", "cannot", "be", "reached"] for line in lines)
    assert (
        "times are predicted for torch, batch 1, 1 thread, an abacus (off by 4.0% on average, 10.0% at most)"
        in lines
    )
    cut = (found["dense"], found["own"], found["points"][0])
    best = max(p["accuracy"] for p in cut)
    least = min(p["left"]["latency"] for p in cut if p["accuracy"] >= best - 1)
    assert f"takes {100 * least:.0f} % of the dense network's time, as predicted" in found["said"]
    found["clock"]["measured"] = 0.71
    assert frontier_lines(found)[-3].endswith("; the run's own network was measured: 71.0%")
    page = draw_frontier(found, ".html")
    assert page.index("Accuracy against predicted time (torch, batch 1)") < page.index("multiply-accumulates</h2>")
    assert "took 71.0 % of the dense network&#x27;s time" in page and "accuracy against time" in page
    assert "predicted time (torch, batch 1)</text>" in draw_frontier(found, ".svg")
    # Of sizes, the time is told beside them.
    sizes = run_frontier(timed, trusting(at=("0.5",)))
    assert sizes["points"][0]["left"]["latency"] < 1 and "multiply-accumulates" in draw_frontier(sizes, ".svg")


def test_a_run_without_a_clock_says_how_to_get_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RunError, match=r"has no latency model, .*; measure one here with --runtime .* and --batch$"
    ):
        run_frontier(folder, trusting("latency", ("0.5",)))
    asked = []

    def measured(network, images, graph, conditions, *, ignore, report):  # type: ignore[no-untyped-def]
        asked.append((conditions.runtime, conditions.batch, len(images) > 0, ignore))
        return clock_of(graph)

    monkeypatch.setattr("sbf_pruner.compare.frontier.measure_latency_model", measured)
    (point,) = run_frontier(folder, trusting("latency", ("0.6",), runtime="eager", batch=4))["points"]
    assert asked == [("eager", 4, True, ())] and 0.5 < point["left"]["latency"] <= 0.6
    run_frontier(folder, trusting("latency", ("0.6",), batch=4))
    assert asked[-1][0] == "onnxruntime"


# -- the run -------------------------------------------------------------------------------------------------


def test_the_run_is_left_as_it_was(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    seed = torch.random.get_rng_state()
    run_frontier(folder, trusting(at=("0.5",), batches=1))
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert torch.equal(seed, torch.random.get_rng_state())


def test_a_run_in_its_fine_tuning_gives_the_same_points(tmp_path: Path, result: dict[str, Any]) -> None:
    for place in ("small", "gated"):
        with pytest.raises(Killed):
            small_run(tmp_path / place, killed_in_finetuning, model=MODEL, finetune_on=place)
        found = run_frontier(tmp_path / place, trusting(at=SIZES))
        assert found["points"] == result["points"] and not found["finished"]
        assert found["own"] == {**result["own"], "finetuned_accuracy": None}
        assert found["dense"] == {**result["dense"], "control_accuracy": None}


def test_held_out_images_are_preferred_to_the_test(tmp_path: Path) -> None:
    assert DataConfig(**DATA).validation == 0
    short = {"warmup": 1, "cycles": 1, "score": 1, "weights": 0, "finetune": 1}
    run = small_run(tmp_path / "run", model=MODEL, data={**DATA, "validation": 0.25}, phases=short)
    found = run_frontier(run.folder, trusting(at=("0.5",)))
    assert found["judged_on"] == "validation" and found["judged_images"] == 16
    assert found["own"]["finetuned_accuracy"] == run.summary["pruned"]["validation_accuracy"]
    assert "accuracy on 16 validation images" in "\n".join(frontier_lines(found))
    assert "chosen on the test images" not in "\n".join(frontier_lines(found))


def test_another_network_under_the_same_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wider(Small):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.append(torch.nn.Conv2d(8, 8, 1))

    monkeypatch.setattr("runs.Small", Wider)
    with pytest.raises(
        RunError, match=r"the network that the recipe builds is not that of the run in .*; restore its code"
    ):
        run_frontier(folder, trusting(at=("0.5",)))
    monkeypatch.undo()
    copied = tmp_path / "run"
    shutil.copytree(folder, copied)
    (copied / "checkpoints" / SCORED).write_bytes(b"cut short")
    with pytest.raises(RunError, match=r"scored.safetensors is damaged or cut short"):
        run_frontier(copied, trusting(at=("0.5",)))


def test_what_is_asked_for_is_checked_first() -> None:
    for wrong, said in (
        ({"of": "flops"}, "--of: no resource is called 'flops'; known: params, macs, size, latency"),
        ({"runtime": "eager"}, "--runtime and --batch apply only to --of latency; leave them out"),
        (
            {"of": "latency", "runtime": "onnx"},
            "--runtime: unknown runtime 'onnx'; known: eager, compile, onnxruntime",
        ),
        ({"of": "latency", "batch": 0}, "--batch counts the samples of a pass: give at least 1, not 0"),
        ({"of": "latency", "at": ("5",)}, "target 'latency=5': write a fraction such as latency=0.5"),
        ({"batches": 0}, "--batches counts batches of training images: give at least 1, not 0"),
        ({"at": ()}, "--at: name at least one size, such as 0.5,0.3"),
        ({"at": ("half",)}, "target 'macs=half': write a fraction such as macs=0.5"),
        ({"at": ("0",)}, "target 'macs=0': must be above 0 and at most 100% of the network"),
    ):
        with pytest.raises(PruningError) as caught:
            FrontierOptions(**wrong)  # type: ignore[arg-type]
        assert str(caught.value).startswith(said)


# -- as text and drawn ---------------------------------------------------------------------------------------


def test_the_table(result: dict[str, Any]) -> None:
    lines = frontier_lines(result)
    assert lines[0].split()[:2] == ["target,", "MACs"] and lines[1].startswith("all filters")
    assert [line.split()[0] for line in lines[2:5]] == ["80", "50", "30"]
    assert f"{result['points'][1]['accuracy']:.2f} %" in lines[3] and lines[5].startswith("the run's own")
    assert lines[-1] == result["said"] and "so a size chosen here is chosen on the test images" in lines[-2]
    assert "│" in "".join(frontier_lines(result, pretty=True))


def test_the_sentence_names_the_smallest_size_that_loses_little(result: dict[str, Any]) -> None:
    cut = [result["dense"], result["own"], *result["points"]]
    best = max(point["accuracy"] for point in cut)
    least = min(p["left"]["macs"] for p in cut if p["accuracy"] >= best - 1)
    assert f"({best:.2f} %) has {100 * least:.0f} % of the MACs" in result["said"]


def test_the_picture_is_an_svg_with_a_mark_for_every_network(result: dict[str, Any]) -> None:
    text = draw_frontier(result, ".svg")
    root = ElementTree.fromstring(text)
    classes = [e.get("class", "") for e in root.iter("{http://www.w3.org/2000/svg}circle")]
    marks = [name.removeprefix("hit point ") for name in classes if name.startswith("hit")]
    assert sorted(marks) == ["chosen"] * 4 + ["own", "tuned", "whole"]
    assert {name.removeprefix("point ") for name in classes if not name.startswith("hit")} == set(marks)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) == 2
    unfinished = {**result, "own": {**result["own"], "finetuned_accuracy": None}}
    assert "tuned" not in [c.split()[-1] for c in _classes(draw_frontier(unfinished, ".svg"))]


def _classes(text: str) -> list[str]:
    circles = ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}circle")
    return [circle.get("class", "") for circle in circles]


def test_the_page_holds_both_figures_and_asks_for_nothing(result: dict[str, Any]) -> None:
    text = draw_frontier(result, ".html")
    assert text.count("<h2") == 2 and result["said"] in text
    assert "Accuracy against parameters" in text and "http://" not in text and "https://" not in text
    assert f"{result['own']['macs']:,}" in text
    other = "The percentages are the targets, as shares of the multiply-accumulates."
    assert text.count(other) == 1

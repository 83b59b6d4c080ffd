"""What only a CUDA device can show: whole runs through captured steps, clocks and timings on a GPU."""

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sbf_pruner.cli import main
from sbf_pruner.criteria import METHODS, Subject, ranked
from sbf_pruner.graph import trace
from sbf_pruner.measurement import conditions_here, load_or_calibrate
from sbf_pruner.models import resolve
from sbf_pruner.training import OptimizerConfig, Result, fit, load_recipe
from sbf_pruner.training.data import Augment, DeviceBatches, Split
from sbf_pruner.training.engine import CapturedEngine, make_optimizer
from sbf_pruner.utils import DistributedContext

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
pytestmark = pytest.mark.gpu
SHORT = ["phases.warmup=2", "phases.cycles=2", "phases.score=2", "phases.weights=1", "phases.finetune=2",
         "dense_control=false", "evaluate_every=1", "device=cuda", "budget.macs=0.5", "budget.settled=1",
         "scores.steer=true", "scores.balance=cost"]  # fmt: skip
WAYS = {
    "budget": [],
    "joint": ["scores.joint=true"],
    "taught": [
        "distill.alpha=0.5",
        "finetune.ema=0.9",
        "finetune.recalibrate=2",
        "finetune.cutout=3",
        "finetune.mixup=1",
    ],
    "behind the addition": ["model.name=after_addition:resnet20"],
    "ranked": ["method=chip"],
    "binary": ["method=dmc"],
    "plain": ["engine=plain", "distill.alpha=0.5", "finetune.ema=0.9"],
    "float32": ["precision=float32"],
}


class Killed(Exception):
    """A run that was stopped from outside."""


def run(way: str, folder: Path, *, resume: bool = False, kill: int = 0) -> Result:
    def report(record: dict[str, Any]) -> None:
        if record["done"] == kill:
            raise Killed

    recipe = load_recipe("digits", [*SHORT, *WAYS[way]])
    torch.manual_seed(0)
    model = resolve(recipe.model.name, in_channels=1)
    return fit(model, recipe, run=folder, resume=resume, report=report)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_was_killed_comes_to_the_same_metric(way: str, tmp_path: Path) -> None:
    whole = run(way, tmp_path / "whole")
    for kill in (3, 6):
        with pytest.raises(Killed):
            run(way, tmp_path / "killed", resume=kill > 3, kill=kill)
    resumed = run(way, tmp_path / "killed", resume=True)
    for result in (whole, resumed):
        summary = result.summary
        assert 0.49 < summary["pruned"]["macs"] / summary["dense"]["macs"] <= 0.5
        assert summary["cut_error"] < 1e-10 and summary["environment"]["gpu"]
    accuracies = [result.summary["pruned"]["accuracy"] for result in (whole, resumed)]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=3.0)


def test_the_settings_of_torch_stay_the_callers(tmp_path: Path) -> None:
    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    run("ranked", tmp_path / "run")
    assert (torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()) == before


class Messaging(DistributedContext):
    """A team of one that sends its messages all the same."""

    alone = False  # type: ignore[assignment]


@pytest.fixture
def nccl() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_messages_between_processes_are_captured_with_a_step() -> None:
    """One GPU cannot show more: that a graph with them is captured, and that they lose nothing on the way."""
    found = []
    for team in (DistributedContext(), Messaging()):
        torch.manual_seed(0)
        split = Split(torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8), torch.arange(64) % 10)
        batches = DeviceBatches(
            split, 32, (0.5,) * 3, (0.25,) * 3, device="cuda", augment=Augment(crop=4, flip=True)
        )
        model = resolve("resnet20").cuda()
        engine = CapturedEngine(model, "cuda", team=team)
        optimizer = make_optimizer(model, OptimizerConfig(lr=0.01))
        tallies = [engine.train_epoch(batches, epoch, optimizer, [0.01, 0.01]) for epoch in range(2)]
        found.append([tally.loss for tally in tallies])
    assert found[1] == pytest.approx(found[0], rel=1e-2)


TRAINED = {"dcp", "gal", "amc", "nppm"}  # they train something to judge filters by, and roundings grow on the way


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.learned])
def test_a_method_says_the_same_of_a_network_on_the_gpu(name: str) -> None:
    torch.manual_seed(0)
    model = resolve("resnet20").double().eval()
    images = torch.rand(32, 3, 32, 32, dtype=torch.float64)
    labels = torch.arange(32) % 10
    graph, found = trace(model, images[:2]), []
    for device in ("cpu", "cuda"):
        shown = [(images.to(device), labels.to(device))]
        found.append(ranked(name, Subject(copy.deepcopy(model).to(device), graph, shown)))
    if name in TRAINED:
        both = [np.concatenate(list(scores.values())) for scores in found]
        assert np.corrcoef(both)[0, 1] > 0.98
        return
    for layer, scores in found[0].items():
        np.testing.assert_allclose(found[1][layer], scores, rtol=1e-4, atol=1e-6)


def test_a_clock_for_the_gpu_foretells_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBF_CACHE", str(tmp_path))
    model = load_or_calibrate(
        resolve("resnet20").eval(), torch.zeros(1, 3, 32, 32), conditions_here("eager:cuda", 256, 1)
    )
    assert 0 < model.dense_seconds < 0.1
    assert model.ratio({}) == pytest.approx(1.0)
    assert model.calibration["mean_error"] < 0.3


def test_a_finished_run_is_timed_on_the_gpu(tmp_path: Path) -> None:
    run("budget", tmp_path / "run")
    words = ["bench", str(tmp_path / "run"), "--device", "cuda", "--runtimes", "eager", "--batch", "64"]
    assert main([*words, "--pairs", "10", "--json", str(tmp_path / "bench.json")]) == 0
    found = json.loads((tmp_path / "bench.json").read_text("utf-8"))
    assert found["measured"] and all(record["dense_ms"]["median"] > 0 for record in found["measured"])

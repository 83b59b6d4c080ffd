"""A run that takes over the dense stage of another ends as if it had trained it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runs import Small, small_recipe, small_run
from sbf_pruner.cli import summary_lines
from sbf_pruner.errors import RunError
from sbf_pruner.training import Result, fit, run

# A harsher cut with every way the dense stage goes on mattering: as teacher, in the budget, in the control.
LATER: dict[str, Any] = {
    "budget": {"macs": 0.4, "settled": 0},
    "scores": {"speed": 0.3, "penalty": 0.02, "balance": "cost"},
    "distill": {"alpha": 0.5, "during": "cycles"},
    "finetune": {"ema": 0.9},
}


class Killed(BaseException):
    """Not an Exception: nothing may catch it on the way."""


def taking_over(source: Path, folder: Path, net: nn.Module | None = None, **more: Any) -> Result:
    """The later run, from the dense stage of another; its own first weights do not matter but for the control."""
    torch.manual_seed(0)
    settings = {**LATER, **more.pop("changes", {})}
    return fit(net or Small(), small_recipe(**settings), run=folder, dense_from=source, **more)


def outcome(result: Result) -> tuple[Any, ...]:
    """All that a run leaves but for what its time and its name tell."""
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    records = [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]
    names = ("model.safetensors", "scores.jsonl", "checkpoints/scored.safetensors", "checkpoints/dense.safetensors")
    accuracies = [result.summary[part]["accuracy"] for part in ("dense", "pruned")]
    files = [(result.folder / name).read_bytes() for name in names]
    return records, accuracies, result.summary["dense"]["warmup_accuracy"], result.plan, files


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return small_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The later run, with a dense stage of its own."""
    return small_run(tmp_path_factory.mktemp("runs") / "alone", **LATER)


def test_it_ends_with_the_same_bits_and_says_where_it_came_from(
    first: Result, alone: Result, tmp_path: Path
) -> None:
    seen: list[int] = []
    taken = taking_over(first.folder, tmp_path / "run", report=lambda record: seen.append(record["done"]))
    assert outcome(taken) == outcome(alone)
    assert seen[0] == 3  # the two epochs of the warm-up were not trained again
    assert taken.summary["dense_from"] == str(first.folder) and "dense_from" not in alone.summary
    assert f"dense stage: taken over from {first.folder}" in summary_lines(taken.summary, "run")
    assert f"dense stage of {first.folder}" in (taken.folder / "report.html").read_text()
    spent = [json.loads(line)["seconds"] for line in (first.folder / "metrics.jsonl").read_text().splitlines()[:2]]
    assert taken.summary["seconds"] >= round(sum(spent), 1)  # what the stage took is part of what the run takes


def test_a_run_on_its_way_can_be_taken_from_and_what_takes_over_can_be_killed(
    alone: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(epoch: int) -> Any:
        def report(record: dict[str, Any]) -> None:
            if record["done"] == epoch:
                raise Killed

        return report

    with pytest.raises(Killed):
        small_run(tmp_path / "source", report=stop(3))
    with monkeypatch.context() as patch:  # before its first checkpoint: the dense stage is given once more
        patch.setattr(run, "save_checkpoint", lambda *_: stop(0)({"done": 0}))
        with pytest.raises(Killed):
            taking_over(tmp_path / "source", tmp_path / "run")
    with pytest.raises(Killed):
        taking_over(tmp_path / "source", tmp_path / "run", report=stop(4), resume=True)
    # From here on the run has all it needs, and where it came from may be gone.
    resumed = taking_over(tmp_path / "gone", tmp_path / "run", resume=True)
    assert outcome(resumed) == outcome(alone)
    assert resumed.summary["dense_from"] == str(tmp_path / "source")


class Narrow(Small):
    """Another network under the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4, bias=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"seed": 1},
            "was trained with seed = 0, not 1; take over one of the same network, data, warm-up and seed",
        ),
        ({"warmup": {"lr": 0.3}}, "was trained with warmup.lr = 0.1, not 0.3"),
        ({"phases": {"warmup": 1}}, "was trained with phases.warmup = 2, not 1"),
        ({"model": {"name": "tests:Other", "num_classes": 4, "in_channels": 1}}, "model.name = 'tests:Small', not"),
        (
            {"data": {"name": "synthetic", "image_size": 8, "channels": 1, "samples": 80, "batch_size": 16}},
            "data.samples = 64, not 80",
        ),
    ],
)
def test_another_dense_stage_is_refused(first: Result, changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=message):
        taking_over(first.folder, tmp_path / "run", changes=changes)
    assert not (tmp_path / "run").exists()


def test_a_stage_that_is_not_there_is_refused(first: Result, tmp_path: Path) -> None:
    def refused(message: str, source: Path, **more: Any) -> None:
        with pytest.raises(RunError, match=message):
            taking_over(source, tmp_path / "run", **more)
        assert not (tmp_path / "run").exists()

    refused("there is no run in .* to take the dense stage from", tmp_path)
    refused("the dense stage belongs to another network", first.folder, net=Narrow())
    shutil.copytree(first.folder, tmp_path / "torn")
    (tmp_path / "torn/checkpoints/dense.safetensors").write_bytes(b"torn")
    refused(
        "dense.safetensors is damaged .*; take over another run's, or leave out --dense-from", tmp_path / "torn"
    )
    none = {"phases": {"warmup": 0, "cycles": 1, "score": 1, "weights": 0, "finetune": 0}}
    small_run(tmp_path / "none", **none)
    refused("has no dense stage to take over", tmp_path / "none", changes={**none, "distill": {}})
    with pytest.raises(Killed):
        small_run(tmp_path / "young", report=lambda record: _kill())
    refused("it has not finished its warm-up", tmp_path / "young")


def _kill() -> None:
    raise Killed

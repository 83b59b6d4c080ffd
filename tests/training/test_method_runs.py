"""Runs whose filters another method chooses: once, after the dense stage, with all other things equal."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runs import ASKED, EPOCHS, Small, ranked_run, small_recipe
from sbf_pruner.cli import summary_lines
from sbf_pruner.criteria import Subject, l1_norm
from sbf_pruner.errors import PruningError, RecipeError
from sbf_pruner.graph import trace
from sbf_pruner.report import read_run
from sbf_pruner.training import Recipe, Result, fit, load_checkpoint, run
from shares import mostly_slow


class Killed(BaseException):
    """Not an Exception: nothing may catch it on the way."""


def records(result: Result) -> list[dict[str, Any]]:
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return ranked_run(tmp_path_factory.mktemp("runs") / "l1", "l1")


def test_it_is_cut_once_to_the_size_asked_for_in_as_many_epochs(first: Result) -> None:
    found = records(first)
    own = small_recipe().phases
    assert [r["phase"] for r in found] == ["warmup"] * own.warmup + ["finetune"] * (EPOCHS - own.warmup)
    dense, left = first.summary["dense"]["macs"], first.summary["pruned"]["macs"]
    assert [r["macs"] for r in found] == [dense] * own.warmup + [left] * (EPOCHS - own.warmup)
    assert 0.4 * dense < left <= 0.5 * dense and first.summary["cut_error"] <= 1e-12


def test_it_keeps_the_filters_that_the_method_ranks_highest_in_the_dense_stage(first: Result) -> None:
    dense = Small()
    dense.load_state_dict(load_checkpoint(first.folder / "checkpoints", "dense.safetensors"))
    scores = l1_norm(Subject(dense, trace(dense, torch.zeros(2, 1, 8, 8)), []))
    for name, kept in first.plan.keep.items():
        if kept:
            gone = [f for f in range(len(scores[name])) if f not in kept]
            assert scores[name][list(kept)].min() > max((scores[name][f] for f in gone), default=0.0)


# In the dense stage, as it ends, in the fine-tuning; and within and between the cycles.
STOPPED = [("taylor", 1), ("taylor", 2), ("taylor", 8), ("sfp", 4), ("sfp", 8), ("dmc", 4), ("dmc", 5)]


QUICK = [("taylor", 2), ("sfp", 4)]


@pytest.mark.parametrize(("method", "epoch"), mostly_slow(STOPPED, QUICK))
def test_killed_it_ends_with_the_same_bits(
    method: str, epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SAVING_SHARE", 1e9)
    whole = ranked_run(tmp_path / "whole", method)

    def kill(record: dict[str, Any]) -> None:
        if record["done"] == epoch:
            raise Killed

    with pytest.raises(Killed):
        ranked_run(tmp_path / "run", method, report=kill)
    again = ranked_run(tmp_path / "run", method, seed=9, resume=True)
    for name in ("model.safetensors", "plan.json", "checkpoints/scored.safetensors"):
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    assert records(again) == records(whole)


def test_soft_filters_are_emptied_epoch_by_epoch_and_may_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def empty(subject: Subject, keep: dict[str, Any]) -> None:
        before = {name: subject.rows(name).norm(dim=1) > 0 for name in keep}
        emptied(subject, keep)
        for name, mask in keep.items():
            assert ((subject.rows(name).norm(dim=1) > 0).numpy() == mask).all()
        seen.append({"before": before, "keep": keep})

    emptied = Subject.empty
    monkeypatch.setattr(Subject, "empty", empty)
    result = ranked_run(tmp_path / "run", "sfp")
    own = small_recipe().phases
    found, soft = records(result), 2 * (own.score + own.weights)
    lengths = {"warmup": own.warmup, "weights": soft, "finetune": own.finetune}
    assert [r["phase"] for r in found] == [kind for kind, epochs in lengths.items() for _ in range(epochs)]
    assert len(seen) == soft
    for earlier, later in itertools.pairwise(seen):
        grown = [(later["before"][name].numpy() & ~kept).sum() for name, kept in earlier["keep"].items()]
        assert sum(grown) > 0  # an epoch of weights brings emptied filters back to life
    last = {name: tuple(np.flatnonzero(kept).tolist()) for name, kept in seen[-1]["keep"].items()}
    assert result.plan.keep == last
    dense = result.summary["dense"]["macs"]
    assert [r["macs"] == dense for r in found] == [True] * (own.warmup + soft) + [False] * own.finetune
    assert result.summary["pruned"]["macs"] <= 0.5 * dense and result.summary["cut_error"] <= 1e-12
    assert "After every epoch of the cycles filters are set to zero" in (result.folder / "report.html").read_text()


def test_gates_that_are_learned_open_or_closed(tmp_path: Path) -> None:
    result = ranked_run(tmp_path / "run", "dmc")
    own = small_recipe().phases
    found, scored = records(result), 2 * (own.score + own.weights)
    lengths = {"warmup": own.warmup, "score": scored, "finetune": own.finetune}
    assert [r["phase"] for r in found] == [kind for kind, epochs in lengths.items() for _ in range(epochs)]
    assert result.summary["pruned"]["macs"] <= 0.5 * result.summary["dense"]["macs"]
    resolved = Recipe.load(result.folder / "recipe.toml")
    assert resolved.scores.binary and resolved.scores.projection == "free" and resolved.scores.steer
    lines = [json.loads(line) for line in (result.folder / "scores.jsonl").read_text().splitlines()]
    values = {score for line in lines for held in line["scores"].values() for score in held}
    assert len(values) > 10  # what is behind the gates goes on from there
    page = (result.folder / "report.html").read_text()
    assert "filters chosen by dmc" in page and "The learned scores determine the widths." in page
    run = read_run(result.folder)
    assert [(s.kind, s.epochs) for s in run.schedule] == [
        ("warmup", 2),
        ("score", 3),
        ("score", 3),
        ("finetune", 2),
    ]


def test_a_soft_method_without_cycles_is_cut_at_once(tmp_path: Path) -> None:
    own = {"warmup": 1, "cycles": 0, "finetune": 1}
    found = {name: ranked_run(tmp_path / name, name, changes={"phases": own}) for name in ("sfp", "l2")}
    assert found["sfp"].plan == found["l2"].plan
    assert (
        "The filters are removed at once, when the warm-up is over."
        in (found["sfp"].folder / "report.html").read_text()
    )


def test_methods_share_a_dense_stage(first: Result, tmp_path: Path) -> None:
    other = ranked_run(tmp_path / "fpgm", "fpgm", dense_from=first.folder)
    alone = ranked_run(tmp_path / "alone", "fpgm")
    assert other.plan == alone.plan != first.plan and records(other) == records(alone)
    assert (other.folder / "model.safetensors").read_bytes() == (alone.folder / "model.safetensors").read_bytes()


def test_a_network_that_comes_trained_is_cut_at_once(tmp_path: Path) -> None:
    result = ranked_run(
        tmp_path / "run",
        "l2",
        changes={"phases": {"warmup": 0, "cycles": 1, "score": 1, "weights": 1, "finetune": 1}},
    )
    assert {r["phase"] for r in records(result)} == {"finetune"}
    assert "The filters are removed at once, before the first epoch." in (result.folder / "report.html").read_text()
    assert result.summary["pruned"]["macs"] <= 0.5 * result.summary["dense"]["macs"]


def test_other_sizes_can_be_chosen_from_its_scores(first: Result) -> None:
    scored = load_checkpoint(first.folder / "checkpoints", "scored.safetensors")
    assert scored["plan"] == {name: list(kept) for name, kept in first.plan.keep.items()}
    assert sorted(scored["scores"]["stem"].tolist()) == [place / 8 for place in range(1, 9)]


def test_report_and_terminal_say_who_chose(first: Result) -> None:
    page = (first.folder / "report.html").read_text()
    told = "l1 (the sum of its absolute weights)"
    assert f"They were chosen by {told}, the same part of every layer" in page
    assert f"No scores are learned: filters are chosen by {told}." in page
    assert "The filters are removed at once, when the warm-up is over." in page and "filters chosen by l1" in page
    assert "The learned scores determine the widths" not in page and "<b>cycles</b>" not in page
    assert any(f", chosen by {told}" in line for line in summary_lines(first.summary, "runs/l1"))
    run = read_run(first.folder)
    assert [(s.kind, s.epochs) for s in run.schedule] == [("warmup", 2), ("finetune", EPOCHS - 2)]


def test_a_method_that_cannot_judge_the_network_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    plain = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4)
    )
    with pytest.raises(PruningError, match=r"^method bnscale: no layer has a norm with scales behind it; choose"):
        fit(plain, small_recipe(method="bnscale", **ASKED), run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_a_size_it_is_refused() -> None:
    with pytest.raises(RecipeError, match="chip ranks filters, but does not say how many to remove"):
        small_recipe(method="chip")
    with pytest.raises(RecipeError, match="method"):
        small_recipe(method="magic", **ASKED)

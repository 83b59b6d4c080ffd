"""Contract of every criterion: it meets the budget, extracts exactly, saves and loads, and resumes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import sbf_pruner as sbf
from runs import Small, ranked_run
from sbf_pruner.criteria import METHODS, OWN
from sbf_pruner.training import run

ALL = [OWN, *METHODS]
SHORT = {"phases": {"warmup": 1, "cycles": 2, "score": 1, "weights": 1, "finetune": 1}}
STOPPED = 4  # in the second cycle, or in the fine-tuning of a method that has none


@pytest.mark.parametrize("method", ALL)
def test_every_criterion_keeps_the_contract(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SAVING_SHARE", 1e9)  # a checkpoint after every epoch

    def copy(record: dict[str, Any]) -> None:
        if record["done"] == STOPPED:  # what a run that is killed now would leave
            shutil.copytree(tmp_path / "whole", tmp_path / "run")

    whole = ranked_run(tmp_path / "whole", method, report=copy, changes=SHORT)
    dense, pruned = (whole.summary[side]["macs"] for side in ("dense", "pruned"))
    assert pruned <= 0.5 * dense, "the budget is met"
    assert whole.summary["cut_error"] <= 1e-12, "the extracted network equals the gated one"

    images = torch.rand(3, 1, 8, 8)
    loaded = sbf.load(whole.folder, Small).eval()
    with torch.no_grad():  # not equal to the bit, because the memory format of the weights differs
        torch.testing.assert_close(loaded(images), whole.model.eval()(images), rtol=1e-5, atol=1e-5)

    resumed = ranked_run(tmp_path / "run", method, seed=9, resume=True, changes=SHORT)
    assert resumed.plan == whole.plan
    for name in ("model.safetensors", "plan.json"):
        assert (resumed.folder / name).read_bytes() == (whole.folder / name).read_bytes()

"""Every ablation is a recipe that loads and has a row; those that train in another way run as they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sbf_pruner.models import resolve
from sbf_pruner.training import Recipe, fit, load_recipe
from shares import mostly_slow

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from ablation_tables import QUESTIONS  # noqa: E402
from jobs import Run, read_runs  # noqa: E402

TINY = [
    'data = {name = "synthetic", image_size = 8, samples = 64, batch_size = 32, crop = 1, flip = true}',
    "phases = {warmup = 1, cycles = 3, score = 1, weights = 1, finetune = 1}",
    "model.num_classes = 4",
    "scores.lr = 1e-3",
    "device = cpu",
    "evaluate_every = 1",
]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sbf_pruner.training.recording.TIMED_SECONDS", 0.0)


def jobs() -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in read_runs(ROOT / "benchmarks/ablations.toml", Path("nowhere")):
        found.setdefault(run.group, []).append(run)
    return found


def recipe(run: Run, *more: str) -> Recipe:
    return load_recipe(run.recipe, [*run.overrides, *more])


def test_every_job_has_two_seeds_a_recipe_that_loads_and_a_row() -> None:
    rows = {name for settings in QUESTIONS.values() for name in settings}
    assert rows == set(jobs())
    base = recipe(jobs()["half-base"][0])
    for name, runs in jobs().items():
        assert [run.seed for run in runs] == [0, 1]
        made = recipe(runs[0])
        assert name == "half-base" or made != base
        assert (made.phases, made.data) == (base.phases, base.data)


@pytest.mark.parametrize("name", mostly_slow(["half-joint", "half-after-addition"], ["half-after-addition"]))
def test_a_job_runs(name: str, tmp_path: Path) -> None:
    made = recipe(jobs()[name][0], *TINY)
    model = resolve(made.model.name, num_classes=4)
    result = fit(model, made, run=tmp_path / name)
    pruned, dense = result.summary["pruned"], result.summary["dense"]
    assert 0.45 * dense["macs"] < pruned["macs"] <= 0.5 * dense["macs"]
    assert result.summary["cut_error"] <= 1e-12
    phases = [json.loads(line)["phase"] for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    joint = "joint" in name
    assert phases == ["warmup", *(["joint"] * 6 if joint else ["score", "weights"] * 3), "finetune"]
    stored = json.loads((result.folder / "network.json").read_text())
    assert {layer["gate"] for layer in stored["facts"]["layers"]} == ({"affine"} if joint else {"affine", "sum"})
    assert any("scored" in block for block in result.summary["refinement"]) == joint

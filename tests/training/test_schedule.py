"""The phases cover the run without gaps, and the learning rate is a function of the step alone."""

from __future__ import annotations

import math

import pytest

from sbf_pruner.schedule import Phase
from sbf_pruner.training import (
    OptimizerConfig,
    Recipe,
    batch_size,
    cycles_end,
    is_distilled,
    learning_rate,
    load_recipe,
    optimizer_config,
    phases,
    total_epochs,
)


def recipe(*overrides: str) -> Recipe:
    paper = ["warmup=50", "cycles=10", "score=3", "weights=6", "finetune=300"]
    return load_recipe("digits", [*(f"phases.{length}" for length in paper), *overrides])


def test_the_papers_schedule_with_a_control_of_as_many_epochs() -> None:
    found = phases(recipe("dense_control=true"))
    assert [p.kind for p in found] == ["warmup", *["score", "weights"] * 10, "finetune", "control"]
    assert [p.epochs for p in found] == [50, *[3, 6] * 10, 300, 440]
    assert [p.cycle for p in found] == [0, *(c for c in range(1, 11) for _ in range(2)), 0, 0]
    assert total_epochs(recipe("dense_control=true")) == 880
    assert total_epochs(recipe("dense_control=false")) == 440


def test_joint_cycles_are_as_long_and_train_weights_as_weight_phases_do() -> None:
    made = recipe("scores.joint=true", "weights.lr=0.02", "weights.batch_size=32", "dense_control=false")
    found = phases(made)
    assert [p.kind for p in found] == ["warmup", *["joint"] * 10, "finetune"]
    assert [p.epochs for p in found] == [50, *[9] * 10, 300]
    assert total_epochs(made) == 440 and cycles_end(made) == 140
    assert optimizer_config(made, found[1]).lr == 0.02 and batch_size(made, found[1]) == 32
    assert found[1].trains_scores and found[1].trains_weights
    taught = {}
    for during in ("finetune", "weights", "cycles"):
        learning = recipe("scores.joint=true", "distill.alpha=0.5", f"distill.during={during}")
        taught[during] = is_distilled(learning, found[1])
    assert taught == {"finetune": False, "weights": True, "cycles": True}


@pytest.mark.parametrize(
    "overrides",
    [
        ("scores.joint=true",),
        (),
        ("phases.warmup=0",),
        ("phases.cycles=0",),
        ("phases.score=0",),
        ("phases.finetune=0",),
    ],
)
def test_every_epoch_belongs_to_one_phase(overrides: tuple[str, ...]) -> None:
    for control in ("true", "false"):
        made = recipe(f"dense_control={control}", *overrides)
        numbers = [n for phase in phases(made) for n in range(phase.first, phase.end)]
        assert numbers == list(range(total_epochs(made)))
        assert all(phase.epochs > 0 for phase in phases(made))


def test_no_epochs_at_all_are_no_phases() -> None:
    assert phases(recipe("phases.warmup=0", "phases.cycles=0", "phases.finetune=0", "dense_control=true")) == []


def test_each_phase_has_its_own_optimiser_and_the_control_the_warm_ups() -> None:
    made = recipe("warmup.lr=0.3", "weights.lr=0.02", "finetune.lr=0.01")
    rates = {p.kind: optimizer_config(made, p).lr for p in phases(made) if p.kind != "score"}
    assert rates == {"warmup": 0.3, "weights": 0.02, "finetune": 0.01, "control": 0.3}


def test_a_phase_says_its_name() -> None:
    assert str(Phase("score", 3, 1, 0)) == "score 3"
    assert str(Phase("warmup", 0, 1, 0)) == "warmup"


def test_cosine_falls_from_the_rate_to_nearly_nothing() -> None:
    config = OptimizerConfig(lr=0.4)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[0] == 0.4
    assert rates[50] == pytest.approx(0.2)
    assert rates[25] == pytest.approx(0.2 * (1 + math.sqrt(0.5)))
    assert 0 < rates[99] < 2e-4
    assert rates == sorted(rates, reverse=True)


def test_step_falls_at_its_milestones() -> None:
    config = OptimizerConfig(lr=1.0, schedule="step", milestones=(0.5, 0.75), gamma=0.1)
    rates = [learning_rate(config, step, 8) for step in range(8)]
    assert rates == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_constant_stays() -> None:
    config = OptimizerConfig(lr=0.7, schedule="constant")
    assert {learning_rate(config, step, 5) for step in range(5)} == {0.7}


def test_a_ramp_rises_to_where_the_schedule_is_and_then_follows_it() -> None:
    config = OptimizerConfig(lr=0.4, ramp=2)
    plain = [learning_rate(OptimizerConfig(lr=0.4), step, 40) for step in range(40)]
    rates = [learning_rate(config, step, 40, each=5) for step in range(40)]
    assert rates[:10] == pytest.approx([rate * (step + 1) / 10 for step, rate in enumerate(plain[:10])])
    assert rates[10:] == plain[10:]

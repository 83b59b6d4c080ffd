"""Statistics of norms taken anew, and score phases that begin with them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from runs import small_recipe
from sbf_pruner import Plan, Pruner
from sbf_pruner.models import resolve
from sbf_pruner.scores import fresh_statistics, lagging
from sbf_pruner.training import RECALIBRATION_BATCHES, EpochRunner, Result, fit, load_recipe, phases
from sbf_pruner.training.engine import Engine

IMAGES = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def trained_under_gates() -> Pruner:
    """A network whose norms know only half of the filters."""
    torch.manual_seed(0)
    pruner = Pruner(resolve("resnet20", in_channels=1), IMAGES[:1])
    pruner.gate(Plan({name: tuple(range(0, layer.filters, 2)) for name, layer in pruner.graph.layers.items()}))
    with torch.no_grad():
        for _ in range(40):
            pruner.model.train()(IMAGES)
    return pruner


def test_new_statistics_are_those_of_the_forwards_inside() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).eval()
    with fresh_statistics(model):
        model(IMAGES[:8])
        model(IMAGES[8:])
    expected = model[0](IMAGES).mean((0, 2, 3))
    torch.testing.assert_close(model[1].running_mean, expected, rtol=1e-5, atol=1e-6)
    assert not model[1].training and model[1].momentum == 0.1


def test_what_was_not_seen_keeps_its_statistics() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), nn.BatchNorm2d(1))
    model[1].running_mean.fill_(3.0)
    with fresh_statistics(model):
        model[0](IMAGES)
    assert model[0].running_mean.item() == pytest.approx(IMAGES.mean().item())
    assert model[1].running_mean.item() == 3.0 and model.training
    with pytest.raises(ZeroDivisionError), fresh_statistics(model):
        model(IMAGES + 5)
        raise ZeroDivisionError
    assert model[0].running_mean.item() == pytest.approx(IMAGES.mean().item())


def heard(pruner: Pruner, **arguments: Any) -> Tensor:
    """What the network answers in a score phase."""
    with pruner.scoring(**arguments):
        return pruner.model.eval()(IMAGES).detach()


def test_a_tuned_score_phase_computes_what_its_norms_would_make_of_the_batch() -> None:
    pruner = trained_under_gates()
    model = pruner.model
    tuned = heard(pruner, tune=lambda: model(IMAGES))
    other = trained_under_gates()
    plain = heard(other)
    other.gates.mode = "soft"
    with torch.no_grad():
        expected = other.model.train()(IMAGES)
    assert (tuned - expected).norm() < 0.05 * expected.norm()
    assert (plain - expected).norm() > 0.2 * expected.norm()


def test_a_phase_that_goes_on_is_not_tuned_again() -> None:
    pruner, called = trained_under_gates(), []
    with pruner.scoring(tune=lambda: called.append(1)):
        state = pruner.state_dict()
    pruner.load_state_dict(state)
    with pruner.scoring(tune=lambda: called.append(2)):
        pass
    assert called == [1]


def test_a_tuning_that_fails_leaves_a_usable_model() -> None:
    pruner = trained_under_gates()
    before = [norm.running_var.clone() for norm in norms(pruner.model) if norm.running_var is not None]
    with pytest.raises(ZeroDivisionError), pruner.scoring(tune=lambda: 1 // 0):
        pass
    assert all(torch.equal(norm.running_var, var) for norm, var in zip(norms(pruner.model), before, strict=True))
    assert pruner.gates.mode == "hard" and all(p.requires_grad for p in pruner.model.parameters())
    with pruner.scoring():
        pruner.model(IMAGES).sum().backward()


@pytest.mark.parametrize(
    ("changes", "looks"),
    [(["budget.macs=0.4"], [2, 2]), (["budget.macs=0.4", "scores.recalibrate=0"], []), ([], []),
     (["budget.macs=0.4", "scores.freeze_norms=false"], []), (["budget.macs=0.4", "scores.joint=true"], [])],
)  # fmt: skip
def test_a_run_tunes_the_score_phases_after_a_landing(
    changes: list[str], looks: list[int], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    look = Engine.look
    monkeypatch.setattr(Engine, "look", lambda self, b, e, count: (seen.append(count), look(self, b, e, count))[1])
    short = ["phases.warmup=0", "phases.cycles=3", "phases.score=1", "phases.weights=0", "phases.finetune=0"]
    more = ["dense_control=false", "budget.settled=1", "scores.recalibrate=2", *changes]
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    fit(net, load_recipe("digits", [*short, *more]), run=tmp_path / "run")
    assert [count for count in seen if count != RECALIBRATION_BATCHES] == looks


def test_modes_follow_the_model_through_a_tuned_phase() -> None:
    for before, inside in ((False, True), (True, False)):
        pruner = trained_under_gates()
        model = pruner.model.train(before)
        with pruner.scoring(tune=lambda model=model, inside=inside: model.train(inside)(IMAGES)):
            model.train(inside)
        assert all(norm.training == inside for norm in norms(model))


def test_norms_that_are_kept_frozen_or_see_samples_alone_are_not_tuned() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(1), nn.BatchNorm2d(1), nn.InstanceNorm2d(1, track_running_stats=True), nn.BatchNorm2d(1)
    )
    model[1].eval()
    model[3].running_mean = model[3].running_var = None
    for part in model[1:3]:
        part.running_mean.fill_(0.3)
    with fresh_statistics(model):
        model(IMAGES)
    assert model[0].running_mean.item() == pytest.approx(IMAGES.mean().item())
    assert [part.running_mean.item() for part in model[1:3]] == pytest.approx([0.3, 0.3])
    assert [part.training for part in model] == [True, False, True, True]


def test_a_phase_that_is_cut_short_gives_the_statistics_back() -> None:
    pruner = trained_under_gates()
    before = [norm.running_var.clone() for norm in norms(pruner.model)]
    with pytest.raises(ZeroDivisionError), pruner.scoring(tune=lambda: pruner.model(IMAGES)):
        assert not torch.equal(norms(pruner.model)[3].running_var, before[3])
        raise ZeroDivisionError
    assert all(torch.equal(norm.running_var, var) for norm, var in zip(norms(pruner.model), before, strict=True))


# -- statistics that lag behind training ------------------------------------------------------------------------


def test_statistics_lag_until_little_is_left_of_what_they_began_with() -> None:
    slow, usual = nn.BatchNorm2d(1, momentum=0.01), nn.BatchNorm2d(1)
    still, own = nn.BatchNorm2d(1, momentum=0.0), nn.BatchNorm2d(1, track_running_stats=False)
    net = nn.Sequential(slow, usual, still, own, nn.InstanceNorm2d(1, track_running_stats=True))
    assert lagging(net, {}) is None, "nothing was trained"
    for steps, found in ((1, (0.01, 1)), (298, (0.01, 298)), (299, None)):
        for norm in (slow, usual, still):
            norm.num_batches_tracked.fill_(steps)
        assert lagging(net, {}) == found
    began = {"0.num_batches_tracked": torch.tensor(200)}  # trained before, perhaps on other images
    assert lagging(net, began) == (0.01, 99)
    slow.num_batches_tracked.fill_(20)  # and then recalibrated
    assert lagging(net, began) == (0.01, 20)
    assert lagging(nn.ReLU(), {}) is None
    net[0].num_batches_tracked = None
    assert lagging(net, {}) is None


def brighter(test_labels: Tensor | None = None) -> dict[str, Any]:
    """Images of four classes, each brighter than the one before."""
    labels = torch.arange(64) % 4
    images = 3 * labels.view(-1, 1, 1, 1) + torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    parts = {"train": labels, "test": labels if test_labels is None else test_labels}
    return {name: TensorDataset(images, held) for name, held in parts.items()}


def trained_shortly(data: dict[str, Any], folder: Path, momentum: float) -> tuple[Result, list[float]]:
    """A dense network after 24 steps, and its accuracies on the test images, epoch by epoch."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )
    recipe = small_recipe(
        data={"name": "bright", "batch_size": 16, "workers": 0},
        phases={"warmup": 6, "cycles": 0, "finetune": 0},
        dense_control=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbf_pruner.training.recording.TIMED_SECONDS", 0.0)
        result = fit(net, recipe, data=data, run=folder)
    return result, [json.loads(line)["test_accuracy"] for line in (folder / "metrics.jsonl").open()]


def test_a_network_is_judged_and_saved_with_statistics_that_have_arrived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sbf_pruner.training")
    result, judged = trained_shortly(brighter(), tmp_path / "slow", momentum=0.001)
    told = "running statistics of batch norms lag (momentum 0.001, 4 steps), so they are recalibrated on up to 20"
    assert sum(told in record.getMessage() for record in caplog.records) == 1
    assert judged[-1] > 90 and result.summary["pruned"]["accuracy"] == judged[-1]
    batch = result.model.state_dict()["1.num_batches_tracked"]
    assert batch == 4, "the batches that the saved statistics are from"


def test_a_network_that_guesses_on_the_test_images_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained_shortly(brighter(test_labels=torch.arange(64).roll(1) % 4), tmp_path / "wrong", momentum=0.5)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("after phase warmup the training accuracy is ") and "of guessing among 4 classes" in told


@pytest.mark.parametrize(
    ("train", "test", "warned"),
    [(16.0, 5.0, True), (14.0, 5.0, False), (28.0, 14.5, False), (90.0, 15.1, False)],
)
def test_guessing_means_half_the_training_accuracy_and_less_than_luck_gives(
    train: float, test: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe("digits")
    feed: Any = SimpleNamespace(test=SimpleNamespace(num_classes=10))
    EpochRunner(recipe, feed, Path())._warn_of_guessing(phases(recipe)[0], train, test)
    assert len(caplog.records) == warned

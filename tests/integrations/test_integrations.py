"""Somebody else's training loop, told of phases by `Turns`, trains what a loop written for the pruner would."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbf_pruner import Budget, Plan, Pruner, PruningError, Scores, measure
from sbf_pruner.integrations import Turns, pruning_callback

EPOCHS = 7  # a warm-up of 1, twice 1 of scores and 1 of weights, and 2 to fine-tune
IMAGES, LABELS = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4


def made() -> tuple[nn.Module, Pruner, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 5, 3), nn.Flatten(), nn.Linear(80, 4)
    )
    pruner = Pruner(net, IMAGES[:1], scores=Scores(penalty=0.05, speed=0.05), budget=Budget(macs=0.5))
    return net, pruner, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def loss_of(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(IMAGES), LABELS)


def by_hand() -> tuple[nn.Module, Pruner]:
    net, pruner, optimizer = made()

    def descend() -> None:
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()

    descend()
    for cycle in (1, 2):
        pruner.progress = cycle / 2
        with pruner.scoring():
            (loss_of(net) + pruner.penalty()).backward()
            pruner.step()
        with pruner.gated():
            descend()
    for _ in range(2):
        descend()
    return net, pruner


def strangers_epoch(net: nn.Module, turns: Turns, optimizer: torch.optim.Optimizer, epoch: int) -> str:
    """It knows nothing of scores, and steps its optimiser whatever happens."""
    phase = turns.epoch_begins(epoch)
    optimizer.zero_grad()
    loss_of(net).backward()
    turns.after_backward()
    optimizer.step()
    return phase


def assert_same(net: nn.Module, pruner: Pruner, expected: tuple[nn.Module, Pruner]) -> None:
    assert pruner.plan() == expected[1].plan()
    for found, held in zip(net.state_dict().values(), expected[0].state_dict().values(), strict=True):
        torch.testing.assert_close(found, held)
    for name, scores in expected[1].scores().items():
        torch.testing.assert_close(pruner.scores()[name], scores)


def test_turns_train_what_a_loop_written_for_them_would() -> None:
    net, pruner, optimizer = made()
    turns = Turns(pruner, warmup=1, cycles=2, score=1, weights=1)
    phases = [strangers_epoch(net, turns, optimizer, epoch) for epoch in range(EPOCHS)]
    assert phases == ["warmup", "score 1", "weights 1", "score 2", "weights 2", "finetune", "finetune"]
    turns.end()
    assert_same(net, pruner, by_hand())
    assert pruner.extract()(IMAGES).shape == (8, 4)


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_turns_go_on_from_a_checkpoint_of_any_epoch(cut: int) -> None:
    net, pruner, optimizer = made()
    turns = Turns(pruner, warmup=1, cycles=2, score=1, weights=1)
    for epoch in range(cut):
        strangers_epoch(net, turns, optimizer, epoch)
    kept = turns.state_dict(), net.state_dict(), optimizer.state_dict()
    again, other, descent = made()
    went_on = Turns(other, warmup=1, cycles=2, score=1, weights=1)
    went_on.load_state_dict(kept[0])
    again.load_state_dict(kept[1])
    descent.load_state_dict(kept[2])
    for epoch in range(cut, EPOCHS):
        strangers_epoch(again, went_on, descent, epoch)
    went_on.end()
    assert_same(again, other, by_hand())


def test_a_training_that_ends_before_the_budget_is_met_is_told(caplog: pytest.LogCaptureFixture) -> None:
    net, pruner, optimizer = made()
    turns = Turns(pruner, warmup=1, cycles=2, score=1, weights=1)
    for epoch in range(3):
        strangers_epoch(net, turns, optimizer, epoch)
    assert "budget" not in caplog.text
    turns.end()
    told = caplog.records[-1].getMessage()
    assert told.startswith("the training ended in cycle 1 of 2, before the budget is met: the network has ")
    assert "macs (50.0%)" in told and "pruner.land()" in told
    assert measure(pruner.extract(), IMAGES[:1]).macs > 0.5 * measure(net, IMAGES[:1]).macs
    assert "(pruner.progress is 50%); call land() first" in caplog.records[-1].getMessage()
    caplog.clear()
    pruner.land()
    assert measure(pruner.extract(), IMAGES[:1]).macs <= 0.5 * measure(net, IMAGES[:1]).macs
    assert not caplog.text


def test_weights_are_not_trained_for_good_under_gates_that_exceed_the_budget() -> None:
    net, pruner, optimizer = made()
    turns = Turns(pruner, warmup=1, cycles=2, score=1, weights=1)
    with pytest.raises(PruningError, match=r"epoch 5 is past the last of 2 cycles, but .* \(50.0%\); load the"):
        strangers_epoch(net, turns, optimizer, 5)
    pruner.land()
    assert strangers_epoch(net, turns, optimizer, 5) == "finetune"


def scaled_epochs(scale: float, half: bool = False) -> tuple[nn.Module, Pruner, torch.amp.GradScaler]:
    net, pruner, optimizer = made()
    turns, scaler = Turns(pruner, warmup=1, cycles=2, score=1, weights=1), torch.amp.GradScaler("cpu", scale)
    for epoch in range(EPOCHS):
        turns.epoch_begins(epoch)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=half):
            loss = loss_of(net)
        scaler.scale(loss).backward()
        turns.after_backward(scaler)
        if not turns.scores_now:
            scaler.step(optimizer)
        scaler.update()
    turns.end()
    return net, pruner, scaler


def test_a_gradient_scaler_changes_no_score() -> None:
    net, pruner, _ = scaled_epochs(2.0**10)
    assert_same(net, pruner, by_hand())


def test_a_gradient_scaler_seeks_its_factor_in_epochs_of_scores_too(caplog: pytest.LogCaptureFixture) -> None:
    net, pruner, scaler = scaled_epochs(2.0**60, half=True)  # no gradient is finite then, whatever is trained
    assert scaler.get_scale() == 2.0 ** (60 - EPOCHS) and "counted for nothing" not in caplog.text
    assert all((scores == 1).all() for scores in pruner.scores().values())
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), made()[0].parameters(), strict=True))


def test_lengths_that_leave_nothing_to_do_are_refused() -> None:
    pruner = made()[1]
    with pytest.raises(PruningError, match="cycles: must be at least 1, got 0"):
        Turns(pruner, warmup=1, cycles=0)
    with pytest.raises(PruningError, match="warmup: must be at least 0, got -1"):
        Turns(pruner, warmup=-1, cycles=1)


def test_turns_are_a_pruners() -> None:
    with pytest.raises(PruningError, match=r"Turns takes an sbf.Pruner, not Conv2d; make one of the model"):
        Turns(nn.Conv2d(3, 4, 1), warmup=1, cycles=1)  # type: ignore[arg-type]


def test_a_loop_that_leaves_out_a_call_is_told(caplog: pytest.LogCaptureFixture) -> None:
    net, pruner, _ = made()
    turns = Turns(pruner, warmup=0, cycles=1)
    with pytest.raises(PruningError, match=r"called outside an epoch; call epoch_begins\(epoch\) before it"):
        turns.after_backward()
    turns.epoch_begins(0)
    loss_of(net).backward()
    turns.end()
    told = "no score moved in this score phase: step() was not called after backward()"
    assert [record.getMessage() for record in caplog.records] == [told]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As much of Lightning as a callback needs."""
    library = ModuleType("lightning.pytorch")
    library.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", library)
    return library


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_loop_that_fails_leaves_a_model_that_can_be_trained(epoch: int, library: ModuleType) -> None:
    """Without the callback too: what it calls is `turns.abort()`."""
    net, pruner, _ = made()
    if epoch == 2:  # behind the cycles, where the budget must be met
        pruner.gate(Plan({"0": (4, 5), "3": (3, 4)}))
    held = pruner.plan()
    turns = Turns(pruner, warmup=1, cycles=1, score=1, weights=1)
    callback = pruning_callback(turns)
    callback.on_train_epoch_start(SimpleNamespace(current_epoch=epoch), net)
    loss_of(net).backward()
    callback.on_after_backward(None, net)
    callback.on_exception(None, net, KeyboardInterrupt())
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert not pruner.gates.soft.requires_grad and pruner.gates.mode == "hard" and not pruner.projection.in_phase
    assert pruner.plan() == held, "a phase that was cut short sets no gates"
    turns.abort()  # again, which does nothing
    assert turns.epoch_begins(1) == "score 1"
    turns.end()
    assert pruner.plan() != held


def test_a_callback_of_lightning_makes_the_calls(library: ModuleType) -> None:
    net, pruner, optimizer = made()
    callback = pruning_callback(Turns(pruner, warmup=1, cycles=2, score=1, weights=1))
    assert isinstance(callback, library.Callback)
    for epoch in range(EPOCHS):
        callback.on_train_epoch_start(SimpleNamespace(current_epoch=epoch), net)
        optimizer.zero_grad()
        loss_of(net).backward()
        callback.on_after_backward(None, net)
        optimizer.step()
        callback.load_state_dict(callback.state_dict())  # what is saved is what goes on
    callback.on_train_end(None, net)
    assert_same(net, pruner, by_hand())


def test_a_trainer_that_scales_gradients_is_told_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("pytorch_lightning")
    library.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    for name, module in (("lightning.pytorch", None), ("pytorch_lightning", library)):
        monkeypatch.setitem(sys.modules, name, module)
    callback = pruning_callback(Turns(made()[1], warmup=0, cycles=1))
    callback.on_train_start(SimpleNamespace(precision_plugin=SimpleNamespace(scaler=None)), None)
    with pytest.raises(PruningError, match=r'gradient scaling .* give the trainer precision="bf16-mixed"'):
        callback.on_train_start(SimpleNamespace(precision_plugin=SimpleNamespace(scaler=object())), None)


def test_without_lightning_one_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PruningError, match="Lightning is not installed; run: pip install lightning"):
        pruning_callback(Turns(made()[1], warmup=0, cycles=1))

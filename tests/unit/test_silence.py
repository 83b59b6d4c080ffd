"""Closed filters while scores are trained: silent, yet with the gradient of a filter that is heard."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cases import random_plans
from sbf_pruner import Budget, Plan, Pruner
from sbf_pruner.inputs import call
from sbf_pruner.models import resolve
from sbf_pruner.scoring import gates
from sbf_pruner.scoring.folded import Folded
from sbf_pruner.scoring.products import Products
from zoo import ZOO

IMAGES = torch.rand(4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def tensors(outputs: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def half_closed(**arguments: object) -> Pruner:
    torch.manual_seed(0)
    model = resolve("resnet20").double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.bias, 0, 1)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    pruner = Pruner(model.eval(), IMAGES[:1], **arguments)  # type: ignore[arg-type]
    pruner.gate(Plan({name: tuple(range(0, layer.filters, 2)) for name, layer in pruner.graph.layers.items()}))
    return pruner


@pytest.mark.parametrize("name", ZOO)
def test_scores_are_trained_on_the_network_that_gates_leave(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "WHISPER", 0.0)
    model, example = ZOO[name]()
    pruner = Pruner(model.eval(), example, closed="silent")
    for plan in random_plans(pruner.graph, 4):
        pruner.gate(plan)
        expected = tensors(call(model, example))
        with pruner.scoring():
            found = tensors(call(model, example))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_whisper_is_not_heard() -> None:
    pruner = half_closed(closed="silent")
    expected = pruner.model(IMAGES)
    with pruner.scoring():
        assert (pruner.model(IMAGES) - expected).norm() < 1e-2 * expected.norm()
    loud = half_closed(closed="heard")
    with loud.scoring():
        assert (loud.model(IMAGES) - expected).norm() > 0.1 * expected.norm()


def loss_at(pruner: Pruner, filter_: int, heard: float) -> float:
    """The loss when one filter is heard so loud, by hand."""
    pruner.gates.volume[filter_] = heard / float(pruner.gates.soft[filter_].detach())
    return float(pruner.model(IMAGES).square().mean().detach())


def test_a_closed_filter_has_the_gradient_of_one_that_begins_to_be_heard() -> None:
    pruner = half_closed(closed="silent")
    with pruner.scoring():
        pruner.model(IMAGES).square().mean().backward()
        assert pruner.gates.soft.grad is not None
        gradient = pruner.gates.soft.grad.clone()
        closed = [span.start + 1 for span in pruner.gates.spans.values()][::3]
        for place in closed:
            with torch.no_grad():
                slope = (loss_at(pruner, place, 1.001e-4) - loss_at(pruner, place, 0.999e-4)) / 2e-7
                loss_at(pruner, place, 1e-4)
            assert float(gradient[place]) == pytest.approx(slope, rel=1e-3, abs=1e-7)
        assert gradient[closed].abs().min() > 0


def test_every_way_to_a_gated_pair_is_silenced_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    pruner = half_closed(closed="silent")
    with pruner.scoring():
        output = pruner.model(IMAGES)
        output.square().mean().backward()
        assert pruner.gates.soft.grad is not None
        gradient, pruner.gates.soft.grad = pruner.gates.soft.grad.clone(), None
        with Folded(pruner.model, pruner.gates) as folded:
            found = pruner.model(IMAGES)
            found.square().mean().backward()
            torch.testing.assert_close(found, output)
            torch.testing.assert_close(folded.score_gradients(), gradient)
        monkeypatch.setattr(Products, "take", lambda self, pairs: None)
        found = pruner.model(IMAGES)
        found.square().mean().backward()
        torch.testing.assert_close(found, output)
        torch.testing.assert_close(pruner.gates.soft.grad, gradient)


def test_filters_are_silenced_where_a_budget_closes_them() -> None:
    assert half_closed(budget=Budget(macs=0.5)).gates.silences
    assert not half_closed().gates.silences
    assert half_closed(closed="silent").gates.silences
    assert not half_closed(closed="heard", budget=Budget(macs=0.5)).gates.silences


def test_a_filter_that_comes_back_is_heard_again() -> None:
    pruner = half_closed(closed="silent")
    pruner.gate(Plan({}))
    assert not pruner.gates.silences and bool((pruner.gates.volume == 1).all())

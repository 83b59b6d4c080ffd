"""A network padded to good widths trains what the small one trains, weight for weight."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sbf_pruner import Plan, Pruner
from sbf_pruner.layers import Remap
from sbf_pruner.models import resolve
from sbf_pruner.training.padded import Padded, rounded_up

IMAGES = torch.zeros(1, 3, 8, 8)


def pruned(dtype: torch.dtype = torch.float32) -> Pruner:
    """ResNet-20 with about half of its filters behind closed gates, and two branches that have vanished."""
    model = resolve("resnet20").to(dtype)
    pruner = Pruner(model, IMAGES.to(dtype))
    chosen = random.Random(0)
    keep = {
        name: chosen.sample(range(layer.filters), layer.filters * 5 // 9)
        for name, layer in pruner.graph.layers.items()
    }
    pruner.gate(
        Plan(
            {name: tuple(sorted(kept)) for name, kept in keep.items()}
            | {"layer1.1.conv1": (), "layer3.1.conv2": ()}
        )
    )
    return pruner


def train(network: nn.Module, steps: int = 4) -> None:
    """Steps with all that could make a difference: momentum, weight decay, batch statistics."""
    random = torch.Generator().manual_seed(1)
    kind = next(network.parameters()).dtype
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    network.train()
    for _ in range(steps):
        images = torch.randn(8, 3, 8, 8, generator=random).to(kind)
        labels = torch.randint(0, 10, (8,), generator=random)
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("unit", [8, 4, 1])
def test_it_trains_exactly_what_the_small_network_trains(unit: int) -> None:
    pruner = pruned(torch.float64)
    small = pruner.extract()
    padded = Padded(pruner, rounded_up(pruner.graph, pruner.plan(), unit=unit, widths=16))
    for network in (small, padded.network):
        train(network)
    padded.write_back()
    found = pruner.extract()
    assert found.sbf_plans == small.sbf_plans
    assert list(found.state_dict()) == list(small.state_dict())
    for a, b in zip(found.state_dict().values(), small.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_it_computes_what_the_gated_network_computes() -> None:
    pruner = pruned(torch.float64)
    padded = Padded(pruner)
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    for network in (pruner.model, padded.network):
        network.eval()
    torch.testing.assert_close(padded.network(images), pruner.model(images), rtol=1e-12, atol=1e-12)


def test_writing_back_what_was_not_trained_changes_nothing() -> None:
    pruner = pruned()
    train(pruner.model)
    before = copy.deepcopy(pruner.model.state_dict())
    Padded(pruner).write_back()
    for name, tensor in pruner.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_second_padding_goes_on_where_the_first_was_left() -> None:
    pruner = pruned()
    first = Padded(pruner)
    train(first.network)
    first.write_back()
    for a, b in zip(first.network.state_dict().values(), Padded(pruner).network.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_widths_are_rounded_up_and_what_has_vanished_stays_away() -> None:
    pruner = pruned()
    plan = pruner.plan()
    wider = rounded_up(pruner.graph, plan, unit=8, widths=4)
    for name, kept in plan.keep.items():
        filters = pruner.graph.layers[name].filters
        assert set(kept) <= set(wider.keep[name])
        assert len(wider.keep[name]) % max(8, filters // 4) == 0
        assert bool(kept) == bool(wider.keep[name])


def test_whole_streams_need_no_remaps() -> None:
    padded = Padded(pruned())
    assert not any(isinstance(module, Remap) for module in padded.network.modules())
    widths = {m.in_channels for m in padded.network.modules() if isinstance(m, nn.Conv2d)}
    assert widths <= {3, 8, 16, 24, 32, 48, 64}


def test_biases_and_whole_numbers_are_written_back_too() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 10, 3), nn.Flatten())
    pruner = Pruner(model, torch.zeros(1, 3, 5, 5))
    pruner.gate(Plan({"0": (1, 3, 17)}))
    padded = Padded(pruner)
    padded.network(torch.randn(4, 3, 5, 5))
    with torch.no_grad():
        padded.network[0].bias.fill_(7.0)  # type: ignore[union-attr, index]
    padded.write_back()
    assert model[1].num_batches_tracked == 1
    assert [i for i in range(32) if model[0].bias[i] == 7] == [0, 1, 2, 3, 4, 5, 6, 17]  # type: ignore[index]

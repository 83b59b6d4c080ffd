"""DCP and GAL, which learn on the way to their scores: what is useless goes first, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbf_pruner as sbf
from sbf_pruner.criteria import Fista, Subject, mask_persistence, ranked, read_values, reselection_order, selection
from sbf_pruner.criteria.gal import _Discriminator, _Masked
from sbf_pruner.errors import PruningError

LEARNING = {"dcp": reselection_order, "gal": mask_persistence}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def chain() -> nn.Sequential:
    """Filter 2 does what filter 0 does, filter 4 gives nothing, and nothing is made of filter 5."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)),
        *(nn.Conv2d(6, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    ).double()
    with torch.no_grad():
        net[0].weight[2] = net[0].weight[0]
        net[0].weight[4] = 0
        net[3].weight[:, 5] = 0
    return net.eval()


def subject_of(net: nn.Module, images: Tensor, labels: Tensor | None = None, seed: int = 0) -> Subject:
    labels = torch.arange(len(images)) % 3 if labels is None else labels
    batches = list(zip(images.split(16), labels.split(16), strict=True))
    return Subject(net.eval(), sbf.trace(net, images[:2]), batches, seed)


IMAGES = normal(48, 2, 9, 9, seed=1)


# -- both ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNING)
def test_a_seed_says_the_same_again_and_another_something_else(name: str) -> None:
    net = chain()
    first, again, other = (LEARNING[name](subject_of(net, IMAGES, seed=seed))["0"] for seed in (3, 3, 4))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


@pytest.mark.parametrize("name", LEARNING)
def test_whatever_is_learned_nothing_of_it_is_left(name: str) -> None:
    net = chain()
    net[3].weight.requires_grad_(False)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    asked = [parameter.requires_grad for parameter in net.parameters()]
    before, random = {key: value.clone() for key, value in net.state_dict().items()}, torch.get_rng_state()
    numbers = np.random.get_state()[1].copy()
    LEARNING[name](subject_of(net, IMAGES))
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random) and np.array_equal(np.random.get_state()[1], numbers)
    assert [parameter.requires_grad for parameter in net.parameters()] == asked
    assert [parameter.grad is None for parameter in net.parameters()] == [False] + [True] * 6
    assert torch.equal(net[0].weight.grad, torch.ones_like(net[0].weight))
    assert not any(
        module.training or module._forward_hooks or module._forward_pre_hooks for module in net.modules()
    )


@pytest.mark.parametrize("name", LEARNING)
def test_without_images_a_filter_is_known_by_nothing(name: str) -> None:
    net = chain()
    scores = ranked(name, Subject(net, sbf.trace(net, IMAGES[:2]), []))
    assert {layer: len(set(values)) for layer, values in scores.items()} == (
        {"0": 6, "3": 4} if name == "dcp" else {"0": 1, "3": 1}
    )


# -- DCP -----------------------------------------------------------------------------------------------------------


def test_what_others_do_or_nobody_needs_is_taken_back_last() -> None:
    scores = reselection_order(subject_of(chain(), IMAGES))["0"]
    assert sorted(scores) == pytest.approx([place / 6 for place in range(1, 7)])
    places = scores.argsort().tolist()
    assert 4 in places[:3] and len({0, 2} & set(places[:3])) == 1  # of the two alike, one comes early and one late
    assert {1, 3} <= set(places[3:])


def test_the_first_channel_has_the_largest_gradient_of_the_joint_loss() -> None:
    windows, weight = normal(1, 40, 1, 5, 1) * torch.tensor([3.0, 1, 2, 1, 2])[:, None], normal(1, 4, 5, 1, seed=2)
    labels = (windows[0, :, 0, 1, 0] > 0).long()
    shares = F.one_hot(labels).double()
    inputs, dense = windows[0, :, 0, :, 0] - windows[0, :, 0, :, 0].mean(0), weight[0, :, :, 0]
    made = inputs @ dense.T
    deviation = made.std(0, correction=0)
    classifier = nn.Linear(4, 2).double()
    for _ in range(4000):
        loss = F.cross_entropy(classifier((made / deviation).relu()), labels)
        loss = loss + 5e-4 * sum(held.square().sum() for held in classifier.parameters())
        slopes = torch.autograd.grad(loss, [*classifier.parameters()])
        with torch.no_grad():
            for held, slope in zip(classifier.parameters(), slopes, strict=True):
                held -= 0.5 * slope
    # Of every output that is still 0 everywhere: what the reconstruction asks for, and what the classes do.
    probability = F.softmax(classifier.bias.detach(), 0)
    wanted = (probability - shares) @ classifier.weight.detach() / 2 / 40
    norms = (inputs.T @ (wanted - made / deviation / made.numel()) / deviation).square().sum(1)
    order = selection(windows, weight, shares)
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert order[0] == int(norms.argmax())
    assert norms.sort().values[-1] > 1.05 * norms.sort().values[-2]  # else rounding would decide


def test_a_channel_that_tells_classes_apart_comes_before_one_that_explains_more() -> None:
    told = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(20)
    windows = torch.stack([normal(40), told], 1).view(1, 40, 1, 2, 1)
    weight = torch.tensor([[[[1.0], [0.0]], [[0.0], [1.3]]]], dtype=torch.float64)
    shares = F.one_hot((told > 0).long()).double()
    assert selection(windows, weight, None).tolist() == [0, 1]
    assert selection(windows, weight, shares).tolist() == [1, 0]


def test_channels_of_groups_are_told_apart() -> None:
    windows = normal(4, 30, 2, 3, 2)
    windows[:, :, 0, 1] = 0
    windows[:, :, 1, 2] = windows[:, :, 1, 0]
    order = selection(windows, normal(2, 3, 3, 2, seed=5), None)
    assert order[-1] == 1 and order[-2] in (3, 5)


def test_many_channels_come_in_several_at_a_time() -> None:
    order = selection(normal(2, 60, 1, 50, 1), normal(1, 8, 50, 1, seed=5), None)
    assert sorted(order) == list(range(50))


class Tokens(nn.Module):
    """Positions are put beside the samples before a layer reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 6, 1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x).relu()
        return self.second(hidden.transpose(1, 2).flatten(0, 1))


def test_where_samples_are_no_images_their_classes_are_not_asked_for() -> None:
    torch.manual_seed(0)
    net, images = Tokens().double(), normal(32, 3, 5)
    first, second = (
        reselection_order(subject_of(net, images, labels=labels))["first"]
        for labels in (torch.arange(32) % 2, torch.arange(32) // 16)
    )
    assert np.array_equal(first, second) and len(set(first)) == 6


def test_layers_are_looked_at_in_portions_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(chain(), IMAGES)
    whole = reselection_order(subject)
    monkeypatch.setattr("sbf_pruner.criteria.dcp.MAX_ELEMENTS", 1)
    portions = reselection_order(subject)
    assert whole and set(portions) == set(whole)
    for layer, values in portions.items():
        assert np.array_equal(values, whole[layer])


class Twice(nn.Module):
    """Of what the first layer gives, one reader gets every channel twice, another once, and a third none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.doubled = nn.Conv2d(2, 3, 1), nn.Conv2d(6, 2, 1)
        self.single, self.other = nn.Conv2d(3, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        out: Tensor = self.doubled(torch.cat([hidden, hidden], 1)) + self.single(hidden) + self.other(x)
        return out


def test_what_readers_say_of_channels_is_told_of_filters() -> None:
    graph = sbf.trace(Twice().eval(), torch.zeros(1, 2, 4, 4))
    said = {"doubled": np.array([1.0, 2, 3, 6, 5, -4]), "single": np.array([7.0, 0, 9]), "other": np.ones(2)}
    found = read_values(graph, said)["first"]
    assert found.max(0).filled(1.0).tolist() == [7.0, 5.0, 9.0]
    assert found.mean(0).filled(1.0).tolist() == [6.5, 2.5, 6.0]
    assert read_values(graph, {})["first"].mean(0).filled(1.0).tolist() == [1.0, 1.0, 1.0]


# -- GAL -----------------------------------------------------------------------------------------------------------


def test_the_masks_of_filters_that_change_nothing_are_gone_first() -> None:
    scores = mask_persistence(subject_of(chain(), IMAGES))
    useless, used = scores["0"][[4, 5]], scores["0"][[0, 1, 2, 3]]
    assert useless.max() < used.min() and useless[0] == pytest.approx(useless[1])
    assert useless.max() <= scores["3"].min()


def test_no_label_is_looked_at() -> None:
    net = chain()
    first, second = (
        mask_persistence(subject_of(net, IMAGES, labels=labels))
        for labels in (torch.arange(48) % 3, torch.zeros(48))
    )
    assert all(np.array_equal(values, second[layer]) for layer, values in first.items())


def test_masks_of_0_and_1_are_the_cut_network() -> None:
    net = chain()
    masked = _Masked(subject_of(net, IMAGES))

    def given(batch: int, masks: Tensor) -> Tensor:
        return masked(batch, masks) * masked.unit + masked.mean

    with torch.no_grad():
        masks = torch.tensor([1.0, 0, 1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.float64)
        small = sbf.extract(net, IMAGES[:2], sbf.Plan({"0": (0, 2, 4, 5), "3": (1, 2, 3)}))
        torch.testing.assert_close(given(2, masks), small(IMAGES[32:]))
        torch.testing.assert_close(given(1, torch.ones_like(masks)), net(IMAGES[16:32]))
        before, net[7].weight[:] = net[7].weight.clone(), net[7].weight / 2
        expected = net(IMAGES[:16])
        net[7].weight[:] = before
        torch.testing.assert_close(given(0, torch.tensor([1.0] * 6 + [0.5] * 4, dtype=torch.float64)), expected)


def test_proximal_steps_end_where_the_penalty_and_the_slope_are_even() -> None:
    curved = normal(6, 6)
    curved, wanted = curved @ curved.T + torch.eye(6, dtype=torch.float64), normal(6, seed=1)

    def loss(held: Tensor) -> Tensor:
        return (held - wanted) @ curved @ (held - wanted) / 2

    descent = Fista(torch.ones(6, dtype=torch.float64))
    for _ in range(400):
        descent.step(loss, 0.3)
    slope = curved @ (descent.values - wanted)
    alive = descent.values > 0
    assert 0 < int(alive.sum()) < 6
    torch.testing.assert_close(slope[alive], torch.full_like(slope[alive], -0.3), atol=1e-3, rtol=0)
    assert (slope[~alive] >= -0.3).all()


def test_the_discriminator_finds_out_and_does_not_win() -> None:
    real, fake = normal(64, 5), normal(64, 5, seed=1) + 3
    adversary = _Discriminator(real, seed=0)
    for _ in range(60):
        adversary.learn(real, fake)
    assert float(adversary(real).detach().mean()) > 2
    assert abs(float(adversary(fake).detach().mean())) < 0.5  # as it is to take these for real and for fake


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x).mean()


def test_outputs_that_are_not_of_samples_cannot_be_compared() -> None:
    subject = subject_of(Summed().double(), IMAGES)
    with pytest.raises(
        PruningError, match=r"^method gal: the network has no .*output with one row per sample; choose"
    ):
        ranked("gal", subject)


def test_wide_outputs_are_looked_at_in_less_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
    assert _Masked(subject_of(net, IMAGES)).rows[0].shape == (16, 162)
    monkeypatch.setattr("sbf_pruner.criteria.gal._WIDEST", 54)
    masked = _Masked(subject_of(net, IMAGES))
    expected = net(IMAGES[:16]).detach().flatten(1).view(16, 54, 3).mean(2)
    torch.testing.assert_close(masked.rows[0] * masked.unit + masked.mean, expected)

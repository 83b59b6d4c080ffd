import pytest
import torch

from sbf_pruner.scores import balance_weights, per_filter, weighted_l1

CIFAR = [(32, 32), (32, 32), (16, 16), (8, 8)]


def test_area_and_side_are_relative_to_the_smallest_map():
    assert balance_weights("area", CIFAR) == [16.0, 16.0, 4.0, 1.0]
    assert balance_weights("side", CIFAR) == [4.0, 4.0, 2.0, 1.0]
    assert balance_weights("none", CIFAR) == [1.0] * 4


def test_a_side_is_the_geometric_mean_in_any_dimension():
    assert balance_weights("side", [(4, 9), (2, 2)]) == pytest.approx([3.0, 1.0])
    assert balance_weights("side", [(12,), (3,)]) == pytest.approx([4.0, 1.0])
    assert balance_weights("side", [(8, 8, 8), (4, 2, 1)]) == pytest.approx([4.0, 1.0])


@pytest.mark.parametrize("pixel", [(), (1, 1), (1,)])
def test_one_pixel_is_never_the_smallest_map(pixel):
    assert balance_weights("area", [*CIFAR, pixel]) == [16.0, 16.0, 4.0, 1.0, 1 / 64]
    assert balance_weights("side", [*CIFAR, pixel]) == [4.0, 4.0, 2.0, 1.0, 1 / 8]


@pytest.mark.parametrize("kind", ["area", "side", "none"])
def test_a_network_without_maps_is_balanced(kind):
    assert balance_weights(kind, [(), (1, 1)]) == [1.0, 1.0]
    assert balance_weights(kind, []) == []


def test_weighted_l1_counts_each_filter_with_its_layers_weight():
    weights = per_filter([4.0, 1.0], [2, 3])
    assert weights.tolist() == [4.0, 4.0, 1.0, 1.0, 1.0]
    scores = torch.tensor([1.0, -0.5, 0.25, 2.0, 0.0], requires_grad=True)
    loss = weighted_l1(scores, weights, 0.1)
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(0.1 * (4 + 2 + 0.25 + 2)))
    torch.testing.assert_close(scores.grad, torch.tensor([0.4, -0.4, 0.1, 0.1, 0.0]))


def test_the_penalty_may_be_a_tensor():
    penalty = torch.tensor(0.5)
    assert weighted_l1(torch.ones(3), torch.ones(3), penalty).item() == 1.5

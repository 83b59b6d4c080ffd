import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sbf_pruner.scoring.activation import ACTIVATIONS, leaky_exponential


def slope(x: float, leak: float = 0.1) -> float:
    point = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    leaky_exponential(point, leak).backward()
    assert point.grad is not None
    return point.grad.item()


def test_follows_both_branches_of_equation_3():
    x = torch.tensor([-3.0, -0.5, 0.5, 20.0], dtype=torch.float64)
    expected = torch.tensor([math.exp(-3), math.exp(-0.5), 1.1, 5.0], dtype=torch.float64)
    torch.testing.assert_close(leaky_exponential(x, leak=0.2), expected)


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_logit_of_zero_is_a_score_of_exactly_one(zero, dtype):
    assert leaky_exponential(torch.tensor(zero, dtype=dtype)).item() == 1.0


def test_the_slope_at_zero_is_one_even_without_a_leak():
    assert slope(0.0) == 1.0
    assert slope(0.0, leak=0.0) == 1.0
    assert slope(-1e-12) == pytest.approx(1.0)
    assert slope(1e-12) == pytest.approx(0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_value_and_gradient_are_those_of_the_branch_taken_bit_for_bit(dtype):
    largest = torch.finfo(dtype).max
    edges = torch.tensor([0.0, -0.0, largest, -largest, math.inf, -math.inf], dtype=dtype)
    x = torch.cat([edges, *((torch.randn(500) * scale).to(dtype) for scale in (1e-6, 1, 20, 1000))])
    point = x.clone().requires_grad_()
    scores = leaky_exponential(point, 0.1)
    (gradient,) = torch.autograd.grad(scores.sum(), point)
    assert torch.equal(scores, torch.where(x > 0, 1 + 0.1 * x, x.exp()))
    assert torch.equal(gradient, torch.where(x > 0, torch.tensor(0.1, dtype=dtype), x.exp()))


class Recorded(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_no_operator_is_used_whose_slope_at_zero_is_left_to_torch():
    """torch 2.14 changed that of `clamp`."""
    with Recorded() as recorded:
        leaky_exponential(torch.zeros(2, requires_grad=True)).sum().backward()
    assert {"exp", "where"} <= recorded.names
    assert not recorded.names & {"clamp", "clamp_max", "minimum", "relu", "threshold", "abs", "hardtanh"}


@pytest.mark.parametrize("x", [-1e30, -800.0, -1.0, 0.0, 1.0, 89.0, 800.0, 1e30])
def test_the_gradient_is_finite_far_beyond_the_range_of_exp(x):
    points = torch.full((2,), x, requires_grad=True)
    leaky_exponential(points).sum().backward()
    assert torch.isfinite(points.grad).all()
    assert torch.isfinite(leaky_exponential(points)).all()


def test_the_gradient_matches_finite_differences():
    x = torch.tensor([-2.0, -0.3, 0.4, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(leaky_exponential, x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_starts_at_one_and_can_fall_below_the_threshold(name):
    x = torch.tensor([0.0, -3.0, 3.0], requires_grad=True)
    scores = ACTIVATIONS[name](x, 0.1)
    scores.sum().backward()
    assert scores[0] == 1 and scores[1] < 0.5 < scores[2]
    assert (x.grad > 0).all()

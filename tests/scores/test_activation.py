import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sbf_pruner import Pruner, PruningError
from sbf_pruner.scores import ACTIVATIONS, check_slope, leaky_exponential, projections


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


@pytest.fixture
def unchecked() -> Iterator[None]:
    """A process that has made no pruner yet."""
    check_slope.cache_clear()
    yield
    check_slope.cache_clear()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_the_first_pruner_refuses_a_torch_that_gives_another_slope_at_zero(monkeypatch, slope):
    net, images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), torch.rand(1, 3, 8, 8)

    def tilted(x: Tensor, leak: float = 0.1) -> Tensor:
        return 1 + slope * x

    with monkeypatch.context() as patched:
        patched.setattr(projections, "leaky_exponential", tilted)
        for _ in range(2):  # a refusal is not remembered
            with pytest.raises(PruningError, match=rf"^torch {re.escape(torch.__version__)} .* {slope:g} at 0"):
                Pruner(net, images)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    with torch.inference_mode():
        Pruner(net, images)


@pytest.mark.usefixtures("unchecked")
def test_the_slope_is_checked_once_per_process_whatever_the_context(monkeypatch):
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(x)
        return leaky_exponential(x)

    monkeypatch.setattr(projections, "leaky_exponential", counted)
    with torch.inference_mode(), torch.device("meta"):
        check_slope()
    check_slope()
    assert len(calls) == 1


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

"""Gated pairs made all at once: the numbers of single products, in a handful of operators."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sbf_pruner import Pruner
from sbf_pruner.models import resolve
from sbf_pruner.scores import FusedGating

IMAGES = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def pruned(dtype: torch.dtype = torch.float32) -> Pruner:
    torch.manual_seed(0)
    model = resolve("resnet20").to(dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.bias, 0, 1)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return Pruner(model.train(), IMAGES[:1].to(dtype))


def score_gradients(pruner: Pruner, **arguments: Any) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of scores that are not 1."""
    images = IMAGES.to(next(pruner.model.parameters()).dtype)
    with pruner.scoring(**arguments):
        with torch.no_grad():
            pruner.gates.soft.uniform_(0.5, 1, generator=torch.Generator().manual_seed(3))
        output = pruner.model(images)
        output.square().mean().backward()
        assert pruner.gates.soft.grad is not None
        return output.detach(), pruner.gates.soft.grad.clone()


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedGating, "take", lambda self, pairs: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_numbers_are_those_of_single_products(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    output, gradient = score_gradients(pruned(dtype))
    alone(monkeypatch)
    expected, by_one = score_gradients(pruned(dtype))
    assert gradient.any() and torch.equal(output, expected)
    torch.testing.assert_close(gradient, by_one)


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def test_a_forward_makes_all_of_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pruner = pruned()
    with pruner.scoring():
        for _ in range(2):
            with Counted() as counted:
                pruner.model(IMAGES).mean().backward()
            assert counted.calls["aten::_foreach_mul.List"] == 2
            assert counted.calls["aten::mul.Tensor"] == 0
        alone(monkeypatch)
        with Counted() as counted:
            pruner.model(IMAGES).mean().backward()
        # Two products a norm, and their gradients.
        assert counted.calls["aten::mul.Tensor"] >= 4 * 19


def test_what_changes_is_seen_by_the_next_forward() -> None:
    pruner, x = pruned(), torch.rand(2, 16, 4, 4)
    net: Any = pruner.model
    norm = net.layer1[0].bn1

    def one_norm_alone() -> None:
        """The second call makes all products anew, and those of the other norms are left over."""
        net.bn1(x)
        net.bn1(x)

    def check() -> None:
        """Gated by itself, as without gradients, a norm gives the same."""
        found = norm(x)
        assert found.requires_grad
        with torch.no_grad():
            torch.testing.assert_close(found.detach(), norm(x))

    with pruner.scoring():
        first = net(IMAGES)
        net.bn1.weight.data.mul_(2)  # autograd's version does not count what is done to `data`
        assert not torch.equal(first, net(IMAGES))
        one_norm_alone()
        with torch.no_grad():
            norm.weight.mul_(3)
        check()
        one_norm_alone()
        with torch.no_grad():
            pruner.gates.soft.mul_(0.5)
        check()
        one_norm_alone()
        norm.weight = nn.Parameter(torch.rand(16), requires_grad=False)
        check()


def test_forwards_before_one_step_add_their_gradients() -> None:
    pruner = pruned(torch.float64)
    net, images = pruner.model, IMAGES.double()
    with pruner.scoring():
        (net(images[:2]).square().sum() + net(images[2:]).square().sum()).backward()
        together, pruner.gates.soft.grad = pruner.gates.soft.grad, None
        for half in images.split(2):
            net(half).square().sum().backward()
        torch.testing.assert_close(pruner.gates.soft.grad, together)


def test_a_module_used_twice_and_others_that_are_not_reached() -> None:
    def gradient() -> Tensor:
        pruner, x = (
            pruned(torch.float64),
            torch.rand(2, 16, 4, 4, generator=torch.Generator().manual_seed(1)).double(),
        )
        net: Any = pruner.model
        with pruner.scoring():
            net.layer1[0].bn1(net.bn1(net.bn1(x))).square().sum().backward()
            assert pruner.gates.soft.grad is not None
            return pruner.gates.soft.grad.clone()

    found = gradient()
    with pytest.MonkeyPatch.context() as patch:
        alone(patch)
        torch.testing.assert_close(found, gradient())
    assert found.count_nonzero() == 32


def test_a_joint_phase_and_one_weight_that_is_trained_keep_single_products() -> None:
    pruner = pruned()
    net: Any = pruner.model
    score_gradients(pruner, joint=True)
    assert net.bn1.weight.grad is not None
    net.zero_grad()
    with pruner.scoring():
        net.layer1[0].bn1.weight.requires_grad_()
        net(IMAGES).square().mean().backward()
        assert net.layer1[0].bn1.weight.grad is not None and net.bn1.weight.grad is None
        assert pruner.gates.soft.grad is not None and pruner.gates.soft.grad.count_nonzero() > 600


def test_copies_checkpoints_and_second_gradients() -> None:
    pruner = pruned(torch.float64)
    net: Any = pruner.model
    images = IMAGES.double()
    with pruner.scoring():
        net.bn1(torch.rand(2, 16, 4, 4, dtype=torch.float64))  # products lie about while the model is copied
        twin = copy.deepcopy(net)
        assert torch.equal(twin(images), net(images))
        (expected,) = torch.autograd.grad(net(images).square().mean(), pruner.gates.soft)
        for reentrant in (True, False):
            x = images.clone().requires_grad_()
            again = checkpoint(net, x, use_reentrant=reentrant).square().mean()
            again.backward()
            torch.testing.assert_close(pruner.gates.soft.grad, expected)
            pruner.gates.soft.grad = None
        x = images.clone().requires_grad_()

        def norm_of_gradient() -> Tensor:
            (gradient,) = torch.autograd.grad(net(x).square().mean(), x, create_graph=True)
            return gradient.square().sum()

        (found,) = torch.autograd.grad(norm_of_gradient(), pruner.gates.soft)
        with pytest.MonkeyPatch.context() as patch:
            alone(patch)
            (expected,) = torch.autograd.grad(norm_of_gradient(), pruner.gates.soft)
        torch.testing.assert_close(found, expected)


def test_a_norm_that_changes_before_the_backward_is_told_of() -> None:
    pruner = pruned()
    with pruner.scoring():
        loss = pruner.model(IMAGES).mean()
        with torch.no_grad():
            next(m for m in pruner.model.modules() if isinstance(m, nn.BatchNorm2d)).weight.mul_(10)
        with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
            loss.backward()


def test_functional_transforms_get_single_products() -> None:
    pruner = pruned()
    with pruner.scoring():
        found = torch.func.vmap(lambda image: pruner.model(image[None])[0])(IMAGES)
        torch.testing.assert_close(found, pruner.model(IMAGES))

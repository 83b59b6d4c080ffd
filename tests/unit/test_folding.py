"""Norms folded into convolutions: the same function, and only where it is safe."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from sbf_pruner.deploy.folding import fold_norms
from sbf_pruner.inputs import call
from sbf_pruner.models import resolve
from sbf_pruner.plan import Plan
from sbf_pruner.surgery import extract
from zoo import ZOO


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, _BatchNorm) for module in model.modules())


def lively(model: nn.Module) -> nn.Module:
    """With statistics and scales that are not those of a fresh norm."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.affine:
            for tensor in (module.running_mean, module.weight.data, module.bias.data):
                tensor.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


@pytest.mark.parametrize("name", ZOO)
def test_the_folded_network_computes_the_same(name: str) -> None:
    model, inputs = ZOO[name]()
    lively(model).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        pairs = [pytree.tree_leaves(call(network, inputs)) for network in (fold_norms(model, inputs), model)]
    torch.testing.assert_close(*pairs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


# How many norms stay: one that reads no convolution, one called twice, one that a list holds too ...
@pytest.mark.parametrize(
    ("name", "left"),
    [("Plain", 0), ("Residual", 0), ("NormBeforeConvOrder", 3), ("SharedModule", 1), ("PlainListModules", 2)],
)
def test_what_cannot_be_folded_safely_stays(name: str, left: int) -> None:
    assert norms(fold_norms(*ZOO[name]())) == left


def test_an_extracted_network_is_folded_too() -> None:
    model, images = lively(resolve("resnet20")).double().eval(), torch.rand(2, 3, 16, 16, dtype=torch.float64)
    small = extract(model, images, Plan({"layer1.0.conv2": [1, 3], "layer2.0.conv1": [], "layer3.1.conv1": [5]}))
    folded = fold_norms(small, images)
    assert norms(small) > 0 and norms(folded) == 0 and not folded.training
    with torch.no_grad():
        torch.testing.assert_close(folded(images), small(images))

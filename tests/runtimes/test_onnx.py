"""Networks as ONNX: the same numbers, any batch, nothing in the file that is not needed."""

from __future__ import annotations

import importlib.util
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sbf_pruner as sbf
from cases import leaves, random_plans
from runs import resnet8
from sbf_pruner.errors import PruningError
from sbf_pruner.runtimes import run, session, to_onnx
from sbf_pruner.utils import call, map_tensors, one_line_error
from shares import mostly_slow
from zoo import ZOO, fresh_inputs

pytest.importorskip("onnxruntime")
import onnx


def test_any_batch_gives_what_pytorch_gives(tmp_path):
    model = resnet8().train()
    path = to_onnx(model, torch.rand(1, 3, 8, 8), tmp_path / "net.onnx")
    assert model.training  # the network comes out as it went in
    model.eval()
    ready = session(path, threads=1)
    for batch in (1, 3):
        images = torch.rand(batch, 3, 8, 8)
        (found,) = run(ready, images)
        torch.testing.assert_close(found, model(images).detach(), rtol=0, atol=1e-4)


def test_the_file_holds_the_weights_and_no_more(tmp_path):
    model = resnet8()
    path = to_onnx(model, torch.rand(2, 3, 8, 8), tmp_path / "net.onnx")
    assert path.stat().st_size < 1.1 * 4 * sum(p.numel() for p in model.parameters())
    assert b"site-packages" not in path.read_bytes()
    proto = onnx.load(path)
    assert "BatchNormalization" not in {node.op_type for node in proto.graph.node}


TEN = [
    *(
        "Residual",
        "OptionA",
        "PreActivation",
        "EmptyBranch",
        "Concat",
        "Depthwise",
        "SqueezeExcite",
        "FlattenLinear",
    ),
    *("TwoInputs", "Unet"),
]


@pytest.mark.parametrize("name", mostly_slow(TEN, ("Concat", "SqueezeExcite")))
def test_a_compact_network_is_as_much_smaller_in_the_file_as_it_is_said_to_be(name, tmp_path):
    model, inputs = ZOO[name]()
    model, inputs = model.float().eval(), map_tensors(inputs, torch.Tensor.float)
    graph = sbf.trace(model, inputs)
    small = sbf.extract(model, inputs, random_plans(graph, count=3, seed=1)[2], graph).eval()
    path = to_onnx(small, inputs, tmp_path / "net.onnx")
    numbers = [tensor for tensor in onnx.load(path).graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    held = sum(math.prod(tensor.dims) for tensor in numbers)
    reported = sbf.measure(small, inputs).params / sbf.measure(model, inputs).params
    assert reported < 0.9
    assert held / sum(p.numel() for p in model.parameters()) <= reported + 0.02
    given = fresh_inputs(inputs, batch=3)
    for found, wanted in zip(run(session(path, 1), given), leaves(call(small, given)), strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-4 * max(1.0, wanted.abs().max().item()))


def test_keyword_inputs(tmp_path):
    model, inputs = ZOO["DictInput"]()
    model, inputs = model.float(), map_tensors(inputs, torch.Tensor.float)
    ready = session(to_onnx(model, inputs, tmp_path / "net.onnx"))
    (found,) = run(ready, inputs)
    torch.testing.assert_close(found, model.eval()(**inputs).detach(), rtol=0, atol=1e-5)
    with pytest.raises(PruningError, match="takes 3 inputs, not 1"):
        run(ready, torch.rand(2, 3))


class Batched(nn.Module):
    """Takes its maps in one dict."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)

    def forward(self, batch, scale=1.0):
        return {"logits": self.out(self.conv(batch["rgb"]).relu().mean((2, 3))) * scale}


@pytest.mark.parametrize("more", [(), (2.0,)])
def test_a_dict_as_a_positional_argument(more, tmp_path):
    inputs = ({"rgb": torch.rand(2, 3, 8, 8)}, *more)
    small = sbf.extract(Batched(), inputs, sbf.Plan({"conv": [0, 1]})).eval()
    ready = session(to_onnx(small, inputs, tmp_path / "net.onnx"), threads=1)
    given = fresh_inputs(inputs, batch=3)
    (found,) = run(ready, given)
    torch.testing.assert_close(found, small(*given)["logits"].detach(), rtol=0, atol=1e-5)


def test_what_cannot_be_written_says_so_and_leaves_no_file(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return x * (2 if x.sum() > 0 else 3)

    class Paired(nn.Conv2d):
        def forward(self, x):
            return F.linear(super().forward(x).view(2, -1), torch.ones(1, 8))

    class Bessel(nn.Module):
        def forward(self, x):
            return torch.special.bessel_j0(x)

    with pytest.raises(
        PruningError, match=r"^Odd cannot be written as ONNX \(GuardOnDataDependentSymNode: Could not"
    ):
        to_onnx(Odd(), torch.rand(2, 3), tmp_path / "net.onnx")
    with pytest.raises(
        PruningError,
        match=r"^Bessel cannot be written as ONNX \(DispatchError: No ONNX function found for .*bessel_j0.*\); the "
        r"model must accept any batch size, and every operator must be one that torch.onnx supports$",
    ):
        to_onnx(Bessel(), torch.rand(2, 3), tmp_path / "net.onnx")
    with pytest.raises(PruningError, match=r"Paired .* \(its forward fixes the batch size\)"):
        to_onnx(Paired(3, 8, 4), torch.rand(2, 3, 4, 4), tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_an_error_says_is_told_without_colours():
    assert one_line_error(ValueError("\x1b[1;31mno such size\x1b[0m.\nand more")) == "ValueError: no such size"
    assert one_line_error(AssertionError()) == "AssertionError"


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else True)
    with pytest.raises(PruningError, match=re.escape('needs onnxscript; run: pip install "sbf-pruner[export]"')):
        to_onnx(nn.Identity(), torch.rand(2, 3), tmp_path / "net.onnx")


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"nothing of the kind")
    with pytest.raises(PruningError, match=r"net\.onnx cannot be run by ONNX Runtime"):
        session(tmp_path / "net.onnx")

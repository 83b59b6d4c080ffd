"""What docs/limitations.md says a network is told, it is told; and what it calls understood can be pruned."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import sbf_pruner as sbf

PAGE = (Path(__file__).parent.parent / "docs" / "limitations.md").read_text("utf-8")
IMAGE = torch.rand(2, 3, 8, 8)
Does = Callable[["Net", Tensor], Any]


@torch.library.custom_op("shop::step", mutates_args=())
def step(x: Tensor) -> Tensor:
    return x / (1 + x.abs())


@step.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Halves(nn.Conv2d):
    """One half of the filters times the other."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = super().forward(x).chunk(2, 1)
        return one * other


class Twice(nn.Conv2d):
    """A layer that looks at the mirror image too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x.flip(3))


class HoldsNorm(nn.Conv2d):
    """A convolution that holds its norm."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.norm = nn.BatchNorm2d(self.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(super().forward(x)))


class Turned(nn.Conv2d):
    """A convolution that activates and pools, and gives its channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(super().forward(x).sigmoid(), 2).flatten(2).transpose(1, 2)


class Caller:
    """An object that knows a function."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *given):
        return self.function(*given)


class Net(nn.Module):
    """Two layers, and whatever is done with them."""

    def __init__(self, does: Does | None = None, **more: Any) -> None:
        super().__init__()
        self.conv, self.out, self.does = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), does
        for name, held in more.items():
            setattr(self, name, held)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.conv(x)) if self.does is None else self.does(self, x)


def between(function: Callable[[Tensor], Tensor], **more: Any) -> Net:
    return Net(lambda net, x: net.out(function(net.conv(x))), **more)


def sharing() -> Net:
    model = Net(lambda net, x: net.out(net.conv(x) + net.twin(x)), twin=nn.Conv2d(3, 8, 1))
    model.twin.weight = model.conv.weight
    return model


def listed() -> Net:
    model = Net(lambda net, x: net.steps[1](net.steps[0](x)))
    model.steps = [model.conv, model.out]
    return model


def by_two_heads(x: Tensor) -> Tensor:
    heads = x.view(x.shape[0], 2, 4, -1)
    return (heads @ torch.softmax(heads.transpose(2, 3) @ heads, -1)).view_as(x)


def attended(x: Tensor) -> Tensor:
    return x @ torch.softmax(x.transpose(1, 2) @ x, -1)


def otherwise(net: Net, x: Tensor) -> Tensor:
    x = net.conv(x)
    return net.other(x) if net.training else net.out(x)


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :4] = x[:, 4:]
    return y


def by_input(net: Net, x: Tensor) -> Tensor:
    return net.out(F.conv2d(x, net.conv(x).mean((0, 2, 3)).view(8, 1, 1, 1).expand(8, 3, 1, 1)))


def padded_rows(net: Net, x: Tensor) -> Tensor:
    rows = net.conv(x).flatten(2).transpose(1, 2)
    absent = torch.arange(64).expand(2, 64) >= 60
    return net.out(net.rows(rows, src_key_padding_mask=absent).transpose(1, 2).view(2, 8, 8, 8))


LEFT_ALONE: dict[str, nn.Module] = {
    "zero lost": between(torch.sigmoid),
    "layer norm": between(lambda x: F.layer_norm(x, x.shape[1:])),
    "norm as a function": Net(
        lambda net, x: net.out(F.instance_norm(net.conv(x), bias=net.shift)), shift=nn.Parameter(torch.ones(8))
    ),
    "mean": between(lambda x: x * x.mean(1, keepdim=True)),
    "softmax": between(lambda x: x.softmax(1)),
    "root": between(lambda x: x.relu().sqrt()),
    "divided": between(lambda x: x / x.norm(dim=(2, 3), keepdim=True)),
    "heads": between(by_two_heads),
    "pixels for channels": between(
        lambda x: F.max_pool2d(x, 2).flatten(2).transpose(1, 2).contiguous().view(x.shape[0], -1, 4, 4)
    ),
    "places of maxima": between(lambda x: F.max_pool2d(x, 2, return_indices=True)[1].to(x.dtype)),
    "places": Net(
        lambda net, x: net.out(net.more(F.grid_sample(x, net.conv(x)[:, :2].permute(0, 2, 3, 1)))),
        more=nn.Conv2d(3, 8, 1),
    ),
    "no rule": between(lambda x: x.cumsum(2)),
    "own operator": between(step),
    "written in place": between(written),
    "functional": Net(lambda net, x: net.out(F.conv2d(x, net.conv.weight))),
    "moved in its module": Net(conv=Halves(3, 16, 1)),
    "twice in its module": Net(conv=Twice(3, 8, 1)),
    "no batch": Net(lambda net, x: net.out(torch.stack([net.conv(image) for image in x]))),
    "shared": sharing(),
    "made of the input": Net(by_input),
    "made of all filters": Net(conv=spectral_norm(nn.Conv2d(3, 8, 1))),
    "plain list": listed(),
    "in training": Net(otherwise, other=nn.Conv2d(8, 4, 1)),
    "empty": Net(
        lambda net, x: net.out(x.new_ones(1, 8, 1, 1) * net.conv(x)[x[:, :1].expand(2, 8, 8, 8) > 9].sum())
    ),
    "added to another weight": Net(
        lambda net, x: net.out(F.conv2d(x, net.conv.weight + net.other.weight)), other=nn.Conv2d(3, 8, 1)
    ),
    "not reached": Net(lambda net, x: net.out(net.other(x)), other=nn.Conv2d(3, 8, 1)),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "no convolution": lambda: (nn.Linear(8, 2), IMAGE),
    "compiled": lambda: (torch.compile(Net()), IMAGE),
    "wrapped": lambda: (nn.DataParallel(Net()), IMAGE),
    "scripted": lambda: (torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 1))), IMAGE),
    "lazy": lambda: (nn.Sequential(nn.ReLU(), nn.LazyConv2d(4, 1)), IMAGE),
    "numpy": lambda: (between(lambda x: torch.from_numpy(x.detach().numpy())), IMAGE),
    "nested": lambda: (Net(padded_rows, rows=encoder()), IMAGE),
    "bound": lambda: (bound(), IMAGE),
    "no copy": lambda: (Net(lock=threading.Lock()), IMAGE),
    "objects": lambda: (Net(), SimpleNamespace(image=IMAGE)),
    "bare dict": lambda: (Net(), {"rgb": IMAGE}),
    "nothing": lambda: (Net(lambda net, x: None), IMAGE),
}
UNDERSTOOD: dict[str, nn.Module] = {
    "x * sigmoid(x)": between(lambda x: x * x.sigmoid()),
    "zero kept": between(lambda x: F.gelu(F.silu(x)).tanh()),
    "more groups": Net(lambda net, x: net.out(F.relu(net.norm(net.conv(x)))), norm=nn.GroupNorm(4, 8)),
    "instance norm": Net(
        lambda net, x: net.out(F.relu(net.norm(net.conv(x)))), norm=nn.InstanceNorm2d(8, affine=True)
    ),
    "something added": between(lambda x: x / (x.norm(dim=(2, 3), keepdim=True) + 1e-6)),
    "clamped": between(lambda x: x / x.norm(dim=(2, 3), keepdim=True).clamp_min(1e-6)),
    "sum over channels": between(lambda x: x * x.sum(1, keepdim=True)),
    "norm over channels": between(lambda x: x * torch.linalg.vector_norm(x, dim=1, keepdim=True)),
    "softmax over pixels": between(lambda x: x * x.flatten(2).softmax(2).view_as(x)),
    "excited": Net(lambda net, x: net.out(net.conv(x) * net.more(net.conv(x)).sigmoid()), more=nn.Conv2d(8, 8, 1)),
    "holds its norm": Net(conv=HoldsNorm(3, 8, 1)),
    "turned in its module": Net(conv=Turned(3, 8, 1), out=nn.Linear(8, 4)),
    "attention": between(lambda x: attended(x.flatten(2)).view_as(x)),
    "flattened": between(lambda x: x.flatten(1).relu().view(x.shape)),
    "patches": Net(lambda net, x: net.out(net.conv(x).flatten(2).transpose(1, 2)), out=nn.Linear(8, 4)),
    "windows": between(lambda x: x.view(-1, 8, 2, 4, 2, 4).transpose(3, 4).relu().transpose(3, 4).reshape(x.shape)),
    "pixel shuffle": Net(lambda net, x: net.out(F.pixel_shuffle(net.conv(x), 2)), out=nn.Conv2d(2, 4, 1)),
    "channel shuffle": between(lambda x: F.channel_shuffle(x, 2)),
    "called twice": Net(lambda net, x: net.out(net.conv(x) + net.conv(x.relu()))),
    "weight norm": Net(conv=weight_norm(nn.Conv2d(3, 8, 1))),
    "masked": Net(conv=prune.l1_unstructured(nn.Conv2d(3, 8, 1), "weight", 0.5)),
    "auxiliary head": Net(
        lambda net, x: (net.out(net.conv(x)), net.more(net.conv(x))) if net.training else net.out(net.conv(x)),
        more=nn.Conv2d(8, 2, 1),
    ),
}


def encoder(**options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 10, batch_first=True), 1, **options)


def bound() -> nn.Module:
    model = Net()
    model.does = Caller(lambda net, x: model.out(model.conv(x)))
    return model


def rows(heading: str, column: int) -> list[str]:
    """What a table of the page quotes in a column."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [row.strip("|").split(" | ") for row in part.splitlines() if row.startswith("|") and "`" in row]
    return [re.fullmatch(r" ?`(.*)` ?", row[column]).group(1) for row in cells]  # type: ignore[union-attr]


def as_quoted(sentence: str) -> str:
    """A sentence with the line that the page has in it."""
    return re.sub(r"[\w-]+\.py:\d+", "net.py:12", sentence)


def test_every_reason_on_the_page_is_given() -> None:
    found = [as_quoted(sbf.trace(model, IMAGE).skipped["conv"]) for model in LEFT_ALONE.values()]
    assert found == rows("Layers that are left alone", 1)


def test_every_refusal_on_the_page_is_said() -> None:
    found = []
    for make in REFUSED.values():
        model, inputs = make()
        with pytest.raises(sbf.PruningError) as refused:
            sbf.trace(model, inputs)
        found.append(as_quoted(str(refused.value)))
    assert found == rows("Networks that are refused", 1)


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_what_is_called_understood_is_pruned(name: str) -> None:
    assert "conv" in sbf.trace(UNDERSTOOD[name], IMAGE).layers


def test_the_way_that_is_not_taken_fails_where_a_layer_before_the_fork_was_cut() -> None:
    def forked(net: Net, x: Tensor) -> Tensor:
        bright = x.mean() > 0
        x = net.conv(x)
        return net.out(x) if bright else net.other(x)

    model = Net(forked, other=nn.Conv2d(8, 4, 1))
    assert sbf.trace(model, IMAGE).skipped["other"] == "it does not run on the example inputs"
    small = sbf.extract(model, IMAGE, sbf.Plan({"conv": [0, 1, 2]}))
    assert small(IMAGE).shape == (2, 4, 8, 8)
    with pytest.raises(RuntimeError, match="to have 8 channels, but got 3"):
        small(-IMAGE)


def test_sizes_in_the_forward_are_met_with_zeros_and_named() -> None:
    model = between(lambda x: x.view(-1, 8, 8, 8))
    small = sbf.extract(model, IMAGE, sbf.Plan({"conv": [0, 1, 2]}))
    assert small.conv.module.out_channels == 3 and small.out.module.in_channels == 3
    assert as_quoted(small.sbf_fixed_sizes[0]) == "net.py:12 (aten.view)"


def test_a_proof_that_fails_says_what_the_page_says() -> None:
    def scaled(net: Net, x: Tensor) -> Tensor:
        x = net.norm(net.conv(x))
        return net.out(x * x.shape[1] if net.norm.training else x)

    model = Net(scaled, norm=nn.BatchNorm2d(8))
    keep = sbf.Plan({"conv": [0, 1, 2]})
    sbf.extract(model, IMAGE, keep)
    with pytest.raises(sbf.PruningError) as refused:
        sbf.extract(model, IMAGE, keep, prove=True)
    assert as_proved(refused.value) in re.sub(r"\s+", " ", PAGE)


def as_proved(error: sbf.PruningError) -> str:
    """What was said, with the number that the page has."""
    return re.sub(r"by [\d.e+-]+ of", "by 3.1e-02 of", str(error))


def test_a_proof_that_fails_at_another_size_says_what_the_page_says() -> None:
    """A map of one pixel does not show which channels are mixed with which pixels."""

    def without_transpose(x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, 8)
        return x.flatten(2).transpose(1, 2).reshape(x.shape)

    model, keep = between(without_transpose), sbf.Plan({"conv": [0, 1, 2]})
    sbf.extract(model, IMAGE, keep)
    with pytest.raises(sbf.PruningError) as refused:
        sbf.extract(model, IMAGE, keep, prove=True)
    assert as_proved(refused.value) in re.sub(r"\s+", " ", PAGE)


def test_a_network_with_modules_of_ours_is_compiled_and_exported_but_not_scripted() -> None:
    small = sbf.extract(between(lambda x: x.view(-1, 8, 8, 8)), IMAGE, sbf.Plan({"conv": [0, 1, 2]}))
    assert "conv.module.weight" in small.state_dict()
    expected = small(IMAGE)
    torch.testing.assert_close(torch.compile(small, backend="eager")(IMAGE), expected)
    torch.testing.assert_close(torch.export.export(small, (IMAGE,)).module()(IMAGE), expected)
    for refuses in (torch.jit.script, torch.fx.symbolic_trace):
        with pytest.raises(Exception, match=r"Unknown type annotation|control flow"):
            refuses(small)


def test_a_copy_has_gates_of_its_own_and_can_be_cut_with_the_plan() -> None:
    model = Net().double()
    pruner = sbf.Pruner(model, IMAGE.double())
    twin, average = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
    pruner.gate(sbf.Plan({"conv": [1, 2]}))
    x = IMAGE.double()
    average.update_parameters(model)
    for copied in (twin, average.module):
        assert not torch.equal(copied(x), model(x))
        torch.testing.assert_close(sbf.extract(copied, x, pruner.plan())(x), model(x))


def test_weight_decay_moves_a_closed_filter_and_no_gradient_does() -> None:
    model = Net()
    pruner = sbf.Pruner(model, IMAGE)
    pruner.gate(sbf.Plan({"conv": [0]}))
    before = model.conv.weight.detach().clone()
    model(IMAGE).square().mean().backward()
    assert model.conv.weight.grad[1:].abs().max() == 0 < model.conv.weight.grad[0].abs().max()
    torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1).step()
    assert (model.conv.weight[1:] != before[1:]).any()


def test_dropout_falls_elsewhere_in_training_mode_alone() -> None:
    model = Net(lambda net, x: net.out(F.dropout(net.conv(x), 0.5, net.training))).double()
    x, pruner = IMAGE.double(), sbf.Pruner(model, IMAGE.double())
    pruner.gate(sbf.Plan({"conv": [0, 3, 4]}))
    small = pruner.extract()
    results = {}
    for training in (True, False):
        pair = []
        for network in (model, small):
            torch.manual_seed(1)
            pair.append(network.train(training)(x))
        results[training] = torch.allclose(*pair)
    assert results == {True: False, False: True}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_scored_and_cut_on_the_cpu(kind: torch.dtype) -> None:
    model, x = Net().to(kind), IMAGE.to(kind)
    pruner = sbf.Pruner(model, x, scores=sbf.Scores(penalty=1.0, speed=1.0))
    with pruner.scoring():
        (model(x).float().square().mean() + pruner.penalty()).backward()
        pruner.step()
    assert {score.dtype for score in pruner.scores().values()} == {torch.float32}
    pruner.gate(sbf.Plan({"conv": [0, 3]}))
    torch.testing.assert_close(pruner.extract()(x), model(x))

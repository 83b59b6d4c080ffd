"""Frozen norms: the gradients are PyTorch's, whatever the shape, and the norm is itself again afterwards."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbf_pruner import Pruner, Scores, extract
from sbf_pruner.scores import LeafGates, freezing
from sbf_pruner.utils import memory_format, pruner_hooks, remove_pruner_hooks

SHAPES = {nn.BatchNorm1d: [(6, 5), (4, 5, 7)], nn.BatchNorm2d: [(3, 5, 4, 6)], nn.BatchNorm3d: [(2, 5, 3, 2, 4)]}
CASES = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]


def on_any_device(x: Tensor) -> bool:
    return x.numel() > 0 and torch.is_grad_enabled()


def reduced(gradient: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, *wanted: bool) -> Any:
    """`torch.batch_norm_backward_reduce`, which is for CUDA alone, one channel after another."""
    assert wanted == (False, True, True) and mean.dtype == invstd.dtype
    channels = [(gradient[:, c].double(), (x[:, c].double() - mean[c]) * invstd[c]) for c in range(len(mean))]
    sums = torch.stack([(g * n).sum() for g, n in channels]), torch.stack([g.sum() for g, _ in channels])
    return None, None, *(total.to(weight.dtype) for total in sums)


def normed(x: Tensor, weight: Tensor | None, bias: None, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    """`torch.batch_norm_elemt`, which is for CUDA alone, one channel after another."""
    assert bias is None and mean.dtype == invstd.dtype
    scale = invstd if weight is None else invstd * weight
    channels = [(x[:, c].to(mean.dtype) - mean[c]) * scale[c] for c in range(len(mean))]
    return torch.empty_like(x).copy_(torch.stack(channels, 1))


@pytest.fixture(params=["operators", "kernels"])
def ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Our gradient on the CPU: with ordinary operators, or as on CUDA with stand-ins for the two kernels."""
    monkeypatch.setattr(freezing, "_use_custom_backward", on_any_device)
    if request.param == "kernels":
        monkeypatch.setattr(freezing, "_use_syncbn_kernels", lambda gradient: not torch.is_grad_enabled())
        monkeypatch.setattr(torch, "batch_norm_backward_reduce", reduced)
        monkeypatch.setattr(torch, "batch_norm_elemt", normed)
    return str(request.param)


def a_norm(kind: type[Any], dtype: torch.dtype = torch.float64, **arguments: Any) -> Any:
    random = torch.Generator().manual_seed(0)
    norm = kind(5, **arguments)
    for tensor in [*norm.parameters(), *(b for b in norm.buffers() if b.is_floating_point())]:
        tensor.data = torch.rand(tensor.shape, generator=random, dtype=dtype) + 0.5
    return norm


def gradients(norm: Any, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of a loss that weighs every place of it differently."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    output = norm(x)
    random = torch.Generator().manual_seed(2)
    weights = torch.randn(output.shape, generator=random).bfloat16()  # the same in any precision
    weights = weights.to(output)
    return [output.detach(), *torch.autograd.grad((weights * output).sum(), [x, *norm.parameters()])]


@pytest.mark.parametrize(("kind", "shape"), CASES)
@pytest.mark.parametrize("affine", [True, False])
def test_outputs_and_gradients_are_those_of_pytorch(ours: str, kind: Any, shape: Any, affine: bool) -> None:
    norm = a_norm(kind, affine=affine)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = gradients(copy.deepcopy(norm).eval(), x)
    thaw = freezing.freeze(norm.train())
    found = gradients(norm, x)
    assert torch.equal(found[0], expected[0]) and torch.equal(norm(input=x), expected[0])
    torch.testing.assert_close(found, expected)
    thaw()
    assert not any(pruner_hooks(norm)) and "forward" not in norm.__dict__


def test_the_numerical_gradients_and_the_second_ones_agree(ours: str) -> None:
    norm = a_norm(nn.BatchNorm2d)
    freezing.freeze(norm)
    x = torch.randn(2, 5, 2, 3, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        norm.__dict__.update(weight=weight, bias=bias)
        return norm(x)

    arguments = x, norm.weight, norm.bias
    assert torch.autograd.gradcheck(run, arguments)
    assert torch.autograd.gradgradcheck(run, arguments)


@pytest.mark.parametrize("wanted", ["weight", "bias", "x"])
def test_only_what_is_wanted_is_computed(ours: str, wanted: str) -> None:
    norm = a_norm(nn.BatchNorm2d).requires_grad_(False)
    x = torch.randn(2, 5, 2, 3, dtype=torch.float64)
    of = x.requires_grad_() if wanted == "x" else getattr(norm, wanted).requires_grad_()
    expected = torch.autograd.grad(norm.eval()(x).square().sum(), of)
    freezing.freeze(norm.train())
    torch.testing.assert_close(torch.autograd.grad(norm(x).square().sum(), of), expected)


def test_half_precision_keeps_the_layout_and_does_not_round_the_factors(ours: str) -> None:
    norm = a_norm(nn.BatchNorm2d, torch.float32)
    x = torch.randn(4, 5, 6, 6, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    exact = gradients(copy.deepcopy(norm).double().eval(), x.double())
    freezing.freeze(norm)
    found = gradients(norm, x)
    assert [t.dtype for t in found] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in found[:2])
    torch.testing.assert_close(found[1].double(), exact[1], rtol=2**-8, atol=0)  # one rounding, of the result
    torch.testing.assert_close([t.double() for t in found[2:]], exact[2:], rtol=1e-5, atol=1e-5)


class Own(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_norms_with_a_way_of_their_own_keep_it(ours: str) -> None:
    for norm in (Own(5), nn.BatchNorm2d(5, track_running_stats=False), nn.InstanceNorm2d(5)):
        thaw = freezing.freeze(norm)
        assert "forward" not in norm.__dict__ and any(pruner_hooks(norm))
        thaw()
        assert not any(pruner_hooks(norm))
    other = nn.BatchNorm2d(5)
    mine = other.__dict__["forward"] = lambda x: x
    freezing.freeze(other)()
    assert other.__dict__["forward"] is mine


def test_only_maps_with_their_channels_last_want_it() -> None:
    cpu, last = torch.zeros(2, 5, 4, 4), torch.zeros(2, 5, 4, 4).to(memory_format=torch.channels_last)
    deep = torch.zeros(2, 5, 3, 4, 4).to(memory_format=torch.channels_last_3d)
    assert (memory_format(last), memory_format(deep)) == (torch.channels_last, torch.channels_last_3d)
    for other in (cpu, cpu[0, 0], cpu[:, :, ::2], torch.zeros(6, 5), torch.zeros(2, 5, 7)):
        assert memory_format(other) == torch.contiguous_format
    assert not freezing._use_custom_backward(last)  # a CPU has no kernels that are better


def test_a_wrong_shape_is_refused_as_before(ours: str) -> None:
    norm = a_norm(nn.BatchNorm2d)
    freezing.freeze(norm)
    with pytest.raises(ValueError, match="expected 4D input"):
        norm(torch.zeros(2, 5, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_the_kernels_agree_with_pytorch_on_a_gpu(
    dtype: torch.dtype, affine: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not last:
        monkeypatch.setattr(freezing, "_use_custom_backward", on_any_device)
    norm = a_norm(nn.BatchNorm2d, torch.float32, affine=affine).cuda()
    x = torch.randn(16, 5, 9, 9, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    output = copy.deepcopy(norm).eval()(x)
    exact = gradients(copy.deepcopy(norm).double().eval(), x.double())  # PyTorch's own are rounded on the way
    freezing.freeze(norm)
    found = gradients(norm, x)
    assert torch.equal(found[0], output) and found[1].stride() == x.stride()
    torch.testing.assert_close(found[1], exact[1].to(dtype))
    torch.testing.assert_close(found[2:], [each.float() for each in exact[2:]], rtol=1e-4, atol=1e-3)


def a_network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    )
    for norm in (net[1], net[4]):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return net.double()


def scored(net: nn.Module, x: Tensor) -> Tensor:
    """The scores after a few steps."""
    pruner = Pruner(net, x[:1], scores=Scores(penalty=0.01, lr=0.01))
    with pruner.scoring():
        for _ in range(3):
            (net.train()(x).square().mean() + pruner.penalty()).backward()
            pruner.step()
        return pruner.gates.soft.detach().clone()


def test_a_score_phase_takes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    expected = scored(a_network(), x)
    monkeypatch.setattr(freezing, "_use_custom_backward", on_any_device)
    net = a_network()
    found = scored(net, x)
    assert not torch.equal(expected, torch.ones_like(expected))
    torch.testing.assert_close(found, expected)
    assert "forward" not in net[1].__dict__ and net[1].training


def test_copies_in_a_phase_stand_alone_and_can_be_cleaned(ours: str) -> None:
    net, x = a_network(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    pruner = Pruner(net, x[:1])
    with pruner.scoring():
        twin = copy.deepcopy(net)
        assert twin[1].__dict__["forward"].__self__.norm is twin[1]
        with torch.no_grad():
            twin[1].running_mean += 1
        assert not torch.equal(twin(x), net(x))
        assert not any(pruner_hooks(remove_pruner_hooks(twin)))
        small = extract(net, x[:1], pruner.plan(), pruner.graph)
        assert torch.equal(small(x), remove_pruner_hooks(copy.deepcopy(net)).eval()(x))


def test_the_captured_engine_and_a_compiler_see_the_norms_own_forward(ours: str, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> Tensor:
        raise AssertionError("our gradient is for eager steps alone")

    net, x = a_network(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    pruner = Pruner(net, x[:1])
    with pruner.scoring():
        eager = net(x)
        monkeypatch.setattr(freezing._Frozen, "apply", refuse)
        with LeafGates(net, pruner.gates):
            assert "forward" not in net[1].__dict__
            assert torch.equal(net(x), eager)
        assert net[1].__dict__["forward"].__self__.norm is net[1]
        whole = not torch.__version__.startswith("2.11.")  # which stops at every gate
        torch.testing.assert_close(torch.compile(net, backend="eager", fullgraph=whole)(x), eager)
        with torch.no_grad():
            assert torch.equal(net(x), eager)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("entered", [False, True])
def test_a_weight_that_moves_in_training_mode_stands_still_too(norm: Any, entered: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), norm(nn.Conv2d(6, 4, 1))).train()
    images = torch.rand(2, 3, 5, 5)
    pruner = Pruner(model, images)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pruner.scoring():
        if entered:
            model.train()
        model(images)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    model(images)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(isinstance(owner, freezing.EvalModeHook) for *_, owner in pruner_hooks(model))

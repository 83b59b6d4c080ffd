"""A copy of a network is the copy of all of it, also of what Python does not copy."""

from collections import deque
from functools import partial, wraps

import pytest
import torch
import torch.fx
from torch import nn

import sbf_pruner as sbf
from sbf_pruner.utils import meta_copy, real_copy


class Awkward(nn.Module):
    """Tied weights, a frozen parameter, a plain tensor attribute in a list, and one that carries a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.shifts = [torch.ones(4)]
        self.doubled = self.first.weight * 2

    def forward(self, x):
        return self.norm(self.second(self.first(x))) @ self.doubled + self.shifts[0]


def test_a_meta_copy_runs_without_a_single_real_tensor():
    model = Awkward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = meta_copy(model)
    out = twin(torch.empty(2, 4, device="meta"))
    assert out.device.type == "meta" and out.shape == (2, 4)
    assert all(t.is_meta for t in [*twin.parameters(), *twin.buffers(), *twin.shifts, twin.doubled])
    assert twin.second.weight is twin.first.weight
    assert isinstance(twin.first.weight, nn.Parameter) and not twin.first.bias.requires_grad
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert model.doubled.device.type == model.shifts[0].device.type == "cpu"


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_meta_copy_keeps_type_shape_and_layout(memory_format):
    conv = nn.Conv2d(3, 8, 3).double().to(memory_format=memory_format)
    twin = meta_copy(conv)
    assert type(twin) is nn.Conv2d and twin.weight.dtype == torch.float64
    assert twin.weight.shape == conv.weight.shape and twin.weight.stride() == conv.weight.stride()


def test_a_meta_copy_takes_no_memory():
    wide = nn.Linear(1 << 16, 1 << 14, bias=False, device="meta")
    assert meta_copy(wide).weight.numel() == 1 << 30


def twice(function):
    @wraps(function)
    def called(x):
        return function(function(x))

    return called


def own(model):
    layers = [model.inner]
    return lambda x: layers[0](x)


def counted(model):
    def called(x, left=2):
        return called(x, left - 1) if left else model.inner(x)

    return called


# What a model holds and calls, and what knows it by that.
HELD = {
    "a lambda": lambda model: lambda x: model.inner(x),
    "a default": lambda model: lambda x, known=model: known.inner(x),
    "a keyword": lambda model: lambda x, *, known=model: known.inner(x),
    "a method": lambda model: model.step,
    "a wrapped method": lambda model: twice(model.step),
    "a list": own,
    "a set": lambda model: (lambda layers: lambda x: next(iter(layers))(x))({model.inner}),
    "a deque": lambda model: (lambda layers: lambda x: layers[0](x))(deque([model.inner])),
    "a partial function": lambda model: partial(lambda x: model.inner(x)),
    "a function that knows itself": counted,
    "a compiled method": lambda model: torch.compile(model.step, backend="eager"),
}


class Holder(nn.Module):
    def __init__(self, held) -> None:
        super().__init__()
        self.first, self.inner, self.out = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 2, 1)
        self.held = {"by name": (held(self),)}

    def step(self, x):
        return self.inner(x)

    def forward(self, x):
        return self.out(self.held["by name"][0](self.first(x)))


@pytest.mark.parametrize("how", HELD)
def test_a_function_that_knows_its_model_is_cut_with_it(how):
    model, image = Holder(HELD[how]).double().eval(), torch.randn(2, 3, 5, 5, dtype=torch.double)
    pruner = sbf.Pruner(model, image)
    pruner.gate(sbf.Plan({"inner": [0, 2, 3]}))
    expected = model(image)
    small = pruner.extract(prove=True)
    pruner.detach()
    assert small.inner.out_channels < 6
    torch.testing.assert_close(small(image), expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        model.inner.weight.zero_()
    torch.testing.assert_close(small(image), expected, rtol=0, atol=1e-12)


def test_a_hook_writes_into_the_model_that_it_is_on():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    seen = {}
    net[0].register_forward_hook(lambda module, given, found: seen.update(first=found))
    net[0].register_forward_hook(lambda module, given, found: setattr(net, "kept", found.shape[1]))
    image = torch.randn(1, 3, 5, 5)
    pruner = sbf.Pruner(net, image)
    assert not hasattr(net, "kept"), "copies were traced"
    pruner.gate(sbf.Plan({"0": [1, 2, 5]}))
    small = pruner.extract()
    small(image)
    assert small.kept == 3 and not hasattr(net, "kept")
    assert seen["first"].shape[1] == 3, "what is no part of the model is not copied"


def test_a_function_that_knows_nothing_of_the_model_stays_the_same():
    model = Holder(lambda model: lambda x: x.relu())
    assert real_copy(model).held["by name"][0] is model.held["by name"][0]


def test_a_copy_is_in_the_modes_of_the_model():
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout())).eval()
    model.get_submodule("2").train()  # as Monte Carlo dropout has it
    for made in (real_copy(model), meta_copy(model)):
        assert [m.training for m in made.modules()] == [m.training for m in model.modules()]


def test_what_a_function_of_the_copy_does_follows_the_mode_of_the_copy():
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 2, 1)
            self.act = partial(lambda k, x: x * k if self.training else x.relu(), 2.0)

        def forward(self, x):
            return self.out(self.act(self.first(x)))

    model, image = Moody().double().eval(), torch.randn(2, 3, 4, 4, dtype=torch.double)
    small = sbf.extract(model, image, sbf.Plan({"first": [0, 1]}), prove=True)
    judged = small.eval()(image)
    assert not torch.equal(small.train()(image), judged)
    model.train()
    assert torch.equal(small.eval()(image), judged)


def test_what_two_modules_share_their_copies_share():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    for shared in ({1, 2}, ({"a"}, [3]), deque([4]), partial(max, 5)):
        first.held = second.held = shared  # type: ignore[assignment]
        made = real_copy(nn.Sequential(first, second))
        assert made[0].held is made[1].held

import pytest
import torch
from torch import nn

from sbf_pruner.inputs import call, map_tensors, meta_copy


def test_call_spreads_tuples_and_dicts_and_nothing_else():
    def taken(*args, **kwargs):
        return args, kwargs

    x, y = torch.zeros(1), torch.ones(1)
    assert call(taken, x) == ((x,), {})
    assert call(taken, (x, y)) == ((x, y), {})
    assert call(taken, {"a": x}) == ((), {"a": x})
    assert call(taken, [x, y]) == (([x, y],), {})


def test_map_tensors_reaches_every_nest_and_keeps_the_rest():
    inputs = (torch.zeros(2), {"a": [torch.ones(1)], "b": 7}, None)
    moved = map_tensors(inputs, lambda t: t.to("meta"))
    assert moved[0].device.type == moved[1]["a"][0].device.type == "meta"
    assert moved[1]["b"] == 7 and moved[2] is None
    assert inputs[0].device.type == "cpu"


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

"""The small modules of an extracted network."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from sbf_pruner.modules import Remap, RemappedModule, Window, Zeros


def channels(*numbers):
    return torch.tensor(numbers, dtype=torch.float32).view(1, -1, 1, 1)


@pytest.mark.parametrize(
    ("source", "inputs", "expected"),
    [
        ([0, 1, 2], 3, [5, 6, 7]),  # as it is
        ([0, 2], 3, [5, 7]),  # gather
        ([-1, 0, -1, 1, 2], 3, [0, 5, 0, 6, 7]),  # scatter
        ([2, -1, 0], 3, [7, 0, 5]),  # both, in another order
        ([1, 1], 3, [6, 6]),  # twice the same
        ([-1, -1], 3, [0, 0]),  # nothing is left
    ],
)
def test_remap(source, inputs, expected):
    remap = Remap(source, inputs=inputs)
    assert torch.equal(remap(channels(5, 6, 7)), channels(*expected))


def test_remap_is_linear_and_passes_gradients_back():
    remap = Remap([2, -1, 0], inputs=3)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(remap, (x,))


@pytest.mark.parametrize("source", [[0, 2], [2, -1, 0], [-1, -1], [0, 1, 2], [0, 0, 1]])
def test_remap_compiled_is_the_same(source):
    torch._dynamo.reset()
    remap = Remap(source, inputs=3)
    x = torch.rand(2, 3, 4, 5, requires_grad=True)
    weights = torch.rand(2, len(source), 4, 5)
    results = []
    for form in (remap, torch.compile(remap, backend="aot_eager", fullgraph=True)):
        out = form(x.contiguous(memory_format=torch.channels_last))
        results.append((out, torch.autograd.grad((out * weights).sum(), x)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_what_a_compiled_remap_gives_may_be_written_over():
    """As a residual block does that adds its shortcut in place."""
    torch._dynamo.reset()
    remap = Remap([2, -1, 0], inputs=3)

    def block(x):
        out = remap(x)
        out += x
        return out.square().sum()

    x = torch.rand(2, 3, 4, 5, requires_grad=True)
    expected, found = (
        torch.autograd.grad(form(x), x)[0] for form in (block, torch.compile(block, backend="aot_eager"))
    )
    assert torch.equal(expected, found)


def test_remap_along_the_last_dimension():
    x = torch.arange(6.0).view(1, 2, 3)
    assert torch.equal(Remap([2, -1], dim=2, inputs=3)(x), torch.tensor([[[2.0, 0], [5, 0]]]))


def test_remap_of_maps_with_channels_last():
    for source in ([0, 2], [2, -1, 0], [-1, -1], [0, 1, 2]):
        remap, x = Remap(source, inputs=3), torch.rand(2, 3, 4, 5)
        found = remap(x.to(memory_format=torch.channels_last))
        assert torch.equal(found, remap(x))
        assert found.is_contiguous(memory_format=torch.channels_last)


def test_remap_of_a_map_that_could_be_either_gives_a_plain_one():
    for shape in ((2, 1, 4, 4), (2, 3, 1, 1)):
        assert Remap([0, -1, -1], inputs=shape[1])(torch.rand(shape)).is_contiguous()
        Remap([0, -1], inputs=shape[1])(torch.rand(shape)).view(2, -1)


def test_remap_keeps_type_and_is_no_state():
    remap = Remap([1, -1], inputs=2)
    assert remap(channels(1, 2).half()).dtype == torch.float16
    assert not remap.state_dict()
    assert not list(remap.parameters())
    assert {name for name, _ in remap.named_buffers()} == {"take", "put", "forth", "back"}
    assert remap.to("meta").take.device.type == "meta"
    assert "2 -> 2, 1 zero" in repr(remap)


def test_windows_agree_with_torch():
    settings = itertools.product((1, 2, 3, 4), (1, 2, 3), (0, 1, 2), (1, 2))
    for kernel, stride, padding, dilation in settings:
        for size in (9, 10, 13):
            conv = nn.Conv1d(1, 1, kernel, stride, padding, dilation, device="meta")
            x = torch.empty(1, 1, size, device="meta")
            assert Window(kernel, stride, padding, dilation)(size) == conv(x).shape[-1]
            for more in range(stride):
                up = nn.ConvTranspose1d(1, 1, kernel, stride, padding, more, dilation=dilation, device="meta")
                window = Window(kernel, stride, padding, dilation, more, transposed=True)
                assert window(size) == up(x).shape[-1]


def test_a_window_counts_what_the_module_pads_itself():
    conv = nn.Conv1d(1, 1, 3, stride=2, padding=2, padding_mode="circular")
    assert Window(3, 2, 0, 1, extra=4)(9) == conv(torch.zeros(1, 1, 9)).shape[-1]


def test_zeros_have_the_shape_of_the_layer_that_is_gone():
    conv = nn.Conv2d(3, 8, (3, 5), stride=(2, 1), padding=(1, 0))
    gone = Zeros(8, 1, [Window(3, 2, 1, 1), Window(5, 1, 0, 1)])
    for size in (11, 12):
        x = torch.rand(2, 3, size, size + 1, dtype=torch.float64)
        found = gone(x)
        assert found.shape == conv.double()(x).shape
        assert found.dtype == x.dtype
        assert not found.any()
    assert Zeros(4)(torch.ones(2, 7, 5, 5)).shape == (2, 4, 5, 5)
    assert Zeros(4, dim=2)(torch.ones(2, 7, 5)).shape == (2, 7, 4)


def adapted():
    return RemappedModule(nn.Conv2d(2, 3, 1, stride=2), Remap([0, 2], inputs=3), Remap([-1, 0, 1, 2], inputs=3))


def test_adapted_runs_its_three_parts():
    module = adapted()
    x = torch.rand(1, 3, 4, 4)
    assert torch.equal(module(x)[:, 1:], module.module(x[:, [0, 2]]))
    assert not module(x)[:, 0].any()


def test_adapted_answers_for_the_module_inside():
    module = adapted()
    assert module.stride == (2, 2)
    assert module.out_channels == 3
    assert module.weight is module.module.weight
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        module.nothing_of_this_name  # noqa: B018


def test_what_is_written_to_adapted_is_written_to_the_module_inside():
    module, inner = adapted(), adapted().module
    module.weight, module.padding_mode, module.marked = inner.weight, "circular", 1
    assert module.module.weight is inner.weight and module.module.padding_mode == "circular"
    assert [name for name, _ in module.named_parameters()] == ["module.weight", "module.bias"]
    del module.marked, module.bias
    assert not hasattr(module.module, "marked") and not hasattr(module.module, "bias")
    module.register_parameter("bias", inner.bias)  # as ultralytics 8.3 folds
    assert module.module.bias is inner.bias and "bias" not in module._parameters
    module.after = nn.Identity()
    assert isinstance(module.after, nn.Identity) and not hasattr(module.module, "after")
    assert not module.eval().training and not module.module.training


def test_a_bias_that_was_not_there_lets_channels_move():
    module, x = RemappedModule(nn.Conv2d(3, 2, 1, bias=False)), torch.rand(1, 3, 4, 4)
    module.folded = Remap([1, -1, 0])
    assert torch.equal(module(x), module.module(x))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        twin.bias = nn.Parameter(torch.rand(2))
        assert torch.equal(twin(x), twin.folded(twin.module(x))) and twin(x).shape[1] == 3


def test_adapted_can_be_copied_and_pickled():
    module, x = adapted(), torch.rand(1, 3, 4, 4)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x))
        assert twin.module is not module.module


def test_adapted_without_remaps_is_the_module():
    conv = nn.Conv2d(3, 4, 1)
    x = torch.rand(1, 3, 4, 4)
    assert torch.equal(RemappedModule(conv)(x), conv(x))


def test_zeros_answer_for_the_layer_they_replace():
    gone = Zeros(1, instead_of=nn.Conv2d(3, 8, 3, stride=2, bias=False).double())
    assert gone.stride == (2, 2) and gone.bias is None and gone.width == 1
    assert gone.weight.dtype == torch.float64 and gone.weight.numel() == 0
    assert not gone.state_dict() and not list(gone.parameters())
    assert copy.deepcopy(gone)(torch.ones(2, 3, 5, 5)).shape == (2, 1, 5, 5)

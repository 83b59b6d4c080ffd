"""Short cuts give what torch itself says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sbf_pruner.graph import meta_result

MAP = torch.empty(2, 4, 5, 5, device="meta")
LAST = MAP.contiguous(memory_format=torch.channels_last)
STATISTICS = torch.empty(4, device="meta")

CALLS = {
    "relu": ("aten.relu", (MAP,), torch.relu),
    "relu, channels last": ("aten.relu", (LAST,), torch.relu),
    "silu": ("aten.silu", (LAST,), F.silu),
    "clamp": ("aten.clamp", (MAP, -1.0, 1.0), torch.clamp),
    "sum": ("aten.add", (MAP, torch.empty_like(MAP)), torch.add),
    "product": ("aten.mul", (LAST, torch.empty_like(LAST)), torch.mul),
    "norm": (
        "aten.native_batch_norm",
        (MAP, STATISTICS, STATISTICS, STATISTICS, STATISTICS, False, 0.1, 1e-5),
        torch.native_batch_norm,
    ),
    "norm by the batch": (
        "aten.native_batch_norm",
        (MAP, None, None, None, None, True, 0.1, 1e-5),
        torch.native_batch_norm,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_short_cut_gives_what_torch_does(name):
    operator, args, function = CALLS[name]
    found, expected = meta_result(operator, args, {}), function(*args)
    if isinstance(found, tuple):  # a norm: the others are for its backward, which nobody runs
        assert len(found) == len(expected)
        found, expected = found[0], expected[0]
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_in_place_operators_give_their_operand():
    assert meta_result("aten.relu_", (MAP,), {}) is MAP
    assert meta_result("aten.add_", (MAP, torch.empty_like(MAP)), {}) is MAP


@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [
        ("aten.add", (MAP, STATISTICS.view(1, 4, 1, 1)), {}),  # broadcasting
        ("aten.add", (MAP, LAST), {}),  # which strides?
        ("aten.add", (MAP, MAP.half()), {}),  # which type?
        ("aten.add", (MAP, MAP), {"alpha": 2}),
        ("aten.add", (MAP, 1), {}),
        ("aten.relu", (MAP.long(),), {}),
        ("aten.clamp", (MAP, STATISTICS), {}),
        ("aten.native_batch_norm", (LAST, None, None, None, None, False, 0.1, 1e-5), {}),
        ("aten.cumsum", (MAP, 1), {}),
    ],
)
def test_anything_else_is_left_to_torch(operator, args, kwargs):
    assert meta_result(operator, args, kwargs) is None

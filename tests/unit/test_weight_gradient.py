"""The kernel for weight gradients against the library's, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

SHAPES = [(256, 16, 16, 32, 32), (256, 32, 32, 16, 16), (256, 64, 64, 8, 8)]
SHAPES += [(7, c, f, 5, 9) for c in (3, 8, 11, 24, 40) for f in (8, 16, 48, 64)] + [(1, 16, 16, 1, 1)]


def expected(x: Tensor, dy: Tensor) -> Tensor:
    weight = torch.empty(dy.shape[1], x.shape[1], 3, 3, dtype=torch.float64, device=x.device)
    sides = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    return torch.ops.aten.convolution_backward(dy.double(), x.double(), weight, None, *sides)[1]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_way_gives_the_gradient(shape: tuple[int, ...]) -> None:
    pytest.importorskip("triton", reason="the kernel is written in Triton")
    if not torch.cuda.is_available():
        pytest.skip("the kernel needs a CUDA device")
    from sbf_pruner.training import weight_gradient as ours

    images, channels, filters, height, width = shape
    x, dy = (
        torch.randn(images, count, height, width, device="cuda", dtype=torch.bfloat16).contiguous(
            memory_format=torch.channels_last
        )
        for count in (channels, filters)
    )
    wanted = expected(x, dy)
    for way in (w for w in ours.WAYS if w.fits(channels, filters)):
        found = ours.compute(x, dy, way)
        assert found.is_contiguous(memory_format=torch.channels_last)
        error = float((found - wanted).norm() / wanted.norm())
        assert error < (1e-2 if way == ours.LIBRARY else 1e-5), way  # the library's result is rounded to bfloat16
        if way != ours.LIBRARY:
            assert torch.equal(found, ours.compute(x, dy, way)), f"{way} is not deterministic"
    torch.library.opcheck(ours.weight_gradient, (x, dy), test_utils=("test_schema", "test_faketensor"))

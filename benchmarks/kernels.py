"""The kernel for weight gradients against the library's: right at every shape, and how fast each way is.

For a machine with a GPU and Triton, without test tools.  The shapes are those of a CIFAR ResNet at batch 256,
dense and padded, and some odd ones that only masks get right.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor

from sbf_pruner.training.kernels import weight_gradient as ours
from sbf_pruner.training.kernels.quickest import seconds

DENSE = [(256, 3, 16, 32, 32), (256, 16, 16, 32, 32), (256, 32, 32, 16, 16), (256, 64, 64, 8, 8)]
PADDED = [(256, 16, 8, 32, 32), (256, 8, 16, 32, 32), (256, 12, 16, 32, 32), (256, 32, 16, 16, 16)]
PADDED += [(256, 24, 32, 16, 16), (256, 64, 48, 8, 8), (256, 48, 64, 8, 8), (256, 32, 64, 8, 8)]
ODD = [(7, 11, 5, 9, 4), (1, 16, 16, 1, 1), (3, 40, 24, 5, 7), (300, 13, 17, 6, 6)]


def main() -> int:
    torch.backends.cudnn.benchmark = True
    wrong = 0
    for shape in DENSE + PADDED + ODD:
        images, channels, filters, height, width = shape
        x, dy = (made_up(images, count, height, width) for count in (channels, filters))
        wanted = expected(x, dy)
        cells = []
        for way in ours.ways(channels, filters):
            found = ours.compute(x, dy, way)
            error = float((found - wanted).norm() / wanted.norm())
            same = torch.equal(found, ours.compute(x, dy, way))
            good = error < (1e-2 if way == ours.LIBRARY else 1e-5) and (same or way == ours.LIBRARY)
            wrong += not good
            name = "library" if way == ours.LIBRARY else f"{way.rows} rows, {way.ahead} ahead"
            time = seconds(partial(ours.compute, x, dy, way))
            cells.append(f"{name} {1e6 * time:.1f} us {error:.0e}" + ("" if good else " WRONG"))
        wrong += not torch.equal(ours.weight_gradient(x, dy), ours.weight_gradient(x, dy))
        print(f"{shape!s:24}", "; ".join(cells), flush=True)
    print("all right" if not wrong else f"{wrong} WRONG")
    return int(bool(wrong))


def made_up(*shape: int) -> Tensor:
    tensor = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return tensor.contiguous(memory_format=torch.channels_last)


def expected(x: Tensor, dy: Tensor) -> Tensor:
    weight = torch.empty(dy.shape[1], x.shape[1], 3, 3, dtype=torch.float64, device=x.device)
    sides = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    return torch.ops.aten.convolution_backward(dy.double(), x.double(), weight, None, *sides)[1]


if __name__ == "__main__":
    sys.exit(main())

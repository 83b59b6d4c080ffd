"""The kernel of our own against the library's: right at every shape, and how fast each way is.

For a machine with a GPU and Triton, without test tools.  The shapes are those of a CIFAR ResNet at batch 256,
dense and padded, and some odd ones that only masks get right; every shape and way is compiled, which takes minutes
for all of them (`--dense`: four shapes).  What was found is saved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from saving import save_result
from sbf_pruner.training.engine import seconds, triton_kernels

DENSE = [(256, 3, 16, 32, 32), (256, 16, 16, 32, 32), (256, 32, 32, 16, 16), (256, 64, 64, 8, 8)]
PADDED = [(256, 16, 8, 32, 32), (256, 8, 16, 32, 32), (256, 12, 16, 32, 32), (256, 32, 16, 16, 16)]
PADDED += [(256, 24, 32, 16, 16), (256, 64, 48, 8, 8), (256, 48, 64, 8, 8), (256, 32, 64, 8, 8)]
ODD = [(7, 11, 5, 9, 4), (1, 16, 16, 1, 1), (3, 40, 24, 5, 7), (300, 13, 17, 6, 6)]

ROUNDED, EXACT = 1e-2, 1e-5  # of the norm, where the result is rounded to bfloat16 and where it is not


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dense", action="store_true", help="the dense network's shapes alone")
    shapes = DENSE if parser.parse_args().dense else DENSE + PADDED + ODD
    torch.backends.cudnn.benchmark = True
    found = [row for shape in shapes for row in rows(shape)]
    save_result("kernels", {"rows": found, "chosen": triton_kernels.CHOICES.told()}, "cuda")
    wrong = [row for row in found if not row["right"]]
    print(f"{len(wrong)} WRONG" if wrong else "all right")
    return int(bool(wrong))


def rows(shape: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """How right and how quick each way is at a shape."""
    images, channels, filters, height, width = shape
    x, dy = (made_up(images, count, height, width) for count in (channels, filters))
    wanted = expected(x, dy)
    for way in triton_kernels.candidate_configs(x, filters):
        limit = ROUNDED if way == triton_kernels.LIBRARY else EXACT
        yield row(shape, f"gradient {tuple(way)}", partial(triton_kernels.compute, x, dy, way), wanted, limit)
    triton_kernels.weight_gradient(x, dy)  # the training's own choice, told at the end


def row(
    shape: tuple[int, ...], name: str, work: Callable[[], Tensor], wanted: Tensor, limit: float
) -> dict[str, Any]:
    error = float((work() - wanted).norm() / wanted.norm())
    made = {"shape": shape, "way": name, "us": 1e6 * seconds(work), "error": error, "right": error < limit}
    print(f"{shape!s:24} {name:24} {made['us']:6.1f} us {error:.0e}", "" if made["right"] else "WRONG", flush=True)
    return made


def made_up(*shape: int) -> Tensor:
    tensor = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return tensor.contiguous(memory_format=torch.channels_last)


def expected(x: Tensor, dy: Tensor) -> Tensor:
    weight = torch.empty(dy.shape[1], x.shape[1], 3, 3, dtype=torch.float64, device=x.device)
    sides = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    return torch.ops.aten.convolution_backward(dy.double(), x.double(), weight, None, *sides)[1]


if __name__ == "__main__":
    sys.exit(main())

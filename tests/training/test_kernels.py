"""The kernel of our own against what it stands for: on a GPU, and by Triton's interpreter where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sbf_pruner.training.engine import load_choice, store_choice

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="the kernels are written in Triton")
SMALL = [
    (2, 16, 16, 8, 8),
    (3, 5, 7, 5, 6),
    (2, 24, 12, 4, 4),
    (2, 64, 64, 3, 3),
    (1, 16, 32, 1, 1),
    (1, 3, 16, 9, 5),
]
SHAPES = [(256, 16, 16, 32, 32), (256, 32, 32, 16, 16), (256, 64, 64, 8, 8), (256, 3, 16, 32, 32)]
SHAPES += [(7, c, f, 5, 9) for c in (3, 8, 11, 24, 40) for f in (8, 16, 48, 64)] + [(1, 16, 16, 1, 1)]


def maps(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    images, channels, filters, height, width = shape
    made = [torch.randn(images, count, height, width, device=device, dtype=dtype) for count in (channels, filters)]
    x, dy = (each.contiguous(memory_format=torch.channels_last) for each in made)
    return x, dy


def expected(x: Tensor, dy: Tensor) -> Tensor:
    weight = torch.empty(dy.shape[1], x.shape[1], 3, 3, dtype=torch.float64, device=x.device)
    sides = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    return torch.ops.aten.convolution_backward(dy.double(), x.double(), weight, None, *sides)[1]


def check_weight_gradients(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    from sbf_pruner.training.engine import triton_kernels as ours

    x, dy = maps(shape, device, dtype)
    wanted = expected(x, dy)
    for way in ours.candidate_configs(x, shape[2]):
        found = ours.compute(x, dy, way)
        assert found.is_contiguous(memory_format=torch.channels_last)
        error = float((found - wanted).norm() / wanted.norm())
        assert error < (1e-2 if way == ours.LIBRARY else 1e-5), way  # the library's result is rounded to bfloat16
        if way != ours.LIBRARY:
            assert torch.equal(found, ours.compute(x, dy, way)), f"{way} is not deterministic"


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_way_gives_the_same(shape: tuple[int, ...]) -> None:
    from sbf_pruner.training.engine import triton_kernels

    check_weight_gradients(shape, "cuda", torch.bfloat16)
    inputs = maps(shape, "cuda", torch.bfloat16)
    torch.library.opcheck(triton_kernels.weight_gradient, inputs, test_utils=("test_schema", "test_faketensor"))


def interpreter_works() -> bool:
    """Triton's takes the only number of an array as a number, which NumPy has come to refuse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return int(np.ones(1)) == 1
        except TypeError:
            return False


@needs_triton
@pytest.mark.skipif(not interpreter_works(), reason="Triton's interpreter needs an older NumPy")
def test_the_kernel_is_right_where_it_is_interpreted() -> None:
    interpreted = subprocess.run([sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1"})
    assert interpreted.returncode == 0


@needs_triton
def test_what_is_too_large_for_the_kernel_is_left_to_the_library() -> None:
    from sbf_pruner.training.engine import triton_kernels

    wide, many = torch.empty(2, 256, 8, 8, device="meta"), torch.empty(2**14, 64, 64, 64, device="meta")
    for x, filters in ((wide, 64), (wide, 256), (many, 16), (many[:, :16], 64)):
        assert triton_kernels.candidate_configs(x, 256 if x is wide else filters) == [triton_kernels.LIBRARY]


@needs_triton
def test_the_quickest_way_that_agrees_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from sbf_pruner.training.engine import triton_kernels

    def impossible() -> Tensor:
        raise RuntimeError("too little shared memory")

    works = {
        "trusted": lambda: torch.ones(3),
        "wrong": lambda: torch.tensor([1.0, 1.0, 1.1]),
        "no number": lambda: torch.tensor([1.0, 1.0, float("nan")]),
        "impossible": impossible,
        "rounded": lambda: torch.tensor([1.0, 1.0, 1.01]),
        "slow": lambda: torch.ones(3),
    }
    seconds = {works[name]: float(name in ("trusted", "slow")) for name in works}
    monkeypatch.setattr(triton_kernels, "seconds", seconds.__getitem__)
    assert triton_kernels.quickest(works) == "rounded"


def test_an_answer_is_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert load_choice("which way") is None
    store_choice("which way", "(64, 128)")
    store_choice("another", "(0, 0)")
    assert load_choice("which way") == "(64, 128)" and load_choice("another") == "(0, 0)"
    for file in (tmp_path / "sbf_pruner").iterdir():
        file.write_bytes(b"\xff\xfe broken")
    assert load_choice("which way") is None
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "sbf_pruner" / file.name))  # no folder
    store_choice("which way", "(64, 128)")
    assert load_choice("which way") is None


@pytest.mark.gpu
@needs_triton
def test_what_was_quickest_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sbf_pruner.training.engine import triton_kernels

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, measured = torch.empty(1, 3, 2, 2, device="cuda"), []
    monkeypatch.setattr(triton_kernels, "quickest", lambda works: measured.append(1) or (2, 2))
    works = {(1, 1): lambda: x, (2, 2): lambda: x}
    for _ in range(2):  # two processes
        assert triton_kernels.Choices((1, 1), __file__).choose(x, 8, works) == (2, 2)
    assert measured == [1]
    assert triton_kernels.Choices((1, 1), torch.__file__).choose(x, 8, works) == (2, 2)
    assert measured == [1, 1]  # other kernels


def check_a_step() -> None:
    """A network trained through the kernel has the gradients of one that is not, traced or not."""
    from sbf_pruner.training.engine import convolutions, triton_kernels

    triton_kernels.quickest = lambda works: list(works)[-1]  # the last is always one of ours
    convolutions._has_kernel = lambda module, dtype: True
    layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, target = torch.rand(2, 3, 9, 9), torch.rand(2, 8, 9, 9)

    def loss() -> Tensor:
        return (model(x) * target).sum()

    wanted = torch.autograd.grad(loss(), list(model.parameters()))
    for work in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        with convolutions.TunableConvolutions(model, torch.float32):
            for found, expected in zip(torch.autograd.grad(work(), list(model.parameters())), wanted, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert triton_kernels.CHOICES.told()


if __name__ == "__main__":
    for each in SMALL:
        check_weight_gradients(each, "cpu", torch.float32)
    check_a_step()

"""What a run computes with: the device, how its steps are run there, in which numbers, and how maps lie in memory.

A recipe's words and what torch finds here enter; a `Machine` leaves, or one sentence of what this machine cannot
do.  What is set for all of torch meanwhile is put back in the end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RunError
from ..utils.timing import using_threads
from ..utils.user_model import real_copy

log = logging.getLogger(__name__)

_COMPILED_FROM = (7, 0)  # the oldest GPUs, by their compute capability, that the compiler writes kernels for


@dataclass(frozen=True)
class Machine:
    """Where and how the steps of a run are computed."""

    device: torch.device
    captured: bool = False
    """is a step compiled and captured as a CUDA graph?"""
    dtype: torch.dtype = torch.float32
    """what maps are computed in; weights and optimisers are in float32"""
    order: torch.memory_format = torch.channels_last
    """how maps lie in memory"""

    def told(self) -> dict[str, str]:
        """It in words, for a summary.

        >>> Machine(torch.device("cpu")).told()
        {'engine': 'plain', 'precision': 'float32'}
        """
        return {
            "engine": "captured" if self.captured else "plain",
            "precision": str(self.dtype).removeprefix("torch."),
        }


def choose_machine(device: str, engine: str = "auto", precision: str = "auto") -> Machine:
    """What a recipe's three words come to here; `auto` is what is quickest of what is possible."""
    place = choose_device(device)
    if place.type != "cuda":
        if engine == "captured":
            raise RunError("engine: steps are captured on cuda alone; set engine=auto or plain")
        if precision == "bfloat16":
            raise RunError("precision: on the cpu networks compute in float32; set precision=auto or float32")
        return Machine(place)
    if engine == "auto" and (reason := _why_not_compiled(place)) is not None:
        log.info("steps run one by one, neither compiled nor captured: %s", reason)
        engine = "plain"
    if precision == "auto":
        precision = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return Machine(place, engine != "plain", getattr(torch, precision))


def choose_device(wanted: str) -> torch.device:
    """The device a recipe names; auto is cuda if there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RunError("device: this machine has no cuda device that torch can use; set device=cpu or auto")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def choose_order(model: nn.Module, images: Tensor) -> torch.memory_format:
    """Channels last, unless the network runs with them first alone, as one does that takes a view of a map.

    Measured on two cores, ResNet-20, batch 64 of 8x8 images: 13 ms a step with the channels last, 18 to 20 ms with
    them first; batch 128 of 32x32: 230 and 330 ms.

    >>> class Net(nn.Sequential):
    ...     def forward(self, x):
    ...         return super().forward(x).view(len(x), -1)
    >>> choose_order(Net(nn.Conv2d(3, 4, 3)), torch.rand(2, 3, 8, 8))
    torch.contiguous_format
    """
    first, last = torch.contiguous_format, torch.channels_last
    return first if not _runs(model, images, last) and _runs(model, images, first) else last


def lay_out(network: nn.Module, order: torch.memory_format) -> nn.Module:
    """The network itself, its weights now in an order in memory; those of other ranks than a map's stay.

    >>> lay_out(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv3d(2, 2, 3)), torch.channels_last)[0].weight.stride()
    (18, 1, 6, 2)
    """
    for held in (*network.parameters(), *network.buffers()):
        if held.dim() == 4:
            held.data = held.data.contiguous(memory_format=order)
    return network


def cpu_threads(count: int) -> AbstractContextManager[None]:
    """Let torch use `count` threads on the CPU, or as many as it likes if that is 0; then as before."""
    return using_threads(count or None)


@contextmanager
def own_arithmetic() -> Iterator[None]:
    """Put back, in the end, what the engine for CUDA sets for all of torch: how precisely and by which kernels."""
    tuned, word = torch.backends.cudnn.benchmark, None
    with suppress(RuntimeError):  # there is no one word for what backends were given each by itself
        word = torch.get_float32_matmul_precision()
    backends: tuple[Any, Any] = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    held = [backend.fp32_precision for backend in backends]
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = tuned
        if word is not None:
            torch.set_float32_matmul_precision(word)
        for backend, precision in zip(backends, held, strict=True):
            backend.fp32_precision = precision


def _why_not_compiled(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "there is no Triton here"
    if torch.cuda.get_device_capability(device) < _COMPILED_FROM:
        return f"{torch.cuda.get_device_name(device)} is too old for that"
    return None


def _runs(model: nn.Module, images: Tensor, order: torch.memory_format) -> bool:
    """Does a copy of the network run in both modes, with its weights and images in this order?"""
    copy = lay_out(real_copy(model).to(images.device), order)
    seen = images.contiguous(memory_format=order)
    streams = torch.random.fork_rng([images.device] if images.is_cuda else [])  # dropout must not move the run's
    try:
        with torch.no_grad(), streams:
            copy.eval()(seen)
            copy.train()(seen)
    except Exception:  # a user's network may fail in any way
        return False
    return True

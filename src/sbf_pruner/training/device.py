"""Choose the device, engine, precision and memory format of a run; restore the torch-wide settings it changes."""

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
from ..utils.timing import torch_threads
from ..utils.user_model import real_copy

log = logging.getLogger(__name__)

_COMPILED_FROM = (7, 0)  # lowest CUDA compute capability that torch.compile generates kernels for


@dataclass(frozen=True)
class ComputeConfig:
    """Device, engine, precision and memory format of a run."""

    device: torch.device
    captured: bool = False  # True if steps are compiled and captured as a CUDA graph
    dtype: torch.dtype = torch.float32  # of feature maps; weights and optimizer states are in float32
    order: torch.memory_format = torch.channels_last  # memory format of feature maps

    def told(self) -> dict[str, str]:
        """Return the engine and the precision as text, for a summary.

        >>> ComputeConfig(torch.device("cpu")).told()
        {'engine': 'plain', 'precision': 'float32'}
        """
        engine = "captured" if self.captured else "plain"
        return {"engine": engine, "precision": str(self.dtype).removeprefix("torch.")}


def choose_machine(device: str, engine: str = "auto", precision: str = "auto") -> ComputeConfig:
    """Return the configuration for a recipe's device, engine and precision; "auto" is the fastest one possible."""
    chosen = choose_device(device)
    if chosen.type != "cuda":
        if engine == "captured":
            raise RunError("engine: CUDA graph capture needs a CUDA device; set engine=auto or plain")
        if precision == "bfloat16":
            raise RunError("precision: networks on the cpu compute in float32; set precision=auto or float32")
        return ComputeConfig(chosen)
    if engine == "auto" and (reason := _why_not_compiled(chosen)) is not None:
        log.info("training steps run eagerly, neither compiled nor captured: %s", reason)
        engine = "plain"
    if precision == "auto":
        precision = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return ComputeConfig(chosen, engine != "plain", getattr(torch, precision))


def choose_device(wanted: str) -> torch.device:
    """Return the device that a recipe names; `auto` is cuda if there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RunError("device: this machine has no cuda device that torch can use; set device=cpu or auto")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def choose_memory_format(model: nn.Module, images: Tensor) -> torch.memory_format:
    """Return channels_last, or contiguous_format if only that works, as for `view` on a feature map.

    A step of ResNet-20 on two CPU cores took 13 ms in channels_last and 18 to 20 ms in contiguous_format with 64
    images of 8x8 pixels, and 230 and 330 ms with 128 images of 32x32 pixels.

    >>> class Net(nn.Sequential):
    ...     def forward(self, x):
    ...         return super().forward(x).view(len(x), -1)
    >>> choose_memory_format(Net(nn.Conv2d(3, 4, 3)), torch.rand(2, 3, 8, 8))
    torch.contiguous_format
    """
    for order in (torch.channels_last, torch.contiguous_format):
        if training_outputs(model, images, order) is not None:
            return order
    return torch.channels_last


def to_memory_format(network: nn.Module, order: torch.memory_format) -> nn.Module:
    """Convert 4-D parameters and buffers to a memory format in place, and return the network.

    >>> network = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv3d(2, 2, 3))
    >>> to_memory_format(network, torch.channels_last)[0].weight.stride()
    (18, 1, 6, 2)
    """
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=order)
    return network


def cpu_threads(count: int) -> AbstractContextManager[None]:
    """Set the number of CPU threads (0: leave it unchanged) and restore it on exit."""
    return torch_threads(count or None)


@contextmanager
def restore_torch_settings() -> Iterator[None]:
    """Restore on exit what the CUDA engine sets for all of torch: matmul precision and cuDNN benchmarking."""
    benchmark, common = torch.backends.cudnn.benchmark, None
    with suppress(RuntimeError):  # Raised if the precisions of the backends were set one by one and differ.
        common = torch.get_float32_matmul_precision()
    backends: tuple[Any, Any] = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    precisions = [backend.fp32_precision for backend in backends]
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        if common is not None:
            torch.set_float32_matmul_precision(common)
        for backend, precision in zip(backends, precisions, strict=True):
            backend.fp32_precision = precision


def _why_not_compiled(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.get_device_capability(device) < _COMPILED_FROM:
        return f"{torch.cuda.get_device_name(device)} is too old for Triton"
    return None


def training_outputs(model: nn.Module, images: Tensor, order: torch.memory_format | None = None) -> Any:
    """Return the outputs of a copy of the network in training mode; None if it fails in either mode.

    If `order` is given, weights and images are converted to this memory format.
    """
    copy = real_copy(model).to(images.device)
    if order is not None:
        copy, images = to_memory_format(copy, order), images.contiguous(memory_format=order)
    # Dropout must not advance the run's random state.
    streams = torch.random.fork_rng([images.device] if images.is_cuda else [])
    try:
        with torch.no_grad(), streams:
            copy.eval()(images)
            return copy.train()(images)
    except Exception:  # User code may raise anything.
        return None

"""Runtimes that a network is benchmarked on, one `BenchRuntime` each.

`BenchRuntime.prepare` takes a network in evaluation mode and returns a function that binds inputs; what that
returns runs one forward pass. Dense and compact networks take exactly the same path. A runtime that is not
installed or cannot run a network raises `Unavailable`, and the benchmark goes on with the others.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import PruningError
from ..runtimes.forms import compile_now, compiled
from ..runtimes.onnx import session, session_inputs, to_onnx
from ..utils.user_model import call, map_tensors, real_copy

Pass = Callable[[], Any]
Bound = Callable[[Any], Pass]
OPENVINO = 'pip install "sbf-pruner[openvino]"'


class Unavailable(Exception):
    """Raised if a runtime cannot be used here; the text gives the reason in one line."""


@dataclass(frozen=True)
class BenchTarget:
    """Device and threads that a network runs with, and an example of its inputs."""

    device: torch.device
    threads: int
    example: Any

    def moved(self, inputs: Any) -> Any:
        """Return the inputs on the device."""
        return map_tensors(inputs, lambda t: t.to(self.device))


@dataclass(frozen=True)
class BenchRuntime:
    """How a runtime prepares a network, and the devices that it is timed on."""

    prepare: Callable[[nn.Module, BenchTarget], Bound]
    devices: tuple[str, ...]
    packages: tuple[str, ...] = ()
    """Packages whose versions are recorded with the results."""


def _eager(network: nn.Module, place: BenchTarget) -> Bound:
    network = real_copy(network).to(place.device)
    return lambda inputs: partial(call, network, place.moved(inputs))


def _compiled(network: nn.Module, place: BenchTarget) -> Bound:
    network = real_copy(network).to(place.device)

    def bind(inputs: Any) -> Pass:
        torch._dynamo.reset()  # Else recompilations add up to a limit; compiled functions stay callable.
        run = partial(call, compiled(network, place.device), place.moved(inputs))
        try:
            compile_now(run)
        except PruningError as error:
            raise Unavailable(str(error)) from error
        return run

    return bind


def _onnxruntime(network: nn.Module, place: BenchTarget) -> Bound:
    with _as_onnx(network, place) as path:
        ready = session(path, place.threads)
    return lambda inputs: partial(ready.run, None, session_inputs(ready, inputs))


def _openvino(network: nn.Module, place: BenchTarget) -> Bound:
    try:
        openvino = importlib.import_module("openvino")
    except ImportError:
        raise Unavailable(f"OpenVINO is not installed; run: {OPENVINO}") from None
    core = openvino.Core()
    with _as_onnx(network, place) as path:
        content = path.read_bytes()
    # float32, because on some machines OpenVINO would choose bfloat16, which is less exact and can fail there.
    wanted = {
        "INFERENCE_NUM_THREADS": place.threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }

    def bind(inputs: Any) -> Pass:
        arrays = [t.contiguous().numpy() for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
        read = core.read_model(content, b"")
        read.reshape({part: list(array.shape) for part, array in zip(read.inputs, arrays, strict=True)})
        request = core.compile_model(read, "CPU", wanted).create_infer_request()
        return lambda: list(request.infer(arrays, share_inputs=True).values())

    return bind


BENCH_RUNTIMES: dict[str, BenchRuntime] = {
    "eager": BenchRuntime(_eager, ("cpu", "cuda")),
    "compile": BenchRuntime(_compiled, ("cpu", "cuda")),
    "onnxruntime": BenchRuntime(_onnxruntime, ("cpu",), ("onnxruntime", "onnx")),
    "openvino": BenchRuntime(_openvino, ("cpu",), ("openvino", "onnx")),
}


def outputs(run: Pass) -> list[Tensor]:
    """Run one pass and return its outputs as tensors on the CPU, whatever array type the runtime uses."""
    leaves = pytree.tree_leaves(run())
    return [torch.as_tensor(leaf).detach().cpu() for leaf in leaves if hasattr(leaf, "shape")]


@contextlib.contextmanager
def _as_onnx(network: nn.Module, place: BenchTarget) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield to_onnx(network, place.example, Path(folder) / "network.onnx")
        except PruningError as error:
            raise Unavailable(str(error)) from error

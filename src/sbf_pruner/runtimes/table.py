"""The runtimes that networks run in: how each prepares a network, on which devices, and the forms that suit it.

`sbf bench`, `sbf export`, `sbf latency` and latency targets share this table. A runtime that can be the unit of a
latency target also needs `joins`, and a way to time single layers in `measurement.stopwatch`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import PruningError, suggestion
from ..utils.timing import cpu, synchronizer, version_of
from ..utils.user_model import call, map_tensors, real_copy
from .capture import first_line, without_warnings
from .forms import Form
from .onnx import session, session_inputs, to_onnx

Pass = Callable[[], Any]
Bound = Callable[[Any], Pass]
Joins = Mapping[str, tuple[Form, ...]]
OPENVINO = 'pip install "sbf-pruner[openvino]"'


class Unavailable(PruningError):
    """Raised if a runtime cannot be used here; the text gives the reason in one line."""


@dataclass(frozen=True)
class Placement:
    """Device and threads that a network runs with, and an example of its inputs."""

    device: torch.device
    threads: int
    example: Any

    def moved(self, inputs: Any) -> Any:
        """Return the inputs on the device."""
        return map_tensors(inputs, lambda t: t.to(self.device))


@dataclass(frozen=True)
class Runtime:
    """How a runtime prepares a network, and what its speed depends on."""

    prepare: Callable[[nn.Module, Placement], Bound]
    """Takes a network in evaluation mode and returns a function that binds inputs; what that returns runs one
    forward pass. On a GPU the pass may return before the device has finished."""
    forms: tuple[Form, ...]
    """Every form of a network that is worth trying."""
    joins: Joins | None = field(default=None, hash=False)
    """For latency predictions, the two ways of joining a branch to the residual stream, each with the forms that
    are usually fastest. None: the runtime cannot be the unit of a latency target."""
    devices: tuple[str, ...] = ("cpu",)
    packages: tuple[str, ...] = ("torch",)
    """Packages whose versions affect the speed."""

    def facts(self, device: str) -> dict[str, Any]:
        """Return the facts of this machine that a time depends on; None for what is missing."""
        found: dict[str, Any] = {"cpu": cpu(), "cores": os.cpu_count()}
        if device == "cuda":
            there = torch.cuda.is_available()
            found["gpu"] = torch.cuda.get_device_name() if there else None
            found["cuda"] = torch.version.cuda if there else None
            found["dtype"] = "float32, convolutions in tf32" if torch.backends.cudnn.allow_tf32 else "float32"
        return {**found, **{package: version_of(package) for package in self.packages}}


def _eager(network: nn.Module, place: Placement) -> Bound:
    network = real_copy(network).to(place.device)
    return lambda inputs: partial(call, network, place.moved(inputs))


def _compiled(network: nn.Module, place: Placement) -> Bound:
    network = real_copy(network).to(place.device)

    def bind(inputs: Any) -> Pass:
        torch._dynamo.reset()  # Else recompilations add up to a limit; compiled functions stay callable.
        run = partial(call, compiled(network, place.device), place.moved(inputs))
        compile_now(run)
        return run

    return bind


def _onnxruntime(network: nn.Module, place: Placement) -> Bound:
    with _as_onnx(network, place) as path:
        ready = session(path, place.threads)
    return lambda inputs: partial(ready.run, None, session_inputs(ready, inputs))


def _openvino(network: nn.Module, place: Placement) -> Bound:
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


@contextlib.contextmanager
def _as_onnx(network: nn.Module, place: Placement) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield to_onnx(network, place.example, Path(folder) / "network.onnx")


_ONNX_FORMS = (
    Form("zeros", shortcuts=True),
    Form("zeros", 4, shortcuts=True),
    Form("zeros", 8, shortcuts=True),
    Form("zeros", 16, shortcuts=True),
    Form("zeros", 16, 16, shortcuts=True),
    Form("mixed", 16, 16, shortcuts=True),
    Form("gather"),
)
_EAGER_FORMS = (
    Form("zeros", in_place=True, channels_last=True),
    Form("zeros", 8, in_place=True, channels_last=True),
    Form("zeros", 16, in_place=True, channels_last=True),
    Form("add", in_place=True, channels_last=True),
    Form("add", 8, in_place=True, channels_last=True),
    Form("add", in_place=True),
)
_COMPILE_FORMS = (Form("zeros"), Form("zeros", channels_last=True), Form("gather", channels_last=True))
RUNTIMES: dict[str, Runtime] = {
    "eager": Runtime(
        _eager,
        _EAGER_FORMS,
        {
            "zeros": (Form("zeros", in_place=True, channels_last=True),),
            "moves": (Form("add", in_place=True, channels_last=True),),
        },
        ("cpu", "cuda"),
    ),
    "compile": Runtime(
        _compiled,
        _COMPILE_FORMS,
        {"zeros": (Form("zeros", channels_last=True),), "moves": (Form("gather", channels_last=True),)},
        ("cpu", "cuda"),
    ),
    "onnxruntime": Runtime(
        _onnxruntime,
        _ONNX_FORMS,
        {
            "zeros": (
                Form("zeros", 16, 16, shortcuts=True),
                Form("zeros", 4, shortcuts=True),
                Form("zeros", 16, shortcuts=True),
            ),
            "moves": (Form("mixed", 16, 16, shortcuts=True),),
        },
        packages=("onnxruntime", "torch"),
    ),
    "openvino": Runtime(_openvino, _ONNX_FORMS, packages=("openvino", "onnx")),
}
# What a latency can be asked for in: a runtime on the CPU by its name, on the GPU with ":cuda" appended.
LATENCY_RUNTIMES = tuple(
    name if device == "cpu" else f"{name}:{device}"
    for device in ("cpu", "cuda")
    for name, runtime in RUNTIMES.items()
    if runtime.joins is not None and device in runtime.devices
)


def latency_runtime(name: str, flag: str = "runtime") -> tuple[str, str]:
    """Split the name of a runtime for latencies into the runtime and its device.

    >>> latency_runtime("onnxruntime"), latency_runtime("compile:cuda")
    (('onnxruntime', 'cpu'), ('compile', 'cuda'))
    """
    if name not in LATENCY_RUNTIMES:
        raise PruningError(f"{flag}: unknown runtime {name!r}; {suggestion(name, LATENCY_RUNTIMES)}")
    runtime, _, device = name.partition(":")
    return runtime, device or "cpu"


def make_runner(
    network: nn.Module, inputs: Any, runtime: str, threads: int, device: str = "cpu"
) -> Callable[[], Any]:
    """Return a function that runs a network once on `inputs` in a runtime and waits for the device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise PruningError(
            "this machine has no cuda device that torch can use; measure on one that has (sbf latency "
            f"--runtime {runtime}:cuda --out FILE) and give the file (latency.table)"
        )
    place = Placement(torch.device(device), threads, inputs)
    with torch.inference_mode():
        bound = RUNTIMES[runtime].prepare(network, place)(inputs)
    wait = synchronizer(device)

    def run() -> Any:
        with torch.inference_mode():
            found = bound()
        wait()
        return found

    return run


def outputs(run: Pass) -> list[Tensor]:
    """Run one pass and return its outputs as tensors on the CPU, whatever array type the runtime uses."""
    leaves = pytree.tree_leaves(run())
    return [torch.as_tensor(leaf).detach().cpu() for leaf in leaves if hasattr(leaf, "shape")]


def compiled(network: nn.Module, device: torch.device | str = "cpu") -> Any:
    """Compile a network with torch.compile for static shapes."""
    # On the CPU, freezing makes weights constants, so that the compiler may change their memory layout.
    options = {"freezing": True} if torch.device(device).type == "cpu" else None
    return torch.compile(network, dynamic=False, options=options)  # type: ignore[arg-type]


def compile_now(run: Callable[[], Any]) -> None:
    """Run a compiled network once, which compiles it; raise a PruningError of one line if that fails."""
    try:
        # The compiler warns about its internals and logs a long traceback when it fails; our error replaces these.
        with without_warnings(logging.CRITICAL, "torch._inductor", "torch._dynamo"):
            run()
    except Exception as error:
        raise PruningError(f"torch.compile failed here ({first_line(error)})") from error

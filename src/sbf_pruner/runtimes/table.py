"""The runtimes that networks run in, and the choice of the fastest form of a network for one of them.

`RUNTIMES` lists, for each runtime, the function that prepares a network, the devices, and the forms to try; it is
used by `sbf bench`, `sbf export`, `sbf latency` and latency targets. A runtime for latency targets also needs
`joins`, and a function that times single layers in `measurement.stopwatch`. `choose` times forms in turns on this
machine and stops timing slow ones. The minimum time decides, because other load on the machine can only add time.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import PruningError, suggestion
from ..utils.formatting import pluralize
from ..utils.timing import cpu, synchronizer, torch_threads, version_of
from ..utils.user_code import one_line_error
from ..utils.user_model import call, map_tensors, random_inputs, real_copy
from .capture import without_warnings
from .forms import CapturedNetwork, Form, make_forms
from .onnx import session, session_inputs, to_onnx

Pass = Callable[[], Any]
Bound = Callable[[Any], Pass]
Joins = Mapping[str, tuple[Form, ...]]


class Unavailable(PruningError):
    """Error for a runtime that cannot be used on this machine; the message gives the reason in one line."""


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
    """Function from a network in evaluation mode to a function of its inputs, which returns a callable that runs
    one forward pass on them. On a GPU, this callable may return before the device has finished."""
    forms: tuple[Form, ...]  # every form of a network to try
    joins: Joins | None = field(default=None, hash=False)
    """For latency predictions: the two ways of adding a branch to the residual stream, each with the forms that are
    usually fastest. None if the runtime is not supported for latency targets."""
    devices: tuple[str, ...] = ("cpu",)
    packages: tuple[str, ...] = ("torch",)  # packages whose versions affect the speed

    def facts(self, device: str) -> dict[str, Any]:
        """Return the hardware, versions and precision that latency depends on; None for a value that is missing."""
        found: dict[str, Any] = {"cpu": cpu(), "cores": os.cpu_count()}
        if device == "cuda":
            available = torch.cuda.is_available()
            found["gpu"] = torch.cuda.get_device_name() if available else None
            found["cuda"] = torch.version.cuda if available else None
            found["dtype"] = "float32, convolutions in tf32" if torch.backends.cudnn.allow_tf32 else "float32"
        return {**found, **{package: version_of(package) for package in self.packages}}


def _eager(network: nn.Module, placement: Placement) -> Bound:
    network = real_copy(network).to(placement.device)
    return lambda inputs: partial(call, network, placement.moved(inputs))


def _compiled(network: nn.Module, placement: Placement) -> Bound:
    network = real_copy(network).to(placement.device)
    # On the CPU, freezing makes weights constants, so that the compiler may change their memory layout.
    options: Any = {"freezing": True} if placement.device.type == "cpu" else None

    def bind(inputs: Any) -> Pass:
        torch._dynamo.reset()  # Avoids the recompilation limit; compiled functions stay callable.
        compiled = torch.compile(network, dynamic=False, options=options)
        run = partial(call, compiled, placement.moved(inputs))
        try:
            # The compiler warns about its internals, and logs a long traceback when it fails.
            with without_warnings(logging.CRITICAL, "torch._inductor", "torch._dynamo"):
                run()  # The first call compiles.
        except Exception as error:
            raise PruningError(f"torch.compile failed here ({one_line_error(error)})") from error
        return run

    return bind


def _onnxruntime(network: nn.Module, placement: Placement) -> Bound:
    with _as_onnx(network, placement) as path:
        ready = session(path, placement.threads)
    return lambda inputs: partial(ready.run, None, session_inputs(ready, inputs))


def _openvino(network: nn.Module, placement: Placement) -> Bound:
    try:
        openvino = importlib.import_module("openvino")
    except ImportError:
        raise Unavailable('OpenVINO is not installed; run: pip install "sbf-pruner[openvino]"') from None
    core = openvino.Core()
    with _as_onnx(network, placement) as path:
        content = path.read_bytes()
    # float32, because on some machines OpenVINO would choose bfloat16, which is less exact and can fail there.
    config = {
        "INFERENCE_NUM_THREADS": placement.threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }

    def bind(inputs: Any) -> Pass:
        arrays = [t.contiguous().numpy() for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
        read = core.read_model(content, b"")
        read.reshape({part: list(array.shape) for part, array in zip(read.inputs, arrays, strict=True)})
        request = core.compile_model(read, "CPU", config).create_infer_request()
        return lambda: list(request.infer(arrays, share_inputs=True).values())

    return bind


@contextlib.contextmanager
def _as_onnx(network: nn.Module, placement: Placement) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield to_onnx(network, placement.example, Path(folder) / "network.onnx")


_onnx_form = partial(Form, shortcuts=True)
_in_place_form = partial(Form, in_place=True, channels_last=True)
_ONNX_FORMS = (
    *(_onnx_form("zeros", unit) for unit in (1, 4, 8, 16)),
    _onnx_form("zeros", 16, 16),
    _onnx_form("mixed", 16, 16),
    Form("gather"),
)
RUNTIMES: dict[str, Runtime] = {
    "eager": Runtime(
        _eager,
        (
            *(_in_place_form("zeros", unit) for unit in (1, 8, 16)),
            *(_in_place_form("add", unit) for unit in (1, 8)),
            Form("add", in_place=True),
        ),
        {"zeros": (_in_place_form("zeros"),), "moves": (_in_place_form("add"),)},
        ("cpu", "cuda"),
    ),
    "compile": Runtime(
        _compiled,
        (Form("zeros"), Form("zeros", channels_last=True), Form("gather", channels_last=True)),
        {"zeros": (Form("zeros", channels_last=True),), "moves": (Form("gather", channels_last=True),)},
        ("cpu", "cuda"),
    ),
    "onnxruntime": Runtime(
        _onnxruntime,
        _ONNX_FORMS,
        {
            "zeros": (_onnx_form("zeros", 16, 16), _onnx_form("zeros", 4), _onnx_form("zeros", 16)),
            "moves": (_onnx_form("mixed", 16, 16),),
        },
        packages=("onnxruntime", "torch"),
    ),
    "openvino": Runtime(_openvino, _ONNX_FORMS, packages=("openvino", "onnx")),
}
# Names of the runtimes for latency targets: on the CPU the plain name, on a GPU with ":cuda" appended.
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
    """Return a function that runs a network once on `inputs` in a runtime and waits for the device to finish."""
    if device == "cuda" and not torch.cuda.is_available():
        raise PruningError(
            "this machine has no cuda device that torch can use; measure on one that has (sbf latency "
            f"--runtime {runtime}:cuda --out FILE) and give the file (latency.table)"
        )
    placement = Placement(torch.device(device), threads, inputs)
    with torch.inference_mode():
        bound = RUNTIMES[runtime].prepare(network, placement)(inputs)
    wait = synchronizer(device)

    def run() -> Any:
        with torch.inference_mode():
            result = bound()
        wait()
        return result

    return run


def outputs(run: Pass) -> list[Tensor]:
    """Run one pass and return its outputs as tensors on the CPU, whatever array type the runtime uses."""
    leaves = pytree.tree_leaves(run())
    return [torch.as_tensor(leaf).detach().cpu() for leaf in leaves if hasattr(leaf, "shape")]


# -- Choice ----------------------------------------------------------------------------------------------------

SMALLEST = "size"
TARGETS = ("onnxruntime", "eager", "compile", SMALLEST)
TIMING_SECONDS = 10.0  # approximate total time for timing the forms of one network
_TURNS = 100  # maximum number of turns, however fast a pass is
_BEHIND = 1.15  # A form slower than the fastest by this factor drops out.


@dataclass(frozen=True)
class FormChoice:
    """The form chosen for a network, with the reason and the measured times."""

    network: nn.Module  # the network in that form, in evaluation mode
    form: Form | None  # None: the network was not rewritten
    why: str
    milliseconds: Mapping[str, float] = field(default_factory=dict)  # minimum time of every form that was timed

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in the manifest of an export."""
        form = None if self.form is None else asdict(self.form)
        params = sum(p.numel() for p in self.network.parameters())
        return {"form": form, "why": self.why, "params": params, "milliseconds": dict(self.milliseconds)}


def choose(
    model: nn.Module,
    example_inputs: Any,
    target: str = "onnxruntime",
    *,
    batch: int = 64,
    threads: int | None = None,
    seconds: float = TIMING_SECONDS,
    forms: Sequence[Form] | None = None,
) -> FormChoice:
    """Choose the fastest form of a network for a runtime: "onnxruntime", "eager" or "compile" (torch.compile).

    Passes are timed with `batch` samples for about `seconds` in total, plus the time to compile or to write ONNX
    files. For the target "size", the form with the fewest bytes is chosen without timing.
    """
    if target not in TARGETS:
        raise PruningError(f"no runtime is called {target!r}; {suggestion(target, TARGETS)}")
    try:
        captured = CapturedNetwork(model, example_inputs)
    except PruningError as error:
        return FormChoice(real_copy(model).eval(), None, f"not rewritten: {error}")
    usual = RUNTIMES["onnxruntime" if target == SMALLEST else target].forms
    candidates = {str(form): form for form in (usual if forms is None else forms)}
    networks = make_forms(captured, candidates)
    if target == SMALLEST:
        sizes = {name: sum(t.nbytes for t in made.state_dict().values()) for name, made in networks.items()}
        name = min(sizes, key=sizes.__getitem__)
        return FormChoice(networks[name], candidates[name], f"the smallest of {len(networks)} forms, not timed")
    if len(networks) == 1:
        ((name, only),) = networks.items()
        return FormChoice(only, candidates[name], "the only form it has")
    inputs = random_inputs(example_inputs, batch)
    threads = threads or torch.get_num_threads()
    with torch_threads(threads):
        passes = {name: make_runner(network, inputs, target, threads) for name, network in networks.items()}
        times = min_times(passes, seconds)
    best = min(times, key=times.__getitem__)
    why = f"the fastest of {len(times)} forms in {target}, batch {batch}, {pluralize(threads, 'thread')}"
    return FormChoice(networks[best], candidates[best], why, {name: 1e3 * t for name, t in times.items()})


def min_times(passes: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Time passes in turns for about `seconds`, and return their minimum times; slow ones are timed less often."""
    least = dict.fromkeys(passes, float("inf"))
    running = list(passes)
    for name in running:
        passes[name]()  # warm-up
    start, turn = time.perf_counter(), 0
    while turn < 3 or (turn < _TURNS and time.perf_counter() < start + seconds and len(running) > 1):
        for name in running[:: 1 if turn % 2 == 0 else -1]:
            began = time.perf_counter()
            passes[name]()
            least[name] = min(least[name], time.perf_counter() - began)
        turn += 1
        if turn >= 3 and time.perf_counter() > start + 0.3 * seconds:
            limit = _BEHIND * min(least.values())
            running = [name for name in running if least[name] <= limit]
    return least

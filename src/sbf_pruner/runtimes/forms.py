"""Equivalent forms of a network for different runtimes, and the choice of the fastest by timing.

A `Form` says how a captured network is rewritten; all forms compute the same function. `choose` times the
candidates on this machine in the target runtime. Forms are timed in turns, slow ones drop out, and the minimum time
decides, because other load on the machine can only add time. A network that cannot be captured is kept as it is,
with the reason. The model that is passed in is never changed.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import PruningError, suggestion
from ..utils.formatting import pluralize
from ..utils.timing import synchronizer, torch_threads
from ..utils.user_model import call, map_tensors, random_inputs, real_copy
from .capture import (
    Node,
    capture_graph,
    first_line,
    output_shape,
    remove_dead,
    suppress_exporter_output,
    without_warnings,
)
from .onnx import session, session_inputs, to_onnx
from .rewrite import merge_remaps, no_remap, shortcuts_as_convolutions, simplify, write_in_place, write_remaps
from .widths import widen

aten = torch.ops.aten
BRANCHES = ("zeros", "gather", "add", "convolution", "mixed")


@dataclass(frozen=True)
class Form:
    """How a captured network is rewritten for a runtime."""

    branches: str = "zeros"
    """how the output of a branch with fewer filters is mapped to the residual stream: "zeros" (zero filters in its
    last layer), "gather" (index_select after padding with a zero channel), "add" (index_add), "convolution" (a 1x1
    convolution of zeros and ones), "mixed" ("convolution" where that saves a whole unit, else "zeros")"""
    unit: int = 1
    """numbers of channels are rounded up to a multiple of this"""
    small: int = 0
    """numbers of channels up to this are not rounded"""
    shortcuts: bool = False
    """write strided shortcuts (slices) as 1x1 convolutions"""
    channels_last: bool = False
    """use the channels_last memory format"""
    in_place: bool = False
    """use in-place operators where the input is not read again"""

    def __post_init__(self) -> None:
        if self.branches not in BRANCHES:
            raise PruningError(
                f"branches: no way is called {self.branches!r}; {suggestion(self.branches, BRANCHES)}"
            )

    def __str__(self) -> str:
        words = [self.branches, f"unit {self.unit}" + (f" above {self.small}" if self.small else "")]
        flags = {"shortcuts": self.shortcuts, "channels last": self.channels_last, "in place": self.in_place}
        return ", ".join(words + [word for word, there in flags.items() if there])

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    def rounded(self, width: int) -> int:
        """Return a number of channels rounded up as in this form."""
        unit = 1 if width <= self.small else self.unit
        return -(-width // unit) * unit

    def saves_nothing(self, node: Node) -> bool:
        """Return True if the layer before a remap needs as many units without zero filters as with them."""
        before, behind = output_shape(node.args[0])[1], output_shape(node)[1]
        return -(-before // self.unit) >= -(-behind // self.unit)


class CapturedNetwork:
    """A network captured and simplified once, from which any number of forms can be made."""

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.graph = capture_graph(model, example_inputs)
        simplify(self.graph)
        self.example_inputs = example_inputs

    def form(self, form: Form) -> fx.GraphModule:
        """Return the network in a form, as a `GraphModule` in evaluation mode for any batch size."""
        with suppress_exporter_output():
            graph = copy.deepcopy(self.graph)
        if form.shortcuts:
            shortcuts_as_convolutions(graph)
        # Selecting input channels of a layer copies the feature map; zero columns in its weight cost less.
        rows = {"zeros": _always, "mixed": form.saves_nothing}.get(form.branches, no_remap)
        merge_remaps(graph, rows, _always, sink=True)
        widen(graph, form.rounded)
        write_remaps(graph, "convolution" if form.branches == "mixed" else form.branches)
        if form.channels_last:
            _keep_channels_last(graph)
        remove_dead(graph)
        if form.in_place:
            write_in_place(graph)
        graph.recompile()
        return graph.eval()


def _always(node: Node) -> bool:
    return True


def _keep_channels_last(graph: fx.GraphModule) -> None:
    """Convert inputs and 4-d weights to channels_last; operators propagate the format."""
    for node in list(graph.graph.nodes):
        if node.target is aten.view.default:  # view fails on channels_last strides
            node.target = aten.reshape.default
        if node.op != "placeholder":
            continue
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.dim() == 4 and node.users:
            readers = list(node.users)
            with graph.graph.inserting_after(node):
                last = graph.graph.call_function(
                    aten.contiguous.default, (node,), {"memory_format": torch.channels_last}
                )
            last.meta["val"] = value
            for reader in readers:
                reader.replace_input_with(node, last)
    for held in graph.parameters():
        if held.dim() == 4:
            held.data = held.data.contiguous(memory_format=torch.channels_last)


FORMS: dict[str, tuple[Form, ...]] = {
    "onnxruntime": (
        Form("zeros", shortcuts=True),
        Form("zeros", 4, shortcuts=True),
        Form("zeros", 8, shortcuts=True),
        Form("zeros", 16, shortcuts=True),
        Form("zeros", 16, 16, shortcuts=True),
        Form("mixed", 16, 16, shortcuts=True),
        Form("gather"),
    ),
    "eager": (
        Form("zeros", in_place=True, channels_last=True),
        Form("zeros", 8, in_place=True, channels_last=True),
        Form("zeros", 16, in_place=True, channels_last=True),
        Form("add", in_place=True, channels_last=True),
        Form("add", 8, in_place=True, channels_last=True),
        Form("add", in_place=True),
    ),
    "compile": (Form("zeros"), Form("zeros", channels_last=True), Form("gather", channels_last=True)),
}
SMALLEST = "size"
TARGETS = (*FORMS, SMALLEST)
TIMING_SECONDS = 10.0  # approximate total time for timing the forms of one network
_TURNS = 100  # maximum number of turns, however fast a pass is
_BEHIND = 1.15  # A form slower than the fastest by this factor drops out.


@dataclass(frozen=True)
class FormChoice:
    """The form chosen for a network, with the reason and the measured times."""

    network: nn.Module
    """the network in that form, in evaluation mode"""
    form: Form | None
    """None: the network was not rewritten"""
    why: str
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    """minimum time of every form that was timed"""

    def to_dict(self) -> dict[str, Any]:
        """Return what the manifest of an export records."""
        form = None if self.form is None else self.form.to_dict()
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
        deployable = CapturedNetwork(model, example_inputs)
    except PruningError as error:
        return FormChoice(real_copy(model).eval(), None, f"not rewritten: {error}")
    usual = FORMS["onnxruntime" if target == SMALLEST else target]
    candidates = {str(form): form for form in (usual if forms is None else forms)}
    networks = make_forms(deployable, candidates)
    if target == SMALLEST:
        name = min(networks, key=lambda name: weight_bytes(networks[name]))
        return FormChoice(networks[name], candidates[name], f"the smallest of {len(networks)} forms, not timed")
    if len(networks) == 1:
        ((name, only),) = networks.items()
        return FormChoice(only, candidates[name], "the only form it has")
    inputs = random_inputs(example_inputs, batch)
    threads = threads or torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, torch_threads(threads):
        passes = {
            name: make_runner(network, inputs, target, threads, Path(folder) / f"{index}.onnx")
            for index, (name, network) in enumerate(networks.items())
        }
        times = min_times(passes, seconds)
    best = min(times, key=lambda name: (times[name], list(times).index(name)))
    why = f"the fastest of {len(times)} forms in {target}, batch {batch}, {pluralize(threads, 'thread')}"
    return FormChoice(networks[best], candidates[best], why, {name: 1e3 * t for name, t in times.items()})


def weight_bytes(network: nn.Module) -> int:
    """Return the bytes of all tensors in the state dict of a network."""
    return sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())


def make_forms(deployable: CapturedNetwork, forms: Mapping[str, Form]) -> dict[str, fx.GraphModule]:
    """Return the network in each of the forms, without duplicates of earlier ones."""
    networks: dict[str, fx.GraphModule] = {}
    for name, form in forms.items():
        made = deployable.form(form)
        if not any(same_network(made, other) for other in networks.values()):
            networks[name] = made
    return networks


def min_times(passes: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Time passes in turns for about `seconds`, and return their minimum times; slow ones drop out early."""
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


def make_runner(
    network: nn.Module, inputs: Any, target: str, threads: int, path: Path, device: str = "cpu"
) -> Callable[[], Any]:
    """Return a function that runs a network once on `inputs` in the target runtime and waits for the device.

    For "onnxruntime", an ONNX file is written to `path`; for "compile", the network is compiled first.
    """
    if target == "onnxruntime":
        held = session(to_onnx(network, inputs, path), threads)
        fed = session_inputs(held, inputs)
        return lambda: held.run(None, fed)
    network, inputs = network.to(device), map_tensors(inputs, lambda tensor: tensor.to(device))
    called: Any = compiled(network, device) if target == "compile" else network
    wait = synchronizer(device)

    def run() -> Any:
        with torch.inference_mode():
            found = call(called, inputs)
        wait()
        return found

    if target == "compile":
        compile_now(run)
    return run


def same_network(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Return True if two forms have equal code and tensor layouts, as most do where nothing was pruned."""
    shapes = [[(name, t.shape, t.stride()) for name, t in n.state_dict().items()] for n in (one, other)]
    return one.code == other.code and shapes[0] == shapes[1]


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

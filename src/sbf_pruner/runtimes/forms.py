"""The forms a network may take where it runs: all compute the same, each suits another runtime.

A network, example inputs and a `Form` enter; a `GraphModule` in evaluation mode leaves, for a batch of any size.
What holds: the canonical network, the one that is saved, is not changed.

Which form runs fastest: all that come into question are timed on this machine, in the runtime they are for.

A network, example inputs and a target enter; the fastest form leaves, with every time measured.  The forms take
turns, and those far behind drop out; what counts is a form's least time, because whatever else the machine does
can only add to it.  What holds: given the times, the choice is fixed; a network that cannot be rewritten stays
as it is, and the reason is recorded.

A network compiled by torch, and its first pass, in which the compiling is done.

A network in evaluation mode enters; one leaves that computes the same.  What holds: the compiler's own warnings are
not shown, and where it fails one line says so.
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

from ..errors import PruningError, nearest
from ..utils.formatting import counted
from ..utils.timing import using_threads, waiting
from ..utils.user_model import call, made_up_inputs, map_tensors, real_copy
from .capture import Node, capture_graph, first_line, quietly, shape, tidy, without_warnings
from .onnx import feed, session, to_onnx
from .rewrite import merge_remaps, never, shortcuts_as_convolutions, simplify, write_in_place, write_remaps
from .widths import widen

aten = torch.ops.aten
BRANCHES = ("zeros", "gather", "add", "convolution", "mixed")


@dataclass(frozen=True)
class Form:
    """How a network is written for a runtime."""

    branches: str = "zeros"
    """how a branch with fewer filters comes into the common layout: "zeros" (filters of zeros in its last layer),
    "gather" (its channels are picked out beside a zero), "add" (added at their places), "convolution" (a 1x1
    convolution of zeros and ones), "mixed" ("convolution" where that saves a whole unit, else "zeros")"""
    unit: int = 1
    """widths are rounded up to a multiple of this"""
    small: int = 0
    """widths up to this stay as they are"""
    shortcuts: bool = False
    """is a shortcut that skips pixels a 1x1 convolution?"""
    channels_last: bool = False
    """are maps kept with their channels last?"""
    in_place: bool = False
    """may an operator write over its input, where nobody reads that again?"""

    def __post_init__(self) -> None:
        if self.branches not in BRANCHES:
            raise PruningError(f"branches: no way is called {self.branches!r}; {nearest(self.branches, BRANCHES)}")

    def __str__(self) -> str:
        words = [self.branches, f"unit {self.unit}" + (f" above {self.small}" if self.small else "")]
        flags = {"shortcuts": self.shortcuts, "channels last": self.channels_last, "in place": self.in_place}
        return ", ".join(words + [word for word, there in flags.items() if there])

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    def rounded(self, width: int) -> int:
        """What a width becomes in this form."""
        unit = 1 if width <= self.small else self.unit
        return -(-width // unit) * unit

    def saves_nothing(self, node: Node) -> bool:
        """Has the layer before a remap as many whole units of filters as with zeros added?"""
        before, behind = shape(node.args[0])[1], shape(node)[1]
        return -(-before // self.unit) >= -(-behind // self.unit)


class Deployable:
    """A network captured and simplified once, of which any number of forms can be made."""

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.graph = capture_graph(model, example_inputs)
        simplify(self.graph)
        self.example_inputs = example_inputs

    def form(self, form: Form) -> fx.GraphModule:
        """The network in one form."""
        with quietly():
            graph = copy.deepcopy(self.graph)
        if form.shortcuts:
            shortcuts_as_convolutions(graph)
        # A remap that selects from what a layer reads costs a copy of the map; columns of zeros cost less.
        rows = {"zeros": _always, "mixed": form.saves_nothing}.get(form.branches, never)
        merge_remaps(graph, rows, _always, sink=True)
        widen(graph, form.rounded)
        write_remaps(graph, "convolution" if form.branches == "mixed" else form.branches)
        if form.channels_last:
            _keep_channels_last(graph)
        tidy(graph)
        if form.in_place:
            write_in_place(graph)
        graph.recompile()
        return graph.eval()


def _always(node: Node) -> bool:
    return True


def _keep_channels_last(graph: fx.GraphModule) -> None:
    """Put the maps that enter, and the filters, with their channels last; the rest follows."""
    for node in list(graph.graph.nodes):
        if node.target is aten.view.default:  # which asks for plain strides
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
SECONDS = 10.0  # that the forms of one network are timed, about
_TURNS = 100  # are enough however quick a pass is
_BEHIND = 1.15  # a form that takes longer than this times the fastest has no chance


@dataclass(frozen=True)
class Chosen:
    """The form a network is given, and why."""

    network: nn.Module
    """in that form, in evaluation mode"""
    form: Form | None
    """None: the network as it is"""
    why: str
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    """the least time of every form that was tried"""

    def to_dict(self) -> dict[str, Any]:
        """What an export records."""
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
    seconds: float = SECONDS,
    forms: Sequence[Form] | None = None,
) -> Chosen:
    """The form of a network that is fastest in a runtime: "onnxruntime", "eager" or "compile" (torch.compile).

    `batch` is what a pass is timed with, `seconds` about how long all the timing takes; compiling, and writing ONNX
    files, comes on top.  For the target "size" it is the form with the fewest bytes; then nothing is timed.
    """
    if target not in TARGETS:
        raise PruningError(f"no runtime is called {target!r}; {nearest(target, TARGETS)}")
    try:
        deployable = Deployable(model, example_inputs)
    except PruningError as error:
        return Chosen(real_copy(model).eval(), None, f"not rewritten: {error}")
    usual = FORMS["onnxruntime" if target == SMALLEST else target]
    candidates = {str(form): form for form in (usual if forms is None else forms)}
    networks = written(deployable, candidates)
    if target == SMALLEST:
        name = min(networks, key=lambda name: weight_bytes(networks[name]))
        return Chosen(networks[name], candidates[name], f"the smallest of {len(networks)} forms, not timed")
    if len(networks) == 1:
        ((name, only),) = networks.items()
        return Chosen(only, candidates[name], "the only form it has")
    inputs = made_up_inputs(example_inputs, batch)
    threads = threads or torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, using_threads(threads):
        passes = {
            name: ready(network, inputs, target, threads, Path(folder) / f"{index}.onnx")
            for index, (name, network) in enumerate(networks.items())
        }
        times = fastest(passes, seconds)
    best = min(times, key=lambda name: (times[name], list(times).index(name)))
    why = f"the fastest of {len(times)} forms in {target}, batch {batch}, {counted(threads, 'thread')}"
    return Chosen(networks[best], candidates[best], why, {name: 1e3 * t for name, t in times.items()})


def weight_bytes(network: nn.Module) -> int:
    """What the tensors of a network take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())


def written(deployable: Deployable, forms: Mapping[str, Form]) -> dict[str, fx.GraphModule]:
    """The network in each of the forms, without those that are the same network as one before."""
    networks: dict[str, fx.GraphModule] = {}
    for name, form in forms.items():
        made = deployable.form(form)
        if not any(alike(made, other) for other in networks.values()):
            networks[name] = made
    return networks


def fastest(passes: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """The least seconds each pass took, in turns, for about so long; those far behind drop out early."""
    least = dict.fromkeys(passes, float("inf"))
    running = list(passes)
    for name in running:
        passes[name]()  # the first run is not like the others
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


def ready(
    network: nn.Module, inputs: Any, target: str, threads: int, path: Path, device: str = "cpu"
) -> Callable[[], Any]:
    """A function that runs the network once on the inputs, in the target's runtime, until it is done."""
    if target == "onnxruntime":
        held = session(to_onnx(network, inputs, path), threads)
        fed = feed(held, inputs)
        return lambda: held.run(None, fed)
    network, inputs = network.to(device), map_tensors(inputs, lambda tensor: tensor.to(device))
    called: Any = compiled(network, device) if target == "compile" else network
    wait = waiting(device)

    def run() -> Any:
        with torch.inference_mode():
            found = call(called, inputs)
        wait()
        return found

    if target == "compile":
        first_pass(run)
    return run


def alike(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Are two forms the same network?  Where nothing was pruned, most are."""
    shapes = [[(name, t.shape, t.stride()) for name, t in n.state_dict().items()] for n in (one, other)]
    return one.code == other.code and shapes[0] == shapes[1]


def compiled(network: nn.Module, device: torch.device | str = "cpu") -> Any:
    """The network as torch.compile makes it, for inputs of one size."""
    # On the CPU the weights become constants, so that the compiler may bring them into the order it likes.
    options = {"freezing": True} if torch.device(device).type == "cpu" else None
    return torch.compile(network, dynamic=False, options=options)  # type: ignore[arg-type]


def first_pass(run: Callable[[], Any]) -> None:
    """Have it compiled."""
    try:
        # The compiler warns of its own internals and logs a page when it fails; the sentence we raise is enough.
        with without_warnings(logging.CRITICAL, "torch._inductor", "torch._dynamo"):
            run()
    except Exception as error:
        raise PruningError(f"torch.compile failed here ({first_line(error)})") from error

"""Which form runs fastest: all that come into question are timed on this machine, in the runtime they are for.

A network, example inputs and a target enter; the fastest form leaves, with every time measured.  The forms take
turns, and those far behind drop out; what counts is a form's least time, because whatever else the machine does
can only add to it.  What holds: given the times, the choice is fixed; a network that cannot be rewritten stays
as it is, and the reason is recorded.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ..copies import real_copy
from ..errors import PruningError, nearest
from ..figures import counted
from ..inputs import call, made_up_inputs, map_tensors
from ..timing import using_threads, waiting
from .compiled import compiled, first_pass
from .forms import Deployable, Form
from .onnx import feed, session, to_onnx

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

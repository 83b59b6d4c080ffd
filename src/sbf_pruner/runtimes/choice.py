"""The choice of the fastest form of a network for a runtime, by timing all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import PruningError, suggestion
from ..utils.formatting import pluralize
from ..utils.timing import torch_threads
from ..utils.user_model import random_inputs, real_copy
from .forms import CapturedNetwork, Form, make_forms
from .table import RUNTIMES, make_runner

SMALLEST = "size"
TARGETS = ("onnxruntime", "eager", "compile", SMALLEST)
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
    usual = RUNTIMES["onnxruntime" if target == SMALLEST else target].forms
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
    with torch_threads(threads):
        passes = {name: make_runner(network, inputs, target, threads) for name, network in networks.items()}
        times = min_times(passes, seconds)
    best = min(times, key=lambda name: (times[name], list(times).index(name)))
    why = f"the fastest of {len(times)} forms in {target}, batch {batch}, {pluralize(threads, 'thread')}"
    return FormChoice(networks[best], candidates[best], why, {name: 1e3 * t for name, t in times.items()})


def weight_bytes(network: nn.Module) -> int:
    """Return the bytes of all tensors in the state dict of a network."""
    return sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())


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

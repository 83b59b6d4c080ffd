"""Time single layers, whole networks and plans in a runtime.

The seconds of a layer are the minimum of several runs, because other load on the machine can only add to them. Two
networks are timed in alternation, and their ratio is taken pair by pair. In ONNX Runtime the profiler times a layer
between two other layers, so that it has the memory format of a layer inside a network; reordering its input counts
as its own time. torch.compile runs layers with the same library as eager torch, so they are timed in eager mode.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import PruningError
from ..plan import Plan
from ..runtimes.forms import CapturedNetwork, Form, make_forms
from ..runtimes.onnx import import_onnxruntime, session_options
from ..runtimes.table import RUNTIMES, latency_runtime, make_runner, min_times
from ..surgery.extract import extract
from ..utils.timing import Interval, median_ratio, time_interleaved, torch_threads
from ..utils.user_code import one_line_error
from ..utils.user_model import random_inputs
from .latency_model import Conditions, LayerSpec, Widths

TURNS = 7
AT_ONCE = 16  # layers that are timed in alternation: few, so that not all feature maps are in memory at once
AROUND = 16  # input channels of the layer before the timed one, and output channels of the layer after it
NETWORK_INPUT = 4  # A layer with fewer input channels is assumed to be the first one, which reads the images.
_SAMPLE = 0.002

Measured = dict[Widths, float]


def time_layers(runtime: str, site: LayerSpec, widths: Sequence[Widths], batch: int, threads: int) -> Measured:
    """Return the seconds of a layer at each of the widths."""
    found: Measured = {}
    name, device = latency_runtime(runtime)
    for start in range(0, len(widths), AT_ONCE):
        some = widths[start : start + AT_ONCE]
        found |= LAYER_TIMERS[name](site, some, batch, threads, device)
    return found


# -- torch -------------------------------------------------------------------------------------------------


def _in_torch(site: LayerSpec, widths: Sequence[Widths], batch: int, threads: int, device: str) -> Measured:
    with torch.device(device):
        calls = {pair: _torch_call(site, *pair, batch) for pair in widths}
    with torch.inference_mode():
        # On a GPU many calls are launched before each synchronization, as inside a network.
        times = time_interleaved(calls, TURNS, sample=_SAMPLE, device=device)
    return {pair: min(seconds) for pair, seconds in times.items()}


def _torch_call(site: LayerSpec, inputs: int, filters: int, batch: int) -> Callable[[], Tensor]:
    bias = torch.zeros(filters)
    if site.kind == "linear":
        x, weight = torch.rand(batch * site.size[0], inputs), torch.rand(filters, inputs)
        return lambda: functional.linear(x, weight, bias)
    maps, weight = torch.rand(batch, inputs, *site.size), torch.rand(site.weight_shape(inputs, filters))
    transposed, groups, no_output_padding = site.kind == "transposed", site.groups or inputs, [0] * len(site.size)
    if maps.dim() == 4:  # the memory format of the forms for torch
        maps = maps.contiguous(memory_format=torch.channels_last)
        weight = weight if transposed else weight.contiguous(memory_format=torch.channels_last)
    return lambda: torch.convolution(
        maps, weight, bias, site.stride, site.padding, site.dilation, transposed, no_output_padding, groups
    )


# -- ONNX Runtime ------------------------------------------------------------------------------------------


def _in_onnxruntime(site: LayerSpec, widths: Sequence[Widths], batch: int, threads: int, device: str) -> Measured:
    runtime = import_onnxruntime()
    with tempfile.TemporaryDirectory() as folder:
        sessions = {pair: _session(runtime, _model(site, *pair), threads, folder, pair) for pair in widths}
        inputs = {pair: _random_input(session, batch) for pair, session in sessions.items()}
        order = list(sessions)
        rng = random.Random(0)
        for _ in range(TURNS):
            rng.shuffle(order)
            for pair in order:
                for _ in range(2):
                    sessions[pair].run(None, inputs[pair])
        profiles = {pair: Path(session.end_profiling()).read_text("utf-8") for pair, session in sessions.items()}
    return {pair: min(layer_seconds(json.loads(text))[2:]) for pair, text in profiles.items()}


def layer_seconds(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of the timed layer in each pass of a profile, including the reordering of its input."""
    found: list[float] = []
    ran = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    passes = [e["ts"] for e in events if e.get("name") == "model_run"]
    for begin, end in zip(passes, [*passes[1:], float("inf")], strict=True):
        since, layers, timed = 0.0, 0, 0.0
        inside = sorted((e for e in ran if begin <= e["ts"] < end), key=lambda e: e["ts"])
        weighted = [e for e in inside if e["args"]["op_name"] in _WEIGHTED]
        middle = 1 if len(weighted) == 3 else 0
        for event in inside:
            since += event["dur"]
            if event in weighted:
                if layers == middle:
                    timed = since if middle else event["dur"]
                since, layers = 0.0, layers + 1
        found.append(1e-6 * timed)
    return found


_WEIGHTED = ("Conv", "ConvTranspose", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul")


def _session(runtime: Any, model: bytes, threads: int, folder: str, pair: Widths) -> Any:
    options = session_options(threads)
    options.enable_profiling = True
    options.profile_file_prefix = f"{folder}/{pair[0]}-{pair[1]}"
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


# How single layers are timed. For torch.compile, layers are timed in eager mode, and calibration corrects the rest.
LAYER_TIMERS = {"eager": _in_torch, "compile": _in_torch, "onnxruntime": _in_onnxruntime}


def _random_input(session: Any, batch: int) -> dict[str, Any]:
    (given,) = session.get_inputs()
    rows = batch * (given.shape[0] if isinstance(given.shape[0], int) else 1)
    return {given.name: np.random.default_rng(0).random((rows, *given.shape[1:]), np.float32)}


def _model(site: LayerSpec, inputs: int, filters: int) -> bytes:
    """Build an ONNX model of the layer, between two 1x1 convolutions if it is a convolution inside a network."""
    from onnx import TensorProto, helper, numpy_helper

    weights: list[Any] = []

    def layer(kind: str, name: str, reads: str, shape: Sequence[int], width: int, **attributes: Any) -> Any:
        weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"{name}.w"))
        weights.append(numpy_helper.from_array(np.zeros(width, np.float32), f"{name}.b"))
        return helper.make_node(kind, [reads, f"{name}.w", f"{name}.b"], [name], name=name, **attributes)

    if site.kind == "linear":
        shape: list[Any] = ["rows", inputs]
        nodes = [layer("Gemm", "layer", "x", [filters, inputs], filters, transB=1)]
    else:
        ones = [1] * len(site.size)
        attributes = {
            "kernel_shape": list(site.kernel),
            "strides": list(site.stride),
            "pads": [*site.padding, *site.padding],
            "dilations": list(site.dilation),
            "group": site.groups or inputs,
        }
        inside = inputs >= NETWORK_INPUT and site.kind == "conv"
        shape = ["rows", AROUND if inside else inputs, *site.size]
        nodes = [layer("Conv", "first", "x", [inputs, AROUND, *ones], inputs)] if inside else []
        reads = "first" if inside else "x"
        kind = "Conv" if site.kind == "conv" else "ConvTranspose"
        nodes.append(layer(kind, "layer", reads, site.weight_shape(inputs, filters), filters, **attributes))
        if inside:
            nodes.append(layer("Conv", "last", "layer", [AROUND, filters, *ones], AROUND))
    end = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)
    begin = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "layer", [begin], [end], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    content: bytes = model.SerializeToString()
    return content


Pass = Callable[[], Any]
BESIDE = 4.0  # approximate seconds for which networks are timed in alternation
FEWEST, MOST = 11, 60  # rounds
TRIAL = 2.0  # seconds for trying the forms of one network


def all_forms(conditions: Conditions) -> dict[str, Form]:
    """Return every form that `sbf bench` and `sbf export` try."""
    return {str(form): form for form in RUNTIMES[latency_runtime(conditions.runtime)[0]].forms}


def passes(network: nn.Module, example: Any, forms: Mapping[str, Form], conditions: Conditions) -> dict[str, Pass]:
    """Return functions that run a network once, by form; forms that give equal networks appear once."""
    runtime, device = latency_runtime(conditions.runtime)
    made = make_forms(CapturedNetwork(network.eval(), example), forms)
    inputs = random_inputs(example, conditions.batch)
    return {name: make_runner(form, inputs, runtime, conditions.threads, device) for name, form in made.items()}


def rehearse(network: nn.Module, example: Any, conditions: Conditions) -> None:
    """Run a network once as it will be timed, and raise a PruningError now if that fails.

    Otherwise a missing package would be noticed only after hours of training.
    """
    first_form = dict([next(iter(all_forms(conditions).items()))])
    try:
        with torch_threads(conditions.threads):
            (run,) = passes(network, example, first_form, conditions).values()
            run()
    except Exception as error:  # A compiler or a broken installation can fail with any exception.
        cause = str(error) if isinstance(error, PruningError) else one_line_error(error)
        raise PruningError(f"latency cannot be measured on this machine ({conditions.told()}): {cause}") from error


def time_against_dense(dense: Pass, others: Mapping[str, Pass]) -> tuple[dict[str, float], float]:
    """Time several passes in alternation with the dense network; return the minimum seconds of each.

    The minimum is used because other load on the machine can only add to a time.
    """
    once = min_times({"dense": dense, **others}, 0.0)
    rounds = min(MOST, max(FEWEST, round(BESIDE / sum(once.values()))))
    times = time_interleaved({"dense": dense, **others}, rounds)
    least = {name: min(once[name], *seconds) for name, seconds in times.items()}
    dense_seconds = least.pop("dense")
    return least, dense_seconds


PAIRS = 40
INTERVAL_WIDTH = 0.04  # width that the confidence interval of a ratio may have, relative to the ratio
MAX_ATTEMPTS = 3  # attempts, each with twice as many pairs, to get an interval that narrow


class PlanTimer:
    """Times plans against the dense network: extracts the pruned network, and runs both in their fastest form."""

    def __init__(self, network: nn.Module, example: Any, conditions: Conditions) -> None:
        self.network, self.example, self.conditions = network, example, conditions

    def rehearse(self) -> None:
        """Raise a PruningError if timing is not possible here."""
        rehearse(self.network, self.example, self.conditions)

    def ratio(self, plan: Plan) -> float:
        """Return the time of a plan relative to the dense network, from more pairs if the times vary much."""
        return self._interval(plan, [PAIRS * 2**attempt for attempt in range(MAX_ATTEMPTS)]).median

    def interval(self, plan: Plan, pairs: int) -> Interval:
        """Return the time of a plan relative to the dense network, with its confidence interval."""
        return self._interval(plan, [pairs])

    def _interval(self, plan: Plan, attempts: Sequence[int]) -> Interval:
        """Time a plan with the given numbers of pairs in turn, until the interval is narrow enough."""
        with torch_threads(self.conditions.threads):
            compact = self._fastest(extract(self.network, self.example, plan))
            for pairs in attempts:
                times = time_interleaved({"dense": self._dense, "compact": compact}, pairs)
                found = median_ratio(times["compact"], times["dense"])
                if found.high - found.low <= INTERVAL_WIDTH * found.median:
                    break
        return found

    @cached_property
    def _dense(self) -> Pass:
        return self._fastest(self.network)

    def _fastest(self, network: nn.Module) -> Pass:
        candidates = passes(network, self.example, all_forms(self.conditions), self.conditions)
        if len(candidates) == 1:
            return next(iter(candidates.values()))
        times = min_times(candidates, TRIAL)
        return candidates[min(times, key=times.__getitem__)]

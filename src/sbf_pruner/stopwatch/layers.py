"""Single layers on the clock, in the runtime they are to run in.

A site and widths enter; seconds leave, the least of several turns, because whatever else the machine does can only
add to them.  In ONNX Runtime a layer is timed by the runtime's own profiler between two others, so that it has the
memory layout it would have inside a network, and what it takes to get there counts as its own.  torch.compile has
layers computed by kernels of the same library as torch without it, so they are timed without it.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..deploy.onnx import require, session_options
from ..latency.shapes import Site
from ..latency.table import Widths
from ..timing import take_turns
from .runtimes import RUNTIMES

TURNS = 7
AT_ONCE = 16  # layers that take turns, so that not all of their maps are in memory
AROUND = 16  # channels before and behind the layer that is timed
NETWORK_INPUT = 4  # a layer that reads fewer channels reads the images themselves
_SAMPLE = 0.002

Measured = dict[Widths, float]


def time_layers(runtime: str, site: Site, widths: Sequence[Widths], batch: int, threads: int) -> Measured:
    """Seconds of a layer at each of the widths."""
    found: Measured = {}
    for start in range(0, len(widths), AT_ONCE):
        some = widths[start : start + AT_ONCE]
        if runtime == "onnxruntime":
            found |= _in_onnxruntime(site, some, batch, threads)
        else:
            found |= _in_torch(site, some, batch, RUNTIMES[runtime].device)
    return found


# -- torch -------------------------------------------------------------------------------------------------


def _in_torch(site: Site, widths: Sequence[Widths], batch: int, device: str) -> Measured:
    with torch.device(device):
        calls = {pair: _call(site, *pair, batch) for pair in widths}
    with torch.inference_mode():
        # On a GPU many calls are launched before the clock is read: inside a network no layer is waited for.
        taken = take_turns(calls, TURNS, sample=_SAMPLE, device=device)
    return {pair: min(seconds) for pair, seconds in taken.items()}


def _call(site: Site, inputs: int, filters: int, batch: int) -> Callable[[], Tensor]:
    bias = torch.zeros(filters)
    if site.kind == "linear":
        x, weight = torch.rand(batch * site.size[0], inputs), torch.rand(filters, inputs)
        return lambda: functional.linear(x, weight, bias)
    groups = site.groups or inputs
    maps = _last(torch.rand(batch, inputs, *site.size))
    if site.kind == "transposed":
        weight = torch.rand(inputs, max(filters // groups, 1), *site.kernel)
        put = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[
            len(site.size) - 1
        ]
        return lambda: put(maps, weight, bias, site.stride, site.padding, 0, groups, site.dilation)
    weight = _last(torch.rand(filters, max(inputs // groups, 1), *site.kernel))
    taken = (functional.conv1d, functional.conv2d, functional.conv3d)[len(site.size) - 1]
    return lambda: taken(maps, weight, bias, site.stride, site.padding, site.dilation, groups)


def _last(tensor: Tensor) -> Tensor:
    """With channels last, as the forms for torch have it."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


# -- ONNX Runtime ------------------------------------------------------------------------------------------


def _in_onnxruntime(site: Site, widths: Sequence[Widths], batch: int, threads: int) -> Measured:
    runtime = require()
    with tempfile.TemporaryDirectory() as folder:
        sessions = {pair: _session(runtime, _model(site, *pair), threads, folder, pair) for pair in widths}
        fed = {pair: _fed(held, batch) for pair, held in sessions.items()}
        order = list(sessions)
        chosen = random.Random(0)
        for _ in range(TURNS):
            chosen.shuffle(order)
            for pair in order:
                for _ in range(2):
                    sessions[pair].run(None, fed[pair])
        return {
            pair: min(layer_seconds(json.loads(Path(held.end_profiling()).read_text("utf-8")))[2:])
            for pair, held in sessions.items()
        }


def layer_seconds(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """Of a profile, pass by pass: the time of the layer in the middle, with what lays its input out for it."""
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


def _fed(session: Any, batch: int) -> dict[str, Any]:
    (given,) = session.get_inputs()
    rows = batch * (given.shape[0] if isinstance(given.shape[0], int) else 1)
    return {given.name: np.random.default_rng(0).random((rows, *given.shape[1:]), np.float32)}


def _model(site: Site, inputs: int, filters: int) -> bytes:
    """An ONNX network of the layer, between two 1x1 convolutions where it is a convolution inside a network."""
    from onnx import TensorProto, helper

    weights: list[Any] = []

    def layer(kind: str, name: str, reads: str, shape: Sequence[int], width: int, **attributes: Any) -> Any:
        drawn = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        weights.append(helper.make_tensor(f"{name}.w", TensorProto.FLOAT, shape, drawn.tobytes(), raw=True))
        zeros = np.zeros(width, np.float32).tobytes()
        weights.append(helper.make_tensor(f"{name}.b", TensorProto.FLOAT, [width], zeros, raw=True))
        return helper.make_node(kind, [reads, f"{name}.w", f"{name}.b"], [name], name=name, **attributes)

    if site.kind == "linear":
        shape: list[Any] = ["rows", inputs]
        nodes = [layer("Gemm", "layer", "x", [filters, inputs], filters, transB=1)]
    else:
        ones, groups = [1] * len(site.size), site.groups or inputs
        how = {
            "kernel_shape": list(site.kernel),
            "strides": list(site.stride),
            "pads": [*site.padding, *site.padding],
            "dilations": list(site.dilation),
            "group": groups,
        }
        inside = inputs >= NETWORK_INPUT and site.kind == "conv"
        shape = ["rows", AROUND if inside else inputs, *site.size]
        nodes = [layer("Conv", "first", "x", [inputs, AROUND, *ones], inputs)] if inside else []
        reads = "first" if inside else "x"
        if site.kind == "conv":
            weight = [filters, max(inputs // groups, 1), *site.kernel]
            nodes.append(layer("Conv", "layer", reads, weight, filters, **how))
        else:
            weight = [inputs, max(filters // groups, 1), *site.kernel]
            nodes.append(layer("ConvTranspose", "layer", reads, weight, filters, **how))
        if inside:
            nodes.append(layer("Conv", "last", "layer", [AROUND, filters, *ones], AROUND))
    end = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)
    begin = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    graph = helper.make_graph(nodes, "layer", [begin], [end], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    content: bytes = model.SerializeToString()
    return content

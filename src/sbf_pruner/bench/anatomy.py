"""Where a pass spends its time: layers, moves of channels, and the rest.

A captured network and inputs enter; milliseconds per operator leave, each layer with its name, widths and
multiply-accumulates.  It is run operator by operator, so the sum is a little more than a whole pass takes; what
counts is how the dense and the compact network differ in it.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

LAYERS, MOVES, REST = "layers", "moves", "rest"
_LAYER = re.compile(r"^aten\.(conv\w*|linear|addmm|mm|bmm|baddbmm|matmul|_convolution)\b")
_MOVE = re.compile(
    r"^(aten\.(index|index_select|index_add_?|index_copy_?|index_put_?|scatter\w*|gather|cat)\b|sbf_)"
)


@dataclass(frozen=True)
class Part:
    """One operator of a network: how long it took, and what it is if it is a layer."""

    name: str
    kind: str
    ms: float
    macs: int = 0
    widths: tuple[int, int] = (0, 0)
    """channels it reads (of one group) and filters it has"""


def dissect(network: fx.GraphModule, inputs: Any, modules: Iterable[str] = (), passes: int = 10) -> list[Part]:
    """Run a captured network operator by operator and say how long each took: the least of so many passes.

    `modules` are the qualified names of the network it was captured from, by which layers are called.
    """
    watch = _Watch(network, {name.replace(".", "_"): name for name in modules})
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    with torch.inference_mode():
        for _ in range(passes + 1):
            watch.run(*leaves)
    return [
        Part(
            watch.names.get(node, node.name),
            _kind(node),
            1e3 * min(seconds[1:]),
            watch.macs.get(node, 0),
            watch.widths.get(node, (0, 0)),
        )
        for node, seconds in watch.seconds.items()
    ]


def total(parts: Iterable[Part], kind: str) -> float:
    """Milliseconds of all operators of a kind."""
    return sum(part.ms for part in parts if part.kind == kind)


class _Watch(fx.Interpreter):
    def __init__(self, network: fx.GraphModule, modules: Mapping[str, str]) -> None:
        super().__init__(network)
        self.modules = modules
        self.seconds: dict[fx.Node, list[float]] = defaultdict(list)
        self.macs: dict[fx.Node, int] = {}
        self.widths: dict[fx.Node, tuple[int, int]] = {}
        self.names: dict[fx.Node, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        _wait(args)
        began = time.perf_counter()
        result = self.call_function(n.target, args, kwargs)
        _wait(args)
        self.seconds[n].append(time.perf_counter() - began)
        if n not in self.names and _kind(n) == LAYERS and len(args) > 1 and isinstance(result, Tensor):
            self._note(n, args, result)
        return result

    def _note(self, node: fx.Node, args: tuple[Any, ...], result: Tensor) -> None:
        held = [a for a in args[:3] if isinstance(a, Tensor)]
        weight = held[1] if len(held) > 1 else held[0]
        self.widths[node] = (weight.shape[1], weight.shape[0]) if weight.dim() > 1 else (0, 0)
        self.macs[node] = result.numel() * weight.numel() // max(1, weight.shape[0])
        source = node.args[1]
        key = _spelled(str(source.target)) if isinstance(source, fx.Node) else node.name
        self.names[node] = self.modules.get(key, key)


def _spelled(weight: str) -> str:
    """The layer a stored weight belongs to, spelled alike however often it was rewritten.

    >>> _spelled("layer1.0.conv1.module.weight"), _spelled("layer1_0_conv1_weight_1")
    ('layer1_0_conv1', 'layer1_0_conv1')
    """
    name = re.sub(r"_?weight(_\d+)?$", "", weight.replace(".", "_").lstrip("_"))
    return name.removesuffix("_module")


def _kind(node: fx.Node) -> str:
    target = str(node.target)
    if _LAYER.match(target):
        return LAYERS
    return MOVES if _MOVE.match(target) else REST


def _wait(args: tuple[Any, ...]) -> None:
    if any(isinstance(a, Tensor) and a.is_cuda for a in args):
        torch.cuda.synchronize()

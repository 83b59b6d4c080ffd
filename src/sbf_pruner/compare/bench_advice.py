"""Explain a benchmark: time per operator, and why a network gained less than its MACs promise.

`dissect` runs a captured network operator by operator, so the sum is a little more than a whole pass takes; what
counts is the difference between the dense and the compact network. `advise` returns sentences, none if all is well,
and names only causes that show in these very measurements.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
    """One operator of a network: how long it took, and MACs and widths if it is a layer."""

    name: str
    kind: str
    ms: float
    macs: int = 0
    widths: tuple[int, int] = (0, 0)
    """Input channels (of one group) and filters."""


def dissect(network: fx.GraphModule, inputs: Any, modules: Iterable[str] = (), passes: int = 10) -> list[Part]:
    """Time every operator of a captured network: the minimum over `passes` passes after a first one to warm up.

    `modules` are the qualified names in the network that it was captured from, used to name its layers.
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
    """Return the milliseconds of all operators of a kind."""
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
    """Normalize the name of a weight to that of its layer, however often the network was rewritten.

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


Record = Mapping[str, Any]
Sides = Mapping[str, Sequence[Part]]  # "dense" and "compact"

LITTLE = 0.5  # "Little gained": log speed-up below this part of log MAC ratio, such as 1.41x at half the MACs.
CAUSE = 0.2  # A cause is named if it makes up this part of the time that the MACs do not explain.
FIXED = 0.5  # Fixed costs are named if they make up this part of a pass.
BUSY = 0.5  # cores that other processes keep busy: above this, timings are unreliable
WRONG = 1e-3  # error of the outputs, relative to the largest; rounding in float32 stays far below
FAULT = 2.5e-4  # milliseconds that a page fault takes at least
STEADY = "MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=34359738368"


def advise(measured: Sequence[Record], parts: Mapping[int, Sides], fewer: float, machine: Record) -> list[str]:
    """Return sentences about what was measured.

    `parts` holds the operators of an eager pass by batch size; `fewer` is the ratio of dense to compact MACs.
    """
    said = {key(record): verdict(record, fewer) for record in measured}
    lines = [*_about_the_machine(machine), *_about_outputs(measured), *_about_memory(measured)]
    for verdict_ in dict.fromkeys(filter(None, said.values())):
        where = ", ".join(_where(record) for record in measured if said[key(record)] == verdict_)
        lines.append(f"{verdict_}, although there are {fewer:.2f} times fewer MACs: {where}")
    weak = [record for record in measured if said[key(record)]]
    causes = []
    for batch in dict.fromkeys(record["batch"] for record in weak):
        if batch in parts:
            causes += _causes(parts[batch], fewer, batch)
    causes += _fixed_costs(measured, weak)
    return [*lines, *causes, *_remedies(causes)]


def key(record: Record) -> tuple[str, str, int]:
    """Return what identifies a combination: device, runtime and batch size."""
    return record["device"], record["runtime"], record["batch"]


def verdict(record: Record, fewer: float) -> str:
    """Return "" if the speed-up is in line with the ratio of MACs, else how it falls short.

    >>> verdict({"speedup": {"median": 1.05, "low": 0.98, "high": 1.1}}, 2.0)
    'no faster'
    """
    speed = record["speedup"]
    if fewer <= 1:
        return ""
    if speed["high"] < 1:
        return "slower"
    if speed["low"] <= 1:
        return "no faster"
    return "little gained" if math.log(speed["median"]) < LITTLE * math.log(fewer) else ""


def fixed_share(small: Record, large: Record) -> float:
    """Return the share of a compact pass, at the smaller batch size, that does not grow with the batch size.

    >>> at = lambda batch, ms: {"batch": batch, "compact_ms": {"median": ms}}
    >>> round(fixed_share(at(1, 3.0), at(11, 13.0)), 3)
    0.667
    """
    first, second = small["compact_ms"]["median"], large["compact_ms"]["median"]
    slope = max(0.0, (second - first) / (large["batch"] - small["batch"]))
    return max(0.0, 1 - slope * small["batch"] / first)


def _where(record: Record) -> str:
    device = "" if record["device"] == "cpu" else f" on {record['device']}"
    return f"{record['runtime']}{device}, batch {record['batch']} ({record['speedup']['median']:.2f}x)"


def _about_the_machine(machine: Record) -> list[str]:
    if machine["load"] is None or machine["load"] <= BUSY:
        return []
    return [
        f"the machine was busy before anything was timed (load {machine['load']:.1f} on {machine['cores']} cores), "
        "and threads that wait for each other suffer most; measure again when it is quiet"
    ]


def _about_outputs(measured: Sequence[Record]) -> list[str]:
    return [
        f"{_where(record)}: the outputs are off by {record['difference']:.0e} of the largest; do not use it"
        for record in measured
        if not record["difference"] <= WRONG  # Negated, so that NaN counts as wrong.
    ]


def _about_memory(measured: Sequence[Record]) -> list[str]:
    """Warn about page faults, if they can take a noticeable part of a pass anywhere."""
    for record in measured:
        count = record["page_faults"]["dense"]
        if count and record["device"] == "cpu" and count * FAULT > 0.02 * record["dense_ms"]["median"]:
            return [
                f"{record['runtime']}, batch {record['batch']}: {count:,.0f} page faults in a dense pass, because "
                f"freed memory goes back to the system; on Linux, {STEADY} before the command keeps it"
            ]
    return []


def _causes(sides: Sides, fewer: float, batch: int) -> list[str]:
    """Name the kinds of operators that take longer than their MACs promise, in an eager pass on the CPU."""
    dense, compact = sides["dense"], sides["compact"]
    over = {kind: total(compact, kind) - total(dense, kind) / fewer for kind in (LAYERS, MOVES, REST)}
    beyond = sum(max(0.0, ms) for ms in over.values())
    named = sorted((kind for kind in over if over[kind] >= CAUSE * beyond > 0), key=lambda kind: -over[kind])
    if not named:
        return []
    tell = {LAYERS: _about_layers, MOVES: _about_moves, REST: _about_the_rest}
    whole = sum(part.ms for part in compact)
    head = f"batch {batch}, operator by operator on the CPU: of {whole:.3g} ms the MACs do not explain {beyond:.3g}"
    return [head, *(f"  {100 * over[kind] / beyond:.0f} %: {tell[kind](dense, compact)}" for kind in named)]


def _about_layers(dense: Sequence[Part], compact: Sequence[Part]) -> str:
    """Name the narrowed layers that lost most throughput (MACs per second)."""
    rates = [sum(part.macs for part in side) / max(1e-9, 1e6 * total(side, LAYERS)) for side in (compact, dense)]
    before = {part.name: part for part in dense if part.kind == LAYERS}
    narrower = [part for part in compact if part.name in before and part.macs < before[part.name].macs]
    odd = sum(any(width % 4 for width in part.widths) for part in narrower)

    def lost(part: Part) -> float:
        return part.ms - before[part.name].ms * part.macs / before[part.name].macs

    named = ", ".join(
        f"{part.name} ({_size(before[part.name])} to {_size(part)}: {before[part.name].ms:.2g} to {part.ms:.2g} ms)"
        for part in sorted(narrower, key=lost, reverse=True)[:3]
    )
    return (
        f"layers too narrow to be quick: {rates[0]:.3g} GMAC/s against {rates[1]:.3g} when dense, {odd} of "
        f"{len(narrower)} with a width that is no multiple of 4; worst {named}"
    )


def _about_moves(dense: Sequence[Part], compact: Sequence[Part]) -> str:
    count = sum(part.kind == MOVES for part in compact)
    return f"{count} channel remaps, where layers that meet keep different filters"


def _about_the_rest(dense: Sequence[Part], compact: Sequence[Part]) -> str:
    return (
        "additions, activations and pooling, which process every channel of a residual stream that at "
        "least one layer writes"
    )


def _size(part: Part) -> str:
    return f"{part.widths[0]}x{part.widths[1]}"


def _fixed_costs(measured: Sequence[Record], weak: Sequence[Record]) -> list[str]:
    """Name passes whose time hardly depends on the batch size: launching operators dominates them."""
    shares = []
    for record in weak:
        larger = [r for r in measured if key(r)[:2] == key(record)[:2] and r["batch"] > record["batch"]]
        if larger and (share := fixed_share(record, max(larger, key=lambda r: r["batch"]))) > FIXED:
            shares.append(f"{100 * share:.0f} % of {_where(record)}")
    return [f"operator launch overhead, independent of the batch size: {', '.join(shares)}"] if shares else []


_REMEDIES = {
    "layers too narrow": "whole branches removed instead of some filters of each (scores.blocks=true), or filters "
    "kept in multiples (constraints.round_to=8)",
    "channel remaps": "the same filters kept in all layers that meet (constraints.couple)",
    "additions, activations": "the same channels removed in all layers of a stream (constraints.couple), or fewer "
    "blocks",
    "operator launch overhead": "larger batches, fewer blocks, or a runtime that fuses operators (compile, "
    "onnxruntime)",
}


def _remedies(causes: Sequence[str]) -> list[str]:
    found = [remedy for sign, remedy in _REMEDIES.items() if any(sign in cause for cause in causes)]
    return [f"what helps: {'; '.join(found)}"] if found else []

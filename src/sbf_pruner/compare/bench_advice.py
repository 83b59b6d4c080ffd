"""Explain a benchmark: time per operator, and why the speed-up is smaller than the reduction in MACs.

`dissect` times a captured network operator by operator. The sum slightly exceeds the time of a whole pass, but only
differences between the dense and the compact network are used. `advise` returns sentences that name only causes
found in the measurements; an empty list if the speed-up is as expected.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Time every operator of a captured network: the minimum over `passes` passes, after one warm-up pass.

    `modules` are the qualified names in the network that it was captured from, used to name its layers.
    """
    profiler = _Profiler(network, {name.replace(".", "_"): name for name in modules})
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    with torch.inference_mode():
        for _ in range(passes + 1):
            profiler.run(*leaves)
    return [replace(part, ms=1e3 * min(profiler.seconds[node][1:])) for node, part in profiler.parts.items()]


def total(parts: Iterable[Part], kind: str) -> float:
    """Return the total milliseconds of all operators of a kind."""
    return sum(part.ms for part in parts if part.kind == kind)


class _Profiler(fx.Interpreter):
    def __init__(self, network: fx.GraphModule, modules: Mapping[str, str]) -> None:
        super().__init__(network)
        self.modules = modules
        self.seconds: dict[fx.Node, list[float]] = defaultdict(list)
        self.parts: dict[fx.Node, Part] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        _wait(args)
        began = time.perf_counter()
        result = self.call_function(n.target, args, kwargs)
        _wait(args)
        self.seconds[n].append(time.perf_counter() - began)
        if n not in self.parts:
            self.parts[n] = self._part(n, args, result)
        return result

    def _part(self, node: fx.Node, args: tuple[Any, ...], result: Any) -> Part:
        kind = _kind(str(node.target))
        if kind != LAYERS or len(args) < 2 or not isinstance(result, Tensor):
            return Part(node.name, kind, 0.0)
        *_, weight = [a for a in args[:3] if isinstance(a, Tensor)][:2]
        macs = result.numel() * weight.numel() // max(1, weight.shape[0])
        source = node.args[1]
        key = _layer_name(str(source.target)) if isinstance(source, fx.Node) else node.name
        widths = (weight.shape[1], weight.shape[0]) if weight.dim() > 1 else (0, 0)
        return Part(self.modules.get(key, key), kind, 0.0, macs, widths)


def _layer_name(weight: str) -> str:
    """Normalize the name of a weight to that of its layer, however often the network was rewritten.

    >>> _layer_name("layer1.0.conv1.module.weight"), _layer_name("layer1_0_conv1_weight_1")
    ('layer1_0_conv1', 'layer1_0_conv1')
    """
    name = re.sub(r"_?weight(_\d+)?$", "", weight.replace(".", "_").lstrip("_"))
    return name.removesuffix("_module")


def _kind(target: str) -> str:
    return LAYERS if _LAYER.match(target) else MOVES if _MOVE.match(target) else REST


def _wait(args: tuple[Any, ...]) -> None:
    if any(isinstance(a, Tensor) and a.is_cuda for a in args):
        torch.cuda.synchronize()


Record = Mapping[str, Any]
Sides = Mapping[str, Sequence[Part]]  # operators of the "dense" and of the "compact" network

LITTLE = 0.5  # "little gained" if log(speed-up) is below this fraction of log(MAC ratio): 1.41x at half the MACs
CAUSE = 0.2  # A cause is named if it takes at least this fraction of the time that the MACs do not explain.
FIXED = 0.5  # Fixed costs are named if they take more than this fraction of a pass.
BUSY = 0.5  # number of cores used by other processes above which timings are unreliable
WRONG = 1e-3  # error of the outputs, relative to the largest; rounding in float32 stays far below
FAULT = 2.5e-4  # minimum milliseconds per page fault
STEADY = "MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=34359738368"


def advise(measured: Sequence[Record], parts: Mapping[int, Sides], fewer: float, machine: Record) -> list[str]:
    """Return sentences about what was measured.

    `parts` holds the operators of an eager pass by batch size; `fewer` is the ratio of dense to compact MACs.
    """
    lines = []
    if machine["load"] is not None and machine["load"] > BUSY:
        lines.append(
            f"the machine was busy before anything was timed (load {machine['load']:.1f} on {machine['cores']} "
            "cores), and threads that wait for each other suffer most; measure again when it is quiet"
        )
    for record in measured:
        if not record["difference"] <= WRONG:  # Negated, so that NaN counts as wrong.
            error = f"{record['difference']:.0e} of the largest"
            lines.append(f"{_where(record)}: the outputs are off by {error}; do not use it")
    lines += _about_memory(measured)
    weak = [record for record in measured if verdict(record, fewer)]
    for reason in dict.fromkeys(verdict(record, fewer) for record in weak):
        where = ", ".join(_where(record) for record in weak if verdict(record, fewer) == reason)
        lines.append(f"{reason}, although there are {fewer:.2f} times fewer MACs: {where}")
    causes = []
    for batch in dict.fromkeys(record["batch"] for record in weak):
        if batch in parts:
            causes += _causes(parts[batch], fewer, batch)
    causes += _fixed_costs(measured, weak)
    remedies = [remedy for sign, remedy in _REMEDIES.items() if any(sign in cause for cause in causes)]
    return [*lines, *causes, *([f"what helps: {'; '.join(remedies)}"] if remedies else [])]


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


def _about_memory(measured: Sequence[Record]) -> list[str]:
    """Return a warning about page faults if they can take over 2 % of a dense pass on the CPU, else []."""
    for record in measured:
        count = record["page_faults"]["dense"]
        if count and record["device"] == "cpu" and count * FAULT > 0.02 * record["dense_ms"]["median"]:
            faults = f"{record['runtime']}, batch {record['batch']}: {count:,.0f} page faults in a dense pass"
            why = "because freed memory goes back to the system"
            return [f"{faults}, {why}; on Linux, {STEADY} before the command keeps it"]
    return []


def _causes(sides: Sides, fewer: float, batch: int) -> list[str]:
    """Name the kinds of operators whose time, in an eager pass on the CPU, is reduced less than the MACs."""
    dense, compact = sides["dense"], sides["compact"]
    over = {kind: total(compact, kind) - total(dense, kind) / fewer for kind in (LAYERS, MOVES, REST)}
    beyond = sum(max(0.0, ms) for ms in over.values())
    named = sorted((kind for kind in over if over[kind] >= CAUSE * beyond > 0), key=lambda kind: -over[kind])
    if not named:
        return []
    remaps = sum(part.kind == MOVES for part in compact)
    about = {
        LAYERS: _about_layers(dense, compact),
        MOVES: f"{remaps} channel remaps, where layers that meet keep different filters",
        REST: "additions, activations and pooling, which process every channel of a residual stream that at least "
        "one layer writes",
    }
    whole = sum(part.ms for part in compact)
    head = f"batch {batch}, operator by operator on the CPU: of {whole:.3g} ms the MACs do not explain {beyond:.3g}"
    return [head, *(f"  {100 * over[kind] / beyond:.0f} %: {about[kind]}" for kind in named)]


def _about_layers(dense: Sequence[Part], compact: Sequence[Part]) -> str:
    """Name the narrowed layers that lost most throughput (MACs per second)."""
    rates = [sum(part.macs for part in side) / max(1e-9, 1e6 * total(side, LAYERS)) for side in (compact, dense)]
    before = {part.name: part for part in dense if part.kind == LAYERS}
    narrower = [part for part in compact if part.name in before and part.macs < before[part.name].macs]
    odd = sum(any(width % 4 for width in part.widths) for part in narrower)

    def lost(part: Part) -> float:
        return part.ms - before[part.name].ms * part.macs / before[part.name].macs

    worst = []
    for part in sorted(narrower, key=lost, reverse=True)[:3]:
        (a, b), (c, d) = before[part.name].widths, part.widths
        worst.append(f"{part.name} ({a}x{b} to {c}x{d}: {before[part.name].ms:.2g} to {part.ms:.2g} ms)")
    return (
        f"layers too narrow to be quick: {rates[0]:.3g} GMAC/s against {rates[1]:.3g} when dense, {odd} of "
        f"{len(narrower)} with a width that is no multiple of 4; worst {', '.join(worst)}"
    )


def _fixed_costs(measured: Sequence[Record], weak: Sequence[Record]) -> list[str]:
    """Name passes whose time hardly depends on the batch size, because launching operators takes most of it."""
    shares = []
    for record in weak:
        same = [r for r in measured if all(r[key] == record[key] for key in ("device", "runtime"))]
        largest = max(same, key=lambda r: r["batch"])
        if largest["batch"] > record["batch"] and (share := fixed_share(record, largest)) > FIXED:
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

"""Inspect a model before pruning: prunable layers, their gates and couplings, layers left alone and why.

`inspect_model` returns the channel graph, its relations and a plain dictionary of facts, which `sbf inspect`
prints, writes and draws; docs/inspect.md explains every key. The model is not modified.

`to_boxes` turns this into the boxes of a drawing. Norms, activations, pooling and views pass channels on and have
no box; layers, gates apart from a layer, operators that mix channels, and joins and splits of tensors have one.
Boxes are in execution order, so each comes after its sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from ..graph.build import trace
from ..graph.channel_graph import ChannelGraph
from ..graph.cost import FilterCosts
from ..graph.nodes import Alive, ChannelMove, Elementwise, Node, Opaque
from ..graph.operators.layers import LayerNode, Norm
from ..graph.records import Value
from ..graph.relations import ADD, CONCATENATE, MULTIPLY, Relations
from ..measurement.counts import Measurement, measure
from ..utils.formatting import first_names, format_percentage

Facts = dict[str, Any]
_PARAMETRISED = "parametrizations"  # where torch keeps the original tensors of a parametrized weight


@dataclass(frozen=True)
class Inspection:
    """A model before pruning: its channel graph, its relations and the facts as plain values."""

    graph: ChannelGraph
    relations: Relations
    facts: Facts


def overview(model: nn.Module, example_inputs: Any) -> Facts:
    """Describe the prunable layers of a model, followers, layers left alone with the reason, and totals.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> seen = overview(net, torch.zeros(1, 3, 8, 8))
    >>> [(layer["name"], layer["filters"], layer["gated_at"]) for layer in seen["layers"]]
    [('0', 8, '0')]
    >>> [(layer["name"], layer["reason"]) for layer in seen["skipped"]]
    [('2', "its filters are the network's outputs")]
    """
    return inspect_model(model, example_inputs).facts


def inspect_model(model: nn.Module, example_inputs: Any, graph: ChannelGraph | None = None) -> Inspection:
    """Trace a model unless its `graph` is given, measure it, and describe its layers and their couplings."""
    graph = graph if graph is not None else trace(model, example_inputs)
    relations = graph.relations
    cost = measure(model, example_inputs)
    describe, appraiser = _Describer(model, relations, cost), FilterCosts(graph)
    prunable, followers, skipped = [], [], []
    behind: dict[str, list[str]] = {}
    for name, leaders in relations.followers.items():
        followers.append({**describe(name), "follows": list(leaders)})
        for leader in leaders:
            behind.setdefault(leader, []).append(name)
    for name, layer in graph.layers.items():
        prunable.append(
            {
                **describe(name),
                "gated_at": layer.site.module,
                "gate": layer.site.kind,
                "later_gates": list(relations.later_gates.get(name, ())),
                "groups": [place for place, group in enumerate(relations.groups) if name in group.layers],
                "followed_by": behind.get(name, []),
                "first_filter": asdict(appraiser.first_filter(name)),
            }
        )
    for name, reason in graph.skipped.items():
        skipped.append({**describe(name), "reason": reason})
    facts = {
        "model": type(model).__name__,
        "inputs": [list(value.shape) for value in graph.trace.inputs],
        "params": cost.params,
        "macs": cost.macs,
        "filters": sum(layer.filters for layer in graph.layers.values()),
        "layers": prunable,
        "followers": followers,
        "skipped": skipped,
        "groups": [{"meet": list(group.meet), "layers": list(group.layers)} for group in relations.groups],
    }
    return Inspection(graph, relations, facts)


class _Describer:
    """Facts common to prunable layers, followers and layers left alone: shape and cost."""

    def __init__(self, model: nn.Module, relations: Relations, cost: Measurement) -> None:
        self.modules = dict(model.named_modules())
        self.cost = cost
        self.nodes: dict[str, LayerNode] = {}
        for node in relations.graph.nodes:
            if isinstance(node, LayerNode):
                self.nodes.setdefault(node.layer, node)

    def __call__(self, name: str) -> Facts:
        node = self.nodes.get(name)
        path = name
        if node is not None and node.stored and node.op.call is not None:
            owner = node.weight.name.rpartition(".")[0]
            path = owner if owner in self.modules and node.op.call.within(owner) else node.op.call.module
        module = self.modules.get(path)
        macs = self.cost.by_module.get(path, 0)
        return {
            "name": name,
            "kind": type(module).__name__ if module is not None else "",
            "filters": node.filters if node is not None else None,
            "kernel": list(node.weight.shape[2:]) if node is not None else [],
            "conv_groups": node.groups if node is not None else 1,
            "map_size": list(node.x.shape[2:]) if node is not None else [],
            "params": _parameters(module),
            "macs": macs,
            "macs_share": 100 * macs / self.cost.macs if self.cost.macs else 0.0,
        }


def _parameters(module: nn.Module | None) -> int:
    """Count the module's own parameters, including the originals of parametrized ones."""
    if module is None:
        return 0
    held = dict(module.named_parameters())
    return sum(p.numel() for key, p in held.items() if "." not in key or key.startswith(_PARAMETRISED))


LAYER, FOLLOWER, SKIPPED = "layer", "follower", "skipped"
INPUT, OUTPUT, GATE, JOINT, OPAQUE = "input", "output", "gate", "joint", "opaque"
_SIGNS = {Alive.ANY: ("+", ADD), Alive.ALL: ("\u00d7", MULTIPLY), Alive.QUOTIENT: ("÷", "divide")}


@dataclass(eq=False)
class Box:
    """A node of the drawing."""

    kind: str
    label: str
    tip: tuple[str, ...]  # lines of the tooltip
    note: str = ""  # a second, smaller line
    filters: int = 0
    group: int | None = None  # index of the group of layers that share its layout
    gate: str = ""  # kind of the layer's own gate, such as "affine" or "map"; empty if it has none
    layer: str = ""  # name of the layer; a layer that is called twice has two boxes
    kept: int | None = None  # filters left after pruning, if known
    sources: list[Box] = field(default_factory=list, repr=False)


def to_boxes(seen: Inspection) -> list[Box]:
    """Return the boxes of an inspected model in execution order, without inputs that are not read.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> [(box.kind, box.label) for box in to_boxes(inspect_model(net, torch.zeros(1, 3, 8, 8)))]
    [('input', 'input 3x8x8'), ('layer', '0'), ('skipped', '2'), ('output', 'output 4x4x4')]
    """
    composer = _BoxBuilder(seen)
    for node in seen.graph.nodes:
        composer.add(node)
    for place, value in enumerate(seen.graph.outputs):
        number = f" {place + 1}" if len(seen.graph.outputs) > 1 else ""
        composer.box(OUTPUT, f"output{number} {_size(value.shape[1:])}", ("output of the network",), [value])
    return [box for box in composer.boxes if box.kind != INPUT or composer.is_read(box)]


class _BoxBuilder:
    def __init__(self, seen: Inspection) -> None:
        self.relations = seen.relations
        self.facts: dict[str, dict[str, Any]] = {}
        for key in ("layers", "followers", "skipped"):
            self.facts |= {fact["name"]: fact for fact in seen.facts[key]}
        self.groups = seen.facts["groups"]
        self.apart = {edge.module: site for site in seen.graph.sites if not site.layer for edge in site.edges}
        self.read = {value for node in seen.graph.nodes for value in node.inputs} | set(seen.graph.outputs)
        self.calls: dict[str, int] = {}
        self.boxes: list[Box] = []
        self.made: dict[Value, Box] = {}  # the box that each tensor comes from
        self.joined: dict[tuple[int, ...], Box] = {}  # concatenations so far, by the ids of their sources
        for place, value in enumerate(seen.graph.trace.inputs):
            number = f" {place + 1}" if len(seen.graph.trace.inputs) > 1 else ""
            box = self.box(INPUT, f"input{number} {_size(value.shape[1:])}", ("input of the network",), [])
            self.made[value] = box

    def is_read(self, box: Box) -> bool:
        return any(box in other.sources for other in self.boxes)

    def box(self, kind: str, label: str, tip: Sequence[str], read: Iterable[Value], **more: Any) -> Box:
        box = Box(kind, label, tuple(tip), **more)
        box.sources = list(dict.fromkeys(self.made[v] for v in read if v in self.made))
        self.boxes.append(box)
        return box

    def add(self, node: Node) -> None:
        """Add a box for an operator, or attribute its outputs to the box that it reads."""
        sources = list(dict.fromkeys(self.made[v] for v in node.inputs if v in self.made))
        if not sources:
            return
        if isinstance(node, LayerNode):
            made = self._layer(node)
        elif isinstance(node, Norm) and self._stands_apart(node):
            made = self._gate(node)
        elif isinstance(node, Opaque) and len(node.inputs):
            made = self.box(OPAQUE, node.op.name.removeprefix("aten."), (node.blocks,), node.inputs)
        elif len(sources) > 1:
            made = self._meeting(node, sources)
        elif isinstance(node, ChannelMove) and len(self.read.intersection(node.outputs)) > 1:
            tip = (f"split into {len(node.outputs)} at {node.op.where}",)
            made = self.box(JOINT, "split", tip, node.inputs, group=self.relations.group_of(node.inputs[0]))
        else:
            made = sources[0]
        for value in node.outputs:
            self.made[value] = made

    def _layer(self, node: LayerNode) -> Box:
        name = node.layer
        fact = self.facts.get(name, {"name": name, "kind": "", "macs_share": 0.0, "params": 0, "macs": 0})
        kind = LAYER if "gated_at" in fact else FOLLOWER if "follows" in fact else SKIPPED
        self.calls[name] = self.calls.get(name, 0) + 1
        again = f" (call {self.calls[name]})" if self.calls[name] > 1 else ""
        group = self.relations.group_of(node.out)
        size = f" · {_size(node.x.shape[2:])}" if node.x.shape[2:] else ""
        return self.box(
            kind,
            name + again,
            [name + again, *describe(fact, self.groups, node)],
            [node.x, node.weight],
            note=f"{node.filters}{size} · {format_percentage(fact['macs_share'])} %",
            filters=node.filters,
            group=group,
            gate=fact.get("gate", ""),
            layer=name,
        )

    def _stands_apart(self, node: Norm) -> bool:
        call = node.op.call
        return call is not None and call.module in self.apart

    def _gate(self, node: Norm) -> Box:
        assert node.op.call is not None
        module = node.op.call.module
        why = (
            "a gate without scores: it closes removed channels, so that the norm's bias does not make them nonzero"
        )
        tip = (module, why)
        return self.box(GATE, module, tip, [node.x], group=self.relations.group_of(node.out))

    def _meeting(self, node: Node, sources: list[Box]) -> Box:
        group = self.relations.group_of(node.outputs[0]) if node.outputs else None
        rule = node.alive_if if isinstance(node, Elementwise) else Alive.ALWAYS
        label, verb = _SIGNS.get(rule, ("*", "combine"))
        if isinstance(node, ChannelMove):
            label, verb = "concat", CONCATENATE
        tip = [f"{verb} at {node.op.where}" if node.op.where else verb]
        if group is not None:
            tip.append("shares one layout: " + ", ".join(self.groups[group]["layers"]))
        made = self.box(JOINT, label, tip, node.inputs, group=group)
        if isinstance(node, ChannelMove):
            self._shorten(made, sources)
        return made

    def _shorten(self, made: Box, parts: list[Box]) -> None:
        """Let a concatenation read an earlier one that has the same leading parts, as in dense blocks."""
        key = tuple(id(part) for part in parts)
        for length in range(len(parts) - 1, 1, -1):
            if key[:length] in self.joined:
                made.sources = [self.joined[key[:length]], *parts[length:]]
                break
        self.joined.setdefault(key, made)


def to_json(boxes: Sequence[Box]) -> list[dict[str, Any]]:
    """Return the boxes as plain values, with sources as indices."""
    place = {box: number for number, box in enumerate(boxes)}
    return [{**vars(box), "sources": [place[source] for source in box.sources]} for box in boxes]


def from_json(plain: Sequence[dict[str, Any]]) -> list[Box]:
    """Rebuild the boxes that `to_json` wrote.

    >>> from_json(to_json([Box("input", "image", ("an image",))]))[0].label
    'image'
    """
    boxes: list[Box] = []
    for fields in plain:
        sources = [boxes[number] for number in fields["sources"]]
        boxes.append(Box(**{**fields, "tip": tuple(fields["tip"]), "sources": sources}))
    return boxes


def describe(fact: dict[str, Any], groups: Sequence[dict[str, Any]], node: LayerNode) -> list[str]:
    """Return the tooltip of a layer, line by line."""
    kernel = f", kernel {_size(node.weight.shape[2:])}" if node.weight.shape[2:] else ""
    lines = [f"{fact['kind'] or node.op.name}, {node.filters} filters{kernel}"]
    if node.groups > 1:
        lines.append("depthwise" if node.depthwise else f"{node.groups} groups")
    if node.x.shape[2:]:
        lines.append(f"input map {_size(node.x.shape[2:])}")
    lines.append(
        f"{fact['params']:,} parameters; {fact['macs']:,} MACs ({format_percentage(fact['macs_share'])} % of all)"
    )
    if "first_filter" in fact:
        macs, params = fact["first_filter"]["macs"], fact["first_filter"]["params"]
        lines.append(f"without its first filter: {macs:,} MACs and {params:,} parameters less")
    if "gated_at" in fact:
        own = "folded into its scale and shift" if fact["gate"] == "affine" else "multiplied into its output"
        lines.append(f"gated at {fact['gated_at']} ({own})")
    for key, words in (("later_gates", "gates again at"), ("followed_by", "followed by"), ("follows", "follows")):
        if fact.get(key):
            lines.append(f"{words} {first_names(fact[key], 8)}")
    for place in fact.get("groups", ()):
        others = [n for n in groups[place]["layers"] if n != fact["name"]]
        lines.append(f"meets ({', '.join(groups[place]['meet'])}) {first_names(others, 8)}")
    if "reason" in fact:
        lines.append(f"left alone: {fact['reason']}")
    return lines


def _size(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))

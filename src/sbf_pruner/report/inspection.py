"""Inspect a model before pruning: prunable layers, their gates and couplings, and skipped layers with the reason.

`inspect_model` returns the channel graph, its relations and a plain dictionary of facts, which `sbf inspect`
prints, writes and draws; docs/inspect.md explains every key. The model is not modified.

`to_boxes` converts an inspection to the boxes of a drawing. Layers, gates that belong to no layer, operators that
mix channels, and operators that join or split tensors have a box. Norms, activations, pooling and views have none,
because they keep the channels of their input. Boxes are in execution order, so each comes after its sources.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


@dataclass(frozen=True)
class Inspection:
    """A model before pruning: its channel graph, its relations and the facts as plain values."""

    graph: ChannelGraph
    relations: Relations
    facts: Facts


def overview(model: nn.Module, example_inputs: Any) -> Facts:
    """Describe a model: its prunable layers, followers, skipped layers with the reason, and totals.

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
    """Measure a model and describe its layers and their couplings; the model is traced unless `graph` is given."""
    graph = graph if graph is not None else trace(model, example_inputs)
    relations, costs = graph.relations, FilterCosts(graph)
    size, modules = measure(model, example_inputs), dict(model.named_modules())
    nodes: dict[str, LayerNode] = {}
    for node in graph.nodes:
        if isinstance(node, LayerNode):
            nodes.setdefault(node.layer, node)

    def shape_and_cost(name: str) -> Facts:
        return _shape_and_cost(name, nodes.get(name), modules, size)

    layers = [
        {
            **shape_and_cost(name),
            "gated_at": layer.site.module,
            "gate": layer.site.kind,
            "later_gates": list(relations.later_gates.get(name, ())),
            "groups": [place for place, group in enumerate(relations.groups) if name in group.layers],
            "followed_by": [follower for follower, leaders in relations.followers.items() if name in leaders],
            "first_filter": asdict(costs.first_filter(name)),
        }
        for name, layer in graph.layers.items()
    ]
    followers = relations.followers.items()
    facts = {
        "model": type(model).__name__,
        "inputs": [list(value.shape) for value in graph.trace.inputs],
        "params": size.params,
        "macs": size.macs,
        "filters": sum(layer.filters for layer in graph.layers.values()),
        "layers": layers,
        "followers": [{**shape_and_cost(name), "follows": list(leaders)} for name, leaders in followers],
        "skipped": [{**shape_and_cost(name), "reason": reason} for name, reason in graph.skipped.items()],
        "groups": [{"meet": list(group.meet), "layers": list(group.layers)} for group in relations.groups],
    }
    return Inspection(graph, relations, facts)


def _shape_and_cost(
    name: str, node: LayerNode | None, modules: Mapping[str, nn.Module], size: Measurement
) -> Facts:
    path = name
    if node is not None and node.stored and node.op.call is not None:
        owner = node.weight.name.rpartition(".")[0]
        path = owner if owner in modules and node.op.call.within(owner) else node.op.call.module
    module = modules.get(path)
    parameters = dict(module.named_parameters()) if module is not None else {}
    # Count the module's own parameters, including the originals of parametrized ones.
    own = (p for key, p in parameters.items() if "." not in key or key.startswith("parametrizations"))
    macs = size.by_module.get(path, 0)
    return {
        "name": name,
        "kind": type(module).__name__ if module is not None else "",
        "filters": node.filters if node is not None else None,
        "kernel": list(node.weight.shape[2:]) if node is not None else [],
        "conv_groups": node.groups if node is not None else 1,
        "map_size": list(node.x.shape[2:]) if node is not None else [],
        "params": sum(parameter.numel() for parameter in own),
        "macs": macs,
        "macs_share": 100 * macs / size.macs if size.macs else 0.0,
    }


LAYER, FOLLOWER, SKIPPED = "layer", "follower", "skipped"
INPUT, OUTPUT, GATE, JOINT, OPAQUE = "input", "output", "gate", "joint", "opaque"
_SIGNS = {Alive.ANY: ("+", ADD), Alive.ALL: ("\u00d7", MULTIPLY), Alive.QUOTIENT: ("÷", "divide")}


@dataclass(eq=False)
class Box:
    """A node in the drawing of a channel graph."""

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
    """Return the boxes of an inspected model in execution order, without unused inputs.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> [(box.kind, box.label) for box in to_boxes(inspect_model(net, torch.zeros(1, 3, 8, 8)))]
    [('input', 'input 3x8x8'), ('layer', '0'), ('skipped', '2'), ('output', 'output 4x4x4')]
    """
    builder = _BoxBuilder(seen)
    for node in seen.graph.nodes:
        builder.add(node)
    for label, value in _labelled("output", seen.graph.outputs):
        builder.box(OUTPUT, label, ("output of the network",), [value])
    read = {source for box in builder.boxes for source in box.sources}
    return [box for box in builder.boxes if box.kind != INPUT or box in read]


def _labelled(kind: str, values: Sequence[Value]) -> Iterator[tuple[str, Value]]:
    for number, value in enumerate(values, 1):
        yield f"{kind}{f' {number}' if len(values) > 1 else ''} {_size(value.shape[1:])}", value


class _BoxBuilder:
    def __init__(self, seen: Inspection) -> None:
        self.group_of = seen.relations.group_of
        self.facts = {fact["name"]: fact for key in ("layers", "followers", "skipped") for fact in seen.facts[key]}
        self.groups = seen.facts["groups"]
        self.gates = {edge.module for site in seen.graph.sites if not site.layer for edge in site.edges}
        self.read = {value for node in seen.graph.nodes for value in node.inputs} | set(seen.graph.outputs)
        self.calls: Counter[str] = Counter()
        self.boxes: list[Box] = []
        self.box_of: dict[Value, Box] = {}  # the box that each tensor comes from
        self.concatenations: dict[tuple[Box, ...], Box] = {}  # by their sources
        for label, value in _labelled("input", seen.graph.trace.inputs):
            self.box_of[value] = self.box(INPUT, label, ("input of the network",), [])

    def sources(self, values: Iterable[Value]) -> list[Box]:
        return list(dict.fromkeys(self.box_of[value] for value in values if value in self.box_of))

    def box(self, kind: str, label: str, tip: Sequence[str], read: Iterable[Value], **more: Any) -> Box:
        self.boxes.append(Box(kind, label, tuple(tip), **more, sources=self.sources(read)))
        return self.boxes[-1]

    def add(self, node: Node) -> None:
        """Add a box for an operator; if it needs none, its outputs are assigned to the box that it reads."""
        sources = self.sources(node.inputs)
        if not sources:
            return
        if isinstance(node, LayerNode):
            box = self._layer(node)
        elif isinstance(node, Norm) and node.op.call is not None and node.op.call.module in self.gates:
            name = node.op.call.module
            why = "a gate without scores: it closes removed channels, which the norm's bias would make nonzero"
            box = self.box(GATE, name, (name, why), [node.x], group=self.group_of(node.out))
        elif isinstance(node, Opaque) and len(node.inputs):
            box = self.box(OPAQUE, node.op.name.removeprefix("aten."), (node.blocks,), node.inputs)
        elif len(sources) > 1:
            box = self._joint(node, tuple(sources))
        elif isinstance(node, ChannelMove) and len(self.read.intersection(node.outputs)) > 1:
            tip = (f"split into {len(node.outputs)} at {node.op.where}",)
            box = self.box(JOINT, "split", tip, node.inputs, group=self.group_of(node.inputs[0]))
        else:
            box = sources[0]
        self.box_of |= dict.fromkeys(node.outputs, box)

    def _layer(self, node: LayerNode) -> Box:
        name = node.layer
        fact = self.facts.get(name, {"name": name, "kind": "", "macs_share": 0.0, "params": 0, "macs": 0})
        self.calls[name] += 1
        label = f"{name} (call {self.calls[name]})" if self.calls[name] > 1 else name
        size = f" · {_size(node.x.shape[2:])}" if node.x.shape[2:] else ""
        return self.box(
            LAYER if "gated_at" in fact else FOLLOWER if "follows" in fact else SKIPPED,
            label,
            [label, *describe(fact, self.groups, node)],
            [node.x, node.weight],
            note=f"{node.filters}{size} · {format_percentage(fact['macs_share'])} %",
            filters=node.filters,
            group=self.group_of(node.out),
            gate=fact.get("gate", ""),
            layer=name,
        )

    def _joint(self, node: Node, sources: tuple[Box, ...]) -> Box:
        group = self.group_of(node.outputs[0]) if node.outputs else None
        rule = node.alive_if if isinstance(node, Elementwise) else Alive.ALWAYS
        label, verb = _SIGNS.get(rule, ("*", "combine"))
        if isinstance(node, ChannelMove):
            label, verb = "concat", CONCATENATE
        tip = [f"{verb} at {node.op.where}" if node.op.where else verb]
        if group is not None:
            tip.append("shares one layout: " + ", ".join(self.groups[group]["layers"]))
        box = self.box(JOINT, label, tip, node.inputs, group=group)
        if isinstance(node, ChannelMove):
            # In a dense block, a concatenation starts with the sources of an earlier one; read that one instead.
            for length in range(len(sources) - 1, 1, -1):
                if sources[:length] in self.concatenations:
                    box.sources = [self.concatenations[sources[:length]], *sources[length:]]
                    break
            self.concatenations.setdefault(sources, box)
        return box


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
    for group in (groups[place] for place in fact.get("groups", ())):
        others = [name for name in group["layers"] if name != fact["name"]]
        lines.append(f"meets ({', '.join(group['meet'])}) {first_names(others, 8)}")
    if "reason" in fact:
        lines.append(f"left alone: {fact['reason']}")
    return lines


def _size(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))

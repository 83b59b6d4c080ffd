"""A model at a glance: what can be pruned, where each layer is gated, what it is coupled to, what is left alone.

A model and example inputs enter; an `Inspection` leaves: the channel graph, its relations, and one plain
dictionary of facts, which `sbf inspect` prints, writes and draws.  The model is not touched.
docs/inspect.md says what every key means.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from .graph.build import trace
from .graph.channels import ChannelGraph
from .graph.relations import Relations
from .graph.weighted import Contract
from .graph.worth import Appraiser
from .measuring import Measurement, measure

Facts = dict[str, Any]
_PARAMETRISED = "parametrizations"  # where torch keeps the originals of a weight that is computed from others


@dataclass(frozen=True)
class Inspection:
    """All that is known of a network before any of it is removed."""

    graph: ChannelGraph
    relations: Relations
    facts: Facts


def overview(model: nn.Module, example_inputs: Any) -> Facts:
    """Describe the prunable layers of a model, those that follow, the others with the reason, and its totals.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> seen = overview(net, torch.zeros(1, 3, 8, 8))
    >>> [(layer["name"], layer["filters"], layer["gated_at"]) for layer in seen["layers"]]
    [('0', 8, '0')]
    >>> [(layer["name"], layer["reason"]) for layer in seen["skipped"]]
    [('2', "its filters are the network's outputs")]
    """
    return inspect(model, example_inputs).facts


def inspect(model: nn.Module, example_inputs: Any, graph: ChannelGraph | None = None) -> Inspection:
    """Trace a model, unless its graph is known, measure it, and say how its layers hang together."""
    graph = graph if graph is not None else trace(model, example_inputs)
    relations = graph.relations
    cost = measure(model, example_inputs)
    describe, appraiser = _Describer(model, relations, cost), Appraiser(graph)
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
    """What all kinds of layer have in common: size and cost."""

    def __init__(self, model: nn.Module, relations: Relations, cost: Measurement) -> None:
        self.modules = dict(model.named_modules())
        self.cost = cost
        self.nodes: dict[str, Contract] = {}
        for node in relations.graph.nodes:
            if isinstance(node, Contract):
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
    """The module's own parameters, and the originals of those it computes."""
    if module is None:
        return 0
    held = dict(module.named_parameters())
    return sum(p.numel() for key, p in held.items() if "." not in key or key.startswith(_PARAMETRISED))

"""A model at a glance: what can be pruned, where each layer is gated, what is left alone and why.

A model and example inputs enter; one plain dictionary leaves, which `sbf inspect` prints.  The model is not
touched.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .graph.build import trace
from .measuring import measure


def overview(model: nn.Module, example_inputs: Any) -> dict[str, Any]:
    """Describe the prunable layers of a model, the others with the reason, and its totals.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> seen = overview(net, torch.zeros(1, 3, 8, 8))
    >>> [(layer["name"], layer["filters"], layer["gated_at"]) for layer in seen["layers"]]
    [('0', 8, '0 (map)')]
    >>> seen["skipped"]
    {'2': "its filters are the network's outputs"}
    """
    graph = trace(model, example_inputs)
    cost = measure(model, example_inputs)
    held = dict(model.named_parameters())
    layers = []
    for name, layer in graph.layers.items():
        module = layer.weight.rpartition(".")[0]
        macs = cost.by_module.get(module, 0)
        layers.append(
            {
                "name": name,
                "kind": layer.kind,
                "filters": layer.filters,
                "map_size": list(layer.map_size),
                "params": sum(t.numel() for key, t in held.items() if key.rpartition(".")[0] == module),
                "macs": macs,
                "macs_share": 100 * macs / cost.macs if cost.macs else 0.0,
                "gated_at": f"{layer.site.module} ({layer.site.kind})",
            }
        )
    return {
        "model": type(model).__name__,
        "params": cost.params,
        "macs": cost.macs,
        "filters": sum(layer.filters for layer in graph.layers.values()),
        "layers": layers,
        "skipped": dict(graph.skipped),
    }

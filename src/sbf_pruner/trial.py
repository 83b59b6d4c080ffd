"""Cuts that are tried before anything is trained, and thrown away.

A model, inputs and its channel graph enter.  What surgery would refuse is refused now, not when hours of training
are over; where only the loss of whole layers is too much for the model's own code, the reason leaves.  What the
code insists on in a network that lost a little is noted in the graph, for what is counted there.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .budget.aim import Aim
from .errors import PruningError
from .graph.channels import ChannelGraph
from .plan import Plan
from .surgery import extract, insisted


def try_cuts(model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> str | None:
    """Cut a filter off every layer, which must work; then all that can go: why not, if that fails.

    >>> import torch
    >>> from .graph.build import trace
    >>> net, images = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)), torch.rand(1, 3, 5, 5)
    >>> try_cuts(net, images, trace(net, images)) is None
    True
    """
    note_insisted(model, example_inputs, graph)
    least = Aim(graph).least()
    try:
        extract(model, example_inputs, Plan.from_masks(least), graph)
    except PruningError as error:
        return str(error)
    return None


def note_insisted(model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> None:
    """Cut a filter off every layer and write down where the model's own code keeps its channels all the same."""
    layers = [(name, layer.filters) for name, layer in graph.layers.items() if layer.filters > 1]
    # Not the same filter everywhere: layers that meet in an addition are to need different channels.
    little = {name: tuple(f for f in range(size) if f != i % size) for i, (name, size) in enumerate(layers)}
    graph.pinned = insisted(model, example_inputs, Plan(little), graph)

"""Cuts that are tried, and thrown away: before anything is trained, and where a budget was landed on.

A model, inputs and its channel graph enter.  What surgery would refuse is refused now, not when hours of training
are over; where only the loss of whole layers is too much for the model's own code, the reason leaves.  What the
code insists on is noted in the graph, for what is counted there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from .budget.aim import Aim
from .budget.landing import Landing
from .errors import PruningError
from .graph.build import trace
from .graph.channels import ChannelGraph, Pinned
from .plan import Plan
from .surgery import extract, insisted

_log = logging.getLogger("sbf_pruner")


def prunable_graph(
    model: nn.Module, example_inputs: Any, graph: ChannelGraph | None, ignore: Sequence[str], *, sized: bool
) -> ChannelGraph:
    """The graph of a model that has something to prune, as it was traced before or as it is now.

    For a pruner with a size to come to (`sized`), what is traced now is noted with what the code insists on.
    """
    found = trace(model, example_inputs, ignore=ignore) if graph is None else graph
    if graph is not None and ignore:
        raise PruningError("ignore is for tracing, and graph was traced before; give it to trace() instead")
    if not found.layers:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(found.unscored.items())[:3])
        raise PruningError(f"no layer of the model can be pruned ({reasons})")
    if graph is None and sized:
        with suppress(PruningError):  # which says no more than that nothing is known
            note_insisted(model, example_inputs, found)
    return found


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
    """Cut filters off every layer and write down where the model's own code keeps its channels all the same.

    What it insists on may depend on which filters go: a slice up to the fourth channel is another one only without
    one of the first four.  So one goes, then the first, the last, and every other one.
    """
    layers = [(name, layer.filters) for name, layer in graph.layers.items() if layer.filters > 1]
    # Not the same filter everywhere: layers that meet in an addition are to need different channels.
    some = {name: [i % size] for i, (name, size) in enumerate(layers)}
    first, last = {name: [0] for name, _ in layers}, {name: [size - 1] for name, size in layers}
    others = {name: list(range(i % 2, size, 2)) for i, (name, size) in enumerate(layers)}
    for gone in (some, first, last, others):
        little = Plan({name: tuple(f for f in range(size) if f not in gone[name]) for name, size in layers})
        if graph.connected(little.masks(graph)):
            _note(insisted(model, example_inputs, little, graph), graph)


def landed(choose: Callable[[], Landing], model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> Landing:
    """What is chosen to fit into a budget, and does when it is cut.

    If the model's own code insists on more than was reckoned with, the choice is made again.
    """
    landing = choose()
    try:
        while _note(insisted(model, example_inputs, Plan.from_masks(landing.masks), graph), graph):
            landing = choose()
    except PruningError as error:
        _log.warning("what is left when the network is cut may be more than was asked for: %s", error)
    return landing


def _note(found: Pinned, graph: ChannelGraph) -> bool:
    """Write down what the model's own code insists on; whether that is more than was known."""
    held = graph.pinned
    more = not (found.positions <= held.positions and found.whole <= held.whole)
    graph.pinned = Pinned(held.positions | found.positions, held.whole | found.whole)
    return more

"""Which channels of every tensor are physically there in the extracted network.

A channel is there if it is alive and needed, or if an operator that meets it could not run without it: the
two sides of an addition share one layout, the parts of a view are whole boxes, a chunk's halves are equal.
Starting from what must be there, layouts grow along the graph until every operator is content.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np

from .channel_graph import ChannelGraph
from .nodes import Boundary, Flow, Layout, Node
from .records import Call, Value


def solve(graph: ChannelGraph, flow: Flow, pinned: Collection[int] = (), whole: Collection[Call] = ()) -> Layout:
    """The smallest layout in which every operator can run.

    Operators at `pinned` positions get everything; so do the module calls named `whole`: what goes in, and the
    operators that the module runs itself.
    """
    layout = Layout(graph.grids)
    for value in graph.grids:
        needed = flow.needed.get(value)
        if needed is None:
            layout.start_empty(value)
        else:
            layout.start(value, needed & flow.alive[value] if value in flow.alive else needed)
    for value in graph.outputs:
        layout.fill(value)
    if pinned or whole:
        _fill_pinned(graph, layout, pinned, whole)
    graph.ties.grow(layout)
    for value in graph.grids:  # only now: a place held too early would stay where ties bring other channels
        if value.kind == "result":
            _hold_place(layout, value)
    graph.ties.grow(layout, begun=True)
    return layout


def _fill_pinned(graph: ChannelGraph, layout: Layout, pinned: Collection[int], whole: Collection[Call]) -> None:
    """All channels are there where the model's own code insists on it."""
    calls = {node.op.call for node in graph.nodes if node.op.position in pinned} - {None}
    for node in graph.nodes:
        # With an operator the edges of its module get everything: what it sees may depend on what is outside.
        edge = isinstance(node, Boundary) and node.op.call in calls
        if node.op.position in pinned or edge or (node.op.position >= 0 and node.op.call in whole):
            for value in _inside(node):
                layout.fill(value)
    for call in whole:
        for value in graph.entries[call]:
            layout.fill(value)


def _inside(node: Node) -> tuple[Value, ...]:
    """The tensors of an operator; of an edge that is a wall only the inner one."""
    if isinstance(node, Boundary) and node.walled:
        return (node.out,) if node.side == "in" else (node.x,)
    return (*node.inputs, *node.outputs)


def vanished(graph: ChannelGraph, flow: Flow) -> set[str]:
    """The modules of which nothing is wanted any more, in any of their calls."""
    wanted: dict[str, bool] = defaultdict(bool)
    for node in graph.nodes:
        if isinstance(node, Boundary) and node.side == "out":
            mask = node.wanted(flow)
            wanted[node.module] |= mask is not None and bool(mask.any())
    return {module for module, is_wanted in wanted.items() if not is_wanted}


def _hold_place(layout: Layout, value: Value) -> None:
    """Where all channels are gone one stays, as zeros: no tensor ever has width zero."""
    for dim, mask in enumerate(layout.masks[value]):
        if mask is not None and not np.count_nonzero(mask):
            layout.add(value, dim, np.arange(len(mask)) == 0)

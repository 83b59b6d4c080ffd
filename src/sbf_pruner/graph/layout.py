"""Which channels of every tensor are physically there in the extracted network.

A channel is there if it is alive and needed, or if an operator that meets it could not run without it: the
two sides of an addition share one layout, the parts of a view are whole boxes, a chunk's halves are equal.
Starting from what must be there, layouts grow along the graph until every operator is content.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np

from .boundary import Boundary
from .channels import ChannelGraph
from .masks import Flow, Layout
from .nodes import Node
from .records import ZEROS, Call, Value


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
    shared = _calls_of_one_module(graph)
    _grow(graph, layout, shared)
    for value in graph.grids:  # only now: a place held too early would stay where ties bring other channels
        if value.kind == "result":
            _hold_place(layout, value)
    _grow(graph, layout, shared)
    return layout


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


def _grow(graph: ChannelGraph, layout: Layout, shared: list[list[tuple[Value, int]]]) -> None:
    """Let every operator add what it must have, until none adds anything."""
    layout.changed = True
    while layout.changed:
        layout.changed = False
        for node in (*graph.nodes, *reversed(graph.nodes)):
            node.tie(layout)
        for ends in shared:
            layout.tie(ends)


def _hold_place(layout: Layout, value: Value) -> None:
    """Where all channels are gone one stays, as zeros: no tensor ever has width zero."""
    for dim, mask in enumerate(layout.masks[value]):
        if mask is not None and not mask.any():
            layout.add(value, dim, np.arange(len(mask)) == 0)


def _calls_of_one_module(graph: ChannelGraph) -> list[list[tuple[Value, int]]]:
    """What goes into (and comes out of) one module in its several calls, and must have one layout."""
    ends: dict[tuple[str, str], list[tuple[Value, int]]] = defaultdict(list)
    for node in graph.nodes:
        if isinstance(node, Boundary):
            ends[node.module, f"{node.side}, before"].append((node.x, node.dim))
            ends[node.module, f"{node.side}, after"].append((node.out, node.dim))
        elif node.op.name == ZEROS and node.op.call is not None:
            out = node.outputs[0]
            ends[node.op.call.module, "zeros"].append((out, int(np.argmax(graph.grids[out]))))
    return [e for e in ends.values() if len(e) > 1]

"""Solve for the layout: which channels of every tensor exist in the extracted network.

A channel exists if it is alive and needed, or if an operator could not run without it: both operands of an
addition share one layout, operand and result of a view are boxes, the halves of a chunk are equally large. Layouts
start with the channels that must exist and grow along the graph until every operator can run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np

from .channel_graph import ChannelGraph
from .nodes import Boundary, Flow, Layout, Node
from .records import Call, Value


def solve_layout(
    graph: ChannelGraph, flow: Flow, pinned: Collection[int] = (), whole: Collection[Call] = ()
) -> Layout:
    """Return the smallest layout in which every operator can run.

    Operators at the positions `pinned` keep all channels. So do the module calls in `whole`: their inputs, and the
    operators that the module runs itself rather than in its children.
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
    for value in graph.grids:  # only now, or it would remain beside channels that constraints add
        if value.kind == "result":
            _add_placeholder(layout, value)
    graph.ties.grow(layout, begun=True)
    return layout


def _fill_pinned(graph: ChannelGraph, layout: Layout, pinned: Collection[int], whole: Collection[Call]) -> None:
    """Keep all channels where the model's own code fixes sizes."""
    calls = {node.op.call for node in graph.nodes if node.op.position in pinned} - {None}
    for node in graph.nodes:
        # The edges of a pinned operator's module are filled too: what it gets may depend on channels outside.
        edge = isinstance(node, Boundary) and node.op.call in calls
        if node.op.position in pinned or edge or (node.op.position >= 0 and node.op.call in whole):
            for value in _inside(node):
                layout.fill(value)
    for call in whole:
        for value in graph.entries[call]:
            layout.fill(value)


def _inside(node: Node) -> tuple[Value, ...]:
    """Return the tensors of a node; for a walled edge of a module only the one inside."""
    if isinstance(node, Boundary) and node.walled:
        return (node.out,) if node.side == "in" else (node.x,)
    return (*node.inputs, *node.outputs)


def vanished(graph: ChannelGraph, flow: Flow) -> set[str]:
    """Return the modules whose outputs are dead or not needed in all of their calls."""
    wanted: dict[str, bool] = defaultdict(bool)
    for node in graph.nodes:
        if isinstance(node, Boundary) and node.side == "out":
            mask = node.wanted(flow)
            wanted[node.module] |= mask is not None and bool(mask.any())
    return {module for module, is_wanted in wanted.items() if not is_wanted}


def _add_placeholder(layout: Layout, value: Value) -> None:
    """Keep one channel, as zeros, where all are gone, because no tensor may have width zero."""
    for dim, mask in enumerate(layout.masks[value]):
        if mask is not None and not np.count_nonzero(mask):
            layout.add(value, dim, np.arange(len(mask)) == 0)

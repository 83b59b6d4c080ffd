"""What ties the layouts of tensors to each other, and how they grow until every tie holds.

The nodes of a graph enter; a layout that is grown leaves content each of them.  Nodes are asked in turn, forth and
back, because what a convolution in groups adds depends on what is there by then; but one whose tensors have not
grown since it was asked has nothing to add and is passed over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from .boundary import Boundary
from .masks import End, Grids, Layout
from .nodes import Node
from .records import ZEROS, Value


class Ties:
    """All ties of one graph: those of its nodes, and one layout for the several calls of one module."""

    def __init__(self, nodes: Sequence[Node], grids: Grids) -> None:
        nodes, shared = [node for node in nodes if node.tied], _calls_of_one_module(nodes, grids)
        self._all: list[Callable[[Layout], None]] = [node.tie for node in nodes]
        self._all += [partial(Layout.tie, ends=ends) for ends in shared]
        forth = range(len(nodes))
        self._turns = (*forth, *reversed(forth), *range(len(nodes), len(self._all)))
        self._at: dict[Value, set[int]] = defaultdict(set)
        tied = [*(node.tied for node in nodes), *([value for value, _ in ends] for ends in shared)]
        for place, values in enumerate(tied):
            for value in values:
                self._at[value].add(place)

    def grow(self, layout: Layout, begun: bool = False) -> None:
        """Let every tie add what it must have, until none adds anything; all hold already in one that has `begun`,
        but for what has changed since."""
        waiting = set() if begun else set(self._turns)
        waiting.update(*map(self._at.__getitem__, layout.changed))
        while waiting:
            for place in self._turns:
                if place in waiting:
                    waiting.remove(place)
                    layout.changed.clear()
                    self._all[place](layout)
                    waiting.update(*map(self._at.__getitem__, layout.changed))
        layout.changed.clear()


def _calls_of_one_module(nodes: Sequence[Node], grids: Grids) -> list[list[End]]:
    """What goes into (and comes out of) one module in its several calls, and must have one layout."""
    ends: dict[tuple[str, str], list[End]] = defaultdict(list)
    for node in nodes:
        if isinstance(node, Boundary):
            ends[node.module, f"{node.side}, before"].append((node.x, node.dim))
            ends[node.module, f"{node.side}, after"].append((node.out, node.dim))
        elif node.op.name == ZEROS and node.op.call is not None:
            out = node.outputs[0]
            ends[node.op.call.module, "zeros"].append((out, int(np.argmax(grids[out]))))
    return [e for e in ends.values() if len(e) > 1]

"""The edges of modules, as nodes of the channel graph: where gates stand and remaps are put in.

Masks of what is alive enter on one side and leave on the other, without what a gate holds back.  Where an edge is
free, its two sides may be laid out differently, because surgery can put a remap between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .masks import Flow, Grid, Layout, Mask, along, shrink, spread
from .nodes import Node
from .records import Value


@dataclass
class Boundary(Node):
    """The edge of a module: a gate may stand here, and a remap be inserted, so layouts are free.

    `layer` names the layer whose filters are gated here.  `labels` is set for a remap that is already in
    the network.
    """

    module: str = field(kw_only=True)
    side: str = field(kw_only=True)  # "in", "out", or "remap"
    layer: str = ""
    labels: NDArray[np.int64] | None = None
    dim: int = 1
    free: bool = True  # False: nothing can be inserted here, both sides have one layout
    walled: bool = False  # sizes that the module's own code fixes bind only its inside
    lasting: bool = False  # every call leaves a trace in the module's statistics, so none is ever useless

    def line(self, value: Value) -> Grid:
        """The grid of a tensor here if its channels differ along the edge's dimension alone."""
        return along(self.dim % len(value.shape), value.shape)

    @property
    def x(self) -> Value:
        return self.op.inputs[0]

    @property
    def out(self) -> Value:
        return self.outputs[0]

    def push(self, flow: Flow) -> None:
        alive = flow.alive[self.x]
        if self.labels is not None:
            alive = np.append(shrink(alive, self.line(self.x)), False)[self.labels]
        flow.alive[self.out] = spread(alive, self.grids[self.out])

    def wanted(self, flow: Flow) -> Mask | None:
        return flow.alive[self.out] if self.lasting else super().wanted(flow)

    def gate(self, flow: Flow, keep: Mask) -> None:
        """Close the gates of the filters that are not kept."""
        flow.alive[self.out] = flow.alive[self.out] & keep.reshape(self.grids[self.out])

    def pull(self, flow: Flow) -> None:
        wanted = self.wanted(flow)
        if wanted is None:
            return
        if self.labels is not None:
            flat = np.zeros(self.x.shape[self.dim] + 1, bool)
            flat[self.labels[wanted]] = True
            wanted = flat[:-1].reshape(self.line(self.x))
        flow.need(self.x, wanted, self.grids[self.x])

    @property
    def tied(self) -> Sequence[Value]:
        lined = all(math.prod(self.grids[v]) == self.grids[v][self.dim] for v in (self.x, self.out))
        return () if self.free and lined else super().tied

    def tie(self, layout: Layout) -> None:
        if not self.free:  # the same tensor twice
            for dim in range(len(self.x.shape)):
                layout.tie([(self.x, dim), (self.out, dim)])
            return
        for value in (self.x, self.out):
            layout.fill_other(value, self.dim % len(value.shape))

    def source(self, layout: Layout, alive: Mask) -> list[int]:
        """For every channel there after the edge, its place before it, or -1 where it is zero."""
        place = {c: i for i, c in enumerate(layout.indices(self.x, self.dim))}
        size = self.out.shape[self.dim]
        origin = np.arange(size) if self.labels is None else np.broadcast_to(self.labels.reshape(-1), size)
        return [place.get(int(origin[c]), -1) if alive[c] else -1 for c in layout.indices(self.out, self.dim)]


def common_dim(edges: Sequence[Boundary]) -> int | None:
    """The dimension of the channels in all calls of a module, from the first one or, below zero, from the last."""
    if len({edge.dim for edge in edges}) == 1:
        return edges[0].dim
    from_the_end = {edge.dim - len(edge.out.shape) for edge in edges}
    return from_the_end.pop() if len(from_the_end) == 1 else None

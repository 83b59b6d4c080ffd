"""Which channels of one residual stream arrive in another: what coupled layers find there anyway.

Groups of layers that each write into one stream enter; links leave.  Where a shortcut pads the channels of one
stage for the next, a channel that the first stage keeps is in the next one's stream whether its layers write
it or not; layers that choose it make the stream no wider, layers that choose another one do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..graph.channels import ChannelGraph
from ..graph.masks import Mask, shrink
from ..graph.nodes import Boundary, Elementwise, Node
from ..graph.trace import Value

Groups = Sequence[Sequence[str]]


class Link(NamedTuple):
    """For every channel of the stream of one group, the channel of another group that arrives there, or -1."""

    source: int
    target: int
    places: tuple[int, ...]


def links(graph: ChannelGraph, groups: Groups) -> tuple[Link, ...]:
    """How the streams of the groups feed each other, in the order of the groups."""
    streams = [_stream(graph, group) for group in groups]
    found = []
    for source, group in enumerate(groups):
        # Every filter of the group has a number, and what arrives elsewhere tells it, one bit after the other.
        numbers = np.arange(1, graph.layers[group[0]].filters + 1)
        bits = [numbers >> k & 1 == 1 for k in range(int(numbers[-1]).bit_length())]
        arrived = [_arriving(graph, dict.fromkeys(group, bit), streams) for bit in bits]
        for target, stream in enumerate(streams):
            if target != source and stream is not None:
                read = sum(seen[target].astype(int) << k for k, seen in enumerate(arrived))
                if read.any():
                    found.append(Link(source, target, tuple((read - 1).tolist())))
    return tuple(sorted(found, key=lambda link: link.target))


def _arriving(graph: ChannelGraph, given: dict[str, Mask], streams: Sequence[Boundary | None]) -> dict[int, Mask]:
    """The channels of each stream that come from the given filters."""
    alive = graph.carried(given).alive
    sums = {number: _sum(graph, edge) for number, edge in enumerate(streams) if edge is not None}
    return {
        number: shrink(alive[value], streams[number].line(value)).reshape(-1)  # type: ignore[union-attr]
        for number, value in sums.items()
        if value is not None
    }


def _stream(graph: ChannelGraph, group: Sequence[str]) -> Boundary | None:
    """The edge of a layer of the group whose channels are added to something."""
    edges = (graph.layers[name].site.edges[0] for name in group)
    return next((edge for edge in edges if _sum(graph, edge) is not None), None)


def _sum(graph: ChannelGraph, edge: Boundary) -> Value | None:
    """What the channels at an edge are added to give."""
    value: Value = edge.out
    while True:
        readers: list[Node] = [node for node in graph.nodes if value in node.inputs]
        if len(readers) != 1 or not isinstance(readers[0], Elementwise):
            return None
        if len(readers[0].inputs) > 1:
            return readers[0].outputs[0]
        value = readers[0].outputs[0]

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
from ..graph.masks import Mask, along, shrink
from ..graph.nodes import Elementwise
from ..graph.records import Value

Groups = Sequence[Sequence[str]]


class Link(NamedTuple):
    """For every channel of the stream of one group, the channel of another group that arrives there, or -1."""

    source: int
    target: int
    places: tuple[int, ...]


def links(graph: ChannelGraph, groups: Groups) -> tuple[Link, ...]:
    """How the streams of the groups feed each other, in the order of the groups."""
    sums = {number: found for number, group in enumerate(groups) if (found := _sum(graph, group)) is not None}
    arriving = []
    for source, group in enumerate(groups):
        # Every filter of the group has a number, and what arrives elsewhere tells it, one bit after the other.
        numbers = np.arange(1, graph.layers[group[0]].filters + 1)
        read = {target: np.zeros(value.shape[1], int) for target, value in sums.items() if target != source}
        for bit in range(int(numbers[-1]).bit_length()):
            alive = graph.carried(dict.fromkeys(group, numbers >> bit & 1 == 1)).alive
            for target in read:
                read[target] |= _by_channel(alive[sums[target]]).astype(int) << bit
        arriving += [Link(source, target, tuple((n - 1).tolist())) for target, n in read.items() if n.any()]
    return tuple(sorted(arriving, key=lambda link: link.target))


def _by_channel(alive: Mask) -> Mask:
    return shrink(alive, along(1, alive.shape)).reshape(-1)


def _sum(graph: ChannelGraph, group: Sequence[str]) -> Value | None:
    """What comes out where the channels of a layer of the group are added to something."""
    for name in group:
        value: Value = graph.layers[name].site.edges[0].out
        while True:
            readers = [node for node in graph.nodes if value in node.inputs]
            if len(readers) != 1 or not isinstance(readers[0], Elementwise):
                break
            value = readers[0].outputs[0]
            if len(readers[0].inputs) > 1:
                return value
    return None

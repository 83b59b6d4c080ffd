"""Whose filter is it that a later layer reads?

A channel graph enters; for every convolution and linear layer the filters of other layers that its input channels
are leave, and what is said of channels is told of them.  A channel that is made of several filters of one layer
counts as that of none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..graph.channels import ChannelGraph
from ..graph.masks import Mask, along, shrink
from ..graph.weighted import Contract

NOBODY = -1


def readers(graph: ChannelGraph) -> list[Contract]:
    """The layers that add channels up; a depthwise one passes each of them on by itself."""
    return [node for node in graph.nodes if isinstance(node, Contract) and not node.depthwise]


def read_filters(graph: ChannelGraph, name: str) -> Iterator[tuple[Contract, NDArray[np.int64]]]:
    """Every reader of a layer, and for each of its input channels the number of the filter that it is.

    Filters have numbers, and numbers have digits: those whose digit is 1 are sent through the graph, then those
    whose digit is 0, and where only one of both arrives, that is the digit of what arrives.

    >>> import torch
    >>> from torch import nn
    >>> from ..graph.build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.ChannelShuffle(2), nn.Conv2d(4, 2, 1))
    >>> [numbers for _, numbers in read_filters(trace(net, torch.zeros(1, 3, 4, 4)), "0")]
    [array([0, 2, 1, 3])]
    """
    filters = np.arange(graph.layers[name].filters)
    digits = range(max(int(filters[-1]).bit_length(), 1))
    sent = [[_arrived(graph, name, (filters >> digit & 1) == value) for value in (0, 1)] for digit in digits]
    for place, node in enumerate(readers(graph)):
        numbers = np.zeros(node.x.shape[1], np.int64)
        told = np.ones(node.x.shape[1], bool)
        for digit, (zero, one) in enumerate(sent):
            told &= zero[place] != one[place]
            numbers |= one[place].astype(np.int64) << digit
        if told.any():
            yield node, np.where(told, numbers, NOBODY)


def read_values(
    graph: ChannelGraph, values: Mapping[str, NDArray[np.floating]]
) -> dict[str, np.ma.MaskedArray[Any, np.dtype[np.floating]]]:
    """What each reader's input channels are worth, told of the filters that they are: readers by filters.

    A filter that a reader gets several times counts as the best of them, and one that it does not get is masked.
    """
    found = {}
    for name, layer in graph.layers.items():
        rows = [np.full(layer.filters, -np.inf)]  # also where nobody reads it
        for node, numbers in read_filters(graph, name):
            if node.layer in values:
                mine = numbers != NOBODY
                rows.append(np.full(layer.filters, -np.inf))
                with np.errstate(invalid="ignore"):  # what is not finite is told by whoever asked
                    np.maximum.at(rows[-1], numbers[mine], values[node.layer][mine])
        found[name] = np.ma.masked_equal(np.stack(rows), -np.inf)
    return found


def _arrived(graph: ChannelGraph, name: str, chosen: Mask) -> list[Mask]:
    """Which input channels of every reader some filters of a layer get to."""
    flow = graph.carried({name: chosen})
    return [shrink(flow.alive[node.x], along(1, node.x.shape)).reshape(-1) for node in readers(graph)]

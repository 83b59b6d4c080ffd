"""From a method to scores: what it says of every filter, comparable across all layers of a network.

A method and a `Subject` enter; a score for each filter leaves, the higher the better.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from . import Method
from .subject import Batch, Scores, Subject


def shown(batches: Iterable[Batch], images: int) -> list[Batch]:
    """So many images, from the first batches.

    >>> import torch
    >>> [len(labels) for _, labels in shown([(torch.zeros(4, 1), torch.zeros(4))] * 3, 6)]
    [4, 2]
    """
    found: list[tuple[Tensor, Tensor]] = []
    for inputs, labels in batches if images else ():
        found.append((inputs[:images], labels[:images]))
        images -= len(labels)
        if images <= 0:
            break
    return found


def ranked(method: Method, subject: Subject) -> Scores:
    """The scores of a method, as it compares them.

    Where a method compares within layers, a score becomes the filter's place among those of its layer, from just
    above 0 to 1: whatever is below some level is then the same part of every layer.

    >>> import torch
    >>> from torch import nn
    >>> from . import METHODS
    >>> from ..graph.build import trace
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 2, 1))
    >>> _ = nn.init.constant_(net[0].weight, 1.0)
    >>> net[0].weight.data[2] = 0.5
    >>> subject = Subject(net.eval(), trace(net, torch.zeros(1, 1, 4, 4)), [])
    >>> ranked(METHODS["l1"], subject)["0"].tolist()
    [1.0, 0.75, 0.25, 0.5]
    """
    file, _, name = method.judge.partition(".")
    judge: Callable[[Subject], Scores] = getattr(importlib.import_module(f".{file}", __package__), name)
    judged = judge(subject)
    nothing = {name: np.zeros(layer.filters) for name, layer in subject.graph.layers.items()}
    scores = {name: judged.get(name, none) for name, none in nothing.items()}  # not called: worth nothing
    return scores if method.across else {name: _places(values) for name, values in scores.items()}


def _places(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Of filters that are worth the same, the first is the better one."""
    places = np.empty(len(values))
    places[np.argsort(-values, kind="stable")] = np.arange(len(values), 0, -1) / len(values)
    return places

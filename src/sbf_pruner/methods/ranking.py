"""From a method to scores: what it says of every filter, comparable across all layers of a network.

A method and a `Subject` enter; a score for each filter leaves, the higher the better.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..attached import without_attached
from ..copies import real_copy
from ..errors import PruningError, nearest
from ..pruner import Pruner
from . import METHODS
from .subject import Batch, Scores, Subject

REHEARSED = 2  # images


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


def ranked(name: str, subject: Subject) -> Scores:
    """The scores of a method, as it compares them; a PruningError where it cannot judge this network.

    Where a method compares within layers, a score becomes the filter's place among those of its layer, from just
    above 0 to 1: whatever is below some level is then the same part of every layer.

    >>> import torch
    >>> from torch import nn
    >>> from ..graph.build import trace
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 2, 1))
    >>> _ = nn.init.constant_(net[0].weight, 1.0)
    >>> net[0].weight.data[2] = 0.5
    >>> ranked("l1", Subject(net.eval(), trace(net, torch.zeros(1, 1, 4, 4)), []))["0"].tolist()
    [1.0, 0.75, 0.25, 0.5]
    """
    nothing = {layer: np.zeros(held.filters) for layer, held in subject.graph.layers.items()}
    scores = nothing | _judged(name, subject)  # not called: worth nothing
    for layer, values in scores.items():
        if not np.isfinite(values).all():
            raise PruningError(
                f"method {name}: what it makes of {layer} is not finite; look whether the network's weights and "
                "outputs still are, or choose another method"
            )
    return scores if METHODS[name].across else {layer: _places(values) for layer, values in scores.items()}


def rank_by(pruner: Pruner, name: str, batches: Iterable[Batch] = (), seed: int = 0) -> None:
    """Let a method judge the filters of a model in a loop of your own, and set its gates within the budget.

    `batches` are pairs of inputs and labels, as a loader gives them, where the model is; methods that judge by
    weights alone need none.

    >>> import torch
    >>> from torch import nn
    >>> from ..budget.targets import Budget
    >>> head = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), *head)
    >>> pruner = Pruner(net, torch.rand(1, 1, 8, 8), budget=Budget(macs=0.5))
    >>> rank_by(pruner, "taylor", [(torch.rand(16, 1, 8, 8), torch.arange(16) % 2)])
    >>> pruner.plan().widths()
    {'0': 2}
    """
    known = [method for method in METHODS if not METHODS[method].learned]
    if name not in known:
        raise PruningError(f"no method that ranks filters is called {name!r}; {nearest(name, known)}")
    images = METHODS[name].images
    seen = shown(batches, images)
    if images and not seen:
        raise PruningError(f"method {name} looks at images; give batches of inputs and labels")
    network = without_attached(real_copy(pruner.model)).eval().requires_grad_(False)
    pruner.rank(ranked(name, Subject(network, pruner.graph, seen, seed, pruner.aim)))


def rehearse(name: str, subject: Subject) -> None:
    """Raise the PruningError now that a method would raise of this network when its time has come."""
    if METHODS[name].learned:
        return
    ranked(name, subject)
    if METHODS[name].soft:
        with _named(name):
            subject.check_stored()


def _judged(name: str, subject: Subject) -> Scores:
    file, _, function = METHODS[name].judge.partition(".")
    judge: Callable[[Subject], Scores] = getattr(importlib.import_module(f".{file}", __package__), function)
    with _named(name):
        return judge(subject)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Whatever goes wrong while it is open becomes a sentence that names the method."""
    try:
        yield
    except PruningError as error:
        raise PruningError(f"method {name}: {error}; choose another method") from error
    except Exception as error:  # a user's network may fail in any way
        cause = " ".join(str(error).split())
        raise PruningError(
            f"method {name} cannot judge this network ({type(error).__name__}: {cause}); give it pairs of inputs "
            "and labels as in training, or choose a method that needs weights alone, such as l1"
        ) from error


def _places(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Of filters that are worth the same, the first is the better one."""
    places = np.empty(len(values))
    places[np.argsort(-values, kind="stable")] = np.arange(len(values), 0, -1) / len(values)
    return places

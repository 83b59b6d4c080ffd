"""From a method to scores: what it says of every filter, comparable across all layers of a network.

A method and a `Subject` enter; a score for each filter leaves, the higher the better.

Sub-networks on trial: the size they are held to, and how well one does before any of its weights are trained.

A `Subject` enters; a copy of its network under gates leaves, and for any choice of filters its accuracy.  What
holds: the subject's own network is not touched.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ..budget.controller import Aim
from ..budget.targets import Budget, Limits
from ..errors import PruningError, nearest
from ..graph.nodes import Mask
from ..pruner import Pruner
from ..scores.gates import Gates
from ..scores.norm_statistics import fresh_statistics
from ..utils.user_model import real_copy, without_attached
from . import METHODS
from .subject import Batch, Scores, Subject, logits

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


_UNASKED = 0.5  # of the MACs, where nobody says what is to be left


def aim_of(subject: Subject) -> Aim:
    """What is asked for; else half of the MACs, or the least that can be left where that is more."""
    if subject.aim is not None and subject.aim.limits is not None:
        return subject.aim
    aim = Aim(subject.graph, Budget(macs=_UNASKED), refuse=False)
    if aim.limits is not None and not aim.reachable:
        aim.limits = Limits({"macs": aim.count(aim.smallest)["macs"]}, aim.limits.whole)
    return aim


class Masked:
    """A copy of a network, of which any part can be gated off."""

    def __init__(self, subject: Subject) -> None:
        self._graph = subject.graph
        self._model = real_copy(subject.model).eval().requires_grad_(False)
        filters = {name: layer.filters for name, layer in self._graph.layers.items()}
        self.gates = Gates(self._model, self._graph.sites, filters)
        # Of one image alone a norm may not be able to take its statistics.
        self.batches = [batch for batch in subject.batches if len(batch[1]) > 1] or list(subject.batches)

    def accuracy(self, keep: Mapping[str, Mask]) -> float:
        """The part of all images that a choice of filters gets right.

        Norms take their statistics from these images: with those of the whole network, and no weight trained, one
        sub-network is hardly better than another, and none than chance.
        """
        _, flow = self._graph.settled(keep)
        self.gates.set_hard([site.open(flow) for site in self._graph.sites])
        self.gates.mode = "hard"
        with fresh_statistics(self._model) as undo:
            right = sum(float(_hits(self._outputs(batch), batch[1]).sum()) for batch in self.batches)
            undo()
        return right / sum(labels.numel() for _, labels in self.batches)

    def felt(self, gates: Tensor, batch: Batch) -> tuple[float, Tensor]:
        """The accuracy on a batch with these gates, one for each filter, and the slope of the loss by them."""
        felt = self.gates.soft.copy_(gates).requires_grad_()
        self.gates.mode = "soft"
        outputs = self._outputs(batch)
        loss = F.cross_entropy(outputs, batch[1])
        # In what does not depend on any filter there is no slope.
        slope = torch.autograd.grad(loss, felt, allow_unused=True)[0] if loss.requires_grad else None
        felt.requires_grad_(False)
        accuracy = float(_hits(outputs, batch[1]).double().mean())
        return accuracy, torch.zeros_like(gates) if slope is None else slope.to(gates)

    def _outputs(self, batch: Batch) -> Tensor:
        found = logits(self._model, batch[0])
        if not bool(found.isfinite().all()):
            raise PruningError("what the network gives is not finite")
        return found


def _hits(outputs: Tensor, labels: Tensor) -> Tensor:
    """Where the largest of all logits is that of the label.

    >>> _hits(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([ True, False])
    """
    return outputs.argmax(1) == labels

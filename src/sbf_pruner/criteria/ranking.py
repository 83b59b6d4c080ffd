"""Score filters by any criterion, and evaluate sub-networks before any of their weights are trained.

Scores are comparable across all layers of a network; higher is better. `SubnetEvaluator` evaluates sub-networks in
a copy, so the subject's own network does not change.
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

from ..budget.controller import Selector
from ..budget.targets import Budget, Limits
from ..errors import PruningError, suggestion
from ..graph.nodes import Mask
from ..pruner import Pruner
from ..scores.freezing import fresh_statistics
from ..scores.gates import Gates
from ..utils.user_model import real_copy, remove_pruner_hooks
from . import METHODS
from .subject import Batch, Scores, Subject, logits

REHEARSED = 2  # number of images for `check_method`


def first_images(batches: Iterable[Batch], images: int) -> list[Batch]:
    """Return the first `images` images of the batches.

    >>> import torch
    >>> [len(labels) for _, labels in first_images([(torch.zeros(4, 1), torch.zeros(4))] * 3, 6)]
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
    """Return the scores of a method; raise a PruningError if it cannot score this network.

    If the method compares within layers, a score becomes the filter's rank in its layer, scaled to (0, 1]: any
    threshold then removes the same fraction of every layer.

    >>> import torch
    >>> from torch import nn
    >>> from ..graph.build import trace
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 2, 1))
    >>> _ = nn.init.constant_(net[0].weight, 1.0)
    >>> net[0].weight.data[2] = 0.5
    >>> ranked("l1", Subject(net.eval(), trace(net, torch.zeros(1, 1, 4, 4)), []))["0"].tolist()
    [1.0, 0.75, 0.25, 0.5]
    """
    file, _, function = METHODS[name].judge.partition(".")
    score: Callable[[Subject], Scores] = getattr(importlib.import_module(f".{file}", __package__), function)
    scores: Scores = {layer: np.zeros(own.filters) for layer, own in subject.graph.layers.items()}
    with _named(name):
        scores |= score(subject)  # A layer that is not called scores 0.
    for layer, values in scores.items():
        if not np.isfinite(values).all():
            raise PruningError(
                f"method {name}: scores of {layer} are NaN or infinite; check that the network's weights and "
                "outputs are finite, or choose another method"
            )
    return scores if METHODS[name].across else {layer: _places(values) for layer, values in scores.items()}


def rank_by(pruner: Pruner, name: str, batches: Iterable[Batch] = (), seed: int = 0) -> None:
    """Score the filters of a model in your own training loop, and set its gates within the budget.

    `batches` are pairs of inputs and labels, as from a DataLoader, on the device of the model; methods that use
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
        raise PruningError(f"no method that ranks filters is called {name!r}; {suggestion(name, known)}")
    images = first_images(batches, METHODS[name].images)
    if METHODS[name].images and not images:
        raise PruningError(f"method {name} needs images; give batches of inputs and labels")
    network = remove_pruner_hooks(real_copy(pruner.model)).eval().requires_grad_(False)
    pruner.rank(ranked(name, Subject(network, pruner.graph, images, seed, pruner.selector)))


def check_method(name: str, subject: Subject) -> None:
    """Score a network once, so that a method that cannot score it raises its PruningError before training."""
    if METHODS[name].learned:
        return
    ranked(name, subject)
    if METHODS[name].soft:
        with _named(name):
            subject.check_stored()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Convert any exception to a PruningError that names the method."""
    try:
        yield
    except PruningError as error:
        raise PruningError(f"method {name}: {error}; choose another method") from error
    except Exception as error:  # A user's network may fail in any way.
        cause = " ".join(str(error).split())
        raise PruningError(
            f"method {name} cannot rank the filters of this network ({type(error).__name__}: {cause}); give "
            "it pairs of inputs and labels as in training, or choose a method that needs weights alone, such as l1"
        ) from error


def _places(values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return ranks scaled to (0, 1]; of equal values, the one with the lowest index ranks highest."""
    places = np.empty(len(values))
    places[np.argsort(-values, kind="stable")] = np.arange(len(values), 0, -1) / len(values)
    return places


def target_of(subject: Subject) -> Selector:
    """Return the selector of a subject; if it has no budget, one for half of the MACs or the fewest possible."""
    if subject.selector is not None and subject.selector.limits is not None:
        return subject.selector
    selector = Selector(subject.graph, Budget(macs=0.5), refuse=False)
    if selector.limits is not None and not selector.reachable:
        selector.limits = Limits({"macs": selector.count(selector.smallest)["macs"]}, selector.limits.whole)
    return selector


class SubnetEvaluator:
    """A gated copy of the subject's network, to evaluate sub-networks."""

    def __init__(self, subject: Subject) -> None:
        self._graph = subject.graph
        self._model = real_copy(subject.model).eval().requires_grad_(False)
        filters = {name: layer.filters for name, layer in self._graph.layers.items()}
        self.gates = Gates(self._model, self._graph.sites, filters)
        # A norm may be unable to compute statistics from a single image, so leave out batches of one image.
        self.batches = [batch for batch in subject.batches if len(batch[1]) > 1] or list(subject.batches)

    def accuracy(self, keep: Mapping[str, Mask]) -> float:
        """Return the fraction of all images that a choice of filters classifies correctly.

        Batch statistics are recomputed from these images. With the statistics of the dense network and without
        fine-tuning, the accuracy of all sub-networks would be close to chance.
        """
        _, flow = self._graph.settled(keep)
        self.gates.set_hard([site.open(flow) for site in self._graph.sites])
        self.gates.mode = "hard"
        with fresh_statistics(self._model) as undo:
            right = sum(float(_hits(self._outputs(batch), batch[1]).sum()) for batch in self.batches)
            undo()
        return right / sum(labels.numel() for _, labels in self.batches)

    def accuracy_and_gradient(self, gates: Tensor, batch: Batch) -> tuple[float, Tensor]:
        """Return the accuracy on a batch with one gate per filter, and the gradient of the loss by the gates."""
        soft = self.gates.soft.copy_(gates).requires_grad_()
        self.gates.mode = "soft"
        outputs = self._outputs(batch)
        loss = F.cross_entropy(outputs, batch[1])
        # There is no gradient if the loss does not depend on any filter.
        slope = torch.autograd.grad(loss, soft, allow_unused=True)[0] if loss.requires_grad else None
        soft.requires_grad_(False)
        accuracy = float(_hits(outputs, batch[1]).double().mean())
        return accuracy, torch.zeros_like(gates) if slope is None else slope.to(gates)

    def _outputs(self, batch: Batch) -> Tensor:
        outputs = logits(self._model, batch[0])
        if not bool(outputs.isfinite().all()):
            raise PruningError("the network's outputs contain NaN or infinity")
        return outputs


def _hits(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return a boolean tensor that is True where the largest logit is that of the label.

    >>> _hits(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([ True, False])
    """
    return outputs.argmax(1) == labels

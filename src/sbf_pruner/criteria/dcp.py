"""DCP: the order in which an empty layer takes back the channels that it reads (Zhuang et al., 2018).

A `Subject` enters; a score for each filter leaves, its place in that order.  Layer by layer, a classifier learns to
tell the classes from what the layer makes.  Then all weights of the layer are zero, and round by round those
channels come in whose weights have the largest gradient of a joint loss: how far what is made is from what it was,
and how badly the classifier does with it.  Those that are in learn anew before the next round: a channel has
nothing to add where another does the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ..errors import PruningError
from ..utils.user_model import call
from .subject import AT_ONCE, Scores, Subject, Summing, batched, met, read_values, readers, spots, summing

_POSITIONS = 8  # in the maps of each image
_ROUNDS = 16  # at most: of many channels, several come in at a time
_STEPS = 3  # of the weights between rounds
_FITTING = 30  # steps of the classifier, on what the whole layer makes
_DECAY = 1e-3  # of its weights: a few images are easily told apart

Loss = Callable[[Tensor], Tensor]


def taken_back(subject: Subject) -> Scores:
    """How early each filter is taken back, as the mean over all layers that read it.

    One that nobody is known to read stays: its score is 1.
    """
    read = {node.layer for node in readers(subject.graph)}
    asked = {name: module for name, module in summing(subject.model).items() if name in read}
    places: dict[str, NDArray[np.floating]] = {}
    for part in _portions(asked, sum(len(labels) for _, labels in subject.batches)):
        for name, (windows, weight, shares) in _seen(subject, part).items():
            if not (windows.isfinite().all() and weight.isfinite().all()):
                raise PruningError(f"what {name} reads, or its weights, are not finite")
            order = selection(windows, weight, shares)
            places[name] = np.empty(len(order))
            places[name][order] = np.arange(len(order), 0, -1) / len(order)
    held = read_values(subject.graph, places)
    return {name: values.mean(0).filled(1.0) for name, values in held.items()}


def selection(windows: Tensor, weight: Tensor, shares: Tensor | None) -> NDArray[np.int64]:
    """The channels of a layer in the order in which they come in.

    Windows are positions, images, groups, channels and taps, weights are groups, outputs, channels and taps; shares
    say how much of each image belongs to each class, and without them the layer only has to make what it made.

    >>> windows = torch.tensor([[1.0, 0.9, 0.0], [-1.0, -0.9, 0.1], [2.0, 1.8, -0.1]])  # two say the same
    >>> selection(windows.view(1, 3, 1, 3, 1), torch.tensor([[[[1.0], [1.0], [1.0]]]]), None)
    array([0, 2, 1])
    """
    positions, images, groups, channels, taps = windows.shape
    inputs = windows.permute(2, 0, 1, 3, 4).reshape(groups, positions * images, channels * taps)
    inputs = inputs - inputs.mean(1, keepdim=True)  # a norm or a bias makes up for what is the same everywhere
    dense = weight.flatten(2).mT
    made = inputs @ dense
    deviation = made.square().mean(1, keepdim=True).sqrt()
    # An output that never changes has nothing to tell.
    scale = torch.where(deviation > 1e-6 * deviation.max(), 1 / deviation, 0.0)

    def features(outputs: Tensor) -> Tensor:
        # A ReLU with a slope of 1/2 at 0, where every output of an empty layer is.
        risen = torch.where(outputs == 0, outputs / 2, outputs.relu())
        pooled = risen.unflatten(1, (positions, images)).mean(1).movedim(1, 0).flatten(1)
        return torch.cat([pooled, pooled.new_ones(images, 1)], 1)

    whole = made * scale
    judged = None if shares is None else _classifier(features(whole), shares)

    def joint(read: Tensor, weights: Tensor) -> Tensor:
        outputs = read @ weights * scale
        away = (outputs - whole).square().mean() / 2
        if shares is None or judged is None:
            return away
        return away + F.cross_entropy(features(outputs) @ judged, shares)

    now, count = torch.zeros_like(dense), groups * channels
    inside = torch.zeros(groups, channels, dtype=torch.bool, device=now.device)
    order: list[int] = []
    while True:
        slope = _sloped(partial(joint, inputs), now)[1].unflatten(1, (channels, taps)).square().sum((2, 3))
        left = slope.masked_fill(inside, -1.0).flatten()
        come = left.topk(min(-(-count // _ROUNDS), count - len(order))).indices
        order += come.tolist()
        if len(order) == count:
            return np.array(order)
        inside.view(-1)[come] = True
        free = inside.repeat_interleave(taps, 1)
        held = free.any(0)  # what is still out in all groups need not be reckoned with
        now[:, held] = _descended(partial(joint, inputs[..., held]), now[:, held], _STEPS, free[:, held, None])


def _classifier(features: Tensor, shares: Tensor) -> Tensor:
    """The weights of a linear softmax classifier."""
    start = features.new_zeros(features.shape[1], shares.shape[1])
    return _descended(
        lambda weight: F.cross_entropy(features @ weight, shares) + _DECAY / 2 * weight.square().sum(),
        start,
        _FITTING,
    )


def _sloped(loss: Loss, at: Tensor) -> tuple[float, Tensor]:
    """A loss and its gradient."""
    with torch.enable_grad():
        at = at.detach().requires_grad_()
        value = loss(at)
        return float(value.detach()), torch.autograd.grad(value, at)[0]


def _descended(loss: Loss, start: Tensor, steps: int, free: Tensor | None = None) -> Tensor:
    """Where a few steps down the loss lead, of what is free to move."""
    held = start.clone()
    optimizer = torch.optim.LBFGS([held], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> float:
        value, slope = _sloped(loss, held)
        held.grad = slope if free is None else slope * free
        return value

    optimizer.step(closure)
    return held


def _portions(asked: Mapping[str, Summing], images: int) -> Iterator[dict[str, Summing]]:
    """Layers that are looked at in one go: what they read of so many images is kept until they are judged."""
    part: dict[str, Summing] = {}
    room = 0
    for name, module in asked.items():
        channels = module.in_features if isinstance(module, nn.Linear) else module.in_channels
        size = images * _POSITIONS * channels * module.weight.shape[2:].numel()
        if part and room + size > AT_ONCE:
            yield part
            part, room = {}, 0
        part[name] = module
        room += size
    if part:
        yield part


def _seen(subject: Subject, asked: Mapping[str, Summing]) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Of every layer, windows of what it reads, the weights they meet, and the classes of each image."""
    # Whatever else is looked at, a layer is looked at in the same positions.
    random = {name: np.random.default_rng([subject.seed, *name.encode()]) for name in asked}
    windows: dict[str, list[Tensor]] = defaultdict(list)
    classes: dict[str, list[Tensor]] = defaultdict(list)
    weights: dict[str, Tensor] = {}
    count = 1 + max((int(labels.max()) for _, labels in subject.batches), default=0)
    for images, labels in subject.batches:
        # Where every position has a label, a part of the image belongs to each class.
        shares = F.one_hot(labels.reshape(len(labels), -1), count).double().mean(1)

        def see(name: str, inputs: Tensor, shares: Tensor = shares) -> None:
            module = asked[name]
            inputs = batched(module, inputs)
            positions = _POSITIONS if spots(module, inputs) > 1 else 1
            drawn = [met(module, inputs, random[name]) for _ in range(positions)]
            wide = torch.promote_types(inputs.dtype, torch.float32)
            windows[name].append(torch.stack([window for window, _ in drawn]).to(wide))
            weights[name] = drawn[0][1].detach().to(wide)
            classes[name].append(shares.to(wide))

        with subject.reading(list(asked), see), torch.no_grad():
            call(subject.model, images)
    found: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
    for name, weight in weights.items():
        held, told = torch.cat(windows[name], 1), torch.cat(classes[name])
        # What is no longer one sample for each image cannot be asked for the image's class.
        found[name] = held, weight, told if len(told) == held.shape[1] else None
    return found

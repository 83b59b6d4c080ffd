"""DCP: the order in which input channels are added back to an emptied layer (Zhuang et al., 2018).

For each layer, a linear classifier is fitted to the outputs of the layer. Then all weights of the layer are set to
zero. In each round, those channels are added whose weights have the largest gradient of a joint loss: the error in
reconstructing the output, plus the classification loss. The weights of the channels added so far are refitted
before the next round, so a channel that is redundant with them has a small gradient. The earlier the channel of a
filter is added, the higher is the filter's score.
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
from .subject import (
    MAX_ELEMENTS,
    ConvOrLinear,
    Scores,
    Subject,
    conv_and_linear,
    positions_per_sample,
    read_values,
    readers,
    sample_window,
    with_batch_dim,
)

_POSITIONS = 8  # sampled per image
_ROUNDS = 16  # at most; with more channels, several are added per round
_STEPS = 3  # optimizer steps of the weights between rounds
_FITTING = 30  # optimizer steps of the classifier, on the outputs of the whole layer
_DECAY = 1e-3  # weight decay of the classifier, which would overfit a few images

Loss = Callable[[Tensor], Tensor]


def reselection_order(subject: Subject) -> Scores:
    """Score filters by how early their channels are added back, averaged over all layers that read them.

    A filter for which no layer that reads it is found has the highest score, 1.
    """
    names = {node.layer for node in readers(subject.graph)}
    modules = {name: module for name, module in conv_and_linear(subject.model).items() if name in names}
    places: dict[str, NDArray[np.floating]] = {}
    for part in _memory_groups(modules, sum(len(labels) for _, labels in subject.batches)):
        for name, (windows, weight, shares) in _sample_inputs(subject, part).items():
            if not (windows.isfinite().all() and weight.isfinite().all()):
                raise PruningError(f"the input or the weights of {name} contain NaN or infinity")
            order = selection(windows, weight, shares)
            places[name] = np.empty(len(order))
            places[name][order] = np.arange(len(order), 0, -1) / len(order)
    by_filter = read_values(subject.graph, places)
    return {name: values.mean(0).filled(1.0) for name, values in by_filter.items()}


def selection(windows: Tensor, weight: Tensor, shares: Tensor | None) -> NDArray[np.int64]:
    """Return the channels of a layer in the order in which they are added.

    `windows` has shape `(positions, images, groups, channels, taps)`, `weight` `(groups, outputs, channels, taps)`.
    `shares`, of shape `(images, classes)`, holds the fraction of each image that belongs to each class; if it is
    None, the loss is the reconstruction error alone.

    >>> windows = torch.tensor([[1.0, 0.9, 0.0], [-1.0, -0.9, 0.1], [2.0, 1.8, -0.1]])  # two say the same
    >>> selection(windows.view(1, 3, 1, 3, 1), torch.tensor([[[[1.0], [1.0], [1.0]]]]), None)
    array([0, 2, 1])
    """
    positions, images, groups, channels, taps = windows.shape
    inputs = windows.permute(2, 0, 1, 3, 4).reshape(groups, positions * images, channels * taps)
    inputs = inputs - inputs.mean(1, keepdim=True)  # A norm or a bias compensates a constant.
    dense = weight.flatten(2).mT
    outputs = inputs @ dense
    deviation = outputs.square().mean(1, keepdim=True).sqrt()
    # Ignore outputs that are constant.
    scale = torch.where(deviation > 1e-6 * deviation.max(), 1 / deviation, 0.0)

    def features(outputs: Tensor) -> Tensor:
        # A ReLU with slope 1/2 at 0, because all outputs of an empty layer are 0.
        active = torch.where(outputs == 0, outputs / 2, outputs.relu())
        pooled = active.unflatten(1, (positions, images)).mean(1).movedim(1, 0).flatten(1)
        return torch.cat([pooled, pooled.new_ones(images, 1)], 1)

    whole = outputs * scale
    classifier = None if shares is None else _classifier(features(whole), shares)

    def joint(read: Tensor, weights: Tensor) -> Tensor:
        outputs = read @ weights * scale
        error = (outputs - whole).square().mean() / 2
        if shares is None or classifier is None:
            return error
        return error + F.cross_entropy(features(outputs) @ classifier, shares)

    current, count = torch.zeros_like(dense), groups * channels
    added = torch.zeros(groups, channels, dtype=torch.bool, device=current.device)
    order: list[int] = []
    while True:
        slope = _value_and_gradient(partial(joint, inputs), current)[1]
        slope = slope.unflatten(1, (channels, taps)).square().sum((2, 3)).masked_fill(added, -1.0)
        best = slope.flatten().topk(min(-(-count // _ROUNDS), count - len(order))).indices
        order += best.tolist()
        if len(order) == count:
            return np.array(order)
        added.view(-1)[best] = True
        free = added.repeat_interleave(taps, 1)
        used = free.any(0)  # Skip the inputs that are added in no group so far.
        loss = partial(joint, inputs[..., used])
        current[:, used] = _minimized(loss, current[:, used], _STEPS, free[:, used, None])


def _classifier(features: Tensor, shares: Tensor) -> Tensor:
    """Fit the weights of a linear softmax classifier."""

    def loss(weight: Tensor) -> Tensor:
        return F.cross_entropy(features @ weight, shares) + _DECAY / 2 * weight.square().sum()

    return _minimized(loss, features.new_zeros(features.shape[1], shares.shape[1]), _FITTING)


def _value_and_gradient(loss: Loss, point: Tensor) -> tuple[float, Tensor]:
    with torch.enable_grad():
        point = point.detach().requires_grad_()
        value = loss(point)
        return float(value.detach()), torch.autograd.grad(value, point)[0]


def _minimized(loss: Loss, start: Tensor, steps: int, free: Tensor | None = None) -> Tensor:
    """Minimize a loss for a few L-BFGS steps, moving only the entries where `free` is True."""
    point = start.clone()
    optimizer = torch.optim.LBFGS([point], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> float:
        value, slope = _value_and_gradient(loss, point)
        point.grad = slope if free is None else slope * free
        return value

    optimizer.step(closure)
    return point


def _memory_groups(modules: Mapping[str, ConvOrLinear], images: int) -> Iterator[dict[str, ConvOrLinear]]:
    """Split the layers into groups that are processed together.

    The inputs sampled from all images are in memory for a whole group, so a group of several layers is limited to
    `MAX_ELEMENTS` numbers.
    """
    part: dict[str, ConvOrLinear] = {}
    room = 0
    for name, module in modules.items():
        channels = module.in_features if isinstance(module, nn.Linear) else module.in_channels
        size = images * _POSITIONS * channels * module.weight.shape[2:].numel()
        if part and room + size > MAX_ELEMENTS:
            yield part
            part, room = {}, 0
        part[name] = module
        room += size
    if part:
        yield part


def _sample_inputs(
    subject: Subject, modules: Mapping[str, ConvOrLinear]
) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Return, for each layer, sampled windows of its input, the weights applied to them, and the class shares."""
    # The positions sampled in a layer do not depend on the other layers in the group.
    random = {name: np.random.default_rng([subject.seed, *name.encode()]) for name in modules}
    windows: dict[str, list[Tensor]] = defaultdict(list)
    classes: dict[str, list[Tensor]] = defaultdict(list)
    weights: dict[str, Tensor] = {}
    count = 1 + max((int(labels.max()) for _, labels in subject.batches), default=0)
    for images, labels in subject.batches:
        # If labels are given per position, the share of a class is the fraction of positions with its label.
        shares = F.one_hot(labels.reshape(len(labels), -1), count).double().mean(1)

        def see(name: str, inputs: Tensor, shares: Tensor = shares) -> None:
            module = modules[name]
            inputs = with_batch_dim(module, inputs)
            positions = _POSITIONS if positions_per_sample(module, inputs) > 1 else 1
            drawn = [sample_window(module, inputs, random[name]) for _ in range(positions)]
            dtype = torch.promote_types(inputs.dtype, torch.float32)
            windows[name].append(torch.stack([window for window, _ in drawn]).to(dtype))
            weights[name] = drawn[0][1].detach().to(dtype)
            classes[name].append(shares.to(dtype))

        with subject.reading(modules, see), torch.no_grad():
            call(subject.model, images)
    found: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
    for name, weight in weights.items():
        inputs, targets = torch.cat(windows[name], 1), torch.cat(classes[name])
        # A layer that does not get one sample per image has no class per sample.
        found[name] = inputs, weight, targets if len(targets) == inputs.shape[1] else None
    return found

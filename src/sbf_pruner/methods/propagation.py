"""NISP: the importance of the last features, sent back through absolute weights (Yu et al., 2018).

A `Subject` enters; a score for each filter leaves.  The last features are ranked by infinite feature selection
(Roffo et al., 2015).  A neuron is then as important as those that read it, each times the absolute weight between
them: which is the gradient of a network with absolute weights, no biases and positive inputs, where activations
such as ReLU let everything pass.  That network is made, and asked.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PruningError
from .origins import readers
from .subject import Scores, Subject

_MIXING = 0.5  # of the deviation of two features against how little they go together
_REACH = 0.9  # of the largest factor with which the sum over all paths is finite


def propagated(subject: Subject) -> Scores:
    """The importance of each filter, as a part of its layer's mean: depth alone changes the size."""
    last = readers(subject.graph)[-1].layer
    importance = infinite_selection(_features(subject, last))
    model = _absolute(subject.model)
    found: dict[str, Tensor] = {}

    def see(name: str, given: Tensor) -> None:
        def add(slope: Tensor) -> None:
            found[name] = found.get(name, 0) + subject.per_filter(name, slope).sum(0).abs()

        given.register_hook(add)

    images = subject.batches[0][0][:1]
    mirror = Subject(model, subject.graph, subject.batches)
    with mirror.watched(see), torch.enable_grad():
        kept: list[Tensor] = []
        hook = model.get_submodule(last).register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        model(torch.ones_like(images, dtype=torch.float64).requires_grad_())
        hook.remove()
        (_pooled(kept[0]) * importance).sum().backward()
    if not all(bool(values.isfinite().all()) for values in found.values()):
        raise PruningError("method nisp: the network is too deep for its weights to be multiplied; choose another")
    tiny = torch.finfo(torch.float64).tiny
    return {name: (values / values.mean().clamp_min(tiny)).cpu().numpy() for name, values in found.items()}


def infinite_selection(features: Tensor) -> Tensor:
    """The energy of all paths through each feature, where two are joined by deviation and by being unlike.

    >>> steady, wide = torch.zeros(50), torch.linspace(-1, 1, 50)
    >>> infinite_selection(torch.stack([wide, steady, wide.square()], 1).double()).argmin()
    tensor(1)
    """
    deviation = features.std(0)
    deviation = deviation / deviation.max().clamp_min(torch.finfo(deviation.dtype).tiny)
    ranks = features.argsort(0).argsort(0).double()
    alike = torch.corrcoef(ranks.T).nan_to_num(0.0).abs().view(len(deviation), -1)
    joined = _MIXING * torch.maximum(deviation[:, None], deviation) + (1 - _MIXING) * (1 - alike)
    radius = torch.linalg.eigvals(joined).abs().max().clamp_min(torch.finfo(deviation.dtype).tiny)
    one = torch.eye(len(joined), dtype=joined.dtype, device=joined.device)
    return (torch.linalg.inv(one - _REACH / radius * joined) - one).sum(1)


def _features(subject: Subject, last: str) -> Tensor:
    """What the last layer reads, images by channels."""
    kept: list[Tensor] = []

    def see(module: nn.Module, args: Any) -> None:
        kept.append(_pooled(args[0]).double())

    hook = subject.model.get_submodule(last).register_forward_pre_hook(see)
    try:
        subject.look()
    finally:
        hook.remove()
    return torch.cat(kept)


def _pooled(inputs: Tensor) -> Tensor:
    return inputs.flatten(2).mean(2) if inputs.dim() > 2 else inputs


def _absolute(model: nn.Module) -> nn.Module:
    """A copy with absolute weights and scales, and nothing that is added."""
    mirror = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        for name, parameter in mirror.named_parameters():
            parameter.requires_grad_(False).abs_()
            if name.rpartition(".")[2] == "bias":
                parameter.zero_()
        for name, buffer in mirror.named_buffers():
            if name.rpartition(".")[2] == "running_mean":
                buffer.zero_()
    return mirror

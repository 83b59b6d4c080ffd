"""NISP: importance of the last features, propagated back through absolute weights (Yu et al., 2018).

The features that the last layer reads are ranked by infinite feature selection (Roffo et al., 2015). The importance
of a neuron is the sum over its readers of their importance times the absolute weight between them. This is the
gradient of a network with absolute weights and no biases, at inputs just above 0, where no activation saturates
(ReLU6 and tanh included) and norms only scale. So it is computed by one backward pass in such a copy of the
network.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..errors import PruningError
from ..utils.user_model import call, map_tensors, real_copy
from .subject import Scores, Subject, readers

_MIXING = 0.5  # weight of the deviation of two features against their lack of correlation
_REACH = 0.9  # factor per step of a path, as a fraction of the largest for which the sum over all paths is finite
_ABOVE = 1e-150  # an input so small that no activation saturates, however deep
_CENTRING = (nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def propagated(subject: Subject) -> Scores:
    """Score filters by importance, divided by its mean over the layer, because its scale depends on the depth."""
    last, features = _last_features(subject)
    importance = infinite_selection(features)
    model = _absolute(subject.model)
    found: dict[str, Tensor] = {}

    def see(name: str, output: Tensor) -> None:
        def add(slope: Tensor) -> None:
            found[name] = found.get(name, 0) + subject.per_filter(name, slope).sum(0).abs()

        if output.requires_grad:  # Otherwise it does not depend on the images.
            output.register_hook(add)

    images = map_tensors(subject.batches[0][0], _near_zero)
    mirror, kept = Subject(model, subject.graph, subject.batches), []
    with mirror.watched(see), mirror.reading([last], lambda _, inputs: kept.append(inputs)), torch.enable_grad():
        call(model, images)
        (_by_channel(model, last, kept[-1]) * importance).sum().backward()
    if not all(bool(values.isfinite().all()) for values in found.values()):
        raise PruningError("products of the weights are not finite in float64, because the network is too deep")
    if not any(bool(values.any()) for values in found.values()):
        raise PruningError(f"no gradient from the input of {last} reaches any filter")
    tiny = torch.finfo(torch.float64).tiny
    return {name: (values / values.mean().clamp_min(tiny)).cpu().numpy() for name, values in found.items()}


def infinite_selection(features: Tensor) -> Tensor:
    """Return the energy of all paths through each feature, for features of shape `(samples, features)`.

    The weight between two features grows with the larger of their deviations and falls with their rank correlation.

    >>> steady, wide = torch.zeros(50), torch.linspace(-1, 1, 50)
    >>> infinite_selection(torch.stack([wide, steady, wide.square()], 1).double()).argmin()
    tensor(1)
    """
    tiny = torch.finfo(features.dtype).tiny
    deviation = features.std(0, correction=0)
    deviation = deviation / deviation.max().clamp_min(tiny)
    alike = torch.corrcoef(_ranks(features.T)).view(len(deviation), -1).abs()
    alike = alike.nan_to_num(1.0)  # A constant feature adds no information to others.
    joined = _MIXING * torch.maximum(deviation[:, None], deviation) + (1 - _MIXING) * (1 - alike)
    radius = torch.linalg.eigvalsh(joined).abs().max().clamp_min(tiny)
    one = torch.eye(len(joined), dtype=joined.dtype, device=joined.device)
    return torch.linalg.solve(one - _REACH / radius * joined, torch.ones_like(deviation)) - 1


def _ranks(rows: Tensor) -> Tensor:
    """Return the rank of each number in its row; equal numbers, such as zeros after a ReLU, share their mean rank.

    >>> _ranks(torch.tensor([[3.0, 0.0, 0.0, 5.0]]))
    tensor([[2.5000, 1.0000, 1.0000, 3.5000]], dtype=torch.float64)
    """
    rows = rows.contiguous()
    ordered = rows.sort(1).values
    first, behind = (torch.searchsorted(ordered, rows, right=right) for right in (False, True))
    return (first + behind).double() / 2


def _last_features(subject: Subject) -> tuple[str, Tensor]:
    """Return the name of the last layer that the network calls, and its inputs of shape `(images, channels)`."""
    names = [node.layer for node in readers(subject.graph)]
    kept: dict[str, list[Tensor]] = defaultdict(list)

    def see(name: str, inputs: Tensor) -> None:
        kept[name].append(_by_channel(subject.model, name, inputs).double())

    with subject.reading(names, see):
        subject.look()
    # An auxiliary head for training is not called in evaluation mode.
    last = next((name for name in reversed(names) if name in kept), None)
    if last is None:
        raise PruningError("no convolution or linear layer is called as a module, so there are no last features")
    return last, torch.cat(kept[last])


def _by_channel(model: nn.Module, name: str, inputs: Tensor) -> Tensor:
    """Return the inputs of a layer averaged over all positions, of shape `(samples, channels)`."""
    if isinstance(model.get_submodule(name), nn.Linear):  # A linear layer reads the last dimension.
        inputs = inputs.movedim(-1, 1) if inputs.dim() > 2 else inputs
    return inputs.flatten(2).mean(2) if inputs.dim() > 2 else inputs


def _near_zero(inputs: Tensor) -> Tensor:
    """Return inputs just above 0 for one sample; integers stay as they are."""
    if not inputs.is_floating_point():
        return inputs[:1]
    return torch.full_like(inputs[:1], _ABOVE, dtype=torch.float64).requires_grad_()


def _absolute(model: nn.Module) -> nn.Module:
    """Copy a model with absolute weights and scales, no biases or running means, and norms that only scale."""
    mirror = real_copy(model).double().eval()
    with torch.no_grad():
        for name, parameter in mirror.requires_grad_(False).named_parameters():
            parameter.abs_()
            if name.rpartition(".")[2] == "bias":
                parameter.zero_()
        for name, buffer in mirror.named_buffers():
            if name.rpartition(".")[2] == "running_mean":
                buffer.zero_()
    for module in mirror.modules():
        if isinstance(module, _CENTRING) or (isinstance(module, _NormBase) and module.running_var is None):
            module.forward = partial(_scaled, module)  # type: ignore[method-assign]
    return mirror


def _scaled(module: nn.Module, inputs: Tensor) -> Tensor:
    """Apply only the scale of a norm; its normalization would subtract the mean."""
    weight: Tensor | None = getattr(module, "weight", None)
    if weight is None:
        return inputs
    # Many networks define their own LayerNorm for feature maps, where channels are the second dimension.
    if type(module).forward is nn.LayerNorm.forward or inputs.shape[1] != weight.numel():
        return inputs * weight
    return inputs * weight.view(-1, *[1] * (inputs.dim() - 2))

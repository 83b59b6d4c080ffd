"""Recompute the running statistics of batch norms, and detect statistics that lag behind the weights.

Recomputing changes no weight and restores modes and momenta. Norms that saw no batch, norms that the user keeps in
another mode than the model and, after an exception, all norms keep their previous statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


@contextmanager
def fresh_statistics(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Recompute the statistics of all norms, as the plain mean over forwards inside; yields an undo function.

    >>> net = nn.Sequential(nn.BatchNorm1d(1)).eval()
    >>> with fresh_statistics(net) as undo:
    ...     _ = net(torch.tensor([[1.0], [3.0]])), net(torch.tensor([[5.0], [7.0]]))
    >>> net[0].running_mean.item()
    4.0
    >>> undo()
    >>> net[0].running_mean.item()
    0.0
    """
    norms = [m for m in model.modules() if isinstance(m, _NormBase) and m.training == model.training]
    norms = [norm for norm in norms if norm.running_mean is not None and norm.num_batches_tracked is not None]
    held = [(norm, norm.momentum, _statistics(norm)) for norm in norms]

    def undo() -> None:
        for norm, _, statistics in held:
            _put_back(norm, statistics)

    try:
        for norm, _, _ in held:
            norm.train(isinstance(norm, _BatchNorm))  # others, such as instance norm, normalize single samples
            if norm.training:
                norm.reset_running_stats()
                norm.momentum = None  # all batches have the same weight
        with torch.no_grad():
            yield undo
    except BaseException:
        undo()
        raise
    finally:
        for norm, momentum, statistics in held:
            norm.momentum = momentum
            norm.train(model.training)  # which the user may have changed meanwhile
            if not norm.num_batches_tracked:
                _put_back(norm, statistics)


LEFT = 0.05  # weight of the initial values above which running statistics say little about the network


def lagging(model: nn.Module, began: Mapping[str, Tensor]) -> tuple[float, int] | None:
    """Return the momentum and the training steps of the norm whose running statistics lag most, if any do.

    Each step leaves `1 - momentum` of the initial statistics, and `num_batches_tracked` counts steps. `began` is
    the state dict at the start of training: steps count from there, or from the last recalibration.

    >>> net = nn.Sequential(nn.BatchNorm1d(1, momentum=0.01))
    >>> _ = net(torch.rand(2, 1))
    >>> lagging(net, {})
    (0.01, 1)
    """
    norms = {
        name: (norm, norm.num_batches_tracked)
        for name, norm in model.named_modules()
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None and norm.momentum
    }
    counted = {name: (norm, count) for name, (norm, count) in norms.items() if count is not None}
    if not counted:
        return None
    slowest, most = None, LEFT
    counts = torch.stack([count for _, count in counted.values()]).tolist()
    for (name, (norm, _)), count in zip(counted.items(), counts, strict=True):
        before = int(began.get(f"{name}.num_batches_tracked".lstrip("."), torch.tensor(0)))
        steps, momentum = count - before if count >= before else count, norm.momentum
        assert momentum is not None
        if steps and (left := (1 - momentum) ** steps) > most:
            slowest, most = (momentum, steps), left
    return slowest


def _statistics(norm: _NormBase) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in norm.named_buffers(recurse=False)}


def _put_back(norm: _NormBase, statistics: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in norm.named_buffers(recurse=False):
            buffer.copy_(statistics[name])

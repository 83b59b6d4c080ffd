"""Batch-norm statistics taken anew: what a network's norms see now, instead of what they saw while it was trained.

A model enters; forwards inside the context give its norms new statistics, the plain mean over all of them.  What
holds: no weight is touched, and modes and momenta are afterwards what they were; a norm that has seen nothing, one
that the user keeps in another mode than the model, and all of them after an exception, keep their statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


@contextmanager
def fresh_statistics(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Forget the statistics of all norms, and let the forwards to come make new ones; yields what undoes it all.

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
            norm.train(isinstance(norm, _BatchNorm))  # others, as instance norms, look at each sample by itself
            if norm.training:
                norm.reset_running_stats()
                norm.momentum = None  # each batch counts as much as any other
        with torch.no_grad():
            yield undo
    except BaseException:
        undo()
        raise
    finally:
        for norm, momentum, statistics in held:
            norm.momentum = momentum
            norm.train(model.training)  # which may have changed meanwhile
            if not norm.num_batches_tracked:
                _put_back(norm, statistics)


LEFT = 0.05  # of what running statistics began with: as long as more is left, they tell little of the network


def lagging(model: nn.Module, began: Mapping[str, Tensor]) -> tuple[float, int] | None:
    """Return the momentum and the training steps of the norm whose running statistics lag most, if any do.

    Each step leaves `1 - momentum` of what statistics began with, and `num_batches_tracked` counts steps.  `began`
    is the state dict that training began with: steps count from there, or from the last recalibration.

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

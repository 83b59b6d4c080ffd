"""Batch-norm statistics taken anew: what a network's norms see now, instead of what they saw while it was trained.

A model enters; forwards inside the context give its norms new statistics, the plain mean over all of them.  What
holds: modes and momenta are afterwards what they were, and no weight is touched; a norm that has seen nothing, and
all of them after an exception, keep the statistics they had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def fresh_statistics(model: nn.Module) -> Iterator[None]:
    """Forget the statistics of all norms, and let the forwards to come make new ones.

    >>> net = nn.Sequential(nn.BatchNorm1d(1)).eval()
    >>> with fresh_statistics(net):
    ...     _ = net(torch.tensor([[1.0], [3.0]])), net(torch.tensor([[5.0], [7.0]]))
    >>> net[0].running_mean.item()
    4.0
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    held = [(norm.momentum, norm.training, {name: b.clone() for name, b in norm.named_buffers()}) for norm in norms]
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # each batch counts as much as any other
    done = False
    try:
        with torch.no_grad():
            yield
        done = True
    finally:
        for norm, (momentum, training, buffers) in zip(norms, held, strict=True):
            norm.momentum = momentum
            norm.train(training)
            if not done or not norm.num_batches_tracked:
                norm.load_state_dict(buffers, strict=False)

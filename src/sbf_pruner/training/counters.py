"""The batches that batch norms count, counted for all of them at once, for the captured engine.

A compiled step adds one to every norm's counter by a kernel of its own: 55 of the 311 kernels of a forward of
ResNet-56, each for one number.  While entered, norms that do not need their count leave it alone, and `count`
adds to all of them.  A norm that runs twice in a step counts it once; the numbers only tell whether running
statistics lag.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_COUNTER = "num_batches_tracked"


class Counters:
    """While entered, counting is left to `count`.

    >>> norm = nn.BatchNorm2d(1)
    >>> with Counters(norm) as counters:
    ...     _ = norm(torch.zeros(2, 1, 1, 1))
    ...     counters.count()
    >>> norm.num_batches_tracked
    tensor(1)
    """

    def __init__(self, network: nn.Module) -> None:
        # Without a momentum a norm averages over all batches, and reads how many there were.
        self.modules = [
            module
            for module in network.modules()
            if isinstance(module, _BatchNorm)
            and module.momentum is not None
            and module.num_batches_tracked is not None
        ]
        self._counts = {module: module.num_batches_tracked for module in self.modules}

    def __enter__(self) -> Counters:
        for module in self.modules:
            module.__dict__[_COUNTER] = None  # found before the buffer of that name
        return self

    def __exit__(self, *_: object) -> None:
        for module in self.modules:
            del module.__dict__[_COUNTER]

    def count(self) -> None:
        """One batch more for every norm that is in training mode."""
        counts = [count for module, count in self._counts.items() if module.training and count is not None]
        if counts:
            torch._foreach_add_(counts, 1)

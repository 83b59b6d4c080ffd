"""Several processes that train one network, each on its own part of every batch.

What `torch.distributed` was set up with enters; sums, means and what the first process says leave.  What holds:
alone, nothing here does anything; together, all processes have the same numbers afterwards, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PruningError

if dist.is_available():
    # Its functions hold the group that exists when it is imported, and tracing imports it.  A group that is held
    # outlives `destroy_process_group`, and its threads may abort the process when that ends.
    import torch.distributed.nn.functional

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """One process of `size`, numbered from 0; the first one speaks and writes for all.

    >>> Team(1, 2).part(torch.arange(5)), Team().part(torch.arange(3))
    (tensor([1, 3]), tensor([0, 1, 2]))
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def present(cls) -> Team:
        """The processes there are now; this one alone where nobody has set up any others."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def alone(self) -> bool:
        """Are there no others?"""
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Is this the process that writes and speaks?"""
        return self.rank == 0

    def part(self, rows: Tensor) -> Tensor:
        """The rows of a batch that are this process's own."""
        return rows if self.alone else rows[self.rank :: self.size]

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum over all processes."""
        if not self.alone:
            dist.all_reduce(tensor)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over all processes, in one message for each type of number."""
        for flat, held in self._packed(tensors):
            dist.all_reduce(flat)
            _unpack(flat.div_(self.size), held)

    @torch.no_grad()
    def follow(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of the first process."""
        for flat, held in self._packed(tensors):
            dist.broadcast(flat, 0)
            _unpack(flat, held)

    def from_first(self, work: Callable[[], T]) -> T:
        """What the first process finds, for all; an error of it is everybody's."""
        if self.alone:
            return work()
        said: list[Any] = [None, None]
        failed: Exception | None = None
        if self.leads:
            try:
                said[0] = work()
            except Exception as error:  # the others must not wait for ever
                failed, said[1] = error, str(error)
        dist.broadcast_object_list(said, 0)
        if failed is not None:
            raise failed
        if said[1] is not None:
            raise PruningError(said[1])
        return said[0]

    def all_say(self, answer: Any) -> bool:
        """Do all processes give the same answer?"""
        if self.alone:
            return True
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, answer)
        return all(each == answers[0] for each in answers)

    def _packed(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
        if self.alone:
            return []
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault(tensor.dtype, []).append(tensor)
        return [(torch.cat([tensor.reshape(-1) for tensor in held]), held) for held in kinds.values()]


def _unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])

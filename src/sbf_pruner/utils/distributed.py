"""Data-parallel training over `torch.distributed`: sums, averages and broadcasts over all ranks.

With a single process every function is a no-op or a plain call. With several, all ranks hold bitwise equal values
afterwards.
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
    # This module binds the process group that exists when it is imported, and tracing imports it. A group that is
    # still referenced outlives `destroy_process_group`, and its threads may abort the process at exit. So import it
    # here, before any group is created.
    import torch.distributed.nn.functional

T = TypeVar("T")


@dataclass(frozen=True)
class DistributedContext:
    """The rank of this process and the world size; rank 0 prints and writes files for all.

    >>> DistributedContext(1, 2).part(torch.arange(5)), DistributedContext().part(torch.arange(3))
    (tensor([1, 3]), tensor([0, 1, 2]))
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def present(cls) -> DistributedContext:
        """Return the current rank and world size, or a single process where no process group is initialized."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def alone(self) -> bool:
        """True if this is the only process."""
        return self.size == 1

    @property
    def leads(self) -> bool:
        """True on rank 0, which prints and writes files."""
        return self.rank == 0

    def part(self, rows: Tensor) -> Tensor:
        """Return the rows of a batch that belong to this rank: every `size`-th one, starting at `rank`."""
        return rows if self.alone else rows[self.rank :: self.size]

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        if not self.alone:
            dist.all_reduce(tensor)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over all ranks, in place, with one all-reduce per dtype."""
        for flat, held in self._packed(tensors):
            dist.all_reduce(flat)
            _unpack(flat.div_(self.size), held)

    @torch.no_grad()
    def follow(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of rank 0, with one broadcast per dtype."""
        for flat, held in self._packed(tensors):
            dist.broadcast(flat, 0)
            _unpack(flat, held)

    def run_on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank; the result must be picklable.

        If `work` fails, rank 0 raises its exception and every other rank a PruningError with the same message.
        """
        if self.alone:
            return work()
        said: list[Any] = [None, None]
        failed: Exception | None = None
        if self.leads:
            try:
                said[0] = work()
            except Exception as error:  # Broadcast it, because the other ranks are waiting.
                failed, said[1] = error, str(error)
        dist.broadcast_object_list(said, 0)
        if failed is not None:
            raise failed
        if said[1] is not None:
            raise PruningError(said[1])
        return said[0]

    def all_ranks_agree(self, answer: Any) -> bool:
        """Return True if `answer` is equal on all ranks."""
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

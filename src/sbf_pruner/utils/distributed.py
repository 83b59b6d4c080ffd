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

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over all ranks, in place, with one all-reduce per dtype."""

        def mean(flat: Tensor) -> None:
            dist.all_reduce(flat)
            flat.div_(self.size)

        self._in_place(mean, tensors)

    def follow(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of rank 0, with one broadcast per dtype."""
        self._in_place(lambda flat: dist.broadcast(flat, 0), tensors)

    @torch.no_grad()
    def _in_place(self, operation: Callable[[Tensor], Any], tensors: Sequence[Tensor]) -> None:
        """Apply an in-place operation to tensors, concatenated by dtype; do nothing in a single process."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in () if self.alone else tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in by_dtype.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            operation(flat)
            parts = flat.split([tensor.numel() for tensor in group])
            torch._foreach_copy_(group, [part.view(t.shape) for part, t in zip(parts, group, strict=True)])

    def run_on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on every rank; the result must be picklable.

        If `work` fails, rank 0 raises its exception and every other rank a PruningError with the same message.
        """
        if self.alone:
            return work()
        outcome: list[Any] = [None, None]  # the result, or the message of an exception
        failed: Exception | None = None
        if self.leads:
            try:
                outcome[0] = work()
            except Exception as error:  # Broadcast it, because the other ranks are waiting.
                failed, outcome[1] = error, str(error)
        dist.broadcast_object_list(outcome, 0)
        if failed is not None:
            raise failed
        if outcome[1] is not None:
            raise PruningError(outcome[1])
        return outcome[0]

    def all_ranks_agree(self, answer: Any) -> bool:
        """Return True if `answer` is equal on all ranks."""
        if self.alone:
            return True
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, answer)
        return all(each == answers[0] for each in answers)

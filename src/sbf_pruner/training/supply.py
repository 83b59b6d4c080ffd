"""How the images of a step come to where a captured step reads them.

Batches enter; tensors that stay in their place leave, holding another batch at every step.  Images that lie on the
device are picked there by the step itself; those that are read as they are needed are handed over before it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..team import Team
from .batches import Batch, Batches, Resident
from .compiled import compiled


class Laid:
    """All random choices of an epoch lie beside the images, and `at` says which step's are to be taken."""

    def __init__(self, batches: Batches, at: Tensor, team: Team) -> None:
        assert isinstance(batches, Resident)
        self.batches, self.at, self.team = batches, at, team
        self.take = compiled(batches.take) if batches.device.type == "cuda" else batches.take
        self.drawn = {name: choice.to(batches.device) for name, choice in self._draw(0).items()}
        self.next: tuple[int, dict[str, Tensor]] | None = None

    def begin(self, index: int, first: int = 0) -> None:
        """Lay out what epoch number `index` has drawn; `at` says which step is the first."""
        drawn = self._draw(index) if self.next is None or self.next[0] != index else self.next[1]
        for name, held in self.drawn.items():
            held.copy_(drawn[name], non_blocking=True)

    def advance(self) -> None:
        """Nothing: the step counts by itself."""

    def look_ahead(self, index: int) -> None:
        """Draw what the next epoch needs."""
        self.next = index, self._draw(index)

    def batch(self) -> Batch:
        """This process's part of the batch, made by the step itself."""
        images, labels = self.take(
            **{name: choice.index_select(0, self.at)[0] for name, choice in self.drawn.items()}
        )
        return self.team.part(images), self.team.part(labels)

    def _draw(self, index: int) -> dict[str, Tensor]:
        shape = len(self.batches), self.batches.each
        return {
            name: choice[: shape[0] * shape[1]].unflatten(0, shape)
            for name, choice in self.batches.draw(index).items()
        }


class Handed:
    """Two tensors, into which every batch is copied before its step."""

    def __init__(self, batches: Batches, at: Tensor, team: Team) -> None:
        self.batches, self.team = batches, team
        rows = len(team.part(torch.arange(batches.each)))
        blended = batches.augment is not None and batches.augment.mixup > 0
        self.images = torch.zeros(rows, *batches.shape, device=batches.device)
        self.labels = torch.zeros(rows, dtype=torch.int64, device=batches.device)
        if blended:
            self.labels = torch.zeros(rows, batches.num_classes, device=batches.device)
        self.coming: Iterator[Batch] = iter(())

    def begin(self, index: int, first: int = 0) -> None:
        """Have the batches of epoch number `index` read, from number `first` on."""
        self.coming = self.batches.parts(index, self.team, first)

    def advance(self) -> None:
        """Hand over the next batch."""
        images, labels = next(self.coming)
        self.images.copy_(images)
        self.labels.copy_(labels)

    def look_ahead(self, index: int) -> None:
        """Nothing: batches are read ahead anyway."""

    def batch(self) -> Batch:
        """This process's part of the batch, as it was handed over."""
        return self.images, self.labels

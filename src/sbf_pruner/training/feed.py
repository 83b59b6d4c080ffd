"""The images of a run in batches: those that each phase trains on, and those that every network is judged by.

Data and a recipe enter; `Batches` on the run's device leave.  What holds: the training images lie there once,
whatever sizes of batch the phases ask for.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .data import Augment, Batches, Data, Split
from .recipe import Recipe
from .schedule import Phase, batch_size, mixup

EVALUATED_AT_ONCE = 256


class Feed:
    """The training, test and validation images of one run."""

    def __init__(self, recipe: Recipe, data: Data, device: torch.device) -> None:
        self._recipe, self._data, self._device = recipe, data, device
        self._train = self._batches(data.train, Augment(recipe.data.crop, recipe.data.flip))
        self._made = {(self._train.batch_size, 0.0): self._train}
        self.test = self._batches(data.test)
        self.validation = self._batches(data.validation) if len(data.validation) else None
        self.images = next(self.test.epoch(0))[0]
        """The first batch of the test images, to trace, prove and time networks on."""

    def of(self, phase: Phase) -> Batches:
        """The training images in the batches of a phase, as it trains on them."""
        return self._training(batch_size(self._recipe, phase), mixup(self._recipe, phase))

    def unmixed(self, phase: Phase) -> Batches:
        """The same without blends, for norms to take their statistics from."""
        return self._training(batch_size(self._recipe, phase), 0.0)

    def _training(self, size: int, blended: float) -> Batches:
        if (size, blended) not in self._made:
            assert self._train.augment is not None
            there = Split(self._train.images, self._train.labels)
            self._made[size, blended] = self._batches(there, replace(self._train.augment, mixup=blended), size)
        return self._made[size, blended]

    def _batches(self, split: Split, augment: Augment | None = None, size: int = 0) -> Batches:
        size = size or self._recipe.data.batch_size
        return Batches(
            split,
            size if augment else max(size, EVALUATED_AT_ONCE),
            self._data.mean,
            self._data.std,
            device=self._device,
            augment=augment,
            seed=self._recipe.seed,
            num_classes=self._data.num_classes,
        )

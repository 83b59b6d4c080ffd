"""The images of a run in batches: those that each phase trains on, and those that every network is judged by.

Data and a recipe enter; `Batches` on the run's device leave.  What holds: the training images lie there once,
whatever sizes of batch the phases ask for.
"""

from __future__ import annotations

import torch

from .data import Augment, Batches, Data, Split
from .recipe import Recipe
from .schedule import Phase, batch_size

EVALUATED_AT_ONCE = 256


class Feed:
    """The training, test and validation images of one run."""

    def __init__(self, recipe: Recipe, data: Data, device: torch.device) -> None:
        self._recipe, self._data, self._device = recipe, data, device
        self._train = self._batches(data.train, Augment(recipe.data.crop, recipe.data.flip))
        self._by_size = {self._train.batch_size: self._train}
        self.test = self._batches(data.test)
        self.validation = self._batches(data.validation) if len(data.validation) else None
        self.images = next(self.test.epoch(0))[0]
        """The first batch of the test images, to trace, prove and time networks on."""

    def of(self, phase: Phase) -> Batches:
        """The training images in the batches of a phase."""
        size = batch_size(self._recipe, phase)
        if size not in self._by_size:
            there = Split(self._train.images, self._train.labels)
            self._by_size[size] = self._batches(there, self._train.augment, size)
        return self._by_size[size]

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
        )

"""The images of a run in batches: those that each phase trains on, and those that every network is judged by.

Data, a recipe and the network they are for enter; `Batches` on the run's device leave.  What holds: the training
images lie there once, whatever sizes of batch the phases ask for.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ..errors import DataError
from ..phases import Phase
from .data import Augment, Batches, Data, Split
from .machine import choose_order
from .recipe import Recipe
from .schedule import batch_size, optimizer_config

EVALUATED_AT_ONCE = 256


class Feed:
    """The training, test and validation images of one run."""

    def __init__(self, recipe: Recipe, data: Data, device: torch.device, model: nn.Module) -> None:
        self._recipe, self._data, self._device = recipe, data, device
        self._check_sizes()
        self._plain = Augment(recipe.data.crop, recipe.data.flip)
        self.train = self._batches(data.train, self._plain)
        self._made = {(self.train.batch_size, self._plain): self.train}
        self.test = self._batches(data.test)
        self.validation = self._batches(data.validation) if len(data.validation) else None
        images = next(self.test.epoch(0))[0]
        self.order = choose_order(model, images[:2])
        """How maps lie in memory, as it suits the network."""
        self.images = images.contiguous(memory_format=self.order)
        """The first batch of the test images, to trace, prove and time networks on."""

    def of(self, phase: Phase) -> Batches:
        """The training images in the batches of a phase, as it trains on them."""
        augment = self._plain
        if phase.trains_weights:  # scores are learned from whole images
            config = optimizer_config(self._recipe, phase)
            augment = replace(augment, cutout=config.cutout, mixup=config.mixup)
        return self._training(phase, augment)

    def whole(self, phase: Phase) -> Batches:
        """The same, but nothing cut out of the images and none blended, for norms to take their statistics from."""
        return self._training(phase, self._plain)

    def _check_sizes(self) -> None:
        """Refuse crops and holes that may leave nothing of an image."""
        height, width = self._data.train.images.shape[-2:]
        shift = self._recipe.data.crop
        if shift >= min(height, width):
            raise DataError(
                f"data.crop: shifted by {shift} pixels nothing may be left of an image ({height}x{width}); lower it"
            )
        for section in ("warmup", "weights", "finetune"):
            hole = getattr(self._recipe, section).cutout
            if hole >= max(height, width):
                raise DataError(
                    f"{section}.cutout: a hole of {hole} pixels may be all of an image ({height}x{width}); lower it"
                )

    def _training(self, phase: Phase, augment: Augment) -> Batches:
        size = batch_size(self._recipe, phase)
        if (size, augment) not in self._made:
            there = Split(self.train.images, self.train.labels)
            self._made[size, augment] = self._batches(there, augment, size)
        return self._made[size, augment]

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

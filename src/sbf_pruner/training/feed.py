"""The images of a run in batches: those that each phase trains on, and those that every network is judged by.

Data, a recipe and the network they are for enter; `Batches` on the run's device leave.  What holds: the training
images lie there once, whatever sizes of batch the phases ask for.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Unpack

import torch
from torch import nn

from ..errors import DataError
from ..phases import Phase
from ..team import Team
from .batches import Augment, Batches, How, Resident
from .data import Data
from .loaded import Loaded
from .machine import choose_order
from .recipe import Recipe
from .schedule import batch_size, optimizer_config
from .splits import Split, Stream

EVALUATED_AT_ONCE = 256  # images of up to so many pixels a side; of larger ones a batch of training
SMALL = 64


class Feed:
    """The training, test and validation images of one run."""

    def __init__(self, recipe: Recipe, data: Data, device: torch.device, model: nn.Module) -> None:
        self._recipe, self._data, self._device = recipe, data, device
        self._check_sizes()
        self._plain = Augment(recipe.data.crop, recipe.data.flip, scale=recipe.data.scale)
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
        height, width = self._data.train.shape[-2:]
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
            self._made[size, augment] = self.train.regrouped(size, augment)
        return self._made[size, augment]

    def _batches(self, split: Split | Stream, augment: Augment | None = None) -> Batches:
        size, data = self._recipe.data.batch_size, self._data
        if not augment and max(split.shape[-2:]) <= SMALL:
            size = max(size, EVALUATED_AT_ONCE)
        return batches_of(
            split,
            size,
            data,
            workers=self._recipe.data.workers,
            device=self._device,
            augment=augment,
            seed=self._recipe.seed,
            num_classes=data.num_classes,
        )


def batches_of(
    split: Split | Stream, batch_size: int, data: Data, *, workers: int = -1, **how: Unpack[How]
) -> Batches:
    """The batches of a part of a data set, of the kind that it asks for."""
    if isinstance(split, Split):
        return Resident(split, batch_size, data.mean, data.std, **how)
    if workers < 0:  # the cores are shared with the other processes of a team
        workers = max(1, _cores() // Team.present().size)
    return Loaded(split, batch_size, data.mean, data.std, workers=workers, **how)


def _cores() -> int:
    """How many this process may use; not every system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

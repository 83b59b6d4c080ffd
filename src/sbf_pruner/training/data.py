"""Images in memory, and the batches made of them.

The `[data]` section of a recipe enters; `Data` leaves: training, validation and test images as uint8
tensors, with the training images' mean and deviation.  `Batches` keeps a split on the device and makes each
batch there with a few tensor operations, without workers.  What an epoch holds follows from the seed and the
epoch's number alone (random numbers are drawn on the CPU): it can be replayed after a resume, on any device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError
from .sections import DataConfig
from .sources import class_names, read_arrays


@dataclass(frozen=True, eq=False)
class Split:
    """Images (uint8, N,C,H,W) and their labels (int64, N); an empty split is false."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: Tensor | slice) -> Split:
        return Split(self.images[chosen], self.labels[chosen])


@dataclass(frozen=True, eq=False)
class Data:
    """A data set ready to train on; `mean` and `std` are per channel, of pixels scaled to [0, 1]."""

    name: str
    train: Split
    validation: Split
    test: Split
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()
    """what the classes are called, where that is known"""

    def told(self) -> dict[str, list[Any]]:
        """What whoever uses a network later must know of its images."""
        return {"mean": list(self.mean), "std": list(self.std), "classes": list(self.classes)}


@dataclass(frozen=True)
class Augment:
    """Training order: shuffled, cropped at random after `crop` pixels of zero padding, half mirrored.

    With `cutout` a square of so many pixels a side is then blanked, its middle anywhere in the image.  With `mixup`
    an image is blended with another of its batch, and their labels alike; what it keeps of itself is drawn from
    Beta(mixup, mixup).
    """

    crop: int = 0
    flip: bool = False
    cutout: int = 0
    mixup: float = 0.0


def load_data(config: DataConfig, num_classes: int, seed: int) -> Data:
    """Read the data set that `config` names, check it, and hold out the validation split it asks for.

    >>> data = load_data(DataConfig("digits", validation=0.1), num_classes=10, seed=0)
    >>> len(data.train), len(data.validation), len(data.test)
    (1167, 130, 500)
    """
    config = replace(config, path=os.path.expanduser(config.path))  # here for all sources, those of users too
    splits: dict[str, Split] = {}
    for part, (images, labels) in read_arrays(config, num_classes, seed).items():
        split = Split(torch.from_numpy(images), torch.from_numpy(labels))
        _check(f"{config.name}, {part}", split, num_classes)
        splits[part] = _resized(split, config.image_size)
    train, test, validation = splits["train"], splits["test"], splits.get("val")
    for part, split in splits.items():
        if split.images.shape[1:] != train.images.shape[1:]:
            shapes = f"{tuple(split.images.shape[1:])}, train's {tuple(train.images.shape[1:])}"
            raise DataError(f"{config.name}, {part}: images are {shapes} (channels, height, width)")
    if validation is None:
        train, validation = _held_out(train, config.validation, seed)
    elif config.validation:
        raise DataError(f"data.validation: {config.name} has validation images of its own; set it to 0")
    mean, std = _statistics(train.images)
    return Data(config.name, train, validation, test, num_classes, mean, std, class_names(config))


class Batches:
    """The batches of a split on a device: normalised float images and their labels.

    Labels are numbers of classes; where images are blended, the part of each of the `num_classes`.
    With an `Augment` an epoch is one of training: shuffled, and without the last, smaller batch unless it is
    the only one.  With `augment=None` it is one of evaluation: every image, in order, in every epoch.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        device: torch.device | str = "cpu",
        augment: Augment | None = None,
        seed: int = 0,
        num_classes: int = 0,
    ) -> None:
        self.batch_size = batch_size
        self.num_classes = num_classes
        self.augment = augment
        self.seed = seed
        self.device = torch.device(device)
        self.images = split.images.to(self.device)
        self.labels = split.labels.to(self.device)
        # Pixels stay 0..255 until here, so the statistics are scaled instead of every batch.
        self.mean, self.std = (
            torch.tensor([255.0 * value for value in values], device=self.device).view(-1, 1, 1)
            for values in (mean, std)
        )

    def __len__(self) -> int:
        full, rest = divmod(len(self.labels), self.batch_size)
        return full if full and self.augment else full + bool(rest)

    def epoch(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch number `index`."""
        if self.augment is None:
            for start in range(0, len(self.labels), self.batch_size):
                chosen = slice(start, start + self.batch_size)
                yield self._normalised(self.images[chosen]), self.labels[chosen]
            return
        drawn = {name: choice.to(self.device) for name, choice in self.draw(index).items()}
        for step in range(len(self)):
            part = slice(step * self.batch_size, (step + 1) * self.batch_size)
            yield self.take(**{name: choice[part] for name, choice in drawn.items()})

    def draw(self, index: int) -> dict[str, Tensor]:
        """All random choices of an epoch, one per image and argument of `take`.

        They are drawn on the CPU, so that an epoch is the same on every device.
        """
        augment = self.augment or Augment()
        seeds = np.random.SeedSequence((self.seed, index))
        random = torch.Generator().manual_seed(int(seeds.generate_state(1)[0]))
        count = len(self.labels)
        drawn = {"order": torch.randperm(count, generator=random)}
        drawn["top"], drawn["left"] = torch.randint(0, 2 * augment.crop + 1, (2, count), generator=random)
        drawn["mirrored"] = torch.rand(count, generator=random) < (0.5 if augment.flip else 0.0)
        if augment.cutout:
            drawn["middle"] = torch.rand(count, 2, generator=random)
        if augment.mixup:
            own = np.random.default_rng(seeds).beta(augment.mixup, augment.mixup, count)
            drawn["own"] = torch.from_numpy(own).float()
        return drawn

    def take(
        self,
        order: Tensor,
        top: Tensor,
        left: Tensor,
        mirrored: Tensor,
        middle: Tensor | None = None,
        own: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One batch from its part of what was drawn.

        That is the order of the images, the offsets of their crops, whether each is mirrored, where the middle of
        what is cut out of it lies (a part of its height and of its width), and what a blend keeps of it.
        """
        images = self.images[order]
        if self.augment and (self.augment.crop or self.augment.flip):
            down, across = (torch.arange(size, device=self.device) for size in images.shape[-2:])
            columns = left[:, None] + torch.where(mirrored[:, None], across.flip(0), across)
            images = _gathered(F.pad(images, (self.augment.crop,) * 4), top[:, None] + down, columns)
        images, labels = self._normalised(images), self.labels[order]
        if middle is not None:
            assert self.augment is not None
            images = images * _outside(middle, self.augment.cutout, images.shape[-2:])
        if own is None:
            return images, labels
        # Their order is random already: the first goes with the last, the second with the last but one.
        parts = F.one_hot(labels, self.num_classes).to(images.dtype)
        return _blended(images, own.view(-1, 1, 1, 1)), _blended(parts, own.view(-1, 1))

    def _normalised(self, images: Tensor) -> Tensor:
        return (images.to(self.mean.dtype) - self.mean) / self.std


def _gathered(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """From each image its own rows and columns: crop and mirror in one indexing."""
    image = torch.arange(len(images), device=images.device).view(-1, 1, 1, 1)
    channel = torch.arange(images.shape[1], device=images.device).view(-1, 1, 1)
    return images[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _outside(middle: Tensor, side: int, shape: Sequence[int]) -> Tensor:
    """0 in a square around each middle, of which the border may cut off a part, and 1 elsewhere."""
    inside = []
    for part, size in zip(middle.unbind(1), shape, strict=True):
        first = (part * size).long() - side // 2
        away = torch.arange(size, device=middle.device) - first[:, None]
        inside.append((away >= 0) & (away < side))
    down, across = inside
    return (~(down[:, None, :, None] & across[:, None, None, :])).float()


def _blended(values: Tensor, own: Tensor) -> Tensor:
    return own * values + (1 - own) * values.flip(0)


def _check(where: str, split: Split, num_classes: int) -> None:
    if len(split.images) != len(split.labels):
        raise DataError(f"{where}: {len(split.images)} images but {len(split.labels)} labels")
    if not len(split):
        raise DataError(f"{where}: holds no images")
    low, high = int(split.labels.min()), int(split.labels.max())
    if low < 0 or high >= num_classes:
        wrong = low if low < 0 else high
        raise DataError(
            f"{where}: label {wrong} is outside 0..{num_classes - 1} (model.num_classes = {num_classes})"
        )


def _resized(split: Split, size: int) -> Split:
    if not size or split.images.shape[-2:] == (size, size):
        return split
    images = F.interpolate(split.images, (size, size), mode="bilinear", antialias=True)
    return Split(images, split.labels)


def _held_out(train: Split, fraction: float, seed: int) -> tuple[Split, Split]:
    """Split off `fraction` of each class, chosen by the seed; the rest keeps its order."""
    random = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(train), dtype=torch.bool)
    for label in train.labels.unique():
        members = (train.labels == label).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=random)]
        held[shuffled[: round(fraction * len(members))]] = True
    if held.all():
        raise DataError(f"data.validation: {fraction} leaves none of {len(train)} images to train on")
    if fraction and not held.any():
        raise DataError(f"data.validation: {fraction} of {len(train)} images holds none out; raise it")
    return train[~held], train[held]


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel, exact: there are only 256 values to count."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].flatten(), minlength=256)
        share = counts.double() / counts.sum()
        mean = float((share * values).sum())
        deviation = float((share * (values - mean) ** 2).sum().sqrt())
        means.append(mean)
        deviations.append(deviation or 1.0)  # a constant channel is only shifted
    return tuple(means), tuple(deviations)

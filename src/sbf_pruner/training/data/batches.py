"""Splits of a data set, and batches of normalized float images made from them.

A split is held in memory (`Split`) or read on demand (`LazySplit`). `DeviceBatches` keeps a `Split` on the
device and makes each batch there with a few tensor operations, without worker processes; `images.LoaderBatches`
reads a `LazySplit`. The contents of an epoch depend only on the seed and the number of the epoch, and random
numbers are drawn on the CPU, so an epoch can be repeated after a resume and on any device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Self, TypedDict, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ...errors import DataError
from ...graph.tracer import fixed_seed
from ...utils.distributed import DistributedContext
from ...utils.user_code import failing_line


@dataclass(frozen=True, eq=False)
class Split:
    """Images (uint8, N,C,H,W) and their labels (int64, N) in memory. An empty split is falsy."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: Tensor | slice) -> Split:
        return Split(self.images[chosen], self.labels[chosen])

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width."""
        return tuple(self.images.shape[1:])


@dataclass(frozen=True, eq=False)
class LazySplit:
    """Rows of a map-style dataset of (image, label) pairs, read on demand."""

    dataset: Dataset[Any]
    rows: Tensor
    shape: tuple[int, ...]
    """channels, height and width"""
    labels: Tensor | None = None
    """labels of the rows; None if they are unknown before the items are read"""
    pixels: bool = True
    """True if images are uint8 and need normalization, False if they are floats that are used as they are"""
    where: str = "the dataset"
    """name of the dataset in error messages"""
    windows: bool = False
    """True if the dataset accepts (row, window) as an index and then reads a part of the image"""

    @classmethod
    def of(cls, dataset: Dataset[Any], where: str) -> LazySplit:
        """Wrap all rows of a user's dataset; `where` names it in error messages.

        Reads the first item to find the shape and dtype of the images. Raises a DataError if that fails, or if the
        dataset is empty or not map-style.
        """
        kind = type(dataset)
        if isinstance(dataset, DataLoader) or not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
            raise DataError(
                f"{where}: a {kind.__name__} is not a map-style dataset; give one with __len__ and __getitem__"
            )
        try:
            count = len(dataset)  # type: ignore[arg-type]
            with fixed_seed(nn.Identity()):  # Leave the user's random number generators as they are.
                item = dataset[0] if count else None
        except Exception as error:
            raise DataError(f"{where}: its first item cannot be read: {failing_line(error)}") from error
        if not count:
            raise DataError(f"{where}: holds no images")
        image = check_item(item, where)
        return cls(dataset, torch.arange(count), tuple(image.shape), None, image.dtype == torch.uint8, where)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: Tensor | slice) -> LazySplit:
        labels = None if self.labels is None else self.labels[chosen]
        return replace(self, rows=self.rows[chosen], labels=labels)

    def spread(self, most: int) -> list[int]:
        """Return up to `most` of the rows, evenly spaced."""
        return [int(row) for row in self.rows[:: -(-len(self) // most)]]


def wrong_label(labels: Tensor, num_classes: int) -> str | None:
    """Describe a label outside of `0..num_classes - 1`; return None if there is none.

    >>> wrong_label(torch.tensor([0, 3]), 2)
    'label 3 is outside 0..1; count classes from 0, or set model.num_classes (it is 2)'
    """
    low, high = int(labels.min()), int(labels.max())
    if 0 <= low <= high < num_classes:
        return None
    wrong = low if low < 0 else high
    remedy = f"count classes from 0, or set model.num_classes (it is {num_classes})"
    return f"label {wrong} is outside 0..{num_classes - 1}; {remedy}"


def check_item(item: Any, where: str) -> Tensor:
    """Return the image of an (image, label) pair; raise a DataError if the item is not a valid pair."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise DataError(f"{where}: an item is a {type(item).__name__}; give pairs of an image and its label")
    image, label = item
    if not isinstance(image, Tensor):
        raise DataError(
            f"{where}: an image is a {type(image).__name__}; give tensors (of torchvision's transforms, ToTensor)"
        )
    if image.dim() != 3 or not (image.is_floating_point() or image.dtype == torch.uint8):
        raise DataError(
            f"{where}: an image is {image.dtype} of shape {tuple(image.shape)}; give C,H,W as floats or uint8"
        )
    plain = isinstance(label, Tensor) and not label.dim() and not label.is_floating_point()
    if not (plain or isinstance(label, (int, np.integer))):
        raise DataError(f"{where}: a label is {label!r}; give the number of a class")
    return image


Batch = tuple[Tensor, Tensor]  # images and labels


@dataclass(frozen=True)
class Augment:
    """How training batches are augmented; all of them are shuffled.

    Images are cropped at random after `crop` pixels of zero padding, and with `flip` half of them are mirrored.
    `cutout` blanks a square with sides of so many pixels, whose center is anywhere in the image. `mixup` blends
    each image and its label with another of the batch; the image's own weight is drawn from Beta(mixup, mixup).
    With a `scale` below 1 a random window of at least that fraction of the image is used instead of all of it,
    which requires images that are read on demand.
    """

    crop: int = 0
    flip: bool = False
    cutout: int = 0
    mixup: float = 0.0
    scale: float = 1.0


class BatchOptions(TypedDict, total=False):
    """Keyword arguments that all kinds of batches accept."""

    device: torch.device | str
    augment: Augment | None
    seed: int
    num_classes: int


class Batches(ABC):
    """Batches of a split on a device: normalized float images and their labels.

    With an `Augment` an epoch is one of training: shuffled, and without the last, smaller batch unless it is the
    only one. With `augment=None` it is one of evaluation: every image, in order. Labels are class indices or, with
    mixup, one row of `num_classes` probabilities per image. Images are not normalized if `mean` and `std` are
    empty.
    """

    def __init__(
        self,
        split: Split | LazySplit,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        device: torch.device | str = "cpu",
        augment: Augment | None = None,
        seed: int = 0,
        num_classes: int = 0,
    ) -> None:
        self.count, self.shape = len(split), split.shape
        self.batch_size = batch_size
        self.num_classes = num_classes
        self.augment = augment
        self.seed = seed
        self.device = torch.device(device)
        # Pixels are in 0..255, so scale the statistics once instead of scaling every batch.
        self.mean, self.std = (
            torch.tensor([255.0 * value for value in values], device=self.device).view(-1, 1, 1)
            for values in (mean, std)
        )

    def __len__(self) -> int:
        full, rest = divmod(self.count, self.batch_size)
        return full if full and self.augment else full + bool(rest)

    @property
    def each(self) -> int:
        """Number of images in a training batch."""
        return min(self.batch_size, self.count)

    @abstractmethod
    def epoch(self, index: int, first: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch number `index`, from batch number `first` on."""

    def regrouped(self, batch_size: int, augment: Augment) -> Self:
        """Return batches of the same images with another batch size and augmentation; nothing is copied."""
        found = copy(self)
        found.batch_size, found.augment = batch_size, augment
        return found

    def parts(self, index: int, team: DistributedContext, first: int = 0) -> Iterator[Batch]:
        """Yield the part of each batch of an epoch that belongs to a rank, from batch number `first` on."""
        for images, labels in self.epoch(index, first):
            yield team.part(images), team.part(labels)

    def draw(self, index: int) -> dict[str, Tensor]:
        """Draw all random choices of an epoch, one row per image: order, windows, and the arguments of `dressed`.

        A window is four numbers: its fraction of the area of the image, and from 0 to 1 its shape from tall to
        wide, and its position from left to right and from top to bottom. All numbers are drawn on the CPU, so an
        epoch is the same on every device.
        """
        augment, count = self.augment or Augment(), self.count
        seeds = np.random.SeedSequence((self.seed, index))
        random = torch.Generator().manual_seed(int(seeds.generate_state(1)[0]))
        drawn = {"order": torch.randperm(count, generator=random)}
        drawn["top"], drawn["left"] = torch.randint(0, 2 * augment.crop + 1, (2, count), generator=random)
        drawn["mirrored"] = torch.rand(count, generator=random) < (0.5 if augment.flip else 0.0)
        if augment.cutout:
            drawn["middle"] = torch.rand(count, 2, generator=random)
        if augment.scale < 1:
            drawn["window"] = torch.rand(count, 4, generator=random)
            drawn["window"][:, 0].mul_(1 - augment.scale).add_(augment.scale)
        if augment.mixup:
            own = np.random.default_rng(seeds).beta(augment.mixup, augment.mixup, count)
            drawn["own"] = torch.from_numpy(own).float()
        return drawn

    def dressed(
        self,
        images: Tensor,
        labels: Tensor,
        top: Tensor,
        left: Tensor,
        mirrored: Tensor,
        middle: Tensor | None = None,
        own: Tensor | None = None,
    ) -> Batch:
        """Crop, mirror, normalize, cut out and blend the images of a training batch.

        `top` and `left` are the offsets of the crops, and `mirrored` tells which images are mirrored. `middle` is
        the center of each cutout, as fractions of height and width, and `own` the weight of each image in its
        blend.
        """
        if self.augment and (self.augment.crop or self.augment.flip):
            down, across = (torch.arange(size, device=self.device) for size in images.shape[-2:])
            columns = left[:, None] + torch.where(mirrored[:, None], across.flip(0), across)
            images = _gathered(F.pad(images, (self.augment.crop,) * 4), top[:, None] + down, columns)
        images = self.normalised(images)
        if middle is not None:
            assert self.augment is not None
            images = images * _outside(middle, self.augment.cutout, images.shape[-2:])
        if own is None:
            return images, labels
        # The order is random already, so the first image is blended with the last, the second with the last but
        # one.
        parts = F.one_hot(labels, self.num_classes).to(images.dtype)
        return _blended(images, own.view(-1, 1, 1, 1)), _blended(parts, own.view(-1, 1))

    def normalised(self, images: Tensor) -> Tensor:
        """Convert images to floats and normalize them, if there are a mean and a deviation."""
        images = images.to(self.mean.dtype)
        return (images - self.mean) / self.std if self.mean.numel() else images


class DeviceBatches(Batches):
    """Batches of images that are kept on the device."""

    def __init__(
        self,
        split: Split,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        **how: Unpack[BatchOptions],
    ) -> None:
        super().__init__(split, batch_size, mean, std, **how)
        self.images = split.images.to(self.device)
        self.labels = split.labels.to(self.device)

    def epoch(self, index: int, first: int = 0) -> Iterator[Batch]:
        if self.augment is None:
            for start in range(first * self.batch_size, self.count, self.batch_size):
                chosen = slice(start, start + self.batch_size)
                yield self.normalised(self.images[chosen]), self.labels[chosen]
            return
        drawn = {name: choice.to(self.device) for name, choice in self.draw(index).items()}
        for step in range(first, len(self)):
            part = slice(step * self.batch_size, (step + 1) * self.batch_size)
            yield self.take(**{name: choice[part] for name, choice in drawn.items()})

    def take(self, order: Tensor, *args: Tensor, **kwargs: Tensor) -> Batch:
        """Make one batch from its part of the result of `draw`: image indices, and the arguments of `dressed`."""
        return self.dressed(self.images[order], self.labels[order], *args, **kwargs)


def _gathered(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Select rows and columns for each image, which crops and mirrors in one indexing operation."""
    image = torch.arange(len(images), device=images.device).view(-1, 1, 1, 1)
    channel = torch.arange(images.shape[1], device=images.device).view(-1, 1, 1)
    return images[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _outside(middle: Tensor, side: int, shape: Sequence[int]) -> Tensor:
    """Return 0 in a square around each `middle`, clipped at the borders, and 1 elsewhere, as N,1,H,W."""
    inside = []
    for part, size in zip(middle.unbind(1), shape, strict=True):
        first = (part * size).long() - side // 2
        away = torch.arange(size, device=middle.device) - first[:, None]
        inside.append((away >= 0) & (away < side))
    down, across = inside
    return (~(down[:, None, :, None] & across[:, None, None, :])).float()


def _blended(values: Tensor, own: Tensor) -> Tensor:
    return own * values + (1 - own) * values.flip(0)

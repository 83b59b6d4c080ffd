"""A part of a data set: images that lie in memory, or that are read when they are needed.

Both kinds know how many images they hold, their shape and, where they are known, their labels, and give a part of
themselves.  What turns them into batches is `batches` for the first kind and `loaded` for the second.

The batches of a split, epoch by epoch: normalised float images and their labels.

What an epoch holds follows from the seed and the epoch's number alone (random numbers are drawn on the CPU): it can
be replayed after a resume, on any device.  `Resident` keeps a split on the device and makes each batch there with a
few tensor operations, without workers; `loaded` has the kind that reads images as they are needed.
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
from ...graph.tracer import same_chance
from ...utils.distributed import Team
from ...utils.user_code import failing_line


@dataclass(frozen=True, eq=False)
class Split:
    """Images (uint8, N,C,H,W) and their labels (int64, N); an empty split is false."""

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
class Stream:
    """Rows of a map-style dataset of (image, label) pairs, read when they are needed."""

    dataset: Dataset[Any]
    rows: Tensor
    shape: tuple[int, ...]
    """channels, height and width"""
    labels: Tensor | None = None
    """of the rows, where they are known without reading"""
    pixels: bool = True
    """are images uint8, to be normalised, or floats that come as the network is to see them?"""
    where: str = "the dataset"
    """what messages call it"""
    windows: bool = False
    """may a part of an image be asked for, by (row, window) instead of the row?"""

    @classmethod
    def of(cls, dataset: Dataset[Any], where: str) -> Stream:
        """All of a dataset of the user's; `where` names it in messages."""
        kind = type(dataset)
        if isinstance(dataset, DataLoader) or not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
            raise DataError(
                f"{where}: a {kind.__name__} is no map-style dataset, with __len__ and __getitem__; give one"
            )
        try:
            count = len(dataset)  # type: ignore[arg-type]
            with same_chance(nn.Identity()):  # a look must not move the user's random numbers
                item = dataset[0] if count else None
        except Exception as error:
            raise DataError(f"{where}: its first item cannot be read: {failing_line(error)}") from error
        if not count:
            raise DataError(f"{where}: holds no images")
        image = check_item(item, where)
        return cls(dataset, torch.arange(count), tuple(image.shape), None, image.dtype == torch.uint8, where)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: Tensor | slice) -> Stream:
        labels = None if self.labels is None else self.labels[chosen]
        return replace(self, rows=self.rows[chosen], labels=labels)

    def spread(self, most: int) -> list[int]:
        """Up to `most` of the rows, evenly spread."""
        return [int(row) for row in self.rows[:: -(-len(self) // most)]]


def wrong_label(labels: Tensor, num_classes: int) -> str | None:
    """What is wrong with labels of which one is no class.

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
    """The image of an item, which is an image with its label."""
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
    """Training order: shuffled, cropped at random after `crop` pixels of zero padding, half mirrored.

    With a `scale` below 1 a window of at least that part of the image is looked at instead of all of it, where
    images are read as they are needed.  With `cutout` a square of so many pixels a side is then blanked, its middle
    anywhere in the image.  With `mixup` an image is blended with another of its batch, and their labels alike; what
    it keeps of itself is drawn from Beta(mixup, mixup).
    """

    crop: int = 0
    flip: bool = False
    cutout: int = 0
    mixup: float = 0.0
    scale: float = 1.0


class How(TypedDict, total=False):
    """The settings that all kinds of batches have."""

    device: torch.device | str
    augment: Augment | None
    seed: int
    num_classes: int


class Batches(ABC):
    """The batches of a split on a device: normalised float images and their labels.

    Labels are numbers of classes; where images are blended, the part of each of the `num_classes`.
    With an `Augment` an epoch is one of training: shuffled, and without the last, smaller batch unless it is
    the only one.  With `augment=None` it is one of evaluation: every image, in order, in every epoch.
    Without `mean` and `std` images are taken as they come.
    """

    def __init__(
        self,
        split: Split | Stream,
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
        # Pixels stay 0..255 until a batch is made, so the statistics are scaled instead of every batch.
        self.mean, self.std = (
            torch.tensor([255.0 * value for value in values], device=self.device).view(-1, 1, 1)
            for values in (mean, std)
        )

    def __len__(self) -> int:
        full, rest = divmod(self.count, self.batch_size)
        return full if full and self.augment else full + bool(rest)

    @property
    def each(self) -> int:
        """How many images a batch of training has."""
        return min(self.batch_size, self.count)

    @abstractmethod
    def epoch(self, index: int, first: int = 0) -> Iterator[Batch]:
        """The batches of epoch number `index`, from number `first` on."""

    def regrouped(self, batch_size: int, augment: Augment) -> Self:
        """The same images in training batches of another size, or augmented otherwise."""
        found = copy(self)
        found.batch_size, found.augment = batch_size, augment
        return found

    def parts(self, index: int, team: Team, first: int = 0) -> Iterator[Batch]:
        """What one process of a team sees of an epoch, from batch number `first` on."""
        for images, labels in self.epoch(index, first):
            yield team.part(images), team.part(labels)

    def draw(self, index: int) -> dict[str, Tensor]:
        """All random choices of an epoch, one for each image: order, windows, and the arguments of `dressed`.

        A window is the part of the image's area that it has, and three numbers from 0 to 1: its shape from tall
        to wide, and where it lies from left to right and from top to bottom.  All are drawn on the CPU, so that an
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
        """A batch as the network is trained on it, by its part of what was drawn.

        That is the offsets of the images' crops, whether each is mirrored, where the middle of what is cut out of
        it lies (a part of its height and of its width), and what a blend keeps of it.
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
        # Their order is random already: the first goes with the last, the second with the last but one.
        parts = F.one_hot(labels, self.num_classes).to(images.dtype)
        return _blended(images, own.view(-1, 1, 1, 1)), _blended(parts, own.view(-1, 1))

    def normalised(self, images: Tensor) -> Tensor:
        """Images as the network sees them."""
        images = images.to(self.mean.dtype)
        return (images - self.mean) / self.std if self.mean.numel() else images


class Resident(Batches):
    """Batches of images that lie on the device."""

    def __init__(
        self, split: Split, batch_size: int, mean: Sequence[float], std: Sequence[float], **how: Unpack[How]
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
        """One batch from its part of what was drawn: the images' order, and what `dressed` makes of them."""
        return self.dressed(self.images[order], self.labels[order], *args, **kwargs)


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

"""Splits of a data set, batches of normalized float images made from them, and the batches of each phase of a run.

A split is held in memory (`Split`) or read on demand (`LazySplit`). `DeviceBatches` keeps a `Split` on the
device and makes each batch there with a few tensor operations; `LoaderBatches` reads a `LazySplit` in worker
processes. An epoch depends only on the seed and its number, and random numbers are drawn on the CPU, so it can
be repeated after a resume, on any device and with any number of workers. An item that cannot be read raises a
one-sentence `DataError` instead of a traceback from a worker.
"""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from ...errors import DataError, PruningError
from ...graph.tracer import fixed_seed
from ...schedule import Phase
from ...utils.distributed import DistributedContext
from ...utils.user_code import failing_line
from ..device import choose_memory_format
from ..recipe import Recipe
from ..schedule import batch_size, optimizer_config


@dataclass(frozen=True, eq=False)
class Split:
    """Images (uint8, `(N, C, H, W)`) and labels (int64, `(N,)`) in memory. An empty split is falsy."""

    images: Tensor
    labels: Tensor
    pixels, windows = True, False  # Class attributes; see `LazySplit`.

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
    shape: tuple[int, ...]  # channels, height and width
    labels: Tensor | None = None  # of the rows; None if they are unknown before the items are read
    pixels: bool = True  # True if images are uint8 and need normalization; floats are used as they are
    where: str = "the dataset"  # name of the dataset in error messages
    windows: bool = False  # True if the dataset accepts (row, window) as an index, to read a part of the image

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
            with fixed_seed(nn.Identity()):  # Do not advance the user's random number generators.
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


@dataclass(frozen=True, eq=False)
class Data:
    """A data set ready for training; `mean` and `std` are per channel, of pixels scaled to [0, 1].

    Both are empty if images are floats, which are used without normalization.
    """

    name: str
    train: Split | LazySplit
    validation: Split | LazySplit
    test: Split | LazySplit
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()  # names of the classes; empty if unknown

    @property
    def counts(self) -> dict[str, int]:
        return {"train": len(self.train), "validation": len(self.validation), "test": len(self.test)}

    def told(self) -> dict[str, list[Any]]:
        """Return what users of the trained network need: normalization and names of the classes."""
        return {"mean": list(self.mean), "std": list(self.std), "classes": list(self.classes)}


def wrong_label(labels: Tensor, num_classes: int) -> str | None:
    """Describe a label outside of `0..num_classes - 1`; return None if there is none.

    >>> wrong_label(torch.tensor([0, 3]), 2)
    'label 3 is outside 0..1; count classes from 0, or set model.num_classes (it is 2)'
    """
    low, high = int(labels.min()), int(labels.max())
    if 0 <= low <= high < num_classes:
        return None
    return (
        f"label {low if low < 0 else high} is outside 0..{num_classes - 1}; count classes from 0, or set "
        f"model.num_classes (it is {num_classes})"
    )


def check_item(item: Any, where: str) -> Tensor:
    """Return the image of an item; raise a DataError if the item is not a valid (image, label) pair."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise DataError(f"{where}: an item is a {type(item).__name__}; give pairs of an image and its label")
    image, label = item
    if not isinstance(image, Tensor):
        kind = type(image).__name__
        raise DataError(f"{where}: an image is a {kind}, not a tensor; add ToTensor() to the dataset's transform")
    if image.dim() != 3 or not (image.is_floating_point() or image.dtype == torch.uint8):
        raise DataError(
            f"{where}: an image is {image.dtype} of shape {tuple(image.shape)}; give C,H,W as floats or uint8"
        )
    scalar = isinstance(label, Tensor) and not label.dim() and not label.is_floating_point()
    if not (scalar or isinstance(label, (int, np.integer))):
        raise DataError(f"{where}: a label is {label!r}; give the number of a class")
    return image


Batch = tuple[Tensor, Tensor]  # images and labels


@dataclass(frozen=True)
class Augment:
    """Augmentation of training batches, which are always shuffled.

    Images are cropped at random after `crop` pixels of zero padding; if `flip` is true, half of them are mirrored.
    A square of `cutout` pixels a side, whose center is anywhere in the image, is blanked. If `mixup` is above 0,
    each image and its label are blended with another of the batch; the image's own weight is drawn from Beta(mixup,
    mixup). If `scale` is below 1, a random window of at least that fraction of the image's area is used, which
    requires images that are read on demand.
    """

    crop: int = 0
    flip: bool = False
    cutout: int = 0
    mixup: float = 0.0
    scale: float = 1.0


class Batches(ABC):
    """Batches of a split on a device: normalized float images and their labels.

    If `augment` is given, epochs are for training: shuffled, and without a smaller last batch unless it is the only
    one. If it is None, epochs are for evaluation: every image, in order. Labels are class indices or, with
    mixup, rows of `num_classes` probabilities. Images are not normalized if `mean` and `std` are empty.
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
        self.batch_size, self.augment = batch_size, augment
        self.seed, self.num_classes = seed, num_classes
        self.device = torch.device(device)
        # Pixels are in 0..255; scaling mean and deviation once avoids scaling every batch.
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

    def parts(self, index: int, team: DistributedContext, first: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of each batch of epoch number `index`, from batch number `first` on."""
        for images, labels in self.epoch(index, first):
            yield team.part(images), team.part(labels)

    def draw(self, index: int) -> dict[str, Tensor]:
        """Return all random choices of an epoch, one row per image: order, windows and arguments of `dressed`.

        A window is four numbers: its fraction of the area of the image, and then, each from 0 to 1, its shape (tall
        to wide) and its position (left to right, top to bottom).
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

        `top` and `left` are the offsets of the crops; `middle` is the center of each cutout, as fractions of height
        and width, and `own` the weight of each image in its blend.
        """
        if self.augment and (self.augment.crop or self.augment.flip):
            down, across = (torch.arange(size, device=self.device) for size in images.shape[-2:])
            columns = left[:, None] + torch.where(mirrored[:, None], across.flip(0), across)
            rows, padded = top[:, None] + down, F.pad(images, (self.augment.crop,) * 4)
            image = torch.arange(len(images), device=self.device).view(-1, 1, 1, 1)
            channel = torch.arange(images.shape[1], device=self.device).view(-1, 1, 1)
            images = padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
        images = self.normalised(images)
        if middle is not None:
            assert self.augment is not None
            images = images * _outside(middle, self.augment.cutout, images.shape[-2:])
        if own is None:
            return images, labels
        # The images are in random order, so blend the batch with itself in reverse order.
        parts = F.one_hot(labels, self.num_classes).to(images.dtype)
        return _blended(images, own.view(-1, 1, 1, 1)), _blended(parts, own.view(-1, 1))

    def normalised(self, images: Tensor) -> Tensor:
        """Convert images to floats; normalize them unless mean and standard deviation are empty."""
        images = images.to(self.mean.dtype)
        return (images - self.mean) / self.std if self.mean.numel() else images


class DeviceBatches(Batches):
    """Batches of images that are kept on the device; other arguments are those of `Batches`."""

    def __init__(self, split: Split, *others: Any, **options: Any) -> None:
        super().__init__(split, *others, **options)
        self.images = split.images.to(self.device)
        self.labels = split.labels.to(self.device)

    def epoch(self, index: int, first: int = 0) -> Iterator[Batch]:
        draw = self.draw(index) if self.augment else {}
        drawn = {name: choice.to(self.device) for name, choice in draw.items()}
        for step in range(first, len(self)):
            part = slice(step * self.batch_size, (step + 1) * self.batch_size)
            if self.augment:
                yield self.take(**{name: choice[part] for name, choice in drawn.items()})
            else:
                yield self.normalised(self.images[part]), self.labels[part]

    def take(self, order: Tensor, *args: Tensor, **kwargs: Tensor) -> Batch:
        """Return one batch, given its rows of the result of `draw`: image indices and arguments of `dressed`."""
        return self.dressed(self.images[order], self.labels[order], *args, **kwargs)


def _outside(middle: Tensor, side: int, shape: Sequence[int]) -> Tensor:
    """Return masks `(N, 1, H, W)`: 0 in a square around each `middle`, clipped at the borders, 1 elsewhere."""
    inside = []
    for part, size in zip(middle.unbind(1), shape, strict=True):
        first = (part * size).long() - side // 2
        offset = torch.arange(size, device=middle.device) - first[:, None]
        inside.append((offset >= 0) & (offset < side))
    down, across = inside
    return (~(down[:, None, :, None] & across[:, None, None, :])).float()


def _blended(values: Tensor, own: Tensor) -> Tensor:
    return own * values + (1 - own) * values.flip(0)


Key = int | tuple[int, tuple[float, ...]]  # a row of the dataset, or a row and the window to read
Chance = int  # seed of the random numbers that are drawn while an item is read


class LoaderBatches(Batches):
    """Batches of images that are read on demand by `workers` processes, or by this process (0)."""

    def __init__(self, stream: LazySplit, *others: Any, workers: int = 0, **options: Any) -> None:
        super().__init__(stream, *others, **options)
        self.stream, self.workers = stream, workers

    def epoch(self, index: int, first: int = 0) -> Iterator[Batch]:
        return self._read(index, DistributedContext(), first)

    def parts(self, index: int, team: DistributedContext, first: int = 0) -> Iterator[Batch]:
        # Mixup blends images of the whole batch, so every rank has to read all of it.
        if self.augment and self.augment.mixup:
            return super().parts(index, team, first)
        return self._read(index, team, first)

    def _read(self, index: int, team: DistributedContext, first: int) -> Iterator[Batch]:
        """Yield the part of each batch that belongs to the rank of `team`, all of it if there is one rank."""
        drawn = self.draw(index) if self.augment else {"order": torch.arange(self.count)}
        starts = range(first * self.batch_size, len(self) * self.batch_size, self.batch_size)
        rows = [torch.arange(start, min(start + self.batch_size, self.count)) for start in starts]
        mine = [part for part in map(team.part, rows) if len(part)]  # The last may have fewer images than ranks.
        order, windows = drawn.pop("order"), drawn.pop("window", None)
        # Every item has its own seed, so its random transforms do not depend on the worker or on other items.
        seeds = np.random.SeedSequence((self.seed, index, 2)).generate_state(self.count)
        chances = torch.from_numpy(seeds.astype(np.int64))
        requests = []
        for part in mine:
            keys: Any = self.stream.rows[order[part]].tolist()
            if windows is not None:
                keys = zip(keys, map(tuple, windows[part].tolist()), strict=True)
            requests.append(list(zip(keys, chances[part].tolist(), strict=True)))
        for part, read in zip(mine, self._loaded(requests), strict=True):
            if isinstance(read, DataError):
                read.alone = not team.alone  # Ranks read different items, so only this rank fails.
                raise read
            images, labels = (tensor.to(self.device, non_blocking=True) for tensor in read)
            if self.augment:
                chosen = {name: choice[part].to(self.device) for name, choice in drawn.items()}
                yield self.dressed(images, labels, **chosen)
            else:
                yield self.normalised(images), labels

    def _loaded(self, requests: list[list[tuple[Key, Chance]]]) -> Iterator[Batch | DataError]:
        """Yield each batch that the workers have read, or a DataError if it could not be read.

        The caller raises the error, because a traceback through this generator would keep the workers alive.
        """
        loader: DataLoader[Any] = DataLoader(
            _BatchReader(self.stream, self.num_classes),
            batch_sampler=requests,
            num_workers=min(self.workers, len(requests)),
            collate_fn=_identity,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_ignore_first_signal,
            generator=torch.Generator(),  # By default the loader draws from the global generator.
        )
        try:
            yield from loader
        except RuntimeError as error:  # A worker was killed, or shared memory is full.
            reason = str(error).splitlines()[0]
            raise DataError(f"a data loading worker failed ({reason}); set data.workers=0") from error


def sample(stream: LazySplit, most: int, seed: int) -> Tensor:
    """Return the images of up to `most` evenly spaced rows; their random transforms depend on the seed alone."""
    rows = stream.rows[:: -(-len(stream) // most)].tolist()
    found = _BatchReader(stream).__getitems__([(row, seed % 2**32) for row in rows])
    if isinstance(found, DataError):
        raise found
    return found[0]


class _BatchReader(Dataset[Any]):
    """Dataset that reads whole batches of a stream, and returns a DataError for one that cannot be read."""

    def __init__(self, stream: LazySplit, num_classes: int = 0) -> None:
        self.stream, self.num_classes = stream, num_classes  # 0: do not check labels

    def __getitems__(self, keys: Sequence[tuple[Key, Chance]]) -> Batch | DataError:
        row = -1
        try:
            items = []
            for key, chance in keys:
                row = key if isinstance(key, int) else key[0]
                with fixed_seed(nn.Identity(), chance):
                    image, label = self.stream.dataset[key]
                self._check(image, label, self._item(row))
                items.append((image.detach(), int(label)))
            images, labels = default_collate(items)
        except PruningError as error:
            return DataError(str(error))
        except Exception as error:
            reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            return DataError(f"{self._item(row)} cannot be read ({reason}); repair or remove it")
        return images, labels

    def _check(self, image: Tensor, label: Any, item: str) -> None:
        check_item((image, label), item)
        if (image.dtype == torch.uint8) != self.stream.pixels:
            raise DataError(f"{item} is {image.dtype}, the first is not; give all images one dtype")
        if tuple(image.shape) != (first := self.stream.shape):
            shapes = f"{tuple(image.shape)}, and the first {first} (channels, height, width)"
            raise DataError(f"{item} is {shapes}; resize all to one size")
        if self.num_classes and (wrong := wrong_label(torch.tensor(int(label)), self.num_classes)) is not None:
            raise DataError(f"{item}: {wrong}")

    def _item(self, row: int) -> str:
        return f"{self.stream.where}, item {row}"


def _ignore_first_signal(worker: int) -> None:
    """Ignore the first SIGINT and SIGTERM in a worker.

    Terminals and schedulers send them to all processes of a group. The run stops after its current step, for which
    it may need another batch, and then ends its workers.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda given, frame: signal.signal(given, signal.SIG_DFL))


def _identity(batch: Any) -> Any:
    return batch


# Smallest evaluation batch for images with sides of up to SMALL_IMAGE pixels; larger images use data.batch_size
MIN_EVAL_BATCH = 256
SMALL_IMAGE = 64


class RunBatches:
    """Training, test and validation batches of one run, on its device.

    The training images are held on the device once, whatever batch sizes the phases use.
    """

    def __init__(self, recipe: Recipe, data: Data, device: torch.device, model: nn.Module) -> None:
        self._recipe, self._data, self._device = recipe, data, device
        self._check_sizes()
        self._plain = Augment(recipe.data.crop, recipe.data.flip, scale=recipe.data.scale)
        self.train = self._batches(data.train, self._plain)
        self.test = self._batches(data.test)
        self.validation = self._batches(data.validation) if len(data.validation) else None
        images = next(self.test.epoch(0))[0]
        self.order = choose_memory_format(model, images[:2])
        # the first test images, used to trace, verify and time networks
        self.images = images.contiguous(memory_format=self.order)

    def of(self, phase: Phase) -> Batches:
        """Return the training batches of a phase, with its batch size and augmentation."""
        batches = self.whole(phase)
        if phase.trains_weights:  # Scores are trained without cutout and mixup.
            config = optimizer_config(self._recipe, phase)
            batches.augment = replace(self._plain, cutout=config.cutout, mixup=config.mixup)
        return batches

    def whole(self, phase: Phase) -> Batches:
        """Return the training batches of a phase without cutout and mixup, for computing batch statistics."""
        batches = copy(self.train)  # The copy shares the images.
        batches.batch_size = batch_size(self._recipe, phase)
        return batches

    def _check_sizes(self) -> None:
        """Raise a DataError for a crop or cutout that may leave no pixel of an image."""
        height, width = self._data.train.shape[-2:]
        size = f"({height}x{width}); lower it"
        shift = self._recipe.data.crop
        if shift >= min(height, width):
            raise DataError(f"data.crop: a shift by {shift} pixels may leave nothing of an image {size}")
        for section in ("warmup", "weights", "finetune"):
            hole = getattr(self._recipe, section).cutout
            if hole >= max(height, width):
                raise DataError(f"{section}.cutout: a hole of {hole} pixels may cover a whole image {size}")

    def _batches(self, split: Split | LazySplit, augment: Augment | None = None) -> Batches:
        config = self._recipe.data
        size = config.batch_size
        if not augment and max(split.shape[-2:]) <= SMALL_IMAGE:
            size = max(size, MIN_EVAL_BATCH)
        options = {"device": self._device, "seed": self._recipe.seed, "num_classes": self._data.num_classes}
        return batches_of(split, size, self._data, workers=config.workers, augment=augment, **options)


def batches_of(
    split: Split | LazySplit, batch_size: int, data: Data, *, workers: int = -1, **options: Any
) -> Batches:
    """Return `DeviceBatches` for a `Split` and `LoaderBatches` for a `LazySplit`; `options` are those of `Batches`.

    If `workers` is negative, the available cores are divided among the ranks.
    """
    if isinstance(split, Split):
        return DeviceBatches(split, batch_size, data.mean, data.std, **options)
    if workers < 0:
        # The cores that this process may use or, if that is unknown, those of the machine.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = max(1, cores // DistributedContext.present().size)
    return LoaderBatches(split, batch_size, data.mean, data.std, workers=workers, **options)

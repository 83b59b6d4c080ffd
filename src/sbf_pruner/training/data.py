"""A data set ready to train on: checked, parted, and with what its pixels are normalised by.

The `[data]` section of a recipe enters, or datasets of the user's; `Data` leaves: training, validation and test
images, in memory or to be read as they are needed, with the training images' mean and deviation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from ..callables import UNTRUSTED, Origin
from ..errors import DataError
from .loaded import sample
from .material import DataConfig
from .sources import check_read, class_names, own_parts, read_parts
from .splits import Split, Stream, wrong_label

SAMPLED = 1024  # images, of those that are read as they are needed, to take mean and deviation from

Normal = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of each channel


@dataclass(frozen=True, eq=False)
class Data:
    """A data set ready to train on; `mean` and `std` are per channel, of pixels scaled to [0, 1].

    They are empty where images come as the network is to see them.
    """

    name: str
    train: Split | Stream
    validation: Split | Stream
    test: Split | Stream
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...] = ()
    """what the classes are called, where that is known"""

    @property
    def counts(self) -> dict[str, int]:
        """How many images there are to train on, to choose by and to judge by."""
        return {"train": len(self.train), "validation": len(self.validation), "test": len(self.test)}

    def told(self) -> dict[str, list[Any]]:
        """What whoever uses a network later must know of its images."""
        return {"mean": list(self.mean), "std": list(self.std), "classes": list(self.classes)}


def load_data(config: DataConfig, num_classes: int, seed: int, origin: Origin = UNTRUSTED) -> Data:
    """Read the data set that `config` names, check it, and hold out the validation split it asks for.

    Code of the user's is imported only if `origin` is trusted.

    >>> data = load_data(DataConfig("digits", validation=0.1), num_classes=10, seed=0)
    >>> len(data.train), len(data.validation), len(data.test)
    (1167, 130, 500)
    """
    config = replace(config, path=os.path.expanduser(config.path))  # here for all sources, those of users too
    return _assembled(config, read_parts(config, num_classes, seed, origin), num_classes, seed, class_names(config))


def own_data(datasets: Mapping[str, Dataset[Any]], config: DataConfig, num_classes: int, seed: int) -> Data:
    """The data set that the user's own datasets make up, one for each part."""
    check_read(config, ("path",))  # which belongs to the name, and that is another's
    return _assembled(config, own_parts(datasets, "data"), num_classes, seed)


def _assembled(
    config: DataConfig,
    parts: Mapping[str, Split | Stream],
    num_classes: int,
    seed: int,
    classes: tuple[str, ...] = (),
) -> Data:
    splits: dict[str, Split | Stream] = {}
    for part, split in parts.items():
        if split.labels is not None:
            _check(f"{config.name}, {part}", split, split.labels, num_classes)
        splits[part] = _resized(split, config.image_size) if isinstance(split, Split) else split
    train, test, validation = splits["train"], splits["test"], splits.get("val")
    for part, split in splits.items():
        if split.shape != train.shape:
            shapes = f"{split.shape}, train's {train.shape}"
            raise DataError(f"{config.name}, {part}: images are {shapes} (channels, height, width)")
        if _ready(split) != _ready(train):
            raise DataError(f"{config.name}, {part}: either train or {part} is uint8, and not both; give one type")
    if config.scale < 1 and not (isinstance(train, Stream) and train.windows):
        raise DataError("data.scale: windows are read from files; set data.name=folder and data.in_memory=false")
    if validation is None:
        train, validation = _held_out(train, config.validation, seed)
    elif config.validation:
        raise DataError(f"data.validation: {config.name} has validation images of its own; set it to 0")
    mean, std = _normal(config, train, seed)
    return Data(config.name, train, validation, test, num_classes, mean, std, classes)


def _ready(split: Split | Stream) -> bool:
    """Do images come as the network is to see them?"""
    return isinstance(split, Stream) and not split.pixels


def _normal(config: DataConfig, train: Split | Stream, seed: int) -> Normal:
    """What pixels are normalised by: as the recipe says, or by the training images themselves."""
    ready = _ready(train)
    if config.mean:
        if ready:
            raise DataError("data.mean: images that are floats are taken as they come; leave out mean and std")
        if len(config.mean) != train.shape[0]:
            raise DataError(
                f"data.mean: {len(config.mean)} numbers for {train.shape[0]} channels; give one for each"
            )
        return config.mean, config.std
    if ready:
        return (), ()
    return _statistics(train.images if isinstance(train, Split) else sample(train, SAMPLED, seed))


def _check(where: str, split: Split | Stream, labels: Tensor, num_classes: int) -> None:
    if isinstance(split, Split) and len(split.images) != len(labels):
        raise DataError(f"{where}: {len(split.images)} images but {len(labels)} labels; give one for each")
    if not len(split):
        raise DataError(f"{where}: holds no images")
    if (wrong := wrong_label(labels, num_classes)) is not None:
        raise DataError(f"{where}: {wrong}")


def _resized(split: Split, size: int) -> Split:
    if not size or split.images.shape[-2:] == (size, size):
        return split
    images = F.interpolate(split.images, (size, size), mode="bilinear", antialias=True)
    return Split(images, split.labels)


def _held_out(train: Split | Stream, fraction: float, seed: int) -> tuple[Split | Stream, Split | Stream]:
    """Split off `fraction` of each class, chosen by the seed; the rest keeps its order."""
    labels = train.labels
    if labels is None:
        if fraction:
            raise DataError("data.validation: of a dataset of your own no part is held out; give one called 'val'")
        return train, train[:0]
    random = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(train), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
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

"""A part of a data set: images that lie in memory, or that are read when they are needed.

Both kinds know how many images they hold, their shape and, where they are known, their labels, and give a part of
themselves.  What turns them into batches is `batches` for the first kind and `loaded` for the second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..errors import DataError
from ..graph.trace import same_chance
from ..graph.where import failing_line


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

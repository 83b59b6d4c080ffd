"""Folders of image files, and batches of images that are read on demand.

`Pictures` reads files all at once or one by one with the same function, so both give the same pixels.
`LoaderBatches` reads any `LazySplit` in worker processes (torch's `DataLoader`) while the network trains. The
images of a batch and the windows that are read of them depend only on the seed and the number of the epoch, not on
the number of workers. An item that cannot be read raises a one-sentence `DataError` instead of a traceback from a
worker.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from ...errors import DataError, PruningError, suggestion
from ...graph.tracer import fixed_seed
from ...utils.distributed import DistributedContext
from ...utils.formatting import first_names
from .batches import Batch, Batches, BatchOptions, LazySplit, Split, check_item, wrong_label

_log = logging.getLogger("sbf_pruner")

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
MODES = {1: "L", 3: "RGB"}
WIDEST = 4 / 3  # largest ratio of width to height of a window; the smallest is its inverse

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class View:
    """How an image of any size is converted to a square.

    >>> View(8).box(40, 20), View(8, fit="crop").box(40, 20), View(8, fit="crop", middle=0.5).box(40, 20)
    ((0.0, 0.0, 40.0, 20.0), (10.0, 0.0, 30.0, 20.0), (15.0, 5.0, 25.0, 15.0))
    >>> View(8).window(40, 20, (0.5, 0.5, 0.0, 1.0))
    (0.0, 0.0, 20.0, 20.0)
    """

    size: int
    channels: int = 3
    fit: str = "stretch"
    """the region to use: the whole image ("stretch") or the largest square around its center ("crop")"""
    middle: float = 1.0
    """fraction of each side of that region to use, around its center"""

    def box(self, width: int, height: int) -> Box:
        """Return the region of an image that is read by default."""
        square = min(width, height)
        sides = (square, square) if self.fit == "crop" else (width, height)
        across, down = (self.middle * side for side in sides)
        left, top = (width - across) / 2, (height - down) / 2
        return left, top, min(left + across, width), min(top + down, height)

    def window(self, width: int, height: int, drawn: Sequence[float]) -> Box:
        """Return the region of an image that is read in training, from the four numbers of `Batches.draw`."""
        area, shape, x, y = drawn
        ratio = math.exp((2 * shape - 1) * math.log(WIDEST))
        across = min(math.sqrt(area * width * height * ratio), width)
        down = min(math.sqrt(area * width * height / ratio), height)
        left, top = x * (width - across), y * (height - down)
        return left, top, min(left + across, width), min(top + down, height)


class Pictures(Dataset[tuple[Tensor, int]]):
    """Image files and their labels, each read on demand by its index or by (index, window)."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int], view: View) -> None:
        self.files, self.labels, self.view = files, labels, view

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: int | tuple[int, Sequence[float]]) -> tuple[Tensor, int]:
        row, window = key if isinstance(key, tuple) else (key, None)
        pixels = read_picture(self.files[row], self.view, window)
        return torch.from_numpy(pixels), self.labels[row]

    def stream(self) -> LazySplit:
        """Return a `LazySplit` that reads the images on demand."""
        shape = (self.view.channels, self.view.size, self.view.size)
        rows, labels = torch.arange(len(self)), torch.tensor(self.labels)
        return LazySplit(self, rows, shape, labels, windows=True)

    def split(self) -> Split:
        """Read all images now."""
        images = torch.empty(len(self), self.view.channels, self.view.size, self.view.size, dtype=torch.uint8)
        for row in range(len(self)):
            images[row] = self[row][0]
        return Split(images, torch.tensor(self.labels))


def list_pictures(root: Path, classes: Sequence[str], view: View) -> Pictures:
    """List the images in root/CLASS, class by class.

    Raises a DataError if there are no images, for a class that is not in `classes`, a folder inside a class, and a
    training class without images. Other files, and classes without images outside of training, cause a warning.
    """
    for folder in subfolders(root):
        if folder not in classes:
            raise DataError(f"{root / folder}: train has no class {folder!r}; {suggestion(folder, classes)}")
    found = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((root / name).glob("*"))
        if not path.name.startswith(".") and path.is_file()  # macOS creates hidden files beside images.
    ]
    files = [(path, label) for path, label in found if path.suffix.lower() in SUFFIXES]
    if not files:
        raise DataError(f"{root} holds no images; expected {root}/CLASS/*.png")
    if len(files) < len(found):
        others = sorted({path.suffix.lower() or path.name for path, _ in found} - SUFFIXES)
        _log.warning("%s: %d files are not read (%s)", root, len(found) - len(files), ", ".join(others))
    filled = {label for _, label in files}
    if root.name != "train" and (missing := [name for label, name in enumerate(classes) if label not in filled]):
        _log.warning("%s holds no images of %s", root, first_names(missing, 3))
    for label, name in enumerate(classes):
        for inner in subfolders(root / name) if (root / name).is_dir() else ():
            raise DataError(
                f"{root / name / inner}: images must lie in {root}/CLASS; move them there, or remove this folder"
            )
        if root.name == "train" and label not in filled:
            raise DataError(f"{root / name} holds no images; fill it, or remove it from train and test")
    return Pictures([path for path, _ in files], [label for _, label in files], view)


def subfolders(root: Path) -> list[str]:
    """Return the sorted names of the folders in a folder, without hidden ones."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def read_picture(path: Path, view: View, window: Sequence[float] | None = None) -> NDArray[np.uint8]:
    """Read a file as pixels (C,H,W), from a window or from the default region of `view`."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading image files needs Pillow; run: pip install 'sbf-pruner[images]'") from None
    if view.channels not in MODES:
        raise DataError(f"data.channels: folder reads 1 (grey) or 3 (colour) channels, not {view.channels}")
    try:
        with Image.open(path) as image:
            # Pillow would clip pixels of more than eight bits at white.
            shown = Image.fromarray(_to_8_bit(np.asarray(image))) if image.mode.startswith("I") else image
            box = view.box(*image.size) if window is None else view.window(*image.size, window)
            if "transparency" in image.info:  # Pillow would warn about every such image.
                shown = shown.convert("RGBA")
            whole = shown.convert(MODES[view.channels])
            pixels = np.array(whole.resize((view.size, view.size), Image.Resampling.BILINEAR, box=box))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is not a readable image ({error}); replace or remove it") from error
    return np.ascontiguousarray(np.atleast_3d(pixels).transpose(2, 0, 1))


def _to_8_bit(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert 16-bit pixels to 8 bits."""
    if not (pixels.min() >= 0 and pixels.max() < 2**16):
        raise ValueError("its pixels have more than 16 bits")
    return np.rint(pixels / 257.0).astype(np.uint8)


Key = int | tuple[int, tuple[float, ...]]  # a row of the dataset, or a row and the window to read
Chance = int  # seed of the random numbers that are drawn while an item is read


class LoaderBatches(Batches):
    """Batches of images that are read on demand by `workers` processes, or by this process (0)."""

    def __init__(
        self,
        stream: LazySplit,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        workers: int = 0,
        **how: Unpack[BatchOptions],
    ) -> None:
        super().__init__(stream, batch_size, mean, std, **how)
        self.stream, self.workers = stream, workers

    def epoch(self, index: int, first: int = 0) -> Iterator[Batch]:
        return self._read(index, DistributedContext(), first)

    def parts(self, index: int, team: DistributedContext, first: int = 0) -> Iterator[Batch]:
        # Mixup blends images of the whole batch, so every rank has to read all of it.
        if self.augment and self.augment.mixup:
            return super().parts(index, team, first)
        return self._read(index, team, first)

    def _read(self, index: int, team: DistributedContext, first: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, or the part of each that belongs to a rank."""
        drawn = self.draw(index) if self.augment else {"order": torch.arange(self.count)}
        starts = range(first * self.batch_size, len(self) * self.batch_size, self.batch_size)
        rows = [torch.arange(start, min(start + self.batch_size, self.count)) for start in starts]
        # The last batch may have fewer images than there are ranks.
        mine = [part for part in map(team.part, rows) if len(part)]
        order, windows = drawn.pop("order"), drawn.pop("window", None)
        # Every item has its own seed, so its random transforms do not depend on the worker or on other items.
        seeds = np.random.SeedSequence((self.seed, index, 2)).generate_state(self.count)
        chances = torch.from_numpy(seeds.astype(np.int64))
        keys = [self._keys(order[part], None if windows is None else windows[part]) for part in mine]
        given = [list(zip(own, chances[part].tolist(), strict=True)) for own, part in zip(keys, mine, strict=True)]
        for part, read in zip(mine, self._loaded(given), strict=True):
            images, labels = (held.to(self.device, non_blocking=True) for held in self._checked(read, team))
            if self.augment:
                chosen = {name: choice[part].to(self.device) for name, choice in drawn.items()}
                yield self.dressed(images, labels, **chosen)
            else:
                yield self.normalised(images), labels

    def _keys(self, order: Tensor, windows: Tensor | None) -> list[Key]:
        rows = self.stream.rows[order].tolist()
        return rows if windows is None else list(zip(rows, map(tuple, windows.tolist()), strict=True))

    def _loaded(self, keys: list[list[tuple[Key, Chance]]]) -> Iterator[Batch | DataError]:
        """Yield what the workers have read, or the DataError why a batch could not be read.

        The workers end with this generator, so the caller raises the error: a traceback through the generator would
        keep them alive.
        """
        loader: DataLoader[Any] = DataLoader(
            _Reading(self.stream, self.num_classes),
            batch_sampler=keys,
            num_workers=min(self.workers, len(keys)),
            collate_fn=_as_it_is,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_outlast_signals,
            generator=torch.Generator(),  # Otherwise it would draw from the user's generator.
        )
        try:
            yield from loader
        except RuntimeError as error:  # A worker was killed, or shared memory is full.
            reason = str(error).splitlines()[0]
            raise DataError(f"a data loading worker failed ({reason}); set data.workers=0") from error

    @staticmethod
    def _checked(read: Batch | DataError, team: DistributedContext) -> Batch:
        if isinstance(read, DataError):
            read.alone = not team.alone  # Ranks read different items, so only this one has the error.
            raise read
        return read


def sample(stream: LazySplit, most: int, seed: int) -> Tensor:
    """Return the images of up to `most` evenly spaced rows; their random transforms depend on the seed alone."""
    found = _Reading(stream).__getitems__([(row, seed % 2**32) for row in stream.spread(most)])
    if isinstance(found, DataError):
        raise found
    return found[0]


class _Reading(Dataset[Any]):
    """Dataset that reads whole batches of a stream, and returns a DataError for one that cannot be read."""

    def __init__(self, stream: LazySplit, num_classes: int = 0) -> None:
        self.stream, self.num_classes = stream, num_classes  # 0: any labels

    def __getitems__(self, keys: Sequence[tuple[Key, Chance]]) -> Batch | DataError:
        row = -1
        try:
            items = []
            for key, chance in keys:
                row = key if isinstance(key, int) else key[0]
                with fixed_seed(nn.Identity(), chance):
                    image, label = self.stream.dataset[key]
                self._check(image, label, row)
                items.append((image.detach(), int(label)))
            images, labels = default_collate(items)
        except PruningError as error:
            return DataError(str(error))
        except Exception as error:
            reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            return DataError(f"{self._item(row)} cannot be read ({reason}); repair or remove it")
        return images, labels

    def _check(self, image: Tensor, label: Any, row: int) -> None:
        item = self._item(row)
        check_item((image, label), item)
        if (image.dtype == torch.uint8) != self.stream.pixels:
            raise DataError(f"{item} is {image.dtype}, the first is not; give all images one dtype")
        if tuple(image.shape) != self.stream.shape:
            raise DataError(
                f"{item} is {tuple(image.shape)}, and the first {self.stream.shape} (channels, height, width); "
                "resize all to one size"
            )
        if self.num_classes and (wrong := wrong_label(torch.tensor(int(label)), self.num_classes)) is not None:
            raise DataError(f"{item}: {wrong}")

    def _item(self, row: int) -> str:
        return f"{self.stream.where}, item {row}"


def _outlast_signals(worker: int) -> None:
    """Ignore the first SIGINT and SIGTERM in a worker.

    Terminals and schedulers send them to all processes of a group. The run stops after its current step, for which
    it may need another batch, and then ends its workers.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda given, frame: signal.signal(given, signal.SIG_DFL))


def _as_it_is(batch: Any) -> Any:
    return batch

"""Data sets by name, folders of images, and the splits for training.

A source is a function that returns the parts "train", "test" and optionally "val", each as a pair of arrays (uint8
images `(N, C, H, W)` and int64 labels `(N,)`), a `Split` or a `LazySplit`. To add a data set, write such a function
and `register` it; a user's own callable ("package.module:callable") or datasets need no registration. Nothing is
ever unpickled, and missing or broken data raises a `DataError` that names the file and key. `Pictures` reads image
files all at once or one by one with the same function, so both give the same pixels.
"""

from __future__ import annotations

import logging
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ...errors import DataError, PruningError, RunError, suggestion
from ...utils.formatting import first_names
from ...utils.timing import available_memory
from ...utils.user_code import UNTRUSTED, Origin, failing_line, matching_arguments, required_parameters
from ..recipe import DataConfig
from .batches import Data, LazySplit, Split, sample, wrong_label
from .cifar10 import load_cifar10

_log = logging.getLogger("sbf_pruner")

Arrays = dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]
Parts = Mapping[str, tuple[NDArray[np.uint8], NDArray[np.int64]] | Split | LazySplit]
Source = Callable[[DataConfig, int, int], Parts]

SOURCES: dict[str, Source] = {}
USED_SETTINGS: dict[str, frozenset[str]] = {}  # the optional settings that each source uses
OPTIONAL_SETTINGS = ("path", "image_size", "in_memory", "fit", "middle")

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
MODES = {1: "L", 3: "RGB"}
WIDEST = 4 / 3  # largest ratio of width to height of a random window; the smallest is its inverse
Box = tuple[float, float, float, float]  # left, top, right, bottom


def register(name: str, *reads: str) -> Callable[[Source], Source]:
    """Register a source under `name`; it is called with the [data] section, the number of classes and the seed.

    `reads` names the settings in `OPTIONAL_SETTINGS` that the source uses; others may not be set with it.
    """

    def add(source: Source) -> Source:
        SOURCES[name], USED_SETTINGS[name] = source, frozenset(reads)
        return source

    return add


def read_parts(config: DataConfig, num_classes: int, seed: int, origin: Origin) -> dict[str, Split | LazySplit]:
    """Return the parts of the data set that `config` names."""
    if ":" in config.name:
        return own_parts(_call_source(config, num_classes, seed, origin), config.name)
    if config.name not in SOURCES:
        raise DataError(f"data.name: no data set is called {config.name!r}; {suggestion(config.name, SOURCES)}")
    check_read(config, USED_SETTINGS[config.name])
    found = SOURCES[config.name](config, num_classes, seed)
    return {
        part: Split(*map(torch.from_numpy, split)) if isinstance(split, tuple) else split
        for part, split in found.items()
    }


def own_parts(datasets: Any, where: str) -> dict[str, Split | LazySplit]:
    """Wrap a user's datasets: `{"train": dataset, "test": dataset}` and optionally "val"."""
    known = ("train", "val", "test")
    if not isinstance(datasets, Mapping) or not {"train", "test"} <= set(datasets) <= set(known):
        got = f"keys {', '.join(map(str, datasets))}" if isinstance(datasets, Mapping) else type(datasets).__name__
        raise DataError(f"{where}: expected {{'train': dataset, 'test': dataset}}, perhaps with 'val', got {got}")
    return {part: LazySplit.of(datasets[part], f"{where}, {part}") for part in known if part in datasets}


def _call_source(config: DataConfig, num_classes: int, seed: int, origin: Origin) -> Any:
    """Call the user's callable with the settings that it has parameters for, and return its result."""
    offered = {"path": config.path, "image_size": config.image_size, "num_classes": num_classes, "seed": seed}
    try:
        target = origin.find("data.name", config.name)
    except RunError:  # The origin is not trusted.
        raise
    except PruningError as error:
        raise DataError(f"data.name: {error}") from error
    if not callable(target):
        raise DataError(f"data.name: {config.name} cannot be called; name a function that returns datasets")
    given = matching_arguments(target, offered)
    if lacking := [name for name in required_parameters(target) if name not in given]:
        raise DataError(
            f"data.name: {config.name} requires {lacking[0]!r}, but is passed {', '.join(offered)}; give it "
            "a default"
        )
    check_read(config, given)
    try:
        return target(**given)
    except Exception as error:
        raise DataError(f"data.name: {config.name} failed at {failing_line(error)}") from error


def check_read(config: DataConfig, reads: Container[str]) -> None:
    """Raise a DataError for a setting that was changed but is not used by the data set."""
    default = DataConfig(config.name)
    for key in OPTIONAL_SETTINGS:
        if key not in reads and getattr(config, key) != getattr(default, key):
            users = ", ".join(name for name in SOURCES if key in USED_SETTINGS[name])
            raise DataError(f"data.{key}: {config.name} does not use it (used by: {users}); leave it out")


@register("digits", "image_size")
def digits(config: DataConfig, num_classes: int, seed: int) -> Arrays:
    """1,797 handwritten digits of 8x8 gray pixels, 1,297 for training and 500 for testing.

    They are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
    Learning Repository, archive.ics.uci.edu/dataset/80, CC BY 4.0) as scikit-learn's `load_digits` returns it, with
    the pixel values 0..16 multiplied by 15. The stored split was drawn once, class by class, and does not change
    with the seed.
    """
    with resources.files("sbf_pruner.training.data").joinpath("digits.npz").open("rb") as file:
        return _from_npz(file, "digits.npz")


@register("synthetic", "image_size")
def synthetic(config: DataConfig, num_classes: int, seed: int) -> Arrays:
    """Images of one random blocky pattern per class plus noise, easy to learn and determined by the seed."""
    size = _needed(config, "image_size", "such as 32")
    random = np.random.default_rng((seed, num_classes))
    blocks = np.arange(size) * 4 // size
    patterns = random.uniform(64, 192, (num_classes, config.channels, 4, 4))[:, :, blocks[:, None], blocks]

    def draw(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        labels = random.permutation(np.arange(count, dtype=np.int64) % num_classes)
        images = random.standard_normal((count, config.channels, size, size), dtype=np.float32)
        images *= 48
        images += patterns[labels].astype(np.float32)
        return images.clip(0, 255).astype(np.uint8), labels

    return {"train": draw(config.samples), "test": draw(max(num_classes, config.samples // 4))}


@register("cifar10", "path", "image_size")
def cifar10(config: DataConfig, num_classes: int, seed: int) -> Arrays:
    """60,000 color photographs of 32x32 pixels in ten classes, 10,000 of them for testing.

    "Learning Multiple Layers of Features from Tiny Images" (A. Krizhevsky, 2009). `sbf data cifar10` installs them;
    data.path may name another folder or archive of any published form.
    """
    return load_cifar10(config.path)


@register("npz", "path", "image_size")
def npz(config: DataConfig, num_classes: int, seed: int) -> Arrays:
    """A NumPy archive with x_train, y_train, x_test, y_test and optionally x_val and y_val."""
    path = Path(_needed(config, "path", "the .npz file"))
    try:
        with path.open("rb") as file:
            return _from_npz(file, str(path))
    except OSError as error:
        raise DataError(f"data.path: cannot read {path}: {error.strerror or error}") from error


@register("folder", *OPTIONAL_SETTINGS)
def folder(config: DataConfig, num_classes: int, seed: int) -> dict[str, Split | LazySplit]:
    """Image files in train/CLASS/*.png, test/CLASS/*.png and optionally val/CLASS/*.png, or other formats."""
    root = Path(_needed(config, "path", "the folder that holds train and test"))
    size = _needed(config, "image_size", "such as 32")
    if not root.exists():
        raise DataError(f"data.path: {root} does not exist; name the folder that holds train and test")
    parts = [part for part in ("train", "val", "test") if (root / part).is_dir()]
    for part in ("train", "test"):
        if part not in parts:
            hint = "; rename val to test if it is your test set" if parts == ["train", "val"] else ""
            raise DataError(f"data.path: {root} has no folder {part!r}; expected {root / part}/CLASS/*.png{hint}")
    classes = class_names(config)
    if not classes:
        raise DataError(f"data.path: {root / 'train'} holds no classes; expected {root / 'train'}/CLASS/*.png")
    if len(classes) != num_classes:
        raise DataError(
            f"data.path: {root / 'train'} holds {len(classes)} classes ({first_names(classes, 3)}), and "
            f"model.num_classes is {num_classes}; set it to {len(classes)}"
        )
    view = View(size, config.channels, config.fit, config.middle)
    found = {part: list_pictures(root / part, classes, view) for part in parts}
    if not config.in_memory:
        return {part: pictures.stream() for part, pictures in found.items()}
    images = sum(map(len, found.values()))
    needed, memory = images * view.channels * size**2, available_memory(torch.device("cpu"))
    if memory is not None and needed > 0.8 * memory:
        raise DataError(
            f"data.in_memory: {images:,} images of {size}x{size} take {needed / 2**30:,.0f} GiB, and "
            f"this machine has {memory / 2**30:,.0f}; set data.in_memory=false to read them as they are needed"
        )
    return {part: pictures.split() for part, pictures in found.items()}


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
    fit: str = "stretch"  # "stretch": use the whole image; "crop": the largest square around its center
    middle: float = 1.0  # fraction of each side of that region to use, around its center

    def box(self, width: int, height: int) -> Box:
        """Return the region of an image that is read by default."""
        square = min(width, height)
        sides = (square, square) if self.fit == "crop" else (width, height)
        across, down = (self.middle * side for side in sides)
        left, top = (width - across) / 2, (height - down) / 2
        return left, top, min(left + across, width), min(top + down, height)

    def window(self, width: int, height: int, drawn: Sequence[float]) -> Box:
        """Return a random region to read in training, given the four numbers that `Batches.draw` draws for it."""
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

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.view.channels, self.view.size, self.view.size

    def stream(self) -> LazySplit:
        return LazySplit(self, torch.arange(len(self)), self.shape, torch.tensor(self.labels), windows=True)

    def split(self) -> Split:
        images = torch.empty(len(self), *self.shape, dtype=torch.uint8)
        for row in range(len(self)):
            images[row] = self[row][0]
        return Split(images, torch.tensor(self.labels))


def list_pictures(root: Path, classes: Sequence[str], view: View) -> Pictures:
    """List the images in root/CLASS, class by class.

    Raises a DataError if there are no images, if a class is not in `classes` or contains a folder, or if a training
    class has no images. Logs a warning if there are other files, or if a class of another part has no images.
    """
    for folder in subfolders(root):
        if folder not in classes:
            raise DataError(f"{root / folder}: train has no class {folder!r}; {suggestion(folder, classes)}")
    found = [(path, label) for label, name in enumerate(classes) for path in sorted((root / name).glob("*"))]
    # macOS creates hidden files next to images.
    found = [(path, label) for path, label in found if not path.name.startswith(".") and path.is_file()]
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
            remedy = "move them there, or remove this folder"
            raise DataError(f"{root / name / inner}: images must lie in {root}/CLASS; {remedy}")
        if root.name == "train" and label not in filled:
            raise DataError(f"{root / name} holds no images; fill it, or remove it from train and test")
    return Pictures([path for path, _ in files], [label for _, label in files], view)


def subfolders(root: Path) -> list[str]:
    """Return the sorted names of the folders in a folder, without hidden ones."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def read_picture(path: Path, view: View, window: Sequence[float] | None = None) -> NDArray[np.uint8]:
    """Return pixels `(C, H, W)` of a file, from `window` if given, otherwise from the default region of `view`."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading image files needs Pillow; run: pip install 'sbf-pruner[images]'") from None
    if view.channels not in MODES:
        raise DataError(f"data.channels: folder reads 1 (grey) or 3 (colour) channels, not {view.channels}")
    try:
        with Image.open(path) as image:
            # Pillow would clip 16-bit pixels at 255 instead of scaling them.
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
    if not 0 <= pixels.min() <= pixels.max() < 2**16:
        raise ValueError("its pixels have more than 16 bits")
    return np.rint(pixels / 257.0).astype(np.uint8)


def class_names(config: DataConfig) -> tuple[str, ...]:
    """Return the names of the classes in the order of their labels; empty if only numbers are known."""
    return tuple(subfolders(Path(config.path) / "train")) if config.name == "folder" else ()


def _needed(config: DataConfig, key: str, what: str) -> Any:
    value = getattr(config, key)
    if not value:
        raise DataError(f"data.{key}: {config.name} needs it, {what}")
    return value


def _from_npz(file: IO[bytes], source: str) -> Arrays:
    try:
        archive = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{source} is not a NumPy .npz archive") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(f"{source} holds a single array; save with numpy.savez(x_train=..., y_train=..., ...)")
    parts = ["train", "val", "test"] if {"x_val", "y_val"} & set(archive.files) else ["train", "test"]
    for key in (axis + part for part in parts for axis in ("x_", "y_")):
        if key not in archive.files:
            raise DataError(f"{source} has no array {key!r}; it holds: {', '.join(archive.files) or 'nothing'}")
    return {
        part: (
            _images(_member(archive, f"x_{part}", source), f"{source}, x_{part}"),
            _labels(_member(archive, f"y_{part}", source), f"{source}, y_{part}"),
        )
        for part in parts
    }


def _member(archive: Any, key: str, source: str) -> NDArray[Any]:
    try:
        return archive[key]
    except ValueError as error:
        why = f"cannot be read: {error}"
        if "pickle" in str(error).lower():
            why = "holds Python objects, which are never unpickled; store numbers"
        raise DataError(f"{source}, {key}: {why}") from error
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{source}, {key}: the archive is damaged: {error}") from error


def _images(images: NDArray[Any], where: str) -> NDArray[np.uint8]:
    """Convert images to uint8 `(N, C, H, W)`.

    They are `(N, H, W)` (gray), or have the channels, 1 to 4, in dimension 1 or 3. Floats must be in [0, 1].
    """
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim != 4 or min(images.shape[1], images.shape[3]) > 4:
        known = "N,H,W nor N,C,H,W nor N,H,W,C with C from 1 to 4"
        raise DataError(f"{where}: shape {images.shape} is neither {known}")
    elif images.shape[1] > 4:
        images = images.transpose(0, 3, 1, 2)
    if 0 in images.shape:
        raise DataError(f"{where}: holds no pixels, its shape is {images.shape}")
    if np.issubdtype(images.dtype, np.floating):
        if not (images.min() >= 0 and images.max() <= 1):  # NaN fails this check too.
            raise DataError(f"{where}: floats must lie in [0, 1], got {images.min()} to {images.max()}")
        images = np.rint(images * 255).astype(np.uint8)
    if images.dtype != np.uint8:
        raise DataError(f"{where}: pixels are {images.dtype}; store uint8, or floats in [0, 1]")
    return np.ascontiguousarray(images)


def _labels(labels: NDArray[Any], where: str) -> NDArray[np.int64]:
    if labels.ndim != 1:
        raise DataError(f"{where}: expected one label per image, got shape {labels.shape}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{where}: labels are {labels.dtype}; store integers")
    return labels.astype(np.int64)


SAMPLED = 1024  # number of images used to estimate mean and deviation of images that are read on demand

Normal = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation of each channel


def load_data(config: DataConfig, num_classes: int, seed: int, origin: Origin = UNTRUSTED) -> Data:
    """Read the data set that `config` names, check it, and hold out a validation split if `config` sets one.

    The user's code is imported only if `origin` is trusted.

    >>> data = load_data(DataConfig("digits", validation=0.1), num_classes=10, seed=0)
    >>> len(data.train), len(data.validation), len(data.test)
    (1167, 130, 500)
    """
    # Expand "~" here for all sources, including those of users.
    config = replace(config, path=os.path.expanduser(config.path))
    return _assembled(config, read_parts(config, num_classes, seed, origin), num_classes, seed, class_names(config))


def own_data(datasets: Mapping[str, Dataset[Any]], config: DataConfig, num_classes: int, seed: int) -> Data:
    """Return the data set made from the user's own datasets, one for each part."""
    # `path` is for the data set that `name` names, which is not used here, so setting it is no error.
    check_read(config, ("path",))
    return _assembled(config, own_parts(datasets, "data"), num_classes, seed)


def _assembled(
    config: DataConfig,
    parts: Mapping[str, Split | LazySplit],
    num_classes: int,
    seed: int,
    classes: tuple[str, ...] = (),
) -> Data:
    """Check and resize the parts, hold out a validation split, and compute mean and standard deviation."""
    splits: dict[str, Split | LazySplit] = {}
    size = config.image_size
    for part, split in parts.items():
        where = f"{config.name}, {part}"
        if isinstance(split, Split) and len(split.images) != len(split):
            raise DataError(f"{where}: {len(split.images)} images but {len(split)} labels; give one for each")
        if not len(split):
            raise DataError(f"{where}: holds no images")
        if split.labels is not None and (wrong := wrong_label(split.labels, num_classes)) is not None:
            raise DataError(f"{where}: {wrong}")
        if isinstance(split, Split) and size and split.images.shape[-2:] != (size, size):
            images = F.interpolate(split.images, (size, size), mode="bilinear", antialias=True)
            split = Split(images, split.labels)
        splits[part] = split
    train, test, validation = splits["train"], splits["test"], splits.get("val")
    for part, split in splits.items():
        if split.shape != train.shape:
            shapes = f"{split.shape}, train's {train.shape}"
            raise DataError(f"{config.name}, {part}: images are {shapes} (channels, height, width)")
        if split.pixels != train.pixels:
            kinds = f"train and {part} have different dtypes"
            raise DataError(f"{config.name}, {part}: {kinds}; make both uint8, or both float")
    if config.scale < 1 and not train.windows:
        remedy = "set data.name=folder and data.in_memory=false"
        raise DataError(f"data.scale: random windows are only read from image files; {remedy}")
    if validation is None:
        train, validation = _held_out(train, config.validation, seed)
    elif config.validation:
        raise DataError(f"data.validation: {config.name} has validation images of its own; set it to 0")
    mean, std = _normal(config, train, seed)
    return Data(config.name, train, validation, test, num_classes, mean, std, classes)


def _normal(config: DataConfig, train: Split | LazySplit, seed: int) -> Normal:
    """Return the recipe's mean and standard deviation or, if it sets none, those of the training images."""
    if config.mean:
        if not train.pixels:
            raise DataError("data.mean: floating-point images are not normalized; leave out mean and std")
        if (numbers := len(config.mean)) != train.shape[0]:
            raise DataError(f"data.mean: {numbers} numbers for {train.shape[0]} channels; give one for each")
        return config.mean, config.std
    if not train.pixels:
        return (), ()
    return _statistics(train.images if isinstance(train, Split) else sample(train, SAMPLED, seed))


def _held_out(train: Split | LazySplit, fraction: float, seed: int) -> tuple[Split | LazySplit, Split | LazySplit]:
    """Return the training images, in order, and a validation split of a random `fraction` of each class."""
    labels = train.labels
    if labels is None:
        if fraction:
            raise DataError("data.validation: no part of your own dataset can be held out; pass one called 'val'")
        return train, train[:0]
    random = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(len(train), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        shuffled = members[torch.randperm(len(members), generator=random)]
        chosen[shuffled[: round(fraction * len(members))]] = True
    if chosen.all():
        raise DataError(f"data.validation: {fraction} leaves none of {len(train)} images to train on")
    if fraction and not chosen.any():
        raise DataError(f"data.validation: {fraction} of {len(train)} images holds none out; raise it")
    return train[~chosen], train[chosen]


def _statistics(images: Tensor) -> Normal:
    """Return exact mean and standard deviation per channel, from the counts of the 256 pixel values."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.flatten(), minlength=256)
        share = counts.double() / counts.sum()
        means.append(float((share * values).sum()))
        deviation = float((share * (values - means[-1]) ** 2).sum().sqrt())
        deviations.append(deviation or 1.0)  # A constant channel is shifted, but not scaled.
    return tuple(means), tuple(deviations)

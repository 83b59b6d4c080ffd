"""Data sets by name, checked and split for training, and their batches for each phase of a run.

A source is a function that returns the parts "train", "test" and optionally "val", each as a pair of arrays (uint8
images N,C,H,W and int64 labels), a `Split` or a `LazySplit`. To add a data set, write such a function and
`register` it; a user's own callable ("package.module:callable") or datasets need no registration. Nothing is ever
unpickled, and missing or broken data raises a `DataError` that names the file and key.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import IO, Any, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from ...errors import DataError, PruningError, RunError, suggestion
from ...schedule import Phase
from ...utils.distributed import DistributedContext
from ...utils.formatting import first_names
from ...utils.timing import available_memory
from ...utils.user_code import UNTRUSTED, Origin, failing_line, matching_arguments, required_parameters
from ..device import choose_memory_format
from ..recipe import DataConfig, Recipe
from ..schedule import batch_size, optimizer_config
from .batches import Augment, Batches, BatchOptions, DeviceBatches, LazySplit, Split, wrong_label
from .cifar10 import load_cifar10
from .images import LoaderBatches, View, list_pictures, sample, subfolders

Arrays = dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]
Parts = Mapping[str, tuple[NDArray[np.uint8], NDArray[np.int64]] | Split | LazySplit]
Source = Callable[[DataConfig, int, int], Parts]

SOURCES: dict[str, Source] = {}
USED_SETTINGS: dict[str, frozenset[str]] = {}  # the settings in SOME that each source uses
OPTIONAL_SETTINGS = ("path", "image_size", "in_memory", "fit", "middle")


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
        return own_parts(_own(config, num_classes, seed, origin), config.name)
    if config.name not in SOURCES:
        raise DataError(f"data.name: no data set is called {config.name!r}; {suggestion(config.name, SOURCES)}")
    check_read(config, USED_SETTINGS[config.name])
    found = SOURCES[config.name](config, num_classes, seed)
    return {
        part: Split(*map(torch.from_numpy, held)) if isinstance(held, tuple) else held
        for part, held in found.items()
    }


def own_parts(datasets: Any, where: str) -> dict[str, Split | LazySplit]:
    """Wrap a user's datasets: `{"train": dataset, "test": dataset}` and optionally "val"."""
    known = ("train", "val", "test")
    if not isinstance(datasets, Mapping) or not {"train", "test"} <= set(datasets) <= set(known):
        held = f"keys {', '.join(map(str, datasets))}" if isinstance(datasets, Mapping) else type(datasets).__name__
        raise DataError(f"{where}: expected {{'train': dataset, 'test': dataset}}, perhaps with 'val', got {held}")
    return {part: LazySplit.of(datasets[part], f"{where}, {part}") for part in known if part in datasets}


def _own(config: DataConfig, num_classes: int, seed: int, origin: Origin) -> Any:
    """Call the user's callable with those of our settings that it has parameters for, and return its result."""
    offers = {"path": config.path, "image_size": config.image_size, "num_classes": num_classes, "seed": seed}
    try:
        target = origin.find("data.name", config.name)
    except RunError:  # The origin is not trusted.
        raise
    except PruningError as error:
        raise DataError(f"data.name: {error}") from error
    if not callable(target):
        raise DataError(f"data.name: {config.name} cannot be called; name a function that returns datasets")
    given = matching_arguments(target, offers)
    if lacking := [name for name in required_parameters(target) if name not in given]:
        raise DataError(
            f"data.name: {config.name} requires {lacking[0]!r}, but is passed {', '.join(offers)}; give it "
            "a default"
        )
    check_read(config, given)
    try:
        return target(**given)
    except Exception as error:
        raise DataError(f"data.name: {config.name} failed at {failing_line(error)}") from error


def check_read(config: DataConfig, reads: Container[str]) -> None:
    """Raise a DataError for a setting that was changed but is not used by the data set."""
    usual = DataConfig(config.name)
    for key in OPTIONAL_SETTINGS:
        if key not in reads and getattr(config, key) != getattr(usual, key):
            users = [name for name in SOURCES if key in USED_SETTINGS[name]]
            raise DataError(
                f"data.{key}: {config.name} does not use it (used by: {', '.join(users)}); leave it out"
            )


@register("digits", "image_size")
def digits(config: DataConfig, num_classes: int, seed: int) -> Arrays:
    """1,797 handwritten digits of 8x8 gray pixels, 1,297 for training and 500 for testing.

    They are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
    Learning Repository, archive.ics.uci.edu/dataset/80, CC BY 4.0) as scikit-learn's `load_digits` returns it, with
    the counts 0..16 multiplied by 15. The stored split was drawn once, class by class, and does not change with the
    seed.
    """
    with resources.files("sbf_pruner.training.data").joinpath("digits.npz").open("rb") as file:
        return _from_npz(file, "digits.npz")


@register("synthetic", "image_size")
def synthetic(config: DataConfig, num_classes: int, seed: int) -> Arrays:
    """One random blocky pattern per class plus noise: easy to learn, and determined by the seed alone."""
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
    for part in ("train", "test"):
        if not (root / part).is_dir():
            hint = (
                "; rename val to test if it is your test set" if part == "test" and (root / "val").is_dir() else ""
            )
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
    parts = [part for part in ("train", "val", "test") if (root / part).is_dir()]
    found = {part: list_pictures(root / part, classes, view) for part in parts}
    if not config.in_memory:
        return {part: pictures.stream() for part, pictures in found.items()}
    _check_memory(sum(map(len, found.values())), view)
    return {part: pictures.split() for part, pictures in found.items()}


def _check_memory(images: int, view: View) -> None:
    """Raise a DataError if the images would take more than 80% of this machine's memory."""
    needed, there = images * view.channels * view.size**2, available_memory(torch.device("cpu"))
    if there is not None and needed > 0.8 * there:
        raise DataError(
            f"data.in_memory: {images:,} images of {view.size}x{view.size} take {needed / 2**30:,.0f} GiB, and "
            f"this machine has {there / 2**30:,.0f}; set data.in_memory=false to read them as they are needed"
        )


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
    arrays: Arrays = {}
    for part in parts:
        images, labels = _member(archive, f"x_{part}", source), _member(archive, f"y_{part}", source)
        arrays[part] = _images(images, f"{source}, x_{part}"), _labels(labels, f"{source}, y_{part}")
    return arrays


def _member(archive: Any, key: str, source: str) -> NDArray[Any]:
    try:
        return archive[key]
    except ValueError as error:
        if "pickle" in str(error).lower():
            raise DataError(
                f"{source}, {key}: holds Python objects, which are never unpickled; store numbers"
            ) from None
        raise DataError(f"{source}, {key}: cannot be read: {error}") from error
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{source}, {key}: the archive is damaged: {error}") from error


def _images(images: NDArray[Any], where: str) -> NDArray[np.uint8]:
    """Convert images to uint8 N,C,H,W.

    Three axes are gray images; of four, the channel axis is the one with 1 to 4 entries. Floats must be in [0, 1].
    """
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim != 4 or min(images.shape[1], images.shape[3]) > 4:
        raise DataError(
            f"{where}: shape {images.shape} is neither N,H,W nor N,C,H,W nor N,H,W,C with C from 1 to 4"
        )
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
    classes: tuple[str, ...] = ()
    """names of the classes; empty if unknown"""

    @property
    def counts(self) -> dict[str, int]:
        """Number of images in each split."""
        return {"train": len(self.train), "validation": len(self.validation), "test": len(self.test)}

    def told(self) -> dict[str, list[Any]]:
        """Return what users of the trained network need: normalization and names of the classes."""
        return {"mean": list(self.mean), "std": list(self.std), "classes": list(self.classes)}


def load_data(config: DataConfig, num_classes: int, seed: int, origin: Origin = UNTRUSTED) -> Data:
    """Read the data set that `config` names, check it, and hold out the validation split it asks for.

    The user's code is imported only if `origin` is trusted.

    >>> data = load_data(DataConfig("digits", validation=0.1), num_classes=10, seed=0)
    >>> len(data.train), len(data.validation), len(data.test)
    (1167, 130, 500)
    """
    # Expand it here for all sources, including those of users.
    config = replace(config, path=os.path.expanduser(config.path))
    return _assembled(config, read_parts(config, num_classes, seed, origin), num_classes, seed, class_names(config))


def own_data(datasets: Mapping[str, Dataset[Any]], config: DataConfig, num_classes: int, seed: int) -> Data:
    """Make a data set from the user's own datasets, one for each part."""
    # `path` belongs to the data set in `name`, which is not used here, so it is no error.
    check_read(config, ("path",))
    return _assembled(config, own_parts(datasets, "data"), num_classes, seed)


def _assembled(
    config: DataConfig,
    parts: Mapping[str, Split | LazySplit],
    num_classes: int,
    seed: int,
    classes: tuple[str, ...] = (),
) -> Data:
    splits: dict[str, Split | LazySplit] = {}
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
            raise DataError(
                f"{config.name}, {part}: train and {part} have different dtypes; make both uint8, or both float"
            )
    if config.scale < 1 and not (isinstance(train, LazySplit) and train.windows):
        raise DataError(
            "data.scale: random windows are only read from image files; set data.name=folder "
            "and data.in_memory=false"
        )
    if validation is None:
        train, validation = _held_out(train, config.validation, seed)
    elif config.validation:
        raise DataError(f"data.validation: {config.name} has validation images of its own; set it to 0")
    mean, std = _normal(config, train, seed)
    return Data(config.name, train, validation, test, num_classes, mean, std, classes)


def _ready(split: Split | LazySplit) -> bool:
    """Return True if images are floats that are used without normalization."""
    return isinstance(split, LazySplit) and not split.pixels


def _normal(config: DataConfig, train: Split | LazySplit, seed: int) -> Normal:
    """Return mean and deviation for normalization: those of the recipe, or those of the training images."""
    ready = _ready(train)
    if config.mean:
        if ready:
            raise DataError("data.mean: floating-point images are not normalized; leave out mean and std")
        if len(config.mean) != train.shape[0]:
            raise DataError(
                f"data.mean: {len(config.mean)} numbers for {train.shape[0]} channels; give one for each"
            )
        return config.mean, config.std
    if ready:
        return (), ()
    return _statistics(train.images if isinstance(train, Split) else sample(train, SAMPLED, seed))


def _check(where: str, split: Split | LazySplit, labels: Tensor, num_classes: int) -> None:
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


def _held_out(train: Split | LazySplit, fraction: float, seed: int) -> tuple[Split | LazySplit, Split | LazySplit]:
    """Hold out `fraction` of each class, chosen by the seed; the remaining images keep their order."""
    labels = train.labels
    if labels is None:
        if fraction:
            raise DataError("data.validation: no part of your own dataset can be held out; pass one called 'val'")
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
    """Compute exact mean and deviation per channel from the counts of the 256 pixel values."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].flatten(), minlength=256)
        share = counts.double() / counts.sum()
        mean = float((share * values).sum())
        deviation = float((share * (values - mean) ** 2).sum().sqrt())
        means.append(mean)
        deviations.append(deviation or 1.0)  # A constant channel is shifted, but not scaled.
    return tuple(means), tuple(deviations)


# Smallest evaluation batch for images of up to SMALL pixels a side; larger ones use data.batch_size
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
        self._made = {(self.train.batch_size, self._plain): self.train}
        self.test = self._batches(data.test)
        self.validation = self._batches(data.validation) if len(data.validation) else None
        images = next(self.test.epoch(0))[0]
        self.order = choose_memory_format(model, images[:2])
        """Memory format that suits the network."""
        self.images = images.contiguous(memory_format=self.order)
        """First batch of test images, used to trace, verify and time networks."""

    def of(self, phase: Phase) -> Batches:
        """Return the training batches of a phase, with its batch size and augmentation."""
        augment = self._plain
        if phase.trains_weights:  # Scores are trained without cutout and mixup.
            config = optimizer_config(self._recipe, phase)
            augment = replace(augment, cutout=config.cutout, mixup=config.mixup)
        return self._training(phase, augment)

    def whole(self, phase: Phase) -> Batches:
        """Return the training batches of a phase without cutout and mixup, for computing batch statistics."""
        return self._training(phase, self._plain)

    def _check_sizes(self) -> None:
        """Raise a DataError for crops and cutouts that may leave nothing of an image."""
        height, width = self._data.train.shape[-2:]
        shift = self._recipe.data.crop
        if shift >= min(height, width):
            raise DataError(
                f"data.crop: a shift by {shift} pixels may leave nothing of an image ({height}x{width}); lower it"
            )
        for section in ("warmup", "weights", "finetune"):
            hole = getattr(self._recipe, section).cutout
            if hole >= max(height, width):
                raise DataError(
                    f"{section}.cutout: a hole of {hole} pixels may cover a whole image ({height}x{width}); "
                    "lower it"
                )

    def _training(self, phase: Phase, augment: Augment) -> Batches:
        size = batch_size(self._recipe, phase)
        if (size, augment) not in self._made:
            self._made[size, augment] = self.train.regrouped(size, augment)
        return self._made[size, augment]

    def _batches(self, split: Split | LazySplit, augment: Augment | None = None) -> Batches:
        size, data = self._recipe.data.batch_size, self._data
        if not augment and max(split.shape[-2:]) <= SMALL_IMAGE:
            size = max(size, MIN_EVAL_BATCH)
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
    split: Split | LazySplit, batch_size: int, data: Data, *, workers: int = -1, **how: Unpack[BatchOptions]
) -> Batches:
    """Return `DeviceBatches` batches for a `Split` and `LoaderBatches` batches for a `LazySplit`.

    If `workers` is negative, the available cores are divided among the ranks.
    """
    if isinstance(split, Split):
        return DeviceBatches(split, batch_size, data.mean, data.std, **how)
    if workers < 0:  # All ranks share the cores.
        workers = max(1, _cores() // DistributedContext.present().size)
    return LoaderBatches(split, batch_size, data.mean, data.std, workers=workers, **how)


def _cores() -> int:
    """Return the number of cores that this process may use, or that the machine has if that is unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

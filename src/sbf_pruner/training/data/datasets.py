"""Where images come from: one function and one row per data set.

The `[data]` section of a recipe enters; parts leave, `{"train": (images, labels), "test": ...}` and "val" where
there is one, images as uint8 N,C,H,W and labels as int64, or a `Stream` where images are read as they are needed.
Nothing is ever unpickled, and what is missing or broken is a `DataError` that names the file and key.  To add a
data set, write one function and `register` it; a user's own needs neither ("package.module:callable").

A data set ready to train on: checked, parted, and with what its pixels are normalised by.

The `[data]` section of a recipe enters, or datasets of the user's; `Data` leaves: training, validation and test
images, in memory or to be read as they are needed, with the training images' mean and deviation.

The images of a run in batches: those that each phase trains on, and those that every network is judged by.

Data, a recipe and the network they are for enter; `Batches` on the run's device leave.  What holds: the training
images lie there once, whatever sizes of batch the phases ask for.
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

from ...errors import DataError, PruningError, RunError, nearest
from ...schedule import Phase
from ...utils.distributed import Team
from ...utils.formatting import some
from ...utils.timing import memory_of
from ...utils.user_code import UNTRUSTED, Origin, failing_line, needed, wanted
from ..device import choose_order
from ..recipe import Recipe
from ..schedule import batch_size, optimizer_config
from ..sections import DataConfig
from .batches import Augment, Batches, How, Resident, Split, Stream, wrong_label
from .cifar10 import load_cifar10
from .images import Loaded, View, list_pictures, sample, subfolders

Arrays = dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]
Parts = Mapping[str, tuple[NDArray[np.uint8], NDArray[np.int64]] | Split | Stream]
Source = Callable[[DataConfig, int, int], Parts]

SOURCES: dict[str, Source] = {}
READS: dict[str, frozenset[str]] = {}  # what of the section each source uses, of what only some do
SOME = ("path", "image_size", "in_memory", "fit", "middle")


def register(name: str, *reads: str) -> Callable[[Source], Source]:
    """Make a source known under `name`; it is called with the section, the number of classes and the seed.

    `reads` names the settings that it uses, of those that only some sources do.
    """

    def add(source: Source) -> Source:
        SOURCES[name], READS[name] = source, frozenset(reads)
        return source

    return add


def read_parts(config: DataConfig, num_classes: int, seed: int, origin: Origin) -> dict[str, Split | Stream]:
    """The parts of the data set that `config` names."""
    if ":" in config.name:
        return own_parts(_own(config, num_classes, seed, origin), config.name)
    if config.name not in SOURCES:
        raise DataError(f"data.name: no data set is called {config.name!r}; {nearest(config.name, SOURCES)}")
    check_read(config, READS[config.name])
    found = SOURCES[config.name](config, num_classes, seed)
    return {
        part: Split(*map(torch.from_numpy, held)) if isinstance(held, tuple) else held
        for part, held in found.items()
    }


def own_parts(datasets: Any, where: str) -> dict[str, Split | Stream]:
    """Datasets of the user's, `{"train": dataset, "test": dataset}` and "val" where there is one."""
    known = ("train", "val", "test")
    if not isinstance(datasets, Mapping) or not {"train", "test"} <= set(datasets) <= set(known):
        held = f"keys {', '.join(map(str, datasets))}" if isinstance(datasets, Mapping) else type(datasets).__name__
        raise DataError(f"{where}: expected {{'train': dataset, 'test': dataset}}, perhaps with 'val', got {held}")
    return {part: Stream.of(datasets[part], f"{where}, {part}") for part in known if part in datasets}


def _own(config: DataConfig, num_classes: int, seed: int, origin: Origin) -> Any:
    """What a callable of the user's gives, which gets those of our settings that it has parameters for."""
    offers = {"path": config.path, "image_size": config.image_size, "num_classes": num_classes, "seed": seed}
    try:
        target = origin.find("data.name", config.name)
    except RunError:  # it is not trusted
        raise
    except PruningError as error:
        raise DataError(f"data.name: {error}") from error
    if not callable(target):
        raise DataError(f"data.name: {config.name} cannot be called; name a function that returns datasets")
    given = wanted(target, offers)
    if lacking := [name for name in needed(target) if name not in given]:
        raise DataError(
            f"data.name: {config.name} asks for {lacking[0]!r}, and gets {', '.join(offers)}; give it a default"
        )
    check_read(config, given)
    try:
        return target(**given)
    except Exception as error:
        raise DataError(f"data.name: {config.name} failed at {failing_line(error)}") from error


def check_read(config: DataConfig, reads: Container[str]) -> None:
    """Refuse settings that would change nothing."""
    usual = DataConfig(config.name)
    for key in SOME:
        if key not in reads and getattr(config, key) != getattr(usual, key):
            users = [name for name in SOURCES if key in READS[name]]
            raise DataError(
                f"data.{key}: {config.name} has no use for it (these have: {', '.join(users)}); leave it out"
            )


@register("digits", "image_size")
def digits(config: DataConfig, num_classes: int, seed: int) -> Arrays:
    """1,797 handwritten digits of 8x8 grey pixels, 1,297 to train on and 500 to test.

    They are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI
    Machine Learning Repository, archive.ics.uci.edu/dataset/80, CC BY 4.0) as scikit-learn's `load_digits`
    returns it, with the counts 0..16 multiplied by 15.  The stored split was drawn once, class by class, and
    does not change with the seed.
    """
    with resources.files("sbf_pruner.training.data").joinpath("digits.npz").open("rb") as file:
        return _from_npz(file, "digits.npz")


@register("synthetic", "image_size")
def synthetic(config: DataConfig, num_classes: int, seed: int) -> Arrays:
    """One blocky random pattern per class under noise: easy to learn, and drawn from the seed alone."""
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
    """60,000 colour photographs of 32x32 pixels in ten classes, 10,000 of them to test.

    "Learning Multiple Layers of Features from Tiny Images" (A. Krizhevsky, 2009).  `sbf data cifar10` puts
    them where they are found; data.path may name another folder or archive of any published form.
    """
    return load_cifar10(config.path)


@register("npz", "path", "image_size")
def npz(config: DataConfig, num_classes: int, seed: int) -> Arrays:
    """A NumPy archive with x_train, y_train, x_test, y_test and, if it has them, x_val and y_val."""
    path = Path(_needed(config, "path", "the .npz file"))
    try:
        with path.open("rb") as file:
            return _from_npz(file, str(path))
    except OSError as error:
        raise DataError(f"data.path: cannot read {path}: {error.strerror or error}") from error


@register("folder", *SOME)
def folder(config: DataConfig, num_classes: int, seed: int) -> dict[str, Split | Stream]:
    """Image files as train/CLASS/*.png and test/CLASS/*.png (and, if there is one, val/CLASS/*.png)."""
    root = Path(_needed(config, "path", "the folder that holds train and test"))
    size = _needed(config, "image_size", "such as 32")
    if not root.exists():
        raise DataError(f"data.path: {root} does not exist; name the folder that holds train and test")
    for part in ("train", "test"):
        if not (root / part).is_dir():
            hint = (
                "; if val is what to judge by, call it test" if part == "test" and (root / "val").is_dir() else ""
            )
            raise DataError(f"data.path: {root} has no folder {part!r}; expected {root / part}/CLASS/*.png{hint}")
    classes = class_names(config)
    if not classes:
        raise DataError(f"data.path: {root / 'train'} holds no classes; expected {root / 'train'}/CLASS/*.png")
    if len(classes) != num_classes:
        raise DataError(
            f"data.path: {root / 'train'} holds {len(classes)} classes ({some(classes, 3)}), and model.num_classes "
            f"is {num_classes}; set it to {len(classes)}"
        )
    view = View(size, config.channels, config.fit, config.middle)
    parts = [part for part in ("train", "val", "test") if (root / part).is_dir()]
    found = {part: list_pictures(root / part, classes, view) for part in parts}
    if not config.in_memory:
        return {part: pictures.stream() for part, pictures in found.items()}
    _check_memory(sum(map(len, found.values())), view)
    return {part: pictures.split() for part, pictures in found.items()}


def _check_memory(images: int, view: View) -> None:
    """Refuse to fill the memory of this machine with images."""
    needed, there = images * view.channels * view.size**2, memory_of(torch.device("cpu"))
    if there is not None and needed > 0.8 * there:
        raise DataError(
            f"data.in_memory: {images:,} images of {view.size}x{view.size} take {needed / 2**30:,.0f} GiB, and "
            f"this machine has {there / 2**30:,.0f}; set data.in_memory=false to read them as they are needed"
        )


def class_names(config: DataConfig) -> tuple[str, ...]:
    """What the classes are called, in the order of their numbers; nothing where only numbers are known."""
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
    """Images as uint8 N,C,H,W: three axes are grey, and the channel axis is the one of 1 to 4 entries."""
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
        if not (images.min() >= 0 and images.max() <= 1):  # written so that nan fails too
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

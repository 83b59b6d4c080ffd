"""Where images come from: one function and one row per data set.

The `[data]` section of a recipe enters; parts leave, `{"train": (images, labels), "test": ...}` and "val" where
there is one, images as uint8 N,C,H,W and labels as int64, or a `Stream` where images are read as they are needed.
Nothing is ever unpickled, and what is missing or broken is a `DataError` that names the file and key.  To add a
data set, write one function and `register` it; a user's own needs neither ("package.module:callable").
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Container, Mapping
from importlib import resources
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..callables import Origin, needed, wanted
from ..cifar.prepared import load_cifar10
from ..errors import DataError, PruningError, RunError, nearest
from ..figures import some
from ..graph.where import failing_line
from ..memory import memory_of
from .material import DataConfig
from .pictures import View, list_pictures, subfolders
from .splits import Split, Stream

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
    with resources.files("sbf_pruner.training").joinpath("digits.npz").open("rb") as file:
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

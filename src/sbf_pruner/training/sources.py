"""Where images come from: one function and one row per data set.

The `[data]` section of a recipe enters; arrays leave, `{"train": (images, labels), "test": ...}` and "val"
where there is one, images as uint8 N,C,H,W and labels as int64.  Nothing is ever unpickled, and what is
missing or broken is a `DataError` that names the file and key.  To add a data set, write one function and
`register` it.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..cifar.prepared import load_cifar10
from ..errors import DataError, nearest
from ..figures import some
from .sections import DataConfig

Arrays = dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]
Source = Callable[[DataConfig, int, int], Arrays]

SOURCES: dict[str, Source] = {}
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


def register(name: str) -> Callable[[Source], Source]:
    """Make a source known under `name`; it is called with the section, the number of classes and the seed."""

    def add(source: Source) -> Source:
        SOURCES[name] = source
        return source

    return add


def read_arrays(config: DataConfig, num_classes: int, seed: int) -> Arrays:
    """The arrays of the data set that `config` names."""
    if config.name not in SOURCES:
        raise DataError(f"data.name: no data set is called {config.name!r}; {nearest(config.name, SOURCES)}")
    return SOURCES[config.name](config, num_classes, seed)


@register("digits")
def digits(config: DataConfig, num_classes: int, seed: int) -> Arrays:
    """1,797 handwritten digits of 8x8 grey pixels, 1,297 to train on and 500 to test.

    They are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI
    Machine Learning Repository, archive.ics.uci.edu/dataset/80, CC BY 4.0) as scikit-learn's `load_digits`
    returns it, with the counts 0..16 multiplied by 15.  The stored split was drawn once, class by class, and
    does not change with the seed.
    """
    with resources.files("sbf_pruner.training").joinpath("digits.npz").open("rb") as file:
        return _from_npz(file, "digits.npz")


@register("synthetic")
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


@register("cifar10")
def cifar10(config: DataConfig, num_classes: int, seed: int) -> Arrays:
    """60,000 colour photographs of 32x32 pixels in ten classes, 10,000 of them to test.

    "Learning Multiple Layers of Features from Tiny Images" (A. Krizhevsky, 2009).  `sbf data cifar10` puts
    them where they are found; data.path may name another folder or archive of any published form.
    """
    return load_cifar10(config.path)


@register("npz")
def npz(config: DataConfig, num_classes: int, seed: int) -> Arrays:
    """A NumPy archive with x_train, y_train, x_test, y_test and, if it has them, x_val and y_val."""
    path = Path(_needed(config, "path", "the .npz file"))
    try:
        with path.open("rb") as file:
            return _from_npz(file, str(path))
    except OSError as error:
        raise DataError(f"data.path: cannot read {path}: {error.strerror or error}") from error


@register("folder")
def folder(config: DataConfig, num_classes: int, seed: int) -> Arrays:
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
    parts = [part for part in ("train", "val", "test") if (root / part).is_dir()]
    return {part: _from_folder(root / part, classes, config.channels, size) for part in parts}


def class_names(config: DataConfig) -> tuple[str, ...]:
    """What the classes are called, in the order of their numbers; nothing where only numbers are known."""
    return tuple(_subfolders(Path(config.path) / "train")) if config.name == "folder" else ()


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


def _from_folder(
    root: Path, classes: Sequence[str], channels: int, size: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    for found in _subfolders(root):
        if found not in classes:
            raise DataError(f"{root / found}: train has no class {found!r}; {nearest(found, classes)}")
    files = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((root / name).glob("*"))
        if path.suffix.lower() in IMAGE_SUFFIXES
    ]
    if not files:
        raise DataError(f"{root} holds no images; expected {root}/CLASS/*.png")
    filled = {label for _, label in files}
    for label, name in enumerate(classes):
        for inner in _subfolders(root / name) if (root / name).is_dir() else ():
            raise DataError(f"{root / name / inner}: images lie in {root}/CLASS itself; move them up, or it away")
        if root.name == "train" and label not in filled:
            raise DataError(f"{root / name} holds no images; fill it, or remove it from train and test")
    images = np.empty((len(files), channels, size, size), dtype=np.uint8)
    for row, (path, _) in zip(images, files, strict=True):
        row[:] = _picture(path, channels, size)
    return images, np.array([label for _, label in files], dtype=np.int64)


def _picture(path: Path, channels: int, size: int) -> NDArray[np.uint8]:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading image files needs Pillow; run: pip install 'sbf-pruner[images]'") from None
    modes = {1: "L", 3: "RGB"}
    if channels not in modes:
        raise DataError(f"data.channels: folder reads 1 (grey) or 3 (colour) channels, not {channels}")
    try:
        with Image.open(path) as image:
            # What has more than eight bits would be cut off at white.
            shown = Image.fromarray(_lowered(np.asarray(image))) if image.mode.startswith("I") else image
            pixels = np.asarray(shown.convert(modes[channels]).resize((size, size), Image.Resampling.BILINEAR))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is not a readable image ({error}); replace or remove it") from error
    return np.atleast_3d(pixels).transpose(2, 0, 1)


def _lowered(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Pixels of 16 bits in eight."""
    if not (pixels.min() >= 0 and pixels.max() < 2**16):
        raise ValueError("its pixels have more than 16 bits")
    return np.rint(pixels / 257.0).astype(np.uint8)


def _subfolders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))

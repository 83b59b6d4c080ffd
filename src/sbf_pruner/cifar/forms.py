"""The forms in which CIFAR-10 is published, and how each is read: one reader and one row per form.

A folder or .tar.gz enters; per part (train, test) the images and labels leave, complete but not yet verified
against their checksums.  Pickled batches are read as data, archives in memory; what is missing, cut short or
damaged is a `DataError` that names the file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .fetch import read_archive
from .pickled import read_pickle

Bytes = NDArray[np.uint8]
Raw = dict[str, tuple[Bytes, Bytes]]
"""Per part the images (N,32,32,3, as their checksum is taken) and the labels."""

AGAIN = "get it again, or run: sbf data cifar10"


@dataclass(frozen=True)
class Part:
    """What a part must be: its number of images, and the sha256 of its pixels and of its labels."""

    count: int
    images: str
    labels: str


def read_published(path: Path, parts: Mapping[str, Part]) -> Raw:
    """The arrays of whichever form lies at `path`, each file with as many entries as `parts` asks for."""
    files = _files(path)
    form = max(FORMS, key=lambda form: len(files.keys() & form.names))
    missing = [name for name in form.names if name not in files]
    if len(missing) == len(form.names):
        raise DataError(
            f"{path} holds no CIFAR-10; looked for "
            + ", ".join(f"{form.train[0]} ({form.title})" for form in FORMS)
            + "; run: sbf data cifar10"
        )
    if missing:
        raise DataError(f"{path}: {form.title}, but without {', '.join(missing)}; {AGAIN}")
    raw: Raw = {}
    for part, names in (("train", form.train), ("test", form.test)):
        # A file may hold images, labels or both; each kind is spread evenly over its files.
        read = {name: form.read(files[name], str(path / name)) for name in names}
        images, labels = (
            _joined({name: held[kind] for name, held in read.items()}, parts[part].count, path) for kind in (0, 1)
        )
        raw[part] = images, labels
    return raw


def _files(path: Path) -> dict[str, bytes]:
    """The files at `path` that are called like one of CIFAR-10's."""
    wanted = {name for form in FORMS for name in form.names}
    if path.is_file():
        return read_archive(path, wanted)
    if not path.is_dir():
        raise DataError(f"{path} does not exist; expected a folder or .tar.gz of CIFAR-10")
    for folder in (path, *(path / form.folder for form in FORMS)):
        present = [folder / name for name in sorted(wanted) if (folder / name).is_file()]
        if present:
            try:
                return {file.name: file.read_bytes() for file in present}
            except OSError as error:
                raise DataError(f"{folder}: cannot be read: {error.strerror or error}") from error
    return {}


def _joined(held: Mapping[str, Bytes | None], count: int, path: Path) -> Bytes:
    arrays = {name: array for name, array in held.items() if array is not None}
    share = count // len(arrays)
    for name, array in arrays.items():
        if len(array) != share:
            raise DataError(f"{path / name}: has {len(array):,} entries instead of {share:,}; {AGAIN}")
    return np.ascontiguousarray(np.concatenate(list(arrays.values())))


def _read_batch(data: bytes, where: str) -> tuple[Bytes, Bytes]:
    batch = read_pickle(data, where)
    if isinstance(batch, dict):  # keys are bytes where Python 3 has written the batches again
        batch = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
        pixels = batch.get("data")
        if isinstance(pixels, np.ndarray) and pixels.ndim == 2 and pixels.shape[1] == 3072:
            return _from_planes(pixels), _labels(batch.get("labels"), where)
    raise DataError(f"{where}: not a batch of CIFAR-10, which has 'data' of 3072 columns and 'labels'; {AGAIN}")


def _read_records(data: bytes, where: str) -> tuple[Bytes, Bytes]:
    if not data or len(data) % 3073:
        raise DataError(f"{where}: incomplete, {len(data):,} bytes are not whole records of 3,073; {AGAIN}")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, 3073)
    return _from_planes(records[:, 1:]), records[:, 0]


def _read_sheet(data: bytes, where: str) -> tuple[Bytes | None, Bytes | None]:
    """One image per row of a sheet of 1024 columns; the labels lie in a file of their own."""
    if where.endswith(".json"):
        try:
            return None, _labels(json.loads(data), where)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: damaged or incomplete JSON ({error}); {AGAIN}") from error
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"{where}: reading it needs Pillow; run: pip install 'sbf-pruner[images]'") from None
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            image.load()
            if image.mode != "RGB" or image.width != 1024:
                raise ValueError(f"{image.mode}, {image.width} columns")
            return np.asarray(image).reshape(-1, 32, 32, 3), None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{where}: damaged, incomplete or no RGB sheet of 1024 columns ({error}); {AGAIN}"
        ) from error


def _from_planes(pixels: Bytes) -> Bytes:
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _labels(values: object, where: str) -> Bytes:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 10 for value in values):
        raise DataError(f"{where}: its labels are not a list of whole numbers from 0 to 9; {AGAIN}")
    return np.array(values, dtype=np.uint8)


@dataclass(frozen=True)
class Form:
    """A form the data set is published in: its folder, its files, and how one of them is read."""

    title: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[bytes, str], tuple[Bytes | None, Bytes | None]]

    @property
    def names(self) -> tuple[str, ...]:
        return self.train + self.test


def _batches(suffix: str) -> tuple[str, ...]:
    return tuple(f"data_batch_{number}{suffix}" for number in range(1, 6))


FORMS = (
    Form("the python version", "cifar-10-batches-py", _batches(""), ("test_batch",), _read_batch),
    Form("the binary version", "cifar-10-batches-bin", _batches(".bin"), ("test_batch.bin",), _read_records),
    Form(  # the package spells it "lables"
        "the PNG sheets",
        "package",
        (*_batches(".png"), "train_lables.json"),
        ("test_batch.png", "test_lables.json"),
        _read_sheet,
    ),
)

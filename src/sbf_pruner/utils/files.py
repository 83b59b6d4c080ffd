"""Atomic file writes, and checksummed safetensors files with a JSON header.

A file is written to a temporary path and then renamed, so a process killed at any moment leaves either the old or
the new file. Tensors are stored with safetensors, everything else as JSON in its header, with a SHA-256 over both.
Nothing is pickled.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from safetensors.torch import save_file
from torch import Tensor

from ..errors import PruningError, RunError

try:
    import fcntl
except ImportError:  # Windows has no advisory lock here, so `locked` does not lock.
    fcntl = None  # type: ignore[assignment]

_ABANDONED = 3600.0  # seconds since the last write, after which the writer is assumed to be dead


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; on success it is flushed to disk and renamed to `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next((parent for parent in path.parents if parent.is_file()), path.parent)
        raise RunError(f"{path} cannot be written, because {file} is a file; name a folder") from None
    temporary = temporary_path(path)
    try:
        temporary.touch()  # Creates it with the default mode of new files.
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"{path} cannot be written ({error})") from error
    except OSError as error:
        # The error of a full disk names no file, and the temporary name means nothing to the user.
        if error.filename in (None, str(temporary)):
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        with suppress(OSError):  # The error that prevents this was already raised by the write.
            temporary.unlink(missing_ok=True)
    _flush(path.parent)


def temporary_path(path: Path) -> Path:
    """Return a unique temporary path next to `path`, to be written and then moved to `path`.

    Temporary files of killed processes are removed once they are old; a recent one may belong to a process that is
    writing `path` now.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 12}.partial"):
        with suppress(OSError):  # Another process has removed it already.
            if time.time() - leftover.stat().st_mtime > _ABANDONED:
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")


@contextmanager
def locked(folder: Path, otherwise: PruningError) -> Iterator[None]:
    """Lock a folder until the block or the process ends; raise `otherwise` if another process holds the lock."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # Only from flock: a BlockingIOError of the block itself passes through.
            raise otherwise from None
        yield
    finally:
        os.close(descriptor)


def user_cache() -> Path:
    """Return this package's folder in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    return Path(os.path.expanduser(cache)) / "sbf-pruner"


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_text(path: Path) -> str:
    """Read a UTF-8 text file; raise a RunError if it exists but cannot be opened."""
    check_readable(path)
    return path.read_text("utf-8")


def path_exists(path: Path) -> bool:
    """Return True if the path exists; raise a RunError if that cannot be determined."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def check_readable(path: Path) -> None:
    """Raise FileNotFoundError if a file does not exist, and a RunError if it cannot be opened."""
    try:
        with path.open("rb"):
            pass
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be read: {error.strerror or error}; make it readable and try again")


def why_not_writable(path: Path) -> str | None:
    """Return the reason why a path cannot be written, or None if it can; missing parent folders are no obstacle.

    >>> why_not_writable(Path("new/folder/file.json"))
    """
    above = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if above == path.absolute() and above.is_file():
        above = above.parent
    if above.is_dir() and os.access(above, os.W_OK):
        return None
    return f"{above} is {'a file' if above.is_file() else 'not a folder that can be written to'}"


def append_text(path: Path, text: str) -> None:
    """Append to a text file and flush it to disk, so that files written afterwards can rely on its content."""
    new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
    _flush(path)
    if new:
        _flush(path.parent)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and a JSON header as one safetensors file, atomically."""
    plain, metadata = _storable(tensors, header)
    with atomic_path(path) as temporary:
        mode = temporary.stat().st_mode  # safetensors creates files that only the owner can read.
        save_file(plain, temporary, metadata=metadata)
        temporary.chmod(mode)


def stored_bytes(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> int:
    """Return the size in bytes of the file that `write_tensors` would write."""
    plain, metadata = _storable(tensors, header)
    return len(serialize(plain, metadata=metadata))


def _storable(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain[name] = tensor.detach().cpu().contiguous()
        if plain[name].untyped_storage().data_ptr() in seen:  # safetensors cannot store tensors that share memory.
            plain[name] = plain[name].clone()
        seen.add(plain[name].untyped_storage().data_ptr())
    text = json.dumps(header)
    return plain, file_metadata(_digest(plain, text), header)


def file_metadata(digest: str, header: Mapping[str, Any]) -> dict[str, str]:
    """Return the safetensors metadata of a file: its header and checksum."""
    # A single entry: equal networks must give equal files, and safetensors does not keep the order of entries.
    return {"sbf": json.dumps({"sha256": digest, "header": json.dumps(header)})}


def read_records(path: Path, remedy: str = "put the file back", most: int | None = None) -> list[dict[str, Any]]:
    """Read the first `most` records of a JSON Lines file, or all; an empty list if the file does not exist.

    Each record must have an integer "done", the number of epochs done; otherwise a RunError names the line. A last
    line without a newline is still being written, or its writer was killed, and is ignored.
    """
    content = b""
    if path_exists(path):
        check_readable(path)
        content = path.read_bytes()
    found: list[dict[str, Any]] = []
    for number, line in enumerate(content.split(b"\n")[:-1][:most], start=1):
        try:
            record = json.loads(line)
        except ValueError:  # not JSON, or not text
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("done"), int):
            raise RunError(f"{path}, line {number} is damaged; {remedy}")
        found.append(record)
    return found


def read_tensors(path: Path, remedy: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and header that `write_tensors` wrote; raise a RunError if the file is not intact."""
    with _opened(path, remedy) as (file, text, expected):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if _digest(tensors, text) != expected:
        raise RunError(f"{path} was changed after it was written (its checksum differs); {remedy}")
    return tensors, json.loads(text)


def read_header(path: Path, remedy: str) -> Any:
    """Return the header without reading the tensors, so the checksum is not verified."""
    try:
        with _opened(path, remedy) as (_, text, _):
            return json.loads(text)
    except ValueError:
        raise RunError(f"{path} was changed after it was written; {remedy}") from None


@contextmanager
def _opened(path: Path, remedy: str) -> Iterator[tuple[Any, str, Any]]:
    """Open a safetensors file; yield the open file, its header as JSON text, and the stored checksum."""
    try:
        check_readable(path)  # safetensors reports every file it cannot open as missing.
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; {remedy}") from None
    try:
        with safe_open(path, framework="pt") as file:
            try:
                entry = json.loads((file.metadata() or {})["sbf"])
                text, checksum = str(entry["header"]), entry["sha256"]
            except (ValueError, LookupError, TypeError):
                raise RunError(f"{path} was not written by sbf-pruner; {remedy}") from None
            yield file, text, checksum
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged or cut short ({error}); {remedy}") from error


def to_plain(nest: Any, leaf: Callable[[str, Tensor], Any], at: str = "") -> Any:
    """Convert nested dicts, lists, tuples, tensors, numbers, strings and None to JSON values.

    `leaf` takes the dotted path and the value of a tensor, and returns the JSON value that replaces it. A TypeError
    names the first value or key that cannot be stored.

    >>> to_plain({"a": (1, None)}, lambda path, tensor: path)
    {'dict': [['a', {'tuple': [1, None]}]]}
    """
    if nest is None or isinstance(nest, bool | int | float | str):
        return nest
    if isinstance(nest, Tensor):
        return {"tensor": leaf(at, nest)}
    if isinstance(nest, Mapping):
        for key in nest:
            if not isinstance(key, str | int):
                raise TypeError(f"{at or 'the state'} has a key of type {type(key).__name__}")
        return {"dict": [[key, to_plain(item, leaf, _under(at, key))] for key, item in nest.items()]}
    if isinstance(nest, list | tuple):
        kind = "list" if isinstance(nest, list) else "tuple"
        return {kind: [to_plain(item, leaf, _under(at, i)) for i, item in enumerate(nest)]}
    raise TypeError(f"{at or 'the state'} is of type {type(nest).__name__}, which cannot be stored")


def from_plain(plain: Any, leaf: Callable[[Any], Any]) -> Any:
    """Rebuild the nested value that `to_plain` converted; `leaf` takes the JSON value that replaced a tensor.

    >>> from_plain({"dict": [["a", {"tuple": [1, None]}]]}, lambda tensor: tensor)
    {'a': (1, None)}
    """
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return leaf(content)
    if kind == "dict":
        return {key: from_plain(item, leaf) for key, item in content}
    items = [from_plain(item, leaf) for item in content]
    return items if kind == "list" else tuple(items)


def _under(at: str, key: object) -> str:
    return f"{at}.{key}" if at else str(key)


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _flush(path: Path) -> None:
    """Flush a file or a directory entry to disk with fsync."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders.
        return
    # Windows flushes only files opened for writing; no system opens a folder for writing.
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flatten_keys(table: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Flatten nested settings into a dict with dotted keys; an empty table is kept as a value.

    >>> flatten_keys({"seed": 1, "model": {"name": "resnet56"}})
    {'seed': 1, 'model.name': 'resnet56'}
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flatten_keys(value, f"{at}{key}.") if isinstance(value, Mapping) and value else {at + key: value}
    return found

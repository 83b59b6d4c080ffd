"""Files that are either whole or not there.

Text, or a nest of plain values and tensors, enters; a file leaves that replaces the old one in a single step,
so a process killed at any moment leaves the one or the other.  Tensors go into a safetensors file: everything
that is not a tensor is JSON in its header, and a digest over both tells a changed file from a whole one.
Nothing is ever pickled.
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
except ImportError:  # Windows: nobody is kept out there
    fcntl = None  # type: ignore[assignment]

_HEX = "[0-9a-f]"
_FORGOTTEN = 3600.0  # seconds without a byte written: its writer was killed


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it takes the place of `path` once it is safely on disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next((parent for parent in path.parents if parent.is_file()), path.parent)
        raise RunError(f"{path} cannot be written, because {file} is a file; name a folder") from None
    temporary = aside(path)
    try:
        temporary.touch()  # with the mode of any new file here
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
    except SafetensorError as error:  # a full disk, say
        raise OSError(f"{path} cannot be written ({error})") from error
    except OSError as error:
        if error.filename in (None, str(temporary)):  # a full disk tells none, and ours nobody knows
            error.filename, error.filename2 = str(path), None
        raise
    finally:
        with suppress(OSError):  # where nothing can be written nothing can be removed, and that was said
            temporary.unlink(missing_ok=True)
    _flush(path.parent)


def aside(path: Path) -> Path:
    """A name beside `path` that no other process has, to write there and move into its place.

    What others left there goes once it is old: a younger one may belong to a process that writes `path` too.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.{_HEX * 12}.partial"):
        with suppress(OSError):  # another process was quicker
            if time.time() - left.stat().st_mtime > _FORGOTTEN:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")


@contextmanager
def locked(folder: Path, otherwise: PruningError) -> Iterator[None]:
    """Hold a folder until the block or the process ends; `otherwise` is raised if another process does."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # of this call alone: what the block itself raises is not ours
            raise otherwise from None
        yield
    finally:
        os.close(descriptor)


def user_cache() -> Path:
    """The folder of this package in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    return Path(os.path.expanduser(cache)) / "sbf-pruner"


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_text(path: Path) -> str:
    """Read a text file; a RunError if it is there and cannot be read."""
    check_readable(path)
    return path.read_text("utf-8")


def is_there(path: Path) -> bool:
    """Return True if the path exists; a RunError where that cannot be found out."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def check_readable(path: Path) -> None:
    """Raise a RunError if a file cannot be opened, and FileNotFoundError only if there is none."""
    try:
        with path.open("rb"):
            pass
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be read: {error.strerror or error}; make it readable and try again")


def append_text(path: Path, text: str) -> None:
    """Add to a text file, safely on disk: what is written after it may rely on it."""
    new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
    _flush(path)
    if new:
        _flush(path.parent)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and a JSON header as one safetensors file in one step."""
    plain, metadata = _storable(tensors, header)
    with replacing(path) as temporary:
        mode = temporary.stat().st_mode  # safetensors would let nobody else read it
        save_file(plain, temporary, metadata=metadata)
        temporary.chmod(mode)


def stored_bytes(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> int:
    """How long the file is that `write_tensors` would write."""
    plain, metadata = _storable(tensors, header)
    return len(serialize(plain, metadata=metadata))


def _storable(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        held = tensor.detach().cpu().contiguous()
        if held.untyped_storage().data_ptr() in seen:  # the format has no shared tensors: each stands alone
            held = held.clone()
        seen.add(held.untyped_storage().data_ptr())
        plain[name] = held
    text = json.dumps(header)
    return plain, metadata_of(_digest(plain, text), header)


def metadata_of(digest: str, header: Mapping[str, Any]) -> dict[str, str]:
    """What stands in a file beside its tensors."""
    # One entry alone: the format keeps no order among several, and equal networks are to be equal files.
    return {"sbf": json.dumps({"sha256": digest, "header": json.dumps(header)})}


def read_lines(path: Path, remedy: str = "put the file back", most: int | None = None) -> list[dict[str, Any]]:
    """The records of a file with one in each line, the first `most` of them; none where there is no file.

    Each says how many epochs were done.  A last line that has no end is being written, or was when its writer was
    killed, and does not count.
    """
    content = b""
    if is_there(path):
        check_readable(path)
        content = path.read_bytes()
    found: list[dict[str, Any]] = []
    for number, line in enumerate(content.split(b"\n")[:-1][:most], start=1):
        try:
            held = json.loads(line)
        except ValueError:  # no JSON, or no text at all
            held = None
        if not isinstance(held, dict) or not isinstance(held.get("done"), int):
            raise RunError(f"{path}, line {number} is damaged; {remedy}")
        found.append(held)
    return found


def read_tensors(path: Path, remedy: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a file that `write_tensors` wrote; a RunError if it is not whole."""
    with _opened(path, remedy) as file:
        text, expected = _entry(file, path, remedy)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if _digest(tensors, text) != expected:
        raise RunError(f"{path} was changed after it was written (its checksum differs); {remedy}")
    return tensors, json.loads(text)


def read_header(path: Path, remedy: str) -> Any:
    """The header alone, however long the file is; so nobody knows whether it was changed."""
    with _opened(path, remedy) as file:
        text, _ = _entry(file, path, remedy)
    try:
        return json.loads(text)
    except ValueError:
        raise RunError(f"{path} was changed after it was written; {remedy}") from None


@contextmanager
def _opened(path: Path, remedy: str) -> Iterator[Any]:
    try:
        check_readable(path)  # safetensors reports every file that it cannot open as missing
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; {remedy}") from None
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged or cut short ({error}); {remedy}") from error


def _entry(file: Any, path: Path, remedy: str) -> tuple[str, Any]:
    """The header as text, and the digest that was written with it."""
    try:
        entry = json.loads((file.metadata() or {})["sbf"])
        return str(entry["header"]), entry["sha256"]
    except (ValueError, LookupError, TypeError):
        raise RunError(f"{path} was not written by sbf-pruner; {remedy}") from None


def to_plain(nest: Any, leaf: Callable[[str, Tensor], Any], at: str = "") -> Any:
    """A nest of dicts, lists, tuples, tensors, numbers, text and None as JSON; `leaf` writes each tensor.

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
        return {kind: [to_plain(item, leaf, _under(at, index)) for index, item in enumerate(nest)]}
    raise TypeError(f"{at or 'the state'} is of type {type(nest).__name__}, which cannot be stored")


def from_plain(plain: Any, leaf: Callable[[Any], Any]) -> Any:
    """The nest that `to_plain` wrote; `leaf` reads each tensor.

    >>> from_plain({"dict": [["a", {"tuple": [1, None]}]]}, lambda tensor: tensor)
    {'a': (1, None)}
    """
    if not isinstance(plain, dict):
        return plain
    ((kind, held),) = plain.items()
    if kind == "tensor":
        return leaf(held)
    if kind == "dict":
        return {key: from_plain(item, leaf) for key, item in held}
    items = [from_plain(item, leaf) for item in held]
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
    """Make sure that a file, or a folder's list of names, is on disk and not only promised."""
    if os.name == "nt" and path.is_dir():  # folders cannot be opened there
        return
    # Windows flushes only what may be written to; a folder cannot be opened so anywhere.
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flat(table: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys.

    >>> flat({"seed": 1, "model": {"name": "resnet56"}})
    {'seed': 1, 'model.name': 'resnet56'}
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{at}{key}.") if isinstance(value, Mapping) and value else {at + key: value}
    return found

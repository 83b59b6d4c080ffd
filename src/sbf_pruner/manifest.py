"""What an exported folder holds, and whether it still does.

Facts and files enter; `export.json` leaves, with the size and the SHA-256 of every file.  Reading it back checks
the files asked for before anybody opens them.  What holds: a file that is missing, cut short or changed is named
in a RunError.  That guards against damage; it does not guard against somebody who writes both anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import RunError
from .files import read_text, write_text

MANIFEST = "export.json"
FORMAT = "sbf-pruner export 1"
# What an export may write. `--force` removes no other file, whatever a manifest says.
FILES = (
    "network.onnx",
    "network-int8.onnx",
    "network.pt2",
    "model.safetensors",
    "plan.json",
    "recipe.toml",
    "README.md",
)
_REMEDY = "export the run again with: sbf export RUN --force"
_ANEW = "export the run into another folder with: sbf export RUN --to DIR"  # this one cannot be replaced


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Write the manifest of all files in a folder, with some facts about them; what was written."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": digest(folder / name)} for name in names}
    manifest = {"format": FORMAT, **facts, "files": files}
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an exported folder."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_text(path))
    except FileNotFoundError:
        raise RunError(f"{path} does not exist; {_ANEW}") from None
    except ValueError as error:
        raise RunError(f"{path} is damaged; {_ANEW}") from error
    known = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    if not known or not isinstance(manifest.get("files"), dict):
        raise RunError(f"{path} is no manifest of this version ({FORMAT}); {_ANEW}")
    return manifest


def check_files(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """The manifest of a folder, after the files named have been found to be what it says."""
    manifest = read_manifest(folder)
    for name in names:
        path, stated = folder / name, manifest["files"].get(name)
        if stated is None:
            held = ", ".join(manifest["files"])
            raise RunError(f"{folder} was exported without {name} (it holds {held}); {_REMEDY}")
        if not path.is_file():
            raise RunError(f"{path} is missing; {_REMEDY}")
        if path.stat().st_size != stated["bytes"] or digest(path) != stated["sha256"]:
            raise RunError(f"{path} is not the file that was exported (its checksum differs); {_REMEDY}")
    return manifest


def exported_files(folder: Path, shown: Path) -> list[Path]:
    """The files of an exported folder, the manifest last; a RunError that names the first that is not an export's.

    Messages call the folder `shown`.
    """
    written = [*read_manifest(folder)["files"], MANIFEST]
    found = sorted(folder.iterdir(), key=lambda path: (path.name == MANIFEST, path.name))
    for path in found:
        ours = path.name in written and path.name in (*FILES, MANIFEST)
        if not ours or path.is_symlink() or not path.is_file():
            raise RunError(
                f"{shown / path.name} was not written by an export, and {shown} is not replaced; move it "
                "elsewhere, or name another folder (--to)"
            )
    return found


def remove_export(folder: Path) -> None:
    """Remove what an exported folder's manifest names, and the folder unless it holds more; leave any other."""
    try:
        manifest = read_manifest(folder)
    except RunError:
        return
    for name in (*FILES, MANIFEST):  # the manifest last, as it says that the others are ours
        path = folder / name
        if (name in manifest["files"] or name == MANIFEST) and path.is_file() and not path.is_symlink():
            path.unlink()
    with suppress(OSError):  # files of the user's own lie there
        folder.rmdir()


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Check that a path can be written before any work is done. Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path


def why_not_writable(path: Path) -> str | None:
    """Return why nothing can be written at a path, or None if it can; missing parent folders are no obstacle.

    >>> why_not_writable(Path("new/folder/file.json"))
    """
    above = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if above == path.absolute() and above.is_file():
        above = above.parent
    if above.is_dir() and os.access(above, os.W_OK):
        return None
    return f"{above} is {'a file' if above.is_file() else 'not a folder that can be written to'}"

"""Image files in a folder for each class: listed, looked at through a window, and read.

A folder enters; all its images leave, or a dataset that reads each when it is asked for.  Both read a file by the
same function, so a run from memory and a run from files see the same pixels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import DataError, nearest
from ..figures import some
from .splits import Split, Stream

_log = logging.getLogger("sbf_pruner")

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"}
MODES = {1: "L", 3: "RGB"}
WIDEST = 4 / 3  # of a window: width by height; the tallest is its inverse

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class View:
    """How a picture of any size becomes a square of pixels.

    >>> View(8).box(40, 20), View(8, fit="crop").box(40, 20), View(8, fit="crop", middle=0.5).box(40, 20)
    ((0.0, 0.0, 40.0, 20.0), (10.0, 0.0, 30.0, 20.0), (15.0, 5.0, 25.0, 15.0))
    >>> View(8).window(40, 20, (0.5, 0.5, 0.0, 1.0))
    (0.0, 0.0, 20.0, 20.0)
    """

    size: int
    channels: int = 3
    fit: str = "stretch"
    """all of the picture, stretched, or (crop) the largest square around its middle"""
    middle: float = 1.0
    """of that, the part of each side that is looked at"""

    def box(self, width: int, height: int) -> Box:
        """What is looked at of a picture by default."""
        square = min(width, height)
        sides = (square, square) if self.fit == "crop" else (width, height)
        across, down = (self.middle * side for side in sides)
        left, top = (width - across) / 2, (height - down) / 2
        return left, top, min(left + across, width), min(top + down, height)

    def window(self, width: int, height: int, drawn: Sequence[float]) -> Box:
        """What is looked at of a picture in training: a part of its area, of some shape, somewhere."""
        area, shape, x, y = drawn
        ratio = math.exp((2 * shape - 1) * math.log(WIDEST))
        across = min(math.sqrt(area * width * height * ratio), width)
        down = min(math.sqrt(area * width * height / ratio), height)
        left, top = x * (width - across), y * (height - down)
        return left, top, min(left + across, width), min(top + down, height)


class Pictures(Dataset[tuple[Tensor, int]]):
    """Image files and their labels, each read when it is asked for, by its number or by (number, window)."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int], view: View) -> None:
        self.files, self.labels, self.view = files, labels, view

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: int | tuple[int, Sequence[float]]) -> tuple[Tensor, int]:
        row, window = key if isinstance(key, tuple) else (key, None)
        pixels = read_picture(self.files[row], self.view, window)
        return torch.from_numpy(pixels), self.labels[row]

    def stream(self) -> Stream:
        """To be read as they are needed."""
        shape = (self.view.channels, self.view.size, self.view.size)
        rows, labels = torch.arange(len(self)), torch.tensor(self.labels)
        return Stream(self, rows, shape, labels, windows=True)

    def split(self) -> Split:
        """All of them, read now."""
        images = torch.empty(len(self), self.view.channels, self.view.size, self.view.size, dtype=torch.uint8)
        for row in range(len(self)):
            images[row] = self[row][0]
        return Split(images, torch.tensor(self.labels))


def list_pictures(root: Path, classes: Sequence[str], view: View) -> Pictures:
    """The images of root/CLASS/*.png, class by class."""
    for folder in subfolders(root):
        if folder not in classes:
            raise DataError(f"{root / folder}: train has no class {folder!r}; {nearest(folder, classes)}")
    found = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((root / name).glob("*"))
        if not path.name.startswith(".") and path.is_file()  # macOS puts such files beside pictures
    ]
    files = [(path, label) for path, label in found if path.suffix.lower() in SUFFIXES]
    if not files:
        raise DataError(f"{root} holds no images; expected {root}/CLASS/*.png")
    if len(files) < len(found):
        others = sorted({path.suffix.lower() or path.name for path, _ in found} - SUFFIXES)
        _log.warning("%s: %d files are not read (%s)", root, len(found) - len(files), ", ".join(others))
    filled = {label for _, label in files}
    if root.name != "train" and (missing := [name for label, name in enumerate(classes) if label not in filled]):
        _log.warning("%s holds no images of %s", root, some(missing, 3))
    for label, name in enumerate(classes):
        for inner in subfolders(root / name) if (root / name).is_dir() else ():
            raise DataError(
                f"{root / name / inner}: images must lie in {root}/CLASS; move them there, or remove this folder"
            )
        if root.name == "train" and label not in filled:
            raise DataError(f"{root / name} holds no images; fill it, or remove it from train and test")
    return Pictures([path for path, _ in files], [label for _, label in files], view)


def subfolders(root: Path) -> list[str]:
    """The names of the folders in a folder, in order, without hidden ones."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def read_picture(path: Path, view: View, window: Sequence[float] | None = None) -> NDArray[np.uint8]:
    """A file as C,H,W pixels, seen through the window or as the view says."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading image files needs Pillow; run: pip install 'sbf-pruner[images]'") from None
    if view.channels not in MODES:
        raise DataError(f"data.channels: folder reads 1 (grey) or 3 (colour) channels, not {view.channels}")
    try:
        with Image.open(path) as image:
            # What has more than eight bits would be cut off at white.
            shown = Image.fromarray(_lowered(np.asarray(image))) if image.mode.startswith("I") else image
            box = view.box(*image.size) if window is None else view.window(*image.size, window)
            if "transparency" in image.info:  # which Pillow complains of, picture by picture
                shown = shown.convert("RGBA")
            whole = shown.convert(MODES[view.channels])
            pixels = np.array(whole.resize((view.size, view.size), Image.Resampling.BILINEAR, box=box))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is not a readable image ({error}); replace or remove it") from error
    return np.ascontiguousarray(np.atleast_3d(pixels).transpose(2, 0, 1))


def _lowered(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Pixels of 16 bits in eight."""
    if not (pixels.min() >= 0 and pixels.max() < 2**16):
        raise ValueError("its pixels have more than 16 bits")
    return np.rint(pixels / 257.0).astype(np.uint8)

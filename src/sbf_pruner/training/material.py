"""The sections of a recipe that say what a run is given: the network it starts from, and the images.

Nothing enters; frozen dataclasses leave, which check what they are given.  `recipe` puts them together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import RecipeError
from .settings import Section, about


@dataclass(frozen=True)
class ModelConfig(Section):
    """The network a run starts from."""

    name: str = field(
        metadata=about('a bundled network, "torchvision:NAME", "timm:NAME" or "package.module:callable"')
    )
    num_classes: int = field(default=10, metadata=about("number of classes", least=1))
    in_channels: int = field(default=3, metadata=about("channels of the images", least=1))
    options: dict[str, Any] = field(
        default_factory=dict, metadata=about("further keyword arguments for the network's builder")
    )
    weights: str = field(
        default="", metadata=about("a .safetensors, .pt or .pth file of weights to start from; empty: from scratch")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("num_classes", "in_channels"):
            if key in self.options:
                raise RecipeError(f"options.{key}: set {key} itself, not among the options")
        if self.weights and not self.weights.endswith((".safetensors", ".pt", ".pth")):
            raise RecipeError(f"weights: {self.weights!r} ends in none of .safetensors, .pt and .pth")


@dataclass(frozen=True)
class DataConfig(Section):
    """The images a run learns from and is judged on."""

    name: str = field(
        metadata=about('a data set: digits, cifar10, synthetic, npz, folder or "package.module:callable"')
    )
    path: str = field(default="", metadata=about("the file or folder that npz, folder and cifar10 read"))
    validation: float = field(
        default=0.0, metadata=about("fraction of the training images held out", least=0, below=1)
    )
    batch_size: int = field(default=256, metadata=about("images per step", least=1))
    crop: int = field(default=0, metadata=about("pixels of zero padding before a random crop; 0: no crop", least=0))
    flip: bool = field(default=False, metadata=about("mirror half of the training images"))
    image_size: int = field(
        default=0,
        metadata=about("side in pixels to bring images to; 0: as stored (folder, synthetic need it)", least=0),
    )
    channels: int = field(
        default=3,
        metadata=about("channels that synthetic makes and folder reads (1: grey, 3: colour)", least=1),
    )
    samples: int = field(default=2048, metadata=about("training images that synthetic makes", least=1))
    mean: tuple[float, ...] = field(
        default=(),
        metadata=about("mean of each channel, of pixels from 0 to 1; []: that of the training images"),
    )
    std: tuple[float, ...] = field(default=(), metadata=about("deviation of each channel, likewise"))
    in_memory: bool = field(
        default=True, metadata=about("read all images of folder at once; false: as they are needed, by workers")
    )
    workers: int = field(
        default=-1,
        metadata=about(
            "processes that read images as they are needed; 0: the one that trains; -1: one for each core", least=-1
        ),
    )
    fit: str = field(
        default="stretch",
        metadata=about(
            "how folder makes a picture square: stretch all of it, or crop to the largest square around its middle",
            choices=("stretch", "crop"),
        ),
    )
    middle: float = field(
        default=1.0,
        metadata=about(
            "the part of each side that folder looks at, around the middle (0.875: 224 of 256 pixels)",
            above=0,
            most=1,
        ),
    )
    scale: float = field(
        default=1.0,
        metadata=about(
            "train on random windows of at least this part of a picture's area (0.08 is usual for ImageNet); 1: on "
            "pictures as they are judged",
            above=0,
            most=1,
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mean) != len(self.std):
            raise RecipeError(f"mean: {len(self.mean)} means and {len(self.std)} deviations; give as many of both")
        if any(deviation <= 0 for deviation in self.std):
            raise RecipeError("std: a deviation is above 0; images are divided by it")

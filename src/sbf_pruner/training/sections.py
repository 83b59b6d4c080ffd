"""Sections of a recipe: frozen dataclasses of settings with their defaults, bounds and help texts.

The defaults are those of the paper where it states any. A section validates its fields when it is built; `recipe`
combines the sections into a `Recipe`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from ..budget.targets import RESOURCES, Budget
from ..errors import RecipeError
from ..scores.config import Scores
from ..utils.settings import Section, setting_field


@dataclass(frozen=True)
class PhasesConfig(Section):
    """Number of epochs of each phase, and number of cycles."""

    warmup: int = field(default=50, metadata=setting_field("epochs of dense training before any pruning", least=0))
    cycles: int = field(
        default=10, metadata=setting_field("number of cycles, each a score phase and a weight phase", least=0)
    )
    score: int = field(default=3, metadata=setting_field("epochs of score training in each cycle", least=0))
    weights: int = field(
        default=6, metadata=setting_field("epochs of weight training with closed gates in each cycle", least=0)
    )
    finetune: int = field(default=300, metadata=setting_field("epochs of fine-tuning after the removal", least=0))


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Optimizer, learning rate schedule and regularization of a phase that trains weights."""

    optimizer: str = field(default="sgd", metadata=setting_field("the optimiser", choices=("sgd", "adam")))
    lr: float = field(default=0.1, metadata=setting_field("learning rate at the start of the phase", above=0))
    momentum: float = field(default=0.9, metadata=setting_field("momentum of sgd", least=0, below=1))
    nesterov: bool = field(default=False, metadata=setting_field("Nesterov's form of momentum"))
    weight_decay: float = field(default=5e-4, metadata=setting_field("weight decay", least=0))
    decay_all: bool = field(
        default=True, metadata=setting_field("weight decay on biases and on the norms' scales and shifts too")
    )
    batch_size: int = field(
        default=0, metadata=setting_field("images per step in this phase; 0: data.batch_size", least=0)
    )
    schedule: str = field(
        default="cosine",
        metadata=setting_field("schedule of the learning rate", choices=("cosine", "step", "constant")),
    )
    ramp: int = field(
        default=0,
        metadata=setting_field("epochs at the start in which the learning rate rises from near 0", least=0),
    )
    milestones: tuple[float, ...] = field(
        default=(0.5, 0.75), metadata=setting_field("where step multiplies by gamma, as fractions of the phase")
    )
    gamma: float = field(default=0.1, metadata=setting_field("factor at each milestone of step", above=0, most=1))
    label_smoothing: float = field(
        default=0.0,
        metadata=setting_field("label smoothing: probability spread over all classes", least=0, below=1),
    )
    cutout: int = field(
        default=0,
        metadata=setting_field("blank a square of so many pixels a side somewhere in each image; 0: none", least=0),
    )
    mixup: float = field(
        default=0.0,
        metadata=setting_field(
            "blend pairs of images, and their labels, in parts drawn from Beta(mixup, mixup); the "
            "distillation teacher sees the blends too; 0: images as they are",
            least=0,
        ),
    )
    ema: float = field(
        default=0.0,
        metadata=setting_field(
            "decay per step of a running average of the network, which is evaluated and kept when the "
            "phase ends; 0: none",
            least=0,
            below=1,
        ),
    )
    recalibrate: int = field(
        default=0,
        metadata=setting_field("batches to recompute batch-norm statistics from at the end of the phase", least=0),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = (0.0, *self.milestones, 1.0)
        if any(left >= right for left, right in itertools.pairwise(bounds)):
            raise RecipeError(f"milestones: must rise between 0 and 1, got {list(self.milestones)}")
        if self.nesterov and self.momentum == 0:
            raise RecipeError("nesterov: needs a momentum above 0")


def gated_weights_optimizer() -> OptimizerConfig:
    """Return the optimizer settings of the paper for the gated weight phases."""
    return OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.0, schedule="constant")


@dataclass(frozen=True)
class ScoresConfig(Scores):
    """How scores are computed and trained, and what a score phase of a run adds to that."""

    batch_size: int = field(
        default=0, metadata=setting_field("images per step in this phase; 0: data.batch_size", least=0)
    )
    recalibrate: int = field(
        default=20,
        metadata=setting_field(
            "batches to recompute norm statistics from at the start of a phase, if a budget has closed filters",
            least=0,
        ),
    )
    joint: bool = field(
        default=False,
        metadata=setting_field(
            "train scores and weights in the same steps of one phase per cycle, as long as both together, "
            "with the settings of weights and norms as in training; for comparison with alternating phases"
        ),
    )


@dataclass(frozen=True)
class BudgetConfig(Budget):
    """Target size of the pruned network: up to 1 a fraction of the dense one, above 1 an amount; text has a unit.

    If all targets are 1, there is no budget and the scores alone decide how many filters are kept.

    >>> BudgetConfig(size="1MB", latency="5ms")
    BudgetConfig(params=1.0, macs=1.0, size=1000000.0, latency=5000.0, settled=2)
    """

    settled: int = field(
        default=2,
        metadata=setting_field(
            "final cycles (at most half of them) that run at the full budget; earlier cycles approach it", least=0
        ),
    )

    def __post_init__(self) -> None:
        for key in RESOURCES:
            if isinstance(written := getattr(self, key), str):  # Text with a unit: "50%", "1MB", "5ms".
                object.__setattr__(self, key, getattr(Budget(**{key: written}), key))
        super().__post_init__()


@dataclass(frozen=True)
class LatencyConfig(Section):
    """Conditions under which `budget.latency` holds, and the way filters are removed to meet it."""

    runtime: str = field(
        default="onnxruntime",
        metadata=setting_field(
            "runtime of the latency target: ONNX Runtime, torch itself, torch.compile, or torch on a GPU",
            choices=("eager", "compile", "onnxruntime", "eager:cuda", "compile:cuda"),
        ),
    )
    batch: int = field(default=64, metadata=setting_field("batch size of a pass", least=1))
    threads: int = field(default=0, metadata=setting_field("CPU threads of a pass; 0: those of the run", least=0))
    way: str = field(
        default="auto",
        metadata=setting_field(
            "what to remove: single filters, the same filters in all layers whose outputs are added (streams), or "
            "whole residual branches (blocks); auto: what keeps the most MACs at the latency target",
            choices=("auto", "filters", "streams", "blocks"),
        ),
    )
    table: str = field(
        default="",
        metadata=setting_field(
            "a file written by `sbf latency`, for example on another machine; empty: measure here"
        ),
    )


@dataclass(frozen=True)
class DistillConfig(Section):
    """Distillation from the dense network as the warm-up left it."""

    alpha: float = field(
        default=0.0,
        metadata=setting_field(
            "share of the loss that compares with the dense network after the warm-up; 0: none", least=0, most=1
        ),
    )
    temperature: float = field(
        default=4.0, metadata=setting_field("distillation temperature: divides both networks' logits", above=0)
    )
    mirrored: bool = field(
        default=False,
        metadata=setting_field("average the dense network's outputs for each image and its mirror image"),
    )
    fade: bool = field(
        default=False,
        metadata=setting_field("let alpha fall to 0 over fine-tuning, along a cosine"),
    )
    during: str = field(
        default="finetune",
        metadata=setting_field(
            "when to distill: in fine-tuning only, in weight phases too, or in the whole cycles with their "
            "score phases",
            choices=("finetune", "weights", "cycles"),
        ),
    )


@dataclass(frozen=True)
class ModelConfig(Section):
    """The network that a run starts from."""

    name: str = field(
        metadata=setting_field('a bundled network, "torchvision:NAME", "timm:NAME" or "package.module:callable"')
    )
    num_classes: int = field(default=10, metadata=setting_field("number of classes", least=1))
    in_channels: int = field(default=3, metadata=setting_field("channels of the images", least=1))
    options: dict[str, Any] = field(
        default_factory=dict, metadata=setting_field("further keyword arguments for the network's builder")
    )
    weights: str = field(
        default="",
        metadata=setting_field("a .safetensors, .pt or .pth file of weights to start from; empty: from scratch"),
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
    """The images for training and evaluation, their preprocessing and augmentation."""

    name: str = field(
        metadata=setting_field('a data set: digits, cifar10, synthetic, npz, folder or "package.module:callable"')
    )
    path: str = field(default="", metadata=setting_field("the file or folder that npz, folder and cifar10 read"))
    validation: float = field(
        default=0.0, metadata=setting_field("fraction of the training images held out", least=0, below=1)
    )
    batch_size: int = field(default=256, metadata=setting_field("images per step", least=1))
    crop: int = field(
        default=0, metadata=setting_field("pixels of zero padding before a random crop; 0: no crop", least=0)
    )
    flip: bool = field(default=False, metadata=setting_field("mirror half of the training images"))
    image_size: int = field(
        default=0,
        metadata=setting_field(
            "side in pixels that images are resized to; 0: as stored (folder, synthetic need it)", least=0
        ),
    )
    channels: int = field(
        default=3,
        metadata=setting_field("channels that synthetic makes and folder reads (1: grey, 3: colour)", least=1),
    )
    samples: int = field(default=2048, metadata=setting_field("training images that synthetic makes", least=1))
    mean: tuple[float, ...] = field(
        default=(),
        metadata=setting_field("mean of each channel, of pixels from 0 to 1; []: that of the training images"),
    )
    std: tuple[float, ...] = field(
        default=(), metadata=setting_field("standard deviation of each channel, likewise")
    )
    in_memory: bool = field(
        default=True,
        metadata=setting_field("keep all images of folder in memory; false: workers read them as they are needed"),
    )
    workers: int = field(
        default=-1,
        metadata=setting_field(
            "processes that read images as they are needed; 0: the one that trains; -1: one for each core", least=-1
        ),
    )
    fit: str = field(
        default="stretch",
        metadata=setting_field(
            "how folder makes an image square: stretch it, or crop to the largest square around its middle",
            choices=("stretch", "crop"),
        ),
    )
    middle: float = field(
        default=1.0,
        metadata=setting_field(
            "the share of each side that folder crops to, around the middle (0.875: 224 of 256 pixels)",
            above=0,
            most=1,
        ),
    )
    scale: float = field(
        default=1.0,
        metadata=setting_field(
            "train on random windows of at least this part of a picture's area (0.08 is usual for "
            "ImageNet); 1: on pictures as in evaluation",
            above=0,
            most=1,
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mean) != len(self.std):
            raise RecipeError(f"mean: {len(self.mean)} means and {len(self.std)} deviations; give as many of both")
        if any(deviation <= 0 for deviation in self.std):
            raise RecipeError("std: deviations must be above 0, because images are divided by them")

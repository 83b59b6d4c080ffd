"""Recipes: the frozen, validated configuration of a run, from a bundled or TOML file and "key=value" overrides.

Each section is a dataclass of settings with their defaults (the paper's where it states any), bounds and help
texts; `Recipe` combines them. The text of `Recipe.to_toml()` parses to an equal recipe, so the copy in a run folder
records every setting. The help text of each field is its only description; `--help` and the documentation read it
through `settings()`.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from importlib import resources
from pathlib import Path
from typing import Any, Self

from ..budget.constraints import Constraints
from ..budget.targets import RESOURCES, Budget
from ..criteria import METHODS, OWN
from ..errors import RecipeError, check_version, suggestion
from ..schedule import RECIPE_FORMAT
from ..scores.config import Scores
from ..utils.settings import Section, Setting, describe, merge, setting_field


def _setting(default: Any, help: str, **limits: Any) -> Any:
    """Return a dataclass field with a default and a help text; `limits` are passed to `setting_field`."""
    return field(default=default, metadata=setting_field(help, **limits))


@dataclass(frozen=True)
class PhasesConfig(Section):
    """Number of epochs of each phase, and number of cycles."""

    warmup: int = _setting(50, "epochs of dense training before any pruning", least=0)
    cycles: int = _setting(10, "number of cycles, each a score phase and a weight phase", least=0)
    score: int = _setting(3, "epochs of score training in each cycle", least=0)
    weights: int = _setting(6, "epochs of weight training with closed gates in each cycle", least=0)
    finetune: int = _setting(300, "epochs of fine-tuning after the removal", least=0)


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Optimizer, learning rate schedule and regularization of a phase that trains weights."""

    optimizer: str = _setting("sgd", "the optimiser", choices=("sgd", "adam"))
    lr: float = _setting(0.1, "learning rate at the start of the phase", above=0)
    momentum: float = _setting(0.9, "momentum of sgd", least=0, below=1)
    nesterov: bool = _setting(False, "Nesterov's form of momentum")
    weight_decay: float = _setting(5e-4, "weight decay", least=0)
    decay_all: bool = _setting(True, "weight decay on biases and on the norms' scales and shifts too")
    batch_size: int = _setting(0, "images per step in this phase; 0: data.batch_size", least=0)
    schedule: str = _setting("cosine", "schedule of the learning rate", choices=("cosine", "step", "constant"))
    ramp: int = _setting(0, "epochs at the start in which the learning rate rises from near 0", least=0)
    milestones: tuple[float, ...] = _setting(
        (0.5, 0.75), "where step multiplies by gamma, as fractions of the phase"
    )
    gamma: float = _setting(0.1, "factor at each milestone of step", above=0, most=1)
    label_smoothing: float = _setting(0.0, "label smoothing: probability spread over all classes", least=0, below=1)
    cutout: int = _setting(0, "blank a square of so many pixels a side somewhere in each image; 0: none", least=0)
    mixup: float = _setting(
        0.0,
        "blend pairs of images, and their labels, in parts drawn from Beta(mixup, mixup); the "
        "distillation teacher sees the blends too; 0: images as they are",
        least=0,
    )
    ema: float = _setting(
        0.0,
        "decay per step of a running average of the network, which is evaluated and kept when the "
        "phase ends; 0: none",
        least=0,
        below=1,
    )
    recalibrate: int = _setting(
        0, "batches to recompute batch-norm statistics from at the end of the phase", least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = (0.0, *self.milestones, 1.0)
        if any(left >= right for left, right in itertools.pairwise(bounds)):
            raise RecipeError(f"milestones: must rise between 0 and 1, got {list(self.milestones)}")
        if self.nesterov and self.momentum == 0:
            raise RecipeError("nesterov: needs a momentum above 0")


@dataclass(frozen=True)
class ScoresConfig(Scores):
    """Settings for computing and training scores: those of `Scores`, and those of the score phases of a run."""

    batch_size: int = _setting(0, "images per step in this phase; 0: data.batch_size", least=0)
    recalibrate: int = _setting(
        20,
        "batches to recompute norm statistics from at the start of a phase, if a budget has closed filters",
        least=0,
    )
    joint: bool = _setting(
        False,
        "train scores and weights in the same steps of one phase per cycle, as long as both together, "
        "with the settings of weights and norms as in training; for comparison with alternating phases",
    )


@dataclass(frozen=True)
class BudgetConfig(Budget):
    """Target size of the pruned network; a number up to 1 is a fraction of the dense size, a larger one an amount.

    A target may also be text with a unit. If all targets are 1, there is no budget and the scores alone decide how
    many filters are kept.

    >>> BudgetConfig(size="1MB", latency="5ms")
    BudgetConfig(params=1.0, macs=1.0, size=1000000.0, latency=5000.0, settled=2)
    """

    settled: int = _setting(
        2, "final cycles (at most half of them) that run at the full budget; earlier cycles approach it", least=0
    )

    def __post_init__(self) -> None:
        for key in RESOURCES:
            if isinstance(written := getattr(self, key), str):  # Text with a unit: "50%", "1MB", "5ms".
                object.__setattr__(self, key, getattr(Budget(**{key: written}), key))
        super().__post_init__()


@dataclass(frozen=True)
class LatencyConfig(Section):
    """Conditions under which `budget.latency` is measured, and the way filters are removed to meet it."""

    runtime: str = _setting(
        "onnxruntime",
        "runtime of the latency target: ONNX Runtime, torch itself, torch.compile, or torch on a GPU",
        choices=("eager", "compile", "onnxruntime", "eager:cuda", "compile:cuda"),
    )
    batch: int = _setting(64, "batch size of a pass", least=1)
    threads: int = _setting(0, "CPU threads of a pass; 0: those of the run", least=0)
    way: str = _setting(
        "auto",
        "what to remove: single filters, the same filters in all layers whose outputs are added (streams), or "
        "whole residual branches (blocks); auto: what keeps the most MACs at the latency target",
        choices=("auto", "filters", "streams", "blocks"),
    )
    table: str = _setting(
        "", "a file written by `sbf latency`, for example on another machine; empty: measure here"
    )


@dataclass(frozen=True)
class DistillConfig(Section):
    """Distillation from the dense network at the end of the warm-up."""

    alpha: float = _setting(
        0.0, "share of the loss that compares with the dense network after the warm-up; 0: none", least=0, most=1
    )
    temperature: float = _setting(4.0, "distillation temperature: divides both networks' logits", above=0)
    mirrored: bool = _setting(False, "average the dense network's outputs for each image and its mirror image")
    fade: bool = _setting(False, "let alpha fall to 0 over fine-tuning, along a cosine")
    during: str = _setting(
        "finetune",
        "when to distill: in fine-tuning only, in weight phases too, or in the whole cycles with their "
        "score phases",
        choices=("finetune", "weights", "cycles"),
    )


@dataclass(frozen=True)
class ModelConfig(Section):
    """The network that a run starts from."""

    name: str = field(
        metadata=setting_field('a bundled network, "torchvision:NAME", "timm:NAME" or "package.module:callable"')
    )
    num_classes: int = _setting(10, "number of classes", least=1)
    in_channels: int = _setting(3, "channels of the images", least=1)
    options: dict[str, Any] = field(
        default_factory=dict, metadata=setting_field("further keyword arguments for the network's builder")
    )
    weights: str = _setting("", "a .safetensors, .pt or .pth file of weights to start from; empty: from scratch")

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
    path: str = _setting("", "the file or folder that npz, folder and cifar10 read")
    validation: float = _setting(0.0, "fraction of the training images held out", least=0, below=1)
    batch_size: int = _setting(256, "images per step", least=1)
    crop: int = _setting(0, "pixels of zero padding before a random crop; 0: no crop", least=0)
    flip: bool = _setting(False, "mirror half of the training images")
    image_size: int = _setting(
        0, "side in pixels that images are resized to; 0: as stored (folder, synthetic need it)", least=0
    )
    channels: int = _setting(3, "channels that synthetic makes and folder reads (1: grey, 3: colour)", least=1)
    samples: int = _setting(2048, "training images that synthetic makes", least=1)
    mean: tuple[float, ...] = _setting(
        (), "mean of each channel, of pixels from 0 to 1; []: that of the training images"
    )
    std: tuple[float, ...] = _setting((), "standard deviation of each channel, likewise")
    in_memory: bool = _setting(
        True, "keep all images of folder in memory; false: workers read them as they are needed"
    )
    workers: int = _setting(
        -1, "processes that read images as they are needed; 0: the one that trains; -1: one for each core", least=-1
    )
    fit: str = _setting(
        "stretch",
        "how folder makes an image square: stretch it, or crop to the largest square around its middle",
        choices=("stretch", "crop"),
    )
    middle: float = _setting(
        1.0,
        "the share of each side that folder crops to, around the middle (0.875: 224 of 256 pixels)",
        above=0,
        most=1,
    )
    scale: float = _setting(
        1.0,
        "train on random windows of at least this part of a picture's area (0.08 is usual for "
        "ImageNet); 1: on pictures as in evaluation",
        above=0,
        most=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.mean) != len(self.std):
            raise RecipeError(f"mean: {len(self.mean)} means and {len(self.std)} deviations; give as many of both")
        if any(deviation <= 0 for deviation in self.std):
            raise RecipeError("std: deviations must be above 0, because images are divided by them")


@dataclass(frozen=True)
class Recipe(Section):
    """Configuration of a whole run, from the network and the data to the last epoch."""

    name: str = field(metadata=setting_field("name of the run; a recipe file without it uses its file name"))
    model: ModelConfig = field(metadata=setting_field("the network"))
    data: DataConfig = field(metadata=setting_field("the data"))
    method: str = _setting(
        OWN,
        "how filters are chosen: by learned scores, or by another method after the warm-up, which then "
        "fine-tunes in the epochs of the cycles (sfp, dmc: after these); see `sbf compare --help`",
        choices=(OWN, *METHODS),
    )
    seed: int = _setting(0, "random seed of initial weights, data order and augmentation", least=0, most=2**32 - 1)
    device: str = _setting("auto", "where to run; auto: cuda if there is one", choices=("auto", "cpu", "cuda"))
    engine: str = _setting(
        "auto",
        "how training steps run: compiled and captured as a CUDA graph, or eagerly, for networks that "
        "cannot be captured; auto: captured on cuda, if Triton supports the device",
        choices=("auto", "captured", "plain"),
    )
    precision: str = _setting(
        "auto",
        "dtype of the feature maps; weights are always float32; auto: bfloat16 on a GPU that supports "
        "it, else float32",
        choices=("auto", "bfloat16", "float32"),
    )
    threads: int = _setting(
        0, "CPU threads; 0: as torch chooses; with 1, equal seeds give bit-identical results", least=0
    )
    dense_control: bool = _setting(False, "also train the dense network for as many epochs, to compare with")
    finetune_on: str = _setting(
        "auto",
        "the network that fine-tuning trains: the small one, or the gated dense one, which has the same "
        "weights; auto: small on the cpu, gated on cuda",
        choices=("auto", "small", "gated"),
    )
    evaluate_every: int = _setting(1, "epochs between evaluations; the last of a phase always has one", least=1)
    phases: PhasesConfig = field(default_factory=PhasesConfig, metadata=setting_field("the phases"))
    warmup: OptimizerConfig = field(default_factory=OptimizerConfig, metadata=setting_field("the warm-up"))
    weights: OptimizerConfig = field(
        default=OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.0, schedule="constant"),
        metadata=setting_field("the gated weight phases"),
    )
    finetune: OptimizerConfig = field(default_factory=OptimizerConfig, metadata=setting_field("the fine-tuning"))
    scores: ScoresConfig = field(default_factory=ScoresConfig, metadata=setting_field("the score phases"))
    budget: BudgetConfig = field(default_factory=BudgetConfig, metadata=setting_field("the target size"))
    constraints: Constraints = field(
        default_factory=Constraints, metadata=setting_field("the constraints on layers")
    )
    latency: LatencyConfig = field(default_factory=LatencyConfig, metadata=setting_field("the latency target"))
    distill: DistillConfig = field(default_factory=DistillConfig, metadata=setting_field("distillation"))

    @classmethod
    def load(cls, name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read a bundled recipe or a .toml file and apply "key=value" overrides.

        >>> Recipe.load("digits", ["phases.cycles=4", "scores.balance=side"]).phases.cycles
        4
        """
        path = Path(name_or_path)
        if path.suffix == ".toml":
            table = _parse(str(path), _read(path))
        elif str(name_or_path) in (known := bundled_recipes()):
            table = _parse(path.name, _bundle().joinpath(f"{path.name}.toml").read_text("utf-8"))
        else:
            name = str(name_or_path)
            hint = suggestion(name, known)
            hint = hint if hint.startswith("did") else f"there are {', '.join(known)}"
            raise RecipeError(f"no bundled recipe is called {name!r} (a file must end in .toml); {hint}")
        table = {"name": path.stem, **table}
        if isinstance(overrides, (str, Mapping)):
            raise RecipeError('overrides are a list of "key=value" texts, such as ["phases.cycles=4"]')
        changes = [_override(override) for override in overrides]
        apply = partial(merge, empties=True)
        method = reduce(apply, changes, table).get("method")
        if method != table.get("method"):
            # The settings in the file are for the method that it names, so those that the new method requires
            # replace them. Overrides are applied last, so `from_dict` refuses one that contradicts the method.
            changes = [_nested(key, value) for key, value in _settings_of(method).items()] + changes
        return cls.from_dict(reduce(apply, changes, table))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """Build a recipe from a nested table; raise a RecipeError if a setting contradicts the method.

        >>> Recipe.from_dict({"name": "x", "model": {"name": "resnet20"}, "data": {"name": "digits"}}).seed
        0
        """
        table = dict(table)
        written = table.pop("format", RECIPE_FORMAT)
        check_version(written, RECIPE_FORMAT, "the recipe")
        if written != RECIPE_FORMAT:
            raise RecipeError(f"format: expected {RECIPE_FORMAT!r}, got {written!r}; leave it out")
        recipe = super().from_dict(table)
        for key, value in _settings_of(recipe.method).items():
            section, _, name = key.partition(".")
            given = table.get(section, {}).get(name, value)
            if given != value:
                conflict = f"{key}: method {recipe.method} requires {value!r}, got {given!r}"
                raise RecipeError(f"{conflict}; remove {key}, or choose another method")
        return recipe

    def to_toml(self) -> str:
        """Return the recipe as TOML text with its format string; once parsed, `from_dict` builds an equal one."""
        return f'format = "{RECIPE_FORMAT}"\n{super().to_toml()}'

    def __post_init__(self) -> None:
        super().__post_init__()
        # Apply the settings that the method requires here too, because a comparison of methods changes the method
        # with `dataclasses.replace`, which does not call `from_dict`.
        for key, value in _settings_of(self.method).items():
            section, _, name = key.partition(".")
            object.__setattr__(self, section, replace(getattr(self, section), **{name: value}))
        epochs = self.phases.score + (self.phases.weights if self.scores.joint else 0)
        if self.method == OWN and self.budget.asked and not self.phases.cycles * epochs:
            remedy = "set phases.cycles and phases.score, or another method"
            raise RecipeError(f"budget: there is no score phase in which filters could be removed; {remedy}")
        if self.distill.alpha and not self.phases.warmup and not self.model.weights:
            remedy = "set phases.warmup or model.weights"
            raise RecipeError(f"distill.alpha: there is no trained network to distill from; {remedy}")
        if self.method != OWN and not self.budget.asked:
            what = f"{self.method} ranks filters, but does not say how many to remove"
            raise RecipeError(f"method: {what}; set a budget, such as budget.macs=0.5")
        if self.scores.joint and self.scores.batch_size:
            remedy = "set weights.batch_size instead"
            raise RecipeError(f"scores.batch_size: scores.joint trains weights in the same steps; {remedy}")


load_recipe = Recipe.load


def bundled_recipes() -> list[str]:
    """Return the sorted names of the recipes that come with the package."""
    return sorted(item.name.removesuffix(".toml") for item in _bundle().iterdir() if item.name.endswith(".toml"))


def settings() -> dict[str, Setting]:
    """Return every dotted key a recipe may set, with its type, default, choices and help text.

    >>> settings()["weights.lr"].default
    0.001
    """
    return describe(Recipe)


def _settings_of(method: Any) -> Mapping[str, Any]:
    """Return the settings that a method requires because it learns scores in its own way; empty for others."""
    return METHODS[method].settings if isinstance(method, str) and method in METHODS else {}


def _bundle() -> Any:
    return resources.files("sbf_pruner.training").joinpath("recipes")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        known = ", ".join(bundled_recipes())
        raise RecipeError(f"recipe file {path} does not exist; bundled recipes: {known}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe file {path} cannot be read: {error}") from error


def _parse(source: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # The parser gives the line number only in its message, and omits it if the text ends too early.
        message, _, position = str(error).partition(" (at ")
        found = re.search(r"line (\d+)", position)
        line = found[1] if found else max(1, len(text.splitlines()))
        raise RecipeError(f"{source}, line {line}: {message}") from None


def _override(text: str) -> dict[str, Any]:
    """Parse "phases.cycles=4" into the nested table {"phases": {"cycles": 4}}."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not all(key.split(".")):
        raise RecipeError(f"override {text!r}: write KEY=VALUE, such as phases.cycles=4")
    return _nested(key, _value(value, is_text=key in (known := settings()) and known[key].kind == "str"))


def _nested(key: str, value: Any) -> dict[str, Any]:
    return reduce(lambda inner, part: {part: inner}, reversed(key.split(".")), value)


def _value(text: str, *, is_text: bool) -> Any:
    """Parse `text` as a TOML value; return `text` if that fails, or if `is_text` is true and it is no string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if len(parsed) > 1 or (is_text and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]

"""Recipes: the frozen, validated configuration of a run, from a bundled or TOML file and "key=value" overrides.

`Recipe.to_toml()` reads back as an equal recipe, so the copy in a run folder records every setting. The help text
of each field is its only description; `--help` and the documentation read it through `settings()`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from importlib import resources
from pathlib import Path
from typing import Any, Self

from ..criteria import METHODS, OWN
from ..errors import RecipeError, check_version, suggestion
from ..schedule import RECIPE_FORMAT
from ..utils.settings import Section, Setting, describe, merge, setting_field
from .sections import (
    BudgetConfig,
    DataConfig,
    DistillConfig,
    GuardsConfig,
    LatencyConfig,
    ModelConfig,
    OptimizerConfig,
    PhasesConfig,
    ScoresConfig,
    gated_weights_optimizer,
)


@dataclass(frozen=True)
class Recipe(Section):
    """Configuration of a whole run, from the network and the data to the last epoch."""

    name: str = field(metadata=setting_field("name of the run; a recipe file without it uses its file name"))
    model: ModelConfig = field(metadata=setting_field("the network"))
    data: DataConfig = field(metadata=setting_field("the data"))
    method: str = field(
        default=OWN,
        metadata=setting_field(
            "how filters are chosen: by learned scores, or by another method after the warm-up, which then "
            "fine-tunes in the epochs of the cycles (sfp, dmc: after these); see `sbf compare --help`",
            choices=(OWN, *METHODS),
        ),
    )
    seed: int = field(
        default=0,
        metadata=setting_field(
            "random seed of initial weights, data order and augmentation", least=0, most=2**32 - 1
        ),
    )
    device: str = field(
        default="auto",
        metadata=setting_field("where to run; auto: cuda if there is one", choices=("auto", "cpu", "cuda")),
    )
    engine: str = field(
        default="auto",
        metadata=setting_field(
            "how training steps run: compiled and captured as a CUDA graph, or eagerly, for networks that "
            "cannot be captured; auto: captured on cuda, if Triton supports the device",
            choices=("auto", "captured", "plain"),
        ),
    )
    precision: str = field(
        default="auto",
        metadata=setting_field(
            "dtype of the feature maps; weights are always float32; auto: bfloat16 on a GPU that supports "
            "it, else float32",
            choices=("auto", "bfloat16", "float32"),
        ),
    )
    threads: int = field(
        default=0,
        metadata=setting_field(
            "CPU threads; 0: as torch chooses; with 1, equal seeds give bit-identical results", least=0
        ),
    )
    dense_control: bool = field(
        default=False, metadata=setting_field("also train the dense network for as many epochs, to compare with")
    )
    finetune_on: str = field(
        default="auto",
        metadata=setting_field(
            "the network that fine-tuning trains: the small one, or the gated dense one, which has the same "
            "weights; auto: small on the cpu, gated on cuda",
            choices=("auto", "small", "gated"),
        ),
    )
    evaluate_every: int = field(
        default=1, metadata=setting_field("epochs between evaluations; the last of a phase always has one", least=1)
    )
    phases: PhasesConfig = field(default_factory=PhasesConfig, metadata=setting_field("the phases"))
    warmup: OptimizerConfig = field(default_factory=OptimizerConfig, metadata=setting_field("the warm-up"))
    weights: OptimizerConfig = field(
        default_factory=gated_weights_optimizer, metadata=setting_field("the gated weight phases")
    )
    finetune: OptimizerConfig = field(default_factory=OptimizerConfig, metadata=setting_field("the fine-tuning"))
    scores: ScoresConfig = field(default_factory=ScoresConfig, metadata=setting_field("the score phases"))
    budget: BudgetConfig = field(default_factory=BudgetConfig, metadata=setting_field("the target size"))
    guards: GuardsConfig = field(default_factory=GuardsConfig, metadata=setting_field("the guards"))
    latency: LatencyConfig = field(default_factory=LatencyConfig, metadata=setting_field("the latency target"))
    distill: DistillConfig = field(default_factory=DistillConfig, metadata=setting_field("distillation"))

    @classmethod
    def load(cls, name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read a bundled recipe or a .toml file and apply "key=value" overrides.

        >>> Recipe.load("digits", ["phases.cycles=4", "budget.macs=0.5"]).phases.cycles
        4
        """
        return load_recipe(name_or_path, overrides)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """Build a recipe from a nested table; raise a RecipeError if a setting contradicts the method.

        If the table sets a budget, `budget.steer` defaults to True, so that the penalty is adjusted to meet it, and
        `scores.balance` to "cost", so that layers are weighted by what the budget limits.

        >>> Recipe.load("digits", ["budget.macs=0.5"]).budget.steer, Recipe.load("digits").budget.steer
        (True, False)
        """
        table = dict(table)
        written = table.pop("format", RECIPE_FORMAT)
        check_version(written, RECIPE_FORMAT, "the recipe")
        if written != RECIPE_FORMAT:
            raise RecipeError(f"format: expected {RECIPE_FORMAT!r}, got {written!r}; leave it out")
        made = super().from_dict(table)
        if made.budget.limits.asked:
            if "steer" not in table.get("budget", {}):
                made = replace(made, budget=replace(made.budget, steer=True))
            if "balance" not in table.get("scores", {}):
                made = replace(made, scores=replace(made.scores, balance="cost"))
        for key, value in _settings_of(made.method).items():
            section, _, name = key.partition(".")
            given = table.get(section, {}).get(name, value)
            if given != value:
                raise RecipeError(
                    f"{key}: method {made.method} requires {value!r}, got {given!r}; remove {key}, or "
                    "choose another method"
                )
        return made

    def to_toml(self) -> str:
        """Return the recipe as TOML text, with its format; once parsed, `from_dict` builds an equal recipe."""
        return f'format = "{RECIPE_FORMAT}"\n{super().to_toml()}'

    def __post_init__(self) -> None:
        super().__post_init__()
        # A method fixes these settings. They are set here for recipes whose method is changed later, with
        # `dataclasses.replace`, as a comparison of methods does.
        for key, value in _settings_of(self.method).items():
            section, _, name = key.partition(".")
            object.__setattr__(self, section, replace(getattr(self, section), **{name: value}))
        epochs = self.phases.score + (self.phases.weights if self.scores.joint else 0)
        if self.method == OWN and self.budget.limits.asked and not self.phases.cycles * epochs:
            raise RecipeError(
                "budget: there is no score phase in which filters could be removed; set phases.cycles and "
                "phases.score, or another method"
            )
        if self.distill.alpha and not self.phases.warmup and not self.model.weights:
            raise RecipeError(
                "distill.alpha: there is no trained network to distill from; set phases.warmup or model.weights"
            )
        if self.method != OWN and not self.budget.limits.asked:
            raise RecipeError(
                f"method: {self.method} ranks filters, but does not say how many to remove; set a budget, "
                "such as budget.macs=0.5"
            )
        if self.scores.joint and self.scores.batch_size:
            raise RecipeError(
                "scores.batch_size: scores.joint trains weights in the same steps; set weights.batch_size instead"
            )


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a bundled recipe or a .toml file and apply "key=value" overrides.

    >>> load_recipe("digits", ["phases.cycles=4", "scores.balance=side"]).phases.cycles
    4
    """
    path = Path(name_or_path)
    if path.suffix == ".toml":
        table = _parse(str(path), _read(path))
    elif str(name_or_path) in (known := bundled_recipes()):
        table = _parse(path.name, _bundle().joinpath(f"{path.name}.toml").read_text("utf-8"))
    else:
        hint = suggestion(str(name_or_path), known)
        hint = hint if hint.startswith("did") else f"there are {', '.join(known)}"
        raise RecipeError(f"no bundled recipe is called {str(name_or_path)!r} (a file must end in .toml); {hint}")
    table = {"name": path.stem, **table}
    if isinstance(overrides, (str, Mapping)):
        raise RecipeError('overrides are a list of "key=value" texts, such as ["phases.cycles=4"]')
    said = [_override(override) for override in overrides]
    lay_over = partial(merge, empties=True)
    method = reduce(lay_over, said, table).get("method")
    if method != table.get("method"):
        # The file's settings are meant for the method it names, so those of the new method replace them. The
        # other overrides still come last: one that contradicts the method is refused, not ignored.
        said = [_nested(key, value) for key, value in _settings_of(method).items()] + said
    return Recipe.from_dict(reduce(lay_over, said, table))


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
    """Return the settings that a method fixes because it learns scores in its own way; empty for all others."""
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
        # The parser gives the line only inside its message, and none if the text ended too soon.
        message, _, place = str(error).partition(" (at ")
        found = re.search(r"line (\d+)", place)
        line = found[1] if found else max(1, len(text.splitlines()))
        raise RecipeError(f"{source}, line {line}: {message}") from None


def _override(text: str) -> dict[str, Any]:
    """Parse "phases.cycles=4" into the nested table {"phases": {"cycles": 4}}."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not all(key.split(".")):
        raise RecipeError(f"override {text!r}: write KEY=VALUE, such as phases.cycles=4")
    return _nested(key, _value(value, wants_text=key in (known := settings()) and known[key].kind == "str"))


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    table: dict[str, Any] = value
    return table


def _value(text: str, *, wants_text: bool) -> Any:
    """Parse `text` as a TOML value, or return it unchanged.

    It stays text if it is not one TOML value, or if `wants_text` and it looks like another type, such as a number.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if len(parsed) > 1 or (wants_text and not isinstance(parsed["value"], str)):
        return text
    return parsed["value"]

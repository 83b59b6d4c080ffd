"""A recipe reads back as it was written, and every mistake in one is a sentence that opens with its key."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbf_pruner import Constraints
from sbf_pruner.errors import PruningError, RecipeError
from sbf_pruner.schedule import RECIPE_FORMAT
from sbf_pruner.training import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PhasesConfig,
    Recipe,
    ScoresConfig,
    bundled_recipes,
    load_recipe,
    phases,
    settings,
    total_epochs,
)

MINIMAL = '[model]\nname = "resnet56"\n[data]\nname = "synthetic"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_the_defaults_are_the_papers(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert recipe == Recipe("mine", ModelConfig("resnet56"), DataConfig("synthetic"))
    assert dataclasses.astuple(recipe.phases) == (50, 10, 3, 6, 300)
    for phase in (recipe.warmup, recipe.finetune):
        assert (phase.optimizer, phase.lr, phase.momentum, phase.weight_decay) == ("sgd", 0.1, 0.9, 5e-4)
        assert phase.schedule == "cosine"
    weights = recipe.weights
    assert (weights.optimizer, weights.lr, weights.weight_decay, weights.schedule) == (
        "adam",
        1e-3,
        0,
        "constant",
    )
    assert recipe.scores == ScoresConfig("factored", 1e-6, 1e-8, 0.1, 5e-4, "auto", 0.5)
    assert (recipe.data.batch_size, recipe.seed, recipe.device, recipe.dense_control) == (
        256,
        0,
        "auto",
        False,
    )


@pytest.mark.parametrize("name", bundled_recipes())
def test_bundled_recipes_load_and_round_trip(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert load_recipe(write(tmp_path, recipe.to_toml())) == recipe


@pytest.mark.parametrize("name", [name for name in bundled_recipes() if name.startswith("cifar10")])
def test_every_recipe_for_cifar10_has_the_papers_number_of_epochs(name: str) -> None:
    recipe = load_recipe(name)
    assert total_epochs(recipe) == 440 and not recipe.dense_control
    assert recipe.data == DataConfig("cifar10", batch_size=256, crop=4, flip=True)


@pytest.mark.parametrize(
    ("depth", "ratio", "penalty"),
    [(56, "medium", 5e-4), (56, "high", 15e-4), (110, "medium", 2e-4), (110, "high", 5.5e-4)],
)
def test_paper_recipes_differ_from_the_defaults_in_lambda_alone(depth: int, ratio: str, penalty: float) -> None:
    recipe = load_recipe(f"cifar10-resnet{depth}-paper-{ratio}")
    plain = Recipe(recipe.name, ModelConfig(f"resnet{depth}"), recipe.data, evaluate_every=5)
    assert recipe == dataclasses.replace(plain, scores=ScoresConfig(penalty=penalty))


def test_the_dense_controls_have_one_stage() -> None:
    for depth in (56, 110):
        dense, paper = (load_recipe(f"cifar10-resnet{depth}-{kind}") for kind in ("dense", "paper-medium"))
        assert [phase.kind for phase in phases(dense)] == ["warmup"]
        assert dense.warmup == paper.warmup and dense.model == paper.model and dense.data == paper.data


def test_digits_is_bundled_with_a_control() -> None:
    recipe = load_recipe("digits")
    assert (recipe.model.name, recipe.model.in_channels, recipe.data.name) == ("resnet20", 1, "digits")
    assert recipe.dense_control


def test_a_section_in_part_keeps_its_own_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL + "[weights]\nlr = 2e-3\n"))
    assert recipe.weights == OptimizerConfig("adam", lr=2e-3, weight_decay=0.0, schedule="constant")


def test_overrides_are_toml_values_or_bare_words(tmp_path: Path) -> None:
    overrides = [
        "phases.cycles=4",
        "scores.balance = side",
        "scores.penalty=1",
        "dense_control=true",
        "warmup.milestones=[0.3, 0.6]",
        "model.options.width_mult=0.5",
        "model.options.name=wide",
        "name=56",
        'data.path="a=b"',
        "phases={score=1}",
    ]
    path = write(tmp_path, MINIMAL + '[model.options]\nkept = "yes"\n')
    recipe = load_recipe(path, overrides)
    assert recipe.phases == PhasesConfig(cycles=4, score=1)
    assert recipe.scores.balance == "side"
    assert type(recipe.scores.penalty) is float and recipe.scores.penalty == 1.0
    assert recipe.dense_control is True
    assert recipe.warmup.milestones == (0.3, 0.6)
    assert recipe.model.options == {"kept": "yes", "width_mult": 0.5, "name": "wide"}
    assert load_recipe(path, ["model.options={}"]).model.options == {}
    assert load_recipe(path, ["model.options={}", "model.options.width_mult=0.5"]).model.options == {
        "width_mult": 0.5
    }
    assert (recipe.name, recipe.data.path) == ("56", "a=b")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "scores.balance=aera",
            "scores.balance: 'aera' is not one of auto, area, side, none, cost; did you mean 'area'?",
        ),
        ("device=tpu", "device: 'tpu' is not one of auto, cpu, cuda; did you mean 'cpu'?"),
        ("device=gpus7", "device: 'gpus7' is not one of auto, cpu, cuda"),
        ("phases.cycles=ten", "phases.cycles: expected int, got str ('ten')"),
        ("phases.cycles=4.0", "phases.cycles: expected int, got float (4.0)"),
        ("phases.cycles=true", "phases.cycles: expected int, got bool (True)"),
        ("phases.cycles=-1", "phases.cycles: must be at least 0, got -1"),
        ("scores.lr=true", "scores.lr: expected float, got bool (True)"),
        ("scores.lr=0", "scores.lr: must be above 0, got 0.0"),
        ("scores.lr=nan", "scores.lr: expected a finite number, got nan"),
        ("scores.threshold=1.5", "scores.threshold: must be at most 1, got 1.5"),
        ("data.validation=1", "data.validation: must be below 1, got 1.0"),
        ("dense_control=1", "dense_control: expected bool, got int (1)"),
        ("warmup.milestones=0.5", "warmup.milestones: expected list of floats, got float (0.5)"),
        ("warmup.milestones=[0.1, 'x']", "warmup.milestones[1]: expected float, got str ('x')"),
        ("warmup.milestones=[0.7, 0.3]", "warmup.milestones: must rise between 0 and 1, got [0.7, 0.3]"),
        ("finetune.momentum=0", None),
        ("model.options=3", "model.options: expected table, got int (3)"),
        ("model.options.num_classes=3", "model.options.num_classes: set num_classes itself, not among"),
        ("model.options.day=2020-01-01", "model.options.day: a recipe cannot hold a value of type date"),
        ("model.weights=w.bin", "model.weights: 'w.bin' ends in none of .safetensors, .pt and .pth"),
        ("phases=3", "phases: expected table, got int (3)"),
        ("phases.cycle=3", "phases.cycle: unknown key; did you mean 'phases.cycles'?"),
        ("cycle=3", "cycle: unknown key; did you mean 'phases.cycles'?"),
        ("phase.cycles=3", "phase: unknown key; did you mean 'phases'?"),
        ("phases.leak=3", "phases.leak: unknown key; did you mean 'scores.leak'?"),
        (
            "lr=1",
            "lr: unknown key; did you mean 'warmup.lr' or 'weights.lr' or 'finetune.lr' or 'scores.lr'?",
        ),
        ("phases.zzz=3", "phases.zzz: unknown key; known: warmup, cycles, score, weights, finetune"),
        ("finetune.ema=1", "finetune.ema: must be below 1, got 1.0"),
        ("distill.alpha=2", "distill.alpha: must be at most 1, got 2.0"),
        ("distill.during=always", "distill.during: 'always' is not one of finetune, weights, cycles"),
        ("scores.speed=-1", "scores.speed: must be at least 0, got -1.0"),
        ("constraints.round_to=0", "constraints.round_to: must be at least 1, got 0"),
        ('constraints.round_to={"a.*"=0}', "constraints.round_to.a.*: must be at least 1, got 0"),
        ('constraints.round_to={"a.*"=1.5}', "constraints.round_to.a.*: expected int, got float (1.5)"),
        ('constraints.max_removed={"a.*"=2, "b"=0.5}', "constraints.max_removed.a.*: must be at most 1, got 2.0"),
        ("constraints.max_removed=nan", "constraints.max_removed: expected a finite number, got nan"),
        (
            'constraints.max_removed={"a.*": 0.5}',
            'constraints.max_removed: expected float, or a table such as {"layer1.*" = 1}, got str',
        ),
        (
            "constraints.min_filters=true",
            'constraints.min_filters: expected int, or a table such as {"layer1.*" = 1}, got bool (True)',
        ),
        ("phases.cycles", "override 'phases.cycles': write KEY=VALUE, such as phases.cycles=4"),
        ("phases..cycles=3", "override 'phases..cycles=3': write KEY=VALUE, such as phases.cycles=4"),
    ],
)
def test_each_mistake_names_its_key(override: str, message: str | None, tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    if message is None:
        assert load_recipe(path, [override])
        with pytest.raises(RecipeError, match=r"^finetune.nesterov: needs a momentum above 0$"):
            load_recipe(path, [override, "finetune.nesterov=true"])
    else:
        with pytest.raises(RecipeError, match="^" + re.escape(message)):
            load_recipe(path, [override])


def test_a_teacher_must_have_learned_something(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    with pytest.raises(RecipeError, match=r"^distill\.alpha: .*; set phases\.warmup or model\.weights$"):
        load_recipe(path, ["distill.alpha=0.5", "phases.warmup=0"])
    assert load_recipe(path, ["distill.alpha=0.5", "phases.warmup=0", "model.weights=w.pt"])


def test_what_a_method_is_made_of_cannot_be_set_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + '[scores]\nbalance = "none"\nlr = 0.5\n')
    asked = ["method=dmc", "budget.macs=0.5"]
    made = load_recipe(path, [*asked, "scores.projection=free"])  # of the file's own method the file speaks
    assert (made.scores.projection, made.scores.balance, made.scores.lr) == ("free", "cost", 0.5)
    assert load_recipe(write(tmp_path, made.to_toml())) == made
    for override, said in (
        ("scores.projection=literal", "'free', got 'literal'"),
        ("scores.steer=false", "True, got"),
    ):
        key = override.partition("=")[0]
        with pytest.raises(RecipeError, match=rf"^{key}: method dmc requires {said}.*; remove {key}, or choose"):
            load_recipe(path, [override, *asked])
    within = 'method = "dmc"\n' + MINIMAL + '[budget]\nmacs = 0.5\n[scores]\nbalance = "none"\n'
    with pytest.raises(RecipeError, match=r"^scores\.balance: method dmc requires 'cost', got 'none'; remove"):
        load_recipe(write(tmp_path, within))
    with pytest.raises(RecipeError, match=r"^method: 'dcm' is not one of"):
        load_recipe(path, ["method=dcm"])


def test_a_joint_step_has_one_batch_size() -> None:
    with pytest.raises(
        RecipeError, match=r"^scores\.batch_size: scores\.joint .*; set weights\.batch_size instead$"
    ):
        load_recipe("digits", ["scores.joint=true", "scores.batch_size=64"])
    assert load_recipe("digits", ["scores.joint=true", "weights.batch_size=64"]).scores.joint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[data]\nname = "digits"\n', "model.name: missing; give a bundled network"),
        ('[model]\nname = "resnet20"\n', "data.name: missing; give a data set"),
        ("[model]\nname = \n", "mine.toml, line 2: "),
        ("[model\n", "mine.toml, line 1: "),
        ('seed = 1\n\nname = """', "mine.toml, line 3: "),
        ("seed = 1\nseed = 2\n", "mine.toml, line 2: "),
    ],
)
def test_incomplete_and_broken_files(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        load_recipe(write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nowhere\.toml does not exist; bundled recipes: .*digits"):
        load_recipe(tmp_path / "nowhere.toml")
    with pytest.raises(RecipeError, match=r"called 'digts' \(a file must end in .toml\); did you mean 'digits'\?$"):
        load_recipe("digts")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(RecipeError, match=r"folder\.toml cannot be read: .*directory"):
        load_recipe(tmp_path / "folder.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(RecipeError, match=r"latin\.toml cannot be read: .*utf-8"):
        load_recipe(tmp_path / "latin.toml")


def test_sections_check_themselves_when_built_in_python() -> None:
    with pytest.raises(RecipeError, match=r"^balance: 'aera' is not one of auto, .*; did you mean 'area'"):
        ScoresConfig(balance="aera")
    with pytest.raises(RecipeError, match=r"^model: expected ModelConfig, got table \(\{'name': 'resnet20'\}\)"):
        Recipe("x", {"name": "resnet20"}, DataConfig("digits"))  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"^a key of options: expected str, got int \(1\)"):
        ModelConfig("net", options={1: 2})  # type: ignore[dict-item]
    with pytest.raises(RecipeError, match=r"^options\.a: a recipe cannot hold a value of type NoneType"):
        ModelConfig("net", options={"a": None})
    with pytest.raises(RecipeError, match=r"^options\.a: expected a number, got nan"):
        ModelConfig("net", options={"a": float("nan")})


def test_a_recipe_is_frozen_and_keeps_no_callers_table() -> None:
    options = {"widths": [1, 2]}
    config = ModelConfig("net", options=options)
    options["widths"].append(3)
    assert config.options == {"widths": [1, 2]}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.name = "other"  # type: ignore[misc]


def test_numpy_numbers_are_written_as_numbers() -> None:
    recipe = Recipe("x", ModelConfig("n", options={"a": np.float64(0.5)}), DataConfig("d"))
    assert "options = {a = 0.5}" in recipe.to_toml()


def test_guards_are_numbers_or_tables_by_pattern(tmp_path: Path) -> None:
    path = write(
        tmp_path, MINIMAL + '[constraints]\nmax_removed = {"*" = 0.9, "layer1.*" = 0.3}\nmin_filters = 2\n'
    )
    assert load_recipe(path).constraints == Constraints(min_filters=2, max_removed={"*": 0.9, "layer1.*": 0.3})
    over = ['constraints.max_removed={"stem"=0, "*"=0.8}', 'constraints.min_filters={"layer1.*"=8}']
    guards = load_recipe(path, over).constraints
    assert list(guards.max_removed.items()) == [("*", 0.8), ("layer1.*", 0.3), ("stem", 0.0)]
    assert type(guards.max_removed["stem"]) is float and guards.min_filters == {"layer1.*": 8}
    assert load_recipe(path, ["constraints.max_removed=0.5"]).constraints.max_removed == 0.5
    assert (
        settings()["constraints.round_to"].kind == "int or table"
        and settings()["constraints.round_to"].default == 1
    )
    again = Recipe.from_dict(tomllib.loads(load_recipe(path, over).to_toml())).constraints
    assert again == guards and list(again.max_removed) == list(guards.max_removed), "their order counts"


def test_every_key_is_described() -> None:
    known = settings()
    assert known["weights.lr"].default == 1e-3 and known["warmup.lr"].default == 0.1
    assert known["scores.balance"].choices == ("auto", "area", "side", "none", "cost")
    assert known["model.name"].default is None
    assert known["warmup.milestones"].kind == "list of floats"
    for key, setting in known.items():
        assert setting.help and not setting.help.endswith("."), key
    assert "scores.balance" in known and len(known) > 40


numbers = st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True)
words = st.text(max_size=8)
plain = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
optimizers = st.builds(
    OptimizerConfig,
    optimizer=st.sampled_from(["sgd", "adam"]),
    lr=numbers,
    milestones=st.sets(numbers, max_size=3).map(lambda values: tuple(sorted(values))),
)
options = st.dictionaries(words, plain, max_size=3).filter(lambda table: not {"num_classes"} & set(table))
patterns = st.dictionaries(words, numbers, max_size=3)
recipes = st.builds(
    Recipe,
    name=words,
    model=st.builds(ModelConfig, name=words, num_classes=st.integers(1, 9), options=options, weights=st.just("")),
    data=st.builds(DataConfig, name=words, path=words, validation=numbers, flip=st.booleans()),
    dense_control=st.booleans(),
    warmup=optimizers,
    weights=optimizers,
    scores=st.builds(ScoresConfig, lr=numbers, penalty=numbers, threshold=numbers),
    constraints=st.builds(Constraints, max_removed=numbers | patterns),
)


@given(recipes)
def test_any_recipe_survives_toml(recipe: Recipe) -> None:
    table = tomllib.loads(recipe.to_toml())
    assert table == {"format": RECIPE_FORMAT, **recipe.to_dict()}
    assert Recipe.from_dict(table) == recipe


def test_a_format_is_checked() -> None:
    with pytest.raises(RecipeError, match=r"^format: expected 'sbf-pruner recipe 1', got 'toml'; leave it out$"):
        Recipe.from_dict({"name": "x", "format": "toml"})


def test_targets_are_written_with_units_or_without():
    written = load_recipe("digits", ['budget.size="1MB"', "budget.latency=5ms", "budget.macs=50%"])
    assert (written.budget.size, written.budget.latency, written.budget.macs) == (1e6, 5000.0, 0.5)
    assert Recipe.from_dict(tomllib.loads(written.to_toml())) == written
    with pytest.raises(PruningError, match=r"target 'size=much': write a fraction such as size=0.5"):
        load_recipe("digits", ["budget.size=much"])


NONE = ["phases.score=0", "phases.weights=0"]


@pytest.mark.parametrize("changes", [["phases.cycles=0"], ["phases.score=0"], ["scores.joint=true", *NONE]])
def test_a_size_that_no_phase_can_come_to_is_refused(changes: list[str]) -> None:
    with pytest.raises(
        RecipeError, match=r"^budget: there is no score phase .*; set phases\.cycles and phases\.score"
    ):
        load_recipe("digits", ["budget.macs=0.5", *changes])
    load_recipe("digits", changes)  # without a size there is nothing to miss
    load_recipe("digits", ["budget.macs=0.5", "method=l1", *changes])

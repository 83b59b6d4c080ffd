"""The folder of a run is data: no command imports what its recipe names, or what lies in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from runs import Small, small_recipe, small_run
from sbf_pruner.cli import main
from sbf_pruner.errors import PruningError, RunError
from sbf_pruner.models import build_network
from sbf_pruner.report.live import _View
from sbf_pruner.training import DataConfig, build_dense, fit
from sbf_pruner.training.data import load_data
from sbf_pruner.utils import TRUSTED, UNTRUSTED, Origin

MODEL = {"name": "runs:Small", "num_classes": 4, "in_channels": 1}
SHORT = {"warmup": 1, "cycles": 1, "score": 1, "weights": 0, "finetune": 1}
TRAP = "from pathlib import Path\nPath(__file__).with_suffix('.sprung').touch()\n"
EVIL = TRAP + "from torch import nn\ndef build(): return nn.Conv2d(1, 4, 8)\ndef datasets(): return {}\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(
        tmp_path_factory.mktemp("trust") / "run", model=MODEL, phases=SHORT, dense_control=False
    ).folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def stop(record: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    path = tmp_path_factory.mktemp("trust") / "killed"
    with pytest.raises(KeyboardInterrupt):
        small_run(path, report=stop, model=MODEL, phases=SHORT, dense_control=False)
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with a module that must not be imported; whatever is left of traps is an error."""
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("evil", "kept", "linked")]:
        del sys.modules[name]


def hostile(source: Path, to: Path, *changes: tuple[str, str]) -> Path:
    """A copy of a run with a module in it and a recipe that was changed."""
    shutil.copytree(source, to)
    (to / "evil.py").write_text(EVIL)
    text = (to / "recipe.toml").read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (to / "recipe.toml").write_text(text)
    return to


SYSTEM = (('name = "runs:Small"', 'name = "os:system"'), ("options = {}", 'options = {command = "touch sprung"}'))
MODULE = (('name = "runs:Small"', 'name = "evil:build"'),)
DATA = (('name = "runs:Small"', 'name = "resnet20"'), ('name = "synthetic"', 'name = "evil:datasets"'))
RECIPES = {"a command": (SYSTEM, "model.name = 'os:system'"), "a module": (MODULE, "model.name = 'evil:build'")}

COMMANDS = {
    "export": ["export", "run", "--formats", "safetensors"],
    "bench": ["bench", "run", "--runtimes", "eager"],
    "frontier": ["frontier", "run", "--quiet"],
    "resume": ["run", "--run", "run", "--resume"],
}
UNTOUCHED = {  # these import nothing that the folder names, and have no use for --trust
    "report": (["report", "run"], 0, ""),
    "latency": (["latency", "run"], 2, "no bundled model is called 'run'"),
    "inspect": (["inspect", "run"], 2, "no bundled model is called 'run'"),
    "compare": (["compare", "digits", "--target", "macs=0.5", "--run", "run"], 2, "run holds a run of its own"),
    "compared": (["compare", "digits", "--target", "macs=0.5", "--run", "all"], 2, "all/sbf-seed0 was run with"),
    "dense stage": (["run", "digits", "--run", "new", "--dense-from", "run"], 2, "dense stage of run was trained"),
    "another recipe": (["run", "digits", "--run", "run", "--resume"], 2, "run was run with name = 'small'"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_run_names_is_not_imported(
    here: Path, finished: Path, capsys: pytest.CaptureFixture[str], command: str, recipe: str
) -> None:
    changes, named = RECIPES[recipe]
    run = hostile(finished, here / "run", *changes)
    if command == "resume":
        (run / "summary.json").unlink()
    assert main(COMMANDS[command]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"sbf: {named} names code, which is imported only") and said.count("\n") == 1
    assert "add --trust (trust=True)" in said
    assert ("sbf run RECIPE --run run --resume" in said) == (command == "resume")
    assert not list(here.rglob("*sprung"))


@pytest.mark.parametrize("command", ["frontier", "resume"])
def test_data_that_a_run_names_is_not_imported(
    here: Path, finished: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = hostile(finished, here / "run", *DATA)
    (run / "summary.json").unlink()
    assert main(COMMANDS[command]) == 2
    assert "sbf: data.name = 'evil:datasets' names code, which is imported only" in capsys.readouterr().err
    assert not list(here.rglob("*sprung"))


@pytest.mark.parametrize("command", UNTOUCHED)
def test_commands_that_import_nothing_from_a_run(
    here: Path, finished: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = hostile(finished, here / "run", *SYSTEM)
    (run / "network.json").unlink()  # so that there is a reason to build it
    shutil.copytree(run, here / "all" / "sbf-seed0")
    words, code, sentence = UNTOUCHED[command]
    assert main(words) == code
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == (1 if code else 0)
    _View(run, 0.0).page()  # the live view
    assert not list(here.rglob("*sprung")) and not (here / "new").exists()


def test_nothing_is_imported_from_inside_a_run_even_if_it_is_trusted(
    here: Path, finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hostile(finished, here / "kept" / "run", *MODULE)
    (here / "linked.py").symlink_to(run / "evil.py")
    words = ["bench", str(run), "--trust"]
    for name in ("kept.run.evil", "linked"):
        text = (finished / "recipe.toml").read_text()
        (run / "recipe.toml").write_text(text.replace("runs:Small", f"{name}:build"))
        assert main(words) == 2
        assert "is in the folder of a run, from which nothing is imported" in capsys.readouterr().err
    (run / "recipe.toml").write_text((finished / "recipe.toml").read_text().replace("runs:Small", "evil:build"))
    monkeypatch.chdir(run)
    assert main(["bench", ".", "--trust"]) == 2
    assert f"{run}/evil.py is in the folder of a run" in capsys.readouterr().err
    assert not list(here.rglob("*sprung"))
    monkeypatch.chdir(here)
    assert build_network("evil:build", {}, Origin(True, (run,)))  # that of the current directory
    assert [path.parent for path in here.rglob("*sprung")] == [here]


def test_python_asks_for_trust_too(here: Path, finished: Path) -> None:
    recipe = small_recipe(data={"name": "evil:datasets"}, phases=SHORT)
    with pytest.raises(
        RunError, match=r"^data.name = 'evil:datasets' names code.* \(trust=True\) if you trust this"
    ):
        fit(Small(), recipe, run=here / "new")
    with pytest.raises(RunError, match=r"^data.name = 'evil:datasets'"):
        load_data(DataConfig("evil:datasets"), 4, 0)
    with pytest.raises(RunError, match=r"^model.name = 'evil:build'"):
        build_dense(small_recipe(model={"name": "evil:build"}))
    assert not (here / "new").exists() and not list(here.rglob("*sprung"))
    with pytest.raises(PruningError, match=r"expected \{'train': dataset, 'test': dataset\}"):
        fit(Small(), recipe, run=here / "new", trust=True)


def test_a_run_of_ones_own_is_easily_resumed(
    here: Path, killed: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its recipe, named again, which must agree; or by trust."""
    (here / "mine.toml").write_text((finished / "recipe.toml").read_text())
    shutil.copytree(killed, here / "run")
    assert main(["run", "--run", "run", "--resume", "--quiet"]) == 2
    named = "add --trust (trust=True) if you trust this one, or name the recipe that you began it with"
    assert f"{named} (sbf run RECIPE --run run --resume)\n" in capsys.readouterr().err
    assert main(["run", "mine.toml", "--seed", "3", "--run", "run", "--resume"]) == 2
    assert "run was run with seed = 0, not 3" in capsys.readouterr().err
    assert main(["run", "mine.toml", "--run", "run", "--resume", "--quiet"]) == 0
    assert (here / "run/model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
    assert main(["run", "--run", "run", "--resume", "--quiet", "--trust"]) == 0
    assert "run was finished already; nothing was trained" in capsys.readouterr().out


# -- zoos ------------------------------------------------------------------------------------------------


def zoo(name: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A library in the place of torchvision or timm; the options that its networks were built with."""
    built: list[dict[str, Any]] = []

    def build(*_: str, **options: Any) -> nn.Module:
        built.append(options)
        return nn.Linear(1, 1)

    module, models = ModuleType(name), ModuleType(f"{name}.models")
    listing: dict[str, Callable[..., Any]] = {"list_models": lambda: ["net"], "create_model": build}
    for place in (module, models):
        vars(place).update(listing, get_model_builder=lambda _: build)
    vars(module)["models"] = models
    monkeypatch.setitem(sys.modules, name, module)
    return built


@pytest.mark.parametrize(
    ("library", "option"),
    [
        *(("timm", held) for held in ({"pretrained": True}, {"checkpoint_path": "x.pth"}, {"cache_dir": "x"})),
        *(("timm", {"pretrained_cfg": held}) for held in ("x", {"url": "x"}, {"file": "x"}, 1)),
        *(("timm", held) for held in ({"pretrained_cfg_overlay": {}}, {"feature_cls": "fx"}, {"sizes": [1, "x"]})),
        *(("torchvision", {"weights": held}) for held in ("DEFAULT", True)),
        *(("torchvision", held) for held in ({"weights_backbone": "x"}, {"act_layer": "relu"})),
    ],
)
def test_options_that_may_open_something_take_trust(
    library: str, option: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = zoo(library, monkeypatch)
    with pytest.raises(
        RunError, match=rf"^model.options.{next(iter(option))} = .* may name a file or an address, wh"
    ):
        build_network(f"{library}:net", option, UNTRUSTED)
    assert not built
    build_network(f"{library}:net", option, TRUSTED)
    assert built == [option]


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_networks_of_zoos_with_plain_options_take_none(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = zoo(library, monkeypatch)
    plain = {"num_classes": 4, "drop_rate": 0.5, "aux_logits": False, "out_indices": [1, 2], "pretrained": False}
    plain |= {"act_layer": "relu"} if library == "timm" else {}
    build_network(f"{library}:net", plain, UNTRUSTED)
    assert built == [plain]
    for name in ("list_models", "models.list_models", "hf-hub:me/net", "local-dir:net"):
        with pytest.raises(PruningError, match="has no model"):
            build_network(f"{library}:{name}", plain, UNTRUSTED)


def test_a_recipe_cannot_give_trust_to_itself(here: Path) -> None:
    for name in ("origin", "trust", "trusted", "name"):
        with pytest.raises(RunError, match="names code"):
            build_dense(small_recipe(model={"name": "evil:build", "options": {name: True}}))
        with pytest.raises(PruningError, match=f"resnet20 has no option '{name}'"):
            build_dense(small_recipe(model={"name": "resnet20", "options": {name: True}}))
    assert not list(here.rglob("*sprung"))


def test_the_command_does_not_look_for_modules_where_it_is_started(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text(TRAP)
    words = [sys.executable, "-m", "sbf_pruner", "--version"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("sbf "), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["argparse.py"]

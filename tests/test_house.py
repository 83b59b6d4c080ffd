"""The house: rooms import only from rooms above them, and there is one door."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import sbf_pruner

PACKAGE = Path(sbf_pruner.__file__).parent

# In the order data flows; see the architecture.
ROOMS = [
    *("errors", "figures", "callables", "memory", "writable", "files"),
    *("inputs", "copies", "layers", "attached", "team"),
    *("graph", "plan", "stored", "budget", "latency", "scoring", "slicing", "proof", "surgery", "trial", "gated"),
    *("pruner", "methods", "phases", "integrations", "timing", "measuring", "environment", "models"),
    *("manifest", "program", "export"),
    *("overview", "drawing", "report", "deploy", "stopwatch", "cifar", "training", "frontier", "contest"),
    *("bundle", "bench", "terminal", "arguments", "words", "cli"),
]


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """The rooms of the package a file imports from, wherever the import stands."""
    here = ("sbf_pruner", *path.relative_to(PACKAGE).with_suffix("").parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*here[: len(here) - node.level]] if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "sbf_pruner" and len(name) > 1}
    return found - {room(path)}


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or not p.name.startswith("__"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_from_rooms_above_it(path):
    mine = room(path)
    assert mine in ROOMS, f"{mine} has no place in the house yet"
    above = ROOMS[: ROOMS.index(mine)]
    assert sorted(imported_rooms(path) - {*above, "__version__"}) == []


def test_whoever_comes_in_is_shown_every_room_in_that_order():
    """`recipes` holds no code, so nothing is imported from it."""
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text("utf-8")
    named = [room for row in re.findall(r"^\| (`.*?) \|", page, re.M) for room in re.findall(r"`([a-z]+)/?`", row)]
    assert [room for room in named if room != "recipes"] == ROOMS


def test_the_public_names():
    assert sbf_pruner.__all__ == [
        *("Budget", "Plan", "Pruner", "PruningError", "Recipe", "extract", "fit", "load", "measure"),
        *("register_rule", "save", "trace"),
    ]


def test_every_public_name_is_there_and_says_what_it_is():
    for name in sbf_pruner.__all__:
        assert getattr(sbf_pruner, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sbf_pruner.nothing  # noqa: B018


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_open_with_what_they_do(path):
    text = path.read_text(encoding="utf-8")
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "a file opens with what it is for"


MARKUP = [path for path in FILES if room(path) in ("drawing", "report", "frontier") and path.name != "markup.py"]


@pytest.mark.parametrize("path", MARKUP, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_html_is_made_by_element_which_escapes(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert not [text for text in texts if re.search(r"</|<[a-z]+[ />]|&\w+;", text)]


# A network may hold what deepcopy refuses, and real_copy knows that; a graph that was captured holds nothing such.
COPIERS = ("copies.py", "deploy/forms.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_networks_are_copied_by_real_copy(path):
    if path.relative_to(PACKAGE).as_posix() not in COPIERS:
        assert "deepcopy(" not in path.read_text(encoding="utf-8")

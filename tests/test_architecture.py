"""The entries of the package import only from entries above them, and every public name is documented."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import sbf_pruner

PACKAGE = Path(sbf_pruner.__file__).parent

# In the order of imports, as in CONTRIBUTING.md.
ENTRIES = [
    *("errors", "utils", "modules", "graph", "plan", "budget", "scores", "surgery", "saving", "runtimes"),
    *("measurement", "models", "pruner", "criteria", "schedule", "report", "training", "compare", "export"),
    *("integrations", "cli"),
]


def entry(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_entries(path: Path) -> set[str]:
    """The entries of the package that a file imports from, at any level of nesting."""
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
    return found - {entry(path)}


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or not p.name.startswith("__"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_an_entry_imports_only_from_entries_above_it(path: Path) -> None:
    above = ENTRIES[: ENTRIES.index(entry(path))]
    assert sorted(imported_entries(path) - {*above, "__version__"}) == []


def test_contributing_lists_the_entries_in_that_order() -> None:
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text("utf-8")
    table = page.partition("## Where to change what")[0]
    assert re.findall(r"^\| `([a-z]+)/?` \|", table, re.M) == ENTRIES


def test_files_named_in_contributing_exist() -> None:
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text("utf-8")
    rows = page.partition("## Where to change what")[2].partition("\n## ")[0]
    named = re.findall(r"`([a-z_/]+\.py)`", rows)
    assert len(named) > 20
    known = {path.relative_to(PACKAGE).as_posix() for path in FILES} | {path.name for path in FILES}
    assert [name for name in named if name not in known] == []


def test_the_public_names() -> None:
    assert sbf_pruner.__all__ == [
        *("Budget", "ChannelGraph", "Constraints", "Plan", "Pruner", "PruningError", "Recipe", "Scores"),
        *("extract", "fit", "load", "measure", "register_rule", "save", "trace"),
    ]


def test_every_public_name_is_documented() -> None:
    for name in sbf_pruner.__all__:
        assert getattr(sbf_pruner, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sbf_pruner.nothing  # noqa: B018


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_have_docstrings(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


MARKUP = [path for path in FILES if entry(path) in ("report", "compare") and path.name != "html.py"]


@pytest.mark.parametrize("path", MARKUP, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_html_is_made_by_element_which_escapes(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert not [text for text in texts if re.search(r"</|<[a-z]+[ />]|&\w+;", text)]


# A network may hold what deepcopy refuses, which real_copy handles; a captured graph holds nothing of that kind.
COPIERS = ("utils/user_model.py", "runtimes/forms.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_networks_are_copied_by_real_copy(path: Path) -> None:
    if path.relative_to(PACKAGE).as_posix() not in COPIERS:
        assert "deepcopy(" not in path.read_text(encoding="utf-8")

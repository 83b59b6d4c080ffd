"""The README's and the documents' code runs as it stands, and so do the examples in docstrings."""

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import sbf_pruner
from sbf_pruner.cli import make_parser
from sbf_pruner.training import bundled_recipes, settings

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LAZY = {"sbf_pruner.__main__"}
TRITON = "sbf_pruner.training.engine.triton_kernels"  # imported where there is a GPU


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_on_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert blocks or page.name != "README.md"
    for block in blocks:
        exec(compile(block, page.name, "exec"), scope)


def test_the_first_example_leaves_a_network_worth_having() -> None:
    first = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)[0]
    scope: dict[str, Any] = {"__name__": "page"}
    torch.manual_seed(0)
    exec(compile(first.partition("sbf.save")[0], "README.md", "exec"), scope)
    kept = scope["pruner"].plan().widths().values()
    assert min(kept) > 4 and sum(kept) < 64


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose(page)):
            target, _, anchor = link.partition("#")
            path = page.parent / target if target else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append(f"{page.name}: {link}")
    assert broken == []


def test_every_page_is_in_the_nav_and_leads_nowhere_else() -> None:
    """`make docs` says so too, with a real site; this needs no more than what the tests have."""
    nav = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    pages = [page for page in PAGES if page.parent.name == "docs"]
    assert sorted(nav) == [page.name for page in pages]
    first = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert [name for name in nav if name != "index.md" and f"]({name})" not in first] == []
    assert [page.name for page in pages if "](../" in prose(page)] == [], "a site holds what is in its folder"


def test_a_list_stands_by_itself() -> None:
    """Without an empty line before it, it is one on some pages and a paragraph on others."""
    begins, before = r"(?:[-*]|\d+\.) ", r"(?:[-*] |\d+\. | |#|<!--)"
    found = [
        f"{page.name}: {line}"
        for page in PAGES
        for above, line in pairwise(prose(page).splitlines())
        if re.match(begins, line) and above and not re.match(before, above)
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_settings_on_a_page_are_those_there_are(page: Path) -> None:
    text, known = page.read_text("utf-8"), settings()
    named = re.findall(r"`([a-z_]+\.[a-z_]+)(?: = [^`]*)?`", text)
    for line in re.findall(r"^\$ sbf (.*)$", text, re.MULTILINE):
        said = make_parser().parse_args(shlex.split(line, comments=True))  # which exits where it does not fit
        named += [change.partition("=")[0] for change in getattr(said, "set", ())]
        if said.command == "run" and said.recipe is not None:
            assert said.recipe.endswith(".toml") or said.recipe in bundled_recipes()
    sections = {key.partition(".")[0] for key in known if "." in key}
    files = (".json", ".jsonl", ".safetensors", ".toml")
    asked = {key for key in named if key.partition(".")[0] in sections and not key.endswith(files)}
    assert sorted(asked - set(known)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_can_be_given_in_turn(page: Path) -> None:
    """None is refused because one before it has left something in its place."""
    taken: list[str] = []
    for line in re.findall(r"^\$ sbf (.*)$", page.read_text("utf-8"), re.MULTILINE):
        said = make_parser().parse_args(shlex.split(line, comments=True))
        if said.command == "run" and not said.resume and not said.force:
            taken.append(said.run or f"runs/{Path(said.recipe).stem}-seed{said.seed or 0}")
        elif said.command == "export" and not said.force:
            taken.append(said.to or f"{said.run}/export")
    assert sorted(taken) == sorted(set(taken))


MODULES = [m.name for m in pkgutil.walk_packages(sbf_pruner.__path__, "sbf_pruner.") if m.name not in LAZY]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    if name.startswith(TRITON):
        pytest.importorskip("triton")
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_figures_in_the_documents_are_those_of_the_saved_results() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout

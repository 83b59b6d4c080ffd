"""The report in a real browser: drawn, asked by pointer and keyboard, dark, on a phone, printed, and live."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import EPOCHS, FOLDER, foreign_copy, small_run
from sbf_pruner.compare import FrontierOptions, draw_frontier, run_frontier
from sbf_pruner.models import resolve
from sbf_pruner.report import Run, draw, inspect_model, read_run, write_report
from test_cli import MODULE, RECIPE, command

CHROMIUM = shutil.which("chromium")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
]
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def complaints() -> list[str]:
    """What pages wrote on their consoles."""
    return []


@pytest.fixture
def visit(browser: Any, complaints: list[str]) -> Iterator[Open]:
    """Open a page; when the test ends nothing must have gone wrong on it, and nothing been fetched."""
    contexts: list[Any] = []
    fetched: list[str] = []

    def visit(address: str | Path, width: int = 1280, height: int = 800, dark: bool = False) -> Any:
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(address.as_uri() if isinstance(address, Path) else address)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in fetched if not url.startswith(("file:", "data:", "http://127.0.0.1:"))] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "small"
    small_run(path)
    return path


@pytest.fixture
def run(folder: Path) -> Run:
    return read_run(folder)


@pytest.fixture(scope="module")
def comparison(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    other = tmp_path_factory.mktemp("runs") / "other"
    small_run(other, scores={"lr": 3e-3, "penalty": 0.1}, seed=1)
    return write_report([folder, other], other.parent / "comparison.html")


def tip(page: Any) -> str:
    return str(page.locator("#tip").inner_text()) if page.locator("#tip").is_visible() else ""


def until(page: Any, condition: str) -> None:
    """Wait for a condition; from outside, because the page's own policy lets nothing be evaluated inside."""
    for _ in range(300):
        if page.evaluate(condition):
            return
        time.sleep(0.1)
    raise AssertionError(condition)


def visible(page: Any, selector: str) -> int:
    """How many elements are there and have a size."""
    script = (
        "found => found.filter(e => { const b = e.getBoundingClientRect(); return b.width + b.height > 0 }).length"
    )
    return int(page.locator(selector).evaluate_all(script))


# -- one run -------------------------------------------------------------------------------------------------


def test_every_figure_is_drawn(visit: Open, folder: Path, run: Run) -> None:
    page = visit(folder / "report.html")
    assert page.title() == "small: tests:Small on synthetic"
    assert page.locator("h1").inner_text() == "small"
    assert visible(page, ".card") == 6
    assert visible(page, "#course .curve") >= 5 and visible(page, "#course .shade") >= 3
    assert visible(page, "#kept rect.kept") == sum(one.after > 0 for one in run.layers)
    assert visible(page, "#scores .tile") == len(run.layers)
    assert visible(page, "#refinement rect.bounds") == 2
    assert visible(page, "#network .box") == len(run.boxes)
    assert (
        visible(page, "#recipe dd") > 50
        and visible(page, "#skipped dd") == 1
        and visible(page, "#environment dd") > 5
    )
    # Nothing of a figure lies outside the page.
    right = page.evaluate(
        "Math.max(...[...document.querySelectorAll('svg *')].map(e => e.getBoundingClientRect().right))"
    )
    assert right <= 1280


def test_the_first_screen_tells_the_whole_story(visit: Open, folder: Path) -> None:
    page = visit(folder / "report.html")
    for selector in (".lead", ".card >> nth=5", "#course svg >> nth=0", "#kept svg >> nth=0"):
        box = page.locator(selector).bounding_box()
        assert box["y"] + box["height"] <= 800, selector


def test_pointing_at_a_mark_shows_its_numbers(visit: Open, folder: Path, run: Run) -> None:
    page = visit(folder / "report.html")
    assert tip(page) == ""
    page.locator("#kept .hit").nth(1).hover()
    one = run.layers[1]
    lines = re.split(r"\s*\n\s*", tip(page))
    assert lines[:5] == [one.name, "filters kept", str(one.after), "filters before", str(one.before)]
    page.locator("#course .hit").nth(EPOCHS - 1).hover()
    assert "epoch 10" in tip(page) and f"{run.records[-1]['test_accuracy']:.2f} %" in tip(page)
    page.locator("#scores .tile").first.hover()
    assert tip(page).startswith("stem") and "median" in tip(page)
    page.locator("#refinement .hit").first.hover()
    assert tip(page).startswith("blocks.0") and "upper bound" in tip(page)
    page.locator("#network .box.layer").first.hover()
    assert f"{run.layers[0].after} of {run.layers[0].before} filters kept" in tip(page)
    page.mouse.move(5, 5)
    assert tip(page) == ""
    size = page.viewport_size
    page.locator("#kept .hit").last.hover()
    box = page.locator("#tip").bounding_box()
    assert box["x"] + box["width"] <= size["width"], "at the edge it stays on the page"


def test_a_figure_is_walked_through_by_keyboard(visit: Open, folder: Path, run: Run) -> None:
    page = visit(folder / "report.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    stops = []
    for _ in range(20):
        page.keyboard.press("Tab")
        stops.append(
            page.evaluate("document.activeElement.closest('section')?.id + ' ' + document.activeElement.tagName")
        )
        if stops[-1].startswith("kept rect"):
            break
    assert stops == ["course rect", "course SUMMARY", "kept rect"], "one stop for a figure, not one for each mark"
    assert tip(page).startswith(run.layers[0].name)
    for key, layer in (("ArrowRight", 1), ("ArrowDown", 2), ("ArrowLeft", 1), ("End", -1), ("Home", 0)):
        page.keyboard.press(key)
        assert tip(page).startswith(run.layers[layer].name), key
        label = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert label.startswith(f"{run.layers[layer].name}; filters kept {run.layers[layer].after};")
    page.keyboard.press("Escape")
    assert tip(page) == ""
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator("#kept table").is_visible(), "the same numbers as a table"


def test_what_a_screen_reader_finds(visit: Open, folder: Path) -> None:
    page = visit(folder / "report.html")
    headings = [
        int(level) for level in page.locator("h1, h2, h3").evaluate_all("all => all.map(e => e.tagName[1])")
    ]
    assert headings[0] == 1 and headings.count(1) == 1 and headings.count(2) == 8
    unnamed = "all => all.filter(e => !(e.getAttribute('aria-label') || '').trim()).length"
    assert page.locator(".hit").evaluate_all(unnamed) == 0
    assert page.locator(".hit").count() > 30
    assert page.locator("figure").count() == page.locator("figure[aria-labelledby]").count() == 5
    assert page.evaluate("document.documentElement.lang") == "en"


def brightness(page: Any, selector: str, what: str) -> float:
    colour = page.locator(selector).first.evaluate(f"e => getComputedStyle(e).{what}")
    return sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3]) / 3


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(visit: Open, folder: Path, dark: bool) -> None:
    page = visit(folder / "report.html", dark=dark)
    paper, ink = brightness(page, "body", "backgroundColor"), brightness(page, "body", "color")
    assert (paper < 60 and ink > 200) if dark else (paper > 240 and ink < 60)
    for text in ("#network .box.layer .name", "#course .panel"):
        assert abs(brightness(page, text, "fill") - paper) > 120, "text that can be read"


@pytest.mark.parametrize("width", [320, 390, 768])
def test_no_sideways_scrolling_on_a_phone(visit: Open, folder: Path, comparison: Path, width: int) -> None:
    for address in (folder / "report.html", comparison):
        page = visit(address, width=width, height=800)
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator(".plot .tick").first.evaluate("e => parseFloat(getComputedStyle(e).fontSize)") >= 10
    page = visit(folder / "report.html", width=width)
    page.locator("#kept .hit").last.click()
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= width


def test_it_prints(visit: Open, folder: Path) -> None:
    page = visit(folder / "report.html", dark=True)
    printed = page.pdf(format="A4", print_background=True)
    assert printed.startswith(b"%PDF") and 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 6
    page.emulate_media(media="print")
    assert brightness(page, "body", "backgroundColor") > 240, "on white paper"


def test_without_script_the_figures_and_the_tables_are_there(browser: Any, folder: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((folder / "report.html").as_uri())
    assert page.locator("#kept rect.kept").count() and page.locator("table").count() >= 4
    context.close()


# -- several -------------------------------------------------------------------------------------------------


def test_runs_side_by_side(visit: Open, comparison: Path, run: Run) -> None:
    page = visit(comparison)
    assert page.locator("h1").inner_text() == "2 runs compared"
    assert visible(page, "#against-macs circle") == visible(page, "#against-params circle") == 4
    assert page.locator("#table tbody tr").count() == 2
    page.locator("#against-macs circle").nth(1).hover()
    assert run.summary is not None
    assert f"{run.summary['pruned']['macs']:,}" in tip(page) and "pruned" in tip(page)
    page.locator("#kept-B .hit").first.hover()
    assert tip(page).startswith("stem")
    assert "scores.penalty" in page.locator("#settings").inner_text()


# -- foreign folders -----------------------------------------------------------------------------------------


def test_no_script_of_a_foreign_folder_runs(
    visit: Open, complaints: list[str], folder: Path, tmp_path: Path
) -> None:
    foreign = foreign_copy(folder, tmp_path / FOLDER)
    for made in (write_report([foreign]), write_report([folder, foreign], tmp_path / "both.html")):
        page = visit(made)
        assert page.locator("script").count() == 1 and page.locator("img").count() == 0
        page.locator("#kept .hit, #kept-B .hit").first.hover()
        assert "<script>alert(1)</script>" in tip(page)
    assert complaints == []
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))")
    assert page.evaluate("window.ran") is None, "the policy allows the page's own script alone"
    assert len(complaints) == 1 and "Content Security Policy" in complaints.pop()


def test_a_channel_graph_is_asked_and_searched(visit: Open, tmp_path: Path) -> None:
    path = tmp_path / "graph.html"
    path.write_text(draw(inspect_model(resolve("resnet20"), torch.zeros(1, 3, 32, 32)), ".html"), encoding="utf-8")
    page = visit(path)
    resting = page.locator("#details").inner_text()
    assert resting.startswith("The channel graph")
    page.locator("#find").fill("layer2.0.conv1")
    assert page.locator("#found").inner_text() == "1 of 1"
    assert page.locator("#details h2").inner_text() == "layer2.0.conv1"
    page.keyboard.press("Escape")
    assert page.locator("#details").inner_text() == resting


# -- accuracy against size -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    path = tmp_path_factory.mktemp("frontier")
    small_run(path / "run", model={"name": "runs:Small", "num_classes": 4, "in_channels": 1})
    found = run_frontier(path / "run", FrontierOptions(at=("0.7", "0.4"), trust=True))
    for ending in (".html", ".svg"):
        (path / f"sizes{ending}").write_text(draw_frontier(found, ending), encoding="utf-8")
    return found, path


@pytest.mark.parametrize("width", [320, 1280])
def test_sizes_beside_each_other(visit: Open, sizes: tuple[dict[str, Any], Path], width: int) -> None:
    found, path = sizes
    page = visit(path / "sizes.html", width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert visible(page, "#against-macs circle") == visible(page, "#against-params circle") == 6
    page.locator("#against-macs circle.chosen").first.hover()
    assert tip(page).startswith("target 40 %") and f"{found['points'][1]['macs']:,}" in tip(page)
    page.locator("#against-params circle.tuned").hover()
    assert "fine-tuned" in tip(page) and f"{found['own']['params']:,}" in tip(page)


@pytest.mark.parametrize("dark", [False, True])
def test_sizes_as_a_picture(visit: Open, sizes: tuple[dict[str, Any], Path], dark: bool) -> None:
    page = visit(sizes[1] / "sizes.svg", dark=dark)
    assert (brightness(page, ".paper", "fill") < 60) == dark
    assert abs(brightness(page, ".title", "fill") - brightness(page, ".paper", "fill")) > 120
    inside = "all => all.every(e => { const b = e.getBoundingClientRect(); return b.left >= 0 && b.right <= 760 })"
    assert page.locator("text").count() > 10 and page.locator("text, circle").evaluate_all(inside)


# -- live ----------------------------------------------------------------------------------------------------


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run of several seconds that shows itself, and its address."""
    (tmp_path / "tinynet.py").write_text(MODULE)
    (tmp_path / "tiny.toml").write_text(RECIPE.replace("tinynet:Net", "tinynet:Slow"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["run", "tiny.toml", "--run", "run", "--quiet", "--live", str(port), "--set", "phases.finetune=10"]
    started = command(*words, cwd=tmp_path, env={"SLOW": "0.05"})
    try:
        yield started, f"http://127.0.0.1:{port}/"
    finally:
        started.kill()
        started.communicate()


def answered(address: str) -> None:
    for _ in range(200):
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the live view does not answer")


def test_a_live_run_updates_in_place_and_ends_with_the_run(
    visit: Open, live: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    started, address = live
    answered(address)
    page = visit(address, height=500)
    page.evaluate("window.untouched = true")
    until(page, "document.querySelectorAll('#kept .hit').length > 1 && document.querySelector('#course .curve')")
    page.locator("#kept .hit").first.focus()
    page.keyboard.press("ArrowRight")
    page.evaluate("scrollTo(0, 120)")
    before = page.locator("#course .hit").count()
    until(page, f"document.querySelectorAll('#course .hit').length > {before}")
    assert page.evaluate("window.untouched"), "not loaded again"
    assert page.evaluate("scrollY") == 120
    focused = "document.activeElement.closest('section')?.id + document.activeElement.dataset.row"
    assert page.evaluate(focused) == "kept1"
    until(page, "document.getElementById('pulse').textContent.startsWith('The run has ended')")
    assert page.locator(".state").inner_text() == "finished" and visible(page, ".card") == 6
    assert page.evaluate("window.untouched") and page.evaluate(focused) == "kept1"
    assert started.wait(30) == 0
    assert (tmp_path / "run/report.html").is_file()
    with pytest.raises(OSError):
        urllib.request.urlopen(address, timeout=2)


def test_a_page_says_when_the_run_was_stopped(
    visit: Open, complaints: list[str], live: tuple[subprocess.Popen[str], str]
) -> None:
    started, address = live
    answered(address)
    page = visit(address)
    until(page, "document.querySelector('#course .curve')")
    started.kill()
    until(page, "document.getElementById('pulse').textContent.includes('no longer answers')")
    assert visible(page, "#course .curve"), "what was known last stays"
    assert [text for text in complaints if "ERR_CONNECTION_REFUSED" not in text] == []
    complaints.clear()

"""Assemble the HTML report of a run, including its headline: one sentence and a few key numbers.

page.html, page.css and page.js are inlined, so that the page works offline and loads nothing. Every part is a
section with its own id, so that a live page can replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from ..budget.targets import is_missed
from ..criteria import OWN
from ..utils.formatting import DASH, change, count, duration, milliseconds, percent, scientific, si_number, signed
from . import sections
from .html import DARK_HUES, HUES, NOTHING, Figure, Markup, color_rules, concat, document, element, policy, scoped
from .run_data import Run, last_known
from .sections import ELSEWHERE, STAGES, best_known_time, latency_conditions

HEADLINE = "headline"
FIGURES: dict[str, Callable[[Run], Figure | None]] = {
    "course": sections.training_curves,
    "time": sections.latency_section,
    "kept": sections.kept_figure,
    "refinement": sections.refinement,
    "scores": sections.scores_figure,
    "network": sections.network,
    "skipped": sections.skipped,
    "environment": sections.environment,
    "recipe": sections.recipe,
}
SECTIONS = tuple(FIGURES)
_FROM_ITSELF = "'self'"  # Content-Security-Policy source: a live page may fetch from its own server
_bytes = partial(si_number, unit="B")
WIDE_SECTIONS = ("scores", "network", "recipe")  # constant, because a live page is laid out before its content


def run_parts(run: Run) -> dict[str, Markup]:
    """Return the content of every section of a run's page, in order."""
    figures = ((key, draw(run)) for key, draw in FIGURES.items())
    return {HEADLINE: headline(run)} | {key: figure.html() if figure else NOTHING for key, figure in figures}


def run_page(run: Run) -> str:
    """Return the report of a run as HTML."""
    return page(page_title(run), sentence(run), run_parts(run))


def page_title(run: Run) -> str:
    """Return the title of a run's page."""
    return f"{run.name}: {run.title}"


def page(
    title: str,
    description: str,
    parts: Mapping[str, Markup],
    wide: Collection[str] = WIDE_SECTIONS,
    *,
    live: str = "",
    version: str = "",
) -> str:
    """Return a page as HTML; the first of the `parts` is its headline, the others are sections.

    If `live` is not empty, the page fetches parts that changed since `version` from this path on its own server.
    """
    head, *rest = parts
    dark = color_rules(".graph", dark=True) + _points(DARK_HUES)
    style = scoped(".graph") + color_rules(".graph") + _points(HUES)
    return document(
        "page",
        _FROM_ITSELF if live else "'none'",
        title=title,
        description=description,
        style=f"{style}@media screen and (prefers-color-scheme:dark){{{dark}}}",
        live=live,
        version=version,
        headline=parts[head],
        sections=[element("section", parts[key], id=key, class_="wide" if key in wide else None) for key in rest],
    )


def live_policy() -> str:
    """Return the Content-Security-Policy of a live page."""
    return policy("page", _FROM_ITSELF)


def figures_page(title: str, facts: str, lead: str, figures: Sequence[Figure]) -> str:
    """Return a page as HTML: a line of facts, the title, a lead paragraph, then a section per figure."""
    head = concat(element("p", facts, class_="facts"), element("h1", title), element("p", lead, class_="lead"))
    parts = {HEADLINE: head} | {figure.key: figure.html() for figure in figures}
    return page(title, lead, parts, {figure.key for figure in figures if figure.wide})


def _points(hues: Sequence[str]) -> str:
    """Return the CSS rules for points in a comparison; points of dense networks are hollow."""
    return "".join(
        f".point.h{n}{{fill:{hue};stroke:{hue}}}.point.dense.h{n}{{fill:none;stroke-width:2}}"
        for n, hue in enumerate(hues)
    )


def sentence(run: Run) -> str:
    """Summarize the run in one sentence."""
    if run.summary is None:
        return _so_far(run)
    dense, pruned = run.summary["dense"], run.summary["pruned"]
    left = [f"{percent(100 * pruned[key] / dense[key], 0)} of the {words}" for key, words in _SIZES if dense[key]]
    correct = f"{percent(pruned['accuracy'])} of the test images are classified correctly"
    text = f"{' and '.join(left)} are left, and {correct}"
    if dense["accuracy"] is None:
        known = _earlier(dense)
        return text + (f" ({known})." if known else ".")
    gap = pruned["accuracy"] - dense["accuracy"]
    if abs(gap) < 0.005:
        return text + ", as many as with the dense control."
    return f"{text}, {abs(gap):.2f} points {'more' if gap > 0 else 'fewer'} than with the dense control."


def _earlier(dense: Mapping[str, Any]) -> str:
    """Return the dense network's accuracies before pruning as text, for a run without a dense control."""
    stages = {"given_accuracy": "as it was given", "warmup_accuracy": "after the dense warm-up"}
    known = {words: dense[key] for key, words in stages.items() if dense.get(key) is not None}
    return ", ".join(f"{percent(accuracy)} {words}" for words, accuracy in known.items())


_EXACT = 1e-10  # output difference relative to the largest output, in float64; less is rounding error
_SIZES = (("params", "parameters"), ("macs", "multiply-accumulates"))


def _so_far(run: Run) -> str:
    last = run.last
    if last is None:
        return "The run is about to begin: nothing has been trained yet."
    stage = "the dense control" if last["phase"] == "control" else STAGES[last["phase"]]
    cycle = f" of cycle {last['cycle']}" if last["cycle"] else ""
    seconds = [record["seconds"] for record in [*run.records, *run.control]][-20:]
    left = duration((last["total"] - last["done"]) * sum(seconds) / len(seconds))
    epoch = f"{last['epoch']} of {last['epochs']} of {stage}{cycle}"
    return f"Epoch {last['done']} of {last['total']} has ended, {epoch}; at this pace {left} are left."


def headline(run: Run) -> Markup:
    """Return the headline: facts, the summary sentence, a progress bar if unfinished, and cards of key numbers."""
    facts = [run.title, f"seed {run.recipe.get('seed', 0)}"]
    if (method := run.recipe.get("method", OWN)) != OWN:
        facts.insert(1, f"filters chosen by {method}")
    if run.summary is not None:
        state, progress, cards = element("span", "finished", class_="state finished"), NOTHING, _finished(run)
        machine = run.environment.get("gpu") or run.environment.get("cpu") or ""
        facts += [f"{run.summary['epochs']} epochs", duration(run.summary["seconds"]), machine]
        if "dense_from" in run.summary:
            facts.append(f"dense stage of {run.summary['dense_from']}")
    else:
        state, cards = element("span", "not finished", class_="state not"), _unfinished(run)
        share = 100 * run.last["done"] / run.last["total"] if run.last is not None else 0
        progress = element("progress", percent(share, 0), max=100, value=f"{share:.1f}", aria_label="epochs done")
    above = element("p", state, " ", " · ".join(filter(None, facts)), class_="facts")
    lead = element("p", sentence(run), class_="lead")
    return concat(above, element("h1", run.name), lead, progress, element("dl", cards, class_="cards"))


def _card(
    label: str, value: str, was: str, note: str = "", share: float | None = None, good: bool | None = None
) -> Markup:
    mood = "" if good is None else " good" if good else " bad"
    parts = [element("b", value), element("span", note, class_=f"note{mood}")]
    if share is not None:
        bar = element("i", style=f"width:{min(100 * share, 100):.1f}%")
        parts.append(element("span", bar, class_="meter", aria_hidden="true"))
    return element("div", element("dt", label), element("dd", parts, element("small", was)), class_="card")


def _finished(run: Run) -> list[Markup]:
    assert run.summary is not None
    dense, pruned = run.summary["dense"], run.summary["pruned"]
    if dense["accuracy"] is None:
        was, note = "; ".join(filter(None, ["no dense control", _earlier(dense)])), ""
    else:
        was, note = f"dense control {percent(dense['accuracy'])}", signed(pruned["accuracy"] - dense["accuracy"], 2)
    cards = [_card("Test accuracy", percent(pruned["accuracy"]), was, note)]
    stored = run.folder / "model.safetensors"
    if "file_bytes" not in pruned and stored.is_file():  # absent in summaries of older versions
        pruned = {**pruned, "file_bytes": stored.stat().st_size}
    spread = [part.get("latency_iqr_ms") for part in (dense, pruned)]
    timed = f" · {run.environment.get('device', '')}"
    timed += "" if None in spread else f", IQR {milliseconds(spread[0])} and {milliseconds(spread[1])}"
    sizes: list[tuple[str, str, Callable[[float], str], str]] = [
        ("Parameters", "params", si_number, _target(run, "params", si_number)),
        ("Multiply-accumulates", "macs", si_number, _target(run, "macs", si_number)),
        ("File", "file_bytes", _bytes, _target(run, "size", _bytes)),
        (f"Latency, batch {run.summary.get('latency_batch')}", "latency_ms", milliseconds, timed),
    ]
    for label, key, format_value, more in sizes:
        before, after = dense.get(key), pruned.get(key)
        if not before or not after:
            cards.append(_card(label, format_value(after), "dense: not stored"))
            continue
        noise = max(filter(None, spread), default=0.0) if key == "latency_ms" else 0.0
        good = None if abs(after - before) < noise else after <= before  # a difference within the spread is noise
        was = f"dense {format_value(before)}{more}"
        cards.append(_card(label, format_value(after), was, change(before, after), after / before, good))
    cards += _latency_card(run)
    error = run.summary.get("cut_error")
    exact = error is not None and error < _EXACT
    was = "largest difference of their outputs, float64"
    cards.append(_card("Masked = extracted", scientific(error), was, "exact" if exact else "", good=exact or None))
    return cards


def _target(run: Run, name: str, format_value: Callable[[float], str]) -> str:
    most = float(run.recipe.get("budget", {}).get(name, 1.0))
    if most == 1:
        return ""
    return f" · target: at most {percent(100 * most, 1) if most < 1 else format_value(most)}"


def _latency_card(run: Run) -> list[Markup]:
    if run.time is None:
        return []
    share, how = best_known_time(run.time, run.finished)
    label = f"Time, target {percent(100 * run.time['asked'], 1)}"
    value = DASH if share is None else percent(100 * share, 1)
    elsewhere = f"; {ELSEWHERE}" if run.finished and run.time["measured"] is None else ""
    late = is_missed(run.time["asked"], run.time["measured"])
    was = f"{latency_conditions(run.time)} · {run.time['way']}{elsewhere}"
    return [_card(label, value, was, f"{how}, missed" if late else how, share, False if late else None)]


def _unfinished(run: Run) -> list[Markup]:
    if not run.records:
        return []
    start, now = run.records[0], run.records[-1]
    cards = [
        _card("Test accuracy", percent(last_known(run.records, "test_accuracy")), "latest evaluation"),
        _card("Loss", f"{now['loss']:.4f}", f"training, epoch {now['done']}"),
    ]
    for label, before, left, format_value in (
        ("Filters alive", now["filters_total"], now["filters"], count),
        ("Parameters", start["params"], now["params"], si_number),
        ("Multiply-accumulates", start["macs"], now["macs"], si_number),
    ):
        note = change(before, left) if left != before else ""
        cards.append(_card(label, format_value(left), f"dense {format_value(before)}", note, left / (before or 1)))
    cards += _latency_card(run)
    if run.control:
        known = percent(last_known(run.control, "test_accuracy"))
        cards.append(_card("Dense control", known, f"after {run.control[-1]['epoch']} epochs"))
    return cards

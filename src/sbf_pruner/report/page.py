"""Assemble the HTML report of a run, including its headline: one sentence and a few key numbers.

page.html, page.css and page.js beside this file are inlined, so that the page opens without a network and loads
nothing. Every part is a section with an id of its own, so that a live page can replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.resources import files
from typing import Any

from ..budget.targets import is_missed
from ..criteria import OWN
from ..utils.formatting import DASH, change, count, duration, milliseconds, percent, scientific, si_number, signed
from .curves import STAGES, training_curves
from .html import DARK_HUES, HUES, NOTHING, Figure, Markup, color_rules, concat, document, element, policy, scoped
from .run_data import Run
from .sections import (
    ELSEWHERE,
    best_known_time,
    environment,
    kept_figure,
    latency_conditions,
    latency_section,
    network,
    recipe,
    refinement,
    scores_figure,
    skipped,
)

HEADLINE = "headline"
FIGURES: dict[str, Callable[[Run], Figure | None]] = {
    "course": training_curves,
    "time": latency_section,
    "kept": kept_figure,
    "refinement": refinement,
    "scores": scores_figure,
    "network": network,
    "skipped": skipped,
    "environment": environment,
    "recipe": recipe,
}
SECTIONS = tuple(FIGURES)
_FROM_ITSELF = "'self'"  # Content-Security-Policy source of what a live page fetches
WIDE_SECTIONS = ("scores", "network", "recipe")  # fixed: a live page is laid out before its sections are drawn


def run_parts(run: Run) -> dict[str, Markup]:
    """Return the content of every section of a run's page, in order."""
    figures = {key: draw(run) for key, draw in FIGURES.items()}
    return {HEADLINE: headline(run)} | {key: NOTHING if one is None else one.html() for key, one in figures.items()}


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

    A live page fetches parts newer than `version` from the path `live` on its own server.
    """
    head, *rest = parts
    sections = [element("section", parts[key], id=key, class_="wide" if key in wide else None) for key in rest]
    dark = color_rules(".graph", dark=True) + _points(DARK_HUES)
    style = _read("page.css") + scoped(".graph") + color_rules(".graph") + _points(HUES)
    return document(
        _read("page.html"),
        _read("page.js"),
        _FROM_ITSELF if live else "'none'",
        title=title,
        description=description,
        style=Markup(f"{style}@media screen and (prefers-color-scheme:dark){{{dark}}}"),
        live=live,
        version=version,
        headline=parts[head],
        sections=sections,
    )


def live_policy() -> str:
    """Return the Content-Security-Policy of a live page."""
    return policy(_read("page.js"), _FROM_ITSELF)


def figure_parts(figures: Sequence[Figure]) -> dict[str, Markup]:
    """Return the content of the figures' sections by key."""
    return {figure.key: figure.html() for figure in figures}


def _points(hues: Sequence[str]) -> str:
    """Return the colors of points in a comparison; those of dense networks are hollow."""
    return "".join(
        f".point.h{n}{{fill:{hue};stroke:{hue}}}.point.dense.h{n}{{fill:none;stroke-width:2}}"
        for n, hue in enumerate(hues)
    )


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def sentence(run: Run) -> str:
    """Summarize the run in one sentence."""
    if run.summary is None:
        return _so_far(run)
    dense, pruned = run.summary["dense"], run.summary["pruned"]
    left = [f"{percent(100 * pruned[key] / dense[key], 0)} of the {words}" for key, words in _SIZES if dense[key]]
    said = (
        f"{' and '.join(left)} are left, and {percent(pruned['accuracy'])} of the test images are "
        "classified correctly"
    )
    if dense["accuracy"] is None:
        known = _earlier(dense)
        return said + (f" ({known})." if known else ".")
    gap = pruned["accuracy"] - dense["accuracy"]
    if abs(gap) < 0.005:
        return said + ", as many as with the dense control."
    return f"{said}, {abs(gap):.2f} points {'more' if gap > 0 else 'fewer'} than with the dense control."


def _earlier(dense: Mapping[str, Any]) -> str:
    """Return the known accuracies of the dense network, for a run without a dense control."""
    known = {"given_accuracy": "as it was given", "warmup_accuracy": "after the dense warm-up"}
    told = {words: dense.get(key) for key, words in known.items()}  # older summaries lack some
    return ", ".join(f"{percent(accuracy)} {words}" for words, accuracy in told.items() if accuracy is not None)


_EXACT = 1e-10  # relative to the largest output, in float64; less is rounding error
_SIZES = (("params", "parameters"), ("macs", "multiply-accumulates"))


def _so_far(run: Run) -> str:
    last = run.last
    if last is None:
        return "The run is about to begin: nothing has been trained yet."
    stage = "the dense control" if last["phase"] == "control" else STAGES[last["phase"]]
    cycle = f" of cycle {last['cycle']}" if last["cycle"] else ""
    seconds = [record["seconds"] for record in [*run.records, *run.control]][-20:]
    left = (last["total"] - last["done"]) * sum(seconds) / len(seconds)
    return (
        f"Epoch {last['done']} of {last['total']} has ended, {last['epoch']} of {last['epochs']} of "
        f"{stage}{cycle}; at this pace {duration(left)} are left."
    )


def headline(run: Run) -> Markup:
    """Return the headline: facts, the sentence, progress and cards."""
    facts = [run.title, f"seed {run.recipe.get('seed', 0)}"]
    if (method := run.recipe.get("method", OWN)) != OWN:
        facts.insert(1, f"filters chosen by {method}")
    state, progress, last = "finished", NOTHING, run.last
    if run.summary is not None:
        machine = run.environment.get("gpu") or run.environment.get("cpu") or ""
        facts += [f"{run.summary['epochs']} epochs", duration(run.summary["seconds"]), machine]
        if "dense_from" in run.summary:
            facts.append(f"dense stage of {run.summary['dense_from']}")
    else:
        state = "not finished"
        share = 100 * last["done"] / last["total"] if last is not None else 0
        progress = element("progress", percent(share, 0), max=100, value=f"{share:.1f}", aria_label="epochs done")
    cards = _finished(run) if run.finished else _unfinished(run)
    shown = element("span", state, class_=f"state {state.split()[0]}")
    return concat(
        element("p", shown, " ", " · ".join(filter(None, facts)), class_="facts"),
        element("h1", run.name),
        element("p", sentence(run), class_="lead"),
        progress,
        element("dl", cards, class_="cards"),
    )


def _card(
    label: str, value: str, was: str, note: str = "", share: float | None = None, good: bool | None = None
) -> Markup:
    mood = "" if good is None else " good" if good else " bad"
    meter = NOTHING
    if share is not None:
        bar = element("i", style=f"width:{min(100 * share, 100):.1f}%")
        meter = element("span", bar, class_="meter", aria_hidden="true")
    told = element("span", note, class_=f"note{mood}")
    return element(
        "div",
        element("dt", label),
        element("dd", element("b", value), told, meter, element("small", was)),
        class_="card",
    )


def _finished(run: Run) -> list[Markup]:
    assert run.summary is not None
    dense, pruned = run.summary["dense"], run.summary["pruned"]
    judged, note = dense["accuracy"], ""
    if judged is None:
        was = "; ".join(filter(None, ["no dense control", _earlier(dense)]))
    else:
        was, note = f"dense control {percent(judged)}", signed(pruned["accuracy"] - judged, 2)
    cards = [_card("Test accuracy", percent(pruned["accuracy"]), was, note)]
    pruned = {"file_bytes": _stored_bytes(run), **pruned}  # older summaries lack it
    spread = [part.get("latency_iqr_ms") for part in (dense, pruned)]
    timed = f" · {run.environment.get('device', '')}"
    timed += "" if None in spread else f", IQR {milliseconds(spread[0])} and {milliseconds(spread[1])}"
    sizes = [
        ("Parameters", "params", si_number, _asked(run, "params", si_number)),
        ("Multiply-accumulates", "macs", si_number, _asked(run, "macs", si_number)),
        ("File", "file_bytes", _bytes, _asked(run, "size", _bytes)),
        (f"Latency, batch {run.summary.get('latency_batch')}", "latency_ms", milliseconds, timed),
    ]
    for label, key, spell, more in sizes:
        before, after = dense.get(key), pruned.get(key)
        if before and after:
            share, good = after / before, after <= before
            noise = max((part for part in spread if part is not None), default=0.0) if key == "latency_ms" else 0.0
            mood = None if abs(after - before) < noise else good  # a difference within the spread is noise
            cards.append(
                _card(label, spell(after), f"dense {spell(before)}{more}", change(before, after), share, mood)
            )
        else:
            cards.append(_card(label, spell(after), "dense: not stored"))
    cards += _timed(run)
    error = run.summary.get("cut_error")
    exact = error is not None and error < _EXACT
    was = "largest difference of their outputs, float64"
    cards.append(_card("Masked = extracted", scientific(error), was, "exact" if exact else "", good=exact or None))
    return cards


def _asked(run: Run, name: str, spell: Callable[[float], str]) -> str:
    """Return the recipe's target for a resource as text, empty if there is none."""
    most = float(run.recipe.get("budget", {}).get(name, 1.0))
    if most == 1:
        return ""
    return f" · target: at most {percent(100 * most, 1) if most < 1 else spell(most)}"


def _timed(run: Run) -> list[Markup]:
    """Return the card of the latency target, if there is one."""
    if run.time is None:
        return []
    share, how = best_known_time(run.time, run.finished)
    label = f"Time, target {percent(100 * run.time['asked'], 1)}"
    value = DASH if share is None else percent(100 * share, 1)
    elsewhere = f"; {ELSEWHERE}" if run.finished and run.time["measured"] is None else ""
    late = is_missed(run.time["asked"], run.time["measured"])
    was = f"{latency_conditions(run.time)} · {run.time['way']}{elsewhere}"
    return [_card(label, value, was, f"{how}, missed" if late else how, share, False if late else None)]


def _stored_bytes(run: Run) -> int | None:
    stored = run.folder / "model.safetensors"
    return stored.stat().st_size if stored.is_file() else None


def _unfinished(run: Run) -> list[Markup]:
    if not run.records:
        return []
    start, now = run.records[0], run.records[-1]
    judged = next((r["test_accuracy"] for r in reversed(run.records) if r["test_accuracy"] is not None), None)
    cards = [
        _card("Test accuracy", percent(judged), "latest evaluation"),
        _card("Loss", f"{now['loss']:.4f}", f"training, epoch {now['done']}"),
    ]
    for label, key, spell in (
        ("Filters alive", "filters", count),
        ("Parameters", "params", si_number),
        ("Multiply-accumulates", "macs", si_number),
    ):
        before = now["filters_total"] if key == "filters" else start[key]
        note = change(before, now[key]) if now[key] != before else ""
        cards.append(_card(label, spell(now[key]), f"dense {spell(before)}", note, now[key] / (before or 1)))
    cards += _timed(run)
    if run.control:
        known = next((r["test_accuracy"] for r in reversed(run.control) if r["test_accuracy"] is not None), None)
        cards.append(_card("Dense control", percent(known), f"after {run.control[-1]['epoch']} epochs"))
    return cards


def _bytes(value: float | None) -> str:
    return si_number(value, "B")

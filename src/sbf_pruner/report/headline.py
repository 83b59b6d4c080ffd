"""The first thing a report says: what the run came to, in one sentence and a handful of numbers.

A run enters; HTML leaves.  Of a run that is not finished it tells how far it is and what is there by now.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from .course import STAGES
from .data import Run
from .numbers import DASH, change, count, duration, milliseconds, percent, short, signed, tiny


def sentence(run: Run) -> str:
    """The run in one sentence."""
    if run.summary is None:
        return _so_far(run)
    dense, pruned = run.summary["dense"], run.summary["pruned"]
    left = [f"{100 * pruned[key] / dense[key]:.0f} % of the {words}" for key, words in _SIZES if dense[key]]
    said = f"{' and '.join(left)} are left, and {percent(pruned['accuracy'])} of the test images are right"
    if dense["accuracy"] is None:
        known = dense.get("warmup_accuracy")
        return said + (f" ({percent(known)} after the dense warm-up)." if known is not None else ".")
    gap = pruned["accuracy"] - dense["accuracy"]
    if abs(gap) < 0.005:
        return said + ", as many as with the dense control."
    return f"{said}, {abs(gap):.2f} points {'more' if gap > 0 else 'fewer'} than with the dense control."


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


def headline(run: Run) -> str:
    """The sentence and the cards."""
    cards = _finished(run) if run.summary is not None else _unfinished(run)
    state = "finished" if run.finished else "not finished"
    last = run.last
    share = 100 * last["done"] / last["total"] if last is not None and not run.finished else 0
    progress = (
        ""
        if run.finished
        else f'<progress max=100 value="{share:.1f}" aria-label="epochs done">{share:.0f} %</progress>'
    )
    seed = f"seed {run.recipe.get('seed', 0)}"
    facts = [run.title, seed, *([f"{run.summary['epochs']} epochs"] if run.summary else [])]
    if run.summary is not None:
        facts.append(duration(run.summary["seconds"]))
        facts.append(run.environment.get("gpu") or run.environment.get("cpu") or "")
    return (
        f'<p class=facts><span class="state {state.split()[0]}">{state}</span> {escape(" · ".join(filter(None, facts)))}</p>'
        f"<h1>{escape(run.name)}</h1>"
        f"<p class=lead>{escape(sentence(run))}</p>{progress}"
        f'<dl class=cards>{"".join(cards)}</dl>'
    )


def _card(label: str, value: str, was: str, note: str, parts: Sequence[tuple[str, float]] = (), good: bool | None = None) -> str:
    mood = "" if good is None else " good" if good else " bad"
    bars = "".join(f'<i class="{kind}" style="width:{min(100 * part, 100):.1f}%"></i>' for kind, part in parts)
    meter = f"<span class=meter aria-hidden=true>{bars}</span>" if bars else ""
    return (
        f"<div class=card><dt>{escape(label)}</dt><dd><b>{escape(value)}</b>"
        f'<span class="note{mood}">{escape(note)}</span>{meter}<small>{escape(was)}</small></dd></div>'
    )


def _finished(run: Run) -> list[str]:
    assert run.summary is not None
    dense, pruned = run.summary["dense"], run.summary["pruned"]
    judged = dense["accuracy"]
    if judged is None:
        known = dense.get("warmup_accuracy")
        was, note = f"no dense control; {percent(known)} after warm-up", ""
    else:
        was = f"dense control {percent(judged)}"
        note = signed(pruned["accuracy"] - judged, 2)
    cards = [_card("Test accuracy", percent(pruned["accuracy"]), was, note)]
    batch = run.summary.get("latency_batch")
    sizes = [
        ("Parameters", "params", short),
        ("Multiply-accumulates", "macs", short),
        ("File", "file_bytes", _bytes),
        (f"Latency, batch {batch}", "latency_ms", milliseconds),
    ]
    for label, key, spell in sizes:
        before, after = dense.get(key), pruned.get(key)
        if key == "file_bytes" and after is None:
            stored = run.folder / "model.safetensors"
            after = stored.stat().st_size if stored.is_file() else None
        bars = [("kept", after / before)] if before and after else []
        good = after <= before if before and after else None
        where = f" · {run.environment.get('device')}" if key == "latency_ms" and run.environment.get("device") else ""
        was = f"dense {spell(before)}{where}" if before is not None else "dense: not stored"
        cards.append(_card(label, spell(after), was, change(before, after) if before else "", bars, good))
    error = run.summary.get("cut_error")
    exact = error is not None and error < 1e-10
    cards.append(
        _card(
            "Masked = extracted",
            tiny(error),
            "largest difference of their outputs, float64",
            "exact" if exact else "",
            good=exact or None,
        )
    )
    return cards


def _unfinished(run: Run) -> list[str]:
    if not run.records:
        return []
    start, now = run.records[0], run.records[-1]
    judged = next((r["test_accuracy"] for r in reversed(run.records) if r["test_accuracy"] is not None), None)
    cards = [
        _card("Test accuracy", percent(judged), "latest that was taken", ""),
        _card("Loss", f"{now['loss']:.4f}", f"training, epoch {now['done']}", ""),
    ]
    for label, key, spell in (("Filters alive", "filters", count), ("Parameters", "params", short), ("Multiply-accumulates", "macs", short)):
        before = now["filters_total"] if key == "filters" else start[key]
        whole: Any = before or 1
        note = change(before, now[key]) if now[key] != before else DASH
        cards.append(_card(label, spell(now[key]), f"dense {spell(before)}", note, [("kept", now[key] / whole)]))
    if run.control:
        known = next((r["test_accuracy"] for r in reversed(run.control) if r["test_accuracy"] is not None), None)
        cards.append(_card("Dense control", percent(known), f"after {run.control[-1]['epoch']} epochs", ""))
    return cards


def _bytes(value: float | None) -> str:
    return short(value, "B")

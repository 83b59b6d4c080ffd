"""The time that was asked for beside the one that was foretold and the one that was measured.

A run enters; a figure leaves, with a bar for each and a line where it should end, and in words the way that was
chosen and where the time was taken; None for a run that was asked for no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..drawing.markup import Markup, element, together
from .chart import Figure, Table, column, pairs, picture
from .data import Run
from .numbers import milliseconds, percent

_EACH, _BAR = 38.0, 12.0  # pixels down: a row, and the bar in it
ELSEWHERE = "not measured here: the clock is another machine's, or its runtime is not installed"


def timed(run: Run) -> Figure | None:
    """The figure."""
    time = run.time
    if time is None:
        return None
    bars = [
        ("dense, in its fastest form", 1.0, "before"),
        ("asked for", time["asked"], "before"),
        ("foretold by the table", time["foretold"], "before"),
        ("measured beside the dense one", time["measured"], "kept"),
    ]
    rows = [
        [name, percent(100 * share, 1), milliseconds(share * time["dense_ms"])]
        for name, share, _ in bars
        if share is not None
    ]
    parts = [
        _bar(place, name, share, kind, row)
        for place, ((name, share, kind), row) in enumerate(
            zip((bar for bar in bars if bar[1] is not None), rows, strict=True)
        )
    ]
    at, high = f"{100 * time['asked']:.2f}%", _EACH * len(rows)
    parts.append(element("line", class_="bound", x1=at, x2=at, y1=0, y2=f"{high:.0f}"))
    parts += [column("", row, 0, 100, _EACH * row, _EACH) for row in range(len(rows))]
    drawn = picture("times", high, "The time asked for", parts)
    legend = [("line dashed", "asked for")]
    table = Table(["a pass of the network", "part of the dense one's time", "time"], rows)
    return Figure("time", "The time asked for", _said(run, time), together(drawn, _facts(time)), table, legend)


def where(time: Mapping[str, Any]) -> str:
    """What the time is of."""
    threads = f"{time['threads']} thread{'' if time['threads'] == 1 else 's'}"
    return f"{time['runtime']}, batch {time['batch']}, {threads}"


def found(time: Mapping[str, Any], finished: bool) -> tuple[float | None, str]:
    """The time a network came to as a part of the dense one's, the best that is known, and what that is."""
    if time["measured"] is not None:
        return time["measured"], "measured"
    return time["foretold"], "foretold" if finished else "not landed yet"


def _bar(place: int, name: str, share: float, kind: str, row: list[str]) -> Markup:
    top = _EACH * place
    words, bar = {"y": f"{top + 14:.0f}"}, {"y": f"{top + 19:.0f}", "height": f"{_BAR:.0f}"}
    return together(
        element("text", name, class_="start", x=0, **words),
        element("text", f"{row[1]} · {row[2]}", x="100%", **words),
        element("rect", class_=kind, x=0, width=f"{min(100 * share, 100):.2f}%", **bar),
    )


def _said(run: Run, time: Mapping[str, Any]) -> str:
    asked = f"{percent(100 * time['asked'], 1)} of the dense network's {milliseconds(time['dense_ms'])}"
    said = f"Asked for were {asked}, {milliseconds(time['asked_ms'])}, in {where(time)}"
    if time["measured"] is not None:
        beside = f"cut for real and timed in turns with the dense network, it takes {_part(time['measured'])} of it"
        return f"{said}; {beside}."
    if not run.finished:
        return f"{said}; the filters land on it when the last scores are trained."
    return f"{said}. That was {ELSEWHERE}; by the table it takes {_part(time['foretold'])}."


def _facts(time: Mapping[str, Any]) -> Markup:
    facts = {"way": _way(time)}
    machine = ", ".join(_named(key, value) for key, value in time["machine"].items() if value is not None)
    facts["taken on"] = machine or "a machine that the table does not name"
    if time.get("mean_error") is not None:
        mean, worst = (percent(100 * time[key], 1) for key in ("mean_error", "worst_error"))
        facts["the table"] = f"off by {mean} on average, {worst} at most, for networks it had not seen"
    if time["landings"]:
        each = [f"{_part(one['measured'])} (foretold {_part(one['foretold'])})" for one in time["landings"]]
        facts["landings"] = ", then ".join(each)
    return pairs(facts.items())


def _way(time: Mapping[str, Any]) -> str:
    """What goes: chosen because it keeps the most MACs in the time, or set in the recipe."""
    left = time["macs_left"]
    if not left:
        return f"{time['way']}, as the recipe says"
    others = [
        f"{name} {'cannot reach it' if share is None else f'would keep {_part(share)}'}"
        for name, share in left.items()
        if name != time["way"]
    ]
    own = left.get(time["way"])
    kept = "" if own is None else f", foretold to keep {_part(own)} of the MACs"
    return "; ".join([f"{time['way']}{kept}", *others])


def _named(key: str, value: Any) -> str:
    return str(value) if key in ("cpu", "gpu") else f"{value} cores" if key == "cores" else f"{key} {value}"


def _part(share: float) -> str:
    return percent(100 * share, 1)

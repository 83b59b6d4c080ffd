"""Training curves of a run: accuracy, loss and remaining filters per epoch, with the phases shaded.

The dense control is trained for as many epochs as the pruned network and is drawn over the same epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..criteria import METHODS
from ..utils.formatting import DASH, count, percent
from .html import (
    FRAME_WIDTH,
    Figure,
    Markup,
    Scale,
    Table,
    concat,
    curve,
    element,
    grid,
    hit_area,
    nested_svg,
    svg_figure,
)
from .run_data import Record, Run

STAGES = {
    "warmup": "warm-up",
    "score": "scores",
    "weights": "gated weights",
    "joint": "scores and weights",
    "finetune": "fine-tuning",
}
_GAP = 30.0

Points = list[tuple[int, float]]  # (epoch, value)
Panel = tuple[
    list[tuple[str, Points]], Callable[[float], Scale]
]  # (CSS class, points) of each curve; the scale for a given height


def training_curves(run: Run) -> Figure:
    """Return the figure, with panels for test accuracy, loss and remaining filters."""
    key, title = "course", "The course of the run"
    if not run.records:
        return Figure(key, title, missing="No epoch has ended yet.")
    across = _EpochAxis(run.epochs)
    panels = [
        ("test accuracy", _accuracy(run), 150.0, " %"),
        ("loss", _loss(run), 84.0, ""),
        ("filters alive", _filters(run), 84.0, ""),
    ]
    top, inside = 0.0, []
    for name, (curves, scale_of), height, unit in panels:
        scale = scale_of(height)
        drawn = [
            curve(kind, [(across.middle(epoch), scale(value)) for epoch, value in points])
            for kind, points in curves
        ]
        inside += [grid(scale, top, unit, 4 if height > 100 else 3), nested_svg(top, height, drawn)]
        inside.append(element("text", name, class_="panel", x=0, y=f"{top - 7:.0f}"))
        top += height + _GAP
    height = top - _GAP
    marks = (
        hit_area("epoch", row, across.left(record["done"]), 100 / run.epochs, 0, height)
        for row, record in enumerate(run.records)
    )
    legend = [("line accent", "test"), ("line soft", "training")]
    legend += [("line dashed", "dense control")] if run.control else []
    legend += [("shade score", "scores")] if run.method is None else []
    legend.append(("shade tune", "fine-tuning"))
    return Figure(
        key,
        title,
        _caption(run),
        concat(
            svg_figure(key, height, title, _phases(run, across, height), inside, marks),
            _stages(run, across),
        ),
        _table(run),
        legend,
    )


class _EpochAxis:
    """Map epochs, counted from 1, to horizontal positions: `middle` in frame units, `left` in percent."""

    def __init__(self, epochs: int) -> None:
        self.epochs = max(epochs, 1)

    def middle(self, epoch: int) -> float:
        return FRAME_WIDTH * (epoch - 0.5) / self.epochs

    def left(self, epoch: int) -> float:
        return 100 * (epoch - 1) / self.epochs


def _points(records: Iterable[Record], key: str, at: str = "done") -> Points:
    return [(record[at], record[key]) for record in records if record[key] is not None]


def _accuracy(run: Run) -> Panel:
    test, control = _points(run.records, "test_accuracy"), _points(run.control, "test_accuracy", "epoch")
    train = _points(run.records, "train_accuracy")
    seen = sorted(value for _, value in test + control) or sorted(value for _, value in train)
    best, usual = seen[-1], seen[len(seen) // 10]
    # The first epochs are far below the rest; a scale that includes them would flatten the differences after them.
    low = max(0.0, 5 * ((usual - 0.6 * (best - usual) - 1) // 5))
    curves = [("soft", train), ("dashed", control), ("accent", test)]
    return curves, lambda height: Scale(low, 100.0, height)


def _loss(run: Run) -> Panel:
    points, control = _points(run.records, "loss"), _points(run.control, "loss", "epoch")
    values = [value for _, value in points + control if value > 0] or [1.0]
    low, high = min(values), max(values)
    spread = high / low > 30
    scale = (low * 0.8, high * 1.1) if spread else (0.0, high * 1.05)
    return [("dashed", control), ("soft", points)], lambda height: Scale(*scale, height, spread)


def _filters(run: Run) -> Panel:
    total = run.records[-1]["filters_total"]
    return [("accent", _points(run.records, "filters"))], lambda height: Scale(0, total * 1.04, height)


def _phases(run: Run, across: _EpochAxis, height: float) -> Markup:
    shades = {"score": "score", "joint": "score", "finetune": "tune"}
    return concat(
        element(
            "rect",
            class_=f"shade {shades[phase.kind]}",
            x=f"{across.left(phase.first + 1):.3f}%",
            y=0,
            width=f"{100 * phase.epochs / across.epochs:.3f}%",
            height=f"{height:.0f}",
        )
        for phase in run.schedule
        if phase.kind in shades
    )


def _stages(run: Run, across: _EpochAxis) -> Markup:
    """Labels below the figure for warm-up, cycles and fine-tuning, each as wide as its epochs."""
    spans: dict[str, list[int]] = {}
    for phase in run.schedule:
        if phase.kind != "control":
            stage = "cycles" if phase.cycle else STAGES[phase.kind]
            spans.setdefault(stage, [phase.first, 0])[1] = phase.end
    parts = (
        element(
            "span",
            element("b", stage),
            " ",
            element("i", f"{first + 1}{DASH}{end}"),
            style=f"flex:{(end - first) / across.epochs:.4f}",
        )
        for stage, (first, end) in spans.items()
    )
    return element("div", parts, class_="stages", aria_hidden="true")


def _caption(run: Run) -> str:
    joint = any(phase.kind == "joint" for phase in run.schedule)
    weights = "are trained with them" if joint else "are frozen"
    if run.method is None:
        how = f"In the shaded phases the scores are trained and the weights {weights}."
    elif run.method in METHODS and METHODS[run.method].soft and any(phase.cycle for phase in run.schedule):
        how = (
            "After every epoch of the cycles filters are set to zero, and may come back; at the end of the "
            "cycles they are removed."
        )
    else:
        dense = any(phase.kind == "warmup" for phase in run.schedule)
        how = (
            f"The filters are removed at once, {'when the warm-up is over' if dense else 'before the first epoch'}."
        )
    said = f"Epochs 1 to {run.epochs}. {how}"
    if run.control:
        said += " The dense control is another network, trained for as many epochs."
    return said


def _table(run: Run) -> Table:
    control: Sequence[Record] = run.control
    after = {record["epoch"]: record for record in control}
    head = ["epoch", "phase", "loss", "training", "test", "filters", "parameters", "MACs", "learning rate"]
    rows = []
    for record in run.records:
        cycle = f" {record['cycle']}" if record["cycle"] else ""
        row = [str(record["done"]), STAGES[record["phase"]] + cycle, f"{record['loss']:.4f}"]
        row += [percent(record["train_accuracy"]), percent(record["test_accuracy"])]
        row += [count(record[key]) for key in ("filters", "params", "macs")]
        row.append(f"{record['lr']:.3g}")
        if control:
            row.append(percent(after.get(record["done"], {}).get("test_accuracy")))
        rows.append(row)
    return Table([*head, "dense control"] if control else head, rows, words=2)

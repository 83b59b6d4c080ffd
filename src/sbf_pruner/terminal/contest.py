"""The closing table of a comparison of methods, as lines.

Standings enter; text leaves.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from ..contest.standings import PAGE, Standing
from ..methods import judged_by
from .tables import share, table


def contest_lines(found: Sequence[Standing], dense: Sequence[float], epochs: int, root: Path) -> list[str]:
    """A row for each method, the best first, and the dense network where a control was trained.

    >>> for line in contest_lines([Standing("l1", (90.0, 92.0), (), 0.4, 0.5)], [93.0], 50, Path("runs")):
    ...     print(line)
    method  accuracy          parameters left  MACs left  judges a filter by
    dense   93.00 % (1)                100.0%     100.0%
    l1      91.00 ± 1.41 (2)            40.0%      50.0%  the sum of its absolute weights
    <BLANKLINE>
    accuracy on the test images after the last of 50 epochs, mean ± deviation (seeds)
    report: runs/comparison.html
    folder of all runs: runs
    """
    rows = [["method", "accuracy", "parameters left", "MACs left", "judges a filter by"]]
    if dense:
        rows.append(["dense", _accuracy(dense), share(1.0), share(1.0), ""])
    for one in found:
        sizes = [share(one.params), share(one.macs)]
        rows.append([one.method, _accuracy(one.accuracy), *sizes, judged_by(one.method)])
    note = f"accuracy on the test images after the last of {epochs} epochs, mean ± deviation (seeds)"
    return [*table(rows, "<<>><"), "", note, f"report: {root / PAGE}", f"folder of all runs: {root}"]


def _accuracy(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.2f}"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else " %"
    return f"{mean}{spread} ({len(values)})"

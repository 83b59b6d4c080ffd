"""What goes on while something runs: a bar where rich is installed, else one plain line per epoch.

Records of a run, or bytes of a transfer, enter; text leaves on stderr, so that stdout holds results alone.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from ..errors import PruningError
from .tables import percent

Record = dict[str, Any]


@contextmanager
def progress(
    total: int, *, quiet: bool = False, stream: TextIO | None = None
) -> Iterator[Callable[[Record], None]]:
    """A function to call with the record of every epoch."""
    stream = stream or sys.stderr
    if quiet:
        yield lambda record: None
        return
    rich = _rich() if stream.isatty() else None
    if rich is None:
        yield _Lines(stream)
        return
    columns = (
        "[bold]{task.description}",
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        "{task.fields[facts]}",
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=importlib.import_module("rich.console").Console(file=stream)) as bar:
        task = bar.add_task("starting", total=total, facts="")

        def show(record: Record) -> None:
            bar.update(task, completed=record["done"], description=_stage(record), facts=_facts(record))

        yield show


@contextmanager
def watched(
    report: Callable[[Record], None], folder: Path, *, live: str | None, tensorboard: bool, fresh: bool
) -> Iterator[Callable[[Record], None]]:
    """`report`, and beside it what else was asked for: a page in the browser, TensorBoard's files."""
    reports = [report]
    with ExitStack() as stack:
        if tensorboard:
            from ..report.tensorboard import tensorboard_log

            reports.append(stack.enter_context(tensorboard_log(folder)))
        if live is not None:
            from ..report.live import PORT, live_view

            if live and not live.isdigit():
                raise PruningError(f"--live {live!r}: a port is a number from 1 to 65535")
            address = stack.enter_context(live_view(folder, int(live or PORT), fresh=fresh))
            print(f"sbf: live at {address}", file=sys.stderr, flush=True)

        def tell(record: Record) -> None:
            for each in reports:
                each(record)

        yield tell


@contextmanager
def transfer(*, quiet: bool = False, stream: TextIO | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call as bytes arrive: with what is being done, the bytes done, and all bytes (0: unknown)."""
    stream = stream or sys.stderr
    rich = _rich() if stream.isatty() and not quiet else None
    if quiet:
        yield lambda what, done, total: None
    elif rich is None:
        yield _Tenths(stream)
    else:
        columns = ("[bold]{task.description}", rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn())
        with rich.Progress(*columns, console=importlib.import_module("rich.console").Console(file=stream)) as bar:
            tasks: dict[str, Any] = {}

            def show(what: str, done: int, total: int) -> None:
                if not total:
                    bar.console.print(what, highlight=False, soft_wrap=True, markup=False)
                    return
                if what not in tasks:
                    tasks[what] = bar.add_task(what.partition(" ")[0], total=total)
                bar.update(tasks[what], completed=done)

            yield show


class _Tenths:
    """One plain line for each thing that is done, and one for every tenth of a transfer."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.told: tuple[str, int] = "", 0

    def __call__(self, what: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 0
        if (what, tenth) != self.told:
            self.told = what, tenth
            of = f": {done / 1e6:.1f} of {total / 1e6:.1f} MB" if total else ""
            print(what + of, file=self.stream, flush=True)


class _Lines:
    """One plain line per epoch."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.began = 0.0
        self.before: int | None = None  # epochs that were done before the first that is told

    def __call__(self, record: Record) -> None:
        if self.before is None:
            # What came before the first epoch, such as the measuring of layers, does not come again.
            self.before, self.began = record["done"] - 1, time.perf_counter() - record["seconds"]
        done, total = record["done"], record["total"]
        left = (time.perf_counter() - self.began) / (done - self.before) * (total - done)
        width = len(str(total))
        where = f"[{done:>{width}}/{total}] {_stage(record)}"
        print(f"{where:<32} {_facts(record)}  {_clock(left)} left", file=self.stream, flush=True)


def _stage(record: Record) -> str:
    cycle = f" {record['cycle']}" if record["cycle"] else ""
    return f"{record['phase']}{cycle}, epoch {record['epoch']}/{record['epochs']}"


def _facts(record: Record) -> str:
    which = "test" if record["validation_accuracy"] is None else "validation"
    accuracy = f"train {percent(record['train_accuracy'])}  {which} {percent(record[f'{which}_accuracy'])}"
    filters = f"{record['filters']}/{record['filters_total']}"
    return f"loss {record['loss']:.3f}  {accuracy}  filters {filters}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _rich() -> Any:
    try:
        return importlib.import_module("rich.progress")
    except ImportError:
        return None

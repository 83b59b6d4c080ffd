"""Rows of cells as lines of text, and numbers as a table on a terminal shows them.

Text enters, a line for each row leaves; with a frame around them where rich is installed to draw it.

What goes on while something runs: a bar where rich is installed, else one plain line per epoch.

Records of a run, or bytes of a transfer, enter; text leaves on stderr, so that stdout holds results alone.

How the command speaks, and that only one of several processes does: torchrun starts it many times.

Lines, and what torchrun has written in the environment, enter; text on stderr, silence, or a refusal leaves.
Nothing here imports torch.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from ..errors import PruningError, RunError
from ..utils.formatting import rounded


def table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Rows as lines with aligned columns, "<" to the left or ">" to the right.

    >>> table([["a", "10"], ["bc", "7"]], "<>")
    ['a   10', 'bc   7']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(align))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    ]


def boxed(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """The same as `table`, drawn by rich if it is there."""
    try:
        drawn, console = (importlib.import_module(f"rich.{name}") for name in ("table", "console"))
    except ImportError:
        return table(rows, align)
    box = drawn.Table(header_style="bold")
    for head, side in zip(rows[0], align, strict=True):
        box.add_column(head, justify="left" if side == "<" else "right", no_wrap=True)
    for row in rows[1:]:
        box.add_row(*row)
    width = max(len(line) for line in table(rows, align)) + 4 * len(align)
    out = console.Console(width=width, force_terminal=True, file=io.StringIO())
    with out.capture() as said:
        out.print(box)
    text: str = said.get()
    return text.rstrip("\n").splitlines()


def percent(value: float | None) -> str:
    """An accuracy, or a dash where there is none."""
    return "-" if value is None else f"{rounded(value, 2)} %"


def share(part: float, digits: int = 1) -> str:
    """A part of the whole, in percent."""
    return f"{rounded(100 * part, digits)}%"


def change(before: float, after: float) -> str:
    """By how much a number changed, in percent; a dash where there was none."""
    sign = "+" if after >= before else ""
    return f"{sign}{rounded(100 * (after / before - 1))} %" if before else "-"


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
            from ..report.live import tensorboard_log

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


def is_first() -> bool:
    """Is this the process that speaks?"""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def one_voice() -> Iterator[None]:
    """While entered, all processes but the first are silent."""
    if is_first():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def told(*, quiet: bool) -> Iterator[None]:
    """While entered, what the package logs is said on stderr, a line each: warnings, and how training goes on.

    If asked to be quiet, nothing is: without a handler, logging would write warnings there by itself.
    """
    package, training = logging.getLogger("sbf_pruner"), logging.getLogger("sbf_pruner.training")
    handler = logging.NullHandler() if quiet else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("sbf: %(message)s"))
    before = training.level
    try:
        package.addHandler(handler)
        if not quiet:
            training.setLevel(logging.INFO)
        yield
    finally:
        package.removeHandler(handler)
        training.setLevel(before)


def check_shared(command: str) -> None:
    """Raise a RunError if several processes were started for what one of them does."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1 and command != "run":
        raise RunError(f"sbf {command} works in one process, and {count} were started; leave torchrun out")


def refused(error: PruningError) -> None:
    """Say what is wrong: once, whichever process has found it."""
    hidden = error.alone and not is_first()
    print(f"sbf: {error}", file=sys.__stderr__ if hidden else sys.stderr, flush=True)


def said(line: str) -> None:
    """Say how the work goes on; results alone are for stdout."""
    print(f"sbf: {line}", file=sys.stderr, flush=True)


def teller(*, quiet: bool) -> Callable[[str], None]:
    """What tells how the work goes on: nothing if asked to be quiet."""
    return (lambda line: None) if quiet else said


def failed(error: Exception) -> bool:
    """Say in a line what the machine has refused, if that is known, and the remedy where there is one."""
    if _lost_another(error):
        said("another process of this run has ended, and this one cannot go on alone")
    elif lacks_memory(error):
        said(f"not enough memory ({' '.join(str(error).split())}); ask for less")
    elif isinstance(error, OSError) and is_first():  # of another process it would be lost
        full = error.errno == errno.ENOSPC or "No space left" in str(error)
        line = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        said(f"{line}; make room, then go on (a run: with --resume)" if full else line)
    else:
        return False
    return True


def _lost_another(error: Exception) -> bool:
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and any(word in str(error) for word in ("onnection closed", "onnection reset", "Broken pipe"))


def lacks_memory(error: Exception) -> bool:
    """Did something not fit into memory?  torch has a kind of error for a GPU's alone, and words for the rest."""
    return isinstance(error, MemoryError) or any(f"{word} memory" in str(error) for word in ("out of", "allocate"))

"""Terminal output of the `sbf` command: tables, progress bars, and messages on stderr.

stdout is for results only, so progress and messages go to stderr. Tables and bars are drawn by rich if it is
installed, else they are plain lines. Of the processes that torchrun starts, only rank 0 prints. Importing this
module does not import torch.
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
from ..utils.formatting import format_percentage


def table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Format rows as lines with aligned columns, "<" to the left or ">" to the right.

    >>> table([["a", "10"], ["bc", "7"]], "<>")
    ['a   10', 'bc   7']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(align))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in rows
    ]


def boxed(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Format rows, the first being the header, with a frame if rich is installed, else like `table`."""
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
    """Format an accuracy, or a dash for None."""
    return "-" if value is None else f"{format_percentage(value, 2)} %"


def share(part: float, digits: int = 1) -> str:
    """Format a fraction as a percentage."""
    return f"{format_percentage(100 * part, digits)}%"


def change(before: float, after: float) -> str:
    """Format a relative change in percent, or a dash if the number was zero before."""
    sign = "+" if after >= before else ""
    return f"{sign}{format_percentage(100 * (after / before - 1))} %" if before else "-"


Record = dict[str, Any]


@contextmanager
def progress(
    total: int, *, quiet: bool = False, stream: TextIO | None = None
) -> Iterator[Callable[[Record], None]]:
    """Yield a function that shows the record of an epoch.

    It updates a bar if rich is installed and the stream is a terminal, and prints a line otherwise.
    """
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
def with_monitors(
    report: Callable[[Record], None], folder: Path, *, live: str | None, tensorboard: bool, fresh: bool
) -> Iterator[Callable[[Record], None]]:
    """Yield a function that calls `report` and writes TensorBoard events, and serve the live page, as requested."""
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
    """Yield a function to call as bytes arrive, with a description, the bytes done and the total (0: unknown)."""
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
    """Print one plain line per description, and one for every tenth of a transfer."""

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
    """Print one plain line per epoch, with the time left."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.began = 0.0
        self.before: int | None = None  # number of epochs done before the first one shown

    def __call__(self, record: Record) -> None:
        if self.before is None:
            # Start the clock at the first epoch: work before it, such as measuring layers, does not recur.
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
    """Return True in the process of rank 0, the only one that prints."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def silence_other_ranks() -> Iterator[None]:
    """Silence stdout and stderr of all ranks but 0 while the context is open."""
    if is_first():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


@contextmanager
def log_to_stderr(*, quiet: bool) -> Iterator[None]:
    """Print the package's log records on stderr while the context is open: warnings, and the progress of training.

    With `quiet`, a null handler is installed instead: without any handler, logging prints warnings by itself.
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


def check_single_process(command: str) -> None:
    """Raise a RunError if several processes were started for a command other than `run`."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1 and command != "run":
        raise RunError(f"sbf {command} works in one process, and {count} were started; leave torchrun out")


def print_error(error: PruningError) -> None:
    """Print an error once, whichever rank found it.

    An error that only this rank can have (`alone`) goes to the original stderr if the current one was silenced by
    `silence_other_ranks`.
    """
    hidden = error.alone and not is_first()
    print(f"sbf: {error}", file=sys.__stderr__ if hidden else sys.stderr, flush=True)


def print_message(line: str) -> None:
    """Print a message on stderr."""
    print(f"sbf: {line}", file=sys.stderr, flush=True)


def message_printer(*, quiet: bool) -> Callable[[str], None]:
    """Return the function that prints progress messages; it prints nothing if `quiet`."""
    return (lambda line: None) if quiet else print_message


def report_machine_failure(error: Exception) -> bool:
    """Print a line about a known failure of the machine (lost process, memory, disk); return False if unknown."""
    if _lost_another(error):
        print_message("another process of this run has ended, and this one cannot go on alone")
    elif lacks_memory(error):
        print_message(f"not enough memory ({' '.join(str(error).split())}); ask for less")
    elif isinstance(error, OSError) and is_first():  # on other ranks the message would be silenced
        full = error.errno == errno.ENOSPC or "No space left" in str(error)
        line = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        print_message(f"{line}; make room, then go on (a run: with --resume)" if full else line)
    else:
        return False
    return True


def _lost_another(error: Exception) -> bool:
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and any(word in str(error) for word in ("onnection closed", "onnection reset", "Broken pipe"))


def lacks_memory(error: Exception) -> bool:
    """Return True if the error is an out-of-memory error.

    torch has an error class for those of a GPU only, so the message is searched.
    """
    return isinstance(error, MemoryError) or any(f"{word} memory" in str(error) for word in ("out of", "allocate"))

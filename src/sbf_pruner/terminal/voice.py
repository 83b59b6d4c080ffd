"""How the command speaks, and that only one of several processes does: torchrun starts it many times.

Lines, and what torchrun has written in the environment, enter; text on stderr, silence, or a refusal leaves.
Nothing here imports torch.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from ..errors import PruningError, RunError


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

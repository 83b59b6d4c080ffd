"""Exceptions for errors that a user can fix, and helpers for their messages.

Every message is one sentence that says what is wrong, where (the layer's qualified name, the file and line, the
recipe key), and what to do about it. The command line turns each `PruningError` into exit code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PruningError(Exception):
    """Base class of errors that the user can fix; the message names the cause and the remedy."""

    alone = False  # True if only one rank raises it, so that any rank prints its message


class TraceError(PruningError):
    """The model cannot be traced with the given example inputs."""


class PlanError(PruningError):
    """The plan does not fit the network, or would disconnect its outputs from its inputs."""


class RecipeError(PruningError):
    """A key or value of a recipe is invalid."""


class DataError(PruningError):
    """Data is missing, corrupt, or does not fit the recipe."""


class RunError(PruningError):
    """A run cannot start or continue, or its files cannot be trusted."""


class VersionError(RunError):
    """A file was written by a newer version of the package."""


class Stopped(KeyboardInterrupt):
    """A run was stopped by `signal`; `saved` says what checkpoint was written, or is empty if none was."""

    def __init__(self, signal: int, saved: str = "") -> None:
        super().__init__(saved or "stopped by a signal")
        self.signal, self.saved = signal, saved


def check_version(found: object, expected: str, what: object) -> None:
    """Raise a VersionError if `found` is a newer version of the file format `expected`, "sbf-pruner KIND NUMBER".

    >>> check_version("sbf-pruner plan 1", "sbf-pruner plan 2", "plan.json")
    >>> check_version("sbf-pruner plan 2", "sbf-pruner plan 1", "plan.json")
    Traceback (most recent call last):
    sbf_pruner.errors.VersionError: plan.json has the format 'sbf-pruner plan 2', and this version of sbf-pruner \
reads up to 'sbf-pruner plan 1'; update sbf-pruner
    """
    (kind, _, number), (known_kind, _, known) = str(found).rpartition(" "), expected.rpartition(" ")
    if kind == known_kind and number.isdecimal() and int(number) > int(known):
        raise VersionError(
            f"{what} has the format {found!r}, and this version of sbf-pruner reads up to {expected!r}; update "
            "sbf-pruner"
        )


def suggestion(word: str, choices: Iterable[str]) -> str:
    """Return the end of an error message: the valid choice closest to `word`, or all of them.

    >>> suggestion("epoch", ["epochs", "seed"])
    "did you mean 'epochs'?"
    >>> suggestion("zzz", ["epochs", "seed"])
    'known: epochs, seed'
    """
    known = list(choices)
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(known)

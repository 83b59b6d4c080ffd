"""The few kinds of failure a user can meet.

Every message is one sentence that says what is wrong, where (the layer's qualified name, the file and
line, the recipe key), and what to do about it.  The command turns each of these into exit code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PruningError(Exception):
    """Something the user can repair; the message names the cause and the remedy."""

    alone = False  # of several processes it is known to this one only


class TraceError(PruningError):
    """The model could not be followed with the given example inputs."""


class PlanError(PruningError):
    """A plan that does not fit the network, or that would cut it in two."""


class RecipeError(PruningError):
    """A recipe key or value that makes no sense."""


class DataError(PruningError):
    """Data that is missing, broken, or does not fit the recipe."""


class RunError(PruningError):
    """A run that cannot start, go on, or be trusted."""


class Stopped(KeyboardInterrupt):
    """A run was stopped by SIGINT or SIGTERM; `saved` says where, if a checkpoint was written there."""

    def __init__(self, signal: int, saved: str = "") -> None:
        super().__init__(saved or "stopped by a signal")
        self.signal, self.saved = signal, saved


def nearest(word: str, choices: Iterable[str]) -> str:
    """A closing half-sentence that suggests the nearest valid choice, or lists them all.

    >>> nearest("epoch", ["epochs", "seed"])
    "did you mean 'epochs'?"
    >>> nearest("zzz", ["epochs", "seed"])
    'known: epochs, seed'
    """
    known = list(choices)
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(known)

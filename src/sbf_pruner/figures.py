"""Percentages that do not round to a lie, and lists that do not run on.  Numbers or names enter, text leaves.

What holds: nothing is written as 0 or 100 that is not, so that no reader takes a little for nothing, or nearly all
for all.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST_DIGITS = 12


def rounded(percentage: float, digits: int = 1) -> str:
    """A percentage with so many decimals, or with more where it would look like none or all and is neither.

    >>> [rounded(value) for value in (42.37, 0.04, 99.97, -99.96, 0, 100)]
    ['42.4', '0.04', '99.97', '-99.96', '0.0', '100.0']
    >>> rounded(0.23, 0), rounded(99.6, 0), rounded(1e-20)
    ('0.2', '99.6', '1e-20')
    """
    for places in range(digits, _MOST_DIGITS):
        said = f"{percentage:.{places}f}"
        if float(said) == percentage or abs(float(said)) not in (0, 100):
            return said
    return f"{percentage:.1g}" if abs(percentage) < 1 else f"{percentage:.{digits}f}"


def counted(count: int, what: str) -> str:
    """A number of things, in words.

    >>> counted(1, "thread"), counted(2, "thread")
    ('1 thread', '2 threads')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def some(names: Sequence[str], most: int) -> str:
    """The first few names, and how many more there are.

    >>> some(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest

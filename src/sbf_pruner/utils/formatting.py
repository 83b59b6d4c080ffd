"""Format numbers, percentages, times and lists of names for people.

`format_percentage` never prints a percentage as 0 or 100 unless it is exactly that. Missing values (None) are
printed as a dash.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST_DIGITS = 12


def format_percentage(percentage: float, digits: int = 1) -> str:
    """Format a percentage with `digits` decimals, or more where it would wrongly round to 0 or 100.

    >>> [format_percentage(value) for value in (42.37, 0.04, 99.97, -99.96, 0, 100)]
    ['42.4', '0.04', '99.97', '-99.96', '0.0', '100.0']
    >>> format_percentage(0.23, 0), format_percentage(99.6, 0), format_percentage(1e-20)
    ('0.2', '99.6', '1e-20')
    """
    for decimals in range(digits, _MOST_DIGITS):
        text = f"{percentage:.{decimals}f}"
        if float(text) == percentage or abs(float(text)) not in (0, 100):
            return text
    return f"{percentage:.1g}" if abs(percentage) < 1 else f"{percentage:.{digits}f}"


def pluralize(count: int, what: str) -> str:
    """Format a count with its noun, in the plural unless the count is 1.

    >>> pluralize(1, "thread"), pluralize(2, "thread")
    ('1 thread', '2 threads')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def first_names(names: Sequence[str], most: int) -> str:
    """Join the first `most` names, followed by the number of the rest.

    >>> first_names(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


DASH = "\u2013"
MINUS = "\u2212"


def percent(value: float | None, digits: int = 2) -> str:
    """Format a percentage with a percent sign, rounded as by `format_percentage`.

    >>> percent(93.456), percent(0.2, 0), percent(None)
    ('93.46 %', '0.2 %', '–')
    """
    return DASH if value is None else f"{format_percentage(value, digits)} %"


def count(value: float | None) -> str:
    """Format a whole number with thousands separators.

    >>> count(853018)
    '853,018'
    """
    return DASH if value is None else f"{value:,.0f}"


def si_number(value: float | None, unit: str = "") -> str:
    """Format a large number with three digits and an SI prefix.

    >>> si_number(853018), si_number(125485696), si_number(1234, "B"), si_number(12)
    ('853 k', '125 M', '1.23 kB', '12')
    """
    if value is None:
        return DASH
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            part = value / size
            digits = 0 if part >= 100 else 1 if part >= 10 else 2
            return f"{part:.{digits}f} {letter}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def signed(value: float, digits: int = 1, unit: str = "") -> str:
    """Format a difference with its sign.

    >>> signed(-54.7, unit=" %"), signed(0.04)
    ('−54.7 %', '±0.0')
    """
    rounded = round(value, digits)
    sign = "+" if rounded > 0 else MINUS if rounded < 0 else "\u00b1"
    return f"{sign}{abs(value):.{digits}f}{unit}"


def change(before: float | None, after: float | None) -> str:
    """Format the relative change from `before` to `after` in percent.

    >>> change(200, 150), change(10000, 2), change(7, 7), change(None, 3)
    ('−25.0 %', '−99.98 %', '±0.0 %', '–')
    """
    if not before or after is None:
        return DASH
    sign = "\u00b1" if after == before else "+" if after > before else MINUS
    return f"{sign}{format_percentage(100 * abs(after / before - 1))} %"


def milliseconds(value: float | None) -> str:
    """Format a time given in milliseconds.

    >>> milliseconds(5.213)
    '5.21 ms'
    """
    return DASH if value is None else f"{value:.{2 if value < 100 else 0}f} ms"


def duration(seconds: float) -> str:
    """Format a time given in seconds, in hours, minutes and seconds.

    >>> duration(75), duration(7400), duration(9)
    ('1 min 15 s', '2 h 3 min', '9 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def scientific(value: float | None) -> str:
    """Format a number near zero in scientific notation.

    >>> scientific(4.816e-16), scientific(0.0)
    ('4.8e-16', '0')
    """
    return DASH if value is None else "0" if value == 0 else f"{value:.1e}"

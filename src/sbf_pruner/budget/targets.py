"""Budgets, and limits on parameters, MACs, file size and latency.

A `Budget` holds fractions or amounts. `Budget.limits` converts them to amounts (`Limits`), given the cost of the
dense network. A limit is at most that cost, and the limits of an earlier stage of training are at least the budget.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import PruningError, suggestion
from ..utils.settings import Section, setting

Usage = Mapping[str, float]  # what a network uses of each resource

MICROSECONDS = 1e6  # per second; in microseconds no latency is below 1, so numbers up to 1 are fractions
LATENCY_TOLERANCE = 0.05  # fraction of the target latency by which it may be exceeded without being reported
TOLERANCE = 0.01  # fraction of the dense network: a limit with no more room than this counts as used up


_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
_NUMBER = r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
_WRITTEN = re.compile(_NUMBER + r"\s*(%|[kmg]?i?)(b?)")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "\N{MICRO SIGN}s": 1e-6, "\N{GREEK SMALL LETTER MU}s": 1e-6}
_TIME = re.compile(f"{_NUMBER}\\s*({'|'.join(_SECONDS)})")


def is_missed(target: float, measured: float | None) -> bool:
    """Return True if a latency was measured and exceeds its target by more than `LATENCY_TOLERANCE`."""
    return measured is not None and measured > (1 + LATENCY_TOLERANCE) * target


RESOURCES = ("params", "macs", "size", "latency")


@dataclass(frozen=True, init=False)
class Budget(Section):
    """Upper limits on the resources of a network, given as text as on the command line, or as numbers.

    Text has a unit: "50%", "60M", "1MB", "5ms". A number up to 1 is a fraction of the dense network, a larger one
    an amount, in microseconds for a latency. The fields hold numbers in either case.

    >>> Budget(macs="50%", size="1.5MB", latency="5ms")
    Budget(params=1.0, macs=0.5, size=1500000.0, latency=5000.0)
    >>> Budget(macs=0.5, size=2e5).limits({"params": 100_000, "macs": 1e6, "size": 400_000}).most
    {'macs': 500000.0, 'size': 200000.0}
    """

    params: float = setting(
        1.0, "parameters to keep at most: a share such as 0.4, or a number such as 350e3", above=0
    )
    macs: float = setting(
        1.0, "MACs of a sample to keep at most: a share such as 0.5, or a number such as 60e6", above=0
    )
    size: float = setting(
        1.0, "size of the weights file to keep at most: a share such as 0.5, or bytes such as 1e6", above=0
    )
    latency: float = setting(
        1.0, "latency of a pass to keep at most: a share such as 0.6, or microseconds such as 5000", above=0
    )

    def __init__(
        self,
        *,
        params: float | str = 1.0,
        macs: float | str = 1.0,
        size: float | str = 1.0,
        latency: float | str = 1.0,
    ) -> None:
        for name, given in zip(RESOURCES, (params, macs, size, latency), strict=True):
            object.__setattr__(self, name, _amount(name, given))

    @property
    def asked(self) -> bool:
        """Return True if any resource is limited."""
        return any(getattr(self, name) != 1 for name in RESOURCES)

    def limits(self, whole: Usage) -> Limits:
        """Return the limits as amounts, for a dense network that uses `whole`."""
        wanted = {name: value for name in RESOURCES if (value := getattr(self, name)) != 1}
        most = {name: value * whole[name] if value < 1 else value for name, value in wanted.items()}
        return Limits({name: min(value, whole[name]) for name, value in most.items()}, dict(whole))

    @classmethod
    def parse(cls, texts: list[str]) -> Budget:
        """Parse targets in the notation of the command line.

        >>> Budget.parse(["macs=50%", "size=1.5MB"]) == Budget(macs="50%", size="1.5MB")
        True
        """
        found: dict[str, float] = {}
        for text in texts:
            name, _, value = (part.strip() for part in text.partition("="))
            if name not in RESOURCES:
                raise PruningError(
                    f"target {text!r}: write NAME=SIZE, such as macs=0.5; {suggestion(name, RESOURCES)}"
                )
            if name in found:
                raise PruningError(f"target {name} is given twice; give each target once")
            found[name] = _number(text, name, value)
            if found[name] == 1:
                raise PruningError(
                    f"target {text!r} keeps the whole network; give a smaller target, or leave it out"
                )
        return cls(**found)


_EXAMPLES = {"params": "400k", "macs": "60M", "size": "1MB", "latency": "5ms"}


def _amount(name: str, given: float | str) -> float:
    value = _number(f"{name}={given}", name, given.strip()) if isinstance(given, str) else given
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not 0 < found < math.inf:  # also true for NaN
        raise PruningError(
            f"{name}: give a fraction to keep (0.5) or an amount above 1 ({_EXAMPLES[name]}), not {given!r}"
        )
    return found


def _number(text: str, name: str, value: str) -> float:
    """Parse `value`; `text` is the whole target, for error messages."""
    value = value.lower()
    if name == "latency" and (time := _TIME.fullmatch(value)):
        seconds = float(time[1]) * _SECONDS[time[2]]
        if not math.isfinite(seconds):
            raise PruningError(f"target {text!r}: not a valid time; write it like latency={_EXAMPLES['latency']}")
        if seconds <= 1 / MICROSECONDS:
            raise PruningError(f"target {text!r}: no network runs in a microsecond; give a longer time")
        return MICROSECONDS * seconds
    match = _WRITTEN.fullmatch(value)
    scale, byte = (match[2], match[3]) if match else ("?", "")
    if name == "latency" and match is not None and (scale not in ("", "%") or (not scale and float(match[1]) > 1)):
        match = None  # a latency that is not a fraction needs a unit of time
    if match is None or (byte and name != "size") or scale not in (*_SCALES, "%"):
        raise PruningError(
            f"target {text!r}: write a fraction such as {name}=0.5 or {name}=50%, or a number such as "
            f"{name}={_EXAMPLES[name]}"
        )
    number = float(match[1]) * (0.01 if scale == "%" else _SCALES[scale])
    if not number or not math.isfinite(number) or (scale == "%" and number > 1):
        raise PruningError(f"target {text!r}: must be above 0 and at most 100% of the network")
    if number <= 1 and (byte or scale not in ("", "%")):
        raise PruningError(
            f"target {text!r}: no network is that small; give a larger number, or a fraction ({name}=50%)"
        )
    return number


@dataclass(frozen=True)
class Limits:
    """Upper limits on the resources of a network, as amounts, and what the dense network uses."""

    most: dict[str, float]
    whole: dict[str, float]

    def eased(self, progress: float) -> Limits:
        """Interpolate from the dense network at progress 0 to these limits at progress 1.

        >>> Limits({"macs": 50.0}, {"macs": 100.0}).eased(0.5).most
        {'macs': 75.0}
        """
        share = min(max(progress, 0.0), 1.0)
        return Limits({n: self.whole[n] + share * (v - self.whole[n]) for n, v in self.most.items()}, self.whole)

    def hold(self, usage: Usage) -> bool:
        """Return True if a network with this usage exceeds no limit."""
        return all(usage[name] <= value for name, value in self.most.items())

    def room(self, usage: Usage) -> dict[str, float]:
        """Return limit minus usage by resource, as fractions of the dense network; negative above the limit."""
        return {name: (value - usage[name]) / self.whole[name] for name, value in self.most.items()}

    def broken(self, usage: Usage) -> list[str]:
        """Return the names of the resources whose limits a network with this usage exceeds."""
        return [name for name, value in self.most.items() if usage[name] > value]

    def told(self, name: str, usage: Usage, up: bool = False) -> str:
        """Format the amount of a resource; if `up` is true, round up, so that it is reachable as a target.

        >>> Limits({}, {"macs": 2e6}).told("macs", {"macs": 5e5})
        '500,000 macs (25.0%)'
        >>> Limits({}, {"latency": 8e3}).told("latency", {"latency": 1234.1}, up=True)
        '1.24 ms (15.5%)'
        """
        rounded = math.ceil if up else round
        part = _written(100 * usage[name] / self.whole[name], rounded, 1)
        if name == "latency":
            return f"{_written(1e3 * usage[name] / MICROSECONDS, rounded)} ms ({part}%)"
        unit = "bytes" if name == "size" else name
        amount = _written(usage[name], rounded, 0) if up or usage[name] > 10 else f"{usage[name]:g}"
        return f"{amount} {unit} ({part}%)"


def _written(number: float, rounded: Callable[[float], int], places: int | None = None) -> str:
    """Format a number with three significant digits, or with `places` decimals and at least two significant digits.

    >>> [_written(*given) for given in ((1234.5, math.ceil, 0), (0.00123, math.ceil, 1), (12.341, round))]
    ['1,235', '0.0013', '12.3']
    """
    first = math.floor(math.log10(number)) if number > 0 else 0
    found = 2 - first if places is None else max(places, 1 - first if first < 0 else 0)
    scale = 10.0**found
    return f"{rounded(number * scale * (1 - 1e-12)) / scale:,.{max(found, 0)}f}"

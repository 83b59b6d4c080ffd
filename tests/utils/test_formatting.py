"""Percentages: what is neither nothing nor all is not written so."""

from __future__ import annotations

import pytest

from sbf_pruner.cli import output
from sbf_pruner.utils import format_percentage, formatting


@pytest.mark.parametrize("digits", [0, 1, 2])
@pytest.mark.parametrize("away", [10.0**-n for n in range(10)])
def test_only_nothing_is_nothing_and_only_all_is_all(away: float, digits: int) -> None:
    for value in (away, -away, 100 - away, 100 + away, -100 + away):
        said = float(format_percentage(value, digits))
        assert said not in (0, 100, -100)
        assert abs(said - value) <= max(0.5 * 10**-digits, 0.5 * away)
    assert [float(format_percentage(value, digits)) for value in (0, 100, -100)] == [0, 100, -100]


def test_the_page_and_the_terminal_tell_the_same() -> None:
    for before, after in ((200, 150), (10_000, 1), (10_000, 9_999), (1_000_000, 1_000_001), (3, 3), (2, 4)):
        page = formatting.change(before, after).replace(formatting.MINUS, "-").replace("\u00b1", "+")
        assert page == output.change(before, after)
    assert formatting.change(10_000, 1).replace(formatting.MINUS, "-") == "-99.99 %"
    for value in (0.004, 50.0, 99.996):
        assert formatting.percent(value) == output.percent(value)
    assert output.share(0.0004) == "0.04%"

"""Of many cases that differ in detail, those that are tried by default; the others wait for `make slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All `cases` for `parametrize`, and those that are not `quick` marked as slow."""
    held = list(cases)
    assert all(case in held for case in quick)
    values = [case if isinstance(case, tuple) else (case,) for case in held]
    marks = [() if case in quick else pytest.mark.slow for case in held]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]

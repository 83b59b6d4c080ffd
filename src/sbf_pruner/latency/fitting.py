"""A few coefficients, none below zero, that make sums of terms come to what was measured.

Rows of terms with measured seconds enter; coefficients leave.  It is the relative error that is made small, so a
quick network counts as much as a slow one.  What holds: the result is a least-squares one among all that have no
negative coefficient (a millisecond that an operator gives back does not exist).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Row = Mapping[str, float]


_ROUNDS = 20
PULL = 1.0  # towards what is expected: as much as one network more
ORDINARY = 0.03  # an error larger than this counts in proportion, not as its square: a machine may have hiccups


def fit(
    rows: Sequence[Row], seconds: Sequence[float], terms: Sequence[str], expected: Row | None = None
) -> dict[str, float]:
    """The coefficients of the terms; those that the rows say little about stay near what is expected.

    >>> found = fit([{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 2.0}], [3.0, 4.0], ["a", "b"])
    >>> {name: round(value, 6) for name, value in found.items()}
    {'a': 3.0, 'b': 0.5}
    """
    wanted = np.asarray(seconds, float)
    matrix = np.array([[row.get(name, 0.0) for name in terms] for row in rows]) / wanted[:, None]
    ones = np.ones(len(wanted))
    scale = np.maximum(np.abs(matrix).mean(axis=0), 1e-300)
    matrix = matrix / scale  # now a coefficient is the part of a usual network's time that its term makes
    pulled, towards = np.zeros((0, len(terms))), np.zeros(0)
    if expected is not None:
        pulled = PULL * np.eye(len(terms))
        towards = PULL * np.array([expected.get(name, 0.0) for name in terms]) * scale
    weights = np.ones(len(wanted))
    for _ in range(_ROUNDS):
        found = nonnegative(
            np.concatenate([matrix * weights[:, None], pulled]), np.concatenate([ones * weights, towards])
        )
        weights = np.sqrt(ORDINARY / np.maximum(np.abs(matrix @ found - ones), ORDINARY))
    return {name: float(value) for name, value in zip(terms, found / scale, strict=True)}


def nonnegative(matrix: NDArray[np.floating], wanted: NDArray[np.floating]) -> NDArray[np.floating]:
    """Least squares without negative numbers (Lawson and Hanson's active set)."""
    size = matrix.shape[1]
    free = np.zeros(size, bool)
    found = np.zeros(size)
    for _ in range(10 * size):
        slope = matrix.T @ (wanted - matrix @ found)
        slope[free] = -np.inf
        best = int(slope.argmax())
        if slope[best] <= 1e-9:
            break
        free[best] = True
        while True:
            tried = np.zeros(size)
            tried[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
            if (tried[free] > 0).all():
                found = tried
                break
            low = free & (tried <= 0)
            step = np.min(found[low] / np.maximum(found[low] - tried[low], 1e-300))
            found = found + step * (tried - found)
            free &= found > 1e-12
            if not free.any():
                break
    return found

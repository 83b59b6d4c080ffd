"""Scores that were not learned here: one number for each filter, from whoever ranks filters.

Any numbers enter, the higher the better; the same in order, between 0 and 1 and in double precision, leave.  What
does not fit the network is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..errors import PruningError

Given = Mapping[str, Tensor | NDArray[np.floating]]


def comparable(given: Given, filters: Mapping[str, int]) -> dict[str, NDArray[np.floating]]:
    """Scores for exactly these layers, scaled alike.

    >>> comparable({"conv": np.array([-1.0, 0.0, 3.0])}, {"conv": 3})
    {'conv': array([0.  , 0.25, 1.  ])}
    """
    if not isinstance(given, Mapping):
        raise PruningError(
            f"scores are wanted by layer, {{name: one for each filter}}, not as {type(given).__name__}"
        )
    if wrong := sorted(given.keys() ^ filters.keys()):
        raise PruningError(f"scores are wanted for exactly the layers that can be pruned; look at {wrong[0]}")
    values = {name: _doubles(given[name]) for name in filters}
    for name, count in filters.items():
        if values[name].shape != (count,) or not np.isfinite(values[name]).all():
            raise PruningError(f"{name}: {count} finite scores are wanted, one for each filter")
    largest = max(float(np.abs(each).max()) for each in values.values()) or 1.0
    # Where limits are weighed against each other scores are divided, so none is below 0.
    least = min(0.0, *(float((each / largest).min()) for each in values.values()))
    values = {name: each / largest - least for name, each in values.items()}
    highest = max(float(each.max()) for each in values.values()) or 1.0
    return {name: each / highest for name, each in values.items()}


def _doubles(given: Tensor | NDArray[np.floating]) -> NDArray[np.floating]:
    return np.array(given.detach().double().cpu().numpy() if isinstance(given, Tensor) else given, np.float64)

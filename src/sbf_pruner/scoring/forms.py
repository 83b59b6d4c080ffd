"""The forms of the pruner layer, by the name a recipe or a caller gives."""

from __future__ import annotations

from collections.abc import Callable

from .factored import FactoredProjection
from .free import FreeProjection
from .literal import LiteralProjection
from .projection import Projection

PROJECTIONS: dict[str, Callable[..., Projection]] = {
    "factored": FactoredProjection,
    "literal": LiteralProjection,
    "free": FreeProjection,
}

"""The penalty's strength, steered so that the scores themselves come to the size that was asked for.

Again and again the score enters that would separate what stays from what goes at the size asked for; a strength
leaves.  At the end that score is to be the threshold of the gates: then landing moves nothing, and the gates are
the paper's.  On the way there it is to fall evenly, because scores move at a limited speed: a strength that grew
for as long as the threshold is far would drown everything the loss says.
"""

from __future__ import annotations

import math
from typing import Any

# Scores add up what pushes them, and a strength that added up errors alone would swing about the target, each time
# wider.  So it answers the change of the error first, and what is left of it more slowly.
CHANGE = 6.0
REST = 1.5
BOUND = 8.0  # the most it changes at once, as a factor
RANGE = 1e4  # the most it changes in all, as a factor: where it starts need not be known well


class Steering:
    """Follows a target with the strength of the penalty.

    >>> steering = Steering(1e-3, threshold=0.5)
    >>> steering.follow(level=0.9, progress=1.0) > 1e-3  # filters that must go score too high
    True
    """

    def __init__(self, strength: float, threshold: float) -> None:
        self.start = self.strength = strength
        self.threshold = threshold
        self.error = 0.0  # the last one; every score begins at 1, where it is wanted then

    def follow(self, level: float, progress: float) -> float:
        """The strength to go on with; `level` is where the cut would be, `progress` how far limits closed in."""
        wanted = 1 + (self.threshold - 1) * min(max(progress, 0.0), 1.0)
        error = math.log(max(level, 1e-6) / wanted)
        factor = math.exp(CHANGE * (error - self.error) + REST * error)
        self.error = error
        bounded = self.strength * min(max(factor, 1 / BOUND), BOUND)
        self.strength = min(max(bounded, self.start / RANGE), self.start * RANGE)
        return self.strength

    def state_dict(self) -> dict[str, Any]:
        """What following has changed."""
        return {"strength": self.strength, "error": self.error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.strength, self.error = state["strength"], state["error"]

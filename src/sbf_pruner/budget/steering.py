"""The penalty's strength, steered so that the scores themselves come to the size that was asked for.

Once in a while the score that would separate what stays from what goes enters; a strength leaves.  At the end
that score is to be the threshold of the gates: then landing moves nothing, and the gates are the paper's.  On
the way there it is to fall evenly, because scores move at a limited speed: a strength that grew for as long as
the threshold is far would drown everything the loss says.
"""

from __future__ import annotations

import math

GAIN = 1.0  # how much of the error, in logarithms, the strength takes up each time
BOUND = 2.0  # the most it changes at once, as a factor
RANGE = 100.0  # the most it changes in all, as a factor


class Steering:
    """Follows a target with the strength of the penalty.

    >>> steering = Steering(1e-3, threshold=0.5)
    >>> steering.follow(level=0.9, progress=1.0) > 1e-3  # filters that must go score too high
    True
    """

    def __init__(self, strength: float, threshold: float) -> None:
        self.start = self.strength = strength
        self.threshold = threshold

    def follow(self, level: float, progress: float) -> float:
        """The strength to go on with; `level` is where the cut would be, `progress` how far limits closed in."""
        wanted = 1 + (self.threshold - 1) * min(max(progress, 0.0), 1.0)
        error = math.log(max(level, 1e-6) / wanted)
        factor = min(max(math.exp(GAIN * error), 1 / BOUND), BOUND)
        self.strength = min(max(self.strength * factor, self.start / RANGE), self.start * RANGE)
        return self.strength

"""A plan's real time: the network cut as it says, in its fastest form, in turns with the dense one.

A dense network and conditions enter; for a plan the ratio of both times leaves, the median over pairs.  All forms
that `sbf bench` and `sbf export` would try are tried, of the dense network too.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import nn

from ..latency.model import Conditions
from ..plan import Plan
from ..surgery import extract
from ..timing import Interval, using_threads
from .whole import Pass, all_forms, passes, quickest, rehearse, time_pairs

PAIRS = 40
SURE = 0.04  # of the ratio: how wide its interval may be
PATIENCE = 3  # times that pairs are taken, each time twice as many, if it is wider


class Pairs:
    """Times plans beside the dense network."""

    def __init__(self, network: nn.Module, example: Any, conditions: Conditions) -> None:
        self.network, self.example, self.conditions = network, example, conditions

    def rehearse(self) -> None:
        """Is all there that timing needs?  One sentence of what stands in the way if not."""
        rehearse(self.network, self.example, self.conditions)

    def ratio(self, plan: Plan) -> float:
        """What is left of the dense network's time, from more pairs where the machine is not quiet."""
        with using_threads(self.conditions.threads):
            compact = self._compact(plan)
            for more in range(PATIENCE):
                found = time_pairs(self._dense, compact, PAIRS * 2**more)
                if found.high - found.low <= SURE * found.median:
                    break
        return found.median

    def interval(self, plan: Plan, pairs: int) -> Interval:
        """What is left of the dense network's time, and how sure that is."""
        with using_threads(self.conditions.threads):
            return time_pairs(self._dense, self._compact(plan), pairs)

    def _compact(self, plan: Plan) -> Pass:
        return self._quickest(extract(self.network, self.example, plan))

    @cached_property
    def _dense(self) -> Pass:
        return self._quickest(self.network)

    def _quickest(self, network: nn.Module) -> Pass:
        held = self.conditions
        made = passes(network.eval(), self.example, all_forms(held.runtime), held.runtime, held.batch, held.threads)
        return quickest(made)

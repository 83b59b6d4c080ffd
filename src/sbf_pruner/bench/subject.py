"""What is timed: a dense network and the compact one that a plan leaves of it.

A run's folder, or a network with a plan, enters; both networks leave in evaluation mode, with an example of
their inputs.  The dense network of a run has fresh weights, because a run keeps the small one alone; how long
a pass takes does not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import PruningError
from ..inputs import made_up_inputs, map_tensors
from ..models import resolve
from ..plan import Plan
from ..surgery import extract
from ..training.finished import read_run


@dataclass(frozen=True)
class Subject:
    """Two networks that take the same inputs."""

    name: str
    dense: nn.Module
    compact: nn.Module
    example: Any

    @classmethod
    def of(cls, name: str, dense: nn.Module, compact: nn.Module) -> Subject:
        """A network and what `extract` made of it."""
        return cls(name, dense.eval(), compact.eval(), made_up_inputs(compact.sbf_inputs, 1))

    @classmethod
    def of_run(cls, path: str | Path, *, trust: bool = False) -> Subject:
        """The networks of a finished run; code that its recipe names is imported only with `trust`."""
        run = read_run(path, ", or a model with --plan", trust=trust)
        return cls.of(str(path), run.build(), run.small)

    @classmethod
    def of_plan(
        cls, name: str, shapes: Sequence[Sequence[int]], options: Mapping[str, Any], plan: str | Path
    ) -> Subject:
        """A network by its name, and what a plan in a file leaves of it."""
        try:
            read = Plan.load(plan)
        except OSError as error:
            raise PruningError(f"the plan {plan} cannot be read ({error.strerror or error}); name a file") from None
        torch.manual_seed(0)
        dense = resolve(name, **{"in_channels": shapes[0][0], **options})
        return cls.of(name, dense, extract(dense, tuple(torch.zeros(1, *shape) for shape in shapes), read))

    def inputs(self, batch: int) -> Any:
        """Made-up inputs, so many samples at once."""
        return made_up_inputs(self.example, batch)

    def shapes(self) -> list[list[int]]:
        """The sizes of one sample of every input."""
        found: list[list[int]] = []
        map_tensors(self.example, lambda t: found.append(list(t.shape[1:])))
        return found

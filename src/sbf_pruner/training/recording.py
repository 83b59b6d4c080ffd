"""What a run writes down besides its metrics: the network it began with, its scores, and how blocks refine.

The networks of a run enter; `network.json` leaves when it begins, a line of `scores.jsonl` after every epoch
of scores.  They are read from the pruner between epochs, never inside a step.  A picture that cannot be made
is a reason written down, not a run lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..drawing.scene import compose, to_json
from ..environment import environment
from ..errors import PruningError
from ..files import write_text
from ..overview import inspect
from ..phases import Phase
from .folder import RunFolder
from .networks import Networks
from .refinement import joined, under_scores, when_pruned

Measured = TypeVar("Measured")


class Recording:
    """The network, the scores and the refinement of one run."""

    def __init__(self, folder: RunFolder, networks: Networks, images: Tensor, device: torch.device) -> None:
        self.folder, self.networks, self.images, self.device = folder, networks, images, device

    def begin(self) -> None:
        """Write down the network, if that has not been done."""
        if self.folder.network.is_file():
            return
        pruner = self.networks.pruner
        written: dict[str, Any] = {"environment": environment(self.device)}
        try:
            seen = inspect(pruner.model, self.images[:1], pruner.graph)
            written |= {"facts": seen.facts, "boxes": to_json(compose(seen))}
        except Exception as error:  # whatever a user's network does, it can still be trained
            written["undrawn"] = _told(error)
        write_text(self.folder.network, json.dumps(written) + "\n")

    def after_epoch(self, phase: Phase, done: int) -> None:
        """Write down the scores after an epoch of them, and after the last one what the gates let through."""
        if not phase.trains_scores:
            return
        pruner = self.networks.pruner
        scores = {name: [round(s, 3) for s in held.tolist()] for name, held in pruner.scores().items()}
        line: dict[str, Any] = {"done": done, "cycle": phase.cycle, "scores": scores}
        if done == phase.end:
            kept = self.networks.plan.widths()
            line["kept"] = {name: kept.get(name, len(held)) for name, held in scores.items()}
            measured, why = _tried(lambda: under_scores(pruner, self.images))
            line |= {"refinement": measured or [], **({"unmeasured": why} if why else {})}
        self.folder.append_scores(line)

    def finish(self, small: nn.Module) -> dict[str, Any]:
        """What the summary tells of layers left alone, and of the blocks' refinement at the end."""
        graph = self.networks.pruner.graph
        found: dict[str, Any] = next(
            (line for line in reversed(self.folder.read_scores()) if "refinement" in line), {}
        )
        pruned, why = _tried(lambda: when_pruned(self.networks.pruner, small, self.images))
        reasons = {"scored": found.get("unmeasured"), "pruned": why}
        return {
            "skipped": dict(graph.skipped),
            "refinement": joined(found.get("refinement", []), pruned or {}),
            "unmeasured": {which: reason for which, reason in reasons.items() if reason},
        }


def _tried(measure: Callable[[], Measured]) -> tuple[Measured | None, str]:
    """What was measured, or None and the reason: it is an analysis beside the run."""
    try:
        return measure(), ""
    except Exception as error:  # whatever a user's network does
        return None, _told(error)


def _told(error: Exception) -> str:
    said = " ".join(str(error).split())
    return said if isinstance(error, PruningError) else f"{type(error).__name__}: {said}"

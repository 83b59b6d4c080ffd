"""Structured filter pruning that learns one score per filter, from the filter weights, while the network trains."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .budget.constraints import Constraints
    from .budget.targets import Budget
    from .errors import PruningError
    from .graph.build import trace
    from .graph.channel_graph import ChannelGraph
    from .graph.operators import register_rule
    from .measurement.counts import measure
    from .plan import Plan
    from .pruner import Pruner
    from .saving import load, save
    from .scores.config import Scores
    from .surgery.extract import extract
    from .training.recipe import Recipe
    from .training.run import fit

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "ChannelGraph",
    "Constraints",
    "Plan",
    "Pruner",
    "PruningError",
    "Recipe",
    "Scores",
    "extract",
    "fit",
    "load",
    "measure",
    "register_rule",
    "save",
    "trace",
]

# Each name is imported on first use, so that `sbf --help` does not import torch.
_MODULES = {
    "Budget": "budget.targets",
    "ChannelGraph": "graph.channel_graph",
    "Constraints": "budget.constraints",
    "Plan": "plan",
    "Pruner": "pruner",
    "PruningError": "errors",
    "Recipe": "training.recipe",
    "Scores": "scores.config",
    "extract": "surgery.extract",
    "fit": "training.run",
    "load": "saving",
    "measure": "measurement.counts",
    "register_rule": "graph.operators",
    "save": "saving",
    "trace": "graph.build",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

"""Plan: which filters each layer keeps.

A `Plan` is plain data: training makes one, surgery applies it, reports print it, files store it as JSON. It names
only prunable layers; a layer that it does not name keeps all its filters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import PlanError, check_version, suggestion
from .graph.channel_graph import ChannelGraph
from .utils.files import write_text

_FORMAT = "sbf-pruner plan 1"
_WRITTEN = "sbf.Plan({'conv': [0, 2]}), with the filters that each layer keeps"


@dataclass(frozen=True)
class Plan:
    """Filters that each layer keeps.

    >>> plan = Plan({"conv1": [0, 2, 3]})
    >>> plan.widths()
    {'conv1': 3}
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    keep: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        if not isinstance(self.keep, Mapping):
            raise PlanError(f"a plan is made of a dict, not of {type(self.keep).__name__}; write {_WRITTEN}")
        checked = {name: _checked(name, kept) for name, kept in dict(self.keep).items()}
        object.__setattr__(self, "keep", MappingProxyType(checked))

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.keep.items())))

    def __reduce__(self) -> tuple[type[Plan], tuple[dict[str, tuple[int, ...]]]]:
        return Plan, (dict(self.keep),)

    def widths(self) -> dict[str, int]:
        """Return the number of filters that each layer keeps."""
        return {name: len(kept) for name, kept in self.keep.items()}

    @classmethod
    def from_masks(cls, masks: Mapping[str, NDArray[np.bool_]]) -> Plan:
        """Make a plan from one boolean mask per layer."""
        return cls({name: tuple(np.flatnonzero(mask).tolist()) for name, mask in masks.items()})

    def masks(self, graph: ChannelGraph) -> dict[str, NDArray[np.bool_]]:
        """Return one boolean mask per layer of a network; raise PlanError if the plan does not fit it."""
        for name, kept in self.keep.items():
            if name in graph.unscored:
                raise PlanError(f"{name} cannot be pruned: {graph.unscored[name]}; leave it out of the plan")
            if name not in graph.layers:
                hint = suggestion(name, graph.layers)
                raise PlanError(f"the plan names a layer the network does not have: {name!r}; {hint}")
            filters = graph.layers[name].filters
            beyond = [i for i in kept if i >= filters]
            if beyond:
                raise PlanError(
                    f"the plan keeps filter {beyond[0]} of {name}, which has {filters} (0 to {filters - 1}); "
                    "was it made for another network?"
                )
        masks = graph.all_filters()
        for name, kept in self.keep.items():
            masks[name][:] = False
            masks[name][list(kept)] = True
        return masks

    def then(self, later: Plan) -> Plan:
        """Compose with a plan made for the network that this one gives; the result applies to the original network.

        >>> Plan({"conv1": [1, 4, 6]}).then(Plan({"conv1": [0, 2]})).keep["conv1"]
        (1, 6)
        """
        keep = dict(self.keep)
        for name, kept in later.keep.items():
            mine = self.keep.get(name)
            if mine is not None and kept and max(kept) >= len(mine):
                raise PlanError(
                    f"{name}: the later plan keeps filter {max(kept)}, but this one keeps {len(mine)} filters; "
                    "make the later plan for the network that this plan gives"
                )
            keep[name] = tuple(kept) if mine is None else tuple(mine[i] for i in kept)
        return Plan(keep)

    def to_json(self) -> str:
        """Return the plan as JSON, one line per layer."""
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(list(k))}" for name, k in self.keep.items())
        return f'{{\n  "format": "{_FORMAT}",\n  "keep": {{\n{lines}\n  }}\n}}\n'

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from JSON; raise PlanError if the text is no plan, VersionError if its format is newer."""
        try:
            written = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"the plan is not JSON (line {error.lineno}: {error.msg}); write it anew") from error
        if isinstance(written, dict):
            check_version(written.get("format"), _FORMAT, "the plan")
        known = isinstance(written, dict) and written.get("format") == _FORMAT
        if not known or not isinstance(written.get("keep"), dict):
            raise PlanError(f"this is no plan: expected an object with format {_FORMAT!r} and 'keep'")
        return cls(written["keep"])

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, atomically."""
        write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a JSON file; raise PlanError if the file does not contain one."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise PlanError(
                f"{path} is not a plan, because it is not a text file; name the JSON file of a plan"
            ) from None
        return cls.from_json(text)


def check_plan(plan: object) -> None:
    """Raise a PlanError if the argument is not a Plan, for example a dict."""
    if not isinstance(plan, Plan):
        raise PlanError(f"a plan is an sbf.Plan, not {type(plan).__name__}; write {_WRITTEN}")


def _checked(name: str, kept: Iterable[int]) -> tuple[int, ...]:
    entry = f"the plan's entry for {name}"
    try:
        given = list(kept)
        numbers = [int(i) for i in given if int(i) == i]
    except (TypeError, ValueError, OverflowError):  # OverflowError: an infinite number
        raise PlanError(f"{entry} is not a list of filter numbers") from None
    if any(map(_is_bool, given)):
        raise PlanError(
            f"{entry} holds True or False, not filter numbers; make a plan of masks with sbf.Plan.from_masks"
        )
    if len(numbers) != len(given):
        raise PlanError(f"{entry} holds something that is not a filter number")
    numbers.sort()
    for number, following in pairwise(numbers):
        if number == following:
            raise PlanError(f"the plan lists filter {number} of {name} twice; list each kept filter once")
    if numbers and numbers[0] < 0:
        raise PlanError(f"the plan keeps filter {numbers[0]} of {name}; filters are counted from 0")
    return tuple(numbers)


def _is_bool(given: object) -> bool:
    """Return True for a bool of Python, NumPy or PyTorch."""
    return isinstance(given, bool | np.bool_) or (isinstance(given, Tensor) and given.dtype == torch.bool)

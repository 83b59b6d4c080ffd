"""How a run was made: its resolved recipe, the machine and the versions, and what was left alone and why.

A run enters; figures without pictures leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..drawing.markup import Markup, element, together
from .chart import Figure, pairs
from .data import Run


def skipped(run: Run) -> Figure:
    """The layers without scores of their own."""
    rows = [(name, reason) for name, reason in run.skipped.items()]
    rows += [(name, f"follows {', '.join(leaders)}") for name, leaders in run.followers.items()]
    if not rows and "network" in run.missing and not run.summary:
        return Figure("skipped", "Left alone", missing="Which layers are left alone is not stored in this folder.")
    parts = [pairs(rows) if rows else element("p", "Nothing: every layer with filters can be pruned.")]
    missing = [why for part, why in run.missing.items() if part != "network"]
    if missing:
        parts.append(element("h3", "Not in this report"))
        parts.append(element("ul", (element("li", why) for why in missing)))
    return Figure("skipped", "Left alone", text=together(parts))


def environment(run: Run) -> Figure:
    """The machine and the versions."""
    if not run.environment:
        return Figure(
            "environment", "Environment", missing="It is stored when a run ends, and this one has not ended."
        )
    rows = [(str(key), str(value)) for key, value in run.environment.items() if value is not None]
    return Figure("environment", "Environment", text=pairs(rows))


def recipe(run: Run) -> Figure:
    """Every setting, as it was resolved."""
    plain = {key: value for key, value in run.recipe.items() if not isinstance(value, Mapping)}
    parts = [_section("", plain)]
    parts += [_section(key, value) for key, value in run.recipe.items() if isinstance(value, Mapping)]
    return Figure("recipe", "Recipe", text=element("div", parts, class_="sections"), wide=True)


def _section(name: str, values: Mapping[str, Any]) -> Markup:
    rows = pairs((key, spelled(value)) for key, value in values.items())
    return element("div", element("h3", name) if name else "", rows)


def spelled(value: Any) -> str:
    """A setting as text; what is empty shows as such.

    >>> spelled(True), spelled(""), spelled([0.5, 0.75]), spelled([]), spelled({})
    ('yes', 'none', '0.5, 0.75', 'none', 'none')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(spelled, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {spelled(item)}" for key, item in value.items()) or "none"
    return str(value) if value != "" else "none"

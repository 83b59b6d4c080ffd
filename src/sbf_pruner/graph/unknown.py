"""The rules for operators of which nothing is known: the layers that feed them are left alone."""

from __future__ import annotations

from .masks import Grids
from .nodes import Node, Opaque
from .records import Op


def opaque(op: Op, grids: Grids) -> Node:
    """All channels must be there; of an operator that is not torch's own, the message says how to make it known."""
    if op.name.startswith(("aten.", "sbf.")):
        return Opaque(op, grids)
    return Opaque(op, grids, f"{op.name} at {op.where} is not known; tell what it does with sbf.register_rule")


def nothing_seen(op: Op, grids: Grids) -> Node:
    """An empty result, as of a detector that finds none, does not show what becomes of the channels."""
    return Opaque(op, grids, f"{op.name} at {op.where} gives nothing for the example inputs")

"""Instance norm, which torch takes apart, put together again.

What one call of an instance norm ran enters: a batch norm for which every image has channels of its own, and the
views and copies that make it so.  The norm as one operator over the user's channels leaves, with the arguments of a
batch norm.  Where anything else was done, all is left as it ran.
"""

from __future__ import annotations

from collections.abc import Sequence

from .owners import BATCH_NORMS
from .records import INSTANCE_NORM, Call, Op, Value

_AROUND = {f"aten.{name}" for name in ("view", "repeat", "clone", "empty")}


def put_together(call: Call, ops: Sequence[Op]) -> Sequence[Op]:
    """What a call of an instance norm ran, as the one operator that it is."""
    norm = _instance_norm(call, ops)
    return ops if norm is None else [norm]


def _instance_norm(call: Call, ops: Sequence[Op]) -> Op | None:
    norms = [op for op in ops if op.name in BATCH_NORMS]
    if len(norms) != 1 or any(op.name not in BATCH_NORMS | _AROUND for op in ops):
        return None
    norm = norms[0]
    made_from = {op.outputs[0]: op.inputs[0] for op in ops if op.name in _AROUND and op.inputs}

    def origin(value: Value) -> Value:
        while value in made_from:
            value = made_from[value]
        return value

    x, *states = (origin(held) if isinstance(held, Value) else held for held in norm.args[:5])
    ends = x in call.inputs and len(call.outputs) == 1 and origin(call.outputs[0]) is norm.outputs[0]
    if not ends or call.outputs[0].shape != x.shape or norm.args[0].shape[2:] != x.shape[2:]:
        return None
    inputs = tuple(held for held in (x, *states) if held is not None)
    args = (x, *states, *norm.args[5:])
    return Op(INSTANCE_NORM, args, {}, inputs, call.outputs, call, norm.where)

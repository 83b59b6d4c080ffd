"""Rules for elementwise operators: whether a channel of zeros stays zero.

A rule returns an `Elementwise` node and sets the grids of its outputs. Operators whose operands have grids that do
not broadcast are opaque, as are operators without a rule: the layers that feed them are skipped.
"""

from __future__ import annotations

import dataclasses
import operator

import numpy as np

from ..nodes import Across, Alive, Elementwise, Grid, Grids, Node, Opaque
from ..records import Op, Value


def opaque(op: Op, grids: Grids) -> Node:
    """Default rule: all channels must stay. Except for ATen operators the reason names `register_rule`."""
    if op.name.startswith(("aten.", "sbf.")):
        return Opaque(op, grids)
    return Opaque(op, grids, f"{op.name} at {op.where} has no pruning rule; add one with sbf.register_rule")


def empty_result(op: Op, grids: Grids) -> Node:
    """Opaque node for an empty result (no detections, say), which does not show how channels pass."""
    why = "returns an empty tensor for the example inputs; give inputs for which it does not"
    return Opaque(op, grids, f"{op.name} at {op.where} {why}")


def elementwise(op: Op, grids: Grids, alive_if: Alive, steep: bool = False, poles: tuple[Value, ...] = ()) -> Node:
    """Build the node of an elementwise operator.

    `alive_if` says when a result may be non-zero. `steep` marks an infinite gradient at zero; `poles` are
    the operands at whose zero the result is undefined.
    """
    try:
        grid = _told_apart(op, grids, np.broadcast_shapes(*(grids[v] for v in op.inputs)))
    except ValueError:
        return opaque(op, grids)
    for value in op.outputs:
        if value is not None:
            if len(grid) != len(value.shape):
                return opaque(op, grids)
            grids[value] = grid
    return Elementwise(op, grids, alive_if, steep, poles)


def _told_apart(op: Op, grids: Grids, grid: Grid) -> Grid:
    """Drop dimensions from a grid in which only stored tensors differ.

    A stored tensor with one value per pixel, such as a position embedding, does not turn the pixels of the feature
    map it is added to into channels: no pixel can be removed by itself.
    """
    activations = [(v.shape[::-1], grids[v][::-1]) for v in op.inputs if v.roots is None]
    found = list(grid[::-1])
    for back, size in enumerate(found):
        met = [(shape[back], of[back]) for shape, of in activations if len(of) > back]
        if (size, 1) in met and all(g == 1 for _, g in met):
            found[back] = 1
    return tuple(found[::-1])


def zero_kept(op: Op, grids: Grids) -> Node:
    """Elementwise with f(0) = 0: a dead channel stays dead."""
    return elementwise(op, grids, Alive.ANY)


def zero_lost(op: Op, grids: Grids) -> Node:
    """Elementwise with f(0) != 0: a dead channel becomes a constant."""
    return elementwise(op, grids, Alive.ALWAYS)


def undefined_at_zero(op: Op, grids: Grids) -> Node:
    """Elementwise with f(0) infinite or NaN: logarithms and reciprocals."""
    return elementwise(op, grids, Alive.ALWAYS, poles=op.inputs)


def zero_made(op: Op, grids: Grids) -> Node:
    """Zeros in the shape of the operand."""
    return elementwise(op, grids, Alive.NEVER)


def addition(op: Op, grids: Grids) -> Node:
    """Addition: alive where either operand is. Adding a nonzero number turns dead channels into constants."""
    if len(op.inputs) == 2 or op.number(1, "other", 0) == 0:
        return elementwise(op, grids, Alive.ANY)
    return elementwise(op, grids, Alive.ALWAYS)


def product(op: Op, grids: Grids) -> Node:
    """Multiplication: alive where both operands are."""
    return elementwise(op, grids, Alive.ALL)


def quotient(op: Op, grids: Grids) -> Node:
    """Division: alive where the numerator is; the divisor must be alive everywhere."""
    if op.inputs and op.args[0] is op.inputs[0]:
        return elementwise(op, grids, Alive.QUOTIENT, poles=op.inputs[1:])
    return elementwise(op, grids, Alive.ALWAYS, poles=op.inputs)


def clamp(op: Op, grids: Grids) -> Node:
    """`clamp`: a dead channel stays dead if zero is inside the range."""
    if len(op.inputs) > 1:
        return elementwise(op, grids, Alive.ALWAYS)
    low, high = op.number(1, "min", None), op.number(2, "max", None)
    inside = (low is None or low <= 0) and (high is None or high >= 0)
    return elementwise(op, grids, Alive.ANY if inside else Alive.ALWAYS)


def clamp_min(op: Op, grids: Grids) -> Node:
    """`clamp` with a lower limit only."""
    low = op.number(1, "min", 0)
    return elementwise(op, grids, Alive.ANY if low is not None and low <= 0 else Alive.ALWAYS)


def clamp_max(op: Op, grids: Grids) -> Node:
    """`clamp` with an upper limit only."""
    high = op.number(1, "max", 0)
    return elementwise(op, grids, Alive.ANY if high is not None and high >= 0 else Alive.ALWAYS)


def hardtanh(op: Op, grids: Grids) -> Node:
    """`hardtanh` and ReLU6: a dead channel stays dead if zero is inside the range."""
    low, high = op.number(1, "min_val", -1.0), op.number(2, "max_val", 1.0)
    inside = low is not None and high is not None and low <= 0 <= high
    return elementwise(op, grids, Alive.ANY if inside else Alive.ALWAYS)


def threshold(op: Op, grids: Grids) -> Node:
    """`threshold`: a dead channel stays dead if zero is above the threshold or is the replacement value."""
    limit, value = op.number(1, "threshold", 0), op.number(2, "value", 0)
    kept = value == 0 or (limit is not None and limit < 0)
    return elementwise(op, grids, Alive.ANY if kept else Alive.ALWAYS)


def comparison(op: Op, grids: Grids) -> Node:
    """Comparison: False is zero, so a dead channel stays dead if comparing zero with the number gives False."""
    compare = getattr(operator, op.name.removeprefix("aten.").removesuffix("_"))
    kept = len(op.inputs) == 1 and not compare(0, op.number(1, "other", 0))
    return elementwise(op, grids, Alive.ANY if kept else Alive.ALWAYS)


def choice(op: Op, grids: Grids) -> Node:
    """`where`: alive where either of the two choices is, whatever the condition."""
    return elementwise(op, grids, Alive.OTHERS)


def filled(op: Op, grids: Grids) -> Node:
    """`masked_fill`: alive where the input is if the fill value is zero, everywhere otherwise."""
    return elementwise(op, grids, Alive.FIRST if op.number(2, "value", None) == 0 else Alive.ALWAYS)


def unpooled(op: Op, grids: Grids) -> Node:
    """`max_unpool`: move values back to the positions of their maxima, channel by channel, with zeros elsewhere."""
    if any(n > 1 for n in grids[op.args[0]][-int(op.name[-2]) :]):
        return opaque(op, grids)
    return elementwise(op, grids, Alive.FIRST)


def prelu(op: Op, grids: Grids) -> Node:
    """PReLU: alive where the input is, because slopes only multiply."""
    return elementwise(op, grids, Alive.QUOTIENT)


def power(op: Op, grids: Grids) -> Node:
    """Powers: zero stays zero for positive exponents. Below 1 the power is a root, below 0 a reciprocal."""
    exponent = op.number(1, "exponent", None)
    if len(op.inputs) > 1 or op.args[0] is not op.inputs[0] or exponent is None:
        return elementwise(op, grids, Alive.ALWAYS)
    if exponent < 0:
        return undefined_at_zero(op, grids)
    return elementwise(op, grids, Alive.ANY if exponent > 0 else Alive.ALWAYS, 0 < exponent < 1)


def root(op: Op, grids: Grids) -> Node:
    """Square root: zero stays zero, but its gradient there is not finite and would reach the weights before it."""
    return elementwise(op, grids, Alive.ANY, steep=True)


def softmax(op: Op, grids: Grids) -> Node:
    """Softmax: per channel over a dimension along which channels do not differ; else all channels along it stay."""
    x, dim = op.args[0], int(op.args[1])
    if grids[x][dim] == 1:
        return elementwise(op, grids, Alive.ALWAYS)
    op = dataclasses.replace(op, outputs=op.outputs[:1])
    out = op.outputs[0]
    assert out is not None
    grids[out] = grids[x]
    return Across(op, grids, dim % len(x.shape), f"{op.name} at {op.where} normalises over the channels")


def restrided(op: Op, grids: Grids) -> Node:
    """`as_strided_` as used by pooling to one pixel in channels-last memory format; any other use is opaque."""
    x, size, stride = op.args[0], tuple(op.args[1]), tuple(op.args[2])
    same = size == x.shape and len(size) > 2 and stride[:2] == (size[1], 1) and set(size[2:]) == {1}
    return elementwise(op, grids, Alive.ANY) if same and len(op.args) == 3 else opaque(op, grids)

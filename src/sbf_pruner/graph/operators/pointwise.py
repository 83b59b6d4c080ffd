"""Rules for elementwise operators: whether a channel of zeros stays zero.

A rule returns an `Elementwise` node and sets the grids (see `nodes`) of its outputs. Operators whose operands have
grids that do not broadcast are opaque, as are operators without a rule: the layers that feed them are skipped.
"""

from __future__ import annotations

import dataclasses
import operator
from functools import partial

import numpy as np

from ..nodes import Across, Alive, Elementwise, Grid, Grids, Node, Opaque
from ..records import Op, Value


def opaque(op: Op, grids: Grids) -> Node:
    """Default rule: all channels must stay. For custom operators the reason mentions `register_rule`."""
    if op.name.startswith(("aten.", "sbf.")):
        return Opaque(op, grids)
    return Opaque(op, grids, f"{op.name} at {op.where} has no pruning rule; add one with sbf.register_rule")


def elementwise(op: Op, grids: Grids, alive_if: Alive, steep: bool = False, poles: tuple[Value, ...] = ()) -> Node:
    """Build the node of an elementwise operator.

    `alive_if` is the condition for a result that may be nonzero. `steep` is true if the gradient at zero is
    infinite; `poles` are the operands for which zero gives infinity or NaN.
    """
    try:
        grid = _without_stored_pixels(op, grids, np.broadcast_shapes(*(grids[v] for v in op.inputs)))
    except ValueError:
        return opaque(op, grids)
    if any(len(grid) != len(value.shape) for value in op.results):
        return opaque(op, grids)
    grids |= dict.fromkeys(op.results, grid)
    return Elementwise(op, grids, alive_if, steep, poles)


def _without_stored_pixels(op: Op, grids: Grids, grid: Grid) -> Grid:
    """Return a grid with 1 for dimensions along which only the channels of parameters and buffers differ.

    A parameter with one value per pixel, such as a position embedding, does not turn the pixels of the feature map
    that it is added to into channels: single pixels cannot be removed.
    """
    activations = [(v.shape[::-1], grids[v][::-1]) for v in op.inputs if v.roots is None]
    found = list(grid[::-1])
    for back, size in enumerate(found):
        dims = [(shape[back], of[back]) for shape, of in activations if len(of) > back]
        if (size, 1) in dims and all(g == 1 for _, g in dims):
            found[back] = 1
    return tuple(found[::-1])


zero_kept = partial(elementwise, alive_if=Alive.ANY)  # f(0) = 0: a dead channel stays dead
zero_lost = partial(elementwise, alive_if=Alive.ALWAYS)  # f(0) != 0: a dead channel becomes a constant
zero_made = partial(elementwise, alive_if=Alive.NEVER)  # zeros in the shape of the operand
product = partial(elementwise, alive_if=Alive.ALL)
choice = partial(elementwise, alive_if=Alive.OTHERS)  # `where`: the condition does not count
prelu = partial(elementwise, alive_if=Alive.QUOTIENT)  # slopes only multiply the input
# Square root: zero stays zero, but the gradient at zero is infinite and would propagate to the preceding weights.
root = partial(elementwise, alive_if=Alive.ANY, steep=True)


def _kept_if(kept: bool, op: Op, grids: Grids) -> Node:
    return (zero_kept if kept else zero_lost)(op, grids)


def undefined_at_zero(op: Op, grids: Grids) -> Node:
    """Elementwise operators with f(0) infinite or NaN: logarithms and reciprocals."""
    return zero_lost(op, grids, poles=op.inputs)


def addition(op: Op, grids: Grids) -> Node:
    """Addition: alive where either operand is. Adding a nonzero number turns dead channels into constants."""
    return _kept_if(len(op.inputs) == 2 or op.number(1, "other", 0) == 0, op, grids)


def quotient(op: Op, grids: Grids) -> Node:
    """Division: alive where the numerator is; no channel of the divisor may be removed."""
    if op.inputs and op.args[0] is op.inputs[0]:
        return elementwise(op, grids, Alive.QUOTIENT, poles=op.inputs[1:])
    return undefined_at_zero(op, grids)


def clamp(op: Op, grids: Grids) -> Node:
    """`clamp`, also with one limit, and `hardtanh`: a dead channel stays dead if zero is inside the range."""
    name = op.name.removesuffix("_")
    if name == "aten.hardtanh":
        low, high = op.number(1, "min_val", -1.0), op.number(2, "max_val", 1.0)
    elif name == "aten.clamp_max":
        low, high = None, op.number(1, "max", None)
    else:
        low, high = op.number(1, "min", None), op.number(2, "max", None)
    inside = (low is None or low <= 0) and (high is None or high >= 0)
    return _kept_if(inside and len(op.inputs) == 1, op, grids)


def threshold(op: Op, grids: Grids) -> Node:
    """`threshold`: a dead channel stays dead if zero is above the threshold or is the replacement value."""
    limit, value = op.number(1, "threshold", 0), op.number(2, "value", 0)
    return _kept_if(value == 0 or (limit is not None and limit < 0), op, grids)


def comparison(op: Op, grids: Grids) -> Node:
    """Comparison: False is zero, so a dead channel stays dead if comparing zero with the number gives False."""
    compare = getattr(operator, op.name.removeprefix("aten.").removesuffix("_"))
    return _kept_if(len(op.inputs) == 1 and not compare(0, op.number(1, "other", 0)), op, grids)


def filled(op: Op, grids: Grids) -> Node:
    """`masked_fill`: alive where the input is if the fill value is zero, everywhere otherwise."""
    return elementwise(op, grids, Alive.FIRST if op.number(2, "value", None) == 0 else Alive.ALWAYS)


def unpooled(op: Op, grids: Grids) -> Node:
    """`max_unpool`: move values back to the positions of their maxima, channel by channel, with zeros elsewhere."""
    if any(n > 1 for n in grids[op.args[0]][-int(op.name[-2]) :]):
        return opaque(op, grids)
    return elementwise(op, grids, Alive.FIRST)


def power(op: Op, grids: Grids) -> Node:
    """Power: zero stays zero for positive exponents; at zero, roots have no gradient and reciprocals no value."""
    exponent = op.number(1, "exponent", None)
    if len(op.inputs) > 1 or op.args[0] is not op.inputs[0] or exponent is None:
        return zero_lost(op, grids)
    if exponent < 0:
        return undefined_at_zero(op, grids)
    return elementwise(op, grids, Alive.ANY if exponent > 0 else Alive.ALWAYS, 0 < exponent < 1)


def softmax(op: Op, grids: Grids) -> Node:
    """Softmax: nonzero for zero input. If channels differ along its dimension, all channels along it must stay."""
    x, dim = op.args[0], int(op.args[1])
    if grids[x][dim] == 1:
        return zero_lost(op, grids)
    op = dataclasses.replace(op, outputs=op.outputs[:1])
    grids[op.results[0]] = grids[x]
    return Across(op, grids, (dim % len(x.shape),), f"{op.name} at {op.where} normalises over the channels")


def restrided(op: Op, grids: Grids) -> Node:
    """`as_strided_` as used by pooling to one pixel in channels-last memory format; any other use is opaque."""
    x, size, stride = op.args[0], tuple(op.args[1]), tuple(op.args[2])
    same = size == x.shape and len(size) > 2 and stride[:2] == (size[1], 1) and set(size[2:]) == {1}
    return zero_kept(op, grids) if same and len(op.args) == 3 else opaque(op, grids)

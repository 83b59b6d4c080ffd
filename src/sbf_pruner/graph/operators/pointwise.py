"""The rules for operators of which nothing is known: the layers that feed them are left alone.

Rules for operators that work element by element: what each of them makes of a channel of zeros.

An operator and the grids known so far enter; an `Elementwise` node leaves, and the grids of its outputs are set.
What cannot be laid out so, because its operands do not fit each other, is opaque.
"""

from __future__ import annotations

import dataclasses
import operator

import numpy as np

from ..nodes import Across, Elementwise, Grid, Grids, Node, Opaque
from ..records import Op, Value


def opaque(op: Op, grids: Grids) -> Node:
    """All channels must be there; of an operator that is not torch's own, the message says how to make it known."""
    if op.name.startswith(("aten.", "sbf.")):
        return Opaque(op, grids)
    return Opaque(op, grids, f"{op.name} at {op.where} is not known; tell what it does with sbf.register_rule")


def nothing_seen(op: Op, grids: Grids) -> Node:
    """An empty result, as of a detector that finds none, does not show what becomes of the channels."""
    return Opaque(op, grids, f"{op.name} at {op.where} gives nothing for the example inputs")


def elementwise(op: Op, grids: Grids, zero: str, steep: bool = False, poles: tuple[Value, ...] = ()) -> Node:
    """The node of an operator that works element by element; `zero` says when a result is zero."""
    try:
        grid = _told_apart(op, grids, np.broadcast_shapes(*(grids[v] for v in op.inputs)))
    except ValueError:
        return opaque(op, grids)
    for value in op.outputs:
        if value is not None:
            if len(grid) != len(value.shape):
                return opaque(op, grids)
            grids[value] = grid
    return Elementwise(op, grids, zero, steep, poles)


def _told_apart(op: Op, grids: Grids, grid: Grid) -> Grid:
    """Where pixels do not differ, a stored map that meets them does not make them channels: none can go alone."""
    activations = [(v.shape[::-1], grids[v][::-1]) for v in op.inputs if v.roots is None]
    found = list(grid[::-1])
    for back, size in enumerate(found):
        met = [(shape[back], of[back]) for shape, of in activations if len(of) > back]
        if (size, 1) in met and all(g == 1 for _, g in met):
            found[back] = 1
    return tuple(found[::-1])


def zero_kept(op: Op, grids: Grids) -> Node:
    """f(0) = 0: a dead channel stays dead."""
    return elementwise(op, grids, "any")


def zero_lost(op: Op, grids: Grids) -> Node:
    """f(0) is not 0: a dead channel becomes a constant."""
    return elementwise(op, grids, "never")


def pole(op: Op, grids: Grids) -> Node:
    """f(0) is not a number, or infinite: a logarithm, one over something."""
    return elementwise(op, grids, "never", poles=op.inputs)


def zero_made(op: Op, grids: Grids) -> Node:
    """Zeros in the shape of the operand."""
    return elementwise(op, grids, "always")


def addition(op: Op, grids: Grids) -> Node:
    """A sum is alive where either side is; adding a number other than zero brings dead channels back."""
    if len(op.inputs) == 2 or op.number(1, "other", 0) == 0:
        return elementwise(op, grids, "any")
    return elementwise(op, grids, "never")


def product(op: Op, grids: Grids) -> Node:
    """A product is alive where both sides are."""
    return elementwise(op, grids, "all")


def quotient(op: Op, grids: Grids) -> Node:
    """A quotient is alive where its numerator is, and its divisor must be alive everywhere."""
    if op.inputs and op.args[0] is op.inputs[0]:
        return elementwise(op, grids, "first", poles=op.inputs[1:])
    return elementwise(op, grids, "never", poles=op.inputs)


def clamp(op: Op, grids: Grids) -> Node:
    """A clamp keeps zero when zero lies inside its range."""
    if len(op.inputs) > 1:
        return elementwise(op, grids, "never")
    low, high = op.number(1, "min", None), op.number(2, "max", None)
    inside = (low is None or low <= 0) and (high is None or high >= 0)
    return elementwise(op, grids, "any" if inside else "never")


def clamp_min(op: Op, grids: Grids) -> Node:
    """`clamp` with a lower end only."""
    low = op.number(1, "min", 0)
    return elementwise(op, grids, "any" if low is not None and low <= 0 else "never")


def clamp_max(op: Op, grids: Grids) -> Node:
    """`clamp` with an upper end only."""
    high = op.number(1, "max", 0)
    return elementwise(op, grids, "any" if high is not None and high >= 0 else "never")


def hardtanh(op: Op, grids: Grids) -> Node:
    """ReLU6 and its kin."""
    low, high = op.number(1, "min_val", -1.0), op.number(2, "max_val", 1.0)
    inside = low is not None and high is not None and low <= 0 <= high
    return elementwise(op, grids, "any" if inside else "never")


def threshold(op: Op, grids: Grids) -> Node:
    """Zero stays where it lies above the threshold, or is what stands below it."""
    limit, value = op.number(1, "threshold", 0), op.number(2, "value", 0)
    kept = value == 0 or (limit is not None and limit < 0)
    return elementwise(op, grids, "any" if kept else "never")


def comparison(op: Op, grids: Grids) -> Node:
    """False is zero: a dead channel stays dead where zero compared with the number is false."""
    compare = getattr(operator, op.name.removeprefix("aten.").removesuffix("_"))
    kept = len(op.inputs) == 1 and not compare(0, op.number(1, "other", 0))
    return elementwise(op, grids, "any" if kept else "never")


def choice(op: Op, grids: Grids) -> Node:
    """One or the other of two tensors: alive where either is, whatever the condition says."""
    return elementwise(op, grids, "rest")


def filled(op: Op, grids: Grids) -> Node:
    """A number where a mask says so: alive where the map is, if that number is zero."""
    return elementwise(op, grids, "whatever" if op.number(2, "value", None) == 0 else "never")


def unpooled(op: Op, grids: Grids) -> Node:
    """Every number goes back to where its maximum was found, channel by channel; there are zeros around it."""
    if any(n > 1 for n in grids[op.args[0]][-int(op.name[-2]) :]):
        return opaque(op, grids)
    return elementwise(op, grids, "whatever")


def prelu(op: Op, grids: Grids) -> Node:
    """Alive where the map is; the slopes make nothing out of zero."""
    return elementwise(op, grids, "first")


def power(op: Op, grids: Grids) -> Node:
    """A positive power of zero is zero; below 1 it is a root, and below 0 one over something."""
    exponent = op.number(1, "exponent", None)
    if len(op.inputs) > 1 or op.args[0] is not op.inputs[0] or exponent is None:
        return elementwise(op, grids, "never")
    if exponent < 0:
        return pole(op, grids)
    return elementwise(op, grids, "any" if exponent > 0 else "never", 0 < exponent < 1)


def root(op: Op, grids: Grids) -> Node:
    """The root of zero is zero, but its gradient is not a number, and would reach the weights before it."""
    return elementwise(op, grids, "any", steep=True)


def softmax(op: Op, grids: Grids) -> Node:
    """A softmax over a dimension along which channels do not differ is one per channel."""
    x, dim = op.args[0], int(op.args[1])
    if grids[x][dim] == 1:
        return elementwise(op, grids, "never")
    op = dataclasses.replace(op, outputs=op.outputs[:1])
    out = op.outputs[0]
    assert out is not None
    grids[out] = grids[x]
    return Across(op, grids, dim % len(x.shape), f"{op.name} at {op.where} normalises over the channels")


def restrided(op: Op, grids: Grids) -> Node:
    """Pooling to one pixel renames strides when the channels lie last; anything else is unknown."""
    x, size, stride = op.args[0], tuple(op.args[1]), tuple(op.args[2])
    same = size == x.shape and len(size) > 2 and stride[:2] == (size[1], 1) and set(size[2:]) == {1}
    return elementwise(op, grids, "any") if same and len(op.args) == 3 else opaque(op, grids)

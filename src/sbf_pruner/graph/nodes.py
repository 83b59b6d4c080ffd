"""The kinds of node a channel graph is made of: how liveness passes through each, and what each ties.

*Alive* is pushed forward and *needed* pulled backward through the nodes.  A node ties the layouts of its
tensors so that the operator itself, run on the smaller tensors, does what it did; only a `Boundary` leaves
them free, because there a remap can be inserted.  Layouts only ever grow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from .masks import End, Flow, Grids, Layout, Mask, shrink, some
from .records import Op, Value


@dataclass
class Node:
    """One operator in the channel graph."""

    op: Op
    grids: Grids = field(repr=False)

    # A reason a layer whose channels arrive here cannot lose them, or "" where they can.
    blocks = ""

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.op.inputs

    @cached_property
    def outputs(self) -> list[Value]:
        return [v for v in self.op.outputs if v is not None]

    @property
    def tied(self) -> Sequence[Value]:
        """The tensors whose layouts `tie` looks at; none if it never has anything to add."""
        return (*self.inputs, *self.outputs)

    def push(self, flow: Flow) -> None:
        """Set what is alive of the outputs."""
        for value in self.outputs:
            flow.alive[value] = np.ones(self.grids[value], bool)

    def pull(self, flow: Flow) -> None:
        """Add what is needed of the inputs."""
        if self.outputs and not any(flow.needed[v].any() for v in self.outputs if v in flow.needed):
            return
        for value in self.inputs:
            flow.need(value, np.ones(self.grids[value], bool), self.grids[value])

    def tie(self, layout: Layout) -> None:
        """Grow layouts until the operator does on the small tensors what it did on the large ones."""
        for value in (*self.inputs, *self.outputs):
            layout.fill(value)

    def wanted(self, flow: Flow) -> Mask | None:
        """What is alive and needed of the first output, or None if nothing asks for any of it."""
        out = self.outputs[0]
        needed = flow.needed.get(out)
        if needed is None:
            return None
        return needed & flow.alive[out]


@dataclass
class Opaque(Node):
    """An operator that mixes channels in a way not known: all of them must be there."""

    why: str = ""

    def __post_init__(self) -> None:
        self.blocks = self.why or f"{self.op.name} at {self.op.where} mixes channels in a way that is not known"


@dataclass
class Source(Node):
    """A tensor made from nothing."""

    zero: bool = False

    @property
    def tied(self) -> Sequence[Value]:
        return ()

    def push(self, flow: Flow) -> None:
        for value in self.outputs:
            flow.alive[value] = np.full(self.grids[value], not self.zero)

    def tie(self, layout: Layout) -> None:
        return


@dataclass
class Elementwise(Node):
    """Channel by channel, with broadcasting.

    `zero` says when a result is zero: "any" operand alive keeps it alive (sums), "all" must be (products), only
    the "first" counts, if no other is zero (quotients) or "whatever" the others are (a mask), or only the "rest" (a
    choice), "never" (a sigmoid of zero is a half) or "always".
    """

    zero: str = "any"
    steep: bool = False  # infinitely so at zero: the gradient of a channel that is gone is not a number
    poles: tuple[Value, ...] = ()  # the operands at whose zero the result itself is not a number: divisors
    insists: bool = False  # needs them also where nobody asks: what is no number is none after a closed gate either

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.op.inputs

    def __post_init__(self) -> None:
        if self.zero == "never":
            self.blocks = f"{self.op.name} at {self.op.where} turns a removed channel into a constant"
        if self.steep or (self.poles and self.zero == "never"):
            self.blocks = self.at_zero

    @property
    def at_zero(self) -> str:
        """Why none of the `avoiding` may be a channel that was removed."""
        return f"{self.op.name} at {self.op.where} has no {self.lacks} at zero, where a removed channel is"

    @property
    def lacks(self) -> str:
        return "gradient" if self.steep else "value"

    @property
    def avoiding(self) -> tuple[Value, ...]:
        """The operands that must not become zero."""
        return self.operands if self.steep else self.poles

    def ends(self, constant: Value, gone: Collection[Value]) -> bool:
        """Is the result no constant, because another operand is gone, or decides what is zero?"""
        if self.zero == "whatever":
            return self.operands[0] is not constant
        if self.zero == "first":
            return self.operands[0] in gone and self.operands[0] is not constant
        if self.zero == "rest":
            return self.operands[0] is constant and all(v in gone for v in self.operands[1:])
        return self.zero == "all" and self.outputs[0] in gone

    def push(self, flow: Flow) -> None:
        masks = [flow.alive[v] for v in self.operands]
        if self.zero == "never" or not masks:
            alive = np.ones((), bool)
        elif self.zero == "always":
            alive = np.zeros((), bool)
        elif self.zero == "all":
            alive = reduce(np.logical_and, masks)
        elif self.zero == "whatever":
            alive = masks[0]
        elif self.zero == "first":
            alive = reduce(np.logical_or, [masks[0], *(~m for m in masks[1:])])
        else:
            alive = reduce(np.logical_or, masks[1:] if self.zero == "rest" else masks)
        for value in self.outputs:
            flow.alive[value] = shrink(alive, self.grids[value])

    def pull(self, flow: Flow) -> None:
        for out in self.outputs:
            if out in flow.needed:
                wanted = flow.needed[out] & flow.alive[out]
                for value in self.operands:
                    flow.need(value, wanted, self.grids[value])
        for value in self.avoiding if self.insists else ():
            flow.need(value, flow.alive[value], self.grids[value])

    @cached_property
    def _ends(self) -> list[list[End]]:
        """The dimensions that meet, where channels differ along any of them."""
        values = [*self.operands, *self.outputs]
        rank = max((len(v.shape) for v in values), default=0)
        found = [
            [(v, len(v.shape) - back) for v in values if len(v.shape) >= back and v.shape[-back] > 1]
            for back in range(1, rank + 1)
        ]
        return [ends for ends in found if any(self.grids[v][dim] > 1 for v, dim in ends)]

    def tie(self, layout: Layout) -> None:
        for ends in self._ends:
            layout.tie(ends)


@dataclass
class Map(Node):
    """Channels moved about: each output channel is one input channel, or zero.

    `labels` holds, over the first output's grid, the number of the input channel (counted over the grids of
    all operands, one after the other), or -1 for zero; several outputs have one array each.
    """

    operands: tuple[Value, ...] = ()
    labels: tuple[NDArray[np.int64], ...] = ()

    def _flat(self, masks: Sequence[Mask]) -> Mask:
        # The last entry answers for the label -1: a zero.
        return np.concatenate([*(m.reshape(-1) for m in masks), np.zeros(1, bool)])

    def _split(self, flat: Mask) -> list[tuple[Value, Mask]]:
        found, at = [], 0
        for value in self.operands:
            grid = self.grids[value]
            size = math.prod(grid)
            found.append((value, flat[at : at + size].reshape(grid)))
            at += size
        return found

    def push(self, flow: Flow) -> None:
        flat = self._flat([flow.alive[v] for v in self.operands])
        for value, labels in zip(self.outputs, self.labels, strict=True):
            flow.alive[value] = flat[labels]

    def pull(self, flow: Flow) -> None:
        flat = self._flat([np.zeros(self.grids[v], bool) for v in self.operands])
        for value, labels in zip(self.outputs, self.labels, strict=True):
            if value in flow.needed:
                flat[labels[flow.needed[value] & flow.alive[value]]] = True
        for value, mask in self._split(flat):
            flow.need(value, mask, self.grids[value])

    def tie(self, layout: Layout) -> None:
        flat = self._flat([layout.joint(v) for v in self.operands])
        for value, labels in zip(self.outputs, self.labels, strict=True):
            layout.grow(value, flat[labels])
        for value, labels in zip(self.outputs, self.labels, strict=True):
            flat[labels[layout.joint(value)]] = True
        for value, mask in self._split(flat):
            layout.grow(value, mask)


@dataclass
class Located(Map):
    """The channels of a map, and where in each something was found: a place also where all is zero."""

    @property
    def places(self) -> Value:
        return self.outputs[1]

    def push(self, flow: Flow) -> None:
        super().push(flow)
        flow.alive[self.places] = np.ones(self.grids[self.places], bool)


@dataclass
class Sampled(Map):
    """The channels of the first operand, at places that the others tell: those must be there as they were."""

    def pull(self, flow: Flow) -> None:
        super().pull(flow)
        wanted = self.wanted(flow)
        for value in self.operands[1:] if wanted is not None and wanted.any() else ():
            flow.need(value, np.ones(self.grids[value], bool), self.grids[value])

    def tie(self, layout: Layout) -> None:
        super().tie(layout)
        for value in self.operands[1:]:
            layout.fill(value)


@dataclass
class Halves(Map):
    """Every channel of a first half times a sigmoid of its partner in the second: zero where the first one is."""

    partners: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def pull(self, flow: Flow) -> None:
        super().pull(flow)
        wanted = self.wanted(flow)
        if wanted is not None:
            x = self.operands[0]
            flow.need(x, self._filled(np.zeros(self.grids[x], bool), self.partners[wanted]), self.grids[x])

    def tie(self, layout: Layout) -> None:
        x, out, (labels,) = self.operands[0], self.outputs[0], self.labels
        there = layout.joint(x)
        flat = there.reshape(-1)
        pairs = flat[labels] | flat[self.partners] | layout.joint(out)
        layout.grow(out, pairs)
        pairs = layout.joint(out)
        layout.grow(x, self._filled(self._filled(there, labels[pairs]), self.partners[pairs]))

    def _filled(self, mask: Mask, places: NDArray[np.int64]) -> Mask:
        flat = mask.reshape(-1).copy()
        flat[places] = True
        return flat.reshape(mask.shape)


@dataclass
class Across(Node):
    """All channels along one dimension by all of them, and nothing across the others: a softmax of branches."""

    over: int = 0
    why: str = ""

    def __post_init__(self) -> None:
        self.blocks = self.why

    def pull(self, flow: Flow) -> None:
        x, out = self.inputs[0], self.outputs[0]
        if out in flow.needed:
            rows = some(flow.needed[out], self.over, keepdims=True)
            flow.need(x, np.broadcast_to(rows, self.grids[x]), self.grids[x])

    def tie(self, layout: Layout) -> None:
        x, out = self.inputs[0], self.outputs[0]
        for dim in range(len(x.shape)):
            if dim == self.over:
                layout.add(x, dim, None)
            layout.tie([(x, dim), (out, dim)])


@dataclass
class Sum(Node):
    """A sum over dimensions along which channels differ: a missing channel is missed as little as a zero."""

    over: tuple[int, ...] = ()

    def _aligned(self, mask: Mask) -> Mask:
        """What holds for the output, with the dimensions that are summed over."""
        x, out = self.inputs[0], self.outputs[0]
        return mask if len(out.shape) == len(x.shape) else np.expand_dims(mask, self.over)

    def push(self, flow: Flow) -> None:
        out = self.outputs[0]
        flow.alive[out] = some(flow.alive[self.inputs[0]], self.over, keepdims=True).reshape(self.grids[out])

    def pull(self, flow: Flow) -> None:
        wanted = self.wanted(flow)
        if wanted is not None:
            x = self.inputs[0]
            flow.need(x, np.broadcast_to(self._aligned(wanted), self.grids[x]), self.grids[x])

    def tie(self, layout: Layout) -> None:
        x, out = self.inputs[0], self.outputs[0]
        if x.roots is not None:  # stored numbers are not zero where nobody asks for them
            for dim in self.over:
                layout.add(x, dim, None)
        kept = [d for d in range(len(x.shape)) if d not in self.over]
        places = kept if len(out.shape) == len(x.shape) else range(len(kept))
        for dim, place in zip(kept, places, strict=True):
            layout.tie([(x, dim), (out, place)])

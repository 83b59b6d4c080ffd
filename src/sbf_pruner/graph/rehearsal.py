"""Does a network that was cut run as its layout promises?

The small network, the large one with its graph and the layout enter; the first operator that did something else
leaves, if there is one: another shape, another literal, channels moved elsewhere.  It runs on the meta device,
so it costs no arithmetic, and what the model's own code insists on shows before anyone trains the result.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..attached import without_attached
from ..copies import meta_copy, real_copy
from ..errors import PruningError
from ..inputs import call, map_tensors
from ..layers import Remap, Zeros
from .agreement import agrees, fixed_settings, moves_alike, same_kind, settings, tells_places
from .asking import asks_for_its_mode
from .boundary import Boundary
from .channels import ChannelGraph
from .decided import Decided
from .masks import Layout
from .nodes import Map
from .operands import Operands, names_of
from .records import REMAP, ZEROS, Op, Trace, Value
from .trace import ops_again
from .where import failing_line

# Whether these appear depends on strides, not on what is computed.
_QUIET = {f"aten.{n}" for n in ("clone", "contiguous", "alias", "detach", "_to_copy", "empty", "t", "as_strided_")}
_PUT_IN = {REMAP, ZEROS}
_QUIET |= _PUT_IN


class Rehearsal:
    """Runs of a network that was cut, beside the recordings of the whole one."""

    def __init__(
        self,
        small: nn.Module,
        model: nn.Module,
        example_inputs: Any,
        graph: ChannelGraph,
        layout: Layout,
        vanished: set[str],
    ) -> None:
        self.small, self.model, self.inputs = small, model, example_inputs
        self.graph, self.layout, self.vanished = graph, layout, vanished
        self._names = names_of(small), names_of(model)

    def first_surprise(self) -> Op | None:
        """Run the small network as the large one was; the first operator that differs from what is promised."""
        trace = self.graph.trace
        found = ops_again(self.small, self.inputs, trace)
        promised = [node.op for node in self.graph.nodes]
        actual = [op for op in found if not _quiet(op)]
        operands = Operands(_handed_on(found), _handed_on(promised), self._names)
        decided = Decided(found, promised) if not trace.on_meta else Decided((), ())
        at, last = 0, None
        for node in self.graph.nodes:
            op = node.op
            if op.position < 0 or self._passed_over(op):
                continue
            if (
                at == len(actual)
                or not agrees(actual[at], node, self.layout, decided)
                or not operands.agree(actual[at], op)
            ):
                return op
            at, last = at + 1, op
        if at < len(actual):  # a step more at the end, which a width decides on
            return last
        _check_seen(self.small, found, self.graph)
        return None

    def kept_difference(self) -> Op | None:
        """The first operator of a first call, of which something is kept, that does otherwise with fewer channels.

        A model that has run since has what it keeps, and the small network has that from it.
        """
        first = self.graph.trace.first
        if first is None or [op.name for op in ops_again(self.model, self.inputs, first)] != [
            op.name for op in first.ops
        ]:
            return None
        return self.first_difference(first)

    def first_difference(self, other: Trace | None) -> Op | None:
        """The first operator that does something else with fewer channels in a recording the graph does not follow.

        That is one of the other mode, or of a first call.  There are no nodes for it and so no layout; but the same
        code runs, with numbers that depend on no width, and what runs in that mode alone sees all its channels.
        """
        if other is None:
            return None
        found = ops_again(self.small, self.inputs, other)
        actual = [op for op in found if not _quiet(op)]
        operands = Operands(_handed_on(found), _handed_on(other.ops), self._names)
        decided = Decided(found, other.ops) if not other.on_meta else Decided((), ())
        movers = _movers(self.graph)
        at, last = 0, None
        for op in other.ops:
            if self._passed_over(op):
                continue
            if (
                at == len(actual)
                or not _does_the_same(actual[at], op, other, decided)
                or not self._moves_as_there(actual[at], op, movers, decided)
                or not operands.agree(actual[at], op)
            ):
                return op
            at, last = at + 1, op
        return last if at < len(actual) else None

    def _passed_over(self, op: Op) -> bool:
        return _quiet(op) or op.inside(self.vanished)

    def _moves_as_there(self, actual: Op, promised: Op, movers: _Movers, decided: Decided) -> bool:
        """Does it move channels and pixels as the same line does in the recording that the graph follows?"""
        nodes = movers.get(_mover(promised), []) if not decided.touches(promised) else []
        return not nodes or any(moves_alike(actual, node, self.layout) for node in nodes)


_Movers = dict[tuple[Any, ...], list[Map]]


def _mover(op: Op) -> tuple[Any, ...]:
    return op.name, op.where, tuple(settings(op)), tuple(value.shape for value in op.inputs)


def _movers(graph: ChannelGraph) -> _Movers:
    """What moves channels, by what tells it from others."""
    found: _Movers = defaultdict(list)
    for node in graph.nodes:
        if isinstance(node, Map):
            found[_mover(node.op)].append(node)
    return dict(found)


def _does_the_same(actual: Op, promised: Op, other: Trace, decided: Decided) -> bool:
    if not same_kind(actual, promised):
        return False
    if promised.position in other.apart and not decided.touches(promised):
        # What is made of weights alone, a transpose say, has as many rows as its layer has filters.
        shapes = [[v.shape for v in op.inputs if not v.roots] for op in (actual, promised)]
        if shapes[0] != shapes[1]:
            return False
    if promised.position in other.drawn:  # what scales random numbers may ask how many there are
        return True
    if other.cold and not promised.inputs:  # what is made of numbers alone may be kept
        return decided.same(promised, settings(actual), settings(promised))
    moves = tells_places(promised)
    return decided.same(promised, fixed_settings(actual, moves), fixed_settings(promised, moves))


def _handed_on(ops: Sequence[Op]) -> dict[Value, Value]:
    """Of what a quiet operator, or an edge, gives: what it was given."""
    found: dict[Value, Value] = {}
    for op in ops:
        quiet = op.name in _QUIET - {ZEROS} or op.name.startswith("edge.") or _adds_bias(op)
        maps = [v for v in op.inputs if v.kind != "state" or len(v.shape) > 1]
        if quiet and maps and op.outputs and op.outputs[0] is not None:
            found[op.outputs[0]] = maps[0]
    return found


def _check_seen(small: nn.Module, found: Sequence[Op], graph: ChannelGraph) -> None:
    """Did everything run that was put in?  Not so where some object still holds the module it was put around."""
    ran = {op.call.module for op in found if op.name in _PUT_IN and op.call is not None}
    gated = {node.module for node in graph.nodes if isinstance(node, Boundary)}
    for path, module in small.named_modules():
        home = path.removesuffix(".before").removesuffix(".after")
        if isinstance(module, (Remap, Zeros)) and path not in ran and home in gated:
            raise PruningError(
                f"{home} is held by some object as well, where a change is not seen; call it as an attribute of "
                "the module it belongs to, or leave it out of the plan"
            )


def failure_in_training(small: nn.Module, model: nn.Module, example_inputs: Any) -> str | None:
    """Why the small network does not run in training mode, if the large one does."""
    if not any(map(asks_for_its_mode, small.modules())):
        return None
    chance = random.getstate()
    try:
        # As in recording: without numbers, or with them where it cannot do without.
        for copied, moved in ((meta_copy, lambda t: t.to("meta")), (real_copy, torch.clone)):
            inputs = map_tensors(example_inputs, moved)
            error = _error_in_training(copied(small), inputs)
            if error is None:
                return None
            if _error_in_training(without_attached(copied(model)), inputs) is None:
                return failing_line(error)
    finally:
        random.setstate(chance)
    return None


def _error_in_training(model: nn.Module, inputs: Any) -> Exception | None:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            call(model.train(), inputs)
    except Exception as error:
        return error
    return None


def _adds_bias(op: Op) -> bool:
    # A linear layer adds its bias in the product or after it, as the strides of its input decide.
    return (
        op.name == "aten.add" and not op.kwargs and any(v.kind == "state" and len(v.shape) == 1 for v in op.inputs)
    )


def _quiet(op: Op) -> bool:
    return op.name in _QUIET or _adds_bias(op)

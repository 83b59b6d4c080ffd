"""Does a network that was cut run as its layout promises?

The small network, the graph of the large one and the layout enter; the first operator that did something else
leaves, if there is one: another shape, another literal, channels moved elsewhere.  It runs on the meta device,
so it costs no arithmetic, and what the model's own code insists on shows before anyone trains the result.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..attached import without_attached
from ..errors import PruningError
from ..inputs import call, map_tensors, meta_copy, real_copy
from ..layers import Remap, Zeros
from . import pointwise
from .boundary import Boundary
from .channels import ChannelGraph
from .decided import Decided
from .literals import same_numbers
from .masks import Grids, Layout
from .modes import asks_for_its_mode
from .moves import pooled, reduced
from .nodes import Map, Node
from .operands import Operands
from .owners import GROUP_NORM
from .records import REMAP, ZEROS, Op, Trace, Value
from .rules import RULES, build_node
from .trace import ops_again
from .weighted import Contract, Norm
from .where import failing_line

# Whether these appear depends on strides, not on what is computed.
_QUIET = {f"aten.{n}" for n in ("clone", "contiguous", "alias", "detach", "_to_copy", "empty", "t", "as_strided_")}
_PUT_IN = {REMAP, ZEROS}
_QUIET |= _PUT_IN
_SAME = {f"aten.{n}": "aten.view" for n in ("_unsafe_view", "reshape", "_reshape_alias")}
_SAME["aten.addmm"] = "aten.mm"


def first_surprise(
    small: nn.Module, example_inputs: Any, graph: ChannelGraph, layout: Layout, vanished: set[str]
) -> Op | None:
    """Run the small network as the large one was; the first operator that differs from what the layout promises."""
    found = ops_again(small, example_inputs, graph.trace)
    actual = [op for op in found if op.name not in _QUIET and not _adds_bias(op)]
    promised = [node.op for node in graph.nodes]
    operands = Operands(_handed_on(found), _handed_on(promised))
    decided = Decided(found, promised) if not graph.trace.on_meta else Decided((), ())
    at, last = 0, None
    for node in graph.nodes:
        op = node.op
        if op.position < 0 or op.name in _QUIET or _inside(op, vanished) or _adds_bias(op):
            continue
        if (
            at == len(actual)
            or not _agrees(actual[at], node, layout, decided)
            or not operands.agree(actual[at], op)
        ):
            return op
        at, last = at + 1, op
    if at < len(actual):  # a step more at the end, which a width decides on
        return last
    _check_seen(small, found, graph)
    return None


def kept_difference(
    small: nn.Module, model: nn.Module, example_inputs: Any, graph: ChannelGraph, vanished: set[str]
) -> Op | None:
    """The first operator of a first call, of which something is kept, that does otherwise with fewer channels.

    A model that has run since has what it keeps, and the small network has that from it.
    """
    first = graph.trace.first
    if first is None or [op.name for op in ops_again(model, example_inputs, first)] != [
        op.name for op in first.ops
    ]:
        return None
    return first_difference(small, example_inputs, first, vanished)


def first_difference(small: nn.Module, example_inputs: Any, other: Trace | None, vanished: set[str]) -> Op | None:
    """The first operator that does something else with fewer channels in a recording the graph does not follow.

    That is one of the other mode, or of a first call.  There are no nodes for it and so no layout; but the same
    code runs, with numbers that depend on no width, and what runs in that mode alone sees all its channels.
    """
    if other is None or not other.on_meta:
        return None
    found = [op for op in ops_again(small, example_inputs, other) if op.name not in _QUIET and not _adds_bias(op)]
    at, last = 0, None
    for op in other.ops:
        if op.name in _QUIET or _inside(op, vanished) or _adds_bias(op):
            continue
        if at == len(found) or not _does_the_same(found[at], op, other):
            return op
        at, last = at + 1, op
    return last if at < len(found) else None


def _does_the_same(actual: Op, promised: Op, other: Trace) -> bool:
    names = [_SAME.get(op.name, op.name) for op in (actual, promised)]
    if names[0] != names[1] or not all(map(_same_literal, actual.inputs, promised.inputs)):
        return False
    if promised.position in other.apart:
        # What is made of weights alone, a transpose say, has as many rows as its layer has filters.
        shapes = [[v.shape for v in op.inputs if not v.roots] for op in (actual, promised)]
        if shapes[0] != shapes[1]:
            return False
    if promised.position in other.drawn:  # what scales random numbers may ask how many there are
        return True
    if other.cold and not promised.inputs:  # what is made of numbers alone may be kept
        return _all_numbers(actual) == _all_numbers(promised)
    rule = RULES.get(promised.name) or RULES.get(promised.name.removesuffix("_"))
    sizes = rule is None or rule.__module__ != pointwise.__name__
    return _numbers(actual, sizes) == _numbers(promised, sizes)


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


def _inside(op: Op, modules: Iterable[str]) -> bool:
    return op.call is not None and any(op.call.within(module) is not None for module in modules)


def _agrees(actual: Op, node: Node, layout: Layout, decided: Decided) -> bool:
    promised = node.op
    names = [_SAME.get(op.name, op.name) for op in (actual, promised)]
    if names[0] != names[1] or len(actual.outputs) < len(promised.outputs):
        return False
    if not all(map(_same_literal, actual.inputs, promised.inputs)):
        return False
    for now, then in zip(actual.outputs, promised.outputs, strict=False):
        if now is not None and then is not None and not decided.fits(now, then, layout.sizes(then)):
            return False
    # A number written into an operator must not depend on a width (x / x.shape[1]); those that are sizes may.
    sizes = isinstance(node, (Contract, Norm, Map)) and RULES.get(promised.name) not in (pooled, reduced)
    if not decided.same(promised, _numbers(actual, sizes), _numbers(promised, sizes)):
        return False
    if isinstance(node, Norm) and not _shares_alike(actual, node):
        return False
    return not isinstance(node, Map) or decided.touches(promised) or _moves_alike(actual, node, layout)


def _same_literal(now: Value, then: Value) -> bool:
    """A literal of the forward must not depend on a width (torch.tensor(x.shape[1]))."""
    literal = now.kind == then.kind == "constant" and now.data is not None and then.data is not None
    return not literal or same_numbers(now.data, then.data)  # type: ignore[arg-type]


def _numbers(op: Op, sizes: bool) -> list[Any]:
    """The numbers among an operator's arguments; with `sizes` among them, only what cannot be one."""
    kinds = float if sizes else (int, float)
    return [a for a in (*op.args, *op.kwargs.values()) if isinstance(a, kinds)]


def _all_numbers(op: Op) -> list[Any]:
    return [a for a in pytree.tree_leaves((op.args, op.kwargs)) if isinstance(a, (int, float))]


def _shares_alike(actual: Op, node: Norm) -> bool:
    """Do as many channels share statistics?  A number of groups that is written down may fit fewer channels too."""
    return actual.name != GROUP_NORM or actual.inputs[0].shape[1] == node.per_group * actual.args[6]


def _moves_alike(actual: Op, node: Map, layout: Layout) -> bool:
    """Does the operator move each channel that is left where the layout expects it?

    Not always, although the shapes are right: half of the channels are others when fewer are there.
    """
    tables = [v for v in actual.inputs if v.data is not None and not v.data.is_floating_point()]
    joins = actual.name == "aten.cat"  # which passes over what has no size at all
    operands = [v for v in dict.fromkeys(actual.inputs) if v not in tables and not (joins and v.shape == (0,))]
    if len(operands) != len(node.operands):
        return False
    grids: Grids = {}
    numbers, start = [], 0
    for now, then in zip(operands, node.operands, strict=True):
        there = layout.joint(then)
        grids[now] = tuple(n if g > 1 else 1 for n, g in zip(now.shape, there.shape, strict=True))
        numbers.append(np.cumsum(there.reshape(-1)) - 1 + start)
        start += int(there.sum())
    found = build_node(actual, grids)
    if not isinstance(found, Map):
        return False
    new = np.append(np.concatenate(numbers), -1)
    for out, labels, moved in zip(node.outputs, node.labels, found.labels, strict=False):
        places = [layout.indices(out, d) if n != 1 else [0] for d, n in enumerate(labels.shape)]
        expected = new[labels[np.ix_(*places)]]
        if moved.ndim != expected.ndim or not bool(np.all(moved == expected)):
            return False
    return True

"""A model and example inputs in; the operators that ran, and what each belongs to, out.

One forward pass of a *copy* of the model is recorded.  The copy lives on the meta device, so nothing is computed
and no weights are copied; a model that needs real numbers to choose its way is run on a real copy instead.  The
user's model is never touched.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..attached import without_attached
from ..errors import TraceError
from ..inputs import call, map_tensors, meta_copy, real_copy
from .owners import LAYERS, owner
from .recorder import Recorder, as_tree
from .records import Op, Trace
from .where import cause, explain, not_from_torch


def record(model: nn.Module, example_inputs: Any) -> Trace:
    """Run the model once, in evaluation mode and on a copy, and write down its operators.

    Where a module leaves out some of its children then (auxiliary heads), that module alone runs in training
    mode, if it does the same and more.

    >>> [op.name for op in record(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), torch.rand(1, 3, 8, 8)).ops]
    ['aten.convolution', 'aten.relu']
    """
    for held in pytree.tree_leaves(example_inputs):
        if not isinstance(held, Tensor) and any(isinstance(t, Tensor) for t in pytree.tree_leaves(as_tree(held))):
            raise TraceError(
                f"the example inputs hold a {type(held).__name__}, which is not looked into for tensors; let the "
                "model take tensors, or tuples, lists and dicts of them"
            )
    found = record_in(model, example_inputs, ())
    holders = _left_out(model, found)
    if holders:
        try:
            again = record_in(model, example_inputs, holders)
        except TraceError:
            return found
        more = _added(again.ops, found.ops)
        if set(found.states) < set(again.states) and more is not None:
            again.added = frozenset(op.position for op in more)
            return again
        found.otherwise = _feeding(again, found)
    return found


def _left_out(model: nn.Module, found: Trace) -> tuple[str, ...]:
    """The modules that ran while tensors of theirs, or children of theirs with tensors, did not."""
    holders: dict[str, None] = {}
    torchs_own = {path for path, m in model.named_modules() if type(m).__module__.startswith("torch.")}
    for name, held in (*model.named_parameters(), *model.named_buffers()):
        path = name.rpartition(".")[0]
        # A number, such as a count of batches, has no channels; torch's own modules are told what to leave out.
        if held.dim() and name not in found.states and not (path in found.calls and path in torchs_own):
            while path and path not in found.calls:
                path = path.rpartition(".")[0]
            holders[path] = None
    return tuple(holders)


def _feeding(again: Trace, found: Trace) -> dict[str, str]:
    """The layers whose channels reach, in training mode, what evaluation mode leaves out; with its line."""
    makers = {value: op for op in again.ops for value in op.outputs}
    feeding: dict[str, str] = {}
    for op in again.ops:
        if all(value.kind != "state" or value.name in found.states for value in op.inputs):
            continue
        todo, seen = list(op.inputs), set(op.inputs)
        while todo:
            maker = makers.get(todo.pop())
            if maker is None:
                continue
            layer = owner(maker) if maker.name in LAYERS else None
            if layer is not None:
                feeding.setdefault(layer, op.where)
            if layer is None or (maker.name == "aten.convolution" and maker.args[8] > 1):
                todo += (fresh := [v for v in maker.inputs if v not in seen])
                seen.update(fresh)
    return feeding


def _added(longer: list[Op], shorter: list[Op]) -> list[Op] | None:
    """What one recording has more than the other; None if it is not the other with operators added."""
    rest, more = iter(longer), []
    for op in shorter:
        for other in rest:
            if (op.name, op.where) == (other.name, other.where):
                break
            more.append(other)
        else:
            return None
    return [*more, *rest]


def record_in(model: nn.Module, example_inputs: Any, training: tuple[str, ...]) -> Trace:
    """`record` with the given modules in training mode, and all others in evaluation mode."""
    try:
        inputs = map_tensors(example_inputs, lambda t: t.to("meta"))
        return _record_copy(model, meta_copy(model), inputs, True, training)
    except Exception:
        # Not every model can run without numbers (control flow on values, constants made on the CPU); if it
        # cannot run with them either, that second failure is the one worth showing.
        pass
    try:
        twin = real_copy(model)
    except Exception as error:
        raise TraceError(
            f"the model cannot be copied ({cause(error)}); keep what cannot be copied outside of it"
        ) from error
    try:
        inputs = map_tensors(example_inputs, Tensor.clone)
        found = _record_copy(model, twin, inputs, False, training)
        if found.strangers:
            _check_strangers(model, example_inputs, found)
        if found.literals:
            _check_literals(model, example_inputs, found)
        return found
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(explain(error, example_inputs)) from error


def ops_again(model: nn.Module, example_inputs: Any, earlier: Trace) -> list[Op]:
    """The operators of a model that runs as in an earlier recording; if it fails, those until then.

    With numbers or without, as then: the operators have other names on a GPU than on no device.
    """
    on_meta = earlier.on_meta
    inputs = map_tensors(example_inputs, lambda t: t.to("meta") if on_meta else t.clone())
    twin = meta_copy(model) if on_meta else real_copy(model)
    try:
        return _record_copy(model, twin, inputs, on_meta, earlier.training).ops
    except Exception as error:
        found: list[Op] = getattr(error, "recorded_ops", [])
        return found


def _check_literals(model: nn.Module, example_inputs: Any, found: Trace) -> None:
    """Are the tensors that the forward made of numbers the same for other inputs?"""
    noise = map_tensors(example_inputs, lambda t: t + torch.rand_like(t) if t.is_floating_point() else t.clone())
    again = _record_copy(model, real_copy(model), noise, False, found.training)
    for (line, one), (_, other) in zip(found.literals, again.literals, strict=False):
        if not torch.equal(one, other):
            raise TraceError(not_from_torch(line))


def _check_strangers(model: nn.Module, example_inputs: Any, found: Trace) -> None:
    """Were the tensors from outside there before the forward, such as a module's constants in its file?"""
    inputs = map_tensors(example_inputs, Tensor.clone)
    again = {
        id(tensor) for _, tensor in _record_copy(model, real_copy(model), inputs, False, found.training).strangers
    }
    for line, tensor in found.strangers:
        if id(tensor) not in again:
            raise TraceError(not_from_torch(line))


def _record_copy(model: nn.Module, twin: nn.Module, inputs: Any, on_meta: bool, training: tuple[str, ...]) -> Trace:
    without_attached(twin).eval()
    for path in training:
        twin.get_submodule(path).training = True
    recorder = Recorder(model, twin, inputs, trusts_constants=on_meta)
    try:
        with torch.no_grad(), _same_chance(), recorder.watching(twin), recorder:
            result = call(twin, inputs)
    except Exception as error:
        error.recorded_ops = recorder.ops  # type: ignore[attr-defined]
        raise
    outputs = [recorder.value(t) for t in pytree.tree_leaves(as_tree(result)) if isinstance(t, Tensor)]
    if not outputs:
        raise TraceError("the model returns no tensor; return a tensor, or a tuple or dict of them")
    for position, op in enumerate(recorder.ops):
        op.position = position
    calls, states, literals, strangers = recorder.calls, recorder.states, recorder.literals, recorder.strangers
    found = Trace(
        recorder.ops, recorder.input_values, outputs, calls, states, literals, strangers, training, on_meta
    )
    found.unused = sum(tensor.numel() for name, tensor in model.named_parameters() if name not in states)
    return found


@contextmanager
def _same_chance() -> Iterator[None]:
    """While entered, Python's random numbers are those of every other recording."""
    before = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(before)

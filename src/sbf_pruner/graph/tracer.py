"""Trace a model: record the operators of a forward pass on its example inputs, in both modes where they differ.

A *copy* of the model runs twice; the second forward pass is recorded. The copy is on the meta device, so nothing is
computed and no weights are copied; if the model needs real values (for control flow), weights are copied as well.
`tensors_of` and `check_runs_as_traced` check a model against an earlier trace.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import PruningError, TraceError
from ..modules import RemappedModule
from ..utils.user_code import cause, explain, not_from_torch
from ..utils.user_model import all_tensors, call, map_tensors, meta_copy, real_copy, remove_pruner_hooks
from .channel_graph import ChannelGraph
from .recorder import Recorder, as_tree
from .records import Op, Trace, same_numbers
from .train_eval import difference, feeding, may_read_training, never_reads_training


def record(model: nn.Module, example_inputs: Any) -> Trace:
    """Run a copy of the model in evaluation mode and record its operators.

    Modules that run more operators in training mode (auxiliary heads) are traced in that mode instead. If that mode
    replaces operators, `Trace.otherwise` names the layers that feed these; `Trace.other` is the other mode's trace.

    >>> [op.name for op in record(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), torch.rand(1, 3, 8, 8)).ops]
    ['aten.convolution', 'aten.relu']
    """
    for held in pytree.tree_leaves(example_inputs):
        if not isinstance(held, Tensor) and any(isinstance(t, Tensor) for t in pytree.tree_leaves(as_tree(held))):
            raise TraceError(
                f"the example inputs contain a {type(held).__name__}, which is not searched for tensors; make the "
                "inputs of the model tensors, or tuples, lists and dicts of them"
            )
    found = _in_both_modes(model, example_inputs)
    if found.keeps:
        with suppress(TraceError):
            found.first = _record_in(model, example_inputs, found.training, really=not found.on_meta, cold=True)
    return found


def _in_both_modes(model: nn.Module, example_inputs: Any) -> Trace:
    found = _record_in(model, example_inputs, ())
    pair = _in_training(model, example_inputs, found)
    if pair is None:
        return found
    again, alike = pair
    new = difference(again, alike)
    if new.extends and (new.ops or new.outputs):
        again.added, again.other = new.more, found
        return again
    found.otherwise = feeding(again, alike, new)
    if not new.by_chance:
        found.other, again.apart, again.drawn = again, frozenset(op.position for op in new.ops), new.drawn
    return found


def _in_training(model: nn.Module, example_inputs: Any, found: Trace) -> tuple[Trace, Trace] | None:
    """Trace the model with modules in training mode that may read `training` or leave tensors unused without it.

    Return that trace and the one in evaluation mode, traced again on real tensors if only one of them was on the
    meta device. Return None if no module needs training mode, or if the model cannot run in it.
    """
    left_out = _left_out(model, found)
    known: set[CodeType] = set()
    readers = [path for path, module in model.named_modules() if may_read_training(module, known)]
    if readers:  # they may read the flag of another module instead of their own
        readers += [path for path, module in model.named_modules() if never_reads_training(module)]
    for training in (tuple(dict.fromkeys((*left_out, *readers))), left_out):
        with suppress(TraceError):  # in training mode a norm may need more samples, or the model its targets
            if training:
                again = _record_in(model, example_inputs, training)
                alike = again.on_meta == found.on_meta
                return again, found if alike else _record_in(model, example_inputs, (), really=True)
    return None


def _left_out(model: nn.Module, found: Trace) -> tuple[str, ...]:
    """Return the modules that ran without reading all tensors of their own and of children that did not run."""
    holders: dict[str, None] = {}
    from_torch = {path for path, m in model.named_modules() if type(m).__module__.startswith("torch.")}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        path = name.rpartition(".")[0]
        # A scalar, such as a count of batches, has no channels. If a torch module ran without reading a tensor, its
        # settings are the reason, not its mode.
        if tensor.dim() and name not in found.states and not (path in found.calls and path in from_torch):
            while path and path not in found.calls:
                path = path.rpartition(".")[0]
            holders[path] = None
    return tuple(holders)


def _record_in(
    model: nn.Module, example_inputs: Any, training: tuple[str, ...], *, really: bool = False, cold: bool = False
) -> Trace:
    """Trace a copy; do not try the meta device if `really` is true, and skip the warm-up call if `cold` is true."""
    with suppress(Exception):
        # Not every model can run on the meta device (control flow on values, constants made on the CPU). Only an
        # error on real tensors is shown.
        if not really:
            inputs = map_tensors(example_inputs, lambda t: t.to("meta"))
            return _record_copy(model, meta_copy(model), inputs, True, training, cold)
    try:
        twin = real_copy(model)
    except Exception as error:
        raise TraceError(
            f"the model cannot be copied ({cause(error)}); keep objects that cannot be copied outside the model"
        ) from error
    try:
        inputs = map_tensors(example_inputs, Tensor.clone)
        found = _record_copy(model, twin, inputs, False, training, cold)
        if found.strangers:
            _check_strangers(model, example_inputs, found)
        if found.literals:
            _check_literals(model, example_inputs, found)
        return found
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(explain(error, example_inputs)) from error


def rerun_ops(model: nn.Module, example_inputs: Any, earlier: Trace) -> list[Op]:
    """Run a model as in an earlier trace and return its operators; if it fails, return those recorded until then.

    The model runs on the meta device if and only if it did in that trace: some operators have other names on a GPU.
    """
    on_meta = earlier.on_meta
    inputs = map_tensors(example_inputs, lambda t: t.to("meta") if on_meta else t.clone())
    twin = meta_copy(model) if on_meta else real_copy(model)
    try:
        return _record_copy(model, twin, inputs, on_meta, earlier.training, earlier.cold).ops
    except Exception as error:
        return list(getattr(error, "recorded_ops", ()))


def warmed_copy(model: nn.Module, example_inputs: Any) -> nn.Module:
    """Return a copy that ran once, so that tensors that it stores for the input size, such as anchors, are new."""
    twin = remove_pruner_hooks(real_copy(model))
    modes = {module: module.training for module in twin.modules()}
    with suppress(Exception), torch.no_grad(), fixed_seed(twin):
        call(twin.eval(), map_tensors(example_inputs, Tensor.clone))
    for module, mode in modes.items():
        module.training = mode
    return twin


def _check_literals(model: nn.Module, example_inputs: Any, found: Trace) -> None:
    """Raise a TraceError if a tensor that the forward makes from Python numbers differs for other inputs."""
    with fixed_seed(model):
        noise = map_tensors(
            example_inputs, lambda t: t + torch.rand_like(t) if t.is_floating_point() else t.clone()
        )
    again = _record_copy(model, real_copy(model), noise, False, found.training)
    for (line, one), (_, other) in zip(found.literals, again.literals, strict=False):
        if not same_numbers(one, other):
            raise TraceError(not_from_torch(line))


def _check_strangers(model: nn.Module, example_inputs: Any, found: Trace) -> None:
    """Raise a TraceError if a tensor that no operator returned did not exist before the forward.

    A tensor that existed, such as a global constant of the model's file, is the same object in a second run.
    """
    again = _record_copy(model, real_copy(model), map_tensors(example_inputs, Tensor.clone), False, found.training)
    known = {id(tensor) for _, tensor in again.strangers}
    for line, tensor in found.strangers:
        if id(tensor) not in known:
            raise TraceError(not_from_torch(line))


def _record_copy(
    model: nn.Module, twin: nn.Module, inputs: Any, on_meta: bool, training: tuple[str, ...], cold: bool = False
) -> Trace:
    remove_pruner_hooks(twin).eval()
    modules = dict(twin.named_modules())
    for path in training:
        module = modules.get(path)
        while module is not None:  # an earlier extraction may have wrapped it with remaps
            module.training = True
            module = module.module if isinstance(module, RemappedModule) else None
    before = list(all_tensors(twin))  # references, so that no id is reused
    if not cold:
        # Warm up: later calls read what the first call stored on the model (positions, anchors), as in training.
        with suppress(Exception), torch.no_grad(), fixed_seed(twin):
            call(twin, map_tensors(inputs, Tensor.clone))
    known = set(map(id, before))
    keeps = any(id(tensor) not in known for tensor in all_tensors(twin))
    recorder = Recorder(model, twin, inputs, trusts_constants=on_meta)
    try:
        with torch.no_grad(), fixed_seed(twin), recorder.watching(twin), recorder:
            began = _random_states()
            result = call(twin, inputs)
            random_calls = _random_states() != began
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
    found.keeps, found.cold, found.random_calls = keeps, cold, random_calls
    found.unused = sum(tensor.numel() for name, tensor in model.named_parameters() if name not in states)
    return found


def _random_states() -> tuple[object, ...]:
    state: dict[str, Any] = np.random.get_state(legacy=False)
    inner = {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in state.pop("state").items()}
    return random.getstate(), state, inner


@contextmanager
def fixed_seed(twin: nn.Module, seed: int = 0) -> Iterator[None]:
    """Seed the random number generators of Python, NumPy and torch while active, then restore their states."""
    before, drawn = random.getstate(), np.random.get_state()
    devices = list({tensor.device for tensor in twin.parameters() if tensor.is_cuda})
    with torch.random.fork_rng(devices):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device.index].manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(drawn)


def tensors_of(model: nn.Module, graph: ChannelGraph) -> dict[str, Tensor]:
    """Return all parameters and buffers of a model by name, or raise a PruningError if they do not match the trace.

    They do not match if a traced one is missing or has another shape, or if a layer has a new parameter.

    >>> import torch
    >>> from .build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Flatten(), nn.Linear(9, 2))
    >>> graph = trace(net, torch.rand(1, 3, 3, 3))
    >>> net[2] = nn.Linear(9, 5)
    >>> tensors_of(net, graph)
    Traceback (most recent call last):
    sbf_pruner.errors.PruningError: 2.weight was 2x9 when the model was traced and is 5x9 now; create a new pruner
    """
    held = dict(model.named_buffers()) | dict(model.named_parameters())
    for name, value in graph.trace.states.items():
        if name not in held or held[name].shape != value.shape:
            now = f"is {_size(held[name].shape)} now" if name in held else "is gone"
            remedy = "create a new pruner"
            if isinstance(held.get(name), Tensor) and not isinstance(held[name], nn.Parameter):
                # A buffer that the forward makes for the size of its last inputs, such as anchors.
                remedy = f"run the model once on the example inputs, or {remedy}"
            raise PruningError(f"{name} was {_size(value.shape)} when the model was traced and {now}; {remedy}")
    for layer in graph.layers.values():
        path = layer.weight.rpartition(".")[0]
        for name in model.get_submodule(path)._parameters:
            full = f"{path}.{name}".lstrip(".")
            if full in held and full not in graph.trace.states:
                raise PruningError(f"{full} did not exist when the model was traced; create a new pruner")
    return held


def current_weights(model: nn.Module, graph: ChannelGraph) -> list[Tensor]:
    """Return the current weight of every prunable layer."""
    held = tensors_of(model, graph)
    return [held[layer.weight].detach() for layer in graph.layers.values()]


def cast_inputs(example_inputs: Any, model: nn.Module, graph: ChannelGraph) -> Any:
    """Cast the example inputs to the dtypes to which the model was cast since it was traced.

    >>> import torch
    >>> from .build import trace
    >>> net, images = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)), torch.rand(1, 3, 5, 5)
    >>> graph = trace(net, images)
    >>> cast_inputs(images, net.double(), graph).dtype
    torch.float64
    """
    held = tensors_of(model, graph)
    traced = [(value.data, held[name]) for name, value in graph.trace.states.items() if value.data is not None]
    # If only a part of the model was cast, the first parameter or buffer that the forward reads sets the dtype.
    types = {then.dtype: now.dtype for then, now in reversed(traced) if then.is_floating_point()}
    return map_tensors(example_inputs, lambda t: t.to(types.get(t.dtype, t.dtype)))


def check_runs_as_traced(model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> None:
    """Raise a PruningError if a model runs other operators than when it was traced, for example in a new hook.

    >>> import torch
    >>> from .build import trace
    >>> net, images = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)), torch.rand(1, 3, 5, 5)
    >>> graph = trace(net, images)
    >>> hook = net[0].register_forward_hook(lambda module, given, found: found.exp())
    >>> check_runs_as_traced(net, images, graph)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    sbf_pruner.errors.PruningError: the model runs aten.exp at ..., which it did not when it was traced; ...
    """
    if change := first_change(model, example_inputs, graph):
        raise PruningError(
            f"the model {change}, which it did not when it was traced; remove what was added since (a hook?), or "
            "create a new pruner and load the scores into it with load_state_dict()"
        )


def first_change(model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> str:
    """Describe the first operator that differs from the trace; "" if the model runs the same operators."""
    for then, now in zip_longest(graph.trace.ops, rerun_ops(model, example_inputs, graph.trace)):
        if then is None or now is None or then.name != now.name:
            op = now or then
            return f"{'ends before' if now is None else 'runs'} {op.name} at {op.where}"
    return ""


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"

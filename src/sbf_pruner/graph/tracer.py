"""A model and example inputs in; the operators that ran, and what each belongs to, out.

The second forward pass of a *copy* of the model is recorded.  The copy lives on the meta device, so nothing is
computed and no weights are copied; a model that needs real numbers to choose its way is run on a real copy instead.
The user's model is never touched.

Is a model still the one that was traced?

A model, and the graph that was made of it earlier, enter; its tensors leave by name, or the sentence about the
first that does not fit any more.  A model that was cast since is the same one: example inputs are cast as it was.
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
from ..modules import Adapted
from ..utils.user_code import cause, explain, not_from_torch
from ..utils.user_model import call, held_tensors, map_tensors, meta_copy, real_copy, without_attached
from .channel_graph import ChannelGraph
from .recorder import Recorder, as_tree
from .records import Op, Trace, same_numbers
from .train_eval import asks_for_its_mode, difference, feeding, ignores_its_mode


def record(model: nn.Module, example_inputs: Any) -> Trace:
    """Run the model in evaluation mode and on a copy, and write down its operators.

    Where modules do more in training mode (auxiliary heads, further outputs), those alone run in that mode; where
    they do something else, the layers that feed it are noted.

    >>> [op.name for op in record(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), torch.rand(1, 3, 8, 8)).ops]
    ['aten.convolution', 'aten.relu']
    """
    for held in pytree.tree_leaves(example_inputs):
        if not isinstance(held, Tensor) and any(isinstance(t, Tensor) for t in pytree.tree_leaves(as_tree(held))):
            raise TraceError(
                f"the example inputs hold a {type(held).__name__}, which is not looked into for tensors; let the "
                "model take tensors, or tuples, lists and dicts of them"
            )
    found = _in_both_modes(model, example_inputs)
    if found.keeps:
        with suppress(TraceError):
            really = not found.on_meta
            found.first = record_in(model, example_inputs, found.training, really=really, cold=True)
    return found


def _in_both_modes(model: nn.Module, example_inputs: Any) -> Trace:
    found = record_in(model, example_inputs, ())
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
    """What it does with those modules in training mode that ask for their mode, or leave something out without it;
    and what it does otherwise, recorded alike."""
    left_out = _left_out(model, found)
    known: set[CodeType] = set()
    asking = [path for path, module in model.named_modules() if asks_for_its_mode(module, known)]
    if asking:  # perhaps not for its own mode, but for that of a layer
        asking += [path for path, module in model.named_modules() if ignores_its_mode(module)]
    for training in (tuple(dict.fromkeys((*left_out, *asking))), left_out):
        with suppress(TraceError):  # a norm may want more than one image then, or the model its targets
            if training:
                again = record_in(model, example_inputs, training)
                alike = again.on_meta == found.on_meta
                return again, found if alike else record_in(model, example_inputs, (), really=True)
    return None


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


def record_in(
    model: nn.Module, example_inputs: Any, training: tuple[str, ...], *, really: bool = False, cold: bool = False
) -> Trace:
    """`record` with the given modules in training mode, all others in evaluation mode.

    `really`: with numbers; `cold`: without a call before it.
    """
    with suppress(Exception):
        # Not every model can run without numbers (control flow on values, constants made on the CPU); if it
        # cannot run with them either, that second failure is the one worth showing.
        if not really:
            inputs = map_tensors(example_inputs, lambda t: t.to("meta"))
            return _record_copy(model, meta_copy(model), inputs, True, training, cold)
    try:
        twin = real_copy(model)
    except Exception as error:
        raise TraceError(
            f"the model cannot be copied ({cause(error)}); keep what cannot be copied outside of it"
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


def ops_again(model: nn.Module, example_inputs: Any, earlier: Trace) -> list[Op]:
    """The operators of a model that runs as in an earlier recording; if it fails, those until then.

    With numbers or without, as then: the operators have other names on a GPU than on no device.
    """
    on_meta = earlier.on_meta
    inputs = map_tensors(example_inputs, lambda t: t.to("meta") if on_meta else t.clone())
    twin = meta_copy(model) if on_meta else real_copy(model)
    try:
        return _record_copy(model, twin, inputs, on_meta, earlier.training, earlier.cold).ops
    except Exception as error:
        found: list[Op] = getattr(error, "recorded_ops", [])
        return found


def after_a_run(model: nn.Module, example_inputs: Any) -> nn.Module:
    """Copy a model and run the copy once on the example inputs, in evaluation mode.

    What a forward keeps for the size of its last inputs, as anchors, is made anew for these.
    """
    twin = without_attached(real_copy(model))
    modes = {module: module.training for module in twin.modules()}
    with suppress(Exception), torch.no_grad(), same_chance(twin):
        call(twin.eval(), map_tensors(example_inputs, Tensor.clone))
    for module, mode in modes.items():
        module.training = mode
    return twin


def _check_literals(model: nn.Module, example_inputs: Any, found: Trace) -> None:
    """Are the tensors that the forward made of numbers the same for other inputs?"""
    noise = map_tensors(example_inputs, lambda t: t + torch.rand_like(t) if t.is_floating_point() else t.clone())
    again = _record_copy(model, real_copy(model), noise, False, found.training)
    for (line, one), (_, other) in zip(found.literals, again.literals, strict=False):
        if not same_numbers(one, other):
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


def _record_copy(
    model: nn.Module, twin: nn.Module, inputs: Any, on_meta: bool, training: tuple[str, ...], cold: bool = False
) -> Trace:
    without_attached(twin).eval()
    modules = dict(twin.named_modules())
    for path in training:
        module = modules.get(path)
        while module is not None:  # of a network that was cut it may be between remaps
            module.training = True
            module = module.module if isinstance(module, Adapted) else None
    before = list(held_tensors(twin))
    if not cold:
        # What a forward keeps of its first call (positions, anchors), it finds from the second on, as in training.
        with suppress(Exception), torch.no_grad(), same_chance(twin):
            call(twin, map_tensors(inputs, Tensor.clone))
    known = set(map(id, before))
    keeps = any(id(tensor) not in known for tensor in held_tensors(twin))
    recorder = Recorder(model, twin, inputs, trusts_constants=on_meta)
    try:
        with torch.no_grad(), same_chance(twin), recorder.watching(twin), recorder:
            began = _drawn_so_far()
            result = call(twin, inputs)
            lucky = _drawn_so_far() != began
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
    found.keeps, found.cold, found.lucky = keeps, cold, lucky
    found.unused = sum(tensor.numel() for name, tensor in model.named_parameters() if name not in states)
    return found


def _drawn_so_far() -> tuple[object, ...]:
    """Where Python's and NumPy's random numbers are."""
    drawn = np.random.get_state(legacy=False)
    return random.getstate(), repr(drawn)


@contextmanager
def same_chance(twin: nn.Module, seed: int = 0) -> Iterator[None]:
    """While entered, random numbers are those of every other such run; those of the user stay what they are."""
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
    """All parameters and buffers of a model by name, those that were traced in the shapes they had then.

    >>> import torch
    >>> from .build import trace
    >>> net = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Flatten(), nn.Linear(9, 2))
    >>> graph = trace(net, torch.rand(1, 3, 3, 3))
    >>> net[2] = nn.Linear(9, 5)
    >>> tensors_of(net, graph)
    Traceback (most recent call last):
    sbf_pruner.errors.PruningError: 2.weight was 2x9 when the model was traced and is 5x9 now; make the pruner anew
    """
    held = dict(model.named_buffers()) | dict(model.named_parameters())
    for name, value in graph.trace.states.items():
        if name not in held or held[name].shape != value.shape:
            now = f"is {_size(held[name].shape)} now" if name in held else "is gone"
            remedy = "make the pruner anew"
            if isinstance(held.get(name), Tensor) and not isinstance(held[name], nn.Parameter):
                # A buffer that the forward makes for the size of its last inputs, as anchors.
                remedy = f"run the model once on the example inputs, or {remedy}"
            raise PruningError(f"{name} was {_size(value.shape)} when the model was traced and {now}; {remedy}")
    for layer in graph.layers.values():
        path = layer.weight.rpartition(".")[0]
        for name in model.get_submodule(path)._parameters:
            full = f"{path}.{name}".lstrip(".")
            if full in held and full not in graph.trace.states:
                raise PruningError(f"{full} was not there when the model was traced; make the pruner anew")
    return held


def weights_now(model: nn.Module, graph: ChannelGraph) -> list[Tensor]:
    """The weight of every layer that can be pruned."""
    held = tensors_of(model, graph)
    return [held[layer.weight].detach() for layer in graph.layers.values()]


def inputs_now(example_inputs: Any, model: nn.Module, graph: ChannelGraph) -> Any:
    """The example inputs, cast as the model was since it was traced.

    >>> import torch
    >>> from .build import trace
    >>> net, images = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)), torch.rand(1, 3, 5, 5)
    >>> graph = trace(net, images)
    >>> inputs_now(images, net.double(), graph).dtype
    torch.float64
    """
    held = tensors_of(model, graph)
    traced = [(value.data, held[name]) for name, value in graph.trace.states.items() if value.data is not None]
    # Where only a part of the model was cast, what runs first decides: that is what the inputs meet.
    types = {then.dtype: now.dtype for then, now in reversed(traced) if then.is_floating_point()}
    return map_tensors(example_inputs, lambda t: t.to(types.get(t.dtype, t.dtype)))


def check_runs_as_traced(model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> None:
    """Refuse a model that runs other operators than when it was traced, as one that got a hook since.

    >>> import torch
    >>> from .build import trace
    >>> net, images = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)), torch.rand(1, 3, 5, 5)
    >>> graph = trace(net, images)
    >>> hook = net[0].register_forward_hook(lambda module, given, found: found.exp())
    >>> check_runs_as_traced(net, images, graph)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    sbf_pruner.errors.PruningError: the model runs aten.exp at ..., which it did not when it was traced; ...
    """
    if change := _first_change(model, example_inputs, graph):
        raise PruningError(
            f"the model {change}, which it did not when it was traced; take off what was added since (a hook?), or "
            "trace it anew: a new pruner takes over the scores with load_state_dict()"
        )


def runs_as_traced(model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> bool:
    """Return True if a model runs the operators that it ran when it was traced."""
    return not _first_change(model, example_inputs, graph)


def _first_change(model: nn.Module, example_inputs: Any, graph: ChannelGraph) -> str:
    for then, now in zip_longest(graph.trace.ops, ops_again(model, example_inputs, graph.trace)):
        if then is None or now is None or then.name != now.name:
            op = now or then
            return f"{'ends before' if now is None else 'runs'} {op.name} at {op.where}"
    return ""


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"

"""Is a model still the one that was traced?

A model, and the graph that was made of it earlier, enter; its tensors leave by name, or the sentence about the
first that does not fit any more.  A model that was cast since is the same one: example inputs are cast as it was.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from ..errors import PruningError
from ..inputs import map_tensors
from .channels import ChannelGraph
from .trace import ops_again


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

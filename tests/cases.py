"""Random plans for a network, and what it takes to compare a gated network with the extracted one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.utils import _pytree as pytree

from sbf_pruner.graph import ChannelGraph, LayerNode, trace
from sbf_pruner.plan import Plan
from sbf_pruner.pruner import Pruner
from sbf_pruner.surgery import extract
from sbf_pruner.utils import call, real_copy, resized_inputs
from zoo import ZOO, fresh_inputs


@functools.cache
def traced(name: str) -> ChannelGraph:
    """The graph of a network of the zoo; traced once, changed by nobody."""
    return trace(*ZOO[name]())


def random_plans(graph: ChannelGraph, count: int = 20, seed: int = 0) -> list[Plan]:
    """Plans that leave the network connected: sparse and dense ones, empty layers, one filter each, all."""
    rng = np.random.default_rng(seed)
    makers = [_some, _with_one_empty, _with_several_empty, _some]
    plans = [_keep_all(graph, rng), _keep_one(graph, rng)]
    while len(plans) < count:
        masks = makers[len(plans) % len(makers)](graph, rng)
        plans.append(Plan.from_masks(reconnected(graph, masks, rng)))
    return plans


def _keep_all(graph, rng):
    return Plan({name: range(layer.filters) for name, layer in graph.layers.items()})


def _keep_one(graph, rng):
    masks = {name: np.arange(layer.filters) == rng.integers(layer.filters) for name, layer in graph.layers.items()}
    return Plan.from_masks(reconnected(graph, masks, rng))


def _some(graph, rng):
    ratio = rng.uniform(0.1, 0.9)
    return {name: rng.random(layer.filters) < ratio for name, layer in graph.layers.items()}


def _with_one_empty(graph, rng):
    masks = _some(graph, rng)
    for mask in masks.values():
        mask[rng.integers(mask.size)] = True
    masks[rng.choice(list(masks))][:] = False
    return masks


def _with_several_empty(graph, rng):
    masks = _some(graph, rng)
    for name in rng.choice(list(masks), max(2, len(masks) // 3)):
        masks[name][:] = False
    return masks


def reconnected(graph, masks, rng):
    """Give filters back, one at a time, until the output depends on the input again."""
    while not graph.connected(graph.settle(masks)):
        empty = [n for n, m in masks.items() if not m.any()] or [n for n, m in masks.items() if not m.all()]
        name = rng.choice(empty)
        masks[name][rng.choice(np.flatnonzero(~masks[name]))] = True
    return masks


# -- folding --------------------------------------------------------------------------------------------


def foldable(model: nn.Module, inputs: Any) -> list[tuple[str, str]]:
    """The layers and batch norms of a network in evaluation mode that can be folded into one, by name."""
    names = {module: name for name, module in model.named_modules()}
    made: dict[int, str] = {}
    held, found = [], {}

    def note(module, args, result):
        held.append(result)  # so that its id stays its own
        made[id(result)] = names[module]

    def look(module, args):
        if args and id(args[0]) in made:
            found[made[id(args[0])], names[module]] = None

    hooks = [m.register_forward_hook(note) for m in names if isinstance(m, (_ConvNd, nn.Linear))]
    hooks += [m.register_forward_pre_hook(look) for m in names if isinstance(m, _BatchNorm)]
    with torch.no_grad():
        expected = leaves(call(model, inputs))
    for hook in hooks:
        hook.remove()

    def folds(pair):
        with suppress(Exception), torch.no_grad():  # it has no statistics, or its layer has another reader
            return all(map(torch.allclose, leaves(call(folded(model, [pair]), inputs)), expected))
        return False

    return [pair for pair in found if folds(pair)]


def folded(model: nn.Module, pairs: list[tuple[str, str]]) -> nn.Module:
    """A copy of a network with batch norms folded into the layers before them by torch's own functions."""
    twin = real_copy(model)
    for path, norm_path in pairs:
        layer, norm = twin.get_submodule(path), twin.get_submodule(norm_path)
        if hasattr(layer, "in_features"):
            fused = fuse_linear_bn_eval(layer, norm)
        else:
            fused = fuse_conv_bn_eval(layer, norm, transpose=layer.transposed)
        for name, new in ((path, fused), (norm_path, nn.Identity())):
            parent, _, child = name.rpartition(".")
            setattr(twin.get_submodule(parent), child, new)
    return twin


# -- comparison -----------------------------------------------------------------------------------------


def leaves(nest: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(nest) if isinstance(t, Tensor)]


def assert_close(found: Tensor, expected: Tensor, what: str, tolerance: float, size: float = 1.0) -> None:
    # Relative to the largest number, where that is above 1: gradients may be large.
    scale = max(size, largest(expected))
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * scale, msg=lambda m: f"{what}: {m}")


def largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def run(model: nn.Module, inputs: Any, training: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and the gradients of the inputs; those of the parameters are left in them."""
    model.train(training)
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.eval()
    model.zero_grad()
    outputs = leaves(call(model, inputs))
    generator = torch.Generator().manual_seed(5)
    loss = sum((o * torch.randn(o.shape, dtype=o.dtype, generator=generator)).sum() for o in outputs)
    grads = torch.autograd.grad(loss, leaves(inputs), retain_graph=True, allow_unused=True)
    if loss.requires_grad:
        loss.backward(inputs=[p for p in model.parameters() if p.requires_grad])
    zeros = [torch.zeros_like(x) for x in leaves(inputs)]
    return outputs, [z if g is None else g for g, z in zip(grads, zeros, strict=True)]


def sliced_gradients(pruner: Pruner) -> nn.Module:
    """A network extracted from one that holds, in place of its weights, their gradients.

    So what surgery does to a weight is done to its gradient, and the two networks can be compared by name.
    """
    twin = real_copy(pruner.model)
    with torch.no_grad():
        for parameter, source in zip(twin.parameters(), pruner.model.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
    return extract(twin, pruner.example_inputs, pruner.plan(), pruner.graph)


def assert_equal_networks(
    pruner: Pruner, small: nn.Module, training: bool, seed: int = 0, tolerance: float = 1e-10
) -> None:
    """The gated and the extracted network agree in outputs and gradients; in training, in all they change."""
    model, small = pruner.model, real_copy(small)
    inputs = fresh_inputs(pruner.example_inputs, seed=seed, requires_grad=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        outputs, of_inputs = run(model, inputs, training)
        expected = sliced_gradients(pruner) if training else None
    finally:
        model.load_state_dict(before)
    small_outputs, small_of_inputs = run(small, inputs, training)
    assert len(outputs) == len(small_outputs)
    for number, (found, wanted) in enumerate(zip(small_outputs, outputs, strict=True)):
        assert_close(found, wanted, f"output {number}", tolerance)
    for number, (found, wanted) in enumerate(zip(small_of_inputs, of_inputs, strict=True)):
        assert_close(found, wanted, f"gradient of input {number}", tolerance)
    if expected is None:
        return
    # Before a norm the gradient of a bias is zero: large ones that cancel, all but for their roundings.
    size = max([1.0, *map(largest, expected.parameters())])
    for name, wanted in expected.named_parameters():
        parameter = small.get_parameter(name)
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_close(found, wanted.detach(), f"gradient of {name}", tolerance, size)
    for name, wanted in expected.named_buffers():
        assert_close(small.get_buffer(name), wanted, name, tolerance)


def assert_every_layer_is_in_one_list(model: nn.Module, graph: ChannelGraph) -> None:
    """Prunable, following or left alone: each layer is one of these, whether it ran or not."""
    named = [*graph.layers, *graph.followers, *graph.skipped]
    assert len(named) == len({*named})
    layers = {name for name, module in model.named_modules() if isinstance(module, (_ConvNd, nn.Linear))}
    ran = {node.layer for node in graph.nodes if isinstance(node, LayerNode)}
    assert layers | ran <= {*named}
    assert all(graph.unscored.values())


@torch.no_grad()
def other_inputs(model: nn.Module, inputs: Any) -> Any:
    """Inputs of another size and number, or None where the model takes those of one size only."""
    for others in resized_inputs(inputs):
        with suppress(RuntimeError):
            call(model.eval(), others)
            return fresh_inputs(others)
    return None


@torch.no_grad()
def assert_equal_outputs(model: nn.Module, small: nn.Module, inputs: Any, tolerance: float = 1e-10) -> None:
    """Two networks agree in evaluation mode."""
    outputs = [leaves(call(net.eval(), inputs)) for net in (small, model)]
    for number, (found, wanted) in enumerate(zip(*outputs, strict=True)):
        assert_close(found, wanted, f"output {number}", tolerance)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that must not change behind the user's back."""
    return {
        "tensors": {n: t.clone() for n, t in (*model.named_parameters(), *model.named_buffers())},
        "identities": {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())},
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "trains": {n: p.requires_grad for n, p in model.named_parameters()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "modules": {n: id(m) for n, m in model.named_modules()},
        "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
        "hooks": {n: [len(table) for table in _hook_tables(m)] for n, m in model.named_modules()},
    }


def _hook_tables(module: nn.Module) -> Iterator[dict[Any, Any]]:
    return (held for name, held in sorted(vars(module).items()) if "hooks" in name and isinstance(held, dict))


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    now = snapshot(model)
    for key in ("tensors", "gradients"):
        held, was = now.pop(key), before[key]
        assert held.keys() == was.keys()
        for name in held:
            assert held[name] is was[name] is None or torch.equal(held[name], was[name]), name
    assert now == {key: before[key] for key in now}

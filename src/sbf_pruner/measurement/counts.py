"""Measure parameters, MACs, memory, latency and accuracy of a network.

All functions leave the model as it was: the mode of each of its modules, its gradients and its buffers. Nothing is
printed.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ..errors import DataError, PruningError
from ..utils.timing import time_interleaved, torch_threads
from ..utils.user_code import cause
from ..utils.user_model import call, check_model, map_tensors, meta_copy, real_copy


@dataclass(frozen=True)
class Measurement:
    """Size of a network and multiply-accumulates (MACs) of one forward pass."""

    params: int
    """Number of parameters; shared ones count once."""
    macs: int
    """MACs of one forward pass on the example inputs."""
    bytes: int
    """Bytes of the parameters and buffers."""
    by_module: Mapping[str, int] = field(default_factory=dict, repr=False, hash=False)
    """MACs inside each submodule that has any, by qualified name."""


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one forward pass: the median of `n` samples and their interquartile range."""

    median: float
    iqr: float
    n: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        """Summarize a list of seconds."""
        median, n = statistics.median(seconds), len(seconds)
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if n > 1 else (median,) * 3
        return cls(1e3 * median, 1e3 * (high - low), n)


def measure(model: nn.Module, example_inputs: Any) -> Measurement:
    """Count the parameters and the multiply-accumulates (MACs) of a network.

    Counts the MACs of convolutions and matrix products in one forward pass in evaluation mode, on the example
    inputs as given (a batch of two counts twice). Biases, norms, activations, additions and pooling count nothing.
    Raises a PruningError if the model does not run on the example inputs.

    >>> measure(nn.Conv2d(3, 8, 3, padding=1), torch.zeros(1, 3, 32, 32)).macs
    221184
    """
    check_model(model)
    # A module made by torch.compile hides its operators from the counter, so count the original module.
    model = getattr(model, "_orig_mod", model)
    try:
        total, by_module = _count(meta_copy(model), map_tensors(example_inputs, lambda t: t.to("meta")))
    except Exception:  # Code that reads tensor values fails on the meta device, with any exception.
        try:
            total, by_module = _count(real_copy(model), example_inputs)
        except Exception as error:
            raise PruningError(
                f"{type(model).__name__} does not run on the example inputs "
                f"({type(error).__name__}: {cause(error)}); give what it accepts: a tensor, a tuple of positional "
                "arguments, or a dict of keyword arguments"
            ) from error
    parameters = list(model.parameters())
    return Measurement(
        params=sum(p.numel() for p in parameters),
        macs=total,
        bytes=sum(t.numel() * t.element_size() for t in chain(parameters, model.buffers())),
        by_module=by_module,
    )


def latency(
    models: Mapping[str, nn.Module], example_inputs: Any, *, pairs: int = 20, threads: int | None = None
) -> dict[str, Latency]:
    """Time several networks on the same inputs, in alternation, so that drift of the machine affects all alike.

    Every sample is the mean of enough passes to fill 10 ms. `threads` defaults to the number that torch uses now.

    >>> sorted(latency({"dense": nn.Linear(8, 8), "compact": nn.Linear(8, 4)}, torch.zeros(1, 8), pairs=2))
    ['compact', 'dense']
    """
    tensors = [leaf for leaf in pytree.tree_leaves(example_inputs) if isinstance(leaf, Tensor)]
    device = tensors[0].device if tensors else "cpu"
    with evaluating(*models.values()), torch.no_grad(), torch_threads(threads):
        calls = {name: partial(call, model, example_inputs) for name, model in models.items()}
        times = time_interleaved(calls, pairs, device=device)
    return {name: Latency.of(seconds) for name, seconds in times.items()}


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the top-1 accuracy in percent, in evaluation mode; raises a DataError if there are no batches.

    >>> accuracy(nn.Identity(), [(torch.eye(4), torch.tensor([0, 1, 2, 0]))])
    75.0
    """
    first = next(model.parameters(), None)
    hits, seen = torch.zeros((), dtype=torch.long, device=None if first is None else first.device), 0
    with evaluating(model):
        for images, labels in batches:
            outputs = model(images if first is None else images.to(first.device, non_blocking=True))
            # Accumulated on the device: reading the count of every batch would synchronize with the host.
            hits += (outputs.argmax(1) == labels.to(outputs.device)).sum().to(hits.device)
            seen += len(labels)
    if not seen:
        raise DataError("there is no batch to measure the accuracy on; give at least one (images, labels)")
    return 100 * hits.item() / seen


def saved_activations(fn: Callable[[], Any]) -> int:
    """Return the number of bytes that autograd saves for backward while `fn` runs.

    Each storage counts once and in full, however many views of it are saved. Parameters and views of them are left
    out, because they occupy memory anyway.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    >>> saved_activations(lambda: net(torch.zeros(1, 1, 10, 10))) == 4 * (10 * 10 + 2 * 8 * 8)
    True
    """
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        if not (isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage  # Keep it alive, so that no later storage gets the same address.
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(storage.nbytes() for storage in storages.values())


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Switch models to evaluation mode, and restore the mode of every single module on exit."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _count(model: nn.Module, inputs: Any) -> tuple[int, dict[str, int]]:
    """Count MACs in total and inside each submodule. Changes the model, so it must be a copy."""
    counter = FlopCounterMode(display=False)
    # FlopCounterMode hooks every tensor that requires a gradient, and fails on a parameter that is passed to a
    # module as an argument.
    model.eval().requires_grad_(False)
    with torch.no_grad(), _plain_operators(), counter:
        call(model, map_tensors(inputs, Tensor.detach))
    root = f"{type(model).__name__}."
    by_module = {
        name.removeprefix(root): sum(counts.values()) // 2
        for name, counts in counter.get_flop_counts().items()
        if name.startswith(root)
    }
    return counter.get_total_flops() // 2, by_module


@contextmanager
def _plain_operators() -> Iterator[None]:
    """Keep attention and recurrent layers from running as fused operators, which the counter counts as 0."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Setting the mkldnn flags warns about Intel GPUs.
            with torch.backends.mkldnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)

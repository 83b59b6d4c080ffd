"""The size of a network's weight file, for any choice of filters.

`FileSize` computes an upper bound for any layout, without extracting the network or writing a file. The real file
is a few bytes per tensor shorter, because the lengths of tensor names and offsets are bounded, not computed. It is
longer only if the model's own code fixes sizes (see `graph.cost`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import PruningError
from ..graph.channel_graph import ChannelGraph
from ..graph.cost import LaidOut, entries_left
from ..modules import Remap, Zeros
from ..plan import Plan
from ..utils.files import file_metadata, stored_bytes, to_plain

FORMAT = "sbf-pruner network 1"
_INSERTED = len("module.")  # surgery may insert this into the name of a tensor
_DTYPE = len("F8_E4M3")  # the longest name of a dtype in safetensors
_ALIGNED = 8
_ANY = "0" * 16  # placeholder for the hash that `wiring` returns, of the same length
_EXTRA = "_extra_state"  # key of a module's extra state in a state dict


def header(plans: Sequence[Plan], inputs: Any, wired: str) -> dict[str, Any]:
    """Build the header of the file: all plans in order, shapes and dtypes of the example inputs, `wiring` hash."""
    return {
        "format": FORMAT,
        "plans": [{name: list(kept) for name, kept in plan.keep.items()} for plan in plans],
        "inputs": to_plain(inputs, _describe),
        "wiring": wired,
    }


def wiring(network: nn.Module) -> str:
    """Return a hash of all Remap and Zeros modules, in which networks with equal tensors may differ.

    >>> kept = [wiring(nn.Sequential(Remap(source))) for source in ([0, -1, 1], [0, 1, -1], [0, -1, 1])]
    >>> [kept[0] == other for other in kept]
    [True, False, True]
    """
    modules = [
        (name, module.dim, module.source if isinstance(module, Remap) else module.width)
        for name, module in network.named_modules()
        if isinstance(module, (Remap, Zeros))
    ]
    return hashlib.sha256(json.dumps(modules).encode()).hexdigest()[: len(_ANY)]


def state_tensors(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """Return the state dict of a network; raise a PruningError if a value is not a tensor."""
    state: dict[str, Any] = model.state_dict(keep_vars=keep_vars)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            module = name.removesuffix(_EXTRA).removesuffix(".") or type(model).__name__
            raise PruningError(
                f"{module} puts a {type(value).__name__!r} into its state dict, as get_extra_state does, and the "
                "file of a network holds only tensors; store it in a buffer, or return a tensor there"
            )
    return state


def contents(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what the file of a network holds: its tensors and its header."""
    plans, inputs = getattr(model, "sbf_plans", ()), getattr(model, "sbf_inputs", None)
    return state_tensors(model), header(plans, inputs, wiring(model))


def saved_bytes(model: nn.Module, inputs: Any, plan: Plan) -> int:
    """Return the exact size of the weight file of `model`, as if it had been extracted with `plan`."""
    return stored_bytes(state_tensors(model), header((plan,), inputs, _ANY))


class FileSize:
    """Size in bytes of the file that `save` would write, for any layout.

    >>> import numpy as np, torch
    >>> from ..graph.build import trace
    >>> from ..graph.cost import lay_out, cost_of
    >>> net, images = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)), torch.rand(1, 3, 5, 5)
    >>> graph = trace(net, images)
    >>> stored, laid = FileSize(net, images, graph), lay_out(graph, {"0": np.arange(8) < 2})
    >>> stored.dense > stored.bytes(laid, cost_of(graph, laid).size) > 0
    True
    """

    def __init__(self, model: nn.Module, inputs: Any, graph: ChannelGraph) -> None:
        self._graph, self._inputs = graph, inputs
        self._before: tuple[Plan, ...] = getattr(model, "sbf_plans", ())
        state, traced = state_tensors(model, keep_vars=True), graph.trace.states
        used = {id(state[name]): name for name in traced if name in state}
        self._shared = {  # a shared tensor is stored once under each of its names
            name: used[id(tensor)] for name, tensor in state.items() if id(tensor) in used and name not in traced
        }
        self._entries = {name: _entry(name, tensor) for name, tensor in state.items()}
        self._fixed = {
            name: tensor.numel() * tensor.element_size()
            for name, tensor in state.items()
            if name not in traced and name not in self._shared
        }
        self.dense = stored_bytes(*contents(model))
        """File size of the dense network, whose header holds no new plan."""

    def bytes(self, laid: LaidOut, tensors: int) -> int:
        """Return an upper bound on the size of the file if the tensors that can be pruned take `tensors` bytes."""
        if all(mask.all() for mask in laid.keep.values()):
            return self.dense
        kept = [n for n in self._entries if self._shared.get(n, n).rpartition(".")[0] not in laid.gone]
        data = tensors + sum(self._fixed.get(name, 0) for name in kept)
        if self._shared:
            left = entries_left(self._graph, laid)
            for name in (self._shared[name] for name in kept if name in self._shared):
                stored = self._graph.trace.states[name].data
                data += left[name] * (0 if stored is None else stored.element_size())
        plans = (*self._before, Plan.from_masks(laid.keep))
        head = len(json.dumps({"__metadata__": file_metadata("0" * 64, header(plans, self._inputs, _ANY))}))
        offsets = 2 * len(str(data))
        head += sum(self._entries[name] + _INSERTED + offsets for name in kept)
        return 8 + -(-head // _ALIGNED) * _ALIGNED + data


def _entry(name: str, tensor: Tensor) -> int:
    """Return the length of a tensor's entry in the header, without the digits of its offsets."""
    shape = json.dumps(list(tensor.shape), separators=(",", ":"))
    entry = json.dumps(name, ensure_ascii=False) + f':{{"dtype":"","shape":{shape},"data_offsets":[,]}},'
    return len(entry.encode()) + _DTYPE


def _describe(at: str, tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}

"""Choose where each layer's gate is applied: at the norm that reads its output, after a sum, or at the layer.

Other norms and biases that would turn a removed channel into a constant get a gate without a score.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..modules import GatePoint
from .channel_graph import Site
from .nodes import Alive, Boundary, ChannelMove, Elementwise, Node, common_dim
from .operators.layers import LayerNode, Norm
from .records import Value
from .wiring import NodeBuilder


class GateSites:
    """Choose the gate sites of one network."""

    def __init__(self, net: NodeBuilder) -> None:
        self.net = net
        self._norms = {id(n): module for module, mains in net.main.items() for n in mains if isinstance(n, Norm)}

    def of(self, module: str, layer: str) -> Site:
        """Return a layer's site: the norm that is the only reader of its output, or the layer if there is none.

        If that site's output is only read by a sum with a `GatePoint` after it, the gate is applied there instead.
        """
        norm = self.norm_after(module)
        behind = self._behind_sum(norm or module)
        if behind is not None and behind.out.shape[behind.dim] == self._mains(module)[0].out.shape[1]:
            return Site(behind.module, "sum", layer, dim=behind.dim, edges=(behind,))
        return self._site(module, "map", layer) if norm is None else self._norm_site(norm, layer)

    def followers(self, gated: set[str]) -> list[Site]:
        """Return sites without a score: norms, and biases of depthwise convolutions, whose input may be dead.

        Sets `revives` of their nodes to False. `gated` are the modules that have a site already.
        """
        sites = []
        for module, (main, *others) in self.net.main.items():
            if module in gated or others or module in self.net.busy:
                continue
            if isinstance(main, Norm):
                # A norm of the network's input needs no gate, because channels of the input are not removed.
                if main.revives and self.net.grids[main.x][1] == main.x.shape[1]:
                    sites.append(self._norm_site(module, ""))
                    main.revives = False
            elif main.depthwise and main.bias is not None:
                sites.append(self._site(module, "bias", "", (main.bias.name.rpartition(".")[2],)))
                main.revives = False
        return sites

    def _site(self, module: str, kind: str, layer: str, parameters: tuple[str, ...] = ()) -> Site:
        edges = tuple(self.net.edges[module, "out"])
        return Site(module, kind, layer, parameters, common_dim(edges), edges)

    def _norm_site(self, module: str, layer: str) -> Site:
        args = self.net.main[module][0].op.args
        affine = [v.name for v in args[1:3] if isinstance(v, Value)]
        names = tuple(name.rpartition(".")[2] for name in affine)
        has_running = isinstance(args[3], Value)
        # A gate can only be folded into a stored scale and shift. With running statistics but no shift, a channel
        # of zeros would still become a constant. Modules in `busy` turn a zero after their norm into nonzero
        # output, so the gate is applied to that output.
        stored = affine == [f"{module}.{name}".lstrip(".") for name in names]
        foldable = stored and (len(names) == 2 or (len(names) == 1 and not has_running))
        if foldable and module not in self.net.busy:
            return self._site(module, "affine", layer, names)
        return self._site(module, "map", layer)

    def norm_after(self, module: str) -> str | None:
        """Return the norm that is the only reader of a layer's output in all of its calls, or None."""
        given = [edge.out for edge in self.net.edges[module, "out"]] if module in self.net.main else []
        found = {self._follow_to_norm(value) for value in given or [node.out for node in self._mains(module)]}
        norm = found.pop() if len(found) == 1 else None
        return norm if norm is not None and len(self.net.main[norm]) == len(self._mains(module)) else None

    def _mains(self, module: str) -> Sequence[LayerNode | Norm]:
        return self.net.main.get(module) or self.net.inner[module]

    def _behind_sum(self, module: str) -> Boundary | None:
        """Return the unused `GatePoint` after the sum that alone reads a module's output, or None."""
        edges = self.net.edges[module, "out"]
        node: Node | None = edges[0] if len(edges) == 1 else None
        while node is not None:
            value = node.out
            readers = self.net.consumers[value]
            node = readers[0] if len(readers) == 1 and value not in self.net.outputs else None
            if isinstance(node, Boundary):
                gate_point = isinstance(self.net.modules[node.module], GatePoint) and node.dim == edges[0].dim
                return node if gate_point and not node.layer else None
            if not (isinstance(node, Elementwise) and node.alive_if is Alive.ANY):
                return None
        return None

    def _follow_to_norm(self, value: Value) -> str | None:
        while True:
            readers = self.net.consumers[value]
            if len(readers) != 1 or value in self.net.outputs:
                return None
            node = readers[0]
            if isinstance(node, Norm):
                return self._norms.get(id(node))
            edge = isinstance(node, Boundary) and node.labels is None
            passes = isinstance(node, Elementwise) and node.alive_if is Alive.ANY and len(node.inputs) == 1
            same = isinstance(node, ChannelMove) and self.net.grids[node.out] == self.net.grids[value]
            if isinstance(node, ChannelMove) and same and len(node.operands) == 1:
                labels = node.labels[0].reshape(-1)
                passes = np.array_equal(labels, np.arange(labels.size))
            if not (edge or passes):
                return None
            value = node.out

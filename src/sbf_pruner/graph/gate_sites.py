"""Choose where each layer's gate is applied: at the first norm behind it, behind a sum, or at the layer itself.

Norms and biases without a score that would turn a removed channel into a constant get a gate as well.
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
    """Finds the gate sites of one network."""

    def __init__(self, net: NodeBuilder) -> None:
        self.net = net
        self._norms = {id(n): module for module, mains in net.main.items() for n in mains if isinstance(n, Norm)}

    def of(self, module: str, layer: str) -> Site:
        """Return a layer's site: the first norm behind it if that alone reads its output, else the layer itself.

        If the model has a `GatePoint` behind the sum that comes next, the gate is applied there instead.
        """
        norm = self.norm_after(module)
        behind = self._behind_sum(norm or module)
        if behind is not None and behind.out.shape[behind.dim] == self._mains(module)[0].out.shape[1]:
            return Site(behind.module, "sum", layer, dim=behind.dim, edges=(behind,))
        if norm is None:
            edges = tuple(self.net.edges[module, "out"])
            return Site(module, "map", layer, (), common_dim(edges), edges)
        return self._norm_site(norm, layer)

    def followers(self, taken: set[str]) -> list[Site]:
        """Return sites without a score: norms and biases of depthwise convolutions that dead channels may reach.

        Sets `revives` of their nodes to False.
        """
        sites = []
        for module, mains in self.net.main.items():
            if module in taken or len(mains) > 1 or module in self.net.busy:
                continue
            main = mains[0]
            edges = tuple(self.net.edges[module, "out"])
            told_apart = self.net.grids[main.x][1] == main.x.shape[1]  # False if the network's input is normalized
            if isinstance(main, Norm) and main.revives and told_apart:
                sites.append(self._norm_site(module, ""))
                main.revives = False
            elif isinstance(main, LayerNode) and main.depthwise and main.bias is not None:
                bias = main.bias.name.rpartition(".")[2]
                sites.append(Site(module, "bias", "", (bias,), common_dim(edges), edges))
                main.revives = False
        return sites

    def _norm_site(self, module: str, layer: str) -> Site:
        edges = tuple(self.net.edges[module, "out"])
        main = self.net.main[module][0]
        assert isinstance(main, Norm)
        pair = [v for v in main.op.args[1:3] if isinstance(v, Value)]
        names = tuple(v.name.rpartition(".")[2] for v in pair)
        has_running = isinstance(main.op.args[3], Value)
        # Without a stored scale there is nothing to fold a gate into. Running statistics without a shift would
        # still turn a zero into a constant.
        stored = all(v.name == f"{module}.{name}".lstrip(".") for v, name in zip(pair, names, strict=True))
        foldable = stored and (len(names) == 2 or (len(names) == 1 and not has_running))
        # A busy module makes something of a zero behind its norm, so the gate must come after that.
        foldable = foldable and module not in self.net.busy
        kind = "affine" if foldable else "map"
        return Site(module, kind, layer, names if foldable else (), common_dim(edges), edges)

    def norm_after(self, module: str) -> str | None:
        """Return the norm that is the only reader of a layer's output in all of its calls, or None."""
        given = [edge.out for edge in self.net.edges[module, "out"]] if module in self.net.main else []
        found = {self._follow_to_norm(value) for value in given or [node.out for node in self._mains(module)]}
        norm = found.pop() if len(found) == 1 else None
        return norm if norm is not None and len(self.net.main[norm]) == len(self._mains(module)) else None

    def _mains(self, module: str) -> Sequence[LayerNode | Norm]:
        return self.net.main.get(module) or self.net.inner[module]

    def _behind_sum(self, module: str) -> Boundary | None:
        """Return the `GatePoint` behind the sum that a module's output goes into, if it is not taken yet."""
        edges = self.net.edges[module, "out"]
        node: Node | None = edges[0] if len(edges) == 1 else None
        while node is not None:
            value = node.out
            readers = self.net.consumers[value]
            node = readers[0] if len(readers) == 1 and value not in self.net.outputs else None
            if isinstance(node, Boundary):
                place = isinstance(self.net.modules[node.module], GatePoint) and node.dim == edges[0].dim
                return node if place and not node.layer else None
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
            identity = isinstance(node, ChannelMove) and same and _is_identity(node)
            if not (edge or passes or identity):
                return None
            value = node.out


def _is_identity(node: ChannelMove) -> bool:
    labels = node.labels[0]
    return len(node.operands) == 1 and np.array_equal(labels.reshape(-1), np.arange(labels.size))

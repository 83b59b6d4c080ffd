"""Modules that an extracted network contains in addition to the user's own.

Layers of one residual stage may keep different filters, so their outputs must be brought into a common layout.
`Remap` does that (gather, scatter into zeros, or both), `Zeros` replaces a layer without filters, and
`RemappedModule` wraps a user's module with the remaps before and after it. None of them has parameters; index
tables are buffers, so they move with the network to any device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Remap(nn.Module):
    """Select or reorder channels: output channel `i` is input channel `source[i]`, or zero if `source[i]` is -1.

    >>> Remap([1, -1, 0])(torch.tensor([[5.0, 7.0]]))
    tensor([[7., 0., 5.]])
    """

    take: Tensor
    put: Tensor
    back: Tensor
    forth: Tensor

    def __init__(self, source: Sequence[int], dim: int = 1, inputs: int | None = None) -> None:
        super().__init__()
        self.source = tuple(int(i) for i in source)
        self.dim = dim
        kept = [i for i in self.source if i >= 0]
        self.inputs = inputs if inputs is not None else max(kept, default=-1) + 1
        take = torch.tensor(kept, dtype=torch.int64)
        put = torch.tensor([o for o, i in enumerate(self.source) if i >= 0], dtype=torch.int64)
        # Source index of each output channel, and output index of each input channel; -1 for none.
        forth = torch.tensor(self.source, dtype=torch.int64)
        back = torch.full((self.inputs,), -1).index_copy_(0, take, put)
        # Not persistent: the indices are not trained, but computed again from the plan when a network is loaded.
        for name, table in (("take", take), ("put", put), ("forth", forth), ("back", back)):
            self.register_buffer(name, table, persistent=False)
        self._moves = len(set(kept)) == len(kept)
        self._takes_all = kept == list(range(self.inputs))
        self._puts_all = len(kept) == len(self.source)

    def forward(self, x: Tensor) -> Tensor:
        if self._moves and self.dim == 1 and torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            # The result is in channels-last memory format, which is the fastest on a GPU.
            return _Moved.apply(x.movedim(1, -1), self.forth, self.back).movedim(-1, 1)
        # A feature map of one channel or one pixel has both memory formats and must stay contiguous for `view()`.
        last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        if last and self.dim == 1:
            # In channels-last memory format this is a matrix of shape (N * H * W, C), and selecting its columns is
            # much faster than selecting channels of a feature map with permuted strides.
            images, channels, height, width = x.shape
            rows = self._move(x.permute(0, 2, 3, 1).reshape(-1, channels), 1)
            return rows.view(images, height, width, -1).permute(0, 3, 1, 2)
        return self._move(x, self.dim)

    def _move(self, x: Tensor, dim: int) -> Tensor:
        if not self._takes_all:
            x = x.index_select(dim, self.take)
        if self._puts_all:
            return x
        shape = list(x.shape)
        shape[dim] = len(self.source)
        return x.new_zeros(shape).index_add_(dim, self.put, x)

    def extra_repr(self) -> str:
        zeros = sum(i < 0 for i in self.source)
        return f"{self.inputs} -> {len(self.source)}" + (f", {zeros} zero" if zeros else "")


class GatePoint(Remap):
    """Identity module that a model calls on a sum to have a layer's gate applied there, not before the addition.

    A closed gate then removes the whole channel of the sum, including what the other operand adds to it. In an
    extracted network a plain remap takes its place.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(range(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x


class _Moved(torch.autograd.Function):
    """Remap of the last dimension as a table lookup in forward and backward, which a compiler can fuse.

    The gradient of plain indexing would be an index_add, which it cannot fuse. The result must not be a view,
    because the model may modify it in place (`x += shortcut`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _looked_up(x, forth)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return _looked_up(gradients[0], back), None, None


def _looked_up(x: Tensor, table: Tensor) -> Tensor:
    return torch.where(table >= 0, x.index_select(-1, table.clamp_min(0)), 0)


@dataclass(frozen=True)
class Window:
    """Settings of a convolution along one spatial dimension; a call maps the input size to the output size."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    output_padding: int = 0
    transposed: bool = False
    extra: int = 0  # padding that the module itself adds before the convolution (both ends together)

    def __call__(self, size: int) -> int:
        size += self.extra
        reach = self.dilation * (self.kernel - 1)
        if self.transposed:
            return (size - 1) * self.stride - 2 * self.padding + reach + self.output_padding + 1
        return (size + 2 * self.padding - reach - 1) // self.stride + 1


class Zeros(nn.Module):
    """Replacement of a layer that keeps no filter: returns zeros in the shape of its output, without arithmetic.

    Attributes of the layer are copied and its parameters become empty buffers, so that code that reads its settings
    or the dtype of its weight keeps working.
    """

    def __init__(
        self, width: int, dim: int = 1, windows: Sequence[Window] = (), instead_of: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.width = width
        self.dim = dim
        self.windows = tuple(windows)
        if instead_of is not None:
            for name, value in vars(instead_of).items():
                if not name.startswith("_"):
                    self.__dict__.setdefault(name, value)
            for name, held in (*instead_of._parameters.items(), *instead_of._buffers.items()):
                empty = None if held is None else held.detach().new_empty(0)
                self.register_buffer(name, empty, persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (x,) = (a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor))
        shape = list(x.shape)
        shape[self.dim] = self.width
        first = len(shape) - len(self.windows)
        asked = kwargs.get("output_size", args[1] if len(args) > 1 else None)
        if asked is not None and self.windows and self.windows[0].transposed:
            shape[first:] = list(asked)[-len(self.windows) :]
            return x.new_zeros(shape)
        for axis, window in enumerate(self.windows, start=first):
            shape[axis] = window(shape[axis])
        return x.new_zeros(shape)

    def extra_repr(self) -> str:
        return f"{self.width}"


class RemappedModule(nn.Module):
    """A user's module with remaps of its input and its output.

    Attributes of the module can be read, set and deleted here, so code that reads `block.conv1.stride` or assigns
    `block.conv1.weight` keeps working.

    `folded` is for a layer without a bias whose batch norm has a remap of its own. Code that folds the norm into
    the layer removes both the norm and the norm's remap, and gives the layer a bias. Once the layer has a bias,
    this module therefore applies `folded`, a copy of the norm's remap, to the output of the layer.
    """

    INNER = "module"
    _OWN = frozenset({"before", "module", "after", "folded", "training"})

    def __init__(self, module: nn.Module, before: Remap | None = None, after: Remap | None = None) -> None:
        super().__init__()
        self.before = before if before is not None else nn.Identity()
        self.module = module
        self.after = after if after is not None else nn.Identity()
        self.folded: Remap | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parts: dict[str, Any] = self._modules  # avoids the slow __getattr__
        # The tensor may also be a keyword argument (`input=`), and there may be settings (`output_size=`).
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            result = parts["after"](parts["module"](parts["before"](args[0])))
        else:
            args, kwargs = pytree.tree_map_only(Tensor, parts["before"], (args, kwargs))
            result = parts["after"](parts["module"](*args, **kwargs))
        folded = parts.get("folded")
        return result if folded is None or self.module.bias is None else folded(result)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == self.INNER or name.startswith("__"):
                raise  # before `module` is set; and copy and pickle must not find its dunder methods
            return getattr(super().__getattr__(self.INNER), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._owns(name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._owns(name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter on the wrapped module."""
        self.module.register_parameter(name, param)

    def _owns(self, name: str) -> bool:
        return name in self._OWN or name.startswith("_")


def plain_names(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Map every qualified module name to the name without the `RemappedModule` wrappers of earlier extractions."""
    names: dict[str, str] = {}
    for path in modules:
        head, _, tail = path.rpartition(".")
        wrapped = isinstance(modules.get(head), RemappedModule) and tail == RemappedModule.INNER
        parent = names.get(head, head)
        names[path] = parent if wrapped else f"{parent}.{tail}" if parent else tail
    return names

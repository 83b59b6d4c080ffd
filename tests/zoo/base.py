"""What every network of the zoo is made with: the tables, example inputs, random norms, and common parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Make = Callable[[], tuple[nn.Module, Any]]


ZOO: dict[str, Make] = {}


REFUSED: dict[str, Make] = {}


def entry(inputs: Any, into: dict[str, Make] = ZOO) -> Callable[[Any], Any]:
    """Enter a network into the zoo; `inputs` is a nest of tuples, lists and dicts of `Shape`s."""

    def enter(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def make() -> tuple[nn.Module, Any]:
            torch.manual_seed(1)
            model = randomise(build().double())
            example = pytree.tree_map_only(Shape, lambda s: torch.randn(s.sizes, dtype=torch.float64), inputs)
            return model, example

        into[build.__name__] = make
        return build

    return enter


class Shape:
    """The shape of an example input."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes


IMAGE = Shape(2, 3, 8, 8)


def randomise(model: nn.Module) -> nn.Module:
    """Give every norm statistics, scales and shifts as training might leave them."""
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
            if type(module).__name__.endswith("Norm") or "Norm" in type(module).__name__:
                if getattr(module, "weight", None) is not None:
                    module.weight.uniform_(0.5, 1.5).mul_(torch.randn_like(module.weight).sign())
                if getattr(module, "bias", None) is not None:
                    module.bias.normal_()
    return model


def fresh_inputs(inputs: Any, batch: int = 3, seed: int = 0, requires_grad: bool = False) -> Any:
    """Other random inputs of the same kind, with another batch size."""
    generator = torch.Generator().manual_seed(seed)

    def other(t: Tensor) -> Tensor:
        new = torch.randn(batch, *t.shape[1:], dtype=t.dtype, generator=generator)
        return new.requires_grad_(requires_grad)

    return pytree.tree_map_only(Tensor, other, inputs)


def conv_bn(inputs: int, outputs: int, kernel: int = 3, **options: Any) -> nn.Sequential:
    """A convolution without bias that keeps the size of the map, and its norm."""
    options = {"padding": kernel // 2, "bias": False, **options}
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, **options), nn.BatchNorm2d(outputs))


class Head(nn.Module):
    """Global pooling and a classifier."""

    def __init__(self, width: int, classes: int = 4) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.pool(x).flatten(1))

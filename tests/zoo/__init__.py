"""Tiny networks, each named for what makes it hard to prune, with example inputs for each; a module per topic.

`ZOO[name]()` gives a network in float64 and its inputs; `REFUSED` holds those that cannot be traced or have nothing
to prune. Norms have random statistics and random, partly negative, scales and shifts, so that a removed channel
that comes back as a constant is seen in the output.
"""

from . import (  # noqa: F401 (each enters its networks into ZOO or REFUSED)
    attention,
    chains,
    concatenations,
    fixed_widths,
    groups,
    modes,
    module_boundaries,
    products,
    refused,
    shapes,
    sharing,
    sums,
    values,
    weights,
)
from .base import REFUSED, ZOO, Head, conv_bn, fresh_inputs, randomise
from .sums import Block, OptionA
from .weights import Standardised, StandardisedByHand

__all__ = [
    "REFUSED",
    "ZOO",
    "Block",
    "Head",
    "OptionA",
    "Standardised",
    "StandardisedByHand",
    "conv_bn",
    "fresh_inputs",
    "randomise",
]

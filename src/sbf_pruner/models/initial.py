"""How the bundled networks start: one rule for all of them.

A freshly built network enters; the same network leaves with He-normal convolutions (variance kept on the way
back, hence fan-out).  Norms start as the identity and linear layers as PyTorch leaves them.  It works on the
meta device too, where nothing is drawn.
"""

from __future__ import annotations

from torch import nn


def start_weights(model: nn.Module) -> None:
    """Draw every convolution of `model` from He's normal distribution, in place."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

"""The signs of weights at two bits each, and their product with other weights.

Flat tensors enter; bytes leave that hold four signs each.  Zero is a sign of its own.  A product unpacks a piece
at a time, so it needs little memory however large the layer is.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_signs(values: Tensor) -> Tensor:
    """The signs of a flat tensor at two bits each: 0 for negative, 1 for exactly zero, 2 for positive.

    >>> pack_signs(torch.tensor([-3.0, 0.0, 5.0, 1.0, -1.0]))
    tensor([164,   0], dtype=torch.uint8)
    """
    codes = (values >= 0).to(torch.uint8) + (values > 0).to(torch.uint8)
    a, b, c, d = torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4).unbind(1)
    return a | b << 2 | c << 4 | d << 6


def unpack_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The signs as -1, 0 and 1, four for every byte: up to three more than were packed.

    >>> unpack_signs(torch.tensor([164], dtype=torch.uint8), torch.float32)
    tensor([-1.,  0.,  1.,  1.])
    """
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & 3).flatten().to(dtype) - 1


def inner(packed: Tensor, vector: Tensor, chunk: int = 1 << 20) -> Tensor:
    """<signs, vector>, unpacking at most 4 * chunk signs at a time."""
    pairs = zip(packed.split(chunk), vector.split(4 * chunk), strict=True)
    return torch.stack([(unpack_signs(s, v.dtype)[: len(v)] * v).sum() for s, v in pairs]).sum()

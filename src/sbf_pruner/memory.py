"""How much memory a device has for us, for whoever is about to fill it."""

from __future__ import annotations

import os

import torch


def memory_of(device: torch.device) -> int | None:
    """The bytes a device could still give us, or all that a machine has; None where it cannot be known."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None

"""What newer run folders hold in files of their own, come by otherwise: the network, and the plan so far.

A resolved recipe, or a folder, enters; what `network.json` would hold, or the kept widths, leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..drawing.scene import compose, to_json
from ..errors import RunError
from ..files import from_plain, read_header
from ..models import resolve
from ..overview import inspect

_SIZES = {"digits": (1, 8, 8), "cifar10": (3, 32, 32)}


def inspected(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The facts and the boxes of the network that a recipe names."""
    model, data = recipe["model"], recipe["data"]
    side = data.get("image_size", 0)
    size = _SIZES.get(data["name"], (data.get("channels", 3), 0, 0))
    size = (size[0], side, side) if side else size
    if not size[1]:
        raise RunError(f"the size of the images of {data['name']} is not known")
    options = model.get("options", {})
    network = resolve(model["name"], num_classes=model["num_classes"], in_channels=model["in_channels"], **options)
    seen = inspect(network, torch.zeros(1, *size))
    return {"facts": seen.facts, "boxes": to_json(compose(seen))}


def checkpointed_plan(folder: Path) -> dict[str, int] | None:
    """The filters each layer keeps in the last checkpoint; None where there is no checkpoint to read."""
    try:  # the header alone: a page that is open asks after every epoch, and tensors may be many
        header = read_header(folder / "checkpoints" / "last.safetensors", "")
        plan = from_plain(header["state"], lambda name: None)["networks"]["plan"]
        return {name: len(kept) for name, kept in plan.items()}
    except (RunError, LookupError, TypeError, ValueError, AttributeError):
        return None

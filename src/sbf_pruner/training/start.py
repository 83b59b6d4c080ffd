"""What a run starts from, checked before anything is written: weights, and a network that fits the images.

A file, a model and data enter; a loaded model, or one sentence of what does not fit, leaves.  Weights are loaded
all or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..copies import real_copy
from ..errors import RunError, nearest
from .data import Data
from .sources import SOURCES


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a state_dict from a .safetensors, .pt or .pth file, which must fit the model tensor by tensor."""
    where = f"model.weights: {path}"
    given = _read(path, where)
    held, trained = model.state_dict(), dict(model.named_parameters())
    missing = [name for name in held if name not in given]
    unknown = [name for name in given if name not in held]
    if unknown and all(name.startswith("module.") for name in given):
        raise RunError(f"{where} was saved from a DataParallel wrapper; save model.module.state_dict()")
    if missing or unknown:
        parts = [f"has no {missing[0]!r}{_more(missing)}"] if missing else []
        if unknown:
            hint = "" if missing else f" ({nearest(unknown[0], held)})"
            parts.append(f"has {unknown[0]!r}{_more(unknown)}, which the model has not{hint}")
        raise RunError(f"{where} {' and '.join(parts)}; give the weights of this very network")
    for name, tensor in given.items():
        if tensor.shape != held[name].shape:
            raise RunError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, the model's {tuple(held[name].shape)}; "
                "set model.num_classes, model.in_channels or model.options to what it was trained with"
            )
        if tensor.is_floating_point() != held[name].is_floating_point():
            raise RunError(f"{where}: {name} has {tensor.dtype}, the model's {held[name].dtype}; save it so")
        if tensor.isnan().any() or (name in trained and tensor.isinf().any()):  # a mask may hold infinities
            raise RunError(f"{where}: {name} holds numbers that are not finite; give others")
    model.load_state_dict(given)


def check_fit(model: nn.Module, images: Tensor, data: Data) -> None:
    """Does the network run on these images and give one number per class?  It is left in evaluation mode."""
    shape = "x".join(map(str, images.shape[1:]))
    try:
        with torch.no_grad():
            outputs = model.eval()(images)
    except Exception as error:  # a user's network may fail in any way
        cause = " ".join(str(error).split())
        remedy = f"build it for {images.shape[1]} channels (model.in_channels), or set data.image_size"
        if data.name not in SOURCES:
            remedy += "; of a dataset of your own, give channels, height and width in this order"
        if others := sorted({str(p.dtype) for p in model.parameters() if p.dtype != images.dtype}):
            remedy = f"images are {images.dtype} and weights {', '.join(others)}: build a network of {images.dtype}"
        raise RunError(
            f"{type(model).__name__} does not run on the images of {data.name}, {shape} "
            f"({type(error).__name__}: {cause}); {remedy}"
        ) from error
    if not isinstance(outputs, Tensor) or outputs.dim() != 2:
        what = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise RunError(
            f"{type(model).__name__} gives {what} for {len(images)} images; training needs a network that "
            f"gives one row of {data.num_classes} logits per image; return these alone, or prune it in a loop of "
            "your own (sbf.Pruner)"
        )
    if outputs.shape[1] != data.num_classes:
        raise RunError(
            f"{type(model).__name__} gives {outputs.shape[1]} numbers per image but {data.name} has "
            f"{data.num_classes} classes; build it with num_classes = {data.num_classes}, or set "
            f"model.num_classes = {outputs.shape[1]} if those are the classes meant"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RunError(
            f"all weights of {type(model).__name__} are frozen, so nothing is trained; call requires_grad_(True)"
        )
    trained = _trained_outputs(model, images)
    if trained is not None and not isinstance(trained, Tensor):
        raise RunError(
            f"{type(model).__name__} gives {type(trained).__name__} in training mode, where the loss needs logits "
            "alone; build it without auxiliary outputs (such as model.options.aux_logits = false), or train it in "
            "a loop of your own with sbf_pruner.Pruner"
        )


def _trained_outputs(model: nn.Module, images: Tensor) -> Any:
    """What a copy gives in training mode; None if it does not run on so few images, which says nothing yet."""
    streams = torch.random.fork_rng(
        [images.device] if images.is_cuda else []
    )  # dropout must not move the run's own
    try:
        with torch.no_grad(), streams:
            return real_copy(model).train()(images)
    except Exception:
        return None


def _read(path: Path, where: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise RunError(f"{where} does not exist; give a .safetensors, .pt or .pth file")
    try:
        with path.open("rb"):  # safetensors reports every file that it cannot open as missing
            pass
        given: Any = (
            load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        )
    except SafetensorError as error:
        raise RunError(f"{where} cannot be read ({error}); save it with safetensors.torch.save_file") from error
    except OSError as error:
        raise RunError(f"{where} cannot be read ({error.strerror or error}); give another file") from error
    except Exception as error:  # an unpickler fails in any way, and torch's words tell how to run the file's code
        raise RunError(
            f"{where} cannot be read (it is damaged, or holds a whole model, which is never unpickled); save it "
            "with torch.save(model.state_dict(), path)"
        ) from error
    if not isinstance(given, dict) or not all(isinstance(tensor, Tensor) for tensor in given.values()):
        raise RunError(f"{where} holds something other than a state_dict; save model.state_dict() alone")
    return given


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""

"""Build networks by name: bundled ones, those of torchvision and timm, and the user's own.

Every recipe sets `num_classes` and `in_channels`: other libraries get them under their own names, and a user's
callable gets those that its signature has. An option that the builder does not accept is an error. Other packages
are imported only if a name requires them, and every error message is one sentence that names the model.

A recipe that is not trusted (see `utils.user_code.Origin`) may only name bundled networks, and those that
torchvision and timm list, with options that are plain values. Nothing else is imported or opened for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import PruningError, suggestion
from ..utils.user_code import (
    TRUSTED,
    Origin,
    accepted_parameters,
    failing_line,
    matching_arguments,
    one_line_error,
    required_parameters,
)
from .cifar import (
    VGG16,
    BasicBlock,
    MobileNetV2,
    ResNet,
    Shortcut,
    mobilenet_v2,
    resnet20,
    resnet32,
    resnet44,
    resnet56,
    resnet110,
    vgg16_bn,
)

__all__ = ["BUNDLED", "VGG16", "BasicBlock", "MobileNetV2", "ResNet", "Shortcut", "build_network", "resolve"]

BUNDLED: dict[str, Callable[..., nn.Module]] = {
    builder.__name__: builder
    for builder in (resnet20, resnet32, resnet44, resnet56, resnet110, vgg16_bn, mobilenet_v2)
}
# Options whose string values timm only looks up in its own tables; any other string may be a file or a URL.
_SAFE_STRING_OPTIONS = {"torchvision": (), "timm": ("act_layer", "norm_layer", "global_pool")}
# Prefixes of options that load weights if they are true.
_LOADING_PREFIXES = ("pretrained", "weights", "checkpoint")


def resolve(name: str, /, **options: Any) -> nn.Module:
    """Build the network called `name`: bundled, "torchvision:NAME", "timm:NAME" or "package.module:callable".

    >>> type(resolve("resnet20", num_classes=4)).__name__
    'ResNet'
    """
    return build_network(name, options, TRUSTED)


def build_network(name: str, options: Mapping[str, Any], origin: Origin) -> nn.Module:
    """Build the network called `name`; raises a RunError if that requires trust and `origin` is not trusted."""
    options = dict(options)
    library, colon, inner = name.partition(":")
    if not colon:
        if name not in BUNDLED:
            raise PruningError(
                f"no bundled model is called {name!r} (a model of your own is written package.module:callable); "
                f"{suggestion(name, BUNDLED)}"
            )
        return _build(name, BUNDLED[name], options)
    if not library or not inner:
        raise PruningError(
            f"{name!r} is not a complete name; write torchvision:NAME, timm:NAME or package.module:callable"
        )
    if library in _SAFE_STRING_OPTIONS:
        for key, value in options.items():
            if not _plain(library, key, value):
                origin.check(f"model.options.{key}", value, "may name a file or an address, which is opened")
        build = _torchvision if library == "torchvision" else _timm
        return build(name, inner, options, origin)
    return _user_callable(name, options, origin)


def _plain(library: str, key: str, value: Any) -> bool:
    """Return True if an option cannot make a library open a file or an address."""
    if isinstance(value, list | tuple):
        return all(_plain(library, key, item) for item in value)
    if isinstance(value, str):
        return key in _SAFE_STRING_OPTIONS[library]
    return isinstance(value, bool | int | float) and not (value and key.startswith(_LOADING_PREFIXES))


def _torchvision(name: str, inner: str, options: dict[str, Any], origin: Origin) -> nn.Module:
    models = _library("torchvision", origin).models
    _check_listed(name, inner, models.list_models())
    channels = options.pop("in_channels", 3)
    if channels != 3:
        raise PruningError(f"{name} takes images of 3 channels, not {channels}; wrap it in a callable of your own")
    return _build(name, models.get_model_builder(inner), options)


def _timm(name: str, inner: str, options: dict[str, Any], origin: Origin) -> nn.Module:
    timm = _library("timm", origin)
    # A name may end in the tag of pretrained weights ("resnet18.a1_in1k"); the architecture is before the dot.
    _check_listed(name, inner.partition(".")[0], timm.list_models())
    if "in_channels" in options:
        options["in_chans"] = options.pop("in_channels")
    return _build(name, lambda **rest: timm.create_model(inner, **rest), options)


def _user_callable(name: str, options: dict[str, Any], origin: Origin) -> nn.Module:
    target = origin.find("model.name", name)
    if isinstance(target, nn.Module):
        raise PruningError(f"{name} is a network already built; name the class or a function that builds it")
    if not callable(target):
        raise PruningError(f"{name} is of type {type(target).__name__}, which cannot be called to build a network")
    offers: dict[str, Any] = {key: options.pop(key) for key in ("in_channels", "num_classes") if key in options}
    return _build(name, target, {**matching_arguments(target, offers), **options})


def _build(name: str, builder: Callable[..., Any], options: dict[str, Any]) -> nn.Module:
    """Call `builder`; raises a PruningError for unknown options, failures, and results that are not modules."""
    accepted = accepted_parameters(builder)
    for option in options:
        if accepted is not None and option not in accepted:
            hint = suggestion(option, accepted) if accepted else "it takes none"
            raise PruningError(f"{name} has no option {option!r}; {hint}")
    try:
        model = builder(**options)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            why = f"at {failing_line(error)}"
        else:  # The call itself failed, for example for a missing argument.
            lacking = [parameter for parameter in required_parameters(builder) if parameter not in options]
            written = " ".join(f"--option {key}=VALUE" for key in lacking)
            remedy = f"; give {written}, or model.options in a recipe" if lacking else ""
            why = one_line_error(error) + remedy
        raise PruningError(f"{name} could not be built with {given}: {why}") from error
    if not isinstance(model, nn.Module):
        raise PruningError(f"{name} returned an object of type {type(model).__name__}, not an nn.Module")
    return model


def _library(package: str, origin: Origin) -> ModuleType:
    try:
        return origin.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise PruningError(f"{package} needs {error.name}; run: pip install {error.name}") from error
        raise PruningError(f"{package}:NAME needs {package}; run: pip install {package}") from error
    except Exception as error:  # A build for another version of torch can fail with any exception.
        raise PruningError(
            f"{package} is installed but cannot be imported: {one_line_error(error)}; install builds of it, and of "
            f"what it needs, that belong to torch {torch.__version__}"
        ) from error


def _check_listed(name: str, inner: str, names: list[str]) -> None:
    if inner not in names:
        hint = suggestion(inner, names)
        # These libraries have hundreds of models: suggest a similar name, but never list them all.
        hint = hint if hint.startswith("did") else f"it has {len(names)} others"
        raise PruningError(f"{name}: {name.partition(':')[0]} has no model {inner!r}; {hint}")

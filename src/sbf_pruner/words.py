"""Words of the command line, read: sizes, options, files to be written, names of recipes.

Text enters; values leave, or one sentence that says what to write instead.  Nothing here imports torch.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .arguments import LARGE_INPUT, SMALL_INPUT, STDOUT
from .errors import PruningError, RecipeError, nearest
from .writable import why_not_writable


def usual_input(model: str) -> str:
    """The size of an input that nobody has given."""
    return LARGE_INPUT if model.startswith(("torchvision:", "timm:")) else SMALL_INPUT


def shape(text: str) -> tuple[int, ...]:
    """The sizes of one input: "3,32,32"."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise PruningError(f"--input {text!r}: write one input's sizes without the batch, such as 3,32,32")
    return sizes


def option(text: str) -> tuple[str, Any]:
    """A keyword of a network: "num_classes=100"."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key.isidentifier():
        raise PruningError(f"--option {text!r}: write KEY=VALUE, such as num_classes=100")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:  # a word, not a number
        return key, value


def named(flag: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Some of the known names, in the order given: "l1,chip"; all where nothing is given."""
    if text is None:
        return list(known)
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in known:
            raise PruningError(f"{flag} {name!r} is not known; {nearest(name, known)}")
    if len(set(names)) < len(names):
        raise PruningError(f"{flag} {text!r} names one of them twice; name each once")
    return names


def numbers(flag: str, text: str) -> list[int]:
    """Different whole numbers: "0,1,2"."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or len(set(found)) < len(found):
        raise PruningError(f"{flag} {text!r}: write different whole numbers, such as 0,1,2")
    return found


def target_file(flag: str, text: str | None, endings: Sequence[str], facts: Path | None = None) -> Path | None:
    """A file that can be written, said before any work is done; not the one where `--json` puts the `facts`."""
    if text is None:
        return None
    path = Path(text)
    if path.suffix not in endings:
        raise PruningError(f"{flag} {text!r}: give a file that ends in {' or '.join(endings)}")
    if path.is_dir():
        raise PruningError(f"{flag} {text!r} is a folder; give a file that ends in {' or '.join(endings)}")
    if (reason := why_not_writable(path)) is not None:
        raise PruningError(f"{flag} {text!r} cannot be written, because {reason}; name another file")
    if facts is not None and path.resolve() == facts.resolve():
        raise PruningError(f"{flag} and --json both name {facts}, which can hold one of them; name two files")
    return path


def json_file(text: str | None) -> Path | None:
    """Where `--json` writes; None where it prints, or was not given."""
    return target_file("--json", None if text == STDOUT else text, (".json",))


def changes(targets: Sequence[str], said: Sequence[str]) -> list[str]:
    """The settings that targets are short for, and those that are given as such; none may be given as both."""
    if not targets:
        return list(said)
    from .budget.targets import Budget

    sizes = {f"budget.{name}": value for name, value in asdict(Budget.parse(list(targets))).items() if value != 1}
    for text in said:
        if (key := text.partition("=")[0].strip()) in sizes:
            raise RecipeError(f"{key} is given by --set and by --target; give it once")
    return [*(f"{key}={value!r}" for key, value in sizes.items()), *said]


def known_recipe(name: str | None) -> str:
    """The recipe to run: a bundled one, or a file."""
    from .training.recipe import bundled_recipes

    if name is None:
        raise RecipeError(f"name a recipe to run: {', '.join(bundled_recipes())}, or a file that ends in .toml")
    return name


def again(given: Sequence[str]) -> str:
    """The command that goes on with what this one began."""
    return shlex.join(["sbf", *(word for word in given if word not in ("--force", "--resume")), "--resume"])

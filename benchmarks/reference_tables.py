"""The reference page: what the public names and the settings of a recipe say of themselves."""

from __future__ import annotations

import inspect
import re
from typing import Any

import sbf_pruner as sbf
from sbf_pruner.training import Recipe, settings

SECTIONS = {"Budget": "budget", "Constraints": "constraints", "Scores": "scores"}  # sections of a recipe

SHARED = ("from_dict", "to_dict", "to_toml")  # methods of all sections


def public_names() -> str:
    """Every public name: how it is called, and its docstring; of a class also what it can do."""
    parts = []
    for name in sbf.__all__:
        held = getattr(sbf, name)
        parts.append(f"### `sbf.{name}`\n\n{_called(name, held)}{_told(held)}")
        if name in SECTIONS:
            parts.append(f"What the arguments mean is listed under [`[{SECTIONS[name]}]`](#{SECTIONS[name]}).")
        if inspect.isclass(held) and (members := _members(held)):
            parts.append("\n".join(f"- {line}" for line in members))
    return "\n\n".join(parts)


def recipe_settings() -> str:
    """Every key of a recipe, a table for each section."""
    sections: dict[str, list[str]] = {}
    for key, setting in settings().items():
        section, _, name = key.rpartition(".")
        default = "required" if setting.default is None else f"`{_plain(setting.default)}`"
        choices = f" ({', '.join(f'`{choice}`' for choice in setting.choices)})" if setting.choices else ""
        row = f"| `{name}` | {setting.kind} | {default} | {setting.help}{choices} |".replace("`...`", "...")
        sections.setdefault(section, []).append(row)
    parts = []
    for section, rows in sections.items():
        title = f"### `[{section}]`" if section else "### At the top"
        parts.append("\n".join([title, "", "| key | type | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _called(name: str, held: Any) -> str:
    # Settings of a recipe have tables, and `trace` makes channel graphs.
    if inspect.isclass(held) and issubclass(held, Exception | Recipe | sbf.ChannelGraph):
        return ""
    signature = inspect.signature(held)
    given = [_argument(parameter) for parameter in signature.parameters.values()]
    line = f"sbf.{name}({', '.join(given)})"
    if len(line) > 110:
        line = f"sbf.{name}(\n    " + ",\n    ".join(given) + ",\n)"
    return f"```\n{line}\n```\n\n"


def _argument(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
    return f"{stars}{parameter.name}{default}"


def _told(held: Any) -> str:
    """A docstring without its examples, with its arguments and exceptions as lists."""
    text = (inspect.getdoc(held) or "").partition(">>>")[0].strip()
    if "Args:\n" not in text:
        return text
    text = re.sub(r"\n {8,}", " ", text)
    text = re.sub(r"^ {4}(\w+): ", r"- `\1`: ", text, flags=re.M)
    return re.sub(r"^Args:\n", "", re.sub(r"^(Raises|Returns):\n", r"\1:\n\n", text, flags=re.M), flags=re.M)


def _members(held: type) -> list[str]:
    """The public methods and properties that a class has from this package, a line each."""
    lines = []
    for name, member in inspect.getmembers(held):
        plain = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not callable(plain) or not getattr(plain, "__doc__", None):
            continue
        if not str(getattr(plain, "__module__", "")).startswith("sbf_pruner") or name in SHARED:
            continue
        call = "" if isinstance(member, property) else f"({', '.join(_given(plain))})"
        first = " ".join(_told(plain).partition("\n\n")[0].split())
        lines.append(f"`.{name}{call}`: {first}")
    return lines


def _given(function: Any) -> list[str]:
    parameters = list(inspect.signature(function).parameters.values())
    return [_argument(parameter) for parameter in parameters if parameter.name not in ("self", "cls")]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return '""' if value == "" else str(value)

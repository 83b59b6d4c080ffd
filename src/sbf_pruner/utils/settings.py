"""Typed, bounded and documented settings: the `Section` dataclass that recipes are made of, and checks of numbers.

A section is built from a plain table (as TOML gives it) and converts back to the same table or to TOML text. It
validates its fields on construction, so an existing section is always valid. An invalid one raises a `RecipeError`
of one sentence that starts with the dotted key. Recipes are read before torch is imported, so nothing here imports
torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import (
    Any,
    Literal,
    NamedTuple,
    Self,
    TypedDict,
    TypeGuard,
    TypeVar,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from ..errors import PruningError, RecipeError, suggestion


class Bounds(TypedDict, total=False):
    """Limits of a number: `least` and `most` inclusive, `above` and `below` exclusive."""

    least: float
    above: float
    most: float
    below: float


_Kind = Literal["least", "above", "most", "below"]
_WORDS: dict[_Kind, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def check_type(name: str, given: object, kind: type, example: str) -> None:
    """Raise a PruningError unless the argument `name` is a `kind` or None.

    >>> check_type("scores", 0.1, Section, "speed=0.05")
    Traceback (most recent call last):
    sbf_pruner.errors.PruningError: scores: expected an sbf.Section, got float; write sbf.Section(speed=0.05)
    """
    if given is not None and not isinstance(given, kind):
        values = given.items() if isinstance(given, Mapping) else ()
        wanted = ", ".join(f"{key}={value!r}" for key, value in values) or example
        call = f"sbf.{kind.__name__}({wanted})"
        raise PruningError(f"{name}: expected an sbf.{kind.__name__}, got {type(given).__name__}; write {call}")


def broken_bound(value: Any, bounds: Bounds) -> str:
    """Describe the first bound that a number violates; "" if it satisfies all.

    >>> broken_bound(2, {"above": 0, "most": 1})
    'must be at most 1, got 2'
    """
    for kind, (word, holds) in _WORDS.items():
        if kind in bounds and not holds(value, bounds[kind]):
            return f"must be {word} {bounds[kind]:g}, got {value}"
    return ""


S = TypeVar("S", bound="Section")

KIND_NAMES: dict[Any, str] = {
    dict[str, Any]: "table",
    tuple[float, ...]: "list of floats",
    tuple[str, ...]: "list of strings",
    dict: "table",
    int | dict[str, int]: "int or table",
    float | dict[str, float]: "float or table",
}


class Setting(NamedTuple):
    """Description of one key: type, default (None: required), allowed values and help text."""

    kind: str
    default: Any
    choices: tuple[str, ...]
    help: str


def setting_field(help: str, *, choices: tuple[str, ...] = (), **bounds: Unpack[Bounds]) -> dict[str, Any]:
    """Return the metadata of a dataclass field: its help text, allowed values and bounds."""
    return {"help": help, "choices": choices, "bounds": bounds}


def setting(default: Any, help: str, *, choices: tuple[str, ...] = (), **bounds: Unpack[Bounds]) -> Any:
    """Return a dataclass field with a default, a help text, allowed values and bounds."""
    return dataclasses.field(default=default, metadata=setting_field(help, choices=choices, **bounds))


@dataclasses.dataclass(frozen=True)
class Section:
    """A group of settings, validated and converted to their declared types on construction."""

    def __post_init__(self) -> None:
        for field, kind in _fields(type(self)):
            value = _coerce(field.name, getattr(self, field.name), kind)
            _check(field, value)
            object.__setattr__(self, field.name, value)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """Build from a table, with defaults; raise a RecipeError for an unknown or a missing required key."""
        _refuse_unknown(cls, table)
        return _build(cls, merge(_defaults(cls), table))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as nested plain dicts and lists."""
        return {field.name: _plain(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)}

    def to_toml(self) -> str:
        """Return the settings as TOML text; once parsed, `from_dict` builds an equal section from it."""
        table = self.to_dict()
        sections = {field.name for field, kind in _fields(type(self)) if _is_section(kind)}
        lines = [f"{key} = {_toml(value)}" for key, value in table.items() if key not in sections]
        for name in table:
            if name in sections:
                lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table[name].items())]
        return "\n".join(lines) + "\n"


def describe(cls: type[Section]) -> dict[str, Setting]:
    """Return the description of every dotted key of a section, for `--help` and the docs."""
    return dict(_describe(cls, _defaults(cls)))


def merge(base: Mapping[str, Any], extra: Mapping[str, Any], *, empties: bool = False) -> dict[str, Any]:
    """Return a new table: `base` updated recursively with `extra`.

    An empty table in `extra` replaces the table in `base` if `empties` is true, and changes nothing otherwise.

    >>> merge({"a": {"b": 1}, "c": {"d": 2}}, {"a": {"e": 3}, "c": {}}, empties=True)
    {'a': {'b': 1, 'e': 3}, 'c': {}}
    """
    merged = dict(base)
    for key, value in extra.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping) and (value or not empties):
            value = merge(below, value, empties=empties)
        merged[key] = value
    return merged


def _fields(cls: type[Section]) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    kinds = get_type_hints(cls)
    return ((field, kinds[field.name]) for field in dataclasses.fields(cls))


def _is_section(kind: Any) -> TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


def _describe(cls: type[Section], defaults: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Setting]]:
    for field, kind in _fields(cls):
        default = defaults.get(field.name)
        if _is_section(kind):
            yield from _describe(kind, default or {}, f"{at}{field.name}.")
        else:
            told = field.metadata
            yield at + field.name, Setting(_kind_name(kind), default, told["choices"], told["help"])


def _defaults(cls: type[Section]) -> dict[str, Any]:
    """Return the table of all defaults, without the keys that have none."""
    table: dict[str, Any] = {}
    for field, kind in _fields(cls):
        if field.default is not dataclasses.MISSING:
            table[field.name] = _plain(field.name, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            table[field.name] = _plain(field.name, field.default_factory())
        elif _is_section(kind):
            table[field.name] = _defaults(kind)
    return table


def _refuse_unknown(cls: type[Section], table: Mapping[str, Any], at: str = "", root: Any = None) -> None:
    root = root or cls
    kinds = {field.name: kind for field, kind in _fields(cls)}
    for key, value in table.items():
        if key not in kinds:
            raise RecipeError(f"{at}{key}: unknown key; {_suggestion(key, at, kinds, root)}")
        if _is_section(kinds[key]) and isinstance(value, Mapping):
            _refuse_unknown(kinds[key], value, f"{at}{key}.", root)


def _suggestion(key: str, at: str, siblings: Iterable[str], root: type[Section]) -> str:
    """Suggest the nearest key of the same section, else of any section, else list this section's keys."""
    if close := difflib.get_close_matches(key, siblings, n=1):
        return f"did you mean {at + close[0]!r}?"
    homes: dict[str, list[str]] = {}
    for dotted in describe(root):
        homes.setdefault(dotted.rpartition(".")[2], []).append(repr(dotted))
    if close := difflib.get_close_matches(key, homes, n=1, cutoff=0.8):  # A weak match elsewhere would mislead.
        return f"did you mean {' or '.join(homes[close[0]])}?"
    return suggestion(key, siblings)


def _build(cls: type[S], table: Mapping[str, Any], at: str = "") -> S:
    arguments = {}
    for field, kind in _fields(cls):
        if field.name not in table:
            raise RecipeError(f"{at}{field.name}: missing; give {field.metadata['help']}")
        value = table[field.name]
        if _is_section(kind):
            if not isinstance(value, Mapping):
                raise RecipeError(_expected(at + field.name, "table", value))
            value = _build(kind, value, f"{at}{field.name}.")
        arguments[field.name] = value
    try:
        return cls(**arguments)
    except RecipeError as error:  # The message of a nested section lacks the prefix of its key.
        raise RecipeError(f"{at}{error}") from None


def _coerce(key: str, value: Any, kind: Any) -> Any:
    """Convert `value` to `kind`; an int may stand for a float, a string for a list of one, no bool for a number."""
    if kind == tuple[str, ...] and isinstance(value, str):
        value = [value]
    if not isinstance(value, bool | int | float) and isinstance(value, Integral | Real):  # NumPy's numbers
        value = int(value) if isinstance(value, Integral) else float(value)
    if isinstance(kind, types.UnionType):  # a number or a table of numbers
        number = get_args(kind)[0]
        if isinstance(value, dict):
            return {inner: _coerce(f"{key}.{inner}", item, number) for inner, item in _plain(key, value).items()}
        if isinstance(value, bool) or not isinstance(value, number | int):
            raise RecipeError(_expected(key, f'{number.__name__}, or a table such as {{"layer1.*" = 1}}', value))
        kind = number
    if kind is float and type(value) is int:
        value = float(value)
    if kind is float and isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"{key}: expected a finite number, got {value}")
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(_coerce(f"{key}[{index}]", item, get_args(kind)[0]) for index, item in enumerate(value))
    if kind == dict[str, Any] and isinstance(value, dict):
        return _plain(key, value)
    if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value if isinstance(value, Section) else kind(value)
    raise RecipeError(_expected(key, _kind_name(kind), value))


def _expected(key: str, kind: str, value: Any) -> str:
    return f"{key}: expected {kind}, got {_kind_name(type(value))} ({value!r})"


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    choices = field.metadata.get("choices", ())
    if choices and value not in choices:
        hint = suggestion(value, choices)
        hint = f"; {hint}" if hint.startswith("did") else ""
        raise RecipeError(f"{field.name}: {value!r} is not one of {', '.join(choices)}{hint}")
    numbers = {f"{field.name}.{inner}": item for inner, item in value.items()} if isinstance(value, dict) else None
    for key, number in ({field.name: value} if numbers is None else numbers).items():
        if broken := broken_bound(number, field.metadata.get("bounds", {})):
            raise RecipeError(f"{key}: {broken}")


def _plain(key: str, value: Any) -> Any:
    """Return a copy of plain types, which are the same after a round trip through TOML."""
    if isinstance(value, Section):
        return value.to_dict()
    if isinstance(value, list | tuple):
        return [_plain(f"{key}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, dict):
        for inner in value:
            if not isinstance(inner, str):
                raise RecipeError(_expected(f"a key of {key}", "str", inner))
        return {inner: _plain(f"{key}.{inner}", item) for inner, item in value.items()}
    if isinstance(value, float) and math.isnan(value):
        raise RecipeError(f"{key}: expected a number, got nan")
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # A NumPy float is a float, but its repr differs.
    raise RecipeError(f"{key}: a recipe cannot hold a value of type {_kind_name(type(value))}")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON and TOML share their escapes, except that TOML requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        inner = ", ".join(f"{_toml_key(key)} = {_toml(item)}" for key, item in value.items())
        return "{" + inner + "}"
    return repr(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def _kind_name(kind: Any) -> str:
    return KIND_NAMES.get(kind, getattr(kind, "__name__", str(kind)))

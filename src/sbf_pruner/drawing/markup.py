"""HTML and SVG source, made from elements: the one place where text is escaped.

`element` returns `Markup`. Any other string given to it, as content or as an attribute, is text and is escaped.
Operations of `str` on a `Markup` (`+`, `join`, f-strings) return a plain string, which is escaped again where it is
used, so text cannot become markup by accident; `together` concatenates.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable
from string import Template
from typing import Any

_SHAPES = frozenset(["circle", "line", "path", "rect"])  # without content they need no closing tag
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")  # not allowed in a document


class Markup(str):
    """HTML or SVG source."""

    __slots__ = ()


NOTHING = Markup()
Content = str | Iterable[str]


def element(tag: str, *content: Content, **attributes: Any) -> Markup:
    """An element; attributes that are None are left out, and floats are written with one decimal.

    An underscore in an attribute's name stands for a hyphen, one at its end is dropped.

    >>> element("b", "a < b", element("i", "c"), class_='"x"', data_row=3, title=None)
    '<b class="&quot;x&quot;" data-row="3">a &lt; b<i>c</i></b>'
    >>> element("rect", x=0.25, width="50%")
    '<rect x="0.2" width="50%"/>'
    """
    opened = tag
    for name, value in attributes.items():
        if value is not None:
            spelled = f"{value:.1f}" if isinstance(value, float) else _escaped(str(value))
            opened += f' {name.rstrip("_").replace("_", "-")}="{spelled}"'
    inside = together(*content)
    return Markup(f"<{opened}/>" if tag in _SHAPES and not inside else f"<{opened}>{inside}</{tag}>")


def together(*content: Content) -> Markup:
    """One after the other, as markup.

    >>> together("a & ", element("b", "c"), [element("i"), "<"])
    'a &amp; <b>c</b><i></i>&lt;'
    """
    parts = (part for held in content for part in ([held] if isinstance(held, str) else held))
    return Markup("".join(part if isinstance(part, Markup) else _escaped(part) for part in parts))


def document(template: str, script: str, connect: str = "'none'", **content: Content) -> str:
    """Fill the page of a template, which has a place for its one script and for the policy that allows no other."""
    parts = {name: together(part) for name, part in content.items()}
    held = {"policy": together(policy(script, connect)), "script": Markup(script)}
    return Template(template).substitute(parts | held)


def policy(script: str, connect: str = "'none'") -> str:
    """The Content-Security-Policy of a page: nothing is loaded, and no script runs but the given one.

    `connect` says what that script may fetch.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _escaped(text: str) -> str:
    return html.escape(_UNPRINTABLE.sub("\ufffd", text))

"""A whole page: the template with its style, a script and data filled in, and the policy that says what it may do."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from string import Template
from typing import Any, Literal

from tilebeam.pages.markup import Html, tag, text

Script = Literal["search", "ask"]

# What would end a script element or a line of old JavaScript; JSON needs none of them outside strings.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def document(title: str, script: Script, body: Html, data: object, rules: str | None = None) -> str:
    """Write a page.

    Args:
        title: of the window.
        script: which script it runs.
        body: what it shows without a script.
        data: for the script; anything that JSON has. Infinities and nan become null.
        rules: the policy of the page, if it is another than that of its script.
    """
    filled = {
        "title": text(title),
        "policy": text(rules or policy(script)),
        "style": _part("page.css"),
        "body": body,
        "data": embedded(data),
        "script": _part(f"{script}.js"),
    }
    return Template(_part("page.html")).substitute(filled)


def policy(*scripts: Script, more: str = "") -> str:
    """Write the Content-Security-Policy of pages with these scripts: their own style and script, and nothing else.

    Args:
        more: further directives.
    """
    runs = " ".join(_hashed(f"{script}.js") for script in scripts)
    allowed = f"default-src 'none'; script-src {runs}; style-src {_hashed('page.css')}"
    return f"{allowed}; base-uri 'none'; form-action 'none'" + (f"; {more}" if more else "")


def embedded(data: object) -> Html:
    """Write data as JSON that can stand in a script element: nothing in it ends the element."""
    return Html(json.dumps(_finite(data), separators=(",", ":"), allow_nan=False).translate(_ESCAPES))


def facts(pairs: Mapping[str, object]) -> Html:
    """List names and values, side by side; those that are None are left out."""
    shown = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs.items() if value is not None]
    return tag("dl", shown, class_="facts")


def number(value: float, digits: int = 3) -> str:
    """Spell a figure as tables show it."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


@cache
def _part(name: str) -> str:
    return resources.files(__package__).joinpath("parts", name).read_text(encoding="utf-8")


@cache
def _hashed(name: str) -> str:
    digest = hashlib.sha256(_part(name).encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value

"""A whole page: the template with its style, a script and data filled in, and the policy that says what it may do."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from string import Template
from typing import Literal

from tilebeam.checks import without_infinities
from tilebeam.pages.markup import Html, tag, text

Script = Literal["search", "chat"]

# The files of each script, in order; parts/rich.js calls the libraries.
_RICH = ("vendor/marked.js", "vendor/purify.js", "vendor/temml.js", "parts/rich.js")
_SCRIPTS: dict[Script, tuple[str, ...]] = {
    "search": (*_RICH, "parts/search.js"),
    "chat": (*_RICH, "parts/client.js", "parts/conversations.js", "parts/turn.js", "parts/chat.js"),
}

# What would end a script element or a line of old JavaScript; JSON needs none of them outside strings.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def document(title: str, script: Script, body: Html, data: object = None, rules: str | None = None) -> str:
    """Write a page.

    Args:
        title: of the window.
        script: which script it runs.
        body: what it shows without a script.
        data: for the script; anything that JSON has. Infinities and nan become null.
        rules: the policy of the page, if it is another than that of its script.
    """
    return filled(
        "parts/page.html",
        title=title,
        policy=rules or policy(script),
        style=Html(_part("parts/page.css")),
        body=body,
        data=embedded(data),
        script=Html(_script(script)),
    )


def filled(name: str, **values: object) -> Html:
    """Fill in a template of this package; values are escaped unless they are markup."""
    return Html(Template(_part(name)).substitute({key: text(value) for key, value in values.items()}))


def policy(*scripts: Script, more: str = "") -> str:
    """Write the Content-Security-Policy of pages with these scripts: their own style and script, and nothing else.

    Args:
        more: further directives.
    """
    runs = " ".join(_hash(_script(script)) for script in scripts)
    allowed = f"default-src 'none'; script-src {runs}; style-src {_hash(_part('parts/page.css'))}"
    return f"{allowed}; base-uri 'none'; form-action 'none'" + (f"; {more}" if more else "")


def embedded(data: object) -> Html:
    """Write data as JSON that can stand in a script element: nothing in it ends the element."""
    return Html(json.dumps(without_infinities(data), separators=(",", ":"), allow_nan=False).translate(_ESCAPES))


def facts(pairs: Mapping[str, object]) -> Html:
    """List names and values, side by side; those that are None are left out."""
    shown = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs.items() if value is not None]
    return tag("dl", shown, class_="facts")


def number(value: float, digits: int = 3) -> str:
    """Spell a figure as tables show it."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


@cache
def _part(name: str) -> str:
    return resources.files(__package__).joinpath(*name.split("/")).read_text(encoding="utf-8")


@cache
def _script(script: Script) -> str:
    """Join a script's files. None of their strings and expressions starts a comment or a script of the page's HTML."""
    joined = "\n".join(map(_part, _SCRIPTS[script]))
    return re.sub("<(?=!--|/?script)", r"\\x3c", re.sub("^//# sourceMappingURL=.*", "", joined, flags=re.MULTILINE))


@cache
def _hash(source: str) -> str:
    digest = hashlib.sha256(source.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"

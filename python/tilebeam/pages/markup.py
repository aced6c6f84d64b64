"""HTML out of values. A plain text is escaped wherever it goes; only what `tag` made is markup."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_VOID = frozenset({"br", "input", "meta"})
_DROP_FIRST = frozenset({"pre", "textarea"})  # a line break right after their tag is no part of their text


class Html(str):
    """A text that is markup already."""

    __slots__ = ()


def text(value: object) -> Html:
    """Write a value as text in a page. Characters that HTML cannot hold become U+FFFD."""
    if isinstance(value, Html):
        return value
    clean = str(value).replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
    return Html(html.escape(clean, quote=True))


def join(*content: object) -> Html:
    """Join contents, one after the other; None is nothing, lists are their items."""
    parts: list[str] = []
    for item in content:
        if item is None:
            continue
        if isinstance(item, list | tuple):
            parts.append(join(*item))
        else:
            parts.append(text(item))
    return Html("".join(parts))


def tag(name: str, *content: object, **attributes: object) -> Html:
    """Write an element.

    Args:
        name: of the element.
        content: see `join`.
        attributes: True is an attribute without a value, None and False are none. A trailing underscore is dropped,
            others become hyphens: ``class_="n"``, ``aria_label="..."``.
    """
    written = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        written += f" {key}" if value is True else f' {key}="{text(value)}"'
    opening = f"<{name}{written}>"
    if name in _VOID:
        return Html(opening)
    inside = join(*content)
    first = "\n" if name in _DROP_FIRST and inside.startswith(("\n", "\r")) else ""
    return Html(f"{opening}{first}{inside}</{name}>")


def row(columns: list[tuple[str, str]], values: Sequence[object], **attributes: object) -> Html:
    """Write a row of a table with these columns, headed by the first value; attributes are those of `tag`."""
    kinds = [kind or None for _, kind in columns]
    others = [tag("td", value, class_=kind) for value, kind in zip(values[1:], kinds[1:], strict=True)]
    return tag("tr", tag("th", values[0], scope="row", class_=kinds[0]), others, **attributes)


def table(caption: str, columns: list[tuple[str, str]], bodies: Iterable[object], class_: str | None = None) -> Html:
    """Write a table.

    Args:
        caption: for those who hear the page.
        columns: a heading and the class of its cells each.
        bodies: its tbody elements.
    """
    heads = [tag("th", heading, scope="col", class_=kind or None) for heading, kind in columns]
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption, class_="unseen"),
            tag("thead", tag("tr", heads)),
            list(bodies),
            class_=class_,
        ),
        class_="scroll",
    )

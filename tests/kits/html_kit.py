"""What a test asks of an HTML file: that it is well formed, what it holds, and that it asks nobody for anything."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

VOID = frozenset({"meta", "input", "br", "link", "img", "hr"})


class Page(HTMLParser):
    """A page, read strictly: every element is closed, in order.

    Attributes:
        elements: name and attributes of each.
        texts: by element name, the texts directly in it.
        data: what the script is given.
    """

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        assert source.startswith("<!doctype html>\n")
        self.feed(source)
        self.close()
        assert not self._open, self._open
        self.data: Any = json.loads(self.texts["script"][0])
        self._check()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open, tag
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open:
            return
        name = self._open[-1]
        if name in ("pre", "textarea") and not self.texts[name][-1]:
            data = data.removeprefix("\n")  # as a browser reads it
        self.texts[name][-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def named(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of this name."""
        return [attributes for name, attributes in self.elements if name == tag]

    def _check(self) -> None:
        ids = [a["id"] for _, a in self.elements if "id" in a]
        assert len(set(ids)) == len(ids), "an id stands twice"
        for tag, attributes in self.elements:
            for name, value in attributes.items():
                assert not name.startswith("on"), (tag, name)
                assert name not in ("style", "src", "srcdoc", "action", "formaction"), (tag, name)
                if name == "href":
                    assert (value or "")[:1] == "#", value
                    assert (value or "")[1:] in ids, value
                if name in ("aria-labelledby", "for"):
                    assert value in ids, value
        assert [a.get("type") for a in self.named("script")] == ["application/json", None]
        assert not {"iframe", "link", "base", "object", "embed", "img"} & {tag for tag, _ in self.elements}

"""llama.cpp's grammars in Python: random texts that one lets through, and whether it lets a text through.

A second reading of the syntax, so that grammars can be tested without a model.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

# A node: ("text", str) | ("class", negated, ranges) | ("rule", name) | ("seq", nodes) | ("alt", nodes)
#         | ("repeat", node, least, most)
Node = tuple


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def space(self) -> None:
        found = re.compile(r"[ \t]*").match(self.text, self.at)
        assert found
        self.at = found.end()

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def char(self) -> str:
        c = self.text[self.at]
        self.at += 1
        if c != "\\":
            return c
        kind = self.text[self.at]
        self.at += 1
        width = {"x": 2, "u": 4, "U": 8}.get(kind)
        if width is None:
            return {"n": "\n", "r": "\r", "t": "\t"}.get(kind, kind)
        digits = self.text[self.at : self.at + width]
        self.at += width
        return chr(int(digits, 16))

    def alternatives(self) -> Node:
        found = [self.sequence()]
        while self.peek() == "|":
            self.at += 1
            found.append(self.sequence())
        return found[0] if len(found) == 1 else ("alt", found)

    def sequence(self) -> Node:
        parts: list[Node] = []
        while True:
            self.space()
            if not self.peek() or self.peek() in "|)":
                return ("seq", parts)
            parts.append(self.repeated(self.item()))

    def item(self) -> Node:
        c = self.peek()
        if c == '"':
            self.at += 1
            text = ""
            while self.peek() != '"':
                text += self.char()
            self.at += 1
            return ("text", text)
        if c == "[":
            return self.set()
        if c == "(":
            self.at += 1
            inner = self.alternatives()
            assert self.peek() == ")", self.text[self.at :]
            self.at += 1
            return inner
        found = re.compile(r"[a-zA-Z0-9-]+").match(self.text, self.at)
        assert found, self.text[self.at :]
        self.at = found.end()
        return ("rule", found[0])

    def set(self) -> Node:
        self.at += 1
        negated = self.peek() == "^"
        self.at += negated
        ranges = []
        while self.peek() != "]":
            low = self.char()
            if self.peek() == "-" and self.text[self.at + 1] != "]":
                self.at += 1
                ranges.append((low, self.char()))
            else:
                ranges.append((low, low))
        self.at += 1
        return ("class", negated, ranges)

    def repeated(self, item: Node) -> Node:
        self.space()
        found = re.compile(r"\*|\+|\?|\{(\d+)(?:(,)(\d*))?\}").match(self.text, self.at)
        if not found:
            return item
        self.at = found.end()
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if found[0] in simple:
            least, most = simple[found[0]]
        else:
            least = int(found[1])
            most = int(found[3]) if found[3] else None if found[2] else least
        return ("repeat", item, least, most)


def _height(node: Node, of_rules: dict[str, float]) -> float:
    if node[0] == "rule":
        return of_rules[node[1]]
    if node[0] == "repeat":
        return _height(node[1], of_rules) if node[2] else 0
    if node[0] in ("seq", "alt"):
        heights = [_height(part, of_rules) for part in node[1]]
        return (max if node[0] == "seq" else min)(heights, default=0)
    return 0


@dataclass(frozen=True)
class Gbnf:
    """A grammar."""

    source: str

    @cached_property
    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for line in filter(None, self.source.splitlines()):
            name, _, body = line.partition(" ::= ")
            assert name not in found
            reader = _Reader(body)
            found[name] = reader.alternatives()
            assert reader.at == len(body), body[reader.at :]
        return found

    @cached_property
    def heights(self) -> dict[str, float]:
        """For each rule how deep its flattest derivation is."""
        found = dict.fromkeys(self.rules, math.inf)
        while True:
            new = {name: 1 + _height(node, found) for name, node in self.rules.items()}
            if new == found:
                return found
            found = new

    def sample(self, rng: random.Random) -> str:
        """A random text. Deep down, what is optional is left out and short alternatives are taken."""
        return self._sample(("rule", "root"), rng, 0)

    def _sample(self, node: Node, rng: random.Random, depth: int) -> str:
        kind = node[0]
        if kind == "text":
            return str(node[1])
        if kind == "rule":
            return self._sample(self.rules[node[1]], rng, depth + 1)
        if kind == "seq":
            return "".join(self._sample(part, rng, depth) for part in node[1])
        if kind == "alt":
            flattest = min(node[1], key=lambda part: _height(part, self.heights))
            return self._sample(flattest if depth > 30 else rng.choice(node[1]), rng, depth)
        if kind == "repeat":
            _, item, least, most = node
            most = least if depth > 30 else min(least + 3, least + 3 if most is None else most)
            if rng.random() < 0.1 and node[3] is not None and depth <= 30:
                most = least = node[3]
            return "".join(self._sample(item, rng, depth) for _ in range(rng.randint(least, most)))
        _, negated, ranges = node
        if not negated:
            low, high = rng.choice(ranges)
            code = rng.randint(ord(low), ord(high))
            return chr(code)
        return rng.choice([c for c in "aZ09_- é€😀/:.~" if not any(a <= c <= b for a, b in ranges)] or ["\u4e00"])

    def matches(self, text: str) -> bool:
        """Whether the grammar lets exactly this text through."""
        return any(end == len(text) for end in self._ends(("rule", "root"), text, 0))

    def _ends(self, node: Node, text: str, at: int) -> set[int]:
        kind = node[0]
        if kind == "text":
            return {at + len(node[1])} if text.startswith(node[1], at) else set()
        if kind == "rule":
            return self._ends(self.rules[node[1]], text, at)
        if kind == "alt":
            return {end for part in node[1] for end in self._ends(part, text, at)}
        if kind == "seq":
            ends = {at}
            for part in node[1]:
                ends = {end for start in ends for end in self._ends(part, text, start)}
            return ends
        if kind == "repeat":
            return set(self._repeats(node, text, at))
        _, negated, ranges = node
        if at >= len(text):
            return set()
        inside = any(low <= text[at] <= high for low, high in ranges)
        return {at + 1} if inside != negated else set()

    def _repeats(self, node: Node, text: str, at: int) -> Iterator[int]:
        _, item, least, most = node
        ends, seen, count = {at}, set(), 0
        while ends:
            if count >= least:
                new = ends - seen
                yield from new
                seen |= new
                ends = new
            if most is not None and count >= most:
                return
            ends = {end for start in ends for end in self._ends(item, text, start)}
            count += 1

"""GBNF, the syntax of llama.cpp's grammars, read into the flat lists that the matcher of backend/sampling goes through.

Rules that are named twice are what the second one says. What is repeated becomes a rule of its own, of which each
repetition holds one element, so that large numbers stay small.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from graphlib import CycleError, TopologicalSorter

from tilebeam.grammars.characters import LAST, Range, complement, union

MAX_DEPTH = 64  # of parentheses: readers recurse
MAX_ELEMENTS = 1 << 18
MAX_REPEAT = 1 << 16

_NAME = re.compile(r"[a-zA-Z0-9-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_IS = re.compile("::=")
_CLOSE = re.compile(r"\)")
_LINE_END = re.compile(r"\r\n|\r|\n|$")
_PLAIN = re.compile(r'[^"\\]+')
_BOUNDS = re.compile(r"\{[ \t]*([0-9]{1,18})[ \t]*(?:(,)[ \t]*([0-9]{1,18})?[ \t]*)?\}")
_TOKEN = re.compile(r"(!?)(<\[([0-9]{1,9})\]>|<[^>]*>)")
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_SPACES = ((9, 10), (13, 13), (32, 32))
_LEFT_RECURSIVE = "it is left-recursive: a rule begins with itself, directly or through other rules"

# A token's name in a grammar, such as "<think>", to its id; None: it is not one token.
TokenNames = Callable[[str], int | None]


class RulesError(ValueError):
    """A text that is no grammar, or one that cannot be matched."""


class Kind(IntEnum):
    """The kind of an alternative's element; the numbers are those of enum tb_grammar_kind."""

    END = 0
    SET = 1
    RULE = 2
    TOKEN = 3
    NOT_TOKEN = 4


Element = tuple[Kind, int]
Alternative = list[Element]


@dataclass
class Rules:
    """A grammar.

    Attributes:
        bodies: alternatives of each rule; the first rule is the root. Each element says its kind and which set, rule or
            token it is.
        sets: of characters, as ranges of code points in ascending order.
    """

    bodies: list[list[Alternative]] = field(default_factory=list)
    sets: list[tuple[Range, ...]] = field(default_factory=list)

    def behind_space(self) -> Rules:
        """Return a grammar of the same texts with up to two white-space characters in front."""
        own, space = (Kind.RULE, len(self.bodies)), (Kind.SET, len(self.sets))
        moved = [[[own if e == (Kind.RULE, 0) else e for e in way] for way in body] for body in self.bodies]
        return Rules([[[own], [space, own], [space, space, own]], *moved[1:], moved[0]], [*self.sets, _SPACES])


def read_rules(text: str, token_of: TokenNames = lambda _: None) -> Rules:
    """Read a grammar.

    Args:
        text: GBNF.
        token_of: knows the tokens of the vocabulary by name.

    Raises:
        RulesError: what is wrong with it.
    """
    rules = _Reader(text, token_of).read()
    _refuse_left_recursion(rules)
    return rules


class _Reader:
    """Reads one grammar."""

    def __init__(self, text: str, token_of: TokenNames) -> None:
        self._text = text
        self._token_of = token_of
        self._at = 0
        self._depth = 0  # of parentheses
        self._elements = 0
        self._ids: dict[str, int] = {"root": 0}
        self._bodies: list[list[Alternative] | None] = [None]
        self._sets: dict[tuple[Range, ...], int] = {}

    def read(self) -> Rules:
        self._skip(lines=True)
        while self._at < len(self._text):
            self._rule()
        missing = [name for name, id in self._ids.items() if self._bodies[id] is None]
        if missing:
            raise RulesError(f"there is no rule {missing[0]!r}")
        return Rules([body for body in self._bodies if body is not None], list(self._sets))

    # --- syntax -----------------------------------------------------------------------------------------------------

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, lines: bool) -> None:
        self._take(_SPACE_AND_LINES if lines else _SPACE, "white space")

    def _take(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        """Read what has to stand here."""
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._expected(what)
        self._at = found.end()
        return found

    def _expected(self, what: str) -> RulesError:
        line = self._text.count("\n", 0, self._at) + 1
        rest = self._text[self._at : self._at + 20]
        return RulesError(f"{what} expected in line {line}, " + (f"before {rest!r}" if rest else "where it ends"))

    def _rule(self) -> None:
        name = self._take(_NAME, "the name of a rule")
        self._skip(lines=False)
        self._take(_IS, "::=")
        self._skip(lines=True)
        body = self._alternatives(nested=False)
        self._take(_LINE_END, "the end of the rule")
        self._skip(lines=True)
        self._bodies[self._id(name[0])] = body

    def _alternatives(self, nested: bool) -> list[Alternative]:
        found = [self._sequence(nested)]
        while self._peek() == "|":
            self._at += 1
            self._skip(lines=True)
            found.append(self._sequence(nested))
        return found

    def _sequence(self, nested: bool) -> Alternative:
        found: Alternative = []
        while (item := self._item()) is not None:
            self._skip(lines=nested)
            while (bounds := self._repetition()) is not None:
                self._skip(lines=nested)
                item = self._repeated(item, *bounds)
            self._count(len(item))
            found += item
        return found

    def _item(self) -> Alternative | None:
        """Read the next item, None: the sequence ends."""
        char = self._peek()
        if char == '"':
            return self._literal()
        if char == "[":
            return [(Kind.SET, self._set(self._class()))]
        if char == ".":
            self._at += 1
            return [(Kind.SET, self._set(_others([])))]
        if char == "(":
            return self._group()
        if char and char in "<!":
            return [self._token()]
        if char and char in "*+?{":
            raise self._expected("something to repeat")
        name = _NAME.match(self._text, self._at)
        if name is None:
            return None
        self._at = name.end()
        return [(Kind.RULE, self._id(name[0]))]

    def _group(self) -> Alternative:
        self._at += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RulesError(f"parentheses are nested more than {MAX_DEPTH} deep")
        self._skip(lines=True)
        body = self._alternatives(nested=True)
        self._take(_CLOSE, ")")
        self._depth -= 1
        return body[0] if len(body) == 1 else [self._new_rule(body)]

    def _literal(self) -> Alternative:
        self._at += 1
        found: Alternative = []
        while self._peek() != '"':
            plain = _PLAIN.match(self._text, self._at)
            chars = plain[0] if plain else self._char()
            self._at = plain.end() if plain else self._at
            found += [(Kind.SET, self._set(((ord(c), ord(c)),))) for c in chars]
        self._at += 1
        return found

    def _class(self) -> Sequence[Range]:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges = []
        while self._peek() != "]":
            low = high = self._char()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._char()
            ranges.append((ord(low), ord(high)))
        self._at += 1
        return _others(ranges) if negated else union(ranges)

    def _char(self) -> str:
        char = self._peek()
        if not char:
            raise self._expected("the end of a text or class")
        self._at += 1
        if char != "\\":
            return char
        kind = self._peek()
        width = _DIGITS.get(kind)
        if width is None:
            if kind not in _ESCAPED:
                self._at -= 1
                raise self._expected("another character than this escape")
            self._at += 1
            return _ESCAPED[kind]
        digits = self._text[self._at + 1 : self._at + 1 + width]
        if not re.fullmatch(f"[0-9a-fA-F]{{{width}}}", digits) or int(digits, 16) > LAST:
            raise self._expected(f"a character of {width} hexadecimal digits")
        self._at += 1 + width
        return chr(int(digits, 16))

    def _token(self) -> Element:
        found = self._take(_TOKEN, "a token, as <NAME> or <[NUMBER]>,")
        token = int(found[3]) if found[3] else self._token_of(found[2])
        if token is None:
            raise RulesError(f"{found[2]} is not one token of this model")
        return (Kind.NOT_TOKEN if found[1] else Kind.TOKEN), token

    def _repetition(self) -> tuple[int, int | None] | None:
        """Return least and most times; most None: any number."""
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        char = self._peek()
        if char in simple:
            self._at += 1
            return simple[char]
        if char != "{":
            return None
        found = self._take(_BOUNDS, "a repetition, as {2}, {2,} or {2,5},")
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        if most is not None and most < least:
            raise RulesError(f"{found[0]} asks for at least {least} and at most {most}")
        if max(least, most or 0) > MAX_REPEAT:
            raise RulesError(f"{found[0]} repeats more than {MAX_REPEAT} times")
        return least, most

    # --- what is made of it ------------------------------------------------------------------------------------------

    def _count(self, elements: int) -> None:
        self._elements += elements
        if self._elements > MAX_ELEMENTS:
            raise RulesError(f"it is too large: with its repetitions more than {MAX_ELEMENTS} elements")

    def _id(self, name: str) -> int:
        if name not in self._ids:
            self._ids[name] = len(self._bodies)
            self._bodies.append(None)
        return self._ids[name]

    def _new_rule(self, body: list[Alternative]) -> Element:
        self._bodies.append(body)
        self._count(2 * len(body))
        return Kind.RULE, len(self._bodies) - 1

    def _set(self, ranges: Sequence[Range]) -> int:
        return self._sets.setdefault(tuple(ranges), len(self._sets))

    def _repeated(self, item: Alternative, least: int, most: int | None) -> Alternative:
        if not item or most == 0:
            return []
        self._count(least + (2 if most is None else 3 * (most - least)))
        one = item[0] if len(item) == 1 else self._new_rule([item])
        rest: Alternative = []
        if most is None:
            rest = [self._new_rule([[one], []])]
            self._bodies[rest[0][1]] = [[one, rest[0]], []]
        for _ in range(0 if most is None else most - least):
            rest = [self._new_rule([[one, *rest], []])]
        return [one] * least + rest


def _others(ranges: Sequence[Range]) -> list[Range]:
    """Return all other characters: a text has no NUL and no halves of surrogate pairs."""
    return complement([*ranges, (0, 0), (0xD800, 0xDFFF)])


# --- left recursion ---------------------------------------------------------------------------------------------------


def _refuse_left_recursion(rules: Rules) -> None:
    """Refuse a rule that begins with itself: where it goes on behind that, it makes stacks without end. What is
    repeated and may be empty becomes a rule that begins with itself and ends there, which does no harm."""
    empty = _may_be_empty(rules)
    begins: dict[int, set[int]] = {rule: set() for rule in range(len(rules.bodies))}
    for rule, body in enumerate(rules.bodies):
        for alternative in body:
            for at, (kind, value) in enumerate(alternative):
                if kind is not Kind.RULE:
                    break
                if value != rule:
                    begins[rule].add(value)
                elif at + 1 < len(alternative):
                    raise RulesError(_LEFT_RECURSIVE)
                if not empty[value]:
                    break
    try:
        TopologicalSorter(begins).prepare()
    except CycleError:
        raise RulesError(_LEFT_RECURSIVE) from None


def _may_be_empty(rules: Rules) -> list[bool]:
    """Return for each rule whether the empty text is one of its texts."""
    empty = [False] * len(rules.bodies)
    alternatives = [(rule, alternative) for rule, body in enumerate(rules.bodies) for alternative in body]
    missing = [len(alternative) for _, alternative in alternatives]  # elements that may not be empty, as far as known
    uses: list[list[int]] = [[] for _ in rules.bodies]
    for at, (_, alternative) in enumerate(alternatives):
        for kind, value in alternative:
            if kind is Kind.RULE:
                uses[value].append(at)
    todo = [rule for rule, alternative in alternatives if not alternative]
    while todo:
        rule = todo.pop()
        if empty[rule]:
            continue
        empty[rule] = True
        for at in uses[rule]:
            missing[at] -= 1
            if missing[at] == 0:
                todo.append(alternatives[at][0])
    return empty

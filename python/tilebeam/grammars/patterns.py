"""Regular expressions (ECMA-262) as grammars: of JSON strings, as JSON schemas mean them, or of plain text.

What is supported is what describes a set of texts by itself: characters, classes, groups, alternatives, repetitions,
and the anchors at the ends. In a schema, a pattern without anchors may match anywhere, as JSON Schema says; of plain
text it must match the whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilebeam.grammars.characters import LAST, Range, complement, union
from tilebeam.grammars.gbnf import MAX_LENGTH, either, in_class, literal, repeated

_MAX_DEPTH = 16
_MAX_REPEAT = 1000

# Any character of a string's JSON text. No halves of surrogate pairs: each stands for one character.
CHAR = r"""[^"\\\x00-\x1F\x7F] | "\\" ( ["\\/bfnrt] | "u" ( [0-9a-cA-CefEF] hex hex hex | [dD] [0-7] hex hex ) )"""

_SHORT = {0x22: '\\"', 0x5C: "\\\\", 8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}  # as JSON escapes them


class PatternError(ValueError):
    """A pattern that is none, or has what cannot be put into a grammar."""


def string_rule(pattern: str, name: Callable[[str], str]) -> str:
    """Make a grammar for the JSON text of the strings that match a pattern; it uses the rule ``char``.

    Args:
        pattern: the text.
        name: makes a rule of a body and returns its name.

    Raises:
        PatternError: with what is wrong.
    """
    found = []
    for sequence in _Parser(pattern, _as_json, name).parse():
        parts = [*([] if sequence.from_start else ["char*"]), *sequence.parts]
        parts += [] if sequence.to_end else ["char*"]
        found.append(" ".join(parts) or '""')
    return either(*found)


def text_grammar(pattern: str) -> str:
    """Make a GBNF grammar of the texts that match a pattern as a whole, whether it has anchors or not.

    Raises:
        PatternError: with what is wrong.
    """
    names: dict[str, str] = {}  # of bodies
    parser = _Parser(pattern, _as_text, lambda body: names.setdefault(body, f"group-{len(names) + 1}"))
    rules = {"root": either(*[sequence.text for sequence in parser.parse()])}
    rules |= {name: body for body, name in names.items()}
    return "".join(f"{name} ::= {body}\n" for name, body in rules.items())


# --- sets of characters -----------------------------------------------------------------------------------------------


def _without(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    return complement([*complement(ranges), *others])


_DIGIT: list[Range] = [(0x30, 0x39)]
_WORD: list[Range] = [*_DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: list[Range] = [
    *[(9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)],
    *[(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)],
]
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_DOT = complement([(10, 10), (13, 13), (0x2028, 0x2029)])
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_NOT_PLAIN: list[Range] = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F), (0xD800, 0xDFFF)]
_ESCAPED = frozenset({*range(0x20), 0x22, 0x5C, 0x7F})
_RARE: list[Range] = [(1, 8), (0xB, 0xC), (0xE, 0x1F), (0x7F, 0x7F)]


def _as_json(ranges: Sequence[Range]) -> str:
    """Return one character of a set, which must have one, as it stands in JSON text."""
    plain = _without(ranges, _NOT_PLAIN)
    parts = [_one_of(plain)] if plain else []
    escaped = [c for low, high in union(ranges) for c in range(low, min(high, 0x7F) + 1) if c in _ESCAPED]
    # Of a large set, such as all but a few, the rare control characters are left out.
    rare = [c for c in escaped if c not in _SHORT]
    written = [c for c in escaped if c in _SHORT] + (rare if not plain or len(rare) <= 4 else [])
    parts += [literal(_SHORT.get(c, f"\\u{c:04x}")) for c in written]
    if not parts:
        raise PatternError("a class that matches no character")
    return either(*parts)


def _as_text(ranges: Sequence[Range]) -> str:
    """Return one character of a set, which must have one, as it is. A text has no NUL; of sets with other ones, rare
    control characters are left out."""
    plain = _without(ranges, [(0, 0), (0xD800, 0xDFFF)])
    if not plain:
        raise PatternError("a class that matches no character")
    return _one_of(_without(plain, _RARE) or plain)


def _one_of(ranges: Sequence[Range]) -> str:
    if ranges[0][0] == ranges[-1][1]:
        return literal(chr(ranges[0][0]))
    return "[" + "".join(in_class(a) if a == b else f"{in_class(a)}-{in_class(b)}" for a, b in ranges) + "]"


# --- the syntax -------------------------------------------------------------------------------------------------------


@dataclass
class _Sequence:
    """The grammar symbols between two bars, and whether anchors hold them at the string's ends."""

    parts: list[str] = field(default_factory=list)
    from_start: bool = False
    to_end: bool = False

    @property
    def text(self) -> str:
        """As a grammar; an empty one is the empty literal."""
        return " ".join(self.parts) or '""'


class _Parser:
    """Reads one pattern: `write` makes grammar of one character of a set, `name` makes a rule of a body and returns its
    name."""

    def __init__(self, pattern: str, write: Callable[[Sequence[Range]], str], name: Callable[[str], str]) -> None:
        self._text = pattern
        self._write = write
        self._name = name
        self._at = 0
        self._depth = 0
        self._length = 0  # characters of all sets so far

    def parse(self) -> list[_Sequence]:
        """Parse the alternatives of the whole pattern."""
        alternatives = self._alternatives()
        if self._at < len(self._text):
            raise PatternError("an unmatched )")
        return alternatives

    def _peek(self, count: int = 1) -> str:
        return self._text[self._at : self._at + count]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise PatternError("an unexpected end")
        self._at += 1
        return char

    def _alternatives(self) -> list[_Sequence]:
        found = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            found.append(self._sequence())
        return found

    def _sequence(self) -> _Sequence:
        sequence = _Sequence()
        while (char := self._peek()) and char not in "|)":
            if char == "^":
                if sequence.parts or self._depth:
                    raise PatternError("^ elsewhere than at the beginning")
                self._at += 1
                sequence.from_start = True
                continue
            if char == "$":
                self._at += 1
                if (self._peek() and self._peek() not in "|)") or self._depth:
                    raise PatternError("$ elsewhere than at the end")
                sequence.to_end = True
                continue
            if symbol := self._repeated(self._atom()):
                sequence.parts.append(symbol)
        return sequence

    def _atom(self) -> str:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return self._written(self._class())
        if char == ".":
            return self._written(_DOT)
        if char == "\\":
            return self._written(self._escape(inside=False))
        if char in "*+?":
            raise PatternError(f"{char} with nothing to repeat")
        return self._written([(ord(char), ord(char))])

    def _written(self, ranges: Sequence[Range]) -> str:
        """Return one character of a set; a short pattern may have many long sets."""
        text = self._write(ranges)
        self._length += len(text)
        if self._length > MAX_LENGTH:
            raise PatternError(f"more than {MAX_LENGTH} characters as a grammar")
        return text

    def _group(self) -> str:
        if found := re.compile(r"\?(?::|P?<[A-Za-z_$][\w$]*>)").match(self._text, self._at):
            self._at = found.end()
        elif self._peek() == "?":
            raise PatternError("look-around or another group that begins with (?")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"groups nested deeper than {_MAX_DEPTH}")
        inner = self._alternatives()
        self._depth -= 1
        if self._peek() != ")":
            raise PatternError("an unmatched (")
        self._at += 1
        return f"( {' | '.join(sequence.text for sequence in inner)} )"

    def _repeated(self, atom: str) -> str:
        # A ? behind it says how much is tried first, which makes no difference to what matches.
        found = re.compile(r"(?:[*+?]|\{([0-9]+)(?:(,)([0-9]+)?)?\})\??").match(self._text, self._at)
        if found is None:
            return atom
        self._at = found.end()
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[0][0], (1, 1))
        if found[1]:
            least = _count(found[1])
            most = _count(found[3]) if found[3] else None if found[2] else least
        if self._peek() and self._peek() in "*+":
            raise PatternError("a repetition of a repetition")
        if least > _MAX_REPEAT or (most or 0) > _MAX_REPEAT or (most is not None and most < least):
            raise PatternError(f"a repetition that is not between 0 and {_MAX_REPEAT}")
        if atom.startswith("(") and most not in (0, 1):
            # A repetition may write its item several times: by name, or nested ones would multiply.
            atom = self._name(atom)
        return repeated(atom, least, most)

    # --- characters -----------------------------------------------------------------------------------------------

    def _class(self) -> list[Range]:
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[Range] = []
        while self._peek() != "]":
            low = self._class_atom()
            if self._peek() == "-" and self._peek(2) != "-]":
                self._at += 1
                high = self._class_atom()
                if any(len(end) != 1 or end[0][0] != end[0][1] for end in (low, high)) or low > high:
                    raise PatternError("a range whose ends are not two characters in ascending order")
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges += low
        self._at += 1
        return complement(ranges) if negated else union(ranges)

    def _class_atom(self) -> list[Range]:
        char = self._take()
        return self._escape(inside=True) if char == "\\" else [(ord(char), ord(char))]

    def _escape(self, inside: bool) -> list[Range]:
        char = self._take()
        if char.lower() in _CLASSES:
            found = _CLASSES[char.lower()]
            return found if char.islower() else complement(found)
        if char in _CONTROL and not (char == "0" and self._peek().isdigit()):
            return [(_CONTROL[char], _CONTROL[char])]
        if char in "xu":
            return self._code(char)
        if char == "b" and inside:
            return [(8, 8)]
        if char.isalnum():
            raise PatternError(f"\\{char}")
        return [(ord(char), ord(char))]

    def _code(self, kind: str) -> list[Range]:
        syntax = r"[0-9a-fA-F]{2}" if kind == "x" else r"[0-9a-fA-F]{4}|\{[0-9a-fA-F]{1,6}\}"
        found = re.compile(syntax).match(self._text, self._at)
        if found is None:
            raise PatternError(f"\\{kind} without its digits")
        self._at = found.end()
        code = int(found[0].strip("{}"), 16)
        if code > LAST or 0xD800 <= code <= 0xDFFF:
            raise PatternError(f"\\{kind}{found[0]}, which is not a character")
        return [(code, code)]


def _count(digits: str) -> int:
    """Read a number; a long one is still too large."""
    return int(digits.lstrip("0")[:9] or 0)


# --- formats ----------------------------------------------------------------------------------------------------------

_YEAR = r"(000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
_BY_FOUR = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = rf"(\d\d{_BY_FOUR}|{_BY_FOUR}00)"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,32}"

# What each admits is valid, though not all that is valid: no IPv6 addresses with ::, no quoted local parts of e-mail.
FORMATS = {
    "date": rf"^{_DATE}$",
    "time": rf"^{_TIME}$",
    "date-time": rf"^{_DATE}T{_TIME}$",
    "duration": r"^P(\d{1,9}W|(\d{1,9}Y)?(\d{1,9}M)?\d{1,9}D(T\d{1,9}H(\d{1,9}M)?(\d{1,9}S)?)?|T\d{1,9}[HMS])$",
    "email": rf"^{_ATOM}(\.{_ATOM})?@({_LABEL}\.){{1,3}}[A-Za-z]{{2,24}}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,4}}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "ipv6": r"^[0-9a-fA-F]{1,4}(:[0-9a-fA-F]{1,4}){7}$",
    "uri": r"^[A-Za-z][A-Za-z0-9+.-]{0,15}://[A-Za-z0-9._~-]+(:\d{1,4})?(/([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})*)*"
    r"(\?([A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-F]{2})*)?(#([A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-F]{2})*)?$",
    "uuid": r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
}

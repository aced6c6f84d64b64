"""Answers out of texts, in a form in which equal answers are equal strings.

An extractor is any function from a text to an answer, None if the text holds none. It may bring its own equality of
answers as an attribute ``equal``, see `equality_of`, and as ``weight`` what a text's vote weighs, see `weight_of`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import TypeVar

from tilebeam.answers import numbers
from tilebeam.answers.normalize import Equal, normalize_answer, plain_math

Extractor = Callable[[str], str | None]
_E = TypeVar("_E", bound=Extractor)


def _by_value(extract: _E) -> _E:
    """Make the extractor compare answers as numbers: 0.5 equals 1/2."""
    extract.__dict__["equal"] = numbers.same_value
    return extract


@_by_value
def last_number(text: str) -> str | None:
    r"""Extract the last number of the text, in one spelling whatever its own is (``1{,}200.0`` is "1200",
    ``\frac{2}{4}`` is "1/2")."""
    return numbers.last_number(text)


# Of a line behind "####", in front of its number and in front of an equation.
_OPENING = re.compile(r"^(?:[\s*_]|\\[(\[]|\\boxed\{|\$(?=\$))++")
_HEADING = re.compile(r"[.):]+\s*[A-Za-z*(]")  # "#### 2. Add them" and "#### 2: .."
_GOES_ON = re.compile(r"\s*(?:[-+−*/×÷^]|\\(?:times|cdot|div)\b)\s*[\d(\\$]")


@_by_value
def marked_number(text: str) -> str | None:
    r"""Extract the number behind the last "####", of an equation that of the last side; without one, the last in the
    last ``\boxed{}``; else the last of the text."""
    for behind in reversed(text.split("####")[1:]):
        line = _OPENING.sub("", behind.lstrip("# \t:=*").removeprefix("\n").split("\n", 1)[0])
        side = _OPENING.sub("", numbers.last_side(line))
        found = numbers.number_at(side, 0)
        if side != line and found and not _GOES_ON.match(side, found[1]):
            return found[0]
        found = numbers.number_at(line, 0)  # also of "293 = 256 + 37"
        if found and not _HEADING.match(line, found[1]):
            return found[0]
    return last_number(boxed(text) or "") or last_number(text)


def regex(pattern: str) -> Extractor:
    """Extract the first group of the last match of a pattern, or the whole match if it has no group; normalized."""
    compiled = re.compile(pattern)

    def extract(text: str) -> str | None:
        matches = [*compiled.finditer(text)]
        found = matches[-1].group(min(1, compiled.groups)) if matches else None
        return (normalize_answer(found) or None) if found is not None else None

    return _by_value(extract)


def framed(text: str) -> str | None:
    r"""Find the contents of the last ``\boxed{}`` or ``\fbox{}`` whose braces close, or the number behind a later
    ``\boxed`` without braces; as it is written."""
    boxes = {m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*+\{", text)}
    opened: list[int] = []  # where the braces that are open at this place begin
    last = slice(-1, 0)
    for brace in re.finditer(r"\\[\\{}]|[{}]", text):  # \{ is no brace of LaTeX's
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened and (start := opened.pop()) in boxes and start > last.start:
            last = slice(start, brace.start())
    for bare in reversed([*re.finditer(r"\\(?:boxed|fbox)\s*+(?!\{)", text)]):
        if bare.end() > last.start and (number := numbers.number_at(text, bare.end())):
            last = slice(bare.end(), number[1])
            break
    return text[last] if last.start >= 0 else None


@_by_value
def boxed(text: str) -> str | None:
    r"""Extract the contents of the last ``\boxed{}`` or ``\fbox{}``, as `plain_math` writes it; braces may be
    nested."""
    inside = framed(text)
    return (plain_math(inside) or None) if inside is not None else None


@_by_value
def whole_text(text: str) -> str | None:
    """Take the whole text as the answer, normalized."""
    return normalize_answer(text) or None


def equality_of(extract: Extractor) -> Equal:
    """Return the extractor's own ``equal``, or equality of strings."""
    own: Equal | None = getattr(extract, "equal", None)
    return own if callable(own) else operator.eq


def weight_of(extract: Extractor, text: str) -> float:
    """Return what a text's vote weighs: what the extractor's own ``weight`` says, else 1."""
    own: Callable[[str], float] | None = getattr(extract, "weight", None)
    return own(text) if callable(own) else 1.0

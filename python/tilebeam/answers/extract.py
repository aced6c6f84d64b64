"""Answers out of texts, in a form in which equal answers are equal strings.

An extractor is any function from a text to an answer, None if the text holds none. It may bring its own equality of
answers as an attribute ``equal``, see `equality_of`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from tilebeam.answers.normalize import NUMBER, Equal, normalize_answer, plain_math
from tilebeam.errors import TilebeamError

Extractor = Callable[[str], str | None]

# A sign after a digit or a closing bracket is an operator: "3-5" holds 3 and 5, "= -5" holds -5.
_OPERAND_BEFORE = re.compile(r"[\d)\]]\s*$")


def last_number(text: str) -> str | None:
    """The last number of the text, normalized."""
    last = None
    for match in NUMBER.finditer(text):
        last = match
    if last is None:
        return None
    number = last.group()
    if number[0] in "+-" and _OPERAND_BEFORE.search(text[: last.start()]):
        number = number[1:]
    return normalize_answer(number)


# What GSM8K's answers end in. Behind "####" a heading may stand, too: "#### 2. Add them" and "#### 2: ..".
_MARKED = re.compile(rf"####[ \t:=*]*(?:\\\(|\\boxed\{{|\\)?[$€£]?\s?(?>{NUMBER.pattern})(?![.):]+\s*[A-Za-z*(])")


def marked_number(text: str) -> str | None:
    r"""The number behind the last "####"; without one, the last in the last ``\boxed{}``; else the last of the text.
    Normalized."""
    last = None
    for match in _MARKED.finditer(text):
        last = match
    if last is not None:
        return last_number(last.group())
    return last_number(boxed(text) or "") or last_number(text)


def after(marker: str, *, stop: str = "\n") -> Extractor:
    """What follows the last `marker` (in any case), up to `stop`; normalized."""

    def extract(text: str) -> str | None:
        at = text.lower().rfind(marker.lower())
        if at < 0:
            return None
        rest = text[at + len(marker) :].lstrip(" :=\t").split(stop, 1)[0]
        return normalize_answer(rest) or None

    return extract


def regex(pattern: str, group: int | str = 1, flags: int = 0) -> Extractor:
    """A group of the last match of a pattern, normalized; group 0 is the whole match."""
    compiled = re.compile(pattern, flags)
    chosen: int | str = 0 if group == 1 and compiled.groups == 0 else group

    def extract(text: str) -> str | None:
        last = None
        for match in compiled.finditer(text):
            last = match
        found = last.group(chosen) if last else None
        return (normalize_answer(found) or None) if found is not None else None

    return extract


def boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{}`` (or ``\\fbox{}``), as `plain_math` writes it; braces may be nested."""
    boxes = {m.end() for m in re.finditer(r"\\(?:boxed|fbox)\s*+\{", text)}
    opened: list[int] = []  # where the braces that are open at this place begin
    last: tuple[int, int] | None = None
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened and (start := opened.pop()) in boxes and (last is None or start > last[0]):
            last = start, brace.start()
    return (plain_math(text[slice(*last)]) or None) if last else None


def choice(letters: str = "ABCDE") -> Extractor:
    """The letter of a multiple-choice answer: in a box, behind "answer", in parentheses, or by itself; of several of a
    kind the last one."""
    if not letters.isalpha() or letters != letters.upper():
        raise TilebeamError(f"choice() takes capital letters, not {letters!r}.")
    one = f"([{letters}{letters.lower()}])"
    capital = f"([{letters}])"
    patterns = [  # possessive (*+), so that texts of white space take no longer than others
        re.compile(rf"\\(?:boxed|fbox)\s*+\{{\s*+(?:\\text\w*+\{{)?\s*+\(?{one}\)?[\s.}}]*\}}"),
        re.compile(
            rf"(?i:\b(?:answer|choice|option))\b(?i:\s++is\b)?\s*+[:=]?\s*+\*{{0,2}}(?:\({one}\)|{capital}(?![\w']))"
        ),
        re.compile(rf"\({one}\)"),
        # "A" may be a word: by itself it stands at the end, or something follows that follows no article.
        re.compile(rf"(?<![\w'(]){capital}(?=[).:,;*]|\s*+$)"),
    ]

    def extract(text: str) -> str | None:
        if len(text.strip()) == 1 and text.strip().upper() in letters:
            return text.strip().upper()
        for pattern in patterns:
            found: list[str] = [next(filter(None, m.groups())) for m in pattern.finditer(text)]
            if found:
                return found[-1].upper()
        return None

    return extract


def whole_text(text: str) -> str | None:
    """The text itself, normalized."""
    return normalize_answer(text) or None


def equality_of(extract: Extractor) -> Equal:
    """The extractor's own ``equal``, or equality of strings."""
    own: Equal | None = getattr(extract, "equal", None)
    return own if callable(own) else operator.eq

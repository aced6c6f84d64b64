"""Answers out of texts, in a form in which equal answers are equal strings.

An extractor is any function from a text to an answer, None if the text holds none. Where equal answers can be spelled
differently, an `Equal` says so; an extractor may bring its own as an attribute ``equal``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from tilebeam.errors import TilebeamError

Extractor = Callable[[str], str | None]
Equal = Callable[[str, str], bool]

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|[-+]?\.\d+")
_WHOLE_NUMBER = re.compile(_NUMBER.pattern.replace("|[-+]?\\.\\d+", "\\.?|[-+]?\\.\\d+"))
_FRACTION = re.compile(r"([-+]?\d{1,18})\s*/\s*(\d{1,18})")
_CANONICAL = re.compile(r"-?\d+(?:\.\d+|/\d+)?")
# A sign after a digit or a closing bracket is an operator: "3-5" holds 3 and 5, "= -5" holds -5.
_OPERAND_BEFORE = re.compile(r"[\d)\]]\s*$")


def last_number(text: str) -> str | None:
    """The last number of the text, normalized."""
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    if last is None:
        return None
    number = last.group()
    if number[0] in "+-" and _OPERAND_BEFORE.search(text[: last.start()]):
        number = number[1:]
    return normalize_answer(number)


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


def extractor(name: str) -> Extractor:
    """An extractor by name: "last-number", "text" (`whole_text`), "choice", "boxed", "math" (`tilebeam.MathAnswer`), or
    a regular expression whose first group (if it has one) is the answer.

    Raises:
        TilebeamError: it is no name, and no expression either.
    """
    if name == "math":
        from tilebeam.answers.math import MathAnswer

        return MathAnswer()
    if name in _BY_NAME:
        return _BY_NAME[name]
    try:
        return regex(name)
    except re.error as error:
        raise TilebeamError(
            f"{name!r} is neither {', '.join(_BY_NAME)}, math, nor a regular expression: {error}."
        ) from None


def normalize_answer(answer: str) -> str:
    """One spelling for equal answers.

    Numbers lose thousands separators, a leading dollar or trailing percent sign, superfluous zeros and the plus sign
    ("$1,200.50" and "+1200.5" are "1200.5"; "-0" is "0"); fractions are reduced ("2/4" is "1/2", "4/2" is "2"). Other
    text is lower-cased, its white space is collapsed and a closing full stop is dropped.
    """
    text = " ".join(answer.split())
    bare = text.removeprefix("$").removesuffix("%").strip()
    if _WHOLE_NUMBER.fullmatch(bare):
        try:
            value = Decimal(bare.replace(",", ""))
        except InvalidOperation:
            return text.lower()
        if value == 0:
            return "0"
        plain = format(value, "f")
        return (plain.rstrip("0").rstrip(".") if "." in plain else plain).removeprefix("+")
    if (match := _FRACTION.fullmatch(bare.rstrip("."))) and int(match[2]) != 0:
        return str(Fraction(int(match[1]), int(match[2])))
    return text.rstrip(".").strip().lower()


def plain_math(text: str) -> str:
    """LaTeX of a number or fraction as `normalize_answer` writes it; of anything else without spacing commands and
    dollars, otherwise as it is spelled (letters keep their case: they may be variables)."""
    plain = re.sub(r"\\[dt]frac", r"\\frac", text)
    plain = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", plain)
    plain = re.sub(r"\\[,;:! ]|~", " ", plain).replace("{,}", ",")
    plain = re.sub(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", plain)
    plain = " ".join(plain.replace("\\$", "").replace("$", "").replace("\\%", "%").split())
    number = re.sub(r"\\frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))", _fraction, plain)
    known = normalize_answer(number)
    return known if _CANONICAL.fullmatch(known) else plain.rstrip(".").strip()


def _fraction(match: re.Match[str]) -> str:
    return f"{match[1] or match[2]}/{match[3] or match[4]}"


def equality_of(extract: Extractor) -> Equal:
    """The extractor's own ``equal``, or equality of strings."""
    own: Equal | None = getattr(extract, "equal", None)
    return own if callable(own) else operator.eq


def merged(answers: Sequence[str | None], equal: Equal) -> list[str | None]:
    """The answers, each in the spelling of the first one that equals it."""
    known: list[str] = []
    found: list[str | None] = []
    for answer in answers:
        if answer is None:
            found.append(None)
            continue
        first = next((k for k in known if k == answer or equal(k, answer)), None)
        if first is None:
            known.append(answer)
        found.append(answer if first is None else first)
    return found


_BY_NAME: dict[str, Extractor] = {
    "last-number": last_number,
    "text": whole_text,
    "choice": choice(),
    "boxed": boxed,
}

"""One spelling for equal answers, and groups of answers that are equal though spelled differently."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction

Equal = Callable[[str, str], bool]

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|[-+]?\.\d+")
_WHOLE_NUMBER = re.compile(NUMBER.pattern.replace("|[-+]?\\.\\d+", "\\.?|[-+]?\\.\\d+"))
_FRACTION = re.compile(r"([-+]?\d{1,18})\s*/\s*(\d{1,18})")
_SQUARE_UNIT = re.compile(r"(?<=\d)\s*\\(?:text|mbox|mathrm)\s*\{\s*([a-z. ]+)\}\s*\^\{?[23]\}?")
_CANONICAL = re.compile(r"-?\d+(?:\.\d+|/\d+)?")


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
    plain = re.sub(r"(?<=\d),\\!\s*(?=\d{3})", ",", plain)  # 10,\!080
    plain = _SQUARE_UNIT.sub(r" \1", plain)
    plain = re.sub(r"\\(?:left|right)(?![a-zA-Z])", "", plain)
    plain = re.sub(r"\\[,;:! ]|~", " ", plain).replace("{,}", ",")
    plain = re.sub(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}]*)\}", r"\1", plain)
    plain = " ".join(plain.replace("\\$", "").replace("$", "").replace("\\%", "%").split())
    number = re.sub(r"\\frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))", _fraction, plain)
    known = normalize_answer(number)
    return known if _CANONICAL.fullmatch(known) else plain.rstrip(".").strip()


def _fraction(match: re.Match[str]) -> str:
    return f"{match[1] or match[2]}/{match[3] or match[4]}"


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

"""One spelling for equal answers, and groups of answers that are equal though spelled differently."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tilebeam.answers.numbers import in_latex, last_side, the_number, with_commas
from tilebeam.errors import TilebeamError

Equal = Callable[[str, str], bool]

_SQUARE_UNIT = re.compile(r"(?<=\d)\s*+\\(?:text|mbox|mathrm)\s*+\{\s*+([a-z. ]+)\}\s*+\^\{?[23]\}?")
_FONT = re.compile(r"\\(?:text\w*+|math(?:rm|bf|it|sf|tt|normal)|mbox|boldsymbol|bm)\s*+\{([^{}]*+)\}")
_SIZE = re.compile(r"\\(?:left|right)(?![a-zA-Z])\.?")
_FRACTION = re.compile(r"\\[cdt]frac(?![a-zA-Z])")
# Of "\\ 2", a row of a matrix, the backslashes are a command of their own.
_PERCENT = re.compile(r"(\\\\)|\\%")
_SPACE = re.compile(r"(\\\\)|(\\[,;: ]|~)|\\!|\\?\$")


def normalize_answer(answer: str) -> str:
    r"""Return one spelling for equal answers.

    Numbers lose thousands separators, signs of currency and percent, superfluous zeros and the plus sign ("$1,200.50"
    and "+1200.5" are "1200.5"; "-0" is "0"); fractions are reduced ("2/4" and ``\frac{1}{2}`` are "1/2", "4/2" is "2",
    "2 1/2" is "5/2"). Of "x = 5" and "2 + 3 = 5" the last side counts, if it is a number. Other text is lower-cased,
    its white space is collapsed and a closing full stop is dropped.
    """
    text = " ".join(answer.split()).rstrip(". ").lower()
    return the_number(last_side(answer)) or the_number(last_side(text)) or text


def plain_math(text: str) -> str:
    """Return LaTeX of a number or fraction as `normalize_answer` writes it, of anything else without spacing commands,
    fonts and dollars, otherwise as it is spelled (letters keep their case: they may be variables)."""
    for _ in range(4):  # what is left may be a command again: \text{\textbf{5}}
        before = text
        plain = _FONT.sub(r"\1", _SQUARE_UNIT.sub(r" \1", text))
        text = the_number(last_side(plain)) or _PERCENT.sub(lambda m: m[1] or "%", _spaced(with_commas(plain)))
        if text == before:
            break
    return text


def faithful_math(text: str) -> str:
    r"""Return LaTeX for math-verify, which decides what it means: numbers in a spelling that it reads (mixed ones stay
    mixed), otherwise only without spacing commands and dollars. ``\text{}`` stays: "even" without it is e*v*e*n."""
    if (number := the_number(_FONT.sub(r"\1", text), latex=True)) is not None:
        return number
    spaced = _spaced(in_latex(text))
    return the_number(spaced, latex=True) or spaced


def _spaced(text: str) -> str:
    """Return LaTeX with ordinary blanks only, without what sizes brackets and fractions."""
    text = _FRACTION.sub(r"\\frac", _SIZE.sub("", text))
    return " ".join(_SPACE.sub(lambda m: m[1] or " " * bool(m[2]), text).split()).rstrip(". ")


def checked_answer(answer: object) -> str | None:
    """Check that an extractor returned a string or None; TilebeamError: it is neither a string nor None."""
    if answer is None or isinstance(answer, str):
        return answer
    kind = type(answer).__name__
    raise TilebeamError(f"An extractor must return a string, or None for no answer; it returned {answer!r} ({kind}).")


def merged(answers: Sequence[str | None], equal: Equal) -> list[str | None]:
    """Give each answer the spelling of the first one that equals it.

    Raises:
        TilebeamError: one is neither a string nor None.
    """
    known: list[str] = []
    found: list[str | None] = []
    for answer in map(checked_answer, answers):
        if answer is None:
            found.append(None)
            continue
        first = next((k for k in known if k == answer or equal(k, answer)), None)
        if first is None:
            known.append(answer)
        found.append(answer if first is None else first)
    return found

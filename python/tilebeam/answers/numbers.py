r"""Numbers as people and models write them, in plain text and in LaTeX. Everything that reads numbers reads them here.

    12000     12,000   12{,}000   12\,000   12,\!000   12'000, and with thin, narrow or no-break spaces
    -3        −3   -$3   $-3   −€3   = - 3     (a blank behind the minus: where it can be no dash and no bullet)
    0.5       .5   5e-1   5 \times 10^{-1}
    3/4       \frac{3}{4}   \dfrac34   3/-4   ¾, with any of the numbers above as its parts
    5/2       2\frac{1}{2}   2 1/2   2½        (but \frac{1}{2}3 and 2\frac{-1}{2} are two numbers each)
    50        50%   50\%   \$50   50 €         (signs of currency and percent do not count)

A number has one spelling here: a plain decimal ("12000", "-0.5") or a reduced fraction ("-3/4"), whichever it was
written as. Patterns are atomic and their blanks bounded, so that time is linear in the text.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

_MINUS = r"\-−–－﹣"  # within brackets of a pattern
_SIGN = f"[+{_MINUS}]"
_BLANK = r"[ \t\u00a0\u2009\u202f]"
_CURRENCY = r"(?:\\?\$|[€£¥₹])"
# Of thousands. None are a plain blank ("rooms 12 400"), a comma with one ("12, 400") and a tilde ("100~200").
_SEPARATORS = (",", r"\{,\}", r"(?:\\!)?(?:,|\{,\})\\! ?", r"\\[,:; ]", "['’]", r"[\u00a0\u2007\u2009\u202f]")
_THOUSANDS = "|".join(rf"(?:{separator}\d{{3}})+" for separator in _SEPARATORS)
_INTEGER = rf"(?>\d{{1,3}}(?:{_THOUSANDS})(?!\d)|\d+)"
_ODD_SEPARATOR = re.compile(rf"(?<=\d)(?:{'|'.join(_SEPARATORS[1:])})(?=\d{{3}}(?!\d))")
_DECIMAL = rf"(?>{_INTEGER}(?:\.\d+)?|(?<![\w.])\.\d+)"
_TEN_TO = (
    rf"(?:[eE](?P<e>[-+]?\d{{1,3}})(?!\d)|{_BLANK}?(?:\\times|\\cdot|[×·*x]){_BLANK}?10{_BLANK}?\^"
    rf"(?:(?P<power>\d{{1,3}})(?!\d)|\{{(?P<power_in_braces>{_SIGN}?\d{{1,3}})\}}))"
)
_GAP = rf"(?:{_BLANK}|\\[,:;! ]|~)"  # between the parts of a mixed number


def _argument(name: str) -> str:
    r"""Return the pattern of an argument of \frac: in braces, or a digit."""
    return rf"{_BLANK}?(?:\{{{_BLANK}?(?P<{name}>{_SIGN}?{_BLANK}?{_DECIMAL}){_BLANK}?\}}|(?P<{name}_digit>\d))"


_LATEX = rf"\\(?:[cdst]|nice)?frac{_argument('top')}{_argument('bottom')}"
_SLASH = (  # no dates: 5/12/2026
    rf"(?<!/)(?<!/ )(?P<over>{_DECIMAL}){_BLANK}?(?:[/⁄∕]|\\over){_BLANK}?(?P<under>{_SIGN}?{_DECIMAL})"
    rf"(?!{_BLANK}?/{_BLANK}?\d)"
)
_NUMBER = re.compile(
    rf"(?:(?P<sign>{_SIGN}){_BLANK}{{0,2}})?(?P<currency>{_CURRENCY}{_BLANK}?(?:(?P<inner_sign>{_SIGN}){_BLANK}?)?)?"
    rf"(?P<size>(?:(?<![_^])(?P<whole>{_INTEGER}){_GAP}{{0,3}}+)?+(?:{_LATEX}|(?P<vulgar>[¼-¾⅐-⅞]))"
    rf"|(?:(?<![_^])(?P<beside>{_INTEGER}){_GAP}{{1,3}}+(?=[1-9]))?{_SLASH}"
    rf"|(?P<plain>{_DECIMAL}){_TEN_TO}?)"
)

# What stands before a minus. Behind an operand it subtracts ("8 - 3", "$8$ - 3"), behind a letter it is a hyphen.
_OPERAND = re.compile(r"(?:[\d)\]}%°!](?:\\[)\]]|\$)?[ \t]*|[A-Za-z]\$?)\Z")
# With a blank behind it, a minus is a sign only here; elsewhere it is a dash or a bullet: "- 5 apples", "total - 5".
_SIGN_EXPECTED = re.compile(r"(?:(?:[=≈<>(\[{:|,&*]|\\[(\[]|\b(?:is|be|equals))[ \t]*|\$)\Z")
_BEFORE = 12  # characters that these two look at
_LONGEST = 200  # characters of a fraction: Python's integers take quadratic time

_TAIL = re.compile(rf"{_BLANK}?(?:(?P<percent>\\?%|(?i:percent)\b)|{_CURRENCY})?\.?")
_ARITHMETIC = (
    rf"(?:[\d\s.,+{_MINUS}*/×÷·^(){{}}\[\]$€£¥₹%!:']|(?<=\d)x(?=\d)|(?<= )x(?= )"
    r"|\\(?:(?:[cdt]?frac|times|cdot|div|left|right)(?![A-Za-z])|[,:;! $%()\[\]]))++"
)
_LEFT_SIDES = re.compile(
    rf"(?:[\s$]*+(?:[A-Za-z](?:_(?:\w|\{{\w{{1,20}}\}}))?+\s*+|{_ARITHMETIC})?+(?:[=≈]|\\approx(?![A-Za-z])))++\s*+"
)
_SPELLED = re.compile(rf"-?\d{{1,{_LONGEST}}}(?:[./]\d{{1,{_LONGEST}}})?")


def last_number(text: str) -> str | None:
    """Find the last number in a text, None if there is none."""
    if (only := the_number(text)) is not None:
        return only
    for line in reversed(text.split("\n")):  # no number goes on in the next line
        if found := [*_NUMBER.finditer(line)]:
            return _spelled(found[-1], _negative(found[-1]))[0]
    return None


def number_at(text: str, at: int) -> tuple[str, int] | None:
    """Read the number that begins at a place in a text, and where it ends; None if something else stands there."""
    match = _NUMBER.match(text, at)
    return (_spelled(match, _minus(match))[0], match.end()) if match else None


def the_number(text: str, *, latex: bool = False) -> str | None:
    r"""Read the number that is all of a text, apart from signs of currency or percent and a full stop; None if the text
    is anything else. With `latex`, mixed numbers stay mixed and percent stays percent: ``2\frac{1}{2}``, ``50\%``."""
    text = text.strip()
    if text.startswith((r"\(", r"\[")) and (inner := text.removesuffix(".")).endswith((r"\)", r"\]")):
        text = inner[2:-2].strip()
    match = _NUMBER.match(text)
    tail = _TAIL.fullmatch(text, match.end()) if match else None
    if match is None or tail is None:
        return None
    spelled, one = _spelled(match, _minus(match))
    if not one:
        return None
    if latex and "/" in spelled and (match["whole"] or match["beside"]):
        return "-" * _minus(match) + _in_latex(match)
    # Of whole numbers math-verify takes percent for both, 50 and 1/2; of others it reads something else.
    return spelled + r"\%" * bool(latex and tail["percent"] and spelled.isdecimal())


def last_side(text: str) -> str:
    """Drop the left sides of an equation if they are arithmetic or a variable: "293" of "256 + 37 = 293", "5" of "x =
    5". Return other text, such as "x^2 + y^2 = 25", as it is."""
    match = _LEFT_SIDES.match(text)
    return text[match.end() :] if match else text


def with_commas(text: str) -> str:
    """Replace all separators of thousands in a text by commas."""
    return _ODD_SEPARATOR.sub(",", text)


def in_latex(text: str) -> str:
    r"""Spell the numbers of a formula as math-verify reads them: ``10{,}000`` as 10000, ``2 1/2`` and ``2½`` as
    ``2\frac{1}{2}``. Commas stay, since they may separate the numbers of a tuple."""
    return _NUMBER.sub(lambda m: m[0][: m.start("size") - m.start()] + _in_latex(m), text)


def same_value(a: str, b: str) -> bool:
    """Tell whether two numbers, as spelled here, are equal ("0.5" and "1/2"), or two other texts are the same."""
    if a == b:
        return True
    if not (_SPELLED.fullmatch(a) and _SPELLED.fullmatch(b)):
        return False
    try:
        return Fraction(a) == Fraction(b)
    except ZeroDivisionError:
        return False


def _minus(match: re.Match[str]) -> bool:
    return (match["sign"] or match["inner_sign"] or "+") in _MINUS


def _negative(match: re.Match[str]) -> bool:
    """Tell whether a number within a text has a minus that is its sign."""
    if not _minus(match):
        return False
    start = match.start()
    before = match.string[max(0, start - _BEFORE) : start]
    if match["sign"] is None:  # behind a dollar, which may end a formula: "$x$-3"
        return match["currency"][0] != "$" or not re.search(r"[\w)}\]]\Z", before)
    if _OPERAND.search(before):
        return False
    return match.string[start + 1] not in " \t" or _SIGN_EXPECTED.search(before) is not None


def _spelled(match: re.Match[str], negative: bool) -> tuple[str, bool]:
    """Spell a match's number, and tell whether there is but one in it; of two the last, without the sign."""
    if match["plain"]:
        power = match["e"] or match["power"] or match["power_in_braces"] or "0"
        return _decimal("-" * negative + _digits(match["plain"]), _digits(power)), True
    whole, top, bottom = _parts(match)
    if not bottom.strip("-0.") or len(whole + top + bottom) > _LONGEST:
        return _decimal(bottom), False
    fraction = Fraction(top) / Fraction(bottom)
    if not _mixes(match, top, bottom):
        return str(fraction), False
    fraction += int(whole or 0)
    return str(-fraction if negative else fraction), True


def _in_latex(match: re.Match[str]) -> str:
    """Spell a match's number without signs, in LaTeX that math-verify reads."""
    if match["plain"]:
        plain = match["plain"]
        return match["size"] if re.fullmatch(r"[\d.,]*", plain) else match["size"].replace(plain, _digits(plain), 1)
    whole, top, bottom = _parts(match)
    if len(whole + top + bottom) > _LONGEST or not _mixes(match, top, bottom):
        return match["size"]
    return f"{top}/{bottom}" if match["over"] and not whole else rf"{whole}\frac{{{top}}}{{{bottom}}}"


def _parts(match: re.Match[str]) -> tuple[str, str, str]:
    """Return the parts of a fraction: the whole number in front of it or "", what is above, what is below."""
    if match["vulgar"]:
        top, _, bottom = unicodedata.normalize("NFKC", match["vulgar"]).partition("⁄")
    else:
        top = match["top"] or match["top_digit"] or match["over"]
        bottom = match["bottom"] or match["bottom_digit"] or match["under"]
    return _digits(match["whole"] or match["beside"] or ""), _digits(top), _digits(bottom)


def _mixes(match: re.Match[str], top: str, bottom: str) -> bool:
    r"""Tell whether a fraction and what stands in front of it are one number. Beside a slash only a proper fraction is
    part of a mixed number: "2 1/2", not "in 2024 5/3"; 2\frac{5}{3} is 11/3 as in math-verify."""
    if not (match["whole"] or match["beside"]):
        return True
    return "-" not in top + bottom and (match["beside"] is None or Fraction(top) < Fraction(bottom))


def _digits(number: str) -> str:
    """Remove separators from a number and make its minus an ordinary one."""
    return re.sub(r"[^\d.\-]", "", re.sub(f"[{_MINUS}]", "-", number))


def _decimal(digits: str, power: str = "0") -> str:
    value = Decimal(f"{digits}e{power}")
    if not value:
        return "0"
    plain = format(value, "f")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain

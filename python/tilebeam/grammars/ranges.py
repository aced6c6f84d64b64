"""Numbers within bounds as grammars: the digits of the bounds tell which digits may follow which.

Only decimals without an exponent are written, with a whole part of at most 16 digits where there is no bound.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Context, Decimal

from tilebeam.grammars.gbnf import either

DIGITS = 16  # of a whole part that has no bound, and of a fraction
_PLACES = 6  # behind the point, where the bounds have fewer
_EXACT = Context(prec=99)  # more digits than a bound has


@dataclass(frozen=True)
class Bound:
    """One end of a range. `open`: the value itself is outside."""

    value: Decimal
    open: bool = False


def whole_range(low: Bound | None, high: Bound | None, digits: int = DIGITS) -> tuple[int, int]:
    """Return the least and the largest whole number of a range.

    Args:
        digits: of numbers without a bound, where the other bound has less.
    """
    least = most = None
    if low is not None:
        least = math.floor(low.value) + 1 if low.open else math.ceil(low.value)
    if high is not None:
        most = math.ceil(high.value) - 1 if high.open else math.floor(high.value)
    least = -_beyond(most, digits) if least is None else least
    return least, _beyond(least, digits) if most is None else most


def decimals(low: Bound | None, high: Bound | None, places: int | None = None) -> str | None:
    """Match the decimals of a range; None: the range holds none.

    Args:
        places: most digits behind the point, 0 for whole numbers; None: 6, or one more than the bounds have.
    """
    if places is None:
        given = (-int(b.value.normalize().as_tuple().exponent) for b in (low, high) if b is not None)
        places = min(max([_PLACES, *(n + 1 for n in given)]), DIGITS)
    found = [part for count in range(places + 1) if (part := _fixed(low, high, count)) is not None]
    return either(*found) if found else None


def _fixed(low: Bound | None, high: Bound | None, places: int) -> str | None:
    """Match the numbers of a range with exactly so many digits behind the point."""
    low, high = (None if b is None else Bound(b.value.scaleb(places, _EXACT), b.open) for b in (low, high))
    least, most = whole_range(low, high, DIGITS + places)
    if least > most:
        return None
    parts = []
    if least < 0:
        parts.append(f'"-" {_naturals(max(1, -most), -least, places)}')
    if most >= 0:
        parts.append(_naturals(max(0, least), most, places))
    return either(*parts)


def _beyond(value: int | None, digits: int = DIGITS) -> int:
    """Give a range without a bound an end: many digits, more than the other bound has."""
    return int(10 ** max(digits, len(str(abs(value or 0))) + 1)) - 1


# --- digits -----------------------------------------------------------------------------------------------------------


def _naturals(low: int, high: int, places: int) -> str:
    """Match the numbers from low to high, both at least 0, low <= high, whose last digits stand behind the point."""
    parts = []
    full: list[int] = []  # lengths of which all numbers are in the range
    for length in range(max(len(str(low)), places + 1), max(len(str(high)), places + 1) + 1):
        begin, end = 0 if length == places + 1 else 10 ** (length - 1), 10**length - 1
        first, last = max(low, begin), min(high, end)
        if begin and (first, last) == (begin, end):
            full.append(length)
        else:
            parts.append(_between(_pointed(first, length, places), _pointed(last, length, places)))
    if full:
        parts.append(_joined("[1-9]", _any_digits(full[0] - 1 - places, full[-1] - 1 - places), _fraction(places)))
    return either(*parts)


def _pointed(number: int, length: int, places: int) -> str:
    digits = str(number).zfill(length)
    return f"{digits[:-places]}.{digits[-places:]}" if places else digits


def _between(low: str, high: str) -> str:
    """Return what is written from low to high, which have the point and as many digits at the same places."""
    if not low:
        return ""
    if low[0] == high[0]:
        return _joined(f'"{low[0]}"', _between(low[1:], high[1:]))
    first, last, parts = int(low[0]), int(high[0]), []
    if low[1:].strip("0."):
        parts.append(_joined(f'"{first}"', _between(low[1:], re.sub(r"\d", "9", low[1:]))))
        first += 1
    if high[1:].strip("9."):
        parts.append(_joined(f'"{last}"', _between(re.sub(r"\d", "0", high[1:]), high[1:])))
        last -= 1
    if first <= last:
        whole, _, fraction = low[1:].partition(".")
        digit = f'"{first}"' if first == last else f"[{first}-{last}]"
        parts.append(_joined(digit, _any_digits(len(whole), len(whole)), _fraction(len(fraction))))
    return either(*parts)


def _any_digits(least: int, most: int) -> str:
    if most == 0:
        return ""
    return f"[0-9]{{{least}}}" if least == most else f"[0-9]{{{least},{most}}}"


def _fraction(places: int) -> str:
    return f'"." [0-9]{{{places}}}' if places else ""


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))

"""Numbers within bounds as grammars: the digits of the bounds tell which digits may follow which.

Only decimals without an exponent are written, whole numbers with at most 16 digits where there is no bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from tilebeam.grammars.gbnf import either

DIGITS = 16  # of a whole part or a fraction that has no bound


@dataclass(frozen=True)
class Bound:
    """One end of a range. `open`: the value itself is outside."""

    value: Decimal
    open: bool = False


def whole_numbers(low: Bound | None, high: Bound | None) -> str | None:
    """Match the whole numbers of a range; None: the range holds none."""
    least, most = whole_range(low, high)
    if least > most:
        return None
    parts = []
    if least < 0:
        parts.append(f'"-" {_naturals(max(1, -most), -least)}')
    if most >= 0:
        parts.append(_naturals(max(0, least), most))
    return either(*parts)


def whole_range(low: Bound | None, high: Bound | None, digits: int = DIGITS) -> tuple[int, int]:
    """Return the least and the largest whole number of a range.

    Args:
        digits: of numbers without a bound, where the other bound has less.
    """
    least = None if low is None else int(low.value.to_integral_value(ROUND_CEILING))
    most = None if high is None else int(high.value.to_integral_value(ROUND_FLOOR))
    if low is not None and least is not None and low.open and least == low.value:
        least += 1
    if high is not None and most is not None and high.open and most == high.value:
        most -= 1
    least = -_beyond(most, digits) if least is None else least
    return least, _beyond(least, digits) if most is None else most


def decimals(low: Bound | None, high: Bound | None, places: int = DIGITS) -> str | None:
    """Match the decimals of a range; None: the range holds none.

    Args:
        places: most digits behind the point.
    """
    zero = Decimal(0)
    if low is not None and high is not None and _empty(low, high):
        return None
    parts: list[str | None] = []
    if low is None or low.value < 0:
        far = Bound(Decimal(_beyond(None if high is None else int(high.value)))) if low is None else _negated(low)
        near = _negated(high) if high is not None and high.value < 0 else Bound(zero, open=True)
        parts.append(_positive(near, far, places, sign='"-" '))
    if high is None or high.value >= 0:
        near = low if low is not None and low.value >= 0 else Bound(zero)
        far = Bound(Decimal(_beyond(int(near.value)))) if high is None else high
        parts.append(_positive(near, far, places, sign=""))
    found = [part for part in parts if part is not None]
    return either(*found) if found else None


def _beyond(value: int | None, digits: int = DIGITS) -> int:
    """Give a range without a bound an end: many digits, more than the other bound has."""
    return int(10 ** max(digits, len(str(abs(value or 0))) + 1)) - 1


def _empty(low: Bound, high: Bound) -> bool:
    return low.value > high.value or (low.value == high.value and (low.open or high.open))


def _negated(bound: Bound) -> Bound:
    return Bound(-bound.value, bound.open)


# --- whole numbers ----------------------------------------------------------------------------------------------------


def _naturals(low: int, high: int) -> str:
    """Match the numbers from low to high, both at least 0, low <= high."""
    parts = ['"0"'] if low == 0 else []
    low = max(1, low)
    full: list[int] = []  # lengths of which all numbers are in the range
    for length in range(len(str(low)), len(str(high)) + 1) if high >= low else ():
        first, last = max(low, 10 ** (length - 1)), min(high, 10**length - 1)
        if (first, last) == (10 ** (length - 1), 10**length - 1):
            full.append(length)
        else:
            parts.append(_between(str(first), str(last)))
    if full:
        parts.append(_joined("[1-9]", _any_digits(full[0] - 1, full[-1] - 1)))
    return either(*parts)


def _between(low: str, high: str) -> str:
    """Return digits from low to high, which have the same number of them."""
    if not low:
        return ""
    if low[0] == high[0]:
        return _joined(f'"{low[0]}"', _between(low[1:], high[1:]))
    rest = len(low) - 1
    first, last, parts = int(low[0]), int(high[0]), []
    if low[1:].strip("0"):
        parts.append(_joined(f'"{first}"', _between(low[1:], "9" * rest)))
        first += 1
    if high[1:].strip("9"):
        parts.append(_joined(f'"{last}"', _between("0" * rest, high[1:])))
        last -= 1
    if first <= last:
        parts.append(_joined(_digit(first, last), _any_digits(rest, rest)))
    return either(*parts)


def _digit(first: int, last: int) -> str:
    return f'"{first}"' if first == last else f"[{first}-{last}]"


def _any_digits(least: int, most: int) -> str:
    if most == 0:
        return ""
    return f"[0-9]{{{least}}}" if least == most else f"[0-9]{{{least},{most}}}"


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))


# --- decimals ---------------------------------------------------------------------------------------------------------


def _positive(low: Bound, high: Bound, places: int, sign: str) -> str | None:
    """Return decimals from low to high, both at least 0; None: there are none."""
    if _empty(low, high):
        return None
    first, last = int(low.value), int(high.value)
    after_low, after_high = _fraction_of(low.value), _fraction_of(high.value)
    parts: list[str | None] = []
    if first == last:
        tails = _Tails(after_low, low.open, after_high, high.open, places)
        parts.append(_with_point(f'"{first}"', tails, low=True, high=True))
    elif first < last:
        tails = _Tails(after_low, low.open, after_high, high.open, places)
        parts.append(_with_point(f'"{first}"', tails, low=True, high=False))
        if first + 1 <= last - 1:
            parts.append(_with_point(_naturals(first + 1, last - 1), tails, low=False, high=False))
        parts.append(_with_point(f'"{last}"', tails, low=False, high=True))
    found = [sign + part for part in parts if part is not None]
    return either(*found) if found else None


def _fraction_of(value: Decimal) -> str:
    """Return the digits behind the point, without zeros at their end."""
    return format(value, "f").partition(".")[2].rstrip("0")


def _with_point(whole: str, tails: _Tails, low: bool, high: bool) -> str | None:
    digits = tails.digits(0, low, high)
    if tails.may_end(0, low, high):
        return whole if digits is None else f'{whole} ( "." {digits} )?'
    return None if digits is None else f'{whole} "." {digits}'


def _not_all_zero(room: int) -> str:
    """Return one to `room` digits, of which one at least is not 0."""
    more = _joined("[1-9]", f"[0-9]{{0,{room - 1}}}") if room > 1 else "[1-9]"
    return either(more, _joined('"0"', _not_all_zero(room - 1))) if room > 1 else more


@dataclass(frozen=True)
class _Tails:
    """Fractions between two others, digit by digit.

    Attributes:
        low, high: the digits of the bounds, which zeros follow.
        low_open, high_open: the bounds themselves are outside.
        places: most digits.
    """

    low: str
    low_open: bool
    high: str
    high_open: bool
    places: int

    def may_end(self, at: int, low: bool, high: bool) -> bool:
        """Tell whether a number may end before digit `at`, given that all before are those of the bounds `low`,
        `high`."""
        above = not low or (at >= len(self.low) and not self.low_open)
        below = not high or at < len(self.high) or not self.high_open
        return above and below

    def digits(self, at: int, low: bool, high: bool) -> str | None:
        """Return at least one digit from place `at` on; None: none may follow."""
        room = self.places - at
        if room <= 0:
            return None
        if not low and not high:
            return f"[0-9]{{1,{room}}}"
        if at >= (len(self.low) if low else 0) and at >= (len(self.high) if high else 0):
            if high:
                closed = not self.high_open and not (low and self.low_open)
                return f'"0"{{1,{room}}}' if closed else None
            positive = _not_all_zero(room)
            return positive if self.low_open else f"[0-9]{{1,{room}}}"
        parts = list(self._continued(at, low, high))
        return either(*parts) if parts else None

    def _continued(self, at: int, low: bool, high: bool) -> Iterator[str]:
        least = int(self.low[at]) if low and at < len(self.low) else 0
        most = (int(self.high[at]) if at < len(self.high) else 0) if high else 9
        if low and high and least == most:
            yield from self._after(least, at, True, True)
            return
        if low:
            yield from self._after(least, at, True, False)
        if high:
            yield from self._after(most, at, False, True)
        first, last = least + low, most - high
        if first <= last:
            rest = self.places - at - 1
            yield _joined(_digit(first, last), f"[0-9]{{0,{rest}}}" if rest else "")

    def _after(self, digit: int, at: int, low: bool, high: bool) -> Iterator[str]:
        more = self.digits(at + 1, low, high)
        ends = self.may_end(at + 1, low, high)
        if more is not None:
            yield f'"{digit}" ( {more} )?' if ends else f'"{digit}" {more}'
        elif ends:
            yield f'"{digit}"'

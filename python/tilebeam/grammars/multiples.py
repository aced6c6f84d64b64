"""Whole numbers that are multiples of another as grammars: a range is cut into beginnings with free digits behind them,
and a rule for each remainder tells which digits may follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tilebeam.grammars.gbnf import either
from tilebeam.grammars.ranges import Bound, whole_range

LARGEST = 1000
_MOST_RULES = 256
_FEW = 128  # multiples that are written one by one
_DIGITS = 9  # of a number that has no bound


class TooManyRules(ValueError):
    """A range with too many digits for its step."""


def multiples(step: int, low: Bound | None, high: Bound | None, name: Callable[[str], str]) -> str | None:
    """Match the multiples of a number (1 to LARGEST) in a range; None: the range holds none.

    Args:
        name: makes a rule of a body and returns its name.

    Raises:
        TooManyRules: the grammar would be too large.
    """
    least, most = whole_range(low, high, _DIGITS)
    if (most - least) // step < _FEW:
        few = range(-(-least // step) * step, most + 1, step)
        return either(*[f'"{value}"' for value in few]) if few else None
    endings = _Endings(step, name)
    parts = []
    if least < 0:
        parts += [f'"-" {part}' for part in endings.between(max(1, -most), -least)]
    if most >= 0:
        parts += endings.between(max(0, least), most)
    return either(*parts) if parts else None


class _Endings:
    """The digits that make a multiple of a step, by how many there are and the remainder that they must have."""

    def __init__(self, step: int, name: Callable[[str], str]) -> None:
        self._step = step
        self._name = name
        self._rules: dict[tuple[int, int], str | None] = {}

    def between(self, low: int, high: int) -> list[str]:
        """Match the multiples from low to high, both at least 0."""
        parts = []
        for first, free in _blocks(low, high):
            rest = self._of(free, -first * 10**free % self._step)
            if rest is not None:
                parts.append(f'"{first}" {rest}'.strip())
        return parts

    def _of(self, count: int, remainder: int) -> str | None:
        """Return the rule of so many digits; None: no such digits have this remainder."""
        if count == 0:
            return None if remainder else ""
        key = count, remainder
        if key not in self._rules:
            if len(self._rules) >= _MOST_RULES:
                raise TooManyRules
            self._rules[key] = None  # counts
            by_rest: dict[str, str] = {}
            for digit in range(10):
                rest = self._of(count - 1, (remainder - digit * 10 ** (count - 1)) % self._step)
                if rest is not None:
                    by_rest[rest] = by_rest.get(rest, "") + str(digit)
            ways = [f"[{digits}] {rest}".strip() for rest, digits in by_rest.items()]
            self._rules[key] = self._name(" | ".join(ways)) if ways else None
        return self._rules[key]


def _blocks(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Split a range into beginnings, none of which begins with 0 but 0 itself, and how many free digits follow each."""
    while low <= high:
        free = 0
        while low and low % 10 ** (free + 1) == 0 and low + 10 ** (free + 1) - 1 <= high:
            free += 1
        yield low // 10**free, free
        low += 10**free

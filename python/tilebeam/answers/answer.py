"""The answer that a vote found: a text that also equals the number it spells."""

from __future__ import annotations

from fractions import Fraction


class Answer(str):
    """A text that equals a number if it spells it: ``Answer("21") == 21``, ``Answer("1/2") == 0.5``. It hashes as the
    text, so keys of a dict are looked up as texts."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int | float | Fraction):
            return str.__eq__(self, other)
        try:
            value = Fraction(self)
            return float(value) == other if isinstance(other, float) else value == other
        except (ValueError, ArithmeticError):  # no number, n/0, or beyond floating point
            return False

    def __ne__(self, other: object) -> bool:
        return not self == other

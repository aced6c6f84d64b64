"""The answer that a vote found: a text that also equals the number it spells."""

from __future__ import annotations

from fractions import Fraction


class VotedAnswer(str):
    """A text that also equals the number it spells: of "21" 21, of "1/2" 0.5. It hashes as the text, so a dict finds it
    by its text only."""

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

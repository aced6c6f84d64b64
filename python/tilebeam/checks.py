"""Checks of arguments that many classes share."""

from __future__ import annotations

import math

from tilebeam.errors import TilebeamError


def is_integer(value: object) -> bool:
    """Tell an int from everything else; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Accept an int or a float that is neither infinite nor NaN; refuse True and False."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def checked_integer(name: str, value: object, least: int = 1) -> int:
    """Check the value of an argument that counts something, and return it.

    Raises:
        TilebeamError: it is no whole number of at least `least`; names the argument.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TilebeamError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    return value

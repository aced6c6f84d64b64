"""Checks of arguments that many classes share."""

from __future__ import annotations

import math

from tilebeam.errors import TilebeamError


def is_whole(value: object) -> bool:
    """Whether a value is an int; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether a value is an int or a float that is neither infinite nor NaN; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def whole(name: str, value: object, least: int = 1) -> int:
    """The value of an argument that counts something.

    Raises:
        TilebeamError: it is no whole number of at least `least`; names the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TilebeamError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    return value

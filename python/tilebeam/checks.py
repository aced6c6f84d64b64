"""Checks of values that many classes share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tilebeam.errors import TilebeamError


def is_integer(value: object) -> bool:
    """Tell an int from everything else; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Accept an int or a float that is neither infinite nor NaN; refuse True and False."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def checked_integer(name: str, value: object) -> int:
    """Check the value of an argument that counts something, and return it.

    Raises:
        TilebeamError: it is no whole number of at least 1; names the argument.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TilebeamError(f"{name} must be a whole number of at least 1, not {value!r}.")
    return value


def without_infinities(value: Any) -> Any:
    """Copy a value as JSON can hold it: floats that are infinite or NaN become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: without_infinities(item) for key, item in value.items()}
    return [without_infinities(item) for item in value] if isinstance(value, list | tuple) else value

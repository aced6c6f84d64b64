"""Sets of characters, as ranges of code points with both ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence

Range = tuple[int, int]

LAST = sys.maxunicode


def union(ranges: Sequence[Range]) -> list[Range]:
    """Unite characters to ascending ranges that do not touch; a range whose end lies before its start has none."""
    found: list[Range] = []
    for low, high in sorted(ranges):
        if low > high:
            continue
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def complement(ranges: Sequence[Range]) -> list[Range]:
    """Return all other code points."""
    found, start = [], 0
    for low, high in [*union(ranges), (LAST + 1, LAST + 1)]:
        if low > start:
            found.append((start, low - 1))
        start = high + 1
    return found

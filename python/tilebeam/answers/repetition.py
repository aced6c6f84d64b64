"""Texts that loop: a model that says the same thing again and again, often until it is cut."""

from __future__ import annotations

import re

# Bytes that have to be there twice: two or three sentences. Less may be a refrain, or a table's equal cells.
_AT_LEAST = 100
# Items of a list that differ in their numbers alone are the same.
_NUMBERING = re.compile(r"(?m)^[ \t]*\d+[.)]")


def repeats_itself(text: str) -> bool:
    """Return whether a text ends in a loop: its last 100 bytes or more stand directly before them, too.

    Numbers of a list's items do not count, nor does white space at the end; ends without letters are no loops.
    """
    said = _NUMBERING.sub("#.", text.rstrip()).encode(errors="surrogatepass")
    end = said[-_AT_LEAST:]
    if not any(c.isalpha() for c in end.decode(errors="ignore")):
        return False
    found = said.rfind(end, 0, -1)
    while found >= 0:
        period = len(said) - len(end) - found
        if said[:-period].endswith(said[-max(period, _AT_LEAST) :]):
            return True
        found = said.rfind(end, 0, found + len(end) - 1)
    return False

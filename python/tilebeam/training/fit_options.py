"""Defaults of training. Importing this needs no numpy."""

from __future__ import annotations

from tilebeam.errors import TilebeamError

SAMPLES = 8  # of a problem
STEPS = 2  # beginnings of each sample that are learnt from, too
SEED = 1
AUTO = "auto"  # the features that do best on held-out problems
_KNOWN = ("mean", "recent", "last", "length", "confidence")


def features_of(text: str) -> tuple[str, ...]:
    """Return names in a comma-separated list; none for "auto".

    Raises:
        TilebeamError: an unknown name, one that comes twice, or none that reads hidden states.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if names == (AUTO,):
        return ()
    if unknown := [name for name in names if name not in _KNOWN]:
        raise TilebeamError(f"--features: {unknown[0]!r} is not one of {', '.join(_KNOWN)} (or auto).")
    if len(set(names)) != len(names) or not set(names) - {"length"}:
        raise TilebeamError(f"--features {text!r}: name each once, and at least one besides length.")
    return names

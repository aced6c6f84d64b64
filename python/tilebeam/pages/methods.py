"""What pages call the methods of search."""

from __future__ import annotations

from tilebeam.errors import TilebeamError
from tilebeam.search.algorithms import canonical

_TITLES = {
    "best-of-n": "Best of N",
    "self-consistency": "Vote",
    "beam": "Beam search",
    "dvts": "Diverse verifier tree search",
    "adaptive": "Adaptive vote",
    "tir": "Vote, programs run",
}


def method_title(method: str) -> str:
    """Title a method by its name or an alias; a name that is no method's stays as it is."""
    try:
        return _TITLES[canonical(method)]
    except TilebeamError:
        return method

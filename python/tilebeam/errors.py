"""The exceptions and warnings of the library. Every message is a sentence that says what is wrong and, where one can,
what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class TilebeamError(RuntimeError):
    """Something Tilebeam was asked for cannot be done: a bad file, a bad option, no room, a failed decode."""


class NpuError(TilebeamError):
    """The NPU failed, died or did not answer in time. The model that was loaded on it is lost; load it again."""


class GrammarTooComplexError(TilebeamError):
    """A text can be read in so many ways under its grammar that looking for its next token takes too long."""


class PlacementWarning(UserWarning):
    """A model, or some matrices of it, runs on the CPU: says how much of it, why, and what to do."""


class CacheWarning(UserWarning):
    """A packed file is not kept for the next load, or is made anew: says why. The model is loaded all the same."""


class SearchCancelled(TilebeamError):
    """A progress hook returned False, or something else aborted the search's requests."""


@contextmanager
def gguf_errors(what: str) -> Iterator[None]:
    """Raise what is wrong with a GGUF file that the block reads as `TilebeamError`: `what`, a colon, and why."""
    from tilebeam.gguf import GGUFError

    try:
        yield
    except (GGUFError, OSError) as error:
        raise TilebeamError(f"{what}: {error}") from None

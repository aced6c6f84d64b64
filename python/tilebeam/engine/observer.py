"""Hooks into the engine's work, for traces and measurements."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

# A whole step; of it, planning a new batch, with guesses ahead, llama_decode, and drawing tokens with all that follows
# from them, of which drawing on where guesses were right. llama_decode is told of outside steps, too.
Phase = Literal["step", "plan", "draft", "decode", "sample", "verify"]


class Observer(Protocol):
    """Is told of every phase of an engine's work, in the thread that did it; it should return soon."""

    def phase(self, name: Phase, begin_ns: int, end_ns: int) -> None:
        """Record a phase that has ended, perhaps by an exception. Times are those of `time.monotonic_ns`."""
        ...


_UNOBSERVED = nullcontext()


def observed(observer: Observer | None, name: Phase) -> AbstractContextManager[None]:
    """Return a context in which a phase happens; it costs next to nothing without an observer."""
    return _UNOBSERVED if observer is None else _timed(observer, name)


@contextmanager
def _timed(observer: Observer, name: Phase) -> Iterator[None]:
    begin = time.monotonic_ns()
    try:
        yield
    finally:
        observer.phase(name, begin, time.monotonic_ns())

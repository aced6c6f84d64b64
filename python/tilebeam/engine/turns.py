"""How long each may use an engine that several want: samples, and readers, who want it for themselves between two
steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

# Steps that samples make until readers get their turn.
STEPS = 8
# Tokens that a reader decodes until samples go on.
TOKENS = 512


class Turn:
    """What a reader is told of its turn, and tells.

    Args:
        wanted: whether somebody else wants the engine.

    Attributes:
        tokens: that it has decoded; the more they are, the more steps are made before readers get it again.
    """

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self.tokens = 0
        self._new = 0
        self._wanted = wanted

    def room(self, batch: int) -> int:
        """Return how many tokens the next batch may have, at most `batch`; 0: the turn is over."""
        return min(batch, max(0, TOKENS - self._new)) if self._wanted() else batch

    def decoded(self, tokens: int, new: int) -> None:
        """Record a decoded batch.

        Args:
            tokens: in it.
            new: of them, those that were decoded for the first time. If others counted, readers that push each other
                out of the cache might never get on.
        """
        self.tokens += tokens
        self._new += new


# Waits for a turn, which lasts as long as the context.
Turns = Callable[[], AbstractContextManager[Turn]]

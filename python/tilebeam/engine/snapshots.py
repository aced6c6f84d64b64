"""States of texts at earlier tokens, in the host's memory, for models whose layers keep one state of a whole text.

Cells of attention can be shared up to any token; a recurrent state is that of the last token only. A snapshot is a copy
of it (and of a hybrid's sliding window) at one token, held by every sequence that begins with the text up to there; it
goes when the last of them is closed, or when its bytes are wanted for others.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Holder(Protocol):
    """A sequence, with its snapshots by their lengths."""

    snapshots: dict[int, KeptState]

    def __len__(self) -> int: ...

    def __hash__(self) -> int: ...


class KeptState:
    """A snapshot: what llama.cpp wrote of a sequence at one token.

    Attributes:
        length: tokens up to there.
        state: uint8, its bytes.
        passing: the place was not chosen but came up, every so many tokens: it goes before others.
        holders: sequences that can be forked there.
    """

    __slots__ = ("holders", "length", "passing", "state")

    def __init__(self, length: int, state: npt.NDArray[np.uint8], passing: bool) -> None:
        self.length, self.state, self.passing = length, state, passing
        self.holders: set[Holder] = set()


class Snapshots:
    """All snapshots of a cache.

    Args:
        limit: of their bytes.

    Attributes:
        bytes: that they have.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._all: dict[KeptState, None] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._all)

    def add(self, seq: Holder, state: npt.NDArray[np.uint8], *, passing: bool) -> None:
        """Keep the state of a sequence's last token, of at most `limit` bytes; others go for it."""
        while self.bytes + state.nbytes > self.limit:
            self.remove(next((s for s in self._all if s.passing), next(iter(self._all))))
        snapshot = KeptState(len(seq), state, passing)
        self._all[snapshot] = None
        self.bytes += state.nbytes
        self._hold(seq, snapshot)

    def use(self, snapshot: KeptState) -> None:
        """Count one as just used: others go before it."""
        snapshot.passing = False
        self._all[snapshot] = self._all.pop(snapshot)

    def share(self, source: Holder, seq: Holder) -> None:
        """Let a fork hold what its source holds of the tokens that they share."""
        for length, snapshot in source.snapshots.items():
            if length <= len(seq):
                self._hold(seq, snapshot)

    def remove(self, snapshot: KeptState) -> None:
        """Take one from all sequences."""
        for seq in snapshot.holders:
            del seq.snapshots[snapshot.length]
        del self._all[snapshot]
        self.bytes -= snapshot.state.nbytes

    def closed(self, seq: Holder) -> None:
        """Take a sequence's snapshots from it; those that no other holds go."""
        for snapshot in list(seq.snapshots.values()):
            if snapshot.holders == {seq}:
                self.remove(snapshot)
            else:
                snapshot.holders.discard(seq)
        seq.snapshots = {}

    @staticmethod
    def _hold(seq: Holder, snapshot: KeptState) -> None:
        seq.snapshots[snapshot.length] = snapshot
        snapshot.holders.add(seq)

"""The KV cache as the scheduler sees it: sequences that share cells, how many cells are left, and finished sequences
that stay for others to continue.

llama.cpp's unified cache holds one cell per token and layer; a cell belongs to every sequence that shares it. `KvCache`
mirrors that, so that room is known before a batch is built instead of learnt from its failure. `PrefixCache` adds which
finished sequences are cached, and which of them goes first when room is needed.

Recurrent layers and sliding windows do not keep what a cut at an earlier token needs. Sequences of such models get
marks, lengths at which a batch that reads them ends and their state is kept: as a snapshot, or, of windows and where
snapshots have no room, by a cached fork, with which cells of a window have two owners and are not taken by others.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tilebeam.engine.snapshots import KeptState, Snapshots
from tilebeam.errors import TilebeamError
from tilebeam.native.llama import Context

# Tokens between snapshots where nothing tells that a text will be continued.
_PASSING = 512
# Reading so few tokens again costs no more than a batch that ends at one of them.
_APART = 32


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens that have cells, under one llama.cpp sequence id. Made by `KvCache` only."""

    id: int
    tokens: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)  # where a batch that reads it is to end, see `PrefixCache.reached`
    snapshots: dict[int, KeptState] = field(default_factory=dict)  # by their lengths
    held: tuple[int, npt.NDArray[np.uint8]] | None = None  # a length and the state there, see `KvCache.hold`

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Limits:
    """What a context's cache can hold, and which cuts of a sequence it allows.

    Attributes:
        n_cells: its size, tokens.
        n_ids: sequences it can tell apart.
        n_swa: the model's sliding window, 0 if none. Cells that left a sequence's window may be taken by others.
        whole_forks_only: the model's state cannot be cut at a position (recurrent layers).
        snapshot_bytes: of all snapshots together.
    """

    n_cells: int
    n_ids: int
    n_swa: int = 0
    whole_forks_only: bool = False
    snapshot_bytes: int = 0

    @classmethod
    def of(cls, context: Context, n_ids: int, snapshot_bytes: int = 0) -> Limits:
        """Return those of a context with a unified cache, of whose sequences the first `n_ids` are used."""
        model = context.model
        return cls(context.n_ctx, n_ids, model.n_swa, model.whole_forks_only, snapshot_bytes)


class KvCache:
    """Hands out sequence ids and cells, and keeps count.

    Args:
        memory: the context whose cache it is.
        limits: of it.

    Attributes:
        snapshots: of all sequences.
    """

    def __init__(self, memory: Context, limits: Limits) -> None:
        self.limits = limits
        self.snapshots = Snapshots(limits.snapshot_bytes)
        self._memory = memory
        self._owners: npt.NDArray[np.int32] = np.zeros(limits.n_cells, np.int32)
        self._free_cells = list(range(limits.n_cells - 1, -1, -1))
        self._free_ids = list(range(limits.n_ids - 1, -1, -1))
        self._live: dict[int, Sequence] = {}

    @property
    def free(self) -> int:
        """Cells that no sequence uses."""
        return len(self._free_cells)

    @property
    def free_ids(self) -> int:
        """Sequences that can still be opened."""
        return len(self._free_ids)

    @property
    def live(self) -> list[Sequence]:
        """All open sequences."""
        return list(self._live.values())

    def open(self) -> Sequence:
        """Open a new, empty sequence."""
        if not self._free_ids:
            raise TilebeamError(f"All {self.limits.n_ids} sequences are in use.")
        seq = Sequence(self._free_ids.pop())
        self._live[seq.id] = seq
        return seq

    def forkable(self, source: Sequence, length: int) -> int:
        """Return the longest prefix, at most `length` tokens, at which a sequence may be forked now; all of it where it
        is no longer than that."""
        if length >= len(source):
            return len(source)
        if self.limits.whole_forks_only:
            return max((n for n in source.snapshots if n <= length), default=0)
        return length if self._has_window(source, length) else 0

    def _has_window(self, seq: Sequence, length: int) -> bool:
        """Return whether the sliding window before the token at `length` is still there."""
        n_swa = self.limits.n_swa
        return not n_swa or len(seq) <= n_swa or self._memory.first(seq.id) <= max(0, length - n_swa)

    def needs_marks(self, goal: int) -> bool:
        """Return whether a sequence that is read up to `goal` tokens may then not be forked wherever somebody wants."""
        return self.limits.whole_forks_only or 0 < self.limits.n_swa < goal

    def will_fork(self, seq: Sequence, goal: int, length: int) -> int:
        """Return as `forkable` does for a sequence on its way to `goal` tokens."""
        if length >= goal or not self.needs_marks(goal):
            return min(length, goal)
        return max((n for n in seq.marks if n <= length), default=0)

    def fork(self, source: Sequence, length: int) -> Sequence:
        """Open a sequence that shares the first `length` tokens of `source`.

        Raises:
            TilebeamError: it cannot be forked there.
        """
        if self.forkable(source, length) != length:
            raise TilebeamError(f"A sequence of {len(source)} tokens cannot be forked at {length}.")
        seq = self.open()
        if length:
            self._memory.fork(source.id, seq.id, length)
            seq.tokens = source.tokens[:length]
            seq.cells = source.cells[:length]
            self._owners[seq.cells] += 1
            self.snapshots.share(source, seq)
            if length < len(source) and self.limits.whole_forks_only:
                # The state of its own last token in place of its source's.
                snapshot = source.snapshots[length]
                if not self._memory.load_sequence(seq.id, snapshot.state, partial=True):
                    self.snapshots.remove(snapshot)
                    self.close(seq)
                    raise TilebeamError("llama.cpp does not take the snapshot of a sequence.")
                self.snapshots.use(snapshot)
        return seq

    def extend(self, seq: Sequence, tokens: list[int]) -> None:
        """Take cells for tokens that the next batch decodes."""
        if len(tokens) > len(self._free_cells):
            room = f"{self.free} of {self.limits.n_cells} KV cells are free"
            raise TilebeamError(f"No room for {len(tokens)} tokens: {room}.")
        if tokens:
            cells = self._free_cells[-len(tokens) :]
            del self._free_cells[-len(tokens) :]
            self._owners[cells] = 1
            seq.cells += cells
            seq.tokens += tokens

    def retract(self, seq: Sequence, count: int) -> None:
        """Give back the cells of the last `count` tokens, which llama.cpp refused to decode."""
        if count:
            self._release(seq.cells[-count:])
            del seq.cells[-count:]
            del seq.tokens[-count:]

    def uncuttable(self) -> str | None:
        """Say why `truncate` is refused for all sequences of this model; None: it is not."""
        if self.limits.whole_forks_only:
            return "the model has recurrent layers, whose state cannot go back to an earlier token"
        return None

    def truncate(self, seq: Sequence, length: int) -> None:
        """Forget all but the first `length` tokens of a sequence that were decoded.

        A sliding window must be there that ends at the cut.

        Raises:
            TilebeamError: the model's memory cannot be cut, see `uncuttable`, or not there.
        """
        if len(seq) > length:
            reason = self.uncuttable()
            if reason is None and not self._has_window(seq, length):
                reason = f"others have taken cells of its sliding window of {self.limits.n_swa} tokens there"
            if reason is not None:
                raise TilebeamError(f"A sequence cannot be cut: {reason}.")
            self._cut(seq, length)

    def _cut(self, seq: Sequence, length: int) -> None:
        if not self._memory.truncate(seq.id, length):
            raise TilebeamError("A sequence cannot be cut: llama.cpp refused.")
        self.retract(seq, len(seq) - length)

    def hold(self, seq: Sequence) -> bool:
        """Prepare a sequence for a batch with guesses, so that `take_back` can be called behind it: the state of
        recurrent layers is copied. False: llama.cpp cannot copy it."""
        if not self.limits.whole_forks_only:
            return True
        former = None if seq.held is None else seq.held[1]
        try:
            seq.held = len(seq), self._memory.save_sequence(seq.id, partial=True, into=former)
        except (TilebeamError, MemoryError):
            return False
        return True

    def take_back(self, seq: Sequence, length: int) -> bool:
        """Forget guesses of the batch decoded last, for which `hold` was called: all but the first `length` tokens; in
        recurrent models all up to the state that was copied, so that some must be decoded again. False: llama.cpp
        refused, and the sequence is of no use any more.

        Windows are there whatever `truncate` would see: the batch was one graph, whose cells are taken by where windows
        were before it. Those of Llama 4 do not slide, so that the cells before a chunk may all be others'.
        """
        if not self.limits.whole_forks_only:
            self._cut(seq, length)
            return True
        assert seq.held is not None
        length, state = seq.held
        if not self._memory.load_sequence(seq.id, state, partial=True) or not self._memory.truncate(seq.id, length):
            return False
        self.retract(seq, len(seq) - length)
        return True

    def close(self, seq: Sequence) -> None:
        """Forget a sequence; cells that no other sequence shares become free."""
        if self._live.pop(seq.id, None) is None:
            return
        self._memory.drop(seq.id)
        self._release(seq.cells)
        self._free_ids.append(seq.id)
        self.snapshots.closed(seq)
        seq.cells, seq.tokens, seq.marks, seq.held = [], [], [], None

    def clear(self) -> None:
        """Forget everything."""
        for seq in self.live:
            self.close(seq)
        self._memory.clear()

    def _release(self, cells: list[int]) -> None:
        if cells:
            taken = np.asarray(cells)
            self._owners[taken] -= 1
            self._free_cells.extend(taken[self._owners[taken] == 0].tolist())


class PrefixCache(KvCache):
    """A `KvCache` in which finished sequences may stay, for later ones that begin alike.

    Attributes:
        caching: whether finished sequences stay; see `set_caching`.
    """

    def __init__(self, memory: Context, limits: Limits) -> None:
        super().__init__(memory, limits)
        self.caching = False
        self._cached: dict[int, Sequence] = {}  # by id; the least recently used first

    def set_caching(self, on: bool) -> None:
        """Cache sequences that finish from now on; off: evict all that are cached, too."""
        self.caching = on
        while not on and self.evict():
            pass

    def retire(self, seq: Sequence) -> None:
        """Cache a finished sequence, or close it."""
        if self.caching:
            seq.marks, seq.held = [], None
            self._cached[seq.id] = seq
        else:
            self.close(seq)

    def evict(self, spare: Sequence | None = None) -> bool:
        """Close the least recently used of the cached sequences other than `spare`. False: nothing to evict."""
        for seq in self._cached.values():
            if seq is not spare:
                self.close(seq)
                return True
        return False

    def longest_prefix(self, target: list[int], limit: int) -> tuple[Sequence | None, int]:
        """Find the sequence, cached or in use, that shares most of `target`, and how many tokens: at most `limit`."""
        best, most = None, 0
        limit = min(limit, len(target))
        for seq in self._live.values():
            # There may be thousands, and one that shares more has this token.
            if most < limit and len(seq.tokens) > most and seq.tokens[most] == target[most]:
                shared = self.forkable(seq, min(limit, common_prefix(seq.tokens, target)))
                if most < shared <= limit:
                    best, most = seq, shared
        return best, most

    def open_from(self, source: Sequence | None, length: int) -> Sequence:
        """Open a sequence that shares the first `length` tokens of `source`, which counts as just used; an empty one
        without them, or if llama.cpp does not take the state that it had there."""
        if source is None or not length:
            return self.open()
        self.touch(source)
        try:
            return self.fork(source, length)
        except TilebeamError:
            if not self.limits.whole_forks_only or not self.free_ids:
                raise
            return self.open()

    def mark(self, seq: Sequence, goal: int, wanted: Iterable[int]) -> None:
        """Choose the lengths at which the state of a sequence, on its way to `goal` tokens, is kept.

        Args:
            wanted: where others may want to fork it, the most likely first; those right behind one before them are
                left out.
        """
        seq.marks = []
        if not self.needs_marks(goal):
            return
        step = _PASSING if self.caching and self.limits.whole_forks_only else goal
        for n in wanted:
            if len(seq) < n <= goal and not any(0 <= n - other < _APART for other in seq.marks):
                seq.marks.append(n)
        passing = range(len(seq) // step * step + step, goal, step)
        seq.marks = sorted(seq.marks + [n for n in passing if all(abs(n - m) >= _APART for m in seq.marks)])

    def reached(self, seq: Sequence) -> None:
        """Keep the state of a sequence, whose tokens are all decoded, if it has come to a mark."""
        if not seq.marks or len(seq) < seq.marks[0]:
            return
        del seq.marks[0]
        passing = len(seq) % _PASSING == 0
        if self.limits.whole_forks_only and len(seq) not in seq.snapshots:
            size = self._memory.sequence_bytes(seq.id, partial=True)
            if 0 < size <= self.snapshots.limit:
                with suppress(TilebeamError, MemoryError):
                    state = self._memory.save_sequence(seq.id, partial=True)
                    self.snapshots.add(seq, state, passing=passing)
        if len(seq) not in seq.snapshots and not passing and self.caching and (self.free_ids or self.evict()):
            self.retire(self.fork(seq, len(seq)))

    def touch(self, seq: Sequence) -> None:
        """Count a sequence as just used: other cached ones are evicted before it."""
        if seq.id in self._cached:
            self._cached[seq.id] = self._cached.pop(seq.id)

    def take(self, seq: Sequence) -> None:
        """Use a cached sequence again, to go on with it."""
        del self._cached[seq.id]

    def close(self, seq: Sequence) -> None:
        """Forget a sequence, cached or in use; cells that no other sequence shares become free."""
        self._cached.pop(seq.id, None)
        super().close(seq)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Count the leading tokens that two lists share."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low

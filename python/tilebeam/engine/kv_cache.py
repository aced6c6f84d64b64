"""The KV cache as the scheduler sees it: sequences that share cells, how many cells are left, and finished sequences
that stay for others to continue.

llama.cpp's unified cache holds one cell per token and layer; a cell belongs to every sequence that shares it. `KvCache`
mirrors that, so that room is known before a batch is built instead of learnt from its failure. `PrefixCache` adds which
finished sequences are cached, and which of them goes first when room is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError
from tilebeam.native.llama import Context


class Memory(Protocol):
    """What the ledger asks of a context."""

    def fork(self, source: int, target: int, length: int) -> None:
        """Let sequence `target` share the first `length` cells of `source`."""

    def drop(self, seq: int) -> None:
        """Remove a sequence from its cells."""

    def truncate(self, seq: int, length: int) -> bool:
        """Remove a sequence from its cells behind the first `length`. False: that cannot be done, nothing changed."""
        ...

    def clear(self) -> None:
        """Remove all sequences."""


class Sequence:
    """Tokens that have cells, under one llama.cpp sequence id, made with one set of adapters. Made by `KvCache`
    only."""

    __slots__ = ("adapters", "cells", "id", "tokens")

    def __init__(self, id: int, adapters: tuple[float, ...]) -> None:
        self.id = id
        self.adapters = adapters
        self.tokens: list[int] = []
        self.cells: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Limits:
    """What a context's cache can hold, and which cuts of a sequence it allows.

    Attributes:
        n_cells: its size, tokens.
        n_ids: sequences it can tell apart.
        n_swa: the model's sliding window, 0 if none. Cells that left a sequence's window may be taken by others, so
            a sequence longer than the window can only be forked at its end.
        whole_forks_only: the model's state cannot be cut at a position (recurrent layers).
        one_graph: every batch is decoded as one graph, not in parts.
    """

    n_cells: int
    n_ids: int
    n_swa: int = 0
    whole_forks_only: bool = False
    one_graph: bool = False

    @classmethod
    def of(cls, context: Context, n_ids: int) -> Limits:
        """Return those of a context with a unified cache, of whose sequences the first `n_ids` are used."""
        model = context.model
        one_graph = context.n_ubatch >= context.n_batch
        return cls(context.n_ctx, n_ids, model.n_swa, model.whole_forks_only, one_graph)


class KvCache:
    """Hands out sequence ids and cells, and keeps count.

    Args:
        memory: the context's cache.
        limits: of it.

    Attributes:
        adapters: the scales of adapters that the model computes with now: cells made with others do not fit.
    """

    def __init__(self, memory: Memory, limits: Limits) -> None:
        self.limits = limits
        self.adapters: tuple[float, ...] = ()
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
        seq = Sequence(self._free_ids.pop(), self.adapters)
        self._live[seq.id] = seq
        return seq

    def forkable(self, source_len: int, length: int) -> int:
        """Return the longest prefix, at most `length`, at which a sequence of `source_len` tokens may be forked."""
        if length >= source_len:
            return source_len
        if self.limits.whole_forks_only or (self.limits.n_swa and source_len > self.limits.n_swa):
            return 0
        return length

    def fork(self, source: Sequence, length: int) -> Sequence:
        """Open a sequence that shares the first `length` tokens of `source`."""
        if self.forkable(len(source), length) != length:
            raise TilebeamError(f"A sequence of {len(source)} tokens cannot be forked at {length}.")
        seq = self.open()
        if length:
            self._memory.fork(source.id, seq.id, length)
            seq.tokens = source.tokens[:length]
            seq.cells = source.cells[:length]
            self._owners[seq.cells] += 1
        return seq

    def extend(self, seq: Sequence, tokens: list[int]) -> None:
        """Take cells for tokens that the next batch decodes."""
        if len(tokens) > len(self._free_cells):
            raise self._no_room(len(tokens))
        if tokens:
            cells = self._free_cells[-len(tokens) :]
            del self._free_cells[-len(tokens) :]
            self._owners[cells] = 1
            seq.cells += cells
            seq.tokens += tokens

    def extend_each(self, sequences: list[Sequence], tokens: list[list[int]]) -> None:
        """Extend every sequence, all by the same number of tokens."""
        each = len(tokens[0])
        count = each * len(sequences)
        if count > len(self._free_cells):
            raise self._no_room(count)
        cells = self._free_cells[-count:]
        del self._free_cells[-count:]
        self._owners[cells] = 1
        for i, (seq, own) in enumerate(zip(sequences, tokens, strict=True)):
            seq.cells += cells[i * each : (i + 1) * each]
            seq.tokens += own

    def retract(self, seq: Sequence, count: int) -> None:
        """Give back the cells of the last `count` tokens, which llama.cpp refused to decode."""
        if count:
            self._release(seq.cells[-count:])
            del seq.cells[-count:]
            del seq.tokens[-count:]

    def uncuttable(self, *, last_batch: bool = False) -> str | None:
        """Say why `truncate` is refused; None: it is not.

        Args:
            last_batch: only tokens of the batch decoded last are to be forgotten. Cells that left a sliding window
                are given to others when a batch takes its cells, by where the window was before it: those that the
                window reaches after the cut are still there, if the batch was decoded as one graph.
        """
        if self.limits.whole_forks_only:
            return "the model has recurrent layers, whose state cannot go back to an earlier token"
        if self.limits.n_swa and self.limits.n_cells > self.limits.n_swa and not (last_batch and self.limits.one_graph):
            return f"the model attends over a sliding window of {self.limits.n_swa} tokens, which cannot go back"
        return None

    def truncate(self, seq: Sequence, length: int, *, last_batch: bool = False) -> None:
        """Forget all but the first `length` tokens of a sequence that were decoded.

        Args:
            last_batch: what is forgotten was decoded in the last batch.

        Raises:
            TilebeamError: the model's memory cannot be cut, see `uncuttable`.
        """
        count = len(seq) - length
        if count > 0:
            reason = self.uncuttable(last_batch=last_batch)
            if reason or not self._memory.truncate(seq.id, length):
                raise TilebeamError(f"A sequence cannot be cut: {reason or 'llama.cpp refused'}.")
            self.retract(seq, count)

    def close(self, seq: Sequence) -> None:
        """Forget a sequence; cells that no other sequence shares become free."""
        if self._live.pop(seq.id, None) is None:
            return
        self._memory.drop(seq.id)
        self._release(seq.cells)
        self._free_ids.append(seq.id)
        seq.cells, seq.tokens = [], []

    def clear(self) -> None:
        """Forget everything."""
        for seq in self.live:
            self.close(seq)
        self._memory.clear()

    def check(self) -> None:
        """Raise `TilebeamError` if the counts do not add up: a cell or an id is lost, or counted wrong."""
        owners = np.zeros_like(self._owners)
        for seq in self.live:
            if not len(set(seq.cells)) == len(seq.cells) == len(seq.tokens):
                raise TilebeamError(f"Sequence {seq.id} has {len(seq.tokens)} tokens in {len(set(seq.cells))} cells.")
            owners[seq.cells] += 1
        for cell in np.flatnonzero(owners != self._owners).tolist():
            raise TilebeamError(f"Cell {cell} has {owners[cell]} owners, and {self._owners[cell]} are counted.")
        if sorted(self._free_cells) != np.flatnonzero(owners == 0).tolist():
            raise TilebeamError(f"{len(self._free_cells)} cells are free, {(owners == 0).sum()} without an owner.")
        if sorted([*self._live, *self._free_ids]) != list(range(self.limits.n_ids)):
            raise TilebeamError(f"Of {self.limits.n_ids} ids {len(self._live)} are used, {len(self._free_ids)} free.")

    def _no_room(self, count: int) -> TilebeamError:
        return TilebeamError(f"No room for {count} tokens: {self.free} of {self.limits.n_cells} KV cells are free.")

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

    def __init__(self, memory: Memory, limits: Limits) -> None:
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
            self._cached[seq.id] = seq
        else:
            self.close(seq)

    def check(self) -> None:
        """Raise `TilebeamError` if the counts do not add up, or a cached sequence has no cells."""
        super().check()
        for seq in self._cached.values():
            if self._live.get(seq.id) is not seq:
                raise TilebeamError(f"Sequence {seq.id} is cached, but closed.")

    def is_cached(self, seq: Sequence) -> bool:
        """Return whether a sequence stays for later ones, and nobody goes on with it."""
        return seq.id in self._cached

    @property
    def cached(self) -> list[Sequence]:
        """The sequences that stay and fit the adapters in force; the least recently used first."""
        return [seq for seq in self._cached.values() if seq.adapters == self.adapters]

    def evict(self, spare: Sequence | None = None) -> bool:
        """Close the least recently used of the cached sequences other than `spare`. False: nothing to evict."""
        for seq in self._cached.values():
            if seq is not spare:
                self.close(seq)
                return True
        return False

    def longest_prefix(self, target: list[int], limit: int) -> tuple[Sequence | None, int]:
        """Find the sequence, cached or in use, that shares most of `target`, and how many tokens: at most `limit`.
        Those that were made with other adapters do not count."""
        best: tuple[Sequence | None, int] = (None, 0)
        for seq in self._live.values():
            if seq.adapters != self.adapters:
                continue
            shared = self.forkable(len(seq), min(limit, common_prefix(seq.tokens, target)))
            if best[1] < shared <= limit:
                best = (seq, shared)
        return best

    def open_from(self, source: Sequence | None, length: int) -> Sequence:
        """Open a sequence that shares the first `length` tokens of `source`, which counts as just used; an empty one
        without them."""
        if source is None or not length:
            return self.open()
        self.touch(source)
        return self.fork(source, length)

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

"""The KV ledger against a model of llama.cpp's cells made of sets, and the prefix cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from engine_kit import check_cells
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam import TilebeamError
from tilebeam.engine.kv_cache import KvCache, Limits, PrefixCache, Sequence, common_prefix


class Cells:
    """What llama.cpp keeps: for each cell its position and the sequences that own it. States have 10 bytes.

    ``gone``: where windows begin; ``loaded``: sequences whose states were set; ``takes``: whether that works.
    """

    def __init__(self) -> None:
        self.cells: list[tuple[int, set[int]]] = []
        self.gone, self.takes = 0, True
        self.loaded: list[int] = []

    def first(self, seq: int) -> int:  # noqa: ARG002
        return self.gone

    def sequence_bytes(self, seq: int, *, partial: bool = False) -> int:  # noqa: ARG002
        return 10 * partial

    def save_sequence(
        self,
        seq: int,
        *,
        partial: bool = False,
        into: npt.NDArray[np.uint8] | None = None,  # noqa: ARG002
    ) -> npt.NDArray[np.uint8]:
        return np.full(self.sequence_bytes(seq, partial=partial), seq, np.uint8)

    def load_sequence(self, seq: int, cells: npt.NDArray[np.uint8], *, partial: bool = False) -> bool:
        assert len(cells) == self.sequence_bytes(seq, partial=partial)
        self.loaded.append(seq)
        return self.takes

    def write(self, seq: int, pos: int) -> None:
        self.cells.append((pos, {seq}))

    def fork(self, source: int, target: int, length: int) -> None:
        for pos, owners in self.cells:
            if source in owners and pos < length:
                owners.add(target)

    def drop(self, seq: int) -> None:
        for _, owners in self.cells:
            owners.discard(seq)
        self.cells = [c for c in self.cells if c[1]]

    def truncate(self, seq: int, length: int) -> bool:
        for pos, owners in self.cells:
            if pos >= length:
                owners.discard(seq)
        self.cells = [c for c in self.cells if c[1]]
        return True

    def clear(self) -> None:
        self.cells = []


STEP = st.tuples(
    st.sampled_from(["open", "fork", "extend", "retract", "truncate", "close"]), st.integers(0, 99), st.integers(0, 9)
)


@settings(deadline=None)
@given(st.lists(STEP, max_size=60))
def test_ledger_counts_cells_as_llama_cpp_would(steps: list[tuple[str, int, int]]) -> None:
    cells = Cells()
    kv = KvCache(cells, Limits(40, 5))
    live: list[Sequence] = []
    for what, which, amount in steps:
        seq = live[which % len(live)] if live else None
        if what == "open":
            if kv.free_ids:
                live.append(kv.open())
            else:
                with pytest.raises(TilebeamError, match="All 5 sequences"):
                    kv.open()
        elif seq is None:
            continue
        elif what == "fork" and kv.free_ids:
            live.append(kv.fork(seq, min(amount, len(seq))))
        elif what == "extend" and amount <= kv.free:
            for pos in range(len(seq), len(seq) + amount):
                cells.write(seq.id, pos)
            kv.extend(seq, [which] * amount)
        elif what == "extend":
            with pytest.raises(TilebeamError, match="No room"):
                kv.extend(seq, [0] * amount)
        elif what == "retract":
            # only tokens of its own can be taken back: those of the batch that was refused
            own = [c for c in cells.cells if c[1] == {seq.id} and c[0] >= len(seq) - amount]
            if len(own) == min(amount, len(seq)) == amount:
                kv.retract(seq, amount)
                cells.cells = [c for c in cells.cells if c not in own]
        elif what == "truncate":
            kv.truncate(seq, max(0, len(seq) - amount))
        elif what == "close":
            live.remove(seq)
            kv.close(seq)
        assert kv.free == 40 - len(cells.cells)
        assert {s.id for s in kv.live} == {s.id for s in live}
        check_cells(kv)
        for s in live:
            assert len(s) == sum(s.id in owners for _, owners in cells.cells)
    kv.clear()
    assert (kv.free, kv.free_ids, cells.cells) == (40, 5, [])


def test_windows_limit_where_a_sequence_forks() -> None:
    cells = Cells()
    kv = PrefixCache(cells, Limits(64, 4, n_swa=8))
    kv.set_caching(True)
    seq = kv.open()
    kv.extend(seq, list(range(20)))
    assert [kv.forkable(seq, n) for n in (3, 13, 20, 30)] == [3, 13, 20, 20]
    cells.gone = 5  # others took what lies behind a window that reaches back to 5
    assert [kv.forkable(seq, n) for n in (3, 12, 13, 20)] == [0, 0, 13, 20]
    with pytest.raises(TilebeamError, match="cannot be forked at 3"):
        kv.fork(seq, 3)
    cells.gone = 20
    kv.mark(seq, 40, [30])
    assert (kv.will_fork(seq, 40, 35), kv.will_fork(seq, 8, 5)) == (30, 5)
    kv.extend(seq, list(range(10)))
    kv.reached(seq)  # a fork holds the cells there
    [held] = kv._cached.values()
    assert (held.tokens, held.snapshots, seq.marks) == (seq.tokens, {}, [])


def states(limit: int, length: int = 0) -> tuple[Cells, PrefixCache, Sequence]:
    """A cache of a model with states, of which snapshots may have `limit` bytes, and a sequence in it."""
    cells = Cells()
    kv = PrefixCache(cells, Limits(4096, 4, whole_forks_only=True, snapshot_bytes=limit))
    kv.set_caching(True)
    seq = kv.open()
    kv.extend(seq, [1] * length)
    return cells, kv, seq


def read(kv: PrefixCache, seq: Sequence, goal: int) -> None:
    """Read a sequence as batches of 512 tokens do, which end at marks."""
    while len(seq) < goal:
        count = min([512, goal - len(seq), *(n - len(seq) for n in seq.marks[:1])])
        kv.extend(seq, [1] * count)
        kv.reached(seq)
        check_cells(kv)


def test_marks_lie_apart_in_the_order_of_their_worth() -> None:
    _, kv, seq = states(100, 40)
    kv.mark(seq, 1600, [1500, 1490, 1531, 1532, 40, 20, 1600, 1601, 100])
    assert seq.marks == [100, 512, 1024, 1490, 1500, 1532, 1600]
    assert kv.will_fork(seq, 1600, 1531) == 1500
    kv.set_caching(False)
    kv.mark(seq, 1600, [100])
    assert seq.marks == [100]


def test_snapshots_go_with_their_last_sequence_and_within_their_bytes() -> None:
    cells, kv, seq = states(40)
    kv.mark(seq, 1600, [1590, 700])
    read(kv, seq, 1600)
    assert list(seq.snapshots) == [700, 1024, 1536, 1590]  # 512 came up, and went for the last
    assert [kv.forkable(seq, n) for n in (1600, 1599, 1589, 699)] == [1600, 1590, 1536, 0]
    fork = kv.fork(seq, 1024)
    assert (cells.loaded, list(fork.snapshots), len(kv.snapshots)) == ([fork.id], [700, 1024], 4)
    kv.mark(fork, 1100, [1090])
    read(kv, fork, 1100)
    assert list(seq.snapshots) == [700, 1024, 1590]  # 1024 was used, 1536 only came up
    kv.close(seq)
    check_cells(kv)
    assert sorted(fork.snapshots) == [700, 1024, 1090]
    kv.close(fork)
    check_cells(kv)
    assert (len(kv.snapshots), kv.snapshots.bytes) == (0, 0)


def test_a_snapshot_without_room_or_that_is_refused_costs_time_only() -> None:
    cells, kv, seq = states(9)
    kv.mark(seq, 600, [590])
    read(kv, seq, 600)
    assert not len(kv.snapshots)
    assert kv.longest_prefix([1] * 595, 595)[1] == 590  # a fork of its own
    cells, kv, seq = states(10)
    kv.mark(seq, 600, [590])
    read(kv, seq, 600)
    assert kv.longest_prefix([1] * 595, 595) == (seq, 590)
    cells.takes = False
    assert len(kv.open_from(seq, 590)) == 0
    check_cells(kv)
    assert kv.longest_prefix([1] * 595, 595) == (None, 0)
    assert [len(s) for s in kv.live] == [600, 0]


def test_what_states_and_windows_need_to_be_cut() -> None:
    cells = Cells()
    kv = KvCache(cells, Limits(64, 4, n_swa=8))
    seq = kv.open()
    kv.extend(seq, [1] * 20)
    cells.gone = 5  # others took what lies behind a window that reaches back to 5
    assert kv.uncuttable() is None
    with pytest.raises(TilebeamError, match="others have taken cells of its sliding window of 8 tokens"):
        kv.truncate(seq, 12)
    kv.truncate(seq, 13)
    assert (len(seq), kv.free) == (13, 51)
    cells.gone = 12  # as chunks leave it, not sliding windows
    kv.extend(seq, [2, 3])
    assert kv.take_back(seq, 14)
    assert len(seq) == 14
    kv = KvCache(cells, Limits(64, 4, whole_forks_only=True))
    seq = kv.open()
    kv.extend(seq, [1, 2, 3])
    kv.truncate(seq, 3)  # nothing to cut
    with pytest.raises(TilebeamError, match="recurrent layers"):
        kv.truncate(seq, 2)
    assert len(seq) == 3
    assert kv.hold(seq)
    kv.extend(seq, [4, 5, 6])
    assert kv.take_back(seq, 5)  # back to the state that was copied
    assert (len(seq), cells.loaded) == (3, [seq.id])
    fork = kv.fork(seq, 3)
    assert (len(fork), cells.loaded) == (3, [seq.id])
    check_cells(kv)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


_TEXTS = st.lists(st.integers(0, 1), max_size=6)


@given(st.lists(_TEXTS, max_size=6), _TEXTS, st.integers(0, 8))
def test_the_first_of_those_that_share_most_is_found(texts: list[list[int]], target: list[int], limit: int) -> None:
    kv = PrefixCache(Cells(), Limits(40, 6))
    made = [kv.open() for _ in texts]
    for seq, text in zip(made, texts, strict=True):
        kv.extend(seq, text)
    shared = [min(limit, common_prefix(text, target)) for text in texts]
    most = max(shared, default=0)
    assert kv.longest_prefix(target, limit) == ((made[shared.index(most)], most) if most else (None, 0))


def test_cached_sequences_go_least_recently_used_first() -> None:
    kv = PrefixCache(Cells(), Limits(40, 6))
    kv.set_caching(True)
    made = []
    for i in range(4):
        seq = kv.open()
        kv.extend(seq, [i, 7, 7, 7])
        made.append(seq)
    for seq in made[:3]:
        kv.retire(seq)
    assert kv.free == 40 - 16
    assert kv.longest_prefix([1, 7, 7, 9], 4) == (made[1], 3)
    assert kv.longest_prefix([1, 7, 7, 9], 2) == (made[1], 2)
    assert kv.longest_prefix([3, 7], 2) == (made[3], 2)  # one in use counts too
    assert kv.longest_prefix([9], 1) == (None, 0)
    fork = kv.open_from(made[0], 2)  # counts as a use
    assert kv.evict(spare=made[1])
    assert made[2] not in kv.live
    kv.touch(made[1])
    assert kv.evict()
    assert made[0] not in kv.live
    assert fork.tokens == [0, 7]
    assert kv.free == 40 - 4 - 4 - 2
    kv.set_caching(False)
    assert {s.id for s in kv.live} == {made[3].id, fork.id}
    assert not kv.evict()
    kv.retire(fork)
    kv.close(made[3])
    assert (kv.free, kv.live) == (40, [])
    assert kv.open_from(None, 0).tokens == []

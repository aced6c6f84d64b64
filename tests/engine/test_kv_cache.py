"""The KV ledger against a model of llama.cpp's cells made of sets, and text streams against whole-text decoding."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam import TilebeamError
from tilebeam.engine.detokenizer import Detokenizer
from tilebeam.engine.kv_cache import KvCache, Sequence, common_prefix


class Cells:
    """What llama.cpp keeps: for each cell its position and the sequences that own it."""

    def __init__(self) -> None:
        self.cells: list[tuple[int, set[int]]] = []

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

    def clear(self) -> None:
        self.cells = []


STEP = st.tuples(st.sampled_from(["open", "fork", "extend", "retract", "close"]), st.integers(0, 99), st.integers(0, 9))


@settings(deadline=None)
@given(st.lists(STEP, max_size=60))
def test_ledger_counts_cells_as_llama_cpp_would(steps: list[tuple[str, int, int]]) -> None:
    cells = Cells()
    kv = KvCache(cells, 40, 5)
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
        elif what == "close":
            live.remove(seq)
            kv.close(seq)
        assert kv.free == 40 - len(cells.cells)
        assert {s.id for s in kv.live} == {s.id for s in live}
        for s in live:
            assert len(s) == len(s.tokens) == len(s.cells) == sum(s.id in owners for _, owners in cells.cells)
    kv.clear()
    assert (kv.free, kv.free_ids, cells.cells) == (40, 5, [])


def test_windows_and_states_limit_where_a_sequence_forks() -> None:
    windowed = KvCache(Cells(), 64, 4, n_swa=8)
    assert windowed.forkable(8, 3) == 3
    assert windowed.forkable(9, 3) == 0
    assert windowed.forkable(9, 9) == 9
    assert KvCache(Cells(), 64, 4, whole_forks_only=True).forkable(9, 8) == 0
    seq = windowed.open()
    windowed.extend(seq, list(range(9)))
    with pytest.raises(TilebeamError, match="cannot be forked at 3"):
        windowed.fork(seq, 3)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@given(st.text(), st.lists(st.integers(0, 400)))
def test_text_comes_out_whole_however_the_bytes_are_cut(text: str, cuts: list[int]) -> None:
    raw = text.encode("utf-8", "replace")
    text = raw.decode()
    stream = Detokenizer()
    edges = [0, *sorted(c for c in cuts if c < len(raw)), len(raw)]
    for a, b in pairwise(edges):
        assert not stream.feed(raw[a:b])
        assert text.startswith(stream.text)
    assert stream.text == text


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3))
def test_first_stop_string_to_appear_cuts_the_text(text: str, stop: list[str]) -> None:
    stream = Detokenizer(stop)
    for byte in text.encode():
        if stream.feed(bytes([byte])):
            break
    ends = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
    if not ends:
        assert (stream.stopped, stream.text) == (False, text)
    else:
        end = min(ends)[0]
        assert stream.stopped
        assert stream.text == text[: min(at for e, at in ends if e == end)]


def test_bytes_that_are_no_text_show_and_half_a_character_does_not() -> None:
    stream = Detokenizer()
    stream.feed(b"a\xff")
    stream.feed("é".encode()[:1])
    assert stream.text == "a\ufffd"
    stream.feed(b"b")
    assert stream.text == "a\ufffd\ufffdb"

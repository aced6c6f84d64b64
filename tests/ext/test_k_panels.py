"""Tile layout, version 2: block panels of 256 k against the formulas, and against gguf's reading of super-blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from k_quants import HALVES, K_BLOCKS, K_PANELS, random_super_blocks, set_half, values
from tilebeam._ext import (
    Type,
    column_type,
    dequantize,
    has_file_form,
    pack,
    row_bytes,
    source_type,
    tile_bytes,
    tiled_bytes,
    unpack,
)

types = st.sampled_from(K_BLOCKS)
PANEL = {
    Type.Q2_K_COL: 2688,
    Type.Q3_K_COL: 3520,
    Type.Q4_K_COL: 4608,
    Type.Q5_K_COL: 5632,
    Type.Q6_K_COL: 6720,
    Type.IQ4_XS_COL: 4352,
    Type.TQ2_0_COL: 2112,
    Type.TQ1_0_COL: 1728,
    Type.IQ2_XXS_COL: 3264,
    Type.IQ2_XS_COL: 3392,
    Type.IQ2_S_COL: 3392,
    Type.IQ3_XXS_COL: 4288,
    Type.IQ3_S_COL: 4288,
    Type.IQ1_S_COL: 2240,
    Type.IQ1_M_COL: 3392,
}
GRIDS = [t for t in K_PANELS if source_type(t).label.startswith(("iq1", "iq2", "iq3"))]


@settings(max_examples=60, deadline=None)
@given(type=types, blocks=st.integers(1, 3), n=st.integers(1, 70), seed=st.integers(0, 2**32 - 1))
def test_pack_then_unpack_returns_the_same_bytes(type: Type, blocks: int, n: int, seed: int) -> None:
    """Of any bytes at all: scales that are no numbers, too."""
    tiled = column_type(type)
    assert tiled is not None
    rows = np.random.default_rng(seed).integers(0, 256, (n, row_bytes(type, 256 * blocks))).astype(np.uint8)
    tiles = pack(tiled, rows.reshape(-1), 256 * blocks, n)
    assert tiles.nbytes == tiled_bytes(tiled, 256 * blocks, n) == (n + 31) // 32 * blocks * PANEL[tiled]
    np.testing.assert_array_equal(unpack(tiled, tiles, 256 * blocks, n), rows.reshape(-1))


@settings(max_examples=40, deadline=None)
@given(type=types, blocks=st.integers(1, 3), n=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_values_are_those_of_gguf(type: Type, blocks: int, n: int, seed: int) -> None:
    k = 256 * blocks
    rows = random_super_blocks(type, k, n, np.random.default_rng(seed))
    expected = values(type, rows)
    tiled = column_type(type)
    assert tiled is not None
    np.testing.assert_array_equal(dequantize(type, rows.reshape(-1), k, n).reshape(n, k), expected)
    np.testing.assert_array_equal(dequantize(tiled, pack(tiled, rows.reshape(-1), k, n), k, n).reshape(n, k), expected)


class Reader:
    """One block panel by the formulas of k_panels.h: its fields one after the other, (32, 256) each."""

    def __init__(self, panel: np.ndarray) -> None:
        self.panel = panel
        self.k, self.n = np.meshgrid(np.arange(256), np.arange(32), indexing="xy")
        self.t, self.j = self.k // 32, self.k % 32 // 4
        self.place = 4 * self.n + 2 * (self.k & 1) + (self.k >> 1 & 1)

    def take(self, nbytes: int) -> np.ndarray:
        taken, self.panel = self.panel[:nbytes], self.panel[nbytes:]
        return taken

    def nibbles(self) -> np.ndarray:
        byte = self.take(4096)[512 * self.t + 128 * (self.j // 2) + self.place]
        return np.where(self.j % 2, byte >> 4, byte & 15).astype(np.int64)

    def pairs(self) -> np.ndarray:
        byte = self.take(2048)[256 * self.t + 128 * (self.j // 4) + self.place].astype(np.int64)
        return byte >> 2 * (self.j % 4) & 3

    def ones(self) -> np.ndarray:
        return self.take(1024)[128 * self.t + self.place].astype(np.int64) >> self.j & 1

    def digits(self) -> np.ndarray:
        first, sixteens = self.k < 160, self.k < 240
        row = np.where(first, self.j, np.where(sixteens, 8 + self.j % 4, 12))
        i = np.where(first, self.t, np.where(sixteens, (self.k - 160) // 16, (self.k - 240) // 4))
        byte = self.take(13 * 128)[128 * row + self.place].astype(np.int64)
        return byte * 3**i % 256 * 3 >> 8

    def bytes(self, rows: int) -> np.ndarray:
        """(rows, 32, 1): each of all k."""
        return self.take(32 * rows).reshape(rows, 32, 1).astype(np.int64)

    def six(self, h: int) -> np.ndarray:
        """(2h, 32, 1)."""
        low, top = self.bytes(h), self.bytes(h // 2)
        lows = [low[: h // 2] & 15, low[h // 2 :] & 15, low[: h // 2] >> 4, low[h // 2 :] >> 4]
        return np.concatenate([lows[i] | (top >> 2 * i & 3) << 4 for i in range(4)])

    def four(self, n: int) -> np.ndarray:
        """(n, 32, 1)."""
        both = self.bytes(n // 2)
        return np.concatenate([both & 15, both >> 4])

    def half(self) -> np.ndarray:
        return self.take(64).view(np.float16).astype(np.float32)[:, None]


def spread(of: np.ndarray) -> np.ndarray:
    """Numbers (count, 32, 1) of a block, each for its share of k, as float32 (32, 256)."""
    return np.repeat(of[:, :, 0].T, 256 // len(of), axis=1).astype(np.float32)


def read_grid_panel(tiled: Type, r: Reader) -> np.ndarray:
    """The same of a type whose blocks have points of a grid."""
    if tiled in (Type.IQ3_XXS_COL, Type.IQ3_S_COL):
        q, s = r.nibbles(), r.four(8)
        steps = np.array([4, 12, 20, 28, 36, 44, 52, 62]) / 4 if tiled == Type.IQ3_XXS_COL else np.arange(1, 16, 2)
        return spread(2 * s + 1) * (steps[q & 7] * np.where(q & 8, -1, 1)).astype(np.float32) * r.half()
    q = r.pairs()
    sign = 0 if tiled == Type.IQ1_S_COL else r.ones()
    s = r.four(8 if tiled in (Type.IQ1_S_COL, Type.IQ2_XXS_COL) else 16)
    if tiled == Type.IQ1_S_COL:
        sign, s = spread(s >> 3), s & 7
    lower = np.where(sign, -1, 1)
    of_d = q - 1 + lower / 8 if tiled in (Type.IQ1_S_COL, Type.IQ1_M_COL) else np.array([8, 25, 43])[q] / 8 * lower
    return spread(2 * s + 1) * of_d.astype(np.float32) * r.half()


def read_panel(tiled: Type, panel: np.ndarray) -> np.ndarray:
    """Values of one block panel, (32, 256)."""
    r = Reader(panel)
    if tiled in GRIDS:
        return read_grid_panel(tiled, r)
    if tiled == Type.Q2_K_COL:
        q, both = r.pairs(), r.bytes(16)
        return r.half() * spread(both & 15) * q.astype(np.float32) - r.half() * spread(both >> 4)
    if tiled == Type.Q3_K_COL:
        q = r.pairs() | r.ones() << 2
        scale = spread(r.six(8) - 32)
        return r.half() * scale * (q - 4).astype(np.float32)
    if tiled in (Type.TQ1_0_COL, Type.TQ2_0_COL):
        q = r.pairs() if tiled == Type.TQ2_0_COL else r.digits()
        return r.half() * (q - 1).astype(np.float32)
    q = r.nibbles()
    if tiled == Type.IQ4_XS_COL:
        scale = spread(r.six(4) - 32)
        return r.half() * scale * np.array(gguf.quants.IQ4_NL.kvalues, np.float32)[q]
    if tiled == Type.Q6_K_COL:
        q |= r.pairs() << 4
        scale = spread(r.bytes(16).astype(np.int8))
        return r.half() * scale * (q - 32).astype(np.float32)
    if tiled == Type.Q5_K_COL:
        q |= r.ones() << 4
    six = r.six(8)
    return r.half() * spread(six[:8]) * q.astype(np.float32) - r.half() * spread(six[8:])


@pytest.mark.parametrize("tiled", K_PANELS, ids=lambda t: t.label)
def test_every_field_is_where_the_formulas_say(tiled: Type) -> None:
    type = source_type(tiled)
    rows = random_super_blocks(type, 256, 32, np.random.default_rng(1))
    panel = pack(tiled, rows.reshape(-1), 256, 32)
    np.testing.assert_array_equal(read_panel(tiled, panel), values(type, rows))


@pytest.mark.parametrize("tiled", K_PANELS, ids=lambda t: t.label)
def test_sizes(tiled: Type) -> None:
    """ggml's own bytes, as a GGUF needs them, but for grids; whole blocks of 256 k only; a panel's missing columns are
    zeros."""
    type = source_type(tiled)
    assert tile_bytes(tiled) * 8 == PANEL[tiled]
    assert (PANEL[tiled] == 32 * row_bytes(type, 256)) == has_file_form(tiled) == (tiled not in GRIDS)
    for k in (32, 128, 288):
        with pytest.raises(ValueError, match="K must be a multiple of"):
            tiled_bytes(tiled, k, 32)
    rows = random_super_blocks(type, 256, 3, np.random.default_rng(2))
    panel = pack(tiled, rows.reshape(-1), 256, 3)
    if tiled not in GRIDS:  # of which bits that are all zero may stand for no point
        assert not unpack(tiled, panel, 256, 32).reshape(32, -1)[3:].any()
    assert not dequantize(tiled, panel, 256, 32)[3:].any()
    assert HALVES[type]


@pytest.mark.parametrize("tiled", GRIDS, ids=lambda t: t.label)
def test_every_point_of_a_grid_comes_back(tiled: Type) -> None:
    """All numbers that 8 to 11 bits can have: with random signs, in every place of a block."""
    type = source_type(tiled)
    rows = np.random.default_rng(3).integers(0, 256, (512, row_bytes(type, 256))).astype(np.uint8)
    set_half(type, rows, HALVES[type][0], 1)
    grid = getattr(gguf.quants, type.name)
    grid.init_grid()
    points = np.unique(values(type, rows).reshape(-1, grid.grid.shape[-1]), axis=0)
    assert len(points) >= grid.grid.shape[-2]
    np.testing.assert_array_equal(unpack(tiled, pack(tiled, rows.reshape(-1), 256, 512), 256, 512), rows.reshape(-1))


def test_panels_of_any_bytes_unpack() -> None:
    """Also those that no block becomes: bits that are no point, the fourth level of three."""
    for tiled in GRIDS:
        panel = np.random.default_rng(4).integers(0, 256, PANEL[tiled]).astype(np.uint8)
        rows = unpack(tiled, panel, 256, 32)
        np.testing.assert_array_equal(unpack(tiled, pack(tiled, rows, 256, 32), 256, 32), rows)

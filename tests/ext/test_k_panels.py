"""Tile layout, version 2: block panels of K-quants against the formulas, and against gguf's reading of super-blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from k_quants import HALVES, K_BLOCKS, K_PANELS, random_super_blocks, values
from tilebeam._ext import Type, column_type, dequantize, pack, row_bytes, source_type, tile_bytes, tiled_bytes, unpack

types = st.sampled_from(K_BLOCKS)
PANEL = {Type.Q4_K_COL: 4608, Type.Q5_K_COL: 5632, Type.Q6_K_COL: 6720}


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


def read_panel(tiled: Type, panel: np.ndarray) -> np.ndarray:
    """Values of one block panel, (32, 256), by the formulas of k_panels.h."""
    k, n = np.meshgrid(np.arange(256), np.arange(32), indexing="xy")
    t, j, place = k // 32, k % 32 // 4, 2 * (k & 1) + (k >> 1 & 1)
    byte = panel[512 * t + 128 * (j // 2) + 4 * n + place]
    q = np.where(j % 2, byte >> 4, byte & 15).astype(np.int64)
    six = tiled == Type.Q6_K_COL
    if tiled == Type.Q5_K_COL:
        q |= (panel[4096 + 128 * t + 4 * n + place].astype(np.int64) >> j & 1) << 4
    if six:
        q |= (panel[4096 + 256 * t + 128 * (j // 4) + 4 * n + place].astype(np.int64) >> 2 * (j % 4) & 3) << 4
    fields = panel[PANEL[tiled] - (576 if six else 512) :]
    if six:
        d = fields[512:].view(np.float16).astype(np.float32)[n]
        return d * fields[:512].view(np.int8)[32 * (k // 16) + n].astype(np.float32) * (q - 32).astype(np.float32)
    low, high = fields[32 * t + n], fields[256 + 32 * (t % 4) + n] >> (t // 4 * 2)
    scale = (low & 15 | (high & 3) << 4).astype(np.float32)
    minimum = (low >> 4 | (high >> 4 & 3) << 4).astype(np.float32)
    d, dmin = (fields[at : at + 64].view(np.float16).astype(np.float32)[n] for at in (384, 448))
    return d * scale * q.astype(np.float32) - dmin * minimum


@pytest.mark.parametrize("tiled", K_PANELS, ids=lambda t: t.label)
def test_every_field_is_where_the_formulas_say(tiled: Type) -> None:
    type = source_type(tiled)
    rows = random_super_blocks(type, 256, 32, np.random.default_rng(1))
    panel = pack(tiled, rows.reshape(-1), 256, 32)
    np.testing.assert_array_equal(read_panel(tiled, panel), values(type, rows))


@pytest.mark.parametrize("tiled", K_PANELS, ids=lambda t: t.label)
def test_sizes(tiled: Type) -> None:
    """ggml's own bytes, as a GGUF needs them; whole blocks of 256 k only; a panel's missing columns are zeros."""
    type = source_type(tiled)
    assert tile_bytes(tiled) * 8 == PANEL[tiled] == 32 * row_bytes(type, 256)
    for k in (32, 128, 288):
        with pytest.raises(ValueError, match="K must be a multiple of"):
            tiled_bytes(tiled, k, 32)
    rows = random_super_blocks(type, 256, 3, np.random.default_rng(2))
    panel = pack(tiled, rows.reshape(-1), 256, 3)
    assert not unpack(tiled, panel, 256, 32).reshape(32, -1)[3:].any()
    assert HALVES[type]

"""Tile layout: every byte's place against the formulas, written here in numpy without the C code."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam._ext import (
    Type,
    _library,
    column_type,
    dequantize,
    ffi,
    lib,
    pack,
    quantize,
    row_bytes,
    tile_bytes,
    tiled_bytes,
    unpack,
)
from tilebeam._ext.cdef import contract

BLOCKS = [Type.Q4_0, Type.Q8_0, Type.IQ4_NL, Type.Q5_0, Type.Q4_1, Type.Q5_1, Type.MXFP4]
# Bytes of a block in front of its nibbles, or bytes: scale, minimum, fifth bits.
HEADS = {Type.Q4_1: (2, 2, 0), Type.Q5_0: (2, 0, 4), Type.Q5_1: (2, 2, 4), Type.MXFP4: (1, 0, 0)}
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
QUANTIZED = [Type.Q4_0_COL, Type.Q8_0_COL, Type.Q4_0_TILE, Type.Q8_0_TILE]

block_types = st.sampled_from(BLOCKS)
tile_types = st.sampled_from([Type.Q4_0_TILE, Type.Q8_0_TILE])
tiles_of = st.integers(1, 7)
seeds = st.integers(0, 2**32 - 1)


def random_blocks(ggml_type: Type, k: int, n: int, seed: int) -> np.ndarray:
    """Blocks of random quants and random finite scales, uint8 (N, row bytes)."""
    rng = np.random.default_rng(seed)
    size = row_bytes(ggml_type, 32)
    blocks = rng.integers(0, 256, (n, k // 32, size)).astype(np.uint8)
    if ggml_type == Type.MXFP4:  # exponents of any size: the largest value is 12 * 2^127
        blocks[..., 0] = rng.integers(0, 252, (n, k // 32))
        return blocks.reshape(n, -1)
    blocks[..., :2] = rng.normal(size=(n, k // 32, 1)).astype(np.float16).view(np.uint8)
    if HEADS.get(ggml_type, (2, 0, 0))[1]:
        blocks[..., 2:4] = rng.normal(size=(n, k // 32, 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(n, -1)


# ---- the document's formulas


def split_blocks(ggml_type: Type, blocks: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Quants (N, K), as stored (0..15, 0..31 or the byte), and scale (and minimum) as bytes (N, K/32, 1, 2 or 4), of
    plain ggml blocks."""
    n = blocks.shape[0]
    b = blocks.reshape(n, k // 32, -1)
    scale, minimum, fifth = HEADS.get(ggml_type, (2, 0, 0))
    q = b[..., scale + minimum + fifth :]
    if ggml_type != Type.Q8_0:
        q = np.concatenate([q & 15, q >> 4], axis=-1)
    if fifth:
        bits = np.ascontiguousarray(b[..., scale + minimum : scale + minimum + 4]).view("<u4")
        q = q | (bits >> np.arange(32, dtype=np.uint32) & 1).astype(np.uint8) << 4
    return q.reshape(n, k), b[..., : scale + minimum]


def place_of(eight_bit: bool, k: int, n: int) -> tuple[int, int]:
    """(byte in the tile, nibble) of element (k, n): by the formulas of layout.h."""
    if eight_bit:
        c, r = k // 4, k % 4
        return 128 * c + 4 * n + 2 * (r & 1) + (r >> 1), 0
    c, r = k // 8, k % 8
    v, p = r >> 1, r & 1
    return 128 * c + 4 * n + 2 * p + (v & 1), v >> 1


def build_tiles(bits: int, q: np.ndarray, scale_of: dict[tuple[int, int], np.ndarray]) -> np.ndarray:
    """Tiles from stored quants (N, K) of 4, 5 or 8 bits, N a multiple of 32, and the 32 scales of each tile (kt, nt):
    FP16 bit patterns, maybe with 32 minima, or bytes."""
    n, k = q.shape
    some = next(iter(scale_of.values()))
    out = np.zeros(((n // 32) * (k // 32), 128 * bits + some.nbytes), np.uint8)
    for nt in range(n // 32):
        for kt in range(k // 32):
            tile = out[nt * (k // 32) + kt]
            for i in range(32):
                for j in range(32):
                    byte, nibble = place_of(bits == 8, i, j)
                    value = int(q[nt * 32 + j, kt * 32 + i])
                    tile[byte] |= (value if bits == 8 else value & 15) << (4 * nibble)
                    if bits == 5:
                        tile[512 + byte % 128] |= value >> 4 << i // 4
            tile[128 * bits :] = scale_of[kt, nt].view(np.uint8)
    return out.reshape(-1)


def group_index() -> np.ndarray:
    """Scale index of element (k, n) in a tile, `tile` grouping: FP16 order e, 32 elements to a scale."""
    k, n = np.meshgrid(np.arange(32), np.arange(32), indexing="ij")
    return ((k >> 1) * 64 + 2 * n + (k & 1)) >> 5


def pad_rows(a: np.ndarray) -> np.ndarray:
    return np.concatenate([a, np.zeros((-len(a) % 32, *a.shape[1:]), a.dtype)])


# ---- packing


@settings(max_examples=60, deadline=None)
@given(block_types, tiles_of, st.integers(1, 230), seeds)
def test_pack_then_unpack_returns_the_same_bytes(ggml_type: Type, kt: int, n: int, seed: int) -> None:
    k = 32 * kt
    tiled = column_type(ggml_type)
    assert tiled is not None
    blocks = np.random.default_rng(seed).integers(0, 256, n * row_bytes(ggml_type, k)).astype(np.uint8)
    tiles = pack(tiled, blocks, k, n)
    assert tiles.size == tiled_bytes(tiled, k, n) == kt * -(-n // 32) * tile_bytes(tiled)
    assert np.array_equal(unpack(tiled, tiles, k, n), blocks)
    if n % 32 == 0:
        assert tiles.size == blocks.size  # exactly the bytes of its ggml type


@pytest.mark.parametrize("ggml_type", BLOCKS)
@pytest.mark.parametrize(("k", "n"), [(32, 32), (96, 32), (32, 96), (160, 96), (64, 1), (96, 33), (32, 95)])
def test_every_byte_of_a_packed_matrix_is_where_the_formulas_say(ggml_type: Type, k: int, n: int) -> None:
    tiled = column_type(ggml_type)
    assert tiled is not None
    blocks = random_blocks(ggml_type, k, n, seed=k * 1000 + n)
    q, scales = (pad_rows(a) for a in split_blocks(ggml_type, blocks, k))
    halves = np.ascontiguousarray(scales)
    if ggml_type != Type.MXFP4:
        halves = halves.view(np.uint16)  # (N, K/32, 1 or 2)
    expected = build_tiles(
        8 if ggml_type == Type.Q8_0 else 5 if HEADS.get(ggml_type, (2, 0, 0))[2] else 4,
        q,
        {
            (kt, nt): np.ascontiguousarray(halves[nt * 32 : nt * 32 + 32, kt].T).reshape(-1)
            for kt in range(k // 32)
            for nt in range(len(q) // 32)
        },
    )
    assert np.array_equal(pack(tiled, blocks.reshape(-1), k, n), expected)


# Blocks that are several tiles long: k of each.
LONG = {Type.Q1_0: 128, Type.Q2_0: 64, Type.NVFP4: 64}


def long_blocks(type: Type, blocks: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Quants (N, K) as stored, and of each 32 k the bytes of a tile's scales (N, K/32, 2): by ggml-common.h."""
    b = blocks.reshape(len(blocks), k // LONG[type], -1)
    if type == Type.NVFP4:
        q = b[..., 4:].reshape(*b.shape[:2], 4, 1, 8) >> np.array([[0], [4]], np.uint8) & 15
        return q.reshape(len(b), k), b[..., :4].reshape(len(b), k // 32, 2)
    bits = 8 * (b.shape[2] - 2) // LONG[type]
    q = b[..., 2:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & (1 << bits) - 1
    return q.reshape(len(b), k), np.repeat(b[..., :2], LONG[type] // 32, axis=1)


@pytest.mark.parametrize("type", LONG)
@settings(max_examples=20, deadline=None)
@given(blocks=st.integers(1, 3), n=st.integers(1, 70), seed=seeds)
def test_blocks_longer_than_a_tile(type: Type, blocks: int, n: int, seed: int) -> None:
    """Any bytes come back; each is where layout.h says; values are the quants times the scales, as ggml has them."""
    k, tiled = LONG[type] * blocks, column_type(type)
    assert tiled is not None
    rows = np.random.default_rng(seed).integers(0, 256, (n, row_bytes(type, k))).astype(np.uint8)
    if type != Type.NVFP4:
        rows.reshape(n, blocks, -1)[..., 1] &= 0xBB  # finite
    tiles = pack(tiled, rows.reshape(-1), k, n)
    assert np.array_equal(unpack(tiled, tiles, k, n), rows.reshape(-1))
    q, scales = long_blocks(type, rows, k)
    tile = tiles.reshape(-1, k // 32, tile_bytes(tiled))
    kk, nn = np.arange(k), np.arange(n)[:, None]
    r, place = kk % 32, 4 * (nn % 32) + 2 * (kk & 1) + (kk >> 1 & 1)
    bits = {Type.Q1_0: 1, Type.Q2_0: 2, Type.NVFP4: 4}[type]
    at = {1: 0 * r, 2: r // 16, 4: r // 8}[bits]
    shift = {1: r // 4, 2: 2 * (r // 4 % 4), 4: 4 * (r // 4 % 2)}[bits]
    assert np.array_equal(tile[nn // 32, kk // 32, 128 * at + place] >> shift & (1 << bits) - 1, q)
    end = tile[:, :, 128 * bits :].reshape(len(tile), k // 32, -1, 32 if type == Type.NVFP4 else 1)
    wide = (np.arange(2)[:, None] * 32 + np.arange(32) if type == Type.NVFP4 else np.arange(64).reshape(32, 2).T).T
    found = end.reshape(len(tile), k // 32, 64)[:, :, wide].transpose(0, 2, 1, 3).reshape(-1, k // 32, 2)
    assert np.array_equal(found[:n], scales)
    if type == Type.NVFP4:
        x = scales.astype(np.int64) & 127
        d = np.where(scales == 127, 0, np.where(x < 8, x, (8 + x % 8) * 2.0 ** (x // 8 - 1)) * 2.0**-10)
        exact = np.repeat(d.reshape(n, -1), 16, axis=1) * MXFP4_VALUES[q]
    else:
        d = np.ascontiguousarray(scales).view(np.float16)[..., 0].astype(np.float64)
        exact = np.repeat(d, 32, axis=1) * (q * (2.0 if bits == 1 else 1.0) - 1)
    assert np.array_equal(dequantize(type, rows.reshape(-1), k, n).reshape(n, k), exact)
    assert np.array_equal(dequantize(tiled, tiles, k, n).reshape(n, k), exact)


@settings(max_examples=30, deadline=None)
@given(block_types, tiles_of, st.integers(1, 32), st.integers(0, 50), seeds)
def test_a_panel_with_strided_rows(ggml_type: Type, kt: int, rows: int, gap: int, seed: int) -> None:
    """Rows of a panel may lie apart, and what lies between them stays untouched."""
    k, tiled = 32 * kt, column_type(ggml_type)
    assert tiled is not None
    stride = row_bytes(ggml_type, k) + gap
    source = np.random.default_rng(seed).integers(0, 256, rows * stride).astype(np.uint8)
    panel = np.empty(kt * tile_bytes(tiled), np.uint8)
    assert lib.tb_pack_panel(tiled, k, rows, ffi.from_buffer(source), stride, ffi.from_buffer(panel)) == lib.TB_OK
    dense = np.ascontiguousarray(source.reshape(rows, stride)[:, : stride - gap]).reshape(-1)
    assert np.array_equal(panel, pack(tiled, dense, k, rows))
    back = np.full_like(source, 0xA5)
    assert lib.tb_unpack_panel(tiled, k, rows, ffi.from_buffer(panel), ffi.from_buffer(back), stride) == lib.TB_OK
    back2d, source2d = back.reshape(rows, stride), source.reshape(rows, stride)
    assert np.array_equal(back2d[:, : stride - gap], source2d[:, : stride - gap])
    assert np.all(back2d[:, stride - gap :] == 0xA5)


# ---- values


@settings(max_examples=40, deadline=None)
@given(block_types, tiles_of, st.integers(1, 130), seeds)
def test_dequantize_gives_the_values_of_gguf(ggml_type: Type, kt: int, n: int, seed: int) -> None:
    k, tiled = 32 * kt, column_type(ggml_type)
    assert tiled is not None
    blocks = random_blocks(ggml_type, k, n, seed)
    expected = gguf_dequantize(blocks, gguf.GGMLQuantizationType(ggml_type.ggml))
    assert np.array_equal(dequantize(tiled, pack(tiled, blocks.reshape(-1), k, n), k, n), expected)
    assert np.array_equal(dequantize(ggml_type, blocks.reshape(-1), k, n), expected)


@pytest.mark.parametrize("tiled", [Type.Q4_0_TILE, Type.Q8_0_TILE, Type.IQ4_NL_TILE])
@pytest.mark.parametrize(("k", "n"), [(32, 32), (96, 64), (64, 33)])
def test_dequantize_of_tile_grouping_follows_the_formulas(tiled: Type, k: int, n: int) -> None:
    rng = np.random.default_rng(k + n)
    wide = tiled == Type.Q8_0_TILE
    padded = -(-n // 32) * 32
    q = rng.integers(0, 256 if wide else 16, (padded, k)).astype(np.uint8)
    scales = {(kt, nt): rng.normal(size=32).astype(np.float16) for kt in range(k // 32) for nt in range(padded // 32)}
    tiles = build_tiles(8 if wide else 4, q, {at: s.view(np.uint16) for at, s in scales.items()})
    nibbles = IQ4_NL_VALUES if tiled == Type.IQ4_NL_TILE else np.arange(-8, 8)
    values = q.view(np.int8).astype(np.float32) if wide else nibbles.astype(np.float32)[q]
    expected = np.empty((padded, k), np.float32)
    for (kt, nt), s in scales.items():
        block = np.s_[nt * 32 : nt * 32 + 32, kt * 32 : kt * 32 + 32]
        expected[block] = values[block] * s.astype(np.float32)[group_index().T]
    assert np.array_equal(dequantize(tiled, tiles, k, n), expected[:n])


def test_halves_are_exact_over_all_bit_patterns() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    f16 = dequantize(Type.F16, bits.view(np.uint8), 65536, 1)[0]
    expected = bits.view(np.float16).astype(np.float32)
    assert np.array_equal(f16, expected, equal_nan=True)
    assert np.array_equal(np.signbit(f16), np.signbit(expected))
    bf16 = dequantize(Type.BF16, bits.view(np.uint8), 65536, 1)[0]
    assert np.array_equal(bf16.view(np.uint32), bits.astype(np.uint32) << 16)


# ---- quantizing


def weights(k: int, n: int, seed: int, kind: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, k)).astype(np.float32)
    if kind == 1:
        x *= np.exp(rng.normal(size=(n, k)) * 8).astype(np.float32)  # scales from subnormal FP16 up
        x = np.clip(x, -4e5, 4e5)
    elif kind == 2:
        x = np.round(x * 8) * np.float32(0.00622559)  # nearly on the edges between two quants
    elif kind == 3:
        x = np.round(x * 4) / 4  # many ties and equal extremes
        x[rng.random((n, k)) < 0.3] = 0
        x[: n // 2, : k // 2] = 0
    # no -0.0: gguf's numpy and ggml's C give an all-zero block scales of different sign when it starts with one
    return np.ascontiguousarray(x, np.float32) + np.float32(0)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([Type.Q4_0, Type.Q8_0]), tiles_of, st.integers(1, 70), seeds, st.integers(0, 3))
def test_column_quantize_is_ggmls_bit_for_bit(ggml_type: Type, kt: int, n: int, seed: int, kind: int) -> None:
    k, tiled = 32 * kt, column_type(ggml_type)
    assert tiled is not None
    x = weights(k, n, seed, kind)
    expected = gguf_quantize(x, gguf.GGMLQuantizationType(ggml_type.ggml))
    assert np.array_equal(unpack(tiled, quantize(tiled, x), k, n).reshape(n, -1), expected)


def quantize_groups(x: np.ndarray, wide: bool) -> tuple[np.ndarray, np.ndarray]:
    """ggml's rule for groups of 32, in numpy: stored quants (G, 32) and FP16 scales (G,)."""
    x = x.astype(np.float32)
    extreme = x[np.arange(len(x)), np.abs(x).argmax(axis=1)]
    d = (np.abs(extreme) / np.float32(127) if wide else extreme / np.float32(-8)).astype(np.float32)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)[:, None]
    if wide:
        y = x * inverse
        q = (np.sign(y) * np.floor(np.abs(y).astype(np.float64) + 0.5)).astype(np.int8).view(np.uint8)
    else:
        y = x * inverse + np.float32(8.5)
        q = np.clip(np.trunc(y), 0, 15).astype(np.uint8)
    return q, d.astype(np.float16)


@settings(max_examples=25, deadline=None)
@given(tile_types, st.integers(1, 3), st.integers(1, 70), seeds, st.integers(0, 3))
def test_tile_quantize_follows_the_formulas(tiled: Type, kt: int, n: int, seed: int, kind: int) -> None:
    k, wide = 32 * kt, tiled == Type.Q8_0_TILE
    x = weights(k, n, seed, kind)
    padded = pad_rows(x)
    q = np.zeros(padded.shape, np.uint8)
    scales = {}
    kk, nn = np.meshgrid(np.arange(32), np.arange(32), indexing="ij")
    order = np.argsort(((kk >> 1) * 64 + 2 * nn + (kk & 1)).reshape(-1))  # FP16 order: 32 groups of 32 elements
    kk, nn = kk.reshape(-1)[order], nn.reshape(-1)[order]
    for nt in range(len(padded) // 32):
        for i in range(kt):
            block = np.s_[nt * 32 : nt * 32 + 32, i * 32 : i * 32 + 32]
            groups, d = quantize_groups(padded[block].T[kk, nn].reshape(32, 32), wide)
            tile = np.empty((32, 32), np.uint8)
            tile[kk, nn] = groups.reshape(-1)
            q[block] = tile.T
            scales[i, nt] = d.view(np.uint16)
    assert np.array_equal(quantize(tiled, x), build_tiles(8 if wide else 4, q, scales))


# ---- types and sizes


def test_sizes_that_do_not_fit_are_refused() -> None:
    for k, n in [(0, 32), (31, 32), (33, 32), (32, 0), (2**33, 32)]:
        with pytest.raises(ValueError, match="multiple of 32"):
            tiled_bytes(Type.Q4_0_COL, k, n)
    assert lib.tb_tiled_bytes(Type.Q8_0_COL, 2**63, 2**63) == 0
    assert lib.tb_tiled_bytes(Type.Q8_0_COL, 2**34, 2**34) == 0
    with pytest.raises(ValueError, match="not a tiled type"):
        tiled_bytes(Type.Q4_0, 32, 32)
    with pytest.raises(ValueError, match="blocks"):
        pack(Type.Q4_0_COL, np.zeros(17, np.uint8), 32, 1)
    with pytest.raises(ValueError, match="unsupported"):
        pack(Type.Q4_0_TILE, np.zeros(18 * 32, np.uint8), 32, 32)
    with pytest.raises(ValueError, match="not a tiled type"):
        quantize(Type.Q4_0, np.zeros((32, 32), np.float32))
    with pytest.raises(ValueError, match="unsupported"):
        dequantize(Type.I32, np.zeros(128, np.uint8), 32, 1)
    void = ffi.NULL
    for k, rows in [(0, 1), (31, 1), (32, 0), (32, 33)]:
        assert lib.tb_pack_panel(Type.Q4_0_COL, k, rows, void, 0, void) == lib.TB_E_SHAPE
        assert lib.tb_dequantize_panel(Type.Q4_0_COL, k, rows, void, void) == lib.TB_E_SHAPE


# ---- the library


def test_a_missing_library_is_one_clear_import_error(tmp_path: Path) -> None:
    code = "import tilebeam._ext"
    env = {**os.environ, "TILEBEAM_LIB_DIR": str(tmp_path), "LD_PRELOAD": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: tilebeam: ")
    assert "libtilebeam_ext.so is missing" in last
    (tmp_path / "libtilebeam_ext.so").write_bytes(b"no library")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "ImportError: tilebeam: " in done.stderr.strip().splitlines()[-1]


def test_a_library_of_another_layout_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = contract().replace("TB_LAYOUT_VERSION 2", "TB_LAYOUT_VERSION 3")
    monkeypatch.setattr(_library, "contract", lambda: newer)
    with pytest.raises(ImportError, match="has tile layout version 2, this package needs 3"):
        _library.open_library()


@pytest.mark.parametrize("change", [-1, 1])
def test_a_library_with_other_types_is_refused(monkeypatch: pytest.MonkeyPatch, change: int) -> None:
    count = int(_library.open_library()[1].TB_TYPE_COUNT)
    other = contract().replace(f"TB_TYPE_COUNT = {count}", f"TB_TYPE_COUNT = {count + change}")
    monkeypatch.setattr(_library, "contract", lambda: other)
    with pytest.raises(ImportError, match="knows other types than this package"):
        _library.open_library()


def test_descriptors_and_channel_have_the_same_bytes_everywhere() -> None:
    """Fixed width, no pointers, no hidden padding: what crosses the channel, packed by Python's struct."""
    tensor = "IIQ4I4Q"
    op = "IIII16i" + 9 * tensor + "48s"
    assert ffi.sizeof("tb_tensor") == struct.calcsize("<" + tensor)
    assert ffi.sizeof("tb_op") == struct.calcsize("<" + op)
    assert ffi.offsetof("tb_op", "dst") == struct.calcsize("<IIII16i")
    assert ffi.sizeof("tb_map") == struct.calcsize("<IIQQ")
    assert ffi.sizeof("tb_graph") == struct.calcsize("<IIQ")
    # each side writes cache lines of its own
    assert ffi.offsetof("tb_channel", "req_seq") % 64 == 0
    assert ffi.offsetof("tb_channel", "rep_seq") % 64 == 0
    assert ffi.sizeof("tb_channel") % 64 == 0

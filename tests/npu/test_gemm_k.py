"""MUL_MAT with types of 256 k, every kernel set: against the numerics in numpy, exact arithmetic, the portable set."""

from __future__ import annotations

from typing import Any

import npu_ops as t
import numpy as np
import numpy.typing as npt
import pytest
from gemm_reference import FLAG_FP16, Weights, device
from hypothesis import given, settings
from hypothesis import strategies as st
from k_quants import HALVES, K_BLOCKS, make_weights, set_half, values
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type

Array = npt.NDArray[Any]

isas = t.runs_with_hvx
types = pytest.mark.parametrize("type", K_BLOCKS, ids=lambda t: t.label)


def make(type: Type, k: int, n: int, seed: int) -> tuple[Weights, Weights]:
    """The same random matrix as ggml's rows and as block panels."""
    tiled = ggml_ext.column_type(type)
    assert tiled is not None
    plain, panels = (make_weights(t, k, n, np.random.default_rng(seed)) for t in (type, tiled))
    return plain, panels


def quantized(x: Array) -> Array:
    """Activations as the kernels see them, float64 (M, K): int8 by the absolute maximum of each 256 k."""
    blocks = x.astype(np.float32).reshape(x.shape[0], -1, 256)
    amax = np.abs(blocks).max(axis=2, keepdims=True)
    live = amax >= np.float32(2.0**-110)
    q = np.rint(blocks * (np.float32(127) / np.where(live, amax, np.float32(1))))
    scale = np.where(live, amax / np.float32(127), np.float32(0)).astype(np.float64)
    return (np.where(live, q, 0) * scale).reshape(x.shape)


@isas
@types
@settings(max_examples=20, deadline=None)
@given(
    blocks=st.sampled_from([1, 2, 3, 9]),
    n=st.sampled_from([1, 3, 31, 32, 33, 64, 130]),
    m=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 32, 33, 50]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_products(isa: str, type: Type, blocks: int, n: int, m: int, threads: int, seed: int) -> None:
    k = 256 * blocks
    rng = np.random.default_rng(seed)
    plain, tiled = make(type, k, n, seed)
    x = (rng.standard_normal((m, k)) * np.exp2(rng.integers(-20, 20, (m, 1)))).astype(np.float32)
    out = device(isa, threads).product(tiled, x)
    model = quantized(x) @ tiled.values.T
    # sums are integers: what rounds is one float step a block, of sums as large as these
    magnitude = np.abs(quantized(x)) @ (np.abs(tiled.values) + np.abs(tiled.values).max(axis=1, keepdims=True)).T
    assert np.all(np.abs(out - model) <= magnitude * 2.0**-22 * (blocks + 4) + 1e-30)
    half_steps = np.repeat(np.abs(x).reshape(m, -1, 256).max(axis=2), 256, axis=1) / 254
    exact = x.astype(np.float64) @ tiled.values.T
    assert np.all(np.abs(out - exact) <= half_steps @ np.abs(tiled.values).T * 1.001 + magnitude * 1e-5 + 1e-30)
    np.testing.assert_array_equal(out, device(isa, threads).product(plain, x))
    other = device("portable", 1).product(tiled, x)
    assert np.all(np.abs(out - other) <= magnitude * 2.0**-22 * (blocks + 4) + 1e-30)


@pytest.mark.skipif("amx" not in t.ISAS, reason="needs a CPU with AMX")
@types
def test_the_matrix_unit_has_the_bits_of_vectors(type: Type) -> None:
    """Any number of rows, in groups of any size: sums are integers, and the float step is the same."""
    plain, tiled = make(type, 768, 70, 7)
    rng = np.random.default_rng(7)
    for m in (*range(1, 36), 48, 63, 64, 65, 97, 127, 128, 129, 200, 257):
        x = rng.standard_normal((m, 768)).astype(np.float32)
        expected = device("avx512vnni", 1).product(tiled, x)
        for w in (plain, tiled):
            np.testing.assert_array_equal(device("amx", 2).product(w, x), expected, str(m))


# Scales that all bits set do not make largest in magnitude: where in a super-block, and bytes. Of six bits 0 is -32.
EXTREMES = {
    Type.Q6_K: [(192, b"\x7f" * 16), (192, b"\x80" * 16)],
    Type.Q3_K: [(96, bytes(12))],
}


@isas
@types
def test_largest_magnitudes_do_not_overflow(isa: str, type: Type) -> None:
    """All bits set or none, scales at their largest and smallest, activations at +-127: sums stay exact."""
    k, n = 512, 64
    for bits in (255, 0, *EXTREMES.get(type, [])):
        rows = np.full((n, ggml_ext.row_bytes(type, k)), bits if isinstance(bits, int) else 255, np.uint8)
        blocks = rows.reshape(n, k // 256, -1)
        if not isinstance(bits, int):
            at, with_bytes = bits
            blocks[..., at : at + len(with_bytes)] = np.frombuffer(with_bytes, np.uint8)
        for i, at in enumerate(HALVES[type]):
            set_half(type, blocks, at, 1 - i)
        exact = values(type, rows).astype(np.float64)
        tiled = ggml_ext.column_type(type)
        assert tiled is not None
        w = Weights(tiled, k, n, ggml_ext.pack(tiled, rows.reshape(-1), k, n), exact)
        x = np.full((5, k), 127, np.float32)
        x[1] = -127
        x[2, ::2] = -127
        x[3, 1::2] = -127
        out = device(isa, 1).product(w, x)
        np.testing.assert_allclose(out, x.astype(np.float64) @ exact.T, rtol=1e-6, atol=1)


@isas
@types
def test_hostile_numbers(isa: str, type: Type) -> None:
    """Zero rows give zeros; a NaN or infinity spoils its row, or of a scale its column, and nothing else."""
    plain, _ = make(type, 512, 64, 8)
    rows = plain.data.copy()
    at = HALVES[type][0]
    set_half(type, rows.reshape(64, 2, -1)[37, 1], at, np.inf)
    tiled = ggml_ext.column_type(type)
    assert tiled is not None
    w = Weights(tiled, 512, 64, ggml_ext.pack(tiled, rows.reshape(-1), 512, 64), plain.values)
    x = np.random.default_rng(8).standard_normal((40, 512)).astype(np.float32)
    x[1] = 0
    x[2, 300] = np.nan
    x[3, 511] = -np.inf
    x[4] = 1e-45
    out = device(isa, 2).product(w, x)
    bad_rows, bad_columns = np.isin(np.arange(40), [2, 3]), np.arange(64) == 37
    np.testing.assert_array_equal(np.isfinite(out), ~(bad_rows[:, None] | bad_columns[None, :]))
    assert np.all(out[np.ix_([1, 4], ~bad_columns)] == 0)


@isas
@types
def test_fp16_numerics(isa: str, type: Type) -> None:
    """Dequantized weights and activations rounded to FP16, float32 sums, results rounded to FP16."""
    plain, tiled = make(type, 512, 70, 3)
    x = np.random.default_rng(3).standard_normal((9, 512)).astype(np.float32)
    model = x.astype(np.float16).astype(np.float64) @ tiled.values.astype(np.float16).astype(np.float64).T
    scale = np.abs(x.astype(np.float64)) @ np.abs(tiled.values).T
    for w in (plain, tiled):
        out = device(isa, 2).product(w, x, flags=FLAG_FP16)
        assert np.all(np.abs(out - model) <= np.abs(model) * 2.0**-11 + scale * 2.0**-20)
        np.testing.assert_array_equal(out, out.astype(np.float16).astype(np.float32))

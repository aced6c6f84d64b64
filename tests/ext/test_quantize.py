"""The search for scales: against every FP16 scale there is, against round to nearest, and against llama.cpp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf_kit import ggml_quantized
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type
from tilebeam.gguf.quantize import ErrorSum, quantize_rows

Array = np.ndarray[Any, np.dtype[Any]]

TYPES = [t for t in Type if ggml_ext.is_tiled(t) and ggml_ext.layout_version(t) == 1]  # K-quants are read only
IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64)
HALVES = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
tiled_types = st.sampled_from(TYPES)
seeds = st.integers(0, 2**32 - 1)


def matrix(n: int, k: int, seed: int, kind: str = "gauss") -> Array:
    """Weights as models have them, and as they do not."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, k)) * 0.03
    if kind == "outliers":
        x = rng.standard_t(2.5, (n, k)) * 0.02
    elif kind == "mixed sizes":
        x *= np.exp(rng.normal(size=(n, k)) * 6)
        x = np.clip(x, -4e5, 4e5)
    elif kind == "one sided":
        x = np.abs(x)
    elif kind == "sparse":
        x[rng.random((n, k)) < 0.9] = 0
        x[: n // 2] = 0
    elif kind == "on a grid":
        x = np.round(x * 100) / 64
    return x.astype(np.float32)


def has_lanes(lanes: int) -> bool:
    try:
        ggml_ext.quantize(Type.Q4_0_COL, matrix(1, 32, 0), search=lanes)
    except ValueError:
        return False
    return True


SEARCH_LANES = [n for n in (4, 8, 16) if has_lanes(n)]
KINDS = ("gauss", "outliers", "mixed sizes", "one sided", "sparse", "on a grid")


def group_ids(type: Type, n: int, k: int) -> Array:
    """Which group of 32 each element (N, K) belongs to: as layout.h has them; N is whole panels."""
    kk, nn = np.meshgrid(np.arange(k), np.arange(n))
    if type.name.endswith("_COL"):
        return nn * (k // 32) + kk // 32
    e = ((kk % 32) >> 1) * 64 + 2 * (nn % 32) + (kk & 1)
    return ((nn // 32) * (k // 32) + kk // 32) * 32 + (e >> 5)


def group_errors(type: Type, x: Array, tiles: Array) -> Array:
    """Squared error of every group, in float64."""
    n, k = x.shape
    full = np.zeros((-(-n // 32) * 32, k))
    full[:n] = (x.astype(np.float64) - ggml_ext.dequantize(type, tiles, k, n)) ** 2
    return np.bincount(group_ids(type, len(full), k).reshape(-1), full.reshape(-1))


def nearest_codes(type: Type, v: Array) -> Array:
    plain = ggml_ext.source_type(type)
    if plain == Type.IQ4_NL:
        return IQ4_NL_VALUES[np.searchsorted((IQ4_NL_VALUES[1:] + IQ4_NL_VALUES[:-1]) / 2, v)]
    return np.clip(np.rint(v), -8, 7) if plain == Type.Q4_0 else np.clip(np.rint(v), -127, 127)


def best_error(type: Type, x: Array) -> float:
    """The smallest error of one group (32,) over all FP16 scales of either sign that could matter."""
    most = np.abs(x).max()
    top = {Type.Q4_0: 8, Type.Q8_0: 127, Type.IQ4_NL: 127}[ggml_ext.source_type(type)]
    low, high = np.searchsorted(HALVES, [most / top / 5, most / top * 3])
    d = HALVES[low:high]
    d = np.concatenate([d, -d])[:, None]
    return float(((x - d * nearest_codes(type, x / d)) ** 2).sum(axis=1).min())


@pytest.mark.parametrize("type", TYPES)
def test_search_comes_close_to_the_best_of_all_fp16_scales(type: Type) -> None:
    n, k = 32, 128
    x = np.concatenate([matrix(n // 2, k, 1), matrix(n // 2, k, 2, "outliers")])
    found = group_errors(type, x, quantize_rows(type, x, search=True))
    ids = group_ids(type, n, k)
    best = np.array([best_error(type, x[ids == g].astype(np.float64)) for g in range(ids.max() + 1)])
    assert (found >= best * (1 - 1e-9)).all()
    # 8 bits: the error over the scale is nothing but narrow dips, and the grid misses the deepest of some groups
    assert found.sum() <= best.sum() * (1.05 if ggml_ext.source_type(type) == Type.Q8_0 else 1.01)
    plain = group_errors(type, x, quantize_rows(type, x))
    assert plain.sum() > best.sum() * 1.05  # there was something to find


@settings(max_examples=120, deadline=None)
@given(tiled_types, st.integers(1, 4), st.integers(1, 70), seeds, st.sampled_from(KINDS))
def test_never_worse_than_round_to_nearest_on_any_group(type: Type, kt: int, n: int, seed: int, kind: str) -> None:
    x = matrix(n, 32 * kt, seed, kind)
    plain = group_errors(type, x, quantize_rows(type, x))
    found = group_errors(type, x, quantize_rows(type, x, search=True))
    assert (found <= plain * (1 + 1e-12)).all()


@settings(max_examples=60, deadline=None)
@given(tiled_types, st.integers(1, 3), st.integers(1, 70), seeds, st.sampled_from(KINDS), st.booleans())
def test_reported_error_is_the_error_of_what_is_stored(
    type: Type, kt: int, n: int, seed: int, kind: str, search: bool
) -> None:
    k = 32 * kt
    x = matrix(n, k, seed, kind)
    error, other = ErrorSum(), ErrorSum()
    tiles = quantize_rows(type, x, search=search, error=error)
    y = ggml_ext.dequantize(type, tiles, k, n)
    other.add_values(x, y)
    r = (x.astype(np.float64) - y) ** 2
    assert error.count == other.count == n * k
    for e in (error, other):
        assert e.squared == pytest.approx(r.sum(), rel=1e-9)
        assert e.energy == pytest.approx((x.astype(np.float64) ** 2).sum(), rel=1e-9)
        assert e.relative_rms == pytest.approx(np.sqrt(r.sum() / max(e.energy, 1e-300)), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(tiled_types, st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 31), seeds, st.booleans())
def test_chunks_of_rows_change_nothing(type: Type, panels: list[int], rest: int, seed: int, search: bool) -> None:
    k = 64
    x = matrix(32 * sum(panels) + rest, k, seed)
    whole = quantize_rows(type, x, search=search)
    parts, at = [], 0
    for p in [32 * p for p in panels] + [rest]:
        if p:
            parts.append(quantize_rows(type, x[at : at + p], search=search))
        at += p
    assert np.array_equal(np.concatenate(parts), whole)


@settings(max_examples=60, deadline=None)
@given(tiled_types, st.integers(1, 4), st.integers(1, 70), seeds, st.sampled_from(KINDS))
def test_all_instruction_sets_find_the_same(type: Type, kt: int, n: int, seed: int, kind: str) -> None:
    x = matrix(n, 32 * kt, seed, kind)
    best = ggml_ext.quantize(type, x, search=1)
    for lanes in SEARCH_LANES:
        assert np.array_equal(ggml_ext.quantize(type, x, search=lanes), best)


# ---- llama.cpp's own


@pytest.mark.parametrize("kind", ["gauss", "outliers", "one sided"])
@pytest.mark.parametrize("plain", [Type.Q4_0, Type.Q8_0, Type.IQ4_NL])
def test_column_groups_beat_llama_cpp(plain: Type, kind: str) -> None:
    n, k = 64, 256
    x = matrix(n, k, 5, kind)
    theirs, ours = ErrorSum(), ErrorSum()
    theirs.add_values(x, ggml_ext.dequantize(plain, ggml_quantized(Q(plain.ggml), x), k, n))
    column = ggml_ext.column_type(plain)
    assert column is not None
    quantize_rows(column, x, search=True, error=ours)
    assert ours.squared < theirs.squared


# ---- bad input


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 1e30])
def test_weights_without_an_fp16_scale_are_refused(type: Type, bad: float) -> None:
    x = matrix(32 * 300, 64, 7)
    x[-1, -1] = bad
    with pytest.raises(ValueError, match="not finite, or too large"):
        quantize_rows(type, x, search=True)


def test_vector_lengths_that_no_cpu_has_are_refused() -> None:
    assert 4 in SEARCH_LANES
    for lanes in (-1, 2, 3, 5, 32):
        assert not has_lanes(lanes)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_rows(Type.Q4_0_COL, np.zeros((32, 33), np.float32))
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_rows(Type.Q4_0_COL, np.zeros((0, 32), np.float32))
    with pytest.raises(ValueError, match="shape"):
        quantize_rows(Type.Q4_0_COL, np.zeros(32, np.float32))
    with pytest.raises(ValueError, match="not a tiled type"):
        quantize_rows(Type.Q4_0, np.zeros((32, 32), np.float32))


def test_huge_and_tiny_weights_survive_the_search() -> None:
    x = matrix(32, 64, 9)
    for scale, limit in ((1e5, 0.2), (1e-6, 1.0), (1e-20, 1.0), (0.0, 0.0)):
        y = (x * np.float32(scale)).astype(np.float32)
        got = ggml_ext.dequantize(Type.Q4_0_COL, quantize_rows(Type.Q4_0_COL, y, search=True), 64, 32)
        assert np.isfinite(got).all()
        assert np.abs(got - y).max() <= limit * np.abs(y).max()


@pytest.mark.parametrize("type", [t for t in Type if ggml_ext.is_tiled(t) and t not in TYPES], ids=lambda t: t.label)
def test_types_without_a_quantizer_are_refused(type: Type) -> None:
    """K-quants become tiles as they are; floats must not be turned into bytes that mean something else."""
    with pytest.raises(ValueError, match="these types only: q4_0, q8_0, iq4_nl"):
        ggml_ext.quantize(type, np.ones((32, 256), np.float32))
    out = np.zeros(ggml_ext.tiled_bytes(type, 256, 32), np.uint8)
    values = np.ones((32, 256), np.float32)
    ffi = ggml_ext.ffi
    arguments = (ffi.from_buffer("float[]", values), 0, ffi.from_buffer(out), ffi.NULL)
    assert ggml_ext.lib.tb_quantize(type, 256, 32, *arguments) == ggml_ext.lib.TB_E_UNSUPPORTED
    assert not out.any()

"""GPTQ's rule and the sweeps after it: against the paper's own algorithm in float64, and against round to nearest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type
from tilebeam.gguf.compensate import Inputs, compensate, damped, group_width

Array = np.ndarray[Any, np.dtype[Any]]
TYPES = [t for t in Type if ggml_ext.is_tiled(t) and ggml_ext.has_quantizer(t)]
COLUMN_TYPES = [t for t in TYPES if group_width(t) == 32]
IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64)
BOOKS = {"q4_0": np.arange(-8.0, 8.0), "q8_0": np.arange(-127.0, 128.0), "iq4_nl": IQ4_NL_VALUES}
N, K = 48, 128


def book(tiled: Type) -> Array:
    return BOOKS[tiled.label.rpartition("_")[0]]


def moments(k: int, seed: int = 1, tokens: int = 600) -> Array:
    """Of inputs that go together, some far larger than others."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(k, k)) / np.sqrt(k) + np.eye(k)
    x = rng.normal(size=(tokens, k)) @ mixed * np.exp(rng.normal(size=k))
    return (x.T @ x).astype(np.float32)


def weights(n: int, k: int, seed: int = 2) -> Array:
    return (np.random.default_rng(seed).standard_t(4, (n, k)) * 0.02).astype(np.float32)


def cost(w: Array, v: Array, h: Array) -> float:
    left = w.astype(np.float64) - v
    return float(np.einsum("nk,nk->", left @ h, left))


def scales_of(tiled: Type, tiles: Array, n: int, k: int) -> Array:
    """FP16 scales (n, K / 32) of the plain blocks."""
    blocks = ggml_ext.unpack(tiled, tiles, k, n).reshape(n, k // 32, -1)
    return np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float64)


def gptq(w: Array, h: Array, scales: Array, codes: Array, order: Array) -> Array:
    """The algorithm of the paper, a column at a time, with given scales of blocks of 32: values (n, K)."""
    w = w.astype(np.float64)[:, order]
    inverse = np.linalg.inv(h[np.ix_(order, order)])
    upper = np.linalg.cholesky(inverse).T
    out = np.empty_like(w)
    for j, column in enumerate(order):
        d = scales[:, column // 32]
        q = codes[np.abs(w[:, j, None] / np.where(d == 0, 1, d)[:, None] - codes).argmin(axis=1)]
        out[:, j] = np.where(d == 0, 0, d * q)
        w[:, j:] -= ((w[:, j] - out[:, j]) / upper[j, j])[:, None] * upper[j, j:]
    back = np.empty_like(out)
    back[:, order] = out
    return back


@pytest.mark.parametrize("tiled", COLUMN_TYPES, ids=lambda t: t.label)
def test_without_sweeps_it_is_the_algorithm_of_the_paper(tiled: Type) -> None:
    w, h = weights(N, K), moments(K)
    inputs = Inputs.of(h, 32)
    made = compensate(tiled, w, inputs, sweeps=0, threads=1)
    got = ggml_ext.dequantize(tiled, made.tiles, K, N)
    expected = gptq(w, damped(h), scales_of(tiled, made.tiles, N, K), book(tiled), inputs.order)
    same = np.isclose(got, expected, rtol=1e-6, atol=1e-9).mean()
    assert same > 0.995  # rounding in float32 may tip a weight that is halfway, and those after it
    assert cost(w, got, damped(h)) == pytest.approx(cost(w, expected, damped(h)), rel=0.02)
    assert made.errors[0] == pytest.approx(cost(w, got, damped(h)), rel=1e-3)


@pytest.mark.parametrize("tiled", TYPES, ids=lambda t: t.label)
def test_errors_fall_from_sweep_to_sweep_and_are_below_those_of_rounding(tiled: Type) -> None:
    w, h = weights(N, K), moments(K)
    made = compensate(tiled, w, Inputs.of(h, group_width(tiled)), sweeps=3, threads=2)
    assert len(made.errors) == 4
    assert all(b <= a * 1.0001 for a, b in zip(made.errors, made.errors[1:], strict=False))
    own = cost(w, ggml_ext.dequantize(tiled, made.tiles, K, N), damped(h))
    assert own == pytest.approx(made.errors[-1], rel=1e-3)
    for search in (0, 1):
        rounded = ggml_ext.dequantize(tiled, ggml_ext.quantize(tiled, w, search=search), K, N)
        assert own < 0.8 * cost(w, rounded, damped(h))


@pytest.mark.parametrize("tiled", TYPES, ids=lambda t: t.label)
def test_codes_and_scales_are_where_tiles_have_them(tiled: Type) -> None:
    rng = np.random.default_rng(3)
    codes = rng.choice(book(tiled), (64, 96)).astype(np.float32)
    width, rows = group_width(tiled), 1 if group_width(tiled) == 32 else 16
    scales = rng.normal(size=(64 // rows, 96 // width)).astype(np.float16).astype(np.float32)
    expected = codes * np.repeat(np.repeat(scales, rows, axis=0), width, axis=1)
    assert np.array_equal(ggml_ext.dequantize(tiled, ggml_ext.place_codes(tiled, codes, scales), 96, 64), expected)


@pytest.mark.parametrize("tiled", TYPES, ids=lambda t: t.label)
def test_the_scale_is_as_good_as_any(tiled: Type) -> None:
    """Of one step of the C code: against many scales, each with the codes that the rule gives."""
    rng = np.random.default_rng(4)
    width = group_width(tiled)
    n = 32
    x = rng.normal(size=(n, width)).astype(np.float32)
    u = np.triu(rng.normal(size=(width, width)) * 0.1 + np.eye(width)).astype(np.float32)
    per = 1 if width == 32 else 16
    scales, codes = np.zeros(n // per, np.float32), np.zeros((n, width), np.float32)
    ggml_ext.quantize_feedback(tiled, x, u, scales, codes)

    def losses(d: Array, fixed: Array | None = None) -> Array:
        left, total = x.astype(np.float64), np.zeros(n)
        for j in range(width):
            q = book(tiled)[np.abs(left[:, j, None] / d[:, None] - book(tiled)).argmin(axis=1)]
            q = q if fixed is None else fixed[:, j]
            e = (left[:, j] - d * q) / u[j, j]
            left = left - e[:, None] * u[j]
            total += e * e
        return total.reshape(-1, per).sum(axis=1)

    own = losses(np.repeat(scales, per), codes)
    largest = np.abs(x).reshape(-1, per * width).max(axis=1)
    others = [losses(np.repeat(largest * f / np.abs(book(tiled)).max(), per)) for f in np.linspace(0.5, 1.5, 101)]
    assert (own <= np.min(others, axis=0) * 1.6).all()  # carrying errors on makes it a rough function
    assert own.sum() <= np.min(others, axis=0).sum() * 1.1

    ggml_ext.quantize_feedback(tiled, x, u, scales, codes, again=True)
    assert (losses(np.repeat(scales, per), codes) <= own * (1 + 1e-5)).all()


def test_inputs_that_depend_on_each_other_or_never_come_are_no_trouble() -> None:
    w = weights(N, K)
    x = np.zeros((3, K))
    x[:, : K // 2] = np.random.default_rng(5).normal(size=(3, K // 2))  # rank 3, half of the inputs always 0
    h = (x.T @ x).astype(np.float32)
    made = compensate(Type.Q4_0_COL, w, Inputs.of(h, 32), threads=1)
    v = ggml_ext.dequantize(Type.Q4_0_COL, made.tiles, K, N)
    assert np.isfinite(v).all()
    nearest = ggml_ext.dequantize(Type.Q4_0_COL, ggml_ext.quantize(Type.Q4_0_COL, w), K, N)
    assert cost(w, v, damped(h)) < cost(w, nearest, damped(h))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda h: h * np.float32(np.nan), "not finite"),
        (lambda h: h * 0, "all its inputs are 0"),
        (lambda h: -h, "negative"),
        (lambda h: h - 10 * np.outer(h.diagonal(), h.diagonal()) * (1 - np.eye(K)), "not positive definite"),
    ],
)
def test_moments_that_make_no_sense_are_refused(spoil: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Inputs.of(spoil(moments(K)), 32)


def test_weights_that_make_no_sense_are_refused() -> None:
    inputs = Inputs.of(moments(K), 32)
    for value in (np.nan, np.inf):
        w = weights(N, K)
        w[3, 5] = value
        with pytest.raises(ValueError, match="not finite"):
            compensate(Type.Q4_0_COL, w, inputs, threads=1)

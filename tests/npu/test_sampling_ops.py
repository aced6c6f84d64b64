"""The ops that sampling on the device and stand-alone activations need, on every kernel set, against numpy models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import npu_ops as t
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tilebeam import _ext as ggml_ext

runs = t.runs
SEEDS, ORDERS, PADS, SHAPES, FLOATS = t.SEEDS, t.ORDERS, t.PADS, t.SHAPES, t.FLOATS
few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ROW_PADS = st.tuples(st.just(0), st.integers(0, 5), st.integers(0, 2), st.integers(0, 1))
EPS = {t.F32: 4e-6, t.F16: 1e-3, t.BF16: 8e-3}

Model = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-x))


def _round_away(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


# By the numbers of ggml_unary_op (ggml.h).
UNARY: dict[int, Model] = {
    0: np.abs,
    1: np.sign,
    2: np.negative,
    3: lambda x: (x > 0).astype(np.float64),
    4: np.tanh,
    5: lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    6: lambda x: np.maximum(x, 0),
    7: _sigmoid,
    8: lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    9: lambda x: x * _sigmoid(1.702 * x),
    10: lambda x: x * _sigmoid(x),
    11: lambda x: x * np.clip((x + 3) / 6, 0, 1),
    12: lambda x: np.clip((x + 3) / 6, 0, 1),
    13: np.exp,
    14: np.expm1,
    15: lambda x: np.log1p(np.exp(x)),
    16: lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    18: np.floor,
    19: np.ceil,
    20: _round_away,
    21: np.trunc,
}


def values(seed: int, ne: tuple[int, ...], scale: float = 3.0) -> NDArray[np.float32]:
    """Normal random values `[ne3, ne2, ne1, ne0]`, small enough that their exponentials fit FP16."""
    v = np.random.default_rng(seed).standard_normal(tuple(reversed(ne))) * scale
    return np.clip(v, -10, 10).astype(np.float32)


def close(got: NDArray[Any], want: NDArray[Any], kind: int) -> None:
    np.testing.assert_allclose(got, want, rtol=EPS[kind], atol=EPS[kind] * 0.2)


@runs
@few
@given(which=st.sampled_from(sorted(UNARY)), ne=SHAPES, kind=FLOATS, order=ORDERS, pad=PADS, seed=SEEDS)
def test_unary(isa: str, which: int, ne: Any, kind: int, order: Any, pad: Any, seed: int) -> None:
    a = t.Arena()
    x = a.add(kind, ne, values(seed, ne), order, pad)
    dst = a.add(kind, ne, None, (0, 2, 1, 3), (1, 0, 0, 0))
    got = t.run(a, t.make_op("UNARY", dst, [x], {0: which}), dst, isa, 3)
    close(got, UNARY[which](x.floats()), kind)


@runs
def test_exponentials_where_floats_end(isa: str) -> None:
    ends = [-np.inf, -1e30, -104.5, -103.0, -87.5, -0.0, 0.0, 1e-30, 88.7, 88.8, 1e30, np.inf, np.nan]
    a = t.Arena()
    x = a.add(t.F32, (3 * len(ends),), np.array(3 * ends, np.float32).reshape(1, 1, 1, -1))
    with np.errstate(over="ignore", under="ignore"):
        want = np.exp(x.array)
    got = t.run(a, t.make_op("UNARY", x, [x], {0: 13}), x, isa, 1)
    np.testing.assert_allclose(got, want, rtol=EPS[t.F32], atol=2e-45)


@runs
@few
@given(ne=SHAPES, kind=FLOATS, order=ORDERS, pad=PADS, seed=SEEDS)
def test_xielu(isa: str, ne: Any, kind: int, order: Any, pad: Any, seed: int) -> None:
    a = t.Arena()
    x = a.add(kind, ne, values(seed, ne), order, pad)
    dst = a.add(kind, ne)
    got = t.run(a, t.make_op("UNARY", dst, [x], {0: 17, 1: 1.3, 2: 0.8, 3: 0.5, 4: -1e-6}), dst, isa, 3)
    v = x.floats()
    close(got, np.where(v > 0, 0.8 * v * v, (np.expm1(np.minimum(v, -1e-6)) - v) * 1.3) + 0.5 * v, kind)


@pytest.mark.parametrize("which", [-1, 22, 1 << 30])
def test_unary_kinds_without_a_function_are_refused(which: int) -> None:
    a = t.Arena()
    x = a.add(t.F32, (4,), values(0, (4, 1, 1, 1)))
    assert ggml_ext.lib.tb_op_check_shape(t.make_op("UNARY", x, [x], {0: which}), ggml_ext.ffi.NULL) != 0


@runs
@few
@given(ne=SHAPES, kind=FLOATS, order=ORDERS, pad=PADS, seed=SEEDS)
def test_log_sqr_sqrt_clamp_scale_fill(isa: str, ne: Any, kind: int, order: Any, pad: Any, seed: int) -> None:
    a = t.Arena()
    x = a.add(kind, ne, np.abs(values(seed, ne)) + np.float32(0.1), order, pad)
    dst = a.add(kind, ne)
    close(t.run(a, t.make_op("LOG", dst, [x]), dst, isa, 3), np.log(x.floats()), kind)
    close(t.run(a, t.make_op("SQR", dst, [x]), dst, isa, 3), np.square(x.floats()), kind)
    close(t.run(a, t.make_op("SQRT", dst, [x]), dst, isa, 3), np.sqrt(x.floats()), kind)
    got = t.run(a, t.make_op("CLAMP", dst, [x], {0: 0.5, 1: 1.25}), dst, isa, 3)
    close(got, np.clip(x.floats(), 0.5, 1.25), kind)
    got = t.run(a, t.make_op("SCALE", dst, [x], {0: -2.5, 1: 1.5}), dst, isa, 3)
    np.testing.assert_allclose(got, -2.5 * x.floats() + 1.5, rtol=EPS[kind], atol=EPS[kind])
    close(t.run(a, t.make_op("FILL", x, [dst], {0: -7.5}), x, isa, 3), np.full(tuple(reversed(ne)), -7.5), kind)


@runs
@few
@given(ne=SHAPES, order=st.permutations([1, 2, 3]), pad=ROW_PADS, seed=SEEDS)
def test_sum_cumsum(isa: str, ne: Any, order: Any, pad: Any, seed: int) -> None:
    a = t.Arena()
    x = a.add(t.F32, ne, values(seed, ne), (0, *order), pad)
    one, rows, dst = a.add(t.F32, (1,)), a.add(t.F32, (1, *ne[1:])), a.add(t.F32, ne)
    got = t.run(a, t.make_op("SUM_ROWS", rows, [x]), rows, isa, 3)
    np.testing.assert_allclose(got, x.floats().sum(axis=-1, keepdims=True), rtol=2.0**-23, atol=1e-11)
    got = t.run(a, t.make_op("SUM_ROWS", rows, [x], {0: 1}), rows, isa, 3)
    np.testing.assert_allclose(got, x.floats().mean(axis=-1, keepdims=True), rtol=2.0**-23, atol=1e-11)
    np.testing.assert_allclose(t.run(a, t.make_op("SUM", one, [x]), one, isa, 3).item(), x.floats().sum(), rtol=1e-5)
    got = t.run(a, t.make_op("CUMSUM", dst, [x]), dst, isa, 3)
    np.testing.assert_allclose(got, x.floats().cumsum(axis=-1), rtol=1e-5, atol=1e-5)


@runs
@few
@given(n=st.integers(1, 3000), m=st.integers(1, 40), pad=ROW_PADS, ties=st.booleans(), seed=SEEDS)
def test_argmax(isa: str, n: int, m: int, pad: Any, ties: bool, seed: int) -> None:
    a = t.Arena()
    v = values(seed, (n, m, 1, 1))
    x = a.add(t.F32, (n, m), np.round(v) if ties else v, (0, 1, 2, 3), pad)
    dst = a.add(t.I32, (m,))
    got = t.run(a, t.make_op("ARGMAX", dst, [x]), dst, isa, 3)
    assert np.array_equal(got.reshape(-1), x.floats()[0, 0].argmax(axis=-1))


@runs
@t.threads
@few
@given(ne=SHAPES, order=st.permutations([1, 2, 3]), pad=ROW_PADS, down=st.booleans(), ties=st.booleans(), seed=SEEDS)
def test_argsort(isa: str, n_threads: int, ne: Any, order: Any, pad: Any, down: bool, ties: bool, seed: int) -> None:
    a = t.Arena()
    v = values(seed, ne)
    x = a.add(t.F32, ne, np.round(v) if ties else v, (0, *order), pad)  # 0 and -0 among them
    dst = a.add(t.I32, ne, None, (0, 2, 1, 3), (0, 1, 0, 0))
    got = t.run(a, t.make_op("ARGSORT", dst, [x], {0: int(down)}), dst, isa, n_threads)
    key = x.floats()
    assert np.array_equal(got, np.argsort(-key if down else key, axis=-1, kind="stable"))


@runs
@t.threads
@few
@given(
    n=st.one_of(st.integers(1, 200), st.sampled_from([1024, 4099, 30000])),
    rows=st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(1, 2)),
    part=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    ties=st.booleans(),
    rising=st.booleans(),
    seed=SEEDS,
)
def test_top_k(isa: str, n_threads: int, n: int, rows: Any, part: float, ties: bool, rising: bool, seed: int) -> None:
    k = max(1, int(part * n))
    v = values(seed, (n, *rows))
    if rising:  # every block beats the one before it: nothing can be skipped
        v.sort(axis=-1)
    if ties:
        v = np.round(v)
    v[..., n // 2] = -np.inf
    a = t.Arena(1 << 24)
    x, dst = a.add(t.F32, (n, *rows), v), a.add(t.I32, (k, *rows))
    got = t.run(a, t.make_op("TOP_K", dst, [x]), dst, isa, n_threads)
    assert np.array_equal(got, np.argsort(-x.floats(), axis=-1, kind="stable")[..., :k])


@runs
@few
@given(
    ne=st.tuples(*[st.integers(1, 9)] * 4),
    before=st.tuples(*[st.integers(0, 3)] * 4),
    after=st.tuples(*[st.integers(0, 3)] * 4),
    order=st.permutations([1, 2, 3]),
    wrap=st.booleans(),
    seed=SEEDS,
)
def test_pad(isa: str, ne: Any, before: Any, after: Any, order: Any, wrap: bool, seed: int) -> None:
    a = t.Arena()
    x = a.add(t.F32, ne, values(seed, ne), (0, *order))
    dst = a.add(t.F32, tuple(n + b + c for n, b, c in zip(ne, before, after, strict=True)))
    sides = list(zip(before, after, strict=True))
    params = {8: int(wrap)} | {2 * d + i: side for d, pair in enumerate(sides) for i, side in enumerate(pair)}
    got = t.run(a, t.make_op("PAD", dst, [x], params), dst, isa, 3)
    assert np.array_equal(got, np.pad(x.floats(), sides[::-1], mode="wrap" if wrap else "constant"))


@pytest.mark.parametrize("name", ["PAD", "ARGSORT", "TOP_K", "ARGMAX", "CUMSUM", "SUM"])
def test_shapes_that_do_not_fit_are_refused(name: str) -> None:
    a = t.Arena()
    x = a.add(t.F32, (64, 3, 2))
    for ne in [(65, 3, 2), (64, 4, 2), (64, 3, 1), (2,)]:
        dst = a.add(t.F32 if name in ("CUMSUM", "SUM", "PAD") else t.I32, ne)
        assert ggml_ext.lib.tb_op_check_shape(t.make_op(name, dst, [x]), ggml_ext.ffi.NULL) != 0, ne

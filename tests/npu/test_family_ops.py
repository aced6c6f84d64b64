"""Ops of model families beyond the plain transformer, on every kernel set, against numpy models of their meaning."""

from __future__ import annotations

from typing import Any

import npu_ops as t
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tilebeam import _ext as ggml_ext

SEEDS = st.integers(0, 2**31)
ORDERS = st.permutations([0, 1, 2, 3])
PADS = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.integers(0, 1))
SHAPES = st.tuples(
    st.one_of(st.integers(1, 70), st.sampled_from([1023, 1025, 2100])),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
)
ROW_ORDERS = st.permutations([1, 2, 3]).map(lambda o: [0, *o])
COPIED = st.sampled_from([t.F32, t.F16, t.BF16, t.I32])

runs, threads = t.runs, t.threads
few = settings(max_examples=25)


def numbers(seed: int, kind: int, ne: tuple[int, ...]) -> NDArray[Any]:
    """Random values `[ne3, ne2, ne1, ne0]`, for I32 of all bits."""
    rng = np.random.default_rng(seed)
    shape = tuple(reversed(ne))
    if kind == t.I32:
        return rng.integers(-(2**31), 2**31, shape, dtype=np.int32)
    return rng.standard_normal(shape).astype(np.float32)


def floats(seed: int, ne: tuple[int, ...]) -> NDArray[np.float32]:
    """Values of which rows are far from 0 on average."""
    rng = np.random.default_rng(seed)
    shape = tuple(reversed(ne))
    return (rng.standard_normal(shape) + 20 * rng.standard_normal((*shape[:-1], 1))).astype(np.float32)


@runs
@threads
@few
@given(ne=SHAPES, order=ROW_ORDERS, pad=PADS, seed=SEEDS, eps=st.sampled_from([1e-6, 1e-1]), in_place=st.booleans())
def test_norm(isa: str, n_threads: int, ne: Any, order: Any, pad: Any, seed: int, eps: float, in_place: bool) -> None:
    a = t.Arena()
    x = a.add(t.F32, ne, floats(seed, ne), order, pad)
    v = x.floats()
    dst = x if in_place else a.add(t.F32, ne, None, (0, 2, 1, 3), (1, 0, 0, 0))
    got = t.run(a, t.make_op("NORM", dst, [x], {0: eps}), dst, isa, n_threads)
    centred = v - v.mean(axis=-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    # The mean is rounded to float: of a mean of 60, by 4e-6, which counts where a row hardly varies.
    slack = 1e-5 / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    assert np.all(np.abs(got - want) <= 4e-6 * np.abs(want) + slack)


@runs
@threads
@few
@given(ne=SHAPES, order=ROW_ORDERS, pad=PADS, seed=SEEDS, eps=st.sampled_from([1e-12, 1e-6, 30.0]))
def test_l2_norm(isa: str, n_threads: int, ne: Any, order: Any, pad: Any, seed: int, eps: float) -> None:
    a = t.Arena()
    x = a.add(t.F32, ne, numbers(seed, t.F32, ne), order, pad)
    dst = a.add(t.F32, ne, None, (0, 2, 1, 3), (1, 0, 0, 0))
    got = t.run(a, t.make_op("L2_NORM", dst, [x], {0: eps}), dst, isa, n_threads)
    v = x.floats()
    want = v / np.maximum(np.sqrt((v * v).sum(axis=-1, keepdims=True)), eps)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-9)


@runs
@threads
@few
@given(
    kind=COPIED,
    ne=SHAPES,
    one=st.booleans(),
    repeats=st.tuples(*[st.sampled_from([1, 1, 2, 3])] * 4),
    orders=st.tuples(ORDERS, ORDERS),
    pads=st.tuples(PADS, PADS),
    seed=SEEDS,
)
def test_repeat(
    isa: str, n_threads: int, kind: int, ne: Any, one: bool, repeats: Any, orders: Any, pads: Any, seed: int
) -> None:
    small = (1, *ne[1:]) if one else ne
    large = tuple(n * r for n, r in zip(ne, repeats, strict=True))
    a = t.Arena(1 << 23)
    x = a.add(kind, small, numbers(seed, kind, small), orders[0], pads[0])
    dst = a.add(kind, large, None, orders[1], pads[1])
    got = t.run(a, t.make_op("REPEAT", dst, [x]), dst, isa, n_threads)
    want = np.tile(x.floats(), [n // m for n, m in zip(large[::-1], small[::-1], strict=True)])
    assert np.array_equal(got, want)


@runs
@threads
@few
@given(
    kind=COPIED,
    ne=SHAPES,
    dim=st.integers(0, 3),
    more=st.sampled_from([1, 2, 5, 1030]),
    orders=st.tuples(ORDERS, ORDERS, ORDERS),
    pads=st.tuples(PADS, PADS, PADS),
    seed=SEEDS,
)
def test_concat(
    isa: str, n_threads: int, kind: int, ne: Any, dim: int, more: int, orders: Any, pads: Any, seed: int
) -> None:
    more = more if dim == 0 else min(more, 5)
    second = tuple(more if d == dim else n for d, n in enumerate(ne))
    both = tuple(n + more if d == dim else n for d, n in enumerate(ne))
    a = t.Arena(1 << 23)
    x = a.add(kind, ne, numbers(seed, kind, ne), orders[0], pads[0])
    y = a.add(kind, second, numbers(seed + 1, kind, second), orders[1], pads[1])
    dst = a.add(kind, both, None, orders[2], pads[2])
    got = t.run(a, t.make_op("CONCAT", dst, [x, y], {0: dim}), dst, isa, n_threads)
    assert np.array_equal(got, np.concatenate([x.floats(), y.floats()], axis=3 - dim))


def test_concat_refuses_what_does_not_fit() -> None:
    a = t.Arena()
    x, y, dst = a.add(t.F32, (4, 3)), a.add(t.F32, (4, 2)), a.add(t.F32, (4, 5))
    half, rows = a.add(t.F16, (4, 2)), a.add(t.F32, (5, 2))
    refused = [([x, y], 0), ([x, y], -1), ([x, y], 4), ([x, half], 1), ([x, rows], 1), ([x, x], 1), ([x], 1)]
    for sources, dim in refused:
        op = t.make_op("CONCAT", dst, sources, {0: dim})
        assert ggml_ext.lib.tb_op_check_shape(op, ggml_ext.ffi.NULL) != 0, (sources, dim)
    assert ggml_ext.lib.tb_op_check_shape(t.make_op("CONCAT", dst, [x, y], {0: 1}), ggml_ext.ffi.NULL) == 0


def test_repeat_refuses_what_does_not_fit() -> None:
    a = t.Arena()
    x = a.add(t.F32, (4, 3))
    for dst in [a.add(t.F32, (4, 4)), a.add(t.F32, (6, 3)), a.add(t.F32, (2, 3)), a.add(t.F16, (4, 3))]:
        assert ggml_ext.lib.tb_op_check_shape(t.make_op("REPEAT", dst, [x]), ggml_ext.ffi.NULL) != 0, dst.ne

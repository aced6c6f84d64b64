"""Ops of model families beyond the plain transformer, on every kernel set, against numpy models of their meaning."""

from __future__ import annotations

import math
from typing import Any

import npu_ops as t
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tilebeam import _ext as ggml_ext

SEEDS, ORDERS, ROW_ORDERS, PADS, SHAPES = t.SEEDS, t.ORDERS, t.ROW_ORDERS, t.PADS, t.SHAPES
MROPE, VISION, IMROPE = (getattr(ggml_ext.lib, f"TB_ROPE_{name}") for name in ("MROPE", "VISION", "IMROPE"))
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
@given(
    name=st.sampled_from(["RMS_NORM", "NORM", "L2_NORM"]),
    ne=SHAPES,
    order=ROW_ORDERS,
    pad=PADS,
    seed=SEEDS,
    eps=st.sampled_from([1e-12, 1e-6, 1e-1, 30.0]),
    in_place=st.booleans(),
)
def test_norms(
    isa: str, n_threads: int, name: str, ne: Any, order: Any, pad: Any, seed: int, eps: float, in_place: bool
) -> None:
    a = t.Arena()
    x = a.add(t.F32, ne, floats(seed, ne), order, pad)
    v = x.floats()
    dst = x if in_place else a.add(t.F32, ne, None, (0, 2, 1, 3), (1, 0, 0, 0))
    got = t.run(a, t.make_op(name, dst, [x], {0: eps}), dst, isa, n_threads)
    slack: Any = 1e-9
    if name == "NORM":
        v = v - v.mean(axis=-1, keepdims=True)
        # The mean is rounded to float: of a mean of 60, by 4e-6, which counts where a row hardly varies.
        slack = 1e-5 / np.sqrt((v**2).mean(axis=-1, keepdims=True) + eps)
    length = np.maximum(np.sqrt((v * v).sum(axis=-1, keepdims=True)), eps)
    want = v / (length if name == "L2_NORM" else np.sqrt((v * v).mean(axis=-1, keepdims=True) + eps))
    assert np.all(np.abs(got - want) <= 4e-6 * np.abs(want) + slack)


@runs
@threads
@few
@example(t.F32, (2100, 4, 3, 2), False, (3,) * 4, ([0, 1, 2, 3],) * 2, ((3, 2, 2, 1),) * 2, 0)  # the largest
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
    a = t.Arena((1 << 20) + 4 * math.prod(n + pad for n, pad in zip(large, pads[1], strict=True)))
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


def test_copies_refuse_what_does_not_fit() -> None:
    a = t.Arena()
    x, y, dst = a.add(t.F32, (4, 3)), a.add(t.F32, (4, 2)), a.add(t.F32, (4, 5))
    half, rows = a.add(t.F16, (4, 2)), a.add(t.F32, (5, 2))
    assert t.shape_status("CONCAT", dst, [x, y], {0: 1}) == 0
    for sources, dim in [([x, y], 0), ([x, y], -1), ([x, y], 4), ([x, half], 1), ([x, rows], 1), ([x, x], 1), ([x], 1)]:
        assert t.shape_status("CONCAT", dst, sources, {0: dim}) != 0, (sources, dim)
    for other in [a.add(t.F32, (4, 4)), a.add(t.F32, (6, 3)), a.add(t.F32, (2, 3)), a.add(t.F16, (4, 3))]:
        assert t.shape_status("REPEAT", other, [x], {}) != 0, other.ne


def axes_of_pairs(mode: int, sections: list[int], pairs: int) -> list[tuple[int, int]]:
    """For each pair, which of the four positions it turns by, and the exponent of its frequency."""
    axes, steps = [], [0, 0, 0, 0]
    starts = [sum(sections[:k]) for k in range(4)]
    for i in range(pairs):
        at = i % sum(sections)
        if mode == VISION and at in starts:
            steps[starts.index(at)] = 0
        if mode == IMROPE:
            axis = at % 3 if at < 3 * sections[at % 3] else 3
        else:
            axis = max(k for k in range(4) if starts[k] <= at and sections[k] > 0)
        axes.append((axis, steps[axis]))
        steps = [n + 1 for n in steps]
    return axes


@runs
@threads
@few
@given(
    mode=st.sampled_from([MROPE, VISION, IMROPE]),
    kind=st.sampled_from([t.F32, t.F16]),
    sections=st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(lambda s: sum(s[:3]) > 0),
    spare=st.integers(-3, 3),
    tail=st.sampled_from([0, 2, 6]),
    counts=st.tuples(st.integers(1, 3), st.integers(1, 30), st.integers(1, 2)),
    image=st.booleans(),
    with_factors=st.booleans(),
    in_place=st.booleans(),
    seed=SEEDS,
)
def test_rope_sections(
    isa: str,
    n_threads: int,
    mode: int,
    kind: int,
    sections: list[int],
    spare: int,
    tail: int,
    counts: Any,
    image: bool,
    with_factors: bool,
    in_place: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    pairs = max(1, sum(sections) + spare)
    tail = max(tail, sum(sections) - 2 * pairs) if mode != VISION else 0
    assume(sum(sections) <= 2 * pairs + tail)
    ne = (2 * pairs + tail, *counts)
    n_dims = pairs if mode == VISION else 2 * pairs
    assume(n_dims % 2 == 0)
    tokens = counts[1]
    where = rng.integers(0, 300, (4, tokens), dtype=np.int32)
    if image:  # a grid of patches behind a text
        where = np.array(
            [[7] * tokens, [7 + i // 5 for i in range(tokens)], [7 + i % 5 for i in range(tokens)], [0] * tokens]
        )
    a = t.Arena()
    x = a.add(kind, ne, rng.standard_normal(ne[::-1]).astype(np.float32), (0, 2, 1, 3))
    positions = a.add(t.I32, (4 * tokens,), where.astype(np.int32))
    factors = a.add(t.F32, (pairs,), rng.uniform(0.8, 8, pairs).astype(np.float32)) if with_factors else None
    dst = x if in_place else a.add(kind, ne)
    v = x.floats()
    base = 10000.0
    want = v.copy()
    for i, (axis, step) in enumerate(axes_of_pairs(mode, sections, pairs)):
        angle = where[axis] * base ** (-2.0 * step / n_dims)
        angle = angle / factors.floats().reshape(-1)[i] if factors else angle
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        want[..., i] = v[..., i] * cos - v[..., i + pairs] * sin
        want[..., i + pairs] = v[..., i] * sin + v[..., i + pairs] * cos
    params: dict[int, int | float] = {1: n_dims, 2: mode, 4: 4096, 5: base, 6: 1.0, 7: 0.0, 8: 1.0, 9: 32.0, 10: 1.0}
    params |= {11 + i: n for i, n in enumerate(sections)}
    got = t.run(a, t.make_op("ROPE", dst, [x, positions, factors], params), dst, isa, n_threads)
    # angles of some hundred radians carry float32's rounding
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-3 if kind == t.F16 else 5e-4)


@pytest.mark.parametrize(
    "wrong",
    [{11: -1}, {11: 0, 12: 0, 13: 0}, {11: 17}, {11: 2**31 - 1, 12: 2**31 - 1}, {2: VISION}, {2: 9}, {2: 16}, {15: 2}],
)
def test_rope_sections_refuses_what_does_not_fit(wrong: dict[int, int]) -> None:
    a = t.Arena()
    x, positions = a.add(t.F32, (16, 2, 3)), a.add(t.I32, (12,))
    params: dict[int, int | float] = {1: 16, 2: MROPE, 5: 10000.0, 6: 1.0, 8: 1.0, 11: 2, 12: 3, 13: 3}

    def check(sources: list[t.Tensor], changes: dict[int, int]) -> int:
        op = t.make_op("ROPE", a.add(t.F32, (16, 2, 3)), sources, params | changes)
        return int(ggml_ext.lib.tb_op_check_shape(op, ggml_ext.ffi.NULL))

    assert check([x, positions], {}) == 0
    assert check([x, positions], {1: 8, 2: VISION}) == 0
    assert check([x, positions], wrong) != 0
    for n in (3, 11, 13):
        assert check([x, a.add(t.I32, (n,))], {}) != 0

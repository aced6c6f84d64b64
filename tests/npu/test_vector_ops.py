"""Every op but the matrix product and attention, on every kernel set, against float64 numpy models of its meaning."""

from __future__ import annotations

import math
from typing import Any

import npu_ops as t
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

SEEDS, ORDERS, ROW_ORDERS, PADS = t.SEEDS, t.ORDERS, t.ROW_ORDERS, t.PADS
SHAPES, FLOATS = t.SHAPES, t.FLOATS
BINARY: dict[str, np.ufunc] = {"MUL": np.multiply, "ADD": np.add, "SUB": np.subtract, "DIV": np.divide}
EPS = {t.F32: 2e-6, t.F16: 1e-3, t.BF16: 8e-3}  # allowed relative error of a result stored in the type

runs, threads = t.runs, t.threads
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def values(rng: np.random.Generator, ne: tuple[int, ...], scale: float = 1.0) -> NDArray[np.float32]:
    """Normal random values `[ne3, ne2, ne1, ne0]`."""
    return (rng.standard_normal(tuple(reversed(ne))) * scale).astype(np.float32)


def check(got: NDArray[Any], want: NDArray[Any], kind: int = t.F32, slack: float = 1.0) -> None:
    """Close to the reference, relative to each value and, less, to the largest."""
    top = float(np.max(np.abs(want))) if want.size else 0.0
    least = 2.0**-25 if kind == t.F16 else 1e-9  # half a step of FP16's smallest numbers
    np.testing.assert_allclose(got, want, rtol=EPS[kind] * slack, atol=EPS[kind] * slack * top * 0.1 + least)


@runs
@threads
@few
@given(
    name=st.sampled_from(list(BINARY)),
    ne=SHAPES,
    repeats=st.tuples(*[st.sampled_from([1, 1, 2, 3])] * 4),
    one=st.tuples(*[st.booleans()] * 4),
    kinds=st.tuples(FLOATS, FLOATS, FLOATS),
    orders=st.tuples(ORDERS, ORDERS, ORDERS),
    pads=st.tuples(PADS, PADS, PADS),
    seed=SEEDS,
)
def test_binary_broadcast(
    isa: str, n_threads: int, name: str, ne: Any, repeats: Any, one: Any, kinds: Any, orders: Any, pads: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    small = tuple(1 if o else n for n, o in zip(ne, one, strict=True))
    large = tuple(n * r for n, r in zip(small, repeats, strict=True))
    arena = t.Arena((1 << 20) + 12 * math.prod(n + 3 for n in large))
    a = arena.add(kinds[0], large, values(rng, large), orders[0], pads[0])
    divisors = np.abs(values(rng, small)) + np.float32(0.5) if name == "DIV" else values(rng, small)
    b = arena.add(kinds[1], small, divisors, orders[1], pads[1])
    dst = arena.add(kinds[2], large, None, orders[2], pads[2])
    got = t.run(arena, t.make_op(name, dst, [a, b]), dst, isa, n_threads)
    check(got, BINARY[name](a.floats(), np.tile(b.floats(), tuple(reversed(repeats)))), kinds[2])


@runs
@pytest.mark.parametrize("which", [0, 1])
def test_binary_in_place(isa: str, which: int) -> None:
    rng = np.random.default_rng(1)
    arena = t.Arena()
    ne = (1500, 3, 2, 1)
    a, b = arena.add(t.F32, ne, values(rng, ne)), arena.add(t.F32, ne, values(rng, ne))
    want = a.floats() + b.floats()
    dst = (a, b)[which]
    check(t.run(arena, t.make_op("ADD", dst, [a, b]), dst, isa, 2), want)


_erfc = np.vectorize(math.erfc)


def glu_model(kind: int, x: NDArray[Any], up: NDArray[Any], alpha: float, limit: float) -> NDArray[np.float64]:
    """ggml's gated units in float64."""
    with np.errstate(over="ignore"):
        match kind:
            case 0:
                return np.maximum(x, 0) * up
            case 1:
                return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x))) * up
            case 2:
                return x / (1 + np.exp(-x)) * up
            case 3:
                x, up = np.minimum(x, limit), np.clip(up, -limit, limit)
                return x / (1 + np.exp(-alpha * x)) * (up + 1)
            case 4:
                return 0.5 * x * _erfc(-x / math.sqrt(2)) * up
            case 5:
                return x / (1 + np.exp(-1.702 * x)) * up
            case _:
                x, up = np.minimum(x, limit), np.clip(up, -limit, limit)
                return x / (1 + np.exp(-x)) * up


@runs
@threads
@few
@given(
    kind=st.integers(0, 6),
    split=st.booleans(),
    swapped=st.booleans(),
    kind_type=FLOATS,
    ne=SHAPES,
    order=ROW_ORDERS,
    pad=PADS,
    seed=SEEDS,
    spread=st.sampled_from([1.0, 30.0, 200.0]),
)
def test_glu(
    isa: str,
    n_threads: int,
    kind: int,
    split: bool,
    swapped: bool,
    kind_type: int,
    ne: Any,
    order: Any,
    pad: Any,
    seed: int,
    spread: float,
) -> None:
    rng = np.random.default_rng(seed)
    a = t.Arena()
    alpha, limit = 1.702, 7.0
    spread = min(spread, 30.0) if kind_type == t.F16 else spread  # products stay below FP16's largest number
    dst = a.add(kind_type, ne, None, (0, 3, 1, 2), pad)
    if split:
        gate = a.add(kind_type, ne, values(rng, ne, spread), order, pad)
        up = a.add(kind_type, ne, values(rng, ne), (0, 1, 2, 3), pad)
        sources, g, u = [gate, up], gate.floats(), up.floats()
    else:
        wide = (2 * ne[0], *ne[1:])
        both = a.add(kind_type, wide, values(rng, wide, spread), order, pad)
        halves = np.split(both.floats(), 2, axis=-1)
        g, u = halves[::-1] if swapped else halves
        sources = [both]
    op = t.make_op("GLU", dst, sources, {0: kind, 1: int(swapped and not split), 2: alpha, 3: limit})
    got = t.run(a, op, dst, isa, n_threads)
    want = glu_model(kind, g, u, alpha, limit)
    check(got, want, kind_type, 3.0)
    if kind_type == t.F32 or np.abs(want).max() >= 2**-14:  # FP16 has fewer bits below that
        assert t.nmse(got, want) < (1e-11 if kind_type == t.F32 else 1e-4)


def rope_model(
    x: NDArray[Any],
    positions: NDArray[Any],
    n_dims: int,
    mode: int,
    offset: int,
    base: float,
    freq_scale: float,
    ext: float,
    attn: float,
    factors: NDArray[Any] | None,
    n_ctx: int,
    beta: tuple[float, float],
) -> NDArray[np.float64]:
    """ROPE with YaRN in float64. x [S, n, H, ne0]."""
    half = n_dims // 2
    i = np.arange(half)
    theta = positions[:, None] * base ** (-2.0 * i / n_dims)
    if factors is not None:
        theta = theta / factors[:half]
    angle = freq_scale * theta
    magnitude = attn
    if ext != 0:
        dims = [n_dims * math.log(n_ctx / (b * 2 * math.pi)) / (2 * math.log(base)) for b in beta]
        low, high = max(0, math.floor(dims[0])), min(n_dims - 1, math.ceil(dims[1]))
        mix = (1 - np.clip((i - low) / max(0.001, high - low), 0, 1)) * ext
        angle = angle * (1 - mix) + theta * mix
        magnitude *= 1 + 0.1 * math.log(1 / freq_scale)
    cos, sin = np.cos(angle)[:, None, :] * magnitude, np.sin(angle)[:, None, :] * magnitude
    out = x.copy()
    at = offset + (2 * i if mode == 0 else i)
    to = at + (1 if mode == 0 else half)
    out[..., at] = x[..., at] * cos - x[..., to] * sin
    out[..., to] = x[..., at] * sin + x[..., to] * cos
    return out


@runs
@threads
@few
@given(
    mode=st.sampled_from([0, 2]),
    kind=st.sampled_from([t.F32, t.F16]),
    pairs=st.integers(1, 40),
    tail=st.sampled_from([0, 0, 2, 14]),
    offset=st.sampled_from([0, 0, 4]),
    counts=st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 2)),
    order=ROW_ORDERS,
    pad=PADS,
    yarn=st.booleans(),
    with_factors=st.booleans(),
    in_place=st.booleans(),
    seed=SEEDS,
)
def test_rope(
    isa: str,
    n_threads: int,
    mode: int,
    kind: int,
    pairs: int,
    tail: int,
    offset: int,
    counts: Any,
    order: Any,
    pad: Any,
    yarn: bool,
    with_factors: bool,
    in_place: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    ne = (offset + 2 * pairs + tail, *counts)
    a = t.Arena()
    x = a.add(kind, ne, values(rng, ne), order, pad)
    positions = a.add(t.I32, (ne[2],), rng.integers(0, 4000, ne[2], dtype=np.int32))
    factors = a.add(t.F32, (pairs,), rng.uniform(0.8, 8, pairs).astype(np.float32)) if with_factors else None
    dst = x if in_place else a.add(kind, ne, None, (0, 2, 1, 3), (2, 0, 1, 0))
    base, freq_scale = (10000.0, 0.25) if yarn else (500000.0, 1.0)
    ext, attn, n_ctx, beta = (0.9, 1.1, 1024, (32.0, 1.0)) if yarn else (0.0, 1.0, 8192, (32.0, 1.0))
    want = rope_model(
        x.floats(),
        positions.floats().reshape(-1),
        2 * pairs,
        mode,
        offset,
        base,
        freq_scale,
        ext,
        attn,
        factors.floats().reshape(-1) if factors else None,
        n_ctx,
        beta,
    )
    params: dict[int, int | float] = {1: 2 * pairs, 2: mode, 4: n_ctx, 5: base, 6: freq_scale, 7: ext, 8: attn}
    params |= {9: beta[0], 10: beta[1], 15: offset}
    got = t.run(a, t.make_op("ROPE", dst, [x, positions, factors], params), dst, isa, n_threads)
    # angles of some thousand radians carry float32's rounding
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-3 if kind == t.F16 else 2e-3)
    assert t.nmse(got, want) < 1e-6


@runs
def test_rope_probe_copies(isa: str) -> None:
    """All-zero params, as a weight-placement probe sends them: nothing is rotated."""
    a = t.Arena()
    x = a.add(t.F32, (8, 2, 3), values(np.random.default_rng(0), (8, 2, 3)))
    positions = a.add(t.I32, (3,), np.arange(3, dtype=np.int32))
    dst = a.add(t.F32, (8, 2, 3))
    got = t.run(a, t.make_op("ROPE", dst, [x, positions]), dst, isa, 1)
    assert np.array_equal(got, x.floats())


def quantization_step(kind: int, x: NDArray[Any]) -> NDArray[np.float64]:
    """The most that a quantized value may differ from the true one, per element."""
    blocks = np.abs(x.reshape(*x.shape[:-1], -1, 32)).max(axis=-1, keepdims=True)
    # half a step, the clipped end of Q4_0 (a whole one), and the scale's own FP16 rounding
    step = blocks / 127 * 0.51 + blocks * 6e-4 if kind == t.Q8_0 else blocks / 8 * 1.01
    return np.broadcast_to(step, (*x.shape[:-1], x.shape[-1] // 32, 32)).reshape(x.shape) + 1e-7


@runs
@threads
@few
@given(
    source=st.sampled_from([t.F32, t.F16]),
    kind=st.sampled_from([t.F32, t.F16, t.BF16, t.Q8_0, t.Q4_0]),
    index_kind=st.sampled_from([t.I64, t.I32]),
    width=st.integers(1, 40),
    rows=st.integers(1, 9),
    batch=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 3])),
    divide=st.tuples(st.booleans(), st.booleans()),
    pad=PADS,
    seed=SEEDS,
)
def test_set_rows(
    isa: str,
    n_threads: int,
    source: int,
    kind: int,
    index_kind: int,
    width: int,
    rows: int,
    batch: Any,
    divide: Any,
    pad: Any,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    blocks = kind in t.BLOCK_BYTES
    n0 = 32 * (width % 5 + 1) if blocks else width
    b2, b3 = batch
    i1, i2 = (1 if divide[0] else b2), (1 if divide[1] else b3)
    a = t.Arena()
    x = a.add(source, (n0, rows, b2, b3), values(rng, (n0, rows, b2, b3)), (0, 2, 1, 3), pad)
    indices = np.stack([rng.permutation(rows + 4)[:rows] for _ in range(i1 * i2)]).reshape(1, i2, i1, rows)
    index = a.add(index_kind, (rows, i1, i2), indices, (0, 2, 1, 3), (0, 1, 0, 0))
    ne = (n0, rows + 4, b2, b3)
    start = t.random_blocks(rng, kind, tuple(reversed(ne))) if blocks else values(rng, ne)
    dst = a.add(kind, ne, start, (0, 2, 1, 3), (0, *pad[1:]))
    before = dst.floats()
    got = t.run(a, t.make_op("SET_ROWS", dst, [x, index]), dst, isa, n_threads)
    want = before.copy()
    allowed = np.zeros_like(before)
    v = x.floats()
    for j3 in range(b3):
        for j2 in range(b2):
            to = indices[0, j3 % i2, j2 % i1]
            want[j3, j2, to] = v[j3, j2]
            allowed[j3, j2, to] = quantization_step(kind, v[j3, j2]) if blocks else np.abs(v[j3, j2]) * EPS[kind] + 1e-7
    assert np.all(np.abs(got - want) <= allowed)


@runs
@threads
@few
@given(
    kind=st.sampled_from([t.F32, t.F16, t.BF16, t.I32, t.Q8_0, t.Q4_0, t.IQ4_NL]),
    width=st.integers(1, 40),
    rows=st.integers(1, 9),
    batch=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    pad=PADS,
    seed=SEEDS,
)
def test_get_rows(isa: str, n_threads: int, kind: int, width: int, rows: int, batch: Any, pad: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = kind in t.BLOCK_BYTES
    n0 = 32 * width if blocks else width
    ne = (n0, 6, *batch)
    if blocks:
        start: Any = t.random_blocks(rng, kind, tuple(reversed(ne)))
    elif kind == t.I32:
        start = rng.integers(-(2**31), 2**31, tuple(reversed(ne)), dtype=np.int32)
    else:
        start = values(rng, ne)
    a = t.Arena()
    x = a.add(kind, ne, start, (0, 2, 1, 3), (0, *pad[1:]))
    indices = rng.integers(0, 6, (1, batch[1], batch[0], rows), dtype=np.int32)
    index = a.add(t.I32, (rows, *batch), indices, (0, 2, 1, 3), (1, 1, 0, 0))
    dst = a.add(t.I32 if kind == t.I32 else t.F32, (n0, rows, *batch), None, (0, 1, 2, 3), pad)
    got = t.run(a, t.make_op("GET_ROWS", dst, [x, index]), dst, isa, n_threads)
    v = x.floats()
    want = np.stack([[v[j3, j2, indices[0, j3, j2]] for j2 in range(batch[0])] for j3 in range(batch[1])])
    np.testing.assert_allclose(got, want, rtol=1e-7)


@runs
@pytest.mark.parametrize("bad", [-1, 6, 2**31 - 1, -(2**31), 2**31, -(2**63)])
@pytest.mark.parametrize("name", ["GET_ROWS", "SET_ROWS"])
def test_bad_indices_are_refused(isa: str, name: str, bad: int) -> None:
    """Nothing behind the row before is written."""
    kind = t.I32 if -(2**31) <= bad < 2**31 else t.I64
    if kind == t.I64 and name == "GET_ROWS":
        pytest.skip("its indices have 32 bits")
    a = t.Arena()
    x = a.add(t.F32, (8, 6), values(np.random.default_rng(0), (8, 6, 1, 1)))
    index = a.add(kind, (2,), np.array([0, bad], np.int64))
    dst = a.add(t.F32, (8, 2)) if name == "GET_ROWS" else a.add(t.F16, (8, 6))
    source = a.add(t.F32, (8, 2), values(np.random.default_rng(1), (8, 2, 1, 1))) if name == "SET_ROWS" else x
    before = a.bytes.copy()
    status, why = t.try_run(a, t.make_op(name, dst, [source, index]), isa, 3)
    assert status == 3
    assert "index" in why
    first_row = dst.offset + np.arange(32 if name == "GET_ROWS" else 16)
    assert np.array_equal(np.delete(before, first_row), np.delete(a.bytes, first_row))


@runs
@threads
@few
@given(
    ne=SHAPES,
    mask_kind=st.sampled_from([None, t.F32, t.F16]),
    mask_broadcast=st.tuples(st.booleans(), st.booleans()),
    extra_rows=st.integers(0, 3),
    sinks=st.booleans(),
    max_bias=st.sampled_from([0.0, 8.0]),
    scale=st.sampled_from([1.0, 0.125, 20.0]),
    hide=st.sampled_from([0.0, 0.5, 1.0]),
    seed=SEEDS,
)
def test_soft_max(
    isa: str,
    n_threads: int,
    ne: Any,
    mask_kind: int | None,
    mask_broadcast: Any,
    extra_rows: int,
    sinks: bool,
    max_bias: float,
    scale: float,
    hide: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    a = t.Arena()
    x = a.add(t.F32, ne, values(rng, ne), (0, 2, 1, 3), (3, 0, 1, 0))
    heads = ne[2]
    mask = sink = None
    logits = x.floats() * scale
    if mask_kind is not None:
        m_ne = (ne[0], ne[1] + extra_rows, 1 if mask_broadcast[0] else ne[2], 1 if mask_broadcast[1] else ne[3])
        m = values(rng, m_ne)
        m[rng.random(m.shape) < hide] = -np.inf
        mask = a.add(mask_kind, m_ne, m, (0, 1, 2, 3), (1, 0, 0, 0))
        logits = logits + t.alibi_slopes(max_bias, heads)[None, :, None, None] * mask.floats()[:, :, : ne[1]]
    if sinks:
        sink = a.add(t.F32, (heads,), values(rng, (heads,), 3))
    dst = a.add(t.F32, ne, None, (0, 1, 2, 3), (0, 1, 0, 0))
    bias = max_bias if mask is not None else 0.0
    got = t.run(a, t.make_op("SOFT_MAX", dst, [x, mask, sink], {0: scale, 1: bias}), dst, isa, n_threads)
    extra = sink.floats().reshape(1, heads, 1, 1) if sink else np.full((1, heads, 1, 1), -np.inf)
    top = np.maximum(logits.max(axis=-1, keepdims=True), extra)
    with np.errstate(invalid="ignore"):
        e = np.exp(logits - top)
        want = e / (e.sum(axis=-1, keepdims=True) + np.exp(extra - top))
    want[np.broadcast_to(np.isneginf(top), want.shape)] = 0
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=1e-7)


@runs
@threads
@pytest.mark.parametrize("columns", [5, 64, 700])
def test_soft_max_of_a_row_with_a_nan(isa: str, n_threads: int, columns: int) -> None:
    """That row is NaN, as ggml makes it; the others are what they are without it."""
    a, x = t.Arena(), values(np.random.default_rng(3), (columns, 4, 1, 1))
    dst = a.add(t.F32, (columns, 4, 1, 1))
    x[0, 0, 1, columns - 1], x[0, 0, 2] = np.nan, np.nan
    got = t.run(a, t.make_op("SOFT_MAX", dst, [a.add(t.F32, x.shape[::-1], x)], {0: 1.0, 1: 0.0}), dst, isa, n_threads)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    np.testing.assert_allclose(got, e / e.sum(axis=-1, keepdims=True), rtol=3e-5, atol=1e-7)


@runs
@threads
@pytest.mark.parametrize("place", ["logits", "mask", "both"])
@pytest.mark.parametrize("max_bias", [0.0, 8.0])
def test_soft_max_in_the_place_of_an_operand(isa: str, n_threads: int, place: str, max_bias: float) -> None:
    """ggml's allocator puts the result over the logits or over a mask of their shape that nobody reads afterwards."""
    rng = np.random.default_rng(7)
    for columns in (5, 64, 700):
        ne = (columns, 5, 3, 2)
        a = t.Arena()
        x = a.add(t.F32, ne, values(rng, ne))
        mask = x if place == "both" else a.add(t.F32, ne, values(rng, ne, 3))
        logits = 0.5 * x.floats() + t.alibi_slopes(max_bias, 3)[None, :, None, None] * mask.floats()
        dst = x if place == "logits" else mask
        got = t.run(a, t.make_op("SOFT_MAX", dst, [x, mask], {0: 0.5, 1: max_bias}), dst, isa, n_threads)
        e = np.exp(logits - logits.max(axis=-1, keepdims=True))
        np.testing.assert_allclose(got, e / e.sum(axis=-1, keepdims=True), rtol=3e-5, atol=1e-7)


@runs
@threads
@few
@given(
    source=FLOATS,
    kind=st.sampled_from([t.F32, t.F16, t.BF16, t.Q8_0, t.Q4_0]),
    ne=SHAPES,
    orders=st.tuples(ORDERS, ORDERS),
    pads=st.tuples(PADS, PADS),
    reshape=st.booleans(),
    seed=SEEDS,
)
def test_cpy(
    isa: str, n_threads: int, source: int, kind: int, ne: Any, orders: Any, pads: Any, reshape: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    blocks = kind in t.BLOCK_BYTES
    if blocks:
        ne = (32 * (ne[0] % 40 + 1), *ne[1:])
    to = (ne[0], ne[3], ne[1], ne[2]) if blocks else (ne[2], ne[0], ne[3], ne[1])
    to = to if reshape else ne
    a = t.Arena()
    x = a.add(source, ne, values(rng, ne), orders[0], pads[0])
    order = [0, *[d for d in orders[1] if d != 0]] if blocks else orders[1]
    dst = a.add(kind, to, None, order, (0, *pads[1][1:]) if blocks else pads[1])
    got = t.run(a, t.make_op("CPY", dst, [x]), dst, isa, n_threads)
    want = x.floats().reshape(tuple(reversed(to)))
    if blocks:
        assert np.all(np.abs(got - want) <= quantization_step(kind, want))
    elif kind == source or kind == t.F32:
        assert np.array_equal(got, want)
    else:
        exact = t.from_bf16(t.to_bf16(want)) if kind == t.BF16 else want.astype(np.float32).astype(np.float16)
        assert np.array_equal(got, exact.astype(np.float64))


@runs
@few
@given(
    kind=st.sampled_from([t.Q8_0, t.Q4_0, t.IQ4_NL]),
    to=st.sampled_from([None, t.F32, t.F16, t.BF16]),
    ne=st.tuples(st.integers(1, 40).map(lambda n: 32 * n), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)),
    reshape=st.booleans(),
    seed=SEEDS,
)
def test_cpy_from_blocks(isa: str, kind: int, to: int | None, ne: Any, reshape: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = t.Arena()
    x = a.add(kind, ne, t.random_blocks(rng, kind, tuple(reversed(ne))), (0, 2, 1, 3), (0, 1, 0, 0))
    shape = (ne[0], ne[2], ne[3], ne[1]) if reshape else ne
    dst = a.add(kind if to is None else to, shape, None, (0, 3, 1, 2), (0, 1, 1, 0))
    got = t.run(a, t.make_op("CPY", dst, [x]), dst, isa, 2)
    want = x.floats().reshape(got.shape)
    check(got, want, t.F32 if to is None else to)


@runs
@pytest.mark.parametrize("kinds", [(t.I32, t.I32), (t.F32, t.I32), (t.I32, t.F32)])
def test_cpy_integers(isa: str, kinds: Any) -> None:
    a = t.Arena()
    rng = np.random.default_rng(3)
    if kinds[0] == t.I32:
        big = 2**31 if kinds[1] == t.I32 else 2**24
        start: Any = rng.integers(-big, big, (1, 3, 5, 77), dtype=np.int64).astype(np.int32)
    else:
        start = values(rng, (77, 5, 3, 1), 150)
    x = a.add(kinds[0], (77, 5, 3), start, (1, 0, 2, 3))
    dst = a.add(kinds[1], (77, 5, 3))
    got = t.run(a, t.make_op("CPY", dst, [x]), dst, isa, 3)
    assert np.array_equal(got, np.trunc(x.floats()))


@runs
@pytest.mark.parametrize("kind", [t.Q8_0, t.Q4_0])
def test_a_block_with_a_nan_is_no_number(isa: str, kind: int) -> None:
    """As a cache in F16 tells it: zeros would go on as if nothing had happened."""
    a = t.Arena()
    start = np.ones((1, 1, 2, 64), np.float32)
    start[0, 0, 0] = start[0, 0, 1, 3] = np.nan
    dst = a.add(kind, (64, 2))
    got = t.run(a, t.make_op("CPY", dst, [a.add(t.F32, (64, 2), start)]), dst, isa, 1)[0, 0]
    assert np.isnan(got[0]).all()
    assert np.isnan(got[1, :32]).all()
    assert np.abs(got[1, 32:] - 1).max() < 1e-2


@runs
def test_cpy_float_to_int_saturates(isa: str) -> None:
    a = t.Arena()
    x = a.add(t.F32, (6,), np.array([3e9, -3e9, np.nan, np.inf, -np.inf, -1.9], np.float32))
    dst = a.add(t.I32, (6,))
    t.run(a, t.make_op("CPY", dst, [x]), dst, isa, 1)
    assert dst.array.reshape(-1).tolist() == [2**31 - 1, -(2**31), 0, 2**31 - 1, -(2**31), -1]

"""Ops of sparse attention and of residual streams, on every kernel set, against numpy models of their meaning."""

from __future__ import annotations

from typing import Any

import npu_ops as t
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

SEEDS, PADS = t.SEEDS, t.PADS
ROW_PADS = PADS.map(lambda p: (0, *p[1:]))  # elements of a row without gaps

runs, threads = t.runs, t.threads
normal, close, check = t.normal, t.close, t.shape_status
few = settings(max_examples=20)


@runs
@threads
@few
@given(
    kind=st.sampled_from([t.F32, t.F16, t.BF16, t.Q8_0, t.Q4_0, t.IQ4_NL]),
    width=st.sampled_from([32, 64, 128]),
    heads=st.integers(1, 5),
    tokens=st.integers(1, 5),
    cells=st.sampled_from([1, 63, 64, 65, 200]),
    streams=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    pads=st.tuples(*[PADS] * 5),
    seed=SEEDS,
)
def test_lightning_indexer(
    isa: str,
    n_threads: int,
    kind: int,
    width: int,
    heads: int,
    tokens: int,
    cells: int,
    streams: Any,
    pads: Any,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    n, masks = streams
    a = t.Arena()
    q = a.add(t.F32, (width, heads, tokens, n), normal(rng, width, heads, tokens, n), pad=pads[0])
    is_block = kind in t.BLOCK_BYTES
    values = t.random_blocks(rng, kind, (n, cells, 1, width)) if is_block else normal(rng, width, 1, cells, n)
    k = a.add(kind, (width, 1, cells, n), values, pad=(0, *pads[1][1:]) if is_block else pads[1])
    w = a.add(t.F32, (heads, tokens, 1, n), normal(rng, heads, tokens, 1, n), pad=pads[2])
    hidden = np.where(rng.random((masks, 1, tokens, cells)) < 0.3, -np.inf, rng.standard_normal()).astype(np.float16)
    mask = a.add(t.F16, (cells, tokens, 1, masks), hidden, pad=pads[3])
    dst = a.add(t.F32, (cells, tokens, 1, n), pad=pads[4])
    got = t.run(a, t.make_op("LIGHTNING_INDEXER", dst, [q, k, w, mask]), dst, isa, n_threads)
    products = np.einsum("sthd,scd->stch", q.floats(), k.floats()[:, :, 0])
    want = np.einsum("stch,sth->stc", np.maximum(products, 0), w.floats()[:, 0])
    seen = np.broadcast_to(np.isfinite(hidden[:, 0]), want.shape)
    with np.errstate(invalid="ignore"):
        want = want + hidden[:, 0].astype(np.float64)
    assert np.array_equal(np.isneginf(got[:, 0]), ~seen)
    close(got[:, 0][seen], want[seen])


@runs
@threads
@few
@given(
    width=st.sampled_from([1, 31, 1024, 1100]),
    streams=st.integers(1, 5),
    tokens=st.integers(1, 6),
    gated=st.booleans(),
    scale=st.sampled_from([1.0, 0.25]),
    pads=st.tuples(ROW_PADS, PADS, ROW_PADS),
    seed=SEEDS,
)
def test_hc_pre(
    isa: str, n_threads: int, width: int, streams: int, tokens: int, gated: bool, scale: float, pads: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a = t.Arena()
    x = a.add(t.F32, (width, streams, tokens), normal(rng, width, streams, tokens), pad=pads[0])
    ne = (width, streams, tokens) if gated else (streams, tokens)
    w = a.add(t.F32, ne, normal(rng, *ne), (0, 1, 2, 3) if gated else (1, 0, 2, 3), pads[0] if gated else pads[1])
    dst = a.add(t.F32, (width, tokens), pad=pads[2])
    got = t.run(a, t.make_op("DSV4_HC_PRE", dst, [x, w], {0: scale, 1: int(gated)}), dst, isa, n_threads)
    weights = 1 / (1 + np.exp(-w.floats()[0])) if gated else w.floats()[0, 0][..., None]
    close(got[0, 0], scale * (x.floats()[0] * weights).sum(axis=1))


@runs
@threads
@few
@given(
    width=st.sampled_from([1, 31, 1024, 1100]),
    streams=st.integers(1, 5),
    tokens=st.integers(1, 6),
    mixed=st.booleans(),
    pads=st.tuples(ROW_PADS, ROW_PADS, PADS, PADS, ROW_PADS),
    seed=SEEDS,
)
def test_hc_post(
    isa: str, n_threads: int, width: int, streams: int, tokens: int, mixed: bool, pads: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a = t.Arena()
    x = a.add(t.F32, (width, tokens), normal(rng, width, tokens), pad=pads[0])
    residual = a.add(t.F32, (width, streams, tokens), normal(rng, width, streams, tokens), pad=pads[1])
    post = a.add(t.F32, (streams, tokens), normal(rng, streams, tokens), (1, 0, 2, 3), pads[2])
    ne = (streams, streams, tokens)
    comb = a.add(t.F32, ne, normal(rng, *ne), (2, 0, 1, 3), pads[3]) if mixed else None
    dst = a.add(t.F32, (width, streams, tokens), pad=pads[4])
    got = t.run(a, t.make_op("DSV4_HC_POST", dst, [x, residual, post, comb]), dst, isa, n_threads)[0]
    old = residual.floats()[0]
    kept = np.einsum("tfn,tfo->ton", old, comb.floats()[0]) if comb is not None else old
    close(got, x.floats()[0, 0][:, None, :] * post.floats()[0, 0][..., None] + kept)


@runs
@threads
@few
@given(tokens=st.integers(1, 20), rounds=st.sampled_from([1, 2, 20]), spare=st.integers(0, 3), pad=PADS, seed=SEEDS)
def test_hc_comb(isa: str, n_threads: int, tokens: int, rounds: int, spare: int, pad: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    eps = 1e-6
    a = t.Arena()
    mixes = a.add(t.F32, (24, tokens), normal(rng, 24, tokens), (1, 0, 2, 3), pad)
    scale = a.add(t.F32, (3 + spare,), normal(rng, 3 + spare))
    base = a.add(t.F32, (24,), normal(rng, 24))
    dst = a.add(t.F32, (4, 4, tokens), pad=(0, *pad[1:]))
    got = t.run(a, t.make_op("DSV4_HC_COMB", dst, [mixes, scale, base], {0: eps, 1: rounds}), dst, isa, n_threads)
    m = (mixes.floats()[0, 0] * scale.floats()[0, 0, 0, 2] + base.floats()[0, 0])[:, 8:].reshape(tokens, 4, 4)
    m = np.exp(m - m.max(axis=2, keepdims=True))
    m = m / m.sum(axis=2, keepdims=True) + eps
    for i in range(rounds):
        m = m / (m.sum(axis=2, keepdims=True) + eps) if i else m
        m = m / (m.sum(axis=1, keepdims=True) + eps)
    close(got[0], m)


@runs
@threads
@pytest.mark.parametrize(("n", "start", "step"), [(1, 3.0, 1.0), (5, -2.0, 0.5), (3000, 0.0, 1.0)])
def test_arange(isa: str, n_threads: int, n: int, start: float, step: float) -> None:
    a = t.Arena()
    dst = a.add(t.F32, (n,))
    got = t.run(a, t.make_op("ARANGE", dst, [], {0: start, 2: step}), dst, isa, n_threads)
    assert np.array_equal(got.reshape(-1), start + step * np.arange(n))


@runs
@threads
@few
@given(
    kind=st.sampled_from([t.F32, t.F16]),
    ne=st.tuples(st.sampled_from([1, 5, 37, 1100]), st.integers(1, 9), st.integers(1, 3), st.integers(1, 2)),
    sizes=st.tuples(st.sampled_from([1, 2, 3, 1030]), st.integers(1, 3)),
    steps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    is_mean=st.booleans(),
    pads=st.tuples(ROW_PADS, ROW_PADS),
    seed=SEEDS,
)
def test_pool_2d(
    isa: str,
    n_threads: int,
    kind: int,
    ne: Any,
    sizes: Any,
    steps: Any,
    padding: Any,
    is_mean: bool,
    pads: Any,
    seed: int,
) -> None:
    room = [n + 2 * p - k for n, p, k in zip(ne, padding, sizes, strict=False)]
    assume(min(room) >= 0)
    rng = np.random.default_rng(seed)
    a = t.Arena()
    x = a.add(kind, ne, normal(rng, *ne), pad=pads[0])
    out = [r // s + 1 for r, s in zip(room, steps, strict=True)]
    dst = a.add(t.F32, (*out, *ne[2:]), pad=pads[1])
    params = {0: int(is_mean), 1: sizes[0], 2: sizes[1], 3: steps[0], 4: steps[1], 5: padding[0], 6: padding[1]}
    got = t.run(a, t.make_op("POOL_2D", dst, [x], params), dst, isa, n_threads)
    edge = ((0, 0), (0, 0), (padding[1],) * 2, (padding[0],) * 2)
    outside = 0.0 if is_mean else float(-np.finfo(np.float32).max)
    v = np.pad(x.floats(), edge, constant_values=outside)
    for i in range(out[1]):
        for j in range(out[0]):
            top, left = i * steps[1], j * steps[0]
            part = v[:, :, top : top + sizes[1], left : left + sizes[0]]
            want = part.sum(axis=(2, 3)) / (sizes[0] * sizes[1]) if is_mean else part.max(axis=(2, 3))
            close(got[:, :, i, j], want)


@runs
@threads
@few
@given(mode=st.sampled_from([0, 2]), n_dims=st.sampled_from([8, 16]), ext=st.sampled_from([0.0, 1.0]), seed=SEEDS)
def test_rope_back_undoes_rope(isa: str, n_threads: int, mode: int, n_dims: int, ext: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = t.Arena()
    x = a.add(t.F32, (16, 3, 9), normal(rng, 16, 3, 9))
    positions = a.add(t.I32, (9,), rng.integers(0, 300, 9, dtype=np.int32))
    turned, back = a.add(t.F32, (16, 3, 9)), a.add(t.F32, (16, 3, 9))
    magnitude = 1 / (1 + 0.1 * np.log(4)) if ext else 1.0  # YaRN's own factor is not undone, but made 1 here
    params: dict[int, int | float] = {1: n_dims, 2: mode, 4: 4096, 5: 10000.0, 6: 0.25 if ext else 1.0, 7: ext}
    params |= {8: magnitude, 9: 32.0, 10: 1.0}
    t.run(a, t.make_op("ROPE", turned, [x, positions], params), turned, isa, n_threads)
    got = t.run(a, t.make_op("ROPE_BACK", back, [turned, positions], params), back, isa, n_threads)
    assert not np.allclose(turned.floats(), x.floats())
    np.testing.assert_allclose(got, x.floats(), rtol=0, atol=1e-5)


@runs
@threads
def test_concat_with_nothing(isa: str, n_threads: int) -> None:
    for dim in range(3):
        a = t.Arena()
        ne = [40, 3, 2]
        x = a.add(t.F32, ne, np.arange(240, dtype=np.float32))
        ne[dim] = 0
        none = a.add(t.F32, ne)
        for sources in ([x, none], [none, x]):
            dst = a.add(t.F32, (40, 3, 2))
            got = t.run(a, t.make_op("CONCAT", dst, sources, {0: dim}), dst, isa, n_threads)
            assert np.array_equal(got, x.floats())


@t.runs_here
def test_results_do_not_depend_on_the_number_of_threads(isa: str) -> None:
    def run(threads: int) -> list[NDArray[Any]]:
        rng = np.random.default_rng(3)
        a = t.Arena(1 << 24)

        def tensor(*ne: int) -> t.Tensor:
            return a.add(t.F32, ne, normal(rng, *ne))

        done = []
        mask = a.add(t.F16, (200, 7), normal(rng, 200, 7))
        scanned = [
            tensor(*ne) for ne in [(33, 5, 6, 2), (5, 6, 6, 2), (6, 6, 2), (33, 6), (33, 2, 6, 2), (33, 2, 6, 2)]
        ]
        states = a.add(t.I32, (2,), np.array([1, 0], np.int32))
        linear = [a.add(t.F32, (40, 3, 17, 2), normal(rng, 40, 3, 17, 2) / 8) for _ in range(6)]
        matrices = tensor(40, 40, 3, 2)
        net = [tensor(*ne) for ne in [(40, 3, 5, 2)] * 4 + [(1, 3, 5, 2), (40, 40, 3, 2)]]
        listed: list[tuple[str, list[t.Tensor | None], Any, dict[int, int | float]]] = [
            ("LIGHTNING_INDEXER", [tensor(64, 3, 7), tensor(64, 1, 200), tensor(3, 7), mask], (200, 7), {}),
            ("DSV4_HC_PRE", [tensor(1100, 4, 7), tensor(1100, 4, 7)], (1100, 7), {0: 0.5, 1: 1}),
            ("DSV4_HC_POST", [tensor(1100, 7), tensor(1100, 4, 7), tensor(4, 7), tensor(4, 4, 7)], (1100, 4, 7), {}),
            ("DSV4_HC_COMB", [tensor(24, 7), tensor(3), tensor(24)], (4, 4, 7), {0: 1e-6, 1: 5}),
            ("POOL_2D", [tensor(40, 9, 3)], (20, 4, 3), {0: 1, 1: 2, 2: 2, 3: 2, 4: 2, 5: 0, 6: 0}),
            ("SSM_CONV", [tensor(9, 70, 2), tensor(4, 70)], (70, 6, 2), {}),
            ("SSM_SCAN", [*scanned, states], (5 * 6 * 6 * 2 + 33 * 5 * 6 * 2,), {0: 1}),
            ("GATED_DELTA_NET", net, (120, 10 + 2 * 80), {0: 2}),
            ("RWKV_WKV6", [*linear[:3], tensor(40, 3), linear[4], matrices], (120, 34 + 80), {}),
            ("RWKV_WKV7", [*linear, matrices], (120, 34 + 80), {}),
            ("GATED_LINEAR_ATTN", [*linear[:4], matrices], (120, 34 + 80), {0: 0.5}),
        ]
        for name, sources, ne, params in listed:
            dst = a.add(t.F32, ne)
            t.run(a, t.make_op(name, dst, sources, params), dst, isa, threads)
            done.append(dst.array.view(np.uint32).copy())
        return done

    alone = run(1)
    for threads in (2, 5):
        assert all(np.array_equal(x, y) for x, y in zip(alone, run(threads), strict=True)), threads


def shapes_that_fit() -> dict[str, tuple[Any, list[Any], dict[int, int | float]]]:
    """Of each op: dst, operands, params."""
    return {
        "LIGHTNING_INDEXER": ((9, 5, 1, 4), [(8, 3, 5, 4), (8, 1, 9, 4), (3, 5, 1, 4), (9, 5, 1, 2)], {}),
        "DSV4_HC_PRE": ((9, 5), [(9, 3, 5), (3, 5)], {0: 1.0}),
        "DSV4_HC_POST": ((9, 3, 5), [(9, 5), (9, 3, 5), (3, 5), (3, 3, 5)], {}),
        "DSV4_HC_COMB": ((4, 4, 5), [(24, 5), (3,), (24,)], {0: 1e-6, 1: 2}),
        "ARANGE": ((9,), [], {2: 1.0}),
        "POOL_2D": ((4, 3, 2), [(9, 7, 2)], {1: 3, 2: 3, 3: 2, 4: 2}),
    }


def tensors(a: t.Arena, name: str, shapes: list[Any]) -> list[t.Tensor | None]:
    """Operands of these shapes; LIGHTNING_INDEXER's mask is F16."""
    is_half = [name == "LIGHTNING_INDEXER" and i == 3 for i in range(len(shapes))]
    return [a.add(t.F16 if half else t.F32, ne) for half, ne in zip(is_half, shapes, strict=True)]


@pytest.mark.parametrize("name", shapes_that_fit())
def test_what_does_not_fit_is_refused(name: str) -> None:
    ne, shapes, params = shapes_that_fit()[name]
    a = t.Arena()
    assert check(name, a.add(t.F32, ne), tensors(a, name, shapes), params) == 0
    full = [*ne, *[1] * (4 - len(ne))]
    for d in range(4):
        if name == "ARANGE" and d == 0:
            continue  # any length
        more = [n + (i == d) for i, n in enumerate(full)]
        assert check(name, a.add(t.F32, more), tensors(a, name, shapes), params) != 0, d
    for i, shape in enumerate(shapes):
        assert i == 3 or check(name, a.add(t.F32, ne), tensors(a, name, shapes[:i]), params) != 0, i
        for d in range(4):
            if name == "DSV4_HC_COMB" and (i, d) == (1, 0):
                continue  # scales may be more
            other = [*shape, *[1] * (4 - len(shape))]
            other[d] += 2 if name == "POOL_2D" or (i, d) == (3, 3) else 1
            wrong = [*shapes[:i], other, *shapes[i + 1 :]]
            if name == "LIGHTNING_INDEXER" and (i, d) == (3, 3):
                assert check(name, a.add(t.F32, ne), tensors(a, name, wrong), params) == 0  # a mask for each stream
                other[d] = 3
            assert check(name, a.add(t.F32, ne), tensors(a, name, wrong), params) != 0, (i, d)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("DSV4_HC_PRE", {1: 2}),
        ("DSV4_HC_PRE", {1: 1}),
        ("DSV4_HC_COMB", {1: 0}),
        ("DSV4_HC_COMB", {1: -1}),
        ("DSV4_HC_COMB", {1: 2**31 - 1}),
        ("POOL_2D", {0: 2}),
        ("POOL_2D", {1: 0}),
        ("POOL_2D", {3: 0}),
        ("POOL_2D", {3: -1}),
        ("POOL_2D", {5: -1}),
        ("POOL_2D", {1: 2**31 - 1}),
        ("POOL_2D", {5: 2**31 - 1}),
    ],
)
def test_wrong_params_are_refused(name: str, wrong: dict[int, int | float]) -> None:
    ne, shapes, params = shapes_that_fit()[name]
    a = t.Arena()
    assert check(name, a.add(t.F32, ne), tensors(a, name, shapes), params | wrong) != 0

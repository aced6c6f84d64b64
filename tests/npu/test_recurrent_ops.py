"""Ops of recurrent states and of experts' biases, on every kernel set, against numpy models of their meaning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import npu_ops as t
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tilebeam import _ext as ggml_ext

SEEDS, ROW_ORDERS, PADS = t.SEEDS, t.ROW_ORDERS, t.PADS

runs, threads = t.runs, t.threads
normal, close, check = t.normal, t.close, t.shape_status
few = settings(max_examples=20)
TOKENS = st.sampled_from([1, 2, 3, 9, 16, 21])  # from 16 on, rows of a state side by side
LINEAR = {"RWKV_WKV6": 5, "RWKV_WKV7": 6, "GATED_LINEAR_ATTN": 4}  # and which operand their states are


@runs
@threads
@few
@given(
    ne=st.tuples(st.sampled_from([1, 31, 64, 1100]), st.integers(1, 4), st.integers(1, 9)),
    experts=st.integers(1, 9),
    order=ROW_ORDERS,
    pads=st.tuples(PADS, PADS, PADS),
    in_place=st.booleans(),
    seed=SEEDS,
)
def test_add_id(
    isa: str, n_threads: int, ne: Any, experts: int, order: Any, pads: Any, in_place: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a = t.Arena()
    x = a.add(t.F32, ne, normal(rng, *ne), order, pads[0])
    biases = a.add(t.F32, (ne[0], experts), normal(rng, ne[0], experts), (0, 1, 2, 3), pads[1])
    chosen = rng.integers(0, experts, ne[:0:-1]).astype(np.int32)
    ids = a.add(t.I32, ne[1:], chosen, (0, 1, 2, 3), pads[2])
    v = x.floats()
    dst = x if in_place else a.add(t.F32, ne)
    got = t.run(a, t.make_op("ADD_ID", dst, [x, biases, ids]), dst, isa, n_threads)
    want = v.astype(np.float32) + biases.array[0, 0][chosen].reshape(v.shape)
    assert np.array_equal(got, want)


@runs
@threads
@few
@given(
    width=st.integers(1, 5),
    channels=st.sampled_from([1, 15, 16, 33, 70]),
    tokens=st.sampled_from([1, 2, 9, 64, 65, 130]),
    sequences=st.integers(1, 3),
    pads=st.tuples(PADS, PADS, PADS),
    seed=SEEDS,
)
def test_ssm_conv(
    isa: str, n_threads: int, width: int, channels: int, tokens: int, sequences: int, pads: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    length = width - 1 + tokens
    a = t.Arena()
    x = a.add(t.F32, (length, channels, sequences), normal(rng, length, channels, sequences), pad=pads[0])
    w = a.add(t.F32, (width, channels), normal(rng, width, channels), pad=pads[1])
    dst = a.add(t.F32, (channels, tokens, sequences), pad=pads[2])
    got = t.run(a, t.make_op("SSM_CONV", dst, [x, w]), dst, isa, n_threads)
    v, u = x.floats()[0], w.floats()[0, 0]
    want = sum(v[:, :, i : i + tokens] * u[None, :, i, None] for i in range(width))
    close(got[0], np.swapaxes(want, 1, 2))


def scanned(
    s: NDArray[Any], x: NDArray[Any], dt: NDArray[Any], a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]
) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """Of one sequence: results `[T, H, D]` and the state `[H, D, N]` after each token."""
    results, states = [], []
    repeats = x.shape[1] // b.shape[1]
    for token in range(x.shape[0]):
        step = np.logaddexp(0, dt[token])
        taken = np.repeat(b[token], repeats, axis=0)[:, None, :] * (x[token] * step[:, None])[:, :, None]
        s = s * np.exp(step[:, None] * a)[:, None, :] + taken
        results.append((s * np.repeat(c[token], repeats, axis=0)[:, None, :]).sum(axis=-1))
        states.append(s)
    return np.stack(results), states


@runs
@threads
@few
@given(
    n=st.sampled_from([1, 16, 37, 128]),
    rows=st.sampled_from([1, 3, 64]),
    heads=st.sampled_from([1, 4, 18]),
    groups=st.sampled_from([1, 2]),
    tokens=TOKENS,
    sequences=st.integers(1, 3),
    kept=st.sampled_from([1, 1, 2, 5]),
    own_decay=st.booleans(),
    pads=st.tuples(*[PADS] * 6),
    seed=SEEDS,
)
def test_ssm_scan(
    isa: str,
    n_threads: int,
    n: int,
    rows: int,
    heads: int,
    groups: int,
    tokens: int,
    sequences: int,
    kept: int,
    own_decay: bool,
    pads: Any,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    groups = min(groups, heads)
    kept = 1 if own_decay else kept
    known = sequences + 2
    a = t.Arena(1 << 24)
    s = a.add(t.F32, (n, rows, heads, known), normal(rng, n, rows, heads, known), pad=pads[0])
    x = a.add(t.F32, (rows, heads, tokens, sequences), normal(rng, rows, heads, tokens, sequences), pad=pads[1])
    dt = a.add(t.F32, (heads, tokens, sequences), 12 * normal(rng, heads, tokens, sequences), pad=pads[2])
    decays = -np.abs(normal(rng, n if own_decay else 1, heads)) / 8
    decay = a.add(t.F32, (n if own_decay else 1, heads), decays, pad=pads[3])
    b, c = (
        a.add(t.F32, (n, groups, tokens, sequences), normal(rng, n, groups, tokens, sequences), pad=pads[4 + i])
        for i in range(2)
    )
    index = rng.permutation(known)[:sequences].astype(np.int32)
    ids = a.add(t.I32, (sequences,), index)
    n_results, n_state = rows * heads * tokens * sequences, n * rows * heads
    dst = a.add(t.F32, (n_results + kept * n_state * sequences,))
    op = t.make_op("SSM_SCAN", dst, [s, x, dt, decay, b, c, ids], {0: kept})
    got = t.run(a, op, dst, isa, n_threads).reshape(-1)
    states = got[n_results:].reshape(kept, sequences, heads, rows, n)
    for q in range(sequences):
        v = [y.floats()[q] for y in (x, b, c)]
        want, after = scanned(s.floats()[index[q]], v[0], dt.floats()[0, q], decay.floats()[0, 0], v[1], v[2])
        close(got[:n_results].reshape(sequences, tokens, heads, rows)[q], want)
        for back in range(min(kept, tokens)):
            close(states[back, q], after[tokens - 1 - back])
    assert np.isnan(states[tokens:]).all()  # states before the first token are not written


@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("name", ["ADD_ID", "SSM_SCAN"])
def test_indices_out_of_range_are_found(name: str, bad: int) -> None:
    a = t.Arena()
    shapes = [(4, 2, 3), (4, 3)]
    if name == "SSM_SCAN":
        shapes = [(4, 3, 2, 3), (3, 2, 1, 2), (2, 1, 2), (1, 2), (4, 1, 1, 2), (4, 1, 1, 2)]
    sources = [a.add(t.F32, ne, np.zeros(ne[::-1], np.float32)) for ne in shapes]
    ids = [0, 1, 2, 0, bad, 1] if name == "ADD_ID" else [0, bad]
    sources.append(a.add(t.I32, (2, len(ids) // 2) if name == "ADD_ID" else (2,), np.array(ids, np.int32)))
    dst = a.add(t.F32, shapes[0] if name == "ADD_ID" else (12 + 48,))
    status, why = t.try_run(a, t.make_op(name, dst, sources, {0: 1}), t.ISAS[0], 2)
    assert status != 0
    assert name in why


def stateful(
    name: str, n: int, tokens: int, picked: Any, known: int, seed: int
) -> tuple[t.Arena, list[t.Tensor], t.Tensor, int]:
    """An op's operands that begin with states `picked` of `known` ones, room for its results, and which operand the
    states are."""
    rng = np.random.default_rng(seed)
    sequences = len(picked)
    shapes: list[Any] = [(n, tokens, sequences), (4, n), (3, n, known)]
    at, size = 2, shapes[0]
    if name == "SSM_SCAN":
        inputs = (n, 1, tokens, sequences)
        shapes = [(n, 9, 2, known), (9, 2, tokens, sequences), (2, tokens, sequences), (1, 2), inputs, inputs]
        at, size = 0, (18 * tokens * sequences + 18 * n * sequences,)
    elif name == "GATED_DELTA_NET":
        heads, factors = (n, 2, tokens, sequences), (1, 2, tokens, sequences)
        shapes = [heads, heads, heads, factors, factors, (n, n, 2, known)]
        at, size = 5, (2 * n, tokens * sequences + n * sequences)
    elif name in LINEAR:
        at, size = LINEAR[name], (2 * n, tokens * sequences + n * sequences)
        shapes = [(n, 2, tokens, sequences)] * at + [(n, n, 2, known)]
        shapes[3] = (n, 2) if name == "RWKV_WKV6" else shapes[3]
    a = t.Arena(1 << 23)
    sources = [a.add(t.F32, ne, -np.abs(normal(rng, *ne)) / 4) for ne in shapes]
    sources.append(a.add(t.I32, (sequences,), np.array(picked, np.int32)))
    return a, sources, a.add(t.F32, size), at


@runs
@threads
@few
@given(
    name=st.sampled_from(["SSM_CONV", "SSM_SCAN", "GATED_DELTA_NET", *LINEAR]),
    n=st.sampled_from([1, 16, 37, 130]),
    tokens=TOKENS,
    picked=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    first=st.integers(0, 3),
    seed=SEEDS,
)
def test_new_states_replace_old_ones(
    isa: str, n_threads: int, name: str, n: int, tokens: int, picked: list[int], first: int, seed: int
) -> None:
    """.. wherever they are: sequences may begin with each other's states, or with the same one. The same bits as of
    states that were gathered first."""
    count = len(picked)
    a, sources, dst, at = stateful(name, n, tokens, picked, 7, seed)
    old = sources[at].array.copy()
    status, why = t.try_run(a, t.make_op(name, dst, sources, {0: 1, 1: first + 1}), isa, n_threads)
    assert status == 0, why
    got, new = dst.array.reshape(-1), sources[at].array.copy()
    kept = [i for i in range(7) if not first <= i < first + count]
    states = 1 if name == "SSM_CONV" else 0  # their dimension
    assert np.array_equal(np.take(new, kept, states), np.take(old, kept, states))

    b, gathered, want, _ = stateful(name, n, tokens, list(range(count)), count, seed)
    for mine, theirs in zip(gathered[:-1], sources[:-1], strict=True):
        if mine.ne == theirs.ne:
            mine.array[...] = theirs.array
    chosen = np.take(old, picked, states)
    if name == "SSM_CONV":
        x = np.swapaxes(sources[0].array[0], 1, 2)
        both = np.concatenate([chosen[0], x], axis=-1)
        rows = b.add(t.F32, both.shape[::-1], both)
        last = both[None, ..., -3:]
        t.run(b, t.make_op(name, want, [rows, gathered[1]]), want, isa, n_threads)
        assert np.array_equal(got, want.array.reshape(-1))
    else:
        gathered[at].array[...] = chosen
        t.run(b, t.make_op(name, want, gathered, {0: 1}), want, isa, n_threads)
        flat = want.array.reshape(-1)
        last = flat[-chosen.size :].reshape(chosen.shape)
        assert np.array_equal(got[: -chosen.size], flat[: -chosen.size])
    assert np.array_equal(np.take(new, range(first, first + count), states), last)


@pytest.mark.parametrize("name", ["SSM_CONV", "SSM_SCAN", "GATED_DELTA_NET", *LINEAR])
def test_states_in_place_are_checked(name: str) -> None:
    def status(first: int, picked: list[int], kept: int = 1, onto: bool = False, flat: bool = False) -> int:
        a, sources, dst, at = stateful(name, 8, 2, picked, 4, 0)
        dst = replace(dst, offset=sources[at].offset) if onto else dst
        if flat:
            sources[at] = replace(sources[at], nb=(4, 4, *sources[at].nb[2:]))
        return t.try_run(a, t.make_op(name, dst, sources, {0: kept, 1: first + 1}), t.ISAS[0], 2)[0]

    assert status(2, [0, 3]) == 0
    for first, picked in [(3, [0, 3]), (-2, [0, 3]), (2**31 - 2, [0, 3]), (2, [0, 4]), (2, [0, -1])]:
        assert status(first, picked) != 0, (first, picked)
    assert name not in ("SSM_SCAN", "GATED_DELTA_NET") or status(2, [0, 3], kept=2) != 0
    assert status(2, [0, 3], onto=True) != 0
    assert status(2, [0, 3], flat=True) != 0


def test_ssm_refuses_what_does_not_fit() -> None:
    a = t.Arena()
    x, w, dst = a.add(t.F32, (6, 8, 2)), a.add(t.F32, (4, 8)), a.add(t.F32, (8, 3, 2))
    assert check("SSM_CONV", dst, [x, w], {}) == 0
    for ne in [(8, 4, 2), (7, 3, 2), (8, 3, 1), (8, 3, 2, 2)]:
        assert check("SSM_CONV", a.add(t.F32, ne), [x, w], {}) != 0
    assert check("SSM_CONV", dst, [x, a.add(t.F32, (4, 7))], {}) != 0
    good = [(4, 3, 2, 5), (3, 2, 6, 2), (2, 6, 2), (1, 2), (4, 1, 6, 2), (4, 1, 6, 2)]
    ids = a.add(t.I32, (2,))

    def scan(shapes: list[Any], size: int, kept: int, indices: t.Tensor = ids) -> int:
        return check("SSM_SCAN", a.add(t.F32, (size,)), [*(a.add(t.F32, ne) for ne in shapes), indices], {0: kept})

    assert scan(good, 72 + 48, 1) == scan(good, 72 + 96, 2) == 0
    assert scan([*good[:3], (4, 2), *good[4:]], 72 + 48, 1) == 0
    assert scan([*good[:3], (4, 2), *good[4:]], 72 + 96, 2) != 0
    for size, kept in [(72 + 47, 1), (72 + 48, 2), (72 + 48, 0), (72 + 48, -1), (72, 2**31 - 1)]:
        assert scan(good, size, kept) != 0
    wrong = [(0, (4, 2, 2, 5)), (0, (4, 3, 1, 5)), (1, (3, 2, 5, 2)), (2, (2, 6, 1)), (3, (2, 2)), (3, (1, 1))]
    for i, ne in [*wrong, (4, (4, 1, 6, 1)), (5, (4, 2, 6, 2))]:
        assert scan([*good[:i], ne, *good[i + 1 :]], 72 + 48, 1) != 0, (i, ne)
    assert scan([*good[:4], (4, 3, 6, 2), (4, 3, 6, 2)], 72 + 48, 1) != 0  # two heads in three groups
    assert scan(good, 72 + 48, 1, a.add(t.I32, (3,))) != 0


@runs
@threads
@few
@given(
    n=st.sampled_from([1, 7, 16, 17, 64, 128]),
    heads=st.sampled_from([1, 2, 6]),
    fewer=st.sampled_from([1, 2]),
    tokens=TOKENS,
    sequences=st.integers(1, 3),
    kept=st.sampled_from([1, 1, 2, 5]),
    own_decay=st.booleans(),
    order=ROW_ORDERS,
    pads=st.tuples(*[PADS] * 6),
    seed=SEEDS,
)
def test_gated_delta_net(
    isa: str,
    n_threads: int,
    n: int,
    heads: int,
    fewer: int,
    tokens: int,
    sequences: int,
    kept: int,
    own_decay: bool,
    order: Any,
    pads: Any,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    key_heads = heads // fewer if heads % fewer == 0 else heads
    a = t.Arena(1 << 24)
    keys, values = (n, key_heads, tokens, sequences), (n, heads, tokens, sequences)
    q, k = (a.add(t.F32, keys, normal(rng, *keys) / np.sqrt(n), order, pads[i]) for i in range(2))
    v = a.add(t.F32, values, normal(rng, *values), order, pads[2])
    ne = (n if own_decay else 1, *values[1:])
    decay = a.add(t.F32, ne, -np.abs(normal(rng, *ne)), pad=pads[3])
    beta = a.add(t.F32, (1, *values[1:]), np.abs(normal(rng, 1, *values[1:])).clip(0, 1), pad=pads[4])
    state = a.add(t.F32, (n, n, heads, sequences), normal(rng, n, n, heads, sequences), pad=pads[5])
    dst = a.add(t.F32, (n * heads, tokens * sequences + kept * n * sequences))
    op = t.make_op("GATED_DELTA_NET", dst, [q, k, v, decay, beta, state], {0: kept})
    got = t.run(a, op, dst, isa, n_threads).reshape(-1)
    n_results = n * heads * tokens * sequences
    results = got[:n_results].reshape(sequences, tokens, heads, n)
    states = got[n_results:].reshape(kept, sequences, heads, n, n)
    queries, key, value, logs, rate = (y.floats() for y in (q, k, v, decay, beta))
    s = state.floats()  # [sequences, heads, of the value, of the key]
    for token in range(tokens):
        turn = np.arange(heads) % key_heads
        s = s * np.exp(logs[:, token])[:, :, None, :]
        change = (value[:, token] - np.einsum("shvk,shk->shv", s, key[:, token, turn])) * rate[:, token]
        s = s + change[..., None] * key[:, token, turn][:, :, None, :]
        close(results[:, token], np.einsum("shvk,shk->shv", s, queries[:, token, turn]) / np.sqrt(n))
        if tokens - 1 - token < kept:
            close(states[tokens - 1 - token], s)
    assert np.isnan(states[tokens:]).all()  # states before the first token are not written


def test_gated_delta_net_refuses_what_does_not_fit() -> None:
    a = t.Arena(1 << 24)
    good: list[Any] = [(8, 2, 3, 1), (8, 4, 3, 2), (8, 4, 3, 2), (1, 4, 3, 2), (1, 4, 3, 2), (8, 8, 4, 2)]

    def net(shapes: list[Any], ne: Any, kept: int = 1) -> int:
        return check("GATED_DELTA_NET", a.add(t.F32, ne), [a.add(t.F32, n) for n in shapes], {0: kept})

    assert net(good, (32, 6 + 16)) == net(good, (32, 6 + 32), 2) == 0
    assert net([*good[:3], (8, 4, 3, 2), *good[4:]], (32, 6 + 16)) == 0
    for ne, kept in [((32, 21), 1), ((32, 22), 2), ((32, 22), 0), ((32, 22), -1), ((16, 44), 1), ((32, 11, 2), 1)]:
        assert net(good, ne, kept) != 0, (ne, kept)
    wrong: list[Any] = [(0, (8, 3, 3, 1)), (0, (7, 2, 3, 1)), (1, (8, 4, 2, 2)), (1, (8, 4, 3, 3)), (2, (8, 3, 3, 2))]
    for i, ne in [
        *wrong,
        (3, (2, 4, 3, 2)),
        (3, (1, 2, 3, 2)),
        (4, (8, 4, 3, 2)),
        (5, (8, 8, 4, 1)),
        (5, (8, 4, 4, 2)),
    ]:
        assert net([*good[:i], ne, *good[i + 1 :]], (32, 22)) != 0, (i, ne)
    strided = a.add(t.F32, (32, 22), pad=(1, 0, 0, 0))
    assert check("GATED_DELTA_NET", strided, [a.add(t.F32, n) for n in good], {0: 1}) != 0
    wide = [(600, 1, 1, 1)] * 3 + [(1, 1, 1, 1)] * 2 + [(600, 600, 1, 1)]
    assert net(wide, (600, 601)) != 0


def attended(name: str, x: list[NDArray[Any]], s: NDArray[Any], scale: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Of operands `[S, T, H, n]` and states `[S, H, n, n]`: results, and the last states."""
    results = []
    for now in zip(*(np.moveaxis(np.broadcast_to(y, x[0].shape), 1, 0) for y in x), strict=True):
        if name == "RWKV_WKV7":
            r, decay, k, v, a, b = now
            seen = np.einsum("shvk,shk->shv", s, a)
            s = s * decay[:, :, None] + v[..., None] * k[:, :, None] + seen[..., None] * b[:, :, None]
            results.append(np.einsum("shvk,shk->shv", s, r))
            continue
        k, v, q, *first, decay = now
        taken = k[..., None] * v[:, :, None]
        new = s * decay[..., None] + taken
        read = s + first[0][..., None] * taken if first else scale * new
        results.append(np.einsum("shkv,shk->shv", read, q))
        s = new
    return np.stack(results, 1), s


@runs
@threads
@few
@given(
    name=st.sampled_from(list(LINEAR)),
    n=st.sampled_from([1, 7, 16, 33, 64, 100]),
    heads=st.sampled_from([1, 2, 12]),
    tokens=TOKENS,
    sequences=st.integers(1, 3),
    order=ROW_ORDERS,
    pads=st.tuples(PADS, PADS),
    seed=SEEDS,
)
def test_linear_attention(
    isa: str,
    n_threads: int,
    name: str,
    n: int,
    heads: int,
    tokens: int,
    sequences: int,
    order: Any,
    pads: Any,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    a = t.Arena(1 << 24)
    ne = (n, heads, tokens, sequences)
    sources = [a.add(t.F32, ne, normal(rng, *ne) / np.sqrt(n), order, pads[i % 2]) for i in range(LINEAR[name])]
    decay = sources[{"RWKV_WKV6": 4, "RWKV_WKV7": 1, "GATED_LINEAR_ATTN": 3}[name]]
    decay.array[...] = rng.random(decay.array.shape)
    if name == "RWKV_WKV6":
        sources[3] = a.add(t.F32, (n, heads), normal(rng, n, heads))
    states = a.add(t.F32, (n, n, heads, sequences), normal(rng, n, n, heads, sequences))
    dst = a.add(t.F32, (n * heads, tokens * sequences + n * sequences))
    op = t.make_op(name, dst, [*sources, states], {0: 0.25})
    got = t.run(a, op, dst, isa, n_threads).reshape(-1)
    want, last = attended(name, [y.floats() for y in sources], states.floats(), 0.25)
    close(got[: want.size].reshape(want.shape), want)
    close(got[want.size :].reshape(last.shape), last)


@runs
@pytest.mark.parametrize("name", LINEAR)
def test_states_are_the_same_bits_however_tokens_come(isa: str, name: str) -> None:
    """At once or in parts, by any number of threads; RWKV_WKV7, whose rows else go side by side, if told to."""
    rng = np.random.default_rng(5)
    n, heads, tokens = 37, 2, 21
    inputs = [normal(rng, n, heads, tokens) / 8 for _ in range(LINEAR[name])]
    first, start = normal(rng, n, heads), normal(rng, n, n, heads)

    def read(parts: list[int], n_threads: int) -> tuple[NDArray[Any], NDArray[Any]]:
        state, results, begin = start, [], 0
        for count in parts:
            a = t.Arena(1 << 20)
            sources = [a.add(t.F32, (n, heads, count), x[begin : begin + count]) for x in inputs]
            if name == "RWKV_WKV6":
                sources[3] = a.add(t.F32, (n, heads), first)
            dst = a.add(t.F32, (n * heads, count + n))
            op = t.make_op(name, dst, [*sources, a.add(t.F32, (n, n, heads), state)], {0: 0.5})
            op.flags = ggml_ext.lib.TB_FLAG_DETERMINISTIC if name == "RWKV_WKV7" else 0
            got = t.run(a, op, dst, isa, n_threads).reshape(-1)
            results.append(got[: count * n * heads])
            state, begin = got[count * n * heads :].reshape(start.shape).astype(np.float32), begin + count
        return np.concatenate(results), state

    whole = read([tokens], 1)
    for parts, n_threads in [([1] * tokens, 1), ([16, 5], 3), ([20, 1], 2)]:
        assert all(map(np.array_equal, read(parts, n_threads), whole)), parts


@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention_refuses_what_does_not_fit(name: str) -> None:
    a = t.Arena(1 << 24)
    good: list[Any] = [(8, 4, 3, 2)] * LINEAR[name] + [(8, 8, 4, 2)]
    good[3] = (8, 4) if name == "RWKV_WKV6" else good[3]

    def fits(shapes: list[Any], ne: Any = (32, 6 + 16)) -> bool:
        return check(name, a.add(t.F32, ne), [a.add(t.F32, s) for s in shapes], {0: 1.0}) == 0

    assert fits(good)
    for ne in [(32, 21), (32, 23), (16, 44), (32, 11, 2)]:
        assert not fits(good, ne), ne
    for i, shape in enumerate(good):
        for d in range(len(shape)):
            assert not fits([*good[:i], (*shape[:d], shape[d] + 1, *shape[d + 1 :]), *good[i + 1 :]]), (i, d)
        assert not fits([*good[:i], *good[i + 1 :]]), i
    strided = [*(a.add(t.F32, s) for s in good[:-1]), a.add(t.F32, good[-1], pad=(1, 0, 0, 0))]
    assert check(name, a.add(t.F32, (32, 22)), strided, {0: 1.0}) != 0
    wide = [(600, 1) if name == "RWKV_WKV6" and i == 3 else (600, 1, 1, 1) for i in range(LINEAR[name])]
    assert not fits([*wide, (600, 600, 1, 1)], (600, 601))

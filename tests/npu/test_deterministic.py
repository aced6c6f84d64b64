"""TB_FLAG_DETERMINISTIC, every kernel set: a row's bits do not depend on the rows beside it, on threads, nor on where
the cells that it sees lie. What stands without the flag: integer products, norms and gates, which have no other way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import k_quants
import npu_ops as t
import numpy as np
import numpy.typing as npt
import pytest
from gemm_reference import (
    BLOCKS,
    COLUMN,
    FLOATS,
    MORE_BLOCKS,
    MORE_COLUMN,
    TILE,
    Weights,
    device,
    make_weights,
    run_experts,
)
from tilebeam._ext import Type, lib
from tilebeam.native import executor as _npu

Array = npt.NDArray[Any]

FLAG = int(lib.TB_FLAG_DETERMINISTIC)
ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 128)
TYPES = (*FLOATS, *BLOCKS, *COLUMN, *TILE, *MORE_BLOCKS, *MORE_COLUMN, *k_quants.K_BLOCKS, *k_quants.K_PANELS)
isas = t.runs_with_hvx


def weights(type: Type, k: int, n: int, seed: int) -> Weights:
    make = k_quants.make_weights if type in (*k_quants.K_BLOCKS, *k_quants.K_PANELS) else make_weights
    return make(type, k, n, np.random.default_rng(seed))


def same_bits(got: Array, want: Array) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


# ---- products


@isas
@pytest.mark.parametrize("type", TYPES, ids=lambda x: x.label)
def test_a_row_of_a_product(isa: str, type: Type) -> None:
    k = 1280 if type in FLOATS else 768
    w = weights(type, k, 70, 1)
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((max(ROWS), k)) * np.exp2(rng.integers(-9, 9, (max(ROWS), 1)))).astype(np.float32)
    few = isa in t.HEXAGON  # which takes seconds for many rows
    alone = np.concatenate([device(isa, 1).product(w, x[i : i + 1], flags=FLAG) for i in range(3 if few else 8)])
    for n in (2, 33) if few else ROWS:
        first = min(n, len(alone))
        same_bits(device(isa, 1).product(w, x[:n], flags=FLAG)[:first], alone[:first])
        # the same rows elsewhere in the batch, among others, on other threads
        turned = np.roll(x[:n], n // 2, axis=0)
        same_bits(np.roll(device(isa, 3).product(w, turned, flags=FLAG), -(n // 2), axis=0)[:first], alone[:first])


@pytest.mark.skipif("avx512bf16" not in _npu.isas(), reason="needs a CPU with AVX512-BF16")
def test_a_row_of_a_product_is_not_rounded_to_bf16() -> None:
    test_a_row_of_a_product("avx512bf16", Type.BF16)


@isas
@pytest.mark.parametrize("type", [Type.F16, Type.Q4_0_COL, Type.Q8_0_TILE, Type.NVFP4_COL, Type.Q4_K_COL, Type.Q6_K])
def test_a_row_of_a_product_with_experts(isa: str, type: Type) -> None:
    """However many rows each expert has."""
    experts, used, tokens, k = 4, 2, 40, 512
    w = [weights(type, k, 48, seed) for seed in range(experts)]
    rng = np.random.default_rng(3)
    x = rng.standard_normal((tokens, k)).astype(np.float32)
    chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :used]
    chosen[:, 0] = np.where(rng.random(tokens) < 0.8, 0, chosen[:, 0])  # one expert has most of the rows
    chosen[:, 1] = np.where(chosen[:, 1] == chosen[:, 0], (chosen[:, 0] + 1) % experts, chosen[:, 1])

    def routed(threads: int, rows: slice) -> Array:
        status, why, out, _ = run_experts(w, x[rows, None], chosen[rows].astype(np.int32), isa, threads, flags=FLAG)
        assert status == 0, why
        return out

    alone = np.concatenate([routed(1, slice(i, i + 1)) for i in range(6)])
    for n in (6, 17, tokens):
        same_bits(routed(3, slice(n))[:6], alone)


@t.runs
@pytest.mark.parametrize("name", ["RMS_NORM", "NORM", "L2_NORM", "GLU"])
def test_rows_of_norms_and_gates(isa: str, name: str) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((max(ROWS), 2 * 197)).astype(np.float32)

    def run(rows: Array, threads: int) -> Array:
        a = t.Arena()
        n = rows.shape[1] // 2 if name == "GLU" else rows.shape[1]
        src, dst = a.add(t.F32, rows.shape[::-1], rows), a.add(t.F32, (n, len(rows)))
        params: dict[int, int | float] = {0: 2, 1: 0} if name == "GLU" else {0: 1e-6}
        status, why = t.try_run(a, t.make_op(name, dst, [src], params), isa, threads)
        assert status == 0, why
        return dst.array[0, 0].copy()

    whole = run(x, 3)
    for n in ROWS:
        same_bits(run(x[:n], 1), whole[:n])


# ---- attention


@dataclass
class Rows:
    """Query rows and the cells of a cache: q `[T, H, dk]`, k and v `[cells, Hkv, d]`, and which token sees which cell,
    with what added, `[T, cells]`."""

    q: Array
    k: Array
    v: Array
    seen: Array
    bias: Array

    def run(self, isa: str, threads: int, *, kinds: tuple[int, int], dv: int, options: dict[str, Any]) -> Array:
        """What attention gives: `[T, H, dv]`."""
        a = t.Arena(1 << 24)
        tokens, heads, dk = self.q.shape
        cells = len(self.k)
        q = a.add(t.F32, (dk, tokens, heads), self.q.swapaxes(0, 1), (0, 2, 1, 3))
        k = a.add(kinds[0], (dk, cells, self.k.shape[1]), self.k.swapaxes(0, 1), (0, 2, 1, 3))
        v = a.add(kinds[1], (dv, cells, self.v.shape[1]), self.v.swapaxes(0, 1), (0, 2, 1, 3))
        mask = a.add(t.F16, (cells, tokens), np.where(self.seen, self.bias, -np.inf))
        sinks = a.add(t.F32, (heads,), np.linspace(-1, 2, heads)) if options.get("sinks") else None
        dst = a.add(t.F32, (dv, heads, tokens))
        params = {0: dk**-0.5, 1: options.get("max_bias", 0.0), 2: options.get("softcap", 0.0)}
        op = t.make_op("FLASH_ATTN", dst, [q, k, v, mask, sinks], params)
        op.flags = options.get("flags", FLAG)
        status, why = t.try_run(a, op, isa, threads)
        assert status == 0, why
        return dst.array[0].copy()


CASES: dict[str, tuple[tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "f16": ((t.F16, t.F16), (64, 64), {}),
    "q8_0": ((t.Q8_0, t.Q8_0), (64, 96), {}),
    "f32": ((t.F32, t.F32), (40, 72), {}),
    "q4_0": ((t.Q4_0, t.BF16), (128, 128), {"sinks": True}),
    "alibi": ((t.F16, t.F16), (128, 64), {"max_bias": 8.0}),
    "softcap": ((t.F16, t.Q8_0), (32, 32), {"softcap": 5.0, "sinks": True}),
    "wide": ((t.F16, t.F16), (256, 65), {}),
}


def sequence(rng: np.random.Generator, kinds: tuple[int, int], dims: tuple[int, int], tokens: int, cells: int) -> Rows:
    """A sequence with one cell for each position, of which its last `tokens` are asked about."""
    kv_heads, group = 2, 3

    def cache(kind: int, dim: int) -> Array:
        shape = (cells, kv_heads, dim)
        return t.random_blocks(rng, kind, shape) if kind in t.BLOCK_BYTES else rng.standard_normal(shape)

    return Rows(
        rng.standard_normal((tokens, kv_heads * group, dims[0])),
        cache(kinds[0], dims[0]),
        cache(kinds[1], dims[1]),
        np.tril(np.ones((tokens, cells), bool), cells - tokens),
        -np.abs(np.arange(cells) - np.arange(cells - tokens, cells)[:, None]),
    )


def beside(rng: np.random.Generator, sequences: list[Rows], gaps: int) -> tuple[Rows, list[slice]]:
    """The sequences in one cache, their cells and `gaps` that nobody sees shuffled; and where the rows of each are."""
    cells = sum(len(s.k) for s in sequences) + gaps
    places = rng.permutation(cells)
    tokens = sum(len(s.q) for s in sequences)
    first = sequences[0]
    joined = Rows(
        np.concatenate([s.q for s in sequences]),
        rng.permutation(np.resize(first.k, (cells, *first.k.shape[1:]))),
        rng.permutation(np.resize(first.v, (cells, *first.v.shape[1:]))),
        np.zeros((tokens, cells), bool),
        np.zeros((tokens, cells)),
    )
    slices, row, used = [], 0, 0
    for s in sequences:
        own, rows = places[used : used + len(s.k)], slice(row, row + len(s.q))
        joined.k[own], joined.v[own] = s.k, s.v
        joined.seen[rows, own], joined.bias[rows, own] = s.seen, s.bias
        slices.append(rows)
        row, used = row + len(s.q), used + len(s.k)
    return joined, slices


@isas
@pytest.mark.parametrize("case", CASES)
def test_attention_of_a_sequence(isa: str, case: str) -> None:
    """Alone, token by token, beside others whose cells lie between its own, on any number of threads: the same bits."""
    kinds, dims, options = CASES[case]
    how: dict[str, Any] = {"kinds": kinds, "dv": dims[1], "options": options}
    rng = np.random.default_rng(5)
    own = sequence(rng, kinds, dims, 5, 150)
    want = own.run(isa, 1, **how)
    assert np.all(np.isfinite(want))
    for i in range(len(own.q)):
        token = Rows(own.q[i : i + 1], own.k, own.v, own.seen[i : i + 1], own.bias[i : i + 1])
        same_bits(token.run(isa, 3, **how), want[i : i + 1])
    few = isa in t.HEXAGON
    for tokens, others, gaps in ((1, 3, 7), (9, 1, 200)) if few else ((1, 15, 7), (30, 3, 200), (1, 0, 900)):
        company = [sequence(rng, kinds, dims, tokens, int(rng.integers(tokens, 200))) for _ in range(others)]
        joined, places = beside(rng, [*company, own], gaps)
        for threads in (3,) if few else (1, 3):
            same_bits(joined.run(isa, threads, **how)[places[-1]], want)


@t.runs_here
def test_without_the_flag_company_changes_bits(isa: str) -> None:
    """What the flag is for: were this not so, the tests above would show nothing."""
    rng = np.random.default_rng(5)
    kinds, dims, _ = CASES["f16"]
    own = sequence(rng, kinds, dims, 1, 150)
    joined, places = beside(rng, [sequence(rng, kinds, dims, 1, 120), own], 9)
    how: dict[str, Any] = {"kinds": kinds, "dv": dims[1], "options": {"flags": 0}}
    assert not np.array_equal(joined.run(isa, 1, **how)[places[-1]], own.run(isa, 1, **how))


@isas
def test_cells_of_any_order_give_what_exact_sums_give(isa: str) -> None:
    """Values of very different sizes that cancel: exact sums, rounded once, do not see the order; float32's would."""
    rng = np.random.default_rng(6)
    cells = 1000
    v = np.concatenate([rng.uniform(-1, 1, cells - 2) * 1e-3, [6e4, -6e4]])[:, None, None]
    zeros = np.zeros((1, cells))
    rows = Rows(np.zeros((1, 1, 32)), np.zeros((cells, 1, 32)), np.repeat(v, 32, axis=2), zeros == 0, zeros)
    how: dict[str, Any] = {"kinds": (t.F16, t.F16), "dv": 32, "options": {}}
    got = rows.run(isa, 1, **how)[0, 0]
    want = v.astype(np.float16).astype(np.float64).mean()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)
    turned = Rows(rows.q, rows.k, rng.permutation(rows.v), rows.seen, rows.bias)
    same_bits(turned.run(isa, 3, **how)[0, 0], got)


def test_goes_with_no_other_numerics() -> None:
    a = t.Arena()
    q, k = a.add(t.F32, (32, 1, 1)), a.add(t.F16, (32, 4, 1))
    attention = t.make_op("FLASH_ATTN", a.add(t.F32, (32, 1, 1)), [q, k, k, None, None], {0: 1.0})
    product = t.make_op("MUL_MAT", a.add(t.F32, (4, 1)), [k, q])
    norm = t.make_op("RMS_NORM", a.add(t.F32, (32, 1)), [q], {0: 1e-6})
    for op, others in (
        (attention, (lib.TB_FLAG_FP16, lib.TB_FLAG_EXACT_EXP)),
        (product, (lib.TB_FLAG_FP16,)),
    ):
        op.flags = FLAG
        assert lib.tb_op_check_shape(op, t.ggml_ext.ffi.NULL) == 0
        for other in others:
            op.flags = FLAG | other
            assert lib.tb_op_check_shape(op, t.ggml_ext.ffi.NULL) != 0
    norm.flags = FLAG
    assert lib.tb_op_check_shape(norm, t.ggml_ext.ffi.NULL) != 0

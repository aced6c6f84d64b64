"""FLASH_ATTN on every kernel set: against float64 softmax, and against a numpy model of its own FP16 exponent."""

from __future__ import annotations

import math
from typing import Any

import npu_ops as t
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tilebeam._ext import lib
from tilebeam.native import executor as _npu

# How attention computes: FP16 exponents by the table, all in float32, the paper's Algorithm 1, or float32 with sums of
# no order.
NUMERICS: dict[str, int] = {
    "table": 0,
    "exact": lib.TB_FLAG_EXACT_EXP,
    "fp16": lib.TB_FLAG_FP16,
    "deterministic": lib.TB_FLAG_DETERMINISTIC,
}
every_numerics = pytest.mark.parametrize("numerics", NUMERICS)
runs, threads = t.runs_with_hvx, t.threads
few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SEEDS = st.integers(0, 2**31)


def spread_heads(x: NDArray[Any], heads: int, streams: int) -> NDArray[Any]:
    """Repeat KV heads and streams as their users share them."""
    return np.repeat(np.repeat(x, heads // x.shape[1], axis=1), streams // x.shape[0], axis=0)


def halves(x: NDArray[Any]) -> NDArray[np.float64]:
    """Rounded to FP16."""
    return x.astype(np.float32).astype(np.float16).astype(np.float64)


def scores(
    q: NDArray[Any],
    k: NDArray[Any],
    mask: NDArray[Any] | None,
    scale: float,
    max_bias: float,
    softcap: float,
    *,
    fp16: bool = False,
) -> NDArray[np.float64]:
    """Logits `[S, H, n, n_kv]` in float64. q `[S, H, n, d]`, k `[S', Hkv, n_kv, d]`, mask `[S'', H', n, n_kv]`.

    `fp16`: operands and products rounded to FP16.
    """
    streams, heads = q.shape[:2]
    q, k = (halves(q * scale), halves(k)) if fp16 else (q * scale, k)
    s = q @ spread_heads(k, heads, streams).swapaxes(-1, -2)
    s = halves(s) if fp16 else s
    if softcap:
        s = softcap * np.tanh(s / softcap)
    if mask is not None:
        full = np.tile(mask, (streams // mask.shape[0], heads // mask.shape[1], 1, 1))
        s = s + t.alibi_slopes(max_bias, heads)[None, :, None, None] * full
    return s


def attention(s: NDArray[Any], v: NDArray[Any], sinks: NDArray[Any] | None, fp16: bool) -> NDArray[np.float64]:
    """Softmax and weighted sum: exact, or with FP16 exponents and FP16 powers relative to the row's maximum."""
    streams, heads = s.shape[:2]
    top = s.max(axis=-1, keepdims=True)
    base = np.where(np.isneginf(top), 0, top)
    if fp16:
        with np.errstate(over="ignore"):
            exponent = ((s - base).astype(np.float32) * np.float32(math.log2(math.e))).astype(np.float16)
        p = np.exp2(exponent.astype(np.float64)).astype(np.float16).astype(np.float64)
    else:
        p = np.exp(s - base)
    total = p.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.reshape(1, heads, 1, 1) - base)
        seen = ~np.isneginf(top)
        total = np.where(seen, total, 1)
    out = p @ spread_heads(v, heads, streams) / np.where(total == 0, 1, total)
    return out.swapaxes(1, 2)  # dst [S, n, H, dv]


class Case:
    """One attention op laid out in an arena, and its reference values."""

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        dk: int = 64,
        dv: int = 64,
        kv_heads: int = 2,
        group: int = 2,
        tokens: int = 3,
        n_kv: int = 100,
        streams: int = 1,
        kv_streams: int | None = None,
        kinds: tuple[int, int] = (t.F16, t.F16),
        visible: NDArray[np.bool_] | None = None,  # [streams or 1, heads or 1, tokens, n_kv]
        biased: bool = False,
        max_bias: float = 0.0,
        softcap: float = 0.0,
        sinks: bool = False,
        permuted: bool = False,
        spread: float = 1.0,
        mask_rows: int = 0,
        numerics: str = "table",
        arena: int = 1 << 23,
    ) -> None:
        """`arena`: bytes of memory at least; what the tensors of these shapes take is added."""
        heads = kv_heads * group
        kv_streams = kv_streams or streams
        rows = heads * (tokens + 3) + kv_heads * (n_kv + 3)
        a = self.arena = t.Arena(arena + 4 * streams * rows * (dk + dv))
        order = (0, 2, 1, 3) if permuted else (0, 1, 2, 3)
        pad = (0, 3, 0, 0) if permuted else (0, 0, 0, 0)
        q = a.add(t.F32, (dk, tokens, heads, streams), rng.standard_normal((streams, heads, tokens, dk)), order, pad)

        def cells(kind: int, dim: int) -> t.Tensor:
            shape = (kv_streams, kv_heads, n_kv, dim)
            x: Any = rng.standard_normal(shape) * spread
            if kind in t.BLOCK_BYTES:
                x = t.random_blocks(rng, kind, shape)
            return a.add(kind, (dim, n_kv, kv_heads, kv_streams), x, order, pad)

        k, v = cells(kinds[0], dk), cells(kinds[1], dv)
        mask = sink = None
        m = None
        if visible is not None:
            bias = rng.uniform(-4, 0, visible.shape) if biased else np.zeros(visible.shape)
            m = np.where(visible, bias.astype(np.float16), np.float16(-np.inf))
            rows = np.full((*m.shape[:2], m.shape[2] + mask_rows, n_kv), np.float16(-np.inf))
            rows[:, :, : m.shape[2]] = m
            mask = a.add(t.F16, (n_kv, rows.shape[2], m.shape[1], m.shape[0]), rows, (0, 1, 2, 3), (5, 0, 0, 0))
        if sinks:
            sink = a.add(t.F32, (heads,), rng.standard_normal(heads) * 3)
        self.dst = a.add(t.F32, (dv, heads, tokens, streams), None, (0, 1, 2, 3), (0, 0, 1, 0))
        scale = 1 / math.sqrt(dk)
        params: dict[int, int | float] = {0: scale, 1: max_bias, 2: softcap}
        self.op = t.make_op("FLASH_ATTN", self.dst, [q, k, v, mask, sink], params)
        self.op.flags = NUMERICS[numerics]
        self._numerics = numerics
        self._scores = scores(q.floats(), k.floats(), m, scale, max_bias, softcap)
        self._scores16 = scores(q.floats(), k.floats(), m, scale, max_bias, softcap, fp16=True)
        self._v = v.floats()
        self._sinks = sink.floats() if sink else None

    def reference(self, numerics: str) -> NDArray[np.float64]:
        """The result in float64 ("exact"), with the FP16 exponent's numerics, or with operands and scores in FP16,
        too ("fp16")."""
        if numerics == "fp16":
            return attention(self._scores16, halves(self._v), self._sinks, fp16=True)
        return attention(self._scores, self._v, self._sinks, fp16=numerics == "table")

    def check(self, isa: str, n_threads: int) -> None:
        """Run and compare. The FP16 models round relative to the final maximum, the kernel to the running one, so the
        two differ by roundings of the exponent, which a float64 softmax sees as well. With FP16 numerics what is
        accumulated is rounded with every tile, which the model leaves out."""
        got = t.run(self.arena, self.op, self.dst, isa, n_threads)
        exact, model = self.reference("exact"), self.reference(self._numerics)
        assert np.all(np.isfinite(got))
        size = float(np.sqrt(np.mean(exact**2))) + 1e-6
        if self._numerics in ("exact", "deterministic"):
            assert np.max(np.abs(got - exact)) < 1e-4 * size
            return
        assert np.sqrt(np.mean((got - exact) ** 2)) < (4e-3 if self._numerics == "fp16" else 2e-3) * size
        assert np.sqrt(np.mean((got - model) ** 2)) < 2e-3 * size
        assert np.max(np.abs(got - exact)) < 2e-2 * size


@runs
@threads
@few
@given(
    dims=st.sampled_from(
        [(64, 64), (40, 40), (72, 72), (80, 80), (96, 64), (128, 128), (192, 128), (65, 67), (1, 3), (576, 512)]
    ),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7, 16, 40]),
    tokens=st.sampled_from([1, 2, 3, 17, 33]),
    n_kv=st.sampled_from([1, 2, 31, 63, 64, 65, 113, 256, 300]),
    streams=st.integers(1, 2),
    masked=st.sampled_from([None, 0.0, 0.1, 0.5, 0.9, 1.0]),
    mask_per=st.tuples(st.booleans(), st.booleans()),
    biased=st.booleans(),
    max_bias=st.sampled_from([0.0, 8.0]),
    softcap=st.sampled_from([0.0, 5.0]),
    sinks=st.booleans(),
    permuted=st.booleans(),
    numerics=st.sampled_from(list(NUMERICS)),
    seed=SEEDS,
)
def test_shapes_and_options(
    isa: str,
    n_threads: int,
    dims: Any,
    kv_heads: int,
    group: int,
    tokens: int,
    n_kv: int,
    streams: int,
    masked: float | None,
    mask_per: Any,
    biased: bool,
    max_bias: float,
    softcap: float,
    sinks: bool,
    permuted: bool,
    numerics: str,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    visible = None
    if masked is not None:
        shape = (streams if mask_per[0] else 1, kv_heads * group if mask_per[1] else 1, tokens, n_kv)
        visible = rng.random(shape) >= masked
    Case(
        rng,
        dk=dims[0],
        dv=dims[1],
        kv_heads=kv_heads,
        group=group,
        tokens=tokens,
        n_kv=n_kv,
        streams=streams,
        visible=visible,
        biased=biased,
        max_bias=max_bias if masked is not None else 0.0,
        softcap=softcap,
        sinks=sinks,
        permuted=permuted,
        mask_rows=seed % 3,
        numerics=numerics,
        arena=1 << 25,
    ).check(isa, n_threads)


@runs
@pytest.mark.parametrize("numerics", ["table", "exact", "deterministic"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e12])
def test_scores_of_any_size(isa: str, size: float, sign: float, masked: bool, numerics: str) -> None:
    """Rows whose best cells have the same score share the weight, however large that is: rounding a large score must
    not lift them above the maximum."""
    rng = np.random.default_rng(3)
    tokens, n_kv, dim = 9, 300, 64
    a = t.Arena()
    q = a.add(t.F32, (dim, tokens), size * rng.uniform(0.5, 1.5, (tokens, dim)))
    best = np.arange(n_kv) % 3 == 1
    direction = rng.uniform(1, 2, dim)  # the product with q is positive
    keys = sign * np.where(best[:, None], 2.0 + sign, 2.0 - sign) * direction
    k = a.add(t.F16, (dim, n_kv), keys)
    v = a.add(t.F16, (dim, n_kv), rng.standard_normal((n_kv, dim)))
    seen = rng.random((tokens, n_kv)) < 0.8 if masked else np.ones((tokens, n_kv), bool)
    mask = a.add(t.F16, (n_kv, tokens), np.where(seen, 0.0, -np.inf)) if masked else None
    dst = a.add(t.F32, (dim, 1, tokens), None)
    op = t.make_op("FLASH_ATTN", dst, [q, k, v, mask, None], {0: 0.37, 1: 0.0, 2: 0.0})
    op.flags = NUMERICS[numerics]
    got = t.run(a, op, dst, isa, 2)[0, :, 0]
    weights = (seen & best).astype(np.float64)
    want = weights @ v.floats()[0, 0] / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@runs
@pytest.mark.parametrize("kind", [t.F32, t.F16, t.BF16, t.Q8_0, t.Q4_0, t.IQ4_NL])
@pytest.mark.parametrize("other", [False, True])
@every_numerics
def test_cell_types(isa: str, kind: int, other: bool, numerics: str) -> None:
    rng = np.random.default_rng(kind)
    kinds = (t.F16, kind) if other else (kind, kind)
    visible = rng.random((1, 1, 9, 200)) < 0.7
    Case(rng, tokens=9, n_kv=200, kinds=kinds, visible=visible, numerics=numerics).check(isa, 2)


@runs
def test_shared_kv_stream(isa: str) -> None:
    rng = np.random.default_rng(5)
    Case(rng, streams=4, kv_streams=2, tokens=2, visible=rng.random((2, 1, 2, 100)) < 0.5).check(isa, 2)


def causal(tokens: int, n_kv: int) -> NDArray[np.bool_]:
    """A prefill's mask: the last `tokens` of `n_kv` cells."""
    return np.tril(np.ones((tokens, n_kv), bool), n_kv - tokens)[None, None]


def side_by_side(sequences: int, prompt: int, steps: int, prompts: int = 1, pad: int = 0) -> NDArray[np.bool_]:
    """Decoding `sequences` in lockstep in one cache: shared prompts, then one cell per sequence and step."""
    cells = prompts * prompt + sequences * steps
    seen = np.zeros((sequences, cells + pad), bool)
    for s in range(sequences):
        own = s % prompts
        seen[s, own * prompt : (own + 1) * prompt] = True
        seen[s, prompts * prompt + s : cells : sequences] = True
    return seen[None, None]


@runs
@threads
@pytest.mark.parametrize(
    ("tokens", "visible"),
    [
        (70, causal(70, 320)),
        (64, causal(64, 64)),
        (16, side_by_side(16, 200, 20)),
        (16, side_by_side(16, 130, 30, prompts=2, pad=56)),
        (5, side_by_side(5, 0, 70)),
        (1, causal(1, 1500)),
    ],
    ids=["prefill", "first", "best-of-n", "two-prompts", "apart", "long"],
)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("numerics", ["table", "fp16", "deterministic"])
def test_real_masks(
    isa: str, n_threads: int, tokens: int, visible: NDArray[np.bool_], group: int, numerics: str
) -> None:
    rng = np.random.default_rng(7)
    n_kv, sinks = visible.shape[-1], group == 4
    case = Case(rng, tokens=tokens, n_kv=n_kv, group=group, visible=visible, sinks=sinks, numerics=numerics)
    case.check(isa, n_threads)


@runs
@threads
@every_numerics
def test_fully_masked_rows_are_zero(isa: str, n_threads: int, numerics: str) -> None:
    rng = np.random.default_rng(8)
    visible = np.ones((1, 1, 4, 700), bool)
    visible[0, 0, [0, 2]] = False
    for sinks in (False, True):
        case = Case(rng, tokens=4, n_kv=700, visible=visible, sinks=sinks, numerics=numerics)
        got = t.run(case.arena, case.op, case.dst, isa, n_threads)
        assert not got[0, [0, 2]].any()
        assert got[0, [1, 3]].any()


def changed(case: Case, source: int, kind: Any) -> Any:
    """A source's values in the arena: [streams, heads, tokens or cells, elements]."""
    d = case.op.src[source]
    return np.ndarray(tuple(reversed(list(d.ne))), kind, case.arena.bytes.data, d.offset, tuple(reversed(list(d.nb))))


@runs
@every_numerics
@pytest.mark.parametrize("tokens", [3, 20])
def test_hidden_cells_are_not_read_into_results(isa: str, tokens: int, numerics: str) -> None:
    """Cells of a cache that were never written may hold anything, NaN too."""
    rng = np.random.default_rng(10)
    visible = np.zeros((1, 1, tokens, 190), bool)
    visible[..., :70] = True
    visible[..., 100 : 100 + tokens] = np.eye(tokens, dtype=bool)
    case = Case(rng, tokens=tokens, n_kv=190, visible=visible, numerics=numerics)
    want = case.reference("exact")
    hidden = ~visible[0, 0].any(axis=0)
    for source in (1, 2):
        changed(case, source, np.float16)[:, :, hidden] = np.nan
    got = t.run(case.arena, case.op, case.dst, isa, 2)
    assert np.max(np.abs(got - want)) < 1e-2


@runs
@every_numerics
@pytest.mark.parametrize("tokens", [3, 20])
def test_an_infinity_stays_with_the_rows_that_see_it(isa: str, tokens: int, numerics: str) -> None:
    """Samples of one prompt share tiles where their own cells begin; one of them may overflow."""
    visible = np.zeros((1, 1, tokens, 100), bool)
    visible[..., :40] = True
    visible[..., 40 : 40 + tokens] = np.eye(tokens, dtype=bool)
    case = Case(np.random.default_rng(10), tokens=tokens, n_kv=100, visible=visible, numerics=numerics)
    want = case.reference("exact")
    changed(case, 2, np.float16)[:, :, 40] = np.inf
    got = t.run(case.arena, case.op, case.dst, isa, 2)
    assert not np.isfinite(got[0, 0]).any()
    assert np.max(np.abs(got - want)[0, 1:]) < 1e-2


@runs
@threads
@every_numerics
@pytest.mark.parametrize("n_kv", [100, 3000])
def test_a_query_that_is_no_number_gives_none(isa: str, n_threads: int, numerics: str, n_kv: int) -> None:
    """Also where the cells are split between threads: a zero would go on as if nothing had happened."""
    case = Case(np.random.default_rng(10), tokens=3, n_kv=n_kv, numerics=numerics)
    changed(case, 0, np.float32)[:, :, 1] = np.nan
    got = t.run(case.arena, case.op, case.dst, isa, n_threads)
    assert np.isnan(got[0, 1]).all()
    assert np.isfinite(got[0, [0, 2]]).all()


@t.runs_here
def test_exponent_table(isa: str) -> None:
    """All 65536 inputs: exp2 rounded once, on every kernel set, whether it has a table or computes."""
    ffi, lib = _npu.load()
    bits = np.arange(65536, dtype=np.uint16)
    got = np.empty_like(bits)
    cast = ffi.from_buffer
    npu = t.executor(isa, 1)
    assert (
        lib.tb_npu_exp2_fp16(npu, cast("uint16_t *", bits), cast("uint16_t *", got, require_writable=True), 65536) == 0
    )
    x = bits.view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):
        want = np.exp2(np.minimum(x, 0)).astype(np.float16)
    nan = np.isnan(x)
    assert np.array_equal(got[~nan], want.view(np.uint16)[~nan])
    assert np.all(np.isnan(got.view(np.float16)[nan]))


def test_refuses_what_does_not_fit() -> None:
    rng = np.random.default_rng(11)
    for change in ("dst", "mask", "heads", "alibi"):
        case = Case(rng, visible=None if change == "alibi" else np.ones((1, 1, 3, 100), bool))
        if change == "dst":
            case.op.dst.ne[1] = 3
        elif change == "mask":
            case.op.src[3].ne[0] = 99
        elif change == "heads":
            case.op.src[0].ne[2] = 3
        else:
            case.op.params[1] = t.float_param(8.0)
        status, why = t.try_run(case.arena, case.op, "portable", 1)
        assert status == 2
        assert why

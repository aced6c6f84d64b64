"""Perplexity and divergence: against a plain implementation over stock `Llama` logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tilebeam.engine.reading import log_sum_exp
from tilebeam.errors import TilebeamError
from tilebeam.model.lm import LM
from tilebeam.native.control import control

from bench.lib import synth
from bench.lib.float32 import in_float32
from bench.lib.perplexity import (
    LogitScorer,
    Subject,
    TokenScores,
    Windows,
    cut,
    divergence,
    figures,
    mean,
    measure,
    perplexity,
    windows_of,
)

TEXT = "The sum of two and three is five. Nobody knows how many of them there were, or why.\n" * 20
N_CTX = 64
F64 = NDArray[np.float64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("perplexity")


@pytest.fixture(scope="module")
def quantized(folder: Path) -> Path:
    return synth.write_model(folder / "q4.gguf", synth.preset("tiny", n_layer=2))


@pytest.fixture(scope="module")
def exact(quantized: Path) -> Path:
    """The same weights in float32. With EXACT nothing is rounded to fewer bits, so that batches of any shape agree."""
    path = quantized.with_name("f32.gguf")
    return in_float32(quantized, path)


@pytest.fixture(scope="module")
def text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(TEXT + "\n")
    return path


def load(path: Path, **options: Any) -> LM:
    defaults: dict[str, Any] = {"device": "cpu", "n_ctx": 4 * N_CTX, "n_seq_max": 4, "n_batch": 4 * N_CTX, "threads": 1}
    return tilebeam.load(path, **(defaults | options))


@pytest.fixture(scope="module")
def cpu(exact: Path) -> Iterator[LM]:
    with load(exact, **EXACT) as lm:
        yield lm


@pytest.fixture(scope="module")
def windows(cpu: LM) -> Windows:
    found = windows_of(cpu, TEXT, N_CTX)
    assert len(found) > 8
    return found


def part(windows: Windows, count: int) -> Windows:
    """The first of them."""
    return Windows(windows.tokens[:count], windows.bos)


def log_softmax(x: Any) -> F64:
    x = np.asarray(x, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def stock(path: Path, text: str, n_ctx: int) -> tuple[NDArray[np.int32], F64]:
    """The windows of a text and the log-probabilities [windows, scored, vocabulary] of them, with stock Llama only."""
    llama = llama_cpp.Llama(
        str(path), n_ctx=n_ctx, n_batch=n_ctx, logits_all=True, n_threads=1, type_k=0, type_v=0, verbose=False
    )
    tokens = llama.tokenize(text.encode(), add_bos=True, special=False)
    n = len(tokens) // n_ctx
    rows = []
    for i in range(n):
        window = list(tokens[i * n_ctx : (i + 1) * n_ctx])
        llama.reset()
        llama.eval([llama.token_bos(), *window[1:]])
        rows.append(log_softmax(llama.scores[n_ctx // 2 : n_ctx - 1]))
    llama.close()
    return np.asarray(tokens[: n * n_ctx], np.int32).reshape(n, n_ctx), np.stack(rows)


@pytest.fixture(scope="module")
def oracle(exact: Path) -> tuple[NDArray[np.int32], F64]:
    return stock(exact, TEXT, N_CTX)


# --- windows ----------------------------------------------------------------------------------------------------------


@given(n=st.integers(8, 300), n_ctx=st.integers(4, 70), chunks=st.sampled_from([-1, 1, 2, 99]), bos=st.booleans())
@settings(deadline=None)
def test_windows_are_cut_as_llama_perplexity_cuts_them(n: int, n_ctx: int, chunks: int, bos: bool) -> None:
    tokens = list(range(100, 100 + n))
    if n < 2 * n_ctx:
        with pytest.raises(TilebeamError, match=f"{n} tokens"):
            cut(tokens, n_ctx, 1, chunks)
        return
    found = cut(tokens, n_ctx, 1 if bos else None, chunks)
    assert len(found) == (n // n_ctx if chunks < 0 else min(chunks, n // n_ctx))
    for i in range(len(found)):
        own = tokens[i * n_ctx : (i + 1) * n_ctx]
        assert found.inputs(i).tolist() == ([1, *own[1:]] if bos else own)
        assert found.targets(i).tolist() == own[n_ctx // 2 + 1 :]
        assert len(found.targets(i)) == found.scored == n_ctx - 1 - n_ctx // 2


@pytest.mark.parametrize(("n_ctx", "chunks"), [(3, -1), (8, 0), (8, -2)])
def test_impossible_windows(n_ctx: int, chunks: int) -> None:
    with pytest.raises(TilebeamError):
        cut(list(range(100)), n_ctx, None, chunks)


# --- measuring --------------------------------------------------------------------------------------------------------


def test_negative_log_likelihoods_are_those_of_stock_llama(cpu: LM, windows: Windows, oracle: Any) -> None:
    tokens, expected = oracle
    assert np.array_equal(windows.tokens, tokens)
    scores = measure([Subject("m", cpu)], windows, Subject("b", cpu), threads=2)["m"]
    wanted = -np.take_along_axis(expected, tokens[:, N_CTX // 2 + 1 :, None].astype(np.int64), 2)[:, :, 0]
    assert np.allclose(scores.nll.reshape(wanted.shape), wanted, atol=2e-4)
    assert figures(scores).ppl.value == pytest.approx(math.exp(wanted.mean()), rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": N_CTX, "n_seq_max": 1, "n_batch": N_CTX},  # one window a batch
        {"n_ctx": N_CTX, "n_seq_max": 1, "n_batch": 23},  # a window in several batches
        {"n_ubatch": 17},  # several windows a batch, cut across
    ],
)
def test_batching_changes_nothing(cpu: LM, exact: Path, windows: Windows, options: dict[str, Any]) -> None:
    wanted = measure([Subject("m", cpu)], windows, Subject("b", cpu))["m"]
    with load(exact, **EXACT, **options) as lm:
        found = measure([Subject("m", lm)], windows, Subject("b", cpu), threads=3)["m"]
    assert np.allclose(found.nll, wanted.nll, atol=2e-4)
    assert np.allclose(found.nll_base, wanted.nll, atol=2e-4)


def test_a_model_does_not_diverge_from_itself(cpu: LM, windows: Windows) -> None:
    scores = measure([Subject("m", cpu)], part(windows, 5), Subject("b", cpu), threads=2)["m"]
    assert np.all(scores.kld == 0)
    assert np.all(scores.same_top)
    assert np.array_equal(scores.nll, scores.nll_base)


def test_divergence_is_the_kl_divergence(quantized: Path, cpu: LM, windows: Windows, oracle: Any) -> None:
    tokens, base = oracle
    with load(quantized, n_ctx=N_CTX, n_seq_max=1, n_batch=N_CTX) as lm:
        places = [range(windows.first, N_CTX - 1)]
        got = np.stack([lm.read([windows.inputs(w).tolist()], places)[0].logits for w in range(4)])
        scores = measure([Subject("m", lm)], part(windows, 4), Subject("b", cpu))["m"]
    model = log_softmax(got)
    kld = (np.exp(base[:4]) * (base[:4] - model)).sum(axis=-1)
    assert kld.mean() > 1e-5
    assert np.allclose(scores.kld, kld.ravel(), atol=1e-6 + 1e-3 * kld.mean())
    assert np.mean(scores.same_top == (base[:4].argmax(-1) == model.argmax(-1)).ravel()) > 0.99
    wanted = -np.take_along_axis(base[:4], tokens[:4, N_CTX // 2 + 1 :, None].astype(np.int64), 2).ravel()
    assert np.allclose(scores.nll_base, wanted, atol=2e-4)


@given(seed=st.integers(0, 2**31), n=st.sampled_from([2, 33, 1024]), spread=st.sampled_from([0.0, 1.0, 60.0]))
@settings(deadline=None, max_examples=40)
def test_one_prediction_against_float64(seed: int, n: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    base = (rng.standard_normal(n) * spread + 10).astype(np.float32)
    row = (base + rng.standard_normal(n) * 0.3).astype(np.float32)
    work, weights = np.empty(n, np.float32), np.empty(n, np.float32)
    top, log_sum = log_sum_exp(row, work)
    b, r = log_softmax(base), log_softmax(row)
    assert top == row.argmax()
    assert log_sum - row[0] == pytest.approx(-r[0], abs=1e-5 + 1e-6 * abs(r[0]))
    kld = divergence(base, log_sum_exp(base, work)[1], row, log_sum, work, weights)
    assert kld == pytest.approx((np.exp(b) * (b - r)).sum(), abs=2e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers(value: float) -> None:
    row = np.full(8, value, np.float32)
    if not np.isneginf(value):
        row[:4] = 1
    with LogitScorer(8, 2) as scorer, pytest.raises(TilebeamError, match="not numbers"):
        scorer.score(
            row[None].repeat(3, 0), np.zeros(3, np.int32), np.ones((3, 8), np.float32), TokenScores.empty(3), 0
        )


def test_models_with_other_vocabularies_are_not_compared(cpu: LM, windows: Windows, tmp_path: Path) -> None:
    path = synth.write_model(tmp_path / "other.gguf", synth.preset("tiny", n_layer=1, n_vocab=1056))
    with load(path) as lm, pytest.raises(TilebeamError, match="vocabulary of 1056"):
        measure([Subject("m", lm)], windows, Subject("b", cpu))


def test_windows_that_do_not_fit(cpu: LM, windows: Windows) -> None:
    with pytest.raises(TilebeamError, match="context"):
        measure([Subject("m", cpu)], cut(windows.tokens.ravel().tolist(), 5 * N_CTX, None, 1), Subject("b", cpu))
    with pytest.raises(TilebeamError, match="not in the vocabulary"):
        measure([Subject("m", cpu)], Windows(windows.tokens + 1000, None), Subject("b", cpu))


# --- the NPU ----------------------------------------------------------------------------------------------------------


def test_arithmetic_changes_between_the_turns_of_one_model(quantized: Path, cpu: LM, windows: Windows) -> None:
    """Subjects that share a model and differ in options give what each gives alone, in any order."""
    kinds = [("int8", "table"), ("fp16", "table"), ("fp16", "exact"), ("int8", "exact")]
    some = part(windows, 4)
    before = control().options()

    def subject(lm: LM, numerics: str, softmax: str) -> Subject:
        return Subject(f"{numerics} {softmax}", lm, lambda: control().configure(numerics=numerics, softmax=softmax))

    try:
        alone: dict[str, TokenScores] = {}
        for kind in kinds:
            with load(quantized, device="npu", n_ctx=N_CTX, n_seq_max=1, n_batch=N_CTX) as lm:
                alone |= measure([subject(lm, *kind)], some, Subject("b", cpu))
        with load(quantized, device="npu", n_ctx=N_CTX, n_seq_max=1, n_batch=N_CTX) as lm:
            together = measure([subject(lm, *kind) for kind in kinds], some, Subject("b", cpu))
    finally:
        control().configure(numerics=before["numerics"], softmax=before["softmax"])
    means = {name: float(scores.kld.mean()) for name, scores in together.items()}
    for name, scores in together.items():
        assert np.array_equal(scores.nll, alone[name].nll), name
    assert len({scores.nll.tobytes() for scores in together.values()}) == len(kinds)
    # FP16 operands are much nearer to float32 than 8-bit activations are; exact exponentials change little.
    assert means["fp16 table"] < 0.1 * means["int8 table"]
    assert means["fp16 exact"] < 0.1 * means["int8 table"]


# --- figures ----------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**31), n=st.integers(2, 400))
@settings(deadline=None)
def test_figures_are_llama_perplexitys(seed: int, n: int) -> None:
    """By the sums that llama-perplexity keeps."""
    rng = np.random.default_rng(seed)
    nll = rng.exponential(3, n)
    other = nll + rng.normal(0, 0.2, n)
    scores = TokenScores(nll, other, rng.exponential(0.01, n), rng.random(n) < 0.9)
    f = figures(scores)
    average = nll.sum() / n
    variance = (nll**2).sum() / n - average**2
    assert f.n == n
    assert f.ppl.value == pytest.approx(math.exp(average))
    assert f.ppl.error == pytest.approx(math.exp(average) * math.sqrt(variance / (n - 1)), rel=1e-6)
    covariance = ((nll * other).sum() / n - average * other.mean()) / (n - 1)
    errors = [float(mean(x).error) for x in (nll, other)]
    assert f.log_ratio.value == pytest.approx(average - other.mean(), abs=1e-12)
    spread = errors[0] ** 2 + errors[1] ** 2 - 2 * covariance
    assert f.log_ratio.error**2 == pytest.approx(spread, rel=1e-6, abs=1e-12)
    ordered = np.sort(scores.kld)
    for percent, value in f.kld_percentiles.items():
        at = percent / 100 * (n - 1)
        low = int(at)
        wanted = ordered[low] + (at - low) * (ordered[min(low + 1, n - 1)] - ordered[low])
        assert value == pytest.approx(wanted)
    share = scores.same_top.mean()
    assert f.same_top.error == pytest.approx(math.sqrt(share * (1 - share) / (n - 1)))


def test_unmeasured_tokens_do_not_count() -> None:
    scores = TokenScores.empty(6)
    scores.kld[:4] = scores.nll_base[:4] = 1.0
    scores.nll[:4] = 1.0, 2.0, 3.0, 4.0
    assert figures(scores).n == 4
    assert figures(scores).ppl == perplexity(np.array([1.0, 2.0, 3.0, 4.0]))

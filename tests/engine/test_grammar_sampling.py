"""A grammar looks at the drawn token first: what is drawn so against what is drawn from the tokens that it allows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tilebeam
from tilebeam import LM, SamplingParams
from tilebeam.engine.sampler import NO_TOKEN, Sampler, draw_context
from tilebeam.native.llama import Vocab
from tilebeam.native.sampling import ffi, lib

from bench.lib.synth import preset, write_model

GRAMMAR = "root ::= [a-e]*"  # allows the same tokens at every position


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    path = write_model(
        tmp_path_factory.mktemp("models") / "f32.gguf", preset("tiny", arch="llama", type="f32", n_layer=1)
    )
    with tilebeam.load(path, "cpu", n_ctx=256, n_seq_max=2, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def vocab(lm: LM) -> Vocab:
    return lm.engine.vocab


@pytest.fixture(scope="module")
def allowed(vocab: Vocab) -> npt.NDArray[np.intp]:
    """By the text of tokens, not by a grammar."""
    tokens = [t for t in range(vocab.size) if not vocab.is_end(t) and not vocab.is_control(t)]
    found = np.array([t for t in tokens if (piece := vocab.piece(t)) and set(piece) <= set(b"abcde")])
    assert 4 < len(found) < vocab.size / 4
    return found


def draws(vocab: Vocab, params: SamplingParams, rows: npt.NDArray[np.float32], seed: int = 3) -> list[int]:
    """A token of each row, by one sampler."""
    sampler = Sampler(params, seed, vocab)
    c, _kept = draw_context(vocab.size)
    row = ffi.new("struct tb_draw_row *")
    row.chain = sampler.state
    drawn = []
    for logits in rows:
        row.logits = ffi.from_buffer("float[]", logits)
        lib.tb_draw_rows(c, row, 1)
        drawn.append(int(row.token))
    sampler.close()
    return drawn


def params_of(vocab: Vocab, **changes: Any) -> SamplingParams:
    """Without the end of the text, so that it goes on."""
    return SamplingParams(grammar=GRAMMAR, logit_bias={vocab.eos: -math.inf}, **changes)


def test_every_token_is_as_likely_as_without_those_refused(vocab: Vocab, allowed: npt.NDArray[np.intp]) -> None:
    """Rejecting and drawing again from what is allowed is drawing from what is allowed: a chi-squared test."""
    n = 6000
    logits = np.random.default_rng(4).normal(0, 1, vocab.size).astype(np.float32)
    logits[allowed] += 4  # some first draws are allowed, others not
    p = np.exp(logits.astype(np.float64) / 0.8)
    assert 0.2 < p[allowed].sum() / p.sum() < 0.95
    drawn = draws(vocab, params_of(vocab, top_k=0, top_p=1), np.tile(logits, (n, 1)))
    assert set(drawn) <= set(allowed.tolist())
    expected = n * p[allowed] / p[allowed].sum()
    counts = np.array([drawn.count(t) for t in allowed])
    chi = ((counts - expected) ** 2 / expected)[expected >= 5].sum()
    degrees = int((expected >= 5).sum())
    assert degrees > 3
    assert chi < degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("top_k", [1, 5, 40, 200])
@pytest.mark.parametrize("shift", [-20.0, 0.0, 20.0], ids=["unlikely", "mixed", "likely"])
def test_only_the_likeliest_that_are_allowed_are_drawn(
    vocab: Vocab, allowed: npt.NDArray[np.intp], top_k: int, shift: float
) -> None:
    rows = np.random.default_rng(top_k).normal(0, 1, (60, vocab.size)).astype(np.float32)
    rows[:, allowed] += np.float32(shift)
    for logits, token in zip(rows, draws(vocab, params_of(vocab, top_k=top_k, top_p=1), rows), strict=True):
        best = allowed[np.argsort(-logits[allowed])][:top_k]
        assert token in best


@pytest.mark.parametrize("penalized", [False, True])
def test_the_likeliest_that_is_allowed_is_taken(vocab: Vocab, allowed: npt.NDArray[np.intp], penalized: bool) -> None:
    rows = np.random.default_rng(8).normal(0, 2, (40, vocab.size)).astype(np.float32)
    changes = {"presence_penalty": 3.0, "penalty_last_n": 4} if penalized else {}
    drawn = draws(vocab, params_of(vocab, temperature=0, **changes), rows)
    for i, token in enumerate(drawn):
        x = rows[i].copy()
        if penalized:
            x[list(set(drawn[max(0, i - 4) : i]))] -= 3
        assert token == allowed[np.argmax(x[allowed])]


@pytest.mark.parametrize("cut", [{"top_k": 0, "top_p": 0.9}, {"top_k": 300}, {"top_k": 0, "top_p": 1, "min_p": 0.1}])
def test_other_cuts_obey_too(vocab: Vocab, allowed: npt.NDArray[np.intp], cut: dict[str, Any]) -> None:
    rows = np.random.default_rng(9).normal(0, 2, (60, vocab.size)).astype(np.float32)
    drawn = draws(vocab, params_of(vocab, **cut), rows)
    assert set(drawn) <= set(allowed.tolist())
    assert len(set(drawn)) > 3


@pytest.mark.parametrize("cut", [{}, {"temperature": 0}, {"top_k": 0, "top_p": 1}, {"top_k": 0, "top_p": 0.9}])
def test_nothing_is_left_when_bias_bans_what_the_grammar_allows(
    vocab: Vocab, allowed: npt.NDArray[np.intp], cut: dict[str, Any]
) -> None:
    ban = dict.fromkeys([*allowed.tolist(), vocab.eos], -math.inf)
    rows = np.random.default_rng(1).normal(0, 2, (2, vocab.size)).astype(np.float32)
    assert draws(vocab, SamplingParams(grammar=GRAMMAR, logit_bias=ban, **cut), rows) == [NO_TOKEN, NO_TOKEN]

"""Drawing tokens of a model's batches: threads, damaged logits, grammars, biases, log-probabilities."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sampler_kit import Ours
from tilebeam import LM, SamplingParams, TilebeamError
from tilebeam.engine.sampler import (
    BAD_LOGITS,
    NO_TOKEN,
    NORM,
    SPREAD,
    TOKEN_ONLY,
    BatchSampler,
    Sampler,
    SampleRows,
)
from tilebeam.native.sampling import ffi, lib

PROMPT = "the question is how many times the number"


@pytest.fixture(scope="module")
def lm(path: Path) -> Iterator[LM]:
    with tilebeam.load(path, "cpu", n_ctx=512, n_seq_max=8, threads=1, **EXACT) as model:
        yield model


def top(logits: np.ndarray[Any, np.dtype[np.float32]], k: int) -> list[int]:
    found = ffi.new("struct tb_candidate[]", k)
    n = lib.tb_top(ffi.from_buffer("float[]", logits), len(logits), k, found)
    assert all(found[i].logit == logits[found[i].id] for i in range(n))
    return [found[i].id for i in range(n)]


LOGITS = hnp.arrays(
    np.float32,
    st.integers(1, 400),
    elements=st.one_of(
        st.floats(-30, 30, width=32),
        st.sampled_from([0.0, 1.0, -math.inf, math.nan]),
    ),
)


@settings(deadline=None)
@given(LOGITS, st.integers(1, 256))
def test_the_likeliest_are_found_whatever_the_order(logits: np.ndarray[Any, np.dtype[np.float32]], k: int) -> None:
    numbers = np.flatnonzero(~np.isnan(logits))
    expected = numbers[np.lexsort((numbers, -logits[numbers]))][:k]
    assert top(logits, k) == expected.tolist()


@pytest.mark.parametrize("n", [32, 33, 1000, 50000])
def test_the_likeliest_of_many(n: int) -> None:
    rng = np.random.default_rng(n)
    for logits in (rng.normal(0, 3, n), np.sort(rng.normal(0, 3, n)), rng.integers(0, 5, n)):
        row = logits.astype(np.float32)
        for k in (1, 31, 256, 3000):
            assert top(row, min(k, n)) == np.lexsort((np.arange(n), -row))[:k].tolist()


CHAINS = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(top_k=0, top_p=1),
    SamplingParams(top_k=300, top_p=0.99, temperature=2),
    SamplingParams(top_k=0, top_p=0.9),
    SamplingParams(top_k=5, top_p=0.5, min_p=0.2, temperature=1.5),
    SamplingParams(repeat_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(logit_bias={7: 3.0, 9: -math.inf}),
]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("params", CHAINS)
def test_a_batch_draws_what_each_of_its_rows_draws_alone(
    lm: LM, params: SamplingParams, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilebeam.engine.sampler._SHARED_LOGITS", 0)
    vocab, rng = lm.engine.vocab, np.random.default_rng(3)
    samplers = [Sampler(params, seed, vocab) for seed in range(6)]
    alone = [Ours(params, seed, lm.n_vocab, []) for seed in range(6)]
    entries, wants = [0, 0, 0, 2, 3, 3], [NORM, SPREAD, SPREAD, NORM, SPREAD, NORM]
    drawn: set[int] = set()
    with lm.raw_decode() as c:
        rows = SampleRows(list(zip(samplers, entries, wants, strict=True)))
        batch = BatchSampler(c, threads)
        for step in range(25):
            c.token[:6], c.pos[:6], c.seq[:6], c.output[:6] = rng.integers(3, 500, 6), step, range(6), 1
            assert c.decode(6) == 0
            batch.sample(rows)
            tokens = [one.draw(c.logits(entry)) for entry, one in zip(entries, alone, strict=True)]
            assert rows.tokens.tolist() == tokens
            logits = np.stack([c.logits(entry) for entry in entries]).astype(np.float64)
            np.testing.assert_array_equal(rows.logits, logits[range(6), tokens])
            norm = logits.max(1) + np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))
            np.testing.assert_allclose(rows.norms, norm, atol=2e-6)
            spread = [i for i, wanted in enumerate(wants) if wanted == SPREAD]
            assert [rows.spread(i) for i in spread] == [alone[i].spread for i in spread]
            drawn.update(tokens)
    assert len(drawn) > 20
    for sampler in (*samplers, *(one.sampler for one in alone)):
        sampler.close()


@pytest.mark.parametrize("params", CHAINS)
def test_damaged_logits_are_told_from_forbidden_tokens(lm: LM, params: SamplingParams) -> None:
    chain = Sampler(params, 1, lm.engine.vocab)
    nothing = Sampler(SamplingParams(logit_bias=dict.fromkeys(range(lm.n_vocab), -math.inf)), 1, lm.engine.vocab)
    with lm.raw_decode() as c:
        c.token[:1], c.pos[:1], c.seq[:1], c.output[:1] = 5, 0, 0, 1
        assert c.decode(1) == 0
        sampler, rows = BatchSampler(c), SampleRows([(chain, 0, TOKEN_ONLY), (nothing, 0, TOKEN_ONLY)])
        sampler.sample(rows)
        assert rows.tokens[0] >= 0
        assert rows.tokens[1] == NO_TOKEN
        c.logits(0)[:] = np.nan
        sampler.sample(rows)
        assert rows.tokens[0] == BAD_LOGITS
    chain.close()
    nothing.close()


def test_top_logprobs_are_those_of_the_model(lm: LM) -> None:
    for count in (1, 4, 300, 5000):
        params = SamplingParams(n=2, max_tokens=6, seed=2, logprobs=True, top_logprobs=count)
        result = lm.generate(PROMPT, params)[0]
        for sample in result.outputs:
            assert sample.top_logprobs is not None
            rows = lm.logits(result.prompt_token_ids + sample.token_ids).astype(np.float64)
            start = len(result.prompt_token_ids) - 1
            for i, best in enumerate(sample.top_logprobs):
                row = rows[start + i] - rows[start + i].max()
                log_p = row - np.log(np.exp(row).sum())
                assert len(best) == min(count, lm.n_vocab)
                assert list(best.values()) == sorted(best.values(), reverse=True)
                assert min(best.values()) >= np.sort(log_p)[-len(best)] - 1e-3
                np.testing.assert_allclose(list(best.values()), log_p[list(best)], atol=2e-3)


@pytest.mark.parametrize("params", CHAINS)
def test_statistics_are_those_of_the_model(lm: LM, params: SamplingParams) -> None:
    """Not of what bans, penalties and cuts leave; no other field depends on them."""
    asked = replace(params, n=3, max_tokens=8, seed=2, logprobs=True)
    plain = lm.generate(PROMPT, asked)[0]
    result = lm.generate(PROMPT, replace(asked, statistics=True))[0]
    for sample, same in zip(result.outputs, plain.outputs, strict=True):
        assert same.entropies is None
        assert "certainties" not in same.as_dict()
        assert sample.token_ids == same.token_ids
        assert sample.logprobs == pytest.approx(same.logprobs, abs=1e-4)
        start = len(result.prompt_token_ids) - 1
        rows = lm.logits(result.prompt_token_ids + sample.token_ids)[start:-1].astype(np.float64)
        log_p = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(sample.entropies or [], -(np.exp(log_p) * log_p).sum(axis=1), atol=2e-3)
        np.testing.assert_allclose(sample.certainties or [], -np.log(lm.n_vocab) - log_p.mean(axis=1), atol=2e-3)
        assert sample.as_dict()["entropies"] == sample.entropies


def test_logit_bias_bans_and_prefers(lm: LM) -> None:
    free = lm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].token_ids[0]
    row = lm.logits(lm.tokenize(PROMPT))[-1]
    order = np.argsort(-row)
    assert free == order[0]
    banned = SamplingParams(temperature=0, max_tokens=1, logit_bias={int(t): -math.inf for t in order[:3]})
    assert lm.generate(PROMPT, banned)[0].outputs[0].token_ids == [order[3]]
    gap = float(row[order[0]] - row[order[9]])
    for bias, expected in ((gap + 0.1, order[9]), (gap - 0.1, order[0])):
        params = SamplingParams(temperature=0, max_tokens=1, logit_bias={int(order[9]): bias})
        assert lm.generate(PROMPT, params)[0].outputs[0].token_ids == [expected]
    with pytest.raises(TilebeamError, match="token 99999 is not"):
        lm.generate(PROMPT, SamplingParams(logit_bias={99999: 1.0}))


def test_a_grammar_needs_no_luck_with_other_limits(lm: LM) -> None:
    """Penalties, stop strings and top-k beside a grammar; and the prompt is no part of the text."""
    params = SamplingParams(
        n=3, max_tokens=40, seed=1, grammar='root ::= [ab]+ "." [ab]+', stop=".", top_k=1, repeat_penalty=1.2
    )
    for sample in lm.generate("xyz", params)[0].outputs:
        assert re.fullmatch("[ab]+", sample.text)


@pytest.mark.parametrize(
    "bad",
    [
        "root ::= missing",
        'start ::= "a"',
        'root ::= "a',
        'root ::= root "a" | "b"',
        "nothing",
        "root ::= [a-",
        'root ::= "a"{ 3, 1 }',
        'root ::= "]" ["] "a"{30,4}',
    ],
)
def test_bad_grammars_are_refused_before_anything_is_decoded(lm: LM, monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    monkeypatch.setattr(lm.engine.context, "decode", None)
    with pytest.raises(TilebeamError, match="grammar"):
        lm.generate([PROMPT, "so"], [SamplingParams(), SamplingParams(grammar=bad)])
    assert lm.figures().cells_used == 0


def test_a_grammar_that_leads_nowhere_ends_its_own_request_only(lm: LM) -> None:
    """After "a" every token that goes on is banned."""
    ban = {t: -math.inf for t in range(lm.n_vocab) if "b" in lm.detokenize([t]) or t == lm.eos}
    stuck = SamplingParams(n=2, grammar='root ::= "a" "b"', logit_bias=ban, seed=1)
    stream = lm.stream("so", SamplingParams(max_tokens=20, seed=2))
    next(stream)
    with pytest.raises(TilebeamError, match="after 1 tokens the grammar and logit_bias allow no token"):
        lm.generate(PROMPT, stuck)
    rest = list(stream)
    assert rest[-1].finish_reason in ("length", "stop")
    again = lm.generate("so", SamplingParams(max_tokens=20, seed=2))[0].outputs[0]
    assert stream.output.outputs[0].token_ids == again.token_ids
    assert lm.figures().cells_used == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"n": 0},
        {"n": True},
        {"temperature": -1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"min_p": 1},
        {"repeat_penalty": 0},
        {"frequency_penalty": math.inf},
        {"presence_penalty": "1"},
        {"penalty_last_n": -1},
        {"max_tokens": 0},
        {"stop": [""]},
        {"seed": -1},
        {"top_logprobs": -1},
        {"top_logprobs": True},
        {"grammar": " "},
        {"grammar": "a\0"},
        {"grammar": 'root ::= "a"', "ignore_eos": True},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: math.inf}},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": [1]},
        {"logit_bias": "1"},
        {"top_logprobs": 3},
        {"stop": 5},
        {"stop": {"a": "b"}},
        {"stop": [None]},
        {"stop_tokens": 5},
        {"stop_tokens": "5"},
        {"stop_tokens": [-1]},
        {"stop_tokens": [True]},
        {"shown_tokens": [-1]},
        {"shown_tokens": 5},
        {"logprobs": 5},
        {"statistics": 1},
        {"ignore_eos": None},
        {"speculate": "no"},
        {"hidden": 1},
        {"hidden_prompt": 0},
        {"hidden_steps": None},
    ],
)
def test_bad_parameters_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(TilebeamError, match=rf"^SamplingParams: .*{next(iter(bad))}"):
        SamplingParams(**bad)


def test_tokens_beyond_the_vocabulary_are_named(lm: LM) -> None:
    for token in (lm.n_vocab, 10**9):
        for fields in ({"stop_tokens": [3, token]}, {"logit_bias": {token: 1.0, 3: 1.0}}):
            with pytest.raises(TilebeamError, match=rf"^{next(iter(fields))}: token {token} is not in the vocabulary"):
                lm.generate(PROMPT, max_tokens=1, **fields)
    last = lm.n_vocab - 1
    lm.generate(PROMPT, max_tokens=2, min_tokens=1, stop_tokens=[last], logit_bias={last: -math.inf})


def test_none_is_no_stop(lm: LM) -> None:
    assert SamplingParams(stop=None) == SamplingParams() == SamplingParams(stop_tokens=None, shown_tokens=None)  # type: ignore[arg-type]
    wanted = lm.generate(PROMPT, max_tokens=4, seed=1)[0].outputs[0].text
    assert lm.generate(PROMPT, max_tokens=4, seed=1, stop=None)[0].outputs[0].text == wanted


def test_parameters_can_be_hashed() -> None:
    lists: dict[str, Any] = {"stop": ["a", "b"], "stop_tokens": [1, 2], "shown_tokens": [3], "seed": 1}
    many = SamplingParams(**lists, logit_bias={1: 2.0}, json_schema={"type": "object"})
    same = SamplingParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in lists.items()})
    same = replace(same, logit_bias={1: 2}, json_schema={"type": "object"})
    assert many == same
    assert hash(many) == hash(same)
    assert {many: 1}[same] == 1
    assert len({many, replace(many, seed=2), replace(many, logit_bias={1: 3.0})}) == 3

"""What C draws by itself is what llama.cpp's chain draws: same logits, same seeds, same tokens, through whole texts."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_kit import F32, Ours, Tokens
from tilebeam import SamplingParams
from tilebeam.engine.sampler import BAD_LOGITS, NO_TOKEN, Sampler, same_random_numbers

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Theirs:
    """The same through llama.cpp's chain. Without bias and penalties it is given the k likeliest, of equals the lower
    first; else the vocabulary."""

    def __init__(self, params: SamplingParams, seed: int, n_vocab: int, prompt: list[int]) -> None:
        self.sampler = Sampler(params, seed, Tokens(n_vocab), prompt)  # type: ignore[arg-type]
        sorts = params.penalizes or params.logit_bias
        self.top = None if sorts else 1 if params.temperature == 0 else params.top_k or None

    def draw(self, logits: F32) -> int:
        order = np.arange(len(logits))
        if self.top:
            order = np.lexsort((order, -logits))[: self.top]
        data = np.zeros(len(order), CANDIDATE)
        data["id"], data["logit"] = order, logits[order]
        pointer = data.ctypes.data_as(ctypes.POINTER(C.llama_token_data))
        array = C.llama_token_data_array(pointer, len(order), -1, self.top is not None)
        C.llama_sampler_apply(self.sampler.pointer, ctypes.byref(array))
        token, logit = int(data["id"][array.selected]), float(data["logit"][array.selected])
        if logit == -math.inf:
            return BAD_LOGITS if logits[token] == -math.inf else NO_TOKEN
        C.llama_sampler_accept(self.sampler.pointer, token)
        return token


def compare(params: SamplingParams, seed: int, rows: list[F32], prompt: list[int]) -> list[int]:
    """The tokens of both."""
    ours, theirs = Ours(params, seed, len(rows[0]), prompt), Theirs(params, seed, len(rows[0]), prompt)
    drawn = []
    for logits in rows:
        expected, found = theirs.draw(logits), ours.draw(logits)
        # Where the bias forbids all tokens but those that the model rules out itself, either reason is true.
        assert found == expected or (max(found, expected) < 0 and not np.isfinite(logits).all())
        drawn.append(expected)
    ours.sampler.close()
    theirs.sampler.close()
    return drawn


def logits_of(kind: str, n: int, rng: np.random.Generator) -> F32:
    """One row: "normal", "flat", "steep", "ties" (few values) or "holes" (half of it -inf)."""
    x = rng.normal(0, 3, n)
    if kind == "flat":
        x *= 0.01
    elif kind == "steep":
        x *= 20
    elif kind == "ties":
        x = rng.integers(-2, 3, n).astype(np.float64)
    elif kind == "holes":
        x[rng.random(n) < 0.5] = -math.inf
        x[rng.integers(n)] = 0
    return x.astype(np.float32)


CUTS = st.one_of(
    st.builds(lambda p: {"top_k": 0, "top_p": 1.0, "min_p": p}, st.sampled_from([0.0, 0.05, 0.5])),
    st.builds(
        lambda k, p, m: {"top_k": k, "top_p": p, "min_p": m},
        st.sampled_from([1, 2, 40, 64, 100, 256]),
        st.sampled_from([0.1, 0.95, 1.0]),
        st.sampled_from([0.0, 0.1]),
    ),
)
PENALTIES = st.sampled_from(
    [{}, {"repeat_penalty": 1.3}, {"presence_penalty": 0.5, "frequency_penalty": 0.3, "penalty_last_n": 5}]
)


@settings(deadline=None, max_examples=150)
@given(
    CUTS,
    PENALTIES,
    st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    st.sampled_from(["normal", "flat", "steep", "ties", "holes"]),
    st.sampled_from([2, 40, 65, 576, 3000]),
    st.booleans(),
    st.integers(0, 2**32 - 2),
)
def test_every_token_is_the_chains(
    cuts: dict[str, Any], penalties: dict[str, Any], temperature: float, kind: str, n: int, biased: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    bias = {int(t): float(b) for t, b in zip(rng.integers(0, n, 3), (2.5, -1.0, -math.inf), strict=True)}
    params = SamplingParams(temperature=temperature, logit_bias=bias if biased else None, **cuts, **penalties)
    prompt = rng.integers(0, n, 80).tolist()
    compare(params, seed, [logits_of(kind, n, rng) for _ in range(12)], prompt)


@pytest.mark.parametrize("cuts", [{}, {"top_k": 0, "top_p": 1}], ids=["top-k", "all"])
def test_random_numbers_stay_the_same_through_a_long_text(cuts: dict[str, Any]) -> None:
    """A state of the generator lasts for 312 tokens."""
    assert same_random_numbers()
    rng = np.random.default_rng(5)
    rows = [logits_of("normal", 100, rng) for _ in range(700)]
    assert len(set(compare(SamplingParams(**cuts), 11, rows, []))) > 60


def test_the_chain_draws_where_it_is_close_and_both_go_on_together() -> None:
    """Among 30,000 tokens alike, a random number often falls on a border; then llama.cpp's chain draws."""
    rng, n = np.random.default_rng(2), 30_000
    params = SamplingParams(top_k=0, top_p=1, temperature=1)
    ours, theirs = Ours(params, 9, n, []), Theirs(params, 9, n, [])
    by_chain = 0
    for step in range(60):
        logits = logits_of("flat", n, rng)
        before = ours.sampler.state.behind
        assert ours.draw(logits) == theirs.draw(logits)
        by_chain += ours.sampler.state.behind != before + 1
        assert step == 0 or ours.sampler.state.behind in (0, before + 1)
    assert 2 <= by_chain <= 40
    ours.sampler.close()
    theirs.sampler.close()


def test_not_a_number_anywhere_is_damage_where_the_whole_vocabulary_counts() -> None:
    ours = Ours(SamplingParams(top_k=0, top_p=1), 1, 100, [])
    logits = np.zeros(100, np.float32)
    logits[37] = np.nan
    assert ours.draw(logits) == BAD_LOGITS
    ours.sampler.close()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=257),
        SamplingParams(top_k=0, top_p=0.9),
        SamplingParams(repeat_penalty=1.1, penalty_last_n=5000),
    ],
)
def test_what_c_does_not_know_is_drawn_by_the_chain(params: SamplingParams) -> None:
    rng = np.random.default_rng(1)
    ours = Ours(params, 3, 6000, [])
    assert not ours.sampler.state.own
    ours.sampler.close()
    # Given the whole vocabulary, both sort it alike.
    ours, theirs = Ours(params, 3, 6000, []), Theirs(params, 3, 6000, [])
    theirs.top = None
    for _ in range(5):
        logits = logits_of("normal", 6000, rng)
        assert ours.draw(logits) == theirs.draw(logits)
    ours.sampler.close()
    theirs.sampler.close()

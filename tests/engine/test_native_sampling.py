"""What C draws: the token that its random number stands for, among the tokens that llama.cpp's samplers leave."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_chain import LlamaChain
from sampler_kit import F32, Numbers, Ours
from tilebeam import SamplingParams
from tilebeam.engine.sampler import BAD_LOGITS, NO_TOKEN

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
SLACK = 1e-5  # of probabilities


def left_by_llama(params: SamplingParams, logits: F32, prompt: list[int]) -> npt.NDArray[np.float64]:
    """The probabilities that llama.cpp's chain leaves, ascending."""
    chain = LlamaChain(params, len(logits), prompt)
    data = np.zeros(len(logits), CANDIDATE)
    data["id"], data["logit"] = np.arange(len(logits)), logits
    pointer = data.ctypes.data_as(ctypes.POINTER(C.llama_token_data))
    array = C.llama_token_data_array(pointer, len(data), -1, False)
    C.llama_sampler_apply(chain.pointer, ctypes.byref(array))
    chain.close()
    left = data["logit"][: array.size].astype(np.float64)
    p = np.exp(left - left.max())
    return np.sort(p / p.sum())


class Left:
    """What a chain leaves of a row, in float64.

    Attributes:
        order: all tokens that top-k leaves, likeliest first, of equals the lower.
        sizes: how many of them top-p and min-p may leave: more than one where a probability lies on the border.
    """

    def __init__(self, params: SamplingParams, logits: F32, last: list[int]) -> None:
        self.params, x = params, logits.copy()
        for token, bias in (params.logit_bias or {}).items():
            x[token] += np.float32(bias)
        for token, count in Counter(last[-params.penalty_last_n :] if params.penalizes else ()).items():
            x[token] = x[token] * params.repeat_penalty if x[token] <= 0 else x[token] / params.repeat_penalty
            x[token] -= count * params.frequency_penalty + params.presence_penalty
        self.order = np.lexsort((np.arange(len(x)), -x))[: params.top_k or None]
        self._x = x.astype(np.float64)
        self.sizes = range(self._size(-SLACK), self._size(SLACK) + 1) if np.isfinite(x.max()) else range(0)

    def _size(self, slack: float) -> int:
        y, params = self._x[self.order] - self._x[self.order[0]], self.params
        size = len(y)
        if params.top_p < 1:
            reached = np.cumsum(np.exp(y)) / np.exp(y).sum()
            size = min(size, int(np.searchsorted(reached, params.top_p + slack)) + 1)
        if params.min_p > 0:
            size = min(size, int((y >= math.log(params.min_p) - slack).sum()))
        return max(1, size)

    def probabilities(self, size: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """Of so many tokens: their ids in the order of draws, and probabilities."""
        ids = self.order[:size]
        if self.params.top_k == 0 and self.params.top_p == 1:
            ids = np.sort(ids)
        p = np.exp((self._x[ids] - self._x[self.order[0]]) / self.params.temperature)
        return ids, p / p.sum()

    def allows(self, token: int, number: float) -> bool:
        """Whether a random number in [0, 1) stands for a token."""
        if not self.sizes:
            return token in (NO_TOKEN, BAD_LOGITS)
        if self.params.temperature == 0:
            return token == self.order[0]
        for size in self.sizes:
            ids, p = self.probabilities(size)
            (at,) = np.flatnonzero(ids == token) if token in ids else (None,)
            if at is not None and p[at] > 0 and p[:at].sum() - SLACK <= number <= p[: at + 1].sum() + SLACK:
                return True
        return False


def check(params: SamplingParams, seed: int, rows: list[F32], prompt: list[int]) -> list[int]:
    """The tokens drawn, each of which must be the one that the next random number stands for."""
    ours, numbers, text = Ours(params, seed, len(rows[0]), prompt), Numbers(seed), list(prompt)
    for logits in rows:
        left = Left(params, logits, text)
        token = ours.draw(logits)
        assert left.allows(token, numbers.next() if left.sizes else 0)
        if token >= 0:
            text.append(token)
    ours.sampler.close()
    return text[len(prompt) :]


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


CUTS = st.builds(
    lambda k, p, m: {"top_k": k, "top_p": p, "min_p": m},
    st.sampled_from([0, 0, 1, 2, 40, 64, 100, 256, 257, 1000]),
    st.sampled_from([0.1, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
PENALTIES = st.sampled_from(
    [
        {},
        {"repeat_penalty": 1.3},
        {"repeat_penalty": 0.8, "penalty_last_n": 5000},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3, "penalty_last_n": 5},
    ]
)
KINDS = ["normal", "flat", "steep", "ties", "holes"]


@settings(deadline=None, max_examples=200)
@given(
    CUTS,
    PENALTIES,
    st.sampled_from([0.0, 1e-30, 0.6, 1.0, 1.7]),
    st.sampled_from(KINDS),
    st.sampled_from([2, 40, 65, 576, 3000]),
    st.booleans(),
    st.integers(0, 2**32 - 2),
)
def test_every_token_is_the_one_that_its_number_stands_for(
    cuts: dict[str, Any], penalties: dict[str, Any], temperature: float, kind: str, n: int, biased: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    bias = {int(t): float(b) for t, b in zip(rng.integers(0, n, 3), (2.5, -1.0, -math.inf), strict=True)}
    params = SamplingParams(temperature=temperature, logit_bias=bias if biased else None, **cuts, **penalties)
    prompt = rng.integers(0, n, 80).tolist()
    check(params, seed, [logits_of(kind, n, rng) for _ in range(12)], prompt)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_k=5, top_p=0.5, min_p=0.2, temperature=1.5),
        SamplingParams(top_k=300, top_p=0.99, temperature=2),
        SamplingParams(top_k=0, top_p=0.9, temperature=0.6),
        SamplingParams(top_k=0, top_p=0.999, min_p=0.01),
        SamplingParams(top_k=0, top_p=1, min_p=0.05),
        SamplingParams(top_k=0, top_p=1, repeat_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(repeat_penalty=0.7, penalty_last_n=5000, logit_bias={7: 3.0, 9: -math.inf}),
    ],
)
def test_llama_cpp_leaves_the_same_probabilities(params: SamplingParams, kind: str) -> None:
    rng = np.random.default_rng(7)
    for n in (50, 3000):
        logits, prompt = logits_of(kind, n, rng), rng.integers(0, n, 200).tolist()
        left, theirs = Left(params, logits, prompt), left_by_llama(params, logits, prompt)
        found = [np.sort(left.probabilities(size)[1]) for size in left.sizes]
        theirs = theirs[theirs > 0]
        assert any(len(p[p > 0]) == len(theirs) and np.allclose(p[p > 0], theirs, atol=1e-5) for p in found)


@pytest.mark.parametrize("top_k", [0, 500])
def test_a_draw_takes_one_number(top_k: int) -> None:
    """Of a thousand tokens alike, u draws that of number 1000 u: which shows u. A draw from one token takes one too."""
    n = 1000
    params = SamplingParams(top_k=top_k, top_p=1, temperature=0.7)
    ours, numbers, alike = Ours(params, 11, n, []), Numbers(11), np.zeros(n, np.float32)
    alone = np.where(np.arange(n) == 5, 0, -math.inf).astype(np.float32)
    for i in range(700):
        number = numbers.next()
        assert ours.draw(alone if i % 3 == 0 else alike) == (5 if i % 3 == 0 else int((top_k or n) * number))
    ours.sampler.close()


def test_the_numbers_are_those_of_the_published_generators() -> None:
    """splitmix64 and xoshiro256++ with the values that their authors' programs print."""
    assert Numbers(1234567).state == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
    ]
    numbers = Numbers(0)
    numbers.state = [1, 2, 3, 4]
    assert [numbers.bits() for _ in range(4)] == [41943041, 58720359, 3588806011781223, 3591011842654386]


def test_samples_of_one_request_draw_independent_numbers() -> None:
    """Seeds that follow each other: of a first and a second number, each, all pairs are as frequent."""
    n, cells = 20_000, 8
    pairs = np.zeros((cells, cells, cells))
    before = Numbers(0).next()
    for seed in range(1, n + 1):
        numbers = Numbers(seed)
        first, second = numbers.next(), numbers.next()
        pairs[int(before * cells), int(first * cells), int(second * cells)] += 1
        before = first
    expected = n / cells**3
    degrees = cells**3 - 1
    assert abs(((pairs - expected) ** 2 / expected).sum() - degrees) < 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("params", [SamplingParams(top_k=0, top_p=1), SamplingParams(top_k=0, top_p=0.9)])
def test_not_a_number_anywhere_is_damage_where_the_whole_vocabulary_counts(params: SamplingParams) -> None:
    ours = Ours(params, 1, 100, [])
    logits = np.zeros(100, np.float32)
    logits[37] = np.nan
    assert ours.draw(logits) == BAD_LOGITS
    logits[37] = np.inf
    assert ours.draw(logits) == BAD_LOGITS
    ours.sampler.close()


def test_what_a_model_bans_leaves_statistics_numbers() -> None:
    """Logits of -inf, or of the least float, as some models have for tokens of images; `Ours` has the formula."""
    ours = Ours(SamplingParams(), 1, 3000, [])
    for banned in (-math.inf, float(np.finfo(np.float32).min)):
        logits = logits_of("normal", 3000, np.random.default_rng(3))
        logits[1000:2000] = banned
        ours.draw(logits)
        assert 0 < ours.spread[0] < math.log(2000)
        assert 29 < ours.spread[1] < 40
        logits[:] = banned
        logits[5] = -3
        ours.draw(logits)
        assert ours.spread == pytest.approx((0, 87 - 87 / 3000 - math.log(3000)))
    ours.draw(np.full(3000, 2.5, np.float32))
    assert ours.spread == pytest.approx((math.log(3000), 0), abs=1e-6)
    ours.sampler.close()


@pytest.mark.parametrize("cuts", [{}, {"top_k": 0, "top_p": 1}, {"top_k": 0, "top_p": 0.9}])
def test_a_temperature_that_float32_takes_for_0_takes_the_likeliest(cuts: dict[str, Any]) -> None:
    ours = Ours(SamplingParams(temperature=1e-50, **cuts), 1, 400, [])
    logits = logits_of("flat", 400, np.random.default_rng(1))
    assert {ours.draw(logits) for _ in range(20)} == {int(logits.argmax())}
    ours.sampler.close()


def test_what_is_banned_is_never_drawn() -> None:
    """However unlikely the others are."""
    for cuts in ({"top_k": 0, "top_p": 1}, {"top_k": 0, "top_p": 0.9999}, {"top_k": 300, "top_p": 1}, {"top_k": 9}):
        ours = Ours(replace(SamplingParams(temperature=5), **cuts), 1, 400, [])
        logits = np.full(400, -math.inf, np.float32)
        logits[[3, 200, 399]] = [80, -200, 80]
        assert {ours.draw(logits) for _ in range(300)} == {3, 399}
        ours.sampler.close()

"""Budgets of thoughts on a model that thinks and is right, the thinker of bench/tiny: chats, streams, votes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import tilebeam
from tilebeam import LM, SamplingParams, SelfConsistency
from tiny_kit import arithmetic, references

PROBLEMS = arithmetic.draw_many(11, "test", 40, references.THINKERS_TERMS)
TALKS: Any = [[{"role": "user", "content": problem}] for problem in PROBLEMS]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 160}
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_tokens": 160, "seed": 5}


@pytest.fixture(scope="module")
def lm() -> Iterator[LM]:
    """On the NPU, which promises the same texts again."""
    path = references.file_of(references.THINKER, "q8_0")
    with tilebeam.load(path, "npu", n_ctx=8192, n_seq_max=32, threads=1, deterministic=True) as model:
        yield model


def share(texts: list[str]) -> float:
    """Right ones of the answers to `PROBLEMS`."""
    return sum(arithmetic.is_right(p, t) for p, t in zip(PROBLEMS, texts, strict=True)) / len(PROBLEMS)


def test_accuracy_rises_with_the_budget(lm: LM) -> None:
    """Thoughts that a budget ends are a prefix of those without one, and the answer behind them is a number."""
    free = [output.outputs[0] for output in lm.chat(TALKS, **GREEDY)]
    shares = []
    for budget in (0, 4, 16, 48, 160):
        found = [output.outputs[0] for output in lm.chat(TALKS, thinking_budget=budget, **GREEDY)]
        for answer, whole in zip(found, free, strict=True):
            assert (whole.reasoning or "").startswith(answer.reasoning or "")
            assert len(lm.tokenize(answer.reasoning or "", add_special=False)) <= budget
        assert sum(arithmetic.answer(answer.text) == answer.text for answer in found) >= 0.9 * len(found)
        shares.append(share([answer.text for answer in found]))
    # Four of 40 answers is what chance may take.
    assert all(more >= less - 0.1 for less, more in pairwise(shares)), shares
    assert shares[-1] - shares[0] > 0.3
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in free]  # a budget of all


def test_a_vote_of_cut_thoughts_is_the_same_again_and_beats_its_samples(lm: LM) -> None:
    sampling = SamplingParams(**DRAWN, thinking_budget=16)
    first, again = (SelfConsistency(arithmetic.answer).run(lm, TALKS, 8, sampling=sampling) for _ in range(2))
    assert [c.token_ids for r in first for c in r.candidates] == [c.token_ids for r in again for c in r.candidates]
    single = sum(share([r.candidates[i].text for r in first]) for i in range(8)) / 8
    voted = share([r.best.text for r in first])
    assert voted >= single
    assert voted >= share([o.outputs[0].text for o in lm.chat(TALKS, **GREEDY | {"thinking_budget": 0})]) + 0.1

"""LLMJudge over a real (random) model: verdicts are what its logits say; and scorers of what decoding leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT
from tilebeam import (
    BestOfN,
    CompletionOutput,
    LLMJudge,
    Prompt,
    Rating,
    SamplingParams,
    SelfConsistency,
    TailEntropy,
    TilebeamError,
)
from tilebeam.scoring.scorer_names import named_scorer
from tilebeam.search import algorithms as methods

from bench.lib.synth import preset, write_model


def candidates(*texts: str) -> list[CompletionOutput]:
    return [CompletionOutput(i, t, [1], "stop", i) for i, t in enumerate(texts)]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tilebeam.LM]:
    path = write_model(tmp_path_factory.mktemp("model") / "m.gguf", preset("tiny", arch="llama", type="f32"))
    with tilebeam.load(path, "cpu", n_ctx=2048, n_seq_max=8, threads=1, **EXACT) as model:
        yield model


def test_a_verdict_is_the_probability_of_its_first_token(lm: tilebeam.LM) -> None:
    template = "ask {prompt} says {answer} right? "
    judge = LLMJudge(lm, template=template, good=("1", "3"), bad=("2",))
    prompts, groups = ["one?", "two?"], [candidates("a", "b", "a"), candidates("{prompt}")]
    ratings = judge.rate(prompts, groups)
    tokens = [lm.tokenize(t, add_special=False)[0] for t in ("1", "3", "2")]
    for prompt, group, found in zip(prompts, groups, ratings, strict=True):
        for candidate, score in zip(group, found.scores, strict=True):
            text = f"ask {prompt} says {candidate.text} right? "  # what looks like a place in a text stays
            chances = np.exp(lm.logits(lm.tokenize(text))[-1][tokens].astype(np.float64))
            assert score == pytest.approx(chances[:2].sum() / chances.sum(), abs=1e-5)
    assert ratings[0].scores[0] == ratings[0].scores[2]
    asked = [("ask one? says a right? ", "ask one? says b right? "), ("ask two? says {prompt} right? ",)]
    for rating, texts in zip(ratings, asked, strict=True):  # equal texts are judged once
        assert rating.usage.full_scoring_tokens == sum(len(lm.tokenize(text)) for text in texts)
        assert 0 < rating.usage.scored_tokens <= rating.usage.full_scoring_tokens
    again = judge.rate(["one?", "one?"], [candidates("a"), candidates("a")])
    assert again[0].usage.full_scoring_tokens == len(lm.tokenize(asked[0][0]))
    assert again[1] == Rating(again[0].scores)  # the first prompt paid
    assert judge.score("p", []) == []


def test_a_judge_weighs_votes_and_its_tokens_are_accounted_for(lm: tilebeam.LM) -> None:
    judge = LLMJudge(lm, good="1", bad="2")
    params = SamplingParams(seed=1, max_tokens=6)
    best = BestOfN(judge).infer(lm, ["what", "why"], 4, sampling=params)
    assert all(r.usage.scored_tokens > 0 and r.usage.scoring_seconds > 0 for r in best)
    vote = SelfConsistency(lambda text: text[:1] or None, weighting="reward", scorer=judge)
    assert vote.infer(lm, "what", 4, sampling=params).scores == pytest.approx(best[0].scores, abs=1e-5)
    asked = [judge.score(Prompt("<user> what", question=q), candidates("x")) for q in (None, "what")]
    assert asked[0] != asked[1] == judge.score("what", candidates("x"))  # it is shown the question


def test_judges_by_name(lm: tilebeam.LM) -> None:
    assert isinstance(named_scorer("judge", lm), LLMJudge)
    with pytest.raises(TilebeamError, match="needs a model"):
        methods.create("best-of-n", scorer="judge")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"template": "no place"}, "answer"),
        ({"good": "1", "bad": ["1", "1"]}, "begin with the same token"),
        ({"good": [""], "bad": "1"}, "spellings of both"),
    ],
)
def test_judges_that_cannot_be(lm: tilebeam.LM, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TilebeamError, match=words):
        LLMJudge(lm, **options)


def test_entropy_rates_texts(lm: tilebeam.LM) -> None:
    best = BestOfN("tail-entropy").infer(lm, "so", 4, sampling=SamplingParams(seed=3, max_tokens=6))
    drawn = lm.generate("so", SamplingParams(n=4, seed=3, max_tokens=6, statistics=True))[0].outputs
    assert best.scores == pytest.approx([-float(np.mean(c.entropies or [])) for c in drawn], abs=1e-4)
    assert "entropies" not in best.as_dict()["candidates"][0]
    with pytest.raises(TilebeamError, match="statistics=True"):
        named_scorer("tail-entropy").score("so", [CompletionOutput(0, "a", [1], "stop", 0)])
    tail = TailEntropy(window=2).score("so", drawn)
    assert tail == pytest.approx([-float(np.mean((c.entropies or [])[-2:])) for c in drawn])
    assert TailEntropy().score("so", [CompletionOutput(0, "", [], "length", 0, entropies=[])]) == [0]

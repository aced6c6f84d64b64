"""LLMJudge over a real (random) model: verdicts are what its logits say, numbers what it writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
    Reading,
    RequestOutput,
    SamplingParams,
    SelfConsistency,
    TilebeamError,
    Usage,
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


def test_costs_are_those_of_the_call_in_whatever_thread(lm: tilebeam.LM) -> None:
    judge = LLMJudge(lm, good="1", bad="2", template="{answer}")
    spent = []

    def score(text: str) -> None:
        (rating,) = judge.rate(["p"], [candidates(text)])
        spent.append((len(lm.tokenize(text)), rating.usage.full_scoring_tokens))

    threads = [threading.Thread(target=score, args=(f"text {'again ' * i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(spent) == 4
    assert all(a == b for a, b in spent)


def test_judges_by_name(lm: tilebeam.LM) -> None:
    assert isinstance(named_scorer("judge", lm), LLMJudge)
    with pytest.raises(TilebeamError, match="needs a model"):
        methods.create("best-of-n", scorer="judge")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"verdict": "maybe"}, "verdict must be"),
        ({"template": "no place"}, "answer"),
        ({"low": 3, "high": 3}, "low must be less"),
        ({"samples": 0}, "samples must be"),
        ({"good": "1", "bad": ["1", "1"]}, "begin with the same token"),
        ({"good": [""], "bad": "1"}, "spellings of both"),
    ],
)
def test_judges_that_cannot_be(lm: tilebeam.LM, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TilebeamError, match=words):
        LLMJudge(lm, **options)


@dataclass
class Writes:
    """A model that writes given replies, in turn."""

    replies: list[str]
    asked: list[tuple[str, SamplingParams]] = field(default_factory=list)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[RequestOutput]:
        results = []
        for prompt in prompts:
            self.asked.append((prompt.text, sampling))
            outputs = [CompletionOutput(i, self.replies.pop(0), [1, 2], "stop", i) for i in range(sampling.n)]
            usage = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=2 * sampling.n, recomputed_tokens=1)
            results.append(RequestOutput(prompt.text, [1], outputs, usage, 0))
        return results

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> Prompt:
        return Prompt(f"<{messages[0]['content']}>")

    def filled_prompt(self, template: str, values: dict[str, str]) -> Prompt:
        return Prompt(template.format_map(values))

    def read(self, *_: object) -> list[Reading]:
        raise AssertionError


def test_numbers_are_scaled_and_what_is_none_does_not_count() -> None:
    model = Writes(["10", "it is 3/10, so 5", "none", "7.5 or 99", "0", "-3"])
    judge = LLMJudge(model, verdict="number", chat=True, template="{answer} {low}-{high}")  # type: ignore[arg-type]
    (rating,) = judge.rate(["p"], [candidates("a", "b", "c", "d", "e", "f")])
    assert rating.scores == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert [p for p, _ in model.asked] == [f"<{x} 0-10>" for x in "abcdef"]
    assert {s.temperature for _, s in model.asked} == {0.0}
    assert rating.usage == Usage(scored_tokens=6 * (10 - 4 + 1 + 2), full_scoring_tokens=6 * 12)


def test_several_numbers_are_averaged() -> None:
    model = Writes(["1", "2", "no", "5", "4", "3"])
    judge = LLMJudge(model, verdict="number", low=1, high=5, samples=3)  # type: ignore[arg-type]
    assert judge.score("p", candidates("a", "b")) == [pytest.approx((0 + 0.25) / 2), pytest.approx(0.75)]
    assert {(s.n, s.temperature, s.seed) for _, s in model.asked} == {(3, 0.7, 0)}
    assert "from 1 (wrong) to 5" in model.asked[0][0]

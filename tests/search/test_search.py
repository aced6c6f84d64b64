"""Searches over a scripted model with known best answers; scorers and answer extraction by their definitions."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import check_engine
from tilebeam import (
    Adaptive,
    BestOfN,
    CompletionOutput,
    Consensus,
    LogProb,
    Prompt,
    RequestOutput,
    SamplingParams,
    Scorer,
    SelfConsistency,
    TilebeamError,
    ToolReasoning,
    Usage,
    Verifier,
    last_number,
    regex,
)
from tilebeam.answers.voted_answer import VotedAnswer
from tilebeam.chat.prepared import PreparedChat
from tilebeam.chat.tool_families import FAMILIES
from tilebeam.chat.tools import Tool, ToolUse
from tilebeam.search import algorithms
from tilebeam.search.sampled import vote_weights
from typed_kit import TypedLM


@dataclass
class Scripted:
    """A model that says, for every prompt, the next lines of its script."""

    script: dict[str, list[tuple[str, float]]]
    calls: list[tuple[list[str], SamplingParams]] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, progress: Any = None, **_: Any
    ) -> list[RequestOutput]:
        self.calls.append(([p.text for p in prompts], params[0]))
        results = []
        for prompt, sampling in zip(prompts, params, strict=True):
            outputs = []
            for i, (text, logprob) in enumerate(self.script[prompt.text][: sampling.n]):
                n = max(1, len(text.split()))
                total = logprob * n if sampling.logprobs else None
                outputs.append(CompletionOutput(i, text, [0] * n, "stop", i, total))
            usage = Usage(prompt_tokens=3, completion_tokens=sum(len(o.token_ids) for o in outputs))
            results.append(RequestOutput(prompt.text, [1, 2, 3], outputs, usage, 0))
        if progress is not None and progress(tilebeam.Progress()) is False:
            results[0].outputs[-1].finish_reason = "aborted"
        return results


def _softmax(scores: list[float], sharpness: float) -> list[float]:
    values = np.array(scores)
    parts = np.exp(sharpness * (values - values.mean()) / values.std())
    return (parts / parts.sum()).tolist()


def test_weightings_disagree_where_they_should() -> None:
    lm = Scripted({"p": [("7", -0.01), ("8", -3.0), ("8.0", -3.0)]})
    assert SelfConsistency().infer(lm, "p", budget=3).answer == "8"
    assert SelfConsistency(weighting="logprob").infer(lm, "p", budget=3).answer == "7"
    rewarded = SelfConsistency(weighting="reward", scorer=lambda _, text: 9 if text == "7" else 1)
    assert rewarded.infer(lm, "p", budget=3).answer == "7"
    with pytest.raises(TilebeamError, match=">= 0"):
        SelfConsistency(weighting="reward", scorer=lambda *_: -1).infer(lm, "p", budget=3)
    with pytest.raises(TilebeamError, match="needs a scorer"):
        SelfConsistency(weighting="reward")
    with pytest.raises(TilebeamError, match="takes no scorer"):
        SelfConsistency(scorer=LogProb())
    with pytest.raises(TilebeamError, match="sharpness"):
        SelfConsistency(weighting="reward", scorer=LogProb(), sharpness=2)
    with pytest.raises(TilebeamError, match="sharpness"):
        SelfConsistency(weighting="softmax", sharpness=-1)
    with pytest.raises(TilebeamError, match="weighting"):
        SelfConsistency(weighting="best")  # type: ignore[arg-type]


def test_relative_weights() -> None:
    """Only the distances of scores count, sharpness says how much."""
    scores = [-3.0, 0.5, 0.5, 2.0]
    assert vote_weights("softmax", scores) == pytest.approx(vote_weights("softmax", [7 * s - 40 for s in scores]))
    assert vote_weights("softmax", scores, 1.3) == pytest.approx(_softmax(scores, 1.3))
    assert vote_weights("softmax", [1e300, -1e300, 5e-324], 50) == pytest.approx([1, 0, 0])
    assert len(set(vote_weights("softmax", [0.1] * 3))) == len(set(vote_weights("softmax", scores, 0))) == 1
    assert len(vote_weights("softmax", [5.0])) == 1
    with pytest.raises(TilebeamError, match="softmax need finite scores, not -inf"):
        vote_weights("softmax", [-math.inf, 1])
    lm = Scripted({"p": [("7", -0.01), ("8", -3.0), ("8.0", -3.0)]})
    sharp = SelfConsistency(weighting="softmax", sharpness=3)
    assert sharp.infer(lm, "p", budget=3).answer == "7"
    assert SelfConsistency(weighting="softmax", sharpness=0).infer(lm, "p", budget=3).answer == "8"


def test_log_probabilities_are_asked_for_only_when_needed() -> None:
    lm = Scripted({"p": [("a b c d", -0.5), ("a", -0.6), ("a b", -0.4)]})
    per_token = BestOfN(LogProb()).infer(lm, "p", budget=3)
    in_total = BestOfN(LogProb(per_token=False)).infer(lm, "p", budget=3)
    BestOfN().infer(lm, "p", budget=3)
    assert (per_token.best_index, in_total.best_index) == (2, 1)
    assert per_token.scores == pytest.approx([-0.5, -0.6, -0.4])
    assert [params.logprobs for _, params in lm.calls] == [True, True, False]
    bare = CompletionOutput(0, "x", [1], "stop", 0)
    with pytest.raises(TilebeamError, match="logprobs=True"):
        LogProb().score("p", [bare])


@pytest.mark.parametrize(
    ("texts", "best"),
    [
        (["I cannot help.", "Blue light scatters more.", "Light that is blue scatters more.", "Blue."], 1),
        (["blue " * 30, "Blue light scatters.", "The blue light scatters."], 1),
        (["海是蓝色的", "天空是蓝色的", "天空是灰色的", "我不知道"], 1),
        (["", "2", ""], 1),
        (["only one"], 0),
    ],
)
def test_best_of_n_takes_what_shares_most_words_unless_told(texts: list[str], best: int) -> None:
    lm = Scripted({"p": [(text, -9.0 if i == best else 0.0) for i, text in enumerate(texts)]})
    result = BestOfN().infer(lm, "p", budget=len(texts))
    assert result.best_index == best
    assert all(0 <= score <= 1 for score in result.scores)
    assert not lm.calls[0][1].logprobs
    assert algorithms.create("best-of-n").infer(lm, "p", len(texts)).scores == result.scores


def test_consensus_is_the_mean_of_dice_coefficients() -> None:
    texts = ["a b c", "B! C, d; e", "x"]
    outputs = [CompletionOutput(i, text, [1], "stop", 0) for i, text in enumerate(texts)]
    shared = 2 * 2 / (3 + 4)
    assert Consensus().score("p", outputs) == pytest.approx([(1 + shared) / 3, (1 + shared) / 3, 1 / 3])


def test_loops_win_only_where_all_loop() -> None:
    loop = "It is blue since blue light is scattered. "
    lm = Scripted(
        {"p": [(loop * 6, 0), (f"{loop}So.", -2), (loop * 7, 0), ("It is red.", -3)], "q": [(loop * 6, 0)] * 2}
    )
    assert BestOfN(LogProb()).infer(lm, "p", budget=4).best_index == 1
    assert BestOfN(Verifier(lambda _, text: len(text))).infer(lm, "p", budget=4).best_index == 2  # it knows
    assert BestOfN(LogProb()).infer(lm, "q", budget=2).best_index == 0
    lm = Scripted({"p": [("7 7. " + loop * 6 + "7", 0), (loop * 6 + " 7", 0), ("8", 0)]})
    assert SelfConsistency().infer(lm, "p", budget=3).votes == {"7": 2, "8": 1}  # they went on after their loops
    lm = Scripted({"p": [(" is 7" * 30, 0), (" is 7" * 40, 0), ("8", 0)]})
    assert SelfConsistency().infer(lm, "p", budget=3).votes == {"8": 1}


def test_a_prompt_is_handed_on_as_it_is() -> None:
    """Its tokens to the model, its question to the scorer; results are for people."""
    asked: list[Prompt] = []

    class Asks(Scorer):
        def score(self, prompt: Any, candidates: Sequence[CompletionOutput]) -> list[float]:
            asked.append(prompt)
            return [float(c.text) for c in candidates]

    class Takes(Scripted):
        def generate(self, prompts: Any, *rest: Any, **more: Any) -> list[RequestOutput]:
            assert prompts[0] is prompt
            return super().generate(prompts, *rest, **more)

    lm = Takes({"<user> p": [("1", -1.0), ("2", -1.0)]})
    prompt = Prompt("<user> p", [7, 8], question="p")
    result = BestOfN(Asks()).infer(lm, prompt, budget=2)
    assert (result.prompt, result.best.text) == ("<user> p", "2")
    assert asked == [prompt]
    (vote,) = SelfConsistency().run(lm, [prompt], 2)
    assert vote.best is vote.best
    with pytest.raises(TilebeamError, match=r"a text or a tilebeam\.Prompt, not list"):
        BestOfN(LogProb()).run(lm, [[7, 8]], 2)  # type: ignore[list-item]


def test_prompts_are_values() -> None:
    prompt = Prompt("a", [1, 2], "b")
    assert prompt == Prompt("a", (1, 2), "b") != Prompt("a", (1, 3), "b")
    assert len({prompt, Prompt("a", (1, 2), "b"), Prompt("a", (1, 3), "b"), Prompt("a")}) == 3
    assert (prompt.ids, prompt.asked, Prompt("a").asked, Prompt.of("a")) == ([1, 2], "b", "a", Prompt("a"))
    with pytest.raises(TilebeamError, match="a text without token ids"):
        Prompt("a").ids  # noqa: B018


@pytest.mark.parametrize("algorithm", [SelfConsistency(), Adaptive(), BestOfN()])
def test_results_are_short_in_a_notebook(algorithm: Any) -> None:
    lm = Scripted({"p" * 500: [("so it is 42. " * 100, 0)] * 4})
    lm.keep_prefixes = nullcontext  # type: ignore[attr-defined]
    shown = repr(algorithm.infer(lm, "p" * 500, 4))
    assert len(shown) < 250
    assert "'so it is 42." in shown
    assert ("answer 42 (42 x" in shown) == (not isinstance(algorithm, BestOfN))


def test_one_prompt_is_not_taken_for_several() -> None:
    lm = Scripted({"ab": [("1", 0)] * 2})
    talk: Any = [{"role": "user", "content": "ab"}]
    for wrong in ("ab", Prompt("ab"), talk, talk[0]):
        with pytest.raises(TilebeamError, match="put it into a list"):
            SelfConsistency().run(lm, wrong, 2)
        with pytest.raises(TilebeamError, match="put it into a list"):
            SelfConsistency().completed(lm, wrong, 2)
    with pytest.raises(TilebeamError, match="put it into a list"):
        SelfConsistency().infer(lm, talk[0], 2)
    assert lm.calls == []


def test_misbehaving_scorers_are_named() -> None:
    lm = Scripted({"p": [("1", 0)] * 2})

    class Short(Scorer):
        def score(self, prompt: Any, candidates: Sequence[CompletionOutput]) -> list[float]:
            return [float(len(prompt.text))] * (len(candidates) - 1)

    with pytest.raises(TilebeamError, match="Short returned 1 scores where 2"):
        BestOfN(Short()).infer(lm, "p", budget=2)
    with pytest.raises(TilebeamError, match="not a number"):
        BestOfN(lambda *_: float("nan")).infer(lm, "p", budget=2)

    class Nothing(Scorer):
        def score(self, prompt: Any, candidates: Sequence[CompletionOutput]) -> list[float]:
            return [None for _ in candidates if prompt]  # type: ignore[misc]

    def unsure(*_: str) -> None:
        pass

    with pytest.raises(TilebeamError, match="verifier unsure returned None as a score: return a number"):
        BestOfN(unsure).infer(lm, "p", budget=2)  # type: ignore[arg-type]
    with pytest.raises(TilebeamError, match="Nothing returned None as a score"):
        BestOfN(Nothing()).infer(lm, "p", budget=2)

    class OfTexts(Scorer):
        def score(self, prompt: Any, candidates: Any) -> list[float]:  # noqa: ARG002
            return [len(c) for c in candidates]

    class OfPrompts(Scorer):
        def score(self, prompt: Any, candidates: Any) -> list[float]:
            return [prompt.count(c.text) for c in candidates]

    for scorer in (OfTexts(), OfPrompts()):
        with pytest.raises(TilebeamError, match=r"reads prompt.text and candidate.text"):
            BestOfN(scorer).infer(lm, "p", budget=2)
    with pytest.raises(TilebeamError, match="scorer must be"):
        BestOfN(5)  # type: ignore[arg-type]


CUT, WHOLE = ("it was 25, so", "length"), ("so it is 42", "stop")


@pytest.mark.parametrize(
    ("samples", "votes", "best"),
    [
        ([CUT, CUT, CUT, WHOLE], {"42": 1}, 3),
        ([CUT, ("no idea", "stop"), CUT], {"25": 2}, 0),  # no other has an answer
        ([CUT, CUT], {"25": 2}, 0),
        ([("well", "length"), ("no idea", "stop")], {}, 1),
    ],
)
def test_a_text_that_was_cut_has_no_vote_unless_there_is_no_other(
    samples: list[tuple[str, Any]], votes: dict[str, float], best: int
) -> None:
    class Given(Scripted):
        def generate(self, *arguments: Any, **more: Any) -> list[RequestOutput]:
            (output,) = super().generate(*arguments, **more)
            for candidate, (_, end) in zip(output.outputs, samples, strict=True):
                candidate.finish_reason = end
            return [output]

    lm = Given({"p": [(text, -1.0 - i) for i, (text, _) in enumerate(samples)]})
    vote = SelfConsistency("last-number").infer(lm, "p", len(samples))  # type: ignore[call-overload]
    assert (vote.votes, vote.best_index, vote.answer) == (votes, best, next(iter(votes), None))
    ended = [end == "stop" for _, end in samples]
    chosen = BestOfN("logprob").infer(lm, "p", len(samples))  # type: ignore[call-overload]
    assert chosen.best_index == (ended.index(True) if any(ended) else 0)
    # What a checker found does not depend on an end.
    checked = BestOfN(lambda _, text: "25" in text).infer(lm, "p", len(samples))  # type: ignore[call-overload]
    assert checked.best_index == (0 if CUT in samples else 1)


def test_answers_equal_the_numbers_that_they_spell() -> None:
    lm = Scripted({"p": [("21", 0), ("21.0", 0)]})
    answer = SelfConsistency("last-number").infer(lm, "p", budget=2).answer
    assert answer == 21 == answer == 21.0 == answer == "21"
    assert answer is not None
    assert (answer != 22, answer != "21.0", {"21": 2}[answer]) == (True, True, 2)
    assert json.dumps([answer]) == '["21"]'
    assert (VotedAnswer("1/2") == 0.5, VotedAnswer("1/3") == Fraction(1, 3), VotedAnswer("0.1") == 0.1) == (
        True,
        True,
        True,
    )
    assert all(VotedAnswer(text) != 0 for text in ("1/0", "x", "", "1e999"))
    assert VotedAnswer("1e999") != 1e308
    assert VotedAnswer("1e999999999999") != 1  # whose digits would fill the memory
    assert VotedAnswer("1e5") == 100_000


@pytest.mark.parametrize("kind", [SelfConsistency, Adaptive, ToolReasoning])
def test_extractors_go_by_name_and_wrong_ones_are_refused_at_once(kind: Any) -> None:
    assert kind("last-number") is not None
    for wrong, said in (
        ("numbr", "do you mean last-number"),
        ("word", "neither last-number, .*, math, nor .* without a group"),
        ("[0-9]+", "without a group in parentheses"),
        (5, "function of a text, or the name of one, not 5"),
    ):
        with pytest.raises(TilebeamError, match=said):
            kind(wrong)


def test_votes_count_numbers_by_value_in_the_first_spelling() -> None:
    lm = Scripted({"p": [("1/2", 0), (r"\frac{2}{4}", 0), ("0.5", 0), ("3", 0), ("3.0", 0), ("none", 0)]})
    vote = SelfConsistency(last_number).infer(lm, "p", budget=6)
    assert (vote.answer, vote.votes) == ("1/2", {"1/2": 3.0, "3": 2.0})
    odd = SelfConsistency(last_number, equal=lambda a, b: ("/" in a) == ("/" in b))
    assert odd.infer(lm, "p", budget=6).votes == {"0.5": 3.0, "1/2": 2.0}


def test_marked_answers() -> None:
    assert regex(r"<a>(.*?)</a>")("<a>1</a><a> 02 </a>") == "2"
    assert regex(r"\d+")("1 22") == "22"
    assert regex(r"(?i)the answer is:? (.*)")("The answer is 12.0\nThe Answer is: Blue Cheese.") == "blue cheese"
    assert regex(r"x")("y") is None


# --- with a real model ------------------------------------------------------------------------------------------------


def _length(text: str) -> str | None:
    return str(len(text) % 3) if text else None


@pytest.mark.parametrize("n_seq_max", [4, 32])
def test_settled_votes_make_room_and_are_those_of_their_first_candidates(
    tmp_path_factory: pytest.TempPathFactory, n_seq_max: int
) -> None:
    """Alone, with others, with slots for all and for few: of a deterministic model the same."""
    from bench.lib.synth import preset, write_model

    path = write_model(tmp_path_factory.mktemp("m") / "m.gguf", preset("tiny", type="q8_0"))
    prompts, params = ["the cat", "the question is", "of a", "number", "how many times"], {"max_tokens": 12, "seed": 3}
    search = Adaptive(_length, confidence=0.8, weighting="logprob")
    with tilebeam.load(path, n_ctx=2048, n_seq_max=n_seq_max, threads=1, deterministic=True) as lm:
        votes = SelfConsistency(_length, weighting="logprob").run(lm, prompts, 16, **params)
        found = search.run(lm, prompts, 16, **params)
        assert any(r.settled for r in found)
        for prompt, vote, result in zip(prompts, votes, found, strict=True):
            n = len(result.candidates)
            assert [c.text for c in result.candidates] == [c.text for c in vote.candidates[:n]]
            assert (result.settled, result.usage.prompt_tokens) == (n < 16, vote.usage.prompt_tokens)
            alone = search.infer(lm, prompt, 16, **params)
            assert [c.text for c in alone.candidates] == [c.text for c in result.candidates]
            assert (alone.votes, alone.answer) == (result.votes, result.answer)
        spent = [sum(r.usage.completion_tokens for r in results) for results in (found, votes)]
        assert spent[0] < spent[1]
        assert not lm._engine.busy
        check_engine(lm._engine)


def test_chats_of_one_text_are_told_apart() -> None:
    """Each answer is read as its own chat says, and drawn under its own grammar."""
    use = ToolUse(FAMILIES["json"], [Tool("f")], forced=False, several=True)
    call = '[{"name": "f", "arguments": {}}]'
    prompt, grammar = Prompt("Q"), f"root ::= {json.dumps(call)}"
    chats = [
        PreparedChat(prompt, SamplingParams(grammar=grammar), use, None),
        PreparedChat(prompt, SamplingParams(), None, None),
    ]
    model = TypedLM(lambda *_: call)
    for chats_now in (chats, chats[::-1]):
        model.grammars.clear()
        found = SelfConsistency("text").run(model, [*chats_now, "Q"], 1)
        wanted = [(1, "") if chat.use is use else (0, call) for chat in chats_now]
        assert [(len(r.best.tool_calls), r.text) for r in found] == [*wanted, (0, call)]
        assert model.grammars == [*(chat.params.grammar for chat in chats_now), None]


def test_reports_leave_out_what_is_known_of_single_tokens() -> None:
    sampling = SamplingParams(logprobs=True, top_logprobs=2)
    told = SelfConsistency("text").infer(TypedLM(lambda *_: "7"), "Q", 1, sampling=sampling).as_dict()
    assert (told["candidates"][0]["logprobs"], told["candidates"][0]["top_logprobs"]) == (None, None)

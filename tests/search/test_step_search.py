"""Search by steps: over a scripted model with a known best path, and over real models whose cells are shared."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tilebeam
from engine_kit import EXACT
from search_kit import END, ScriptedLM
from tilebeam import (
    DVTS,
    LM,
    BeamSearch,
    BestOfN,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StepScorer,
    TilebeamError,
    TokenReward,
    Usage,
)
from tilebeam.engine.detokenizer import Detokenizer
from tilebeam.scoring.reward_model import split_steps

from bench.lib.synth import preset, write_model


class Points(StepScorer):
    """A step is worth what its letter is; or what the whole solution so far is."""

    def __init__(self, points: dict[str, float], **options: Any) -> None:
        super().__init__(**options)
        self.points = points

    def score_steps(self, prompts: Sequence[Any], solutions: Sequence[Sequence[str]]) -> list[list[float]]:
        assert len(prompts) == len(solutions)
        return [
            [
                self.points.get("".join(steps[: i + 1]), self.points.get(step.strip(), 0.0))
                for i, step in enumerate(steps)
            ]
            for steps in solutions
        ]


def test_what_does_not_fit_is_refused() -> None:
    scorer = Points({})
    for bad in ({"beam_width": 0}, {"max_steps": 0}, {"step_stop": ""}, {"max_step_tokens": True}):
        with pytest.raises(TilebeamError, match=next(iter(bad))):
            BeamSearch(scorer, **bad)  # type: ignore[arg-type]
    with pytest.raises(TilebeamError, match="multiple of beam_width"):
        BeamSearch(scorer).infer(ScriptedLM(), "a", budget=6)
    with pytest.raises(TilebeamError, match="StepScorer"):
        BeamSearch(lambda *_: 1.0)  # type: ignore[arg-type]
    with pytest.raises(TilebeamError, match="aggregate"):
        Points({}, aggregate="best")
    with pytest.raises(TilebeamError, match="cancelled"):
        BeamSearch(scorer).infer(ScriptedLM(), "a", budget=4, progress=lambda _: False)
    for held in ({"grammar": 'root ::= "a"'}, {"json_schema": {}}, {"regex": "a"}):
        with pytest.raises(TilebeamError, match="each step would begin it anew"):
            BeamSearch(scorer).infer(ScriptedLM(), "a", budget=4, sampling=SamplingParams(**held))  # type: ignore[arg-type]
    with pytest.raises(TilebeamError, match="no min_tokens"):
        BeamSearch(scorer).infer(ScriptedLM(), "a", budget=4, sampling=SamplingParams(min_tokens=3))


def test_negative_scores_weigh_against_each_other() -> None:
    found = BeamSearch(Points({}), 1, max_steps=2, extract="text").infer(ScriptedLM(ends=0.5), "a", budget=4)
    assert found.scores == [0.0] * len(found.scores)
    for worth in (-1.0, -9.0):
        found = BeamSearch(Constant(worth), 1, max_steps=2, extract="text").infer(ScriptedLM(ends=0.5), "a", budget=4)
        assert found.scores == pytest.approx([1 / len(found.scores)] * len(found.scores))


class Constant(Points):
    """All steps are worth the same."""

    def __init__(self, worth: float) -> None:
        super().__init__({})
        self.worth = worth

    def score_steps(self, prompts: Sequence[Any], solutions: Sequence[Sequence[str]]) -> list[list[float]]:  # noqa: ARG002
        return [[self.worth] * len(steps) for steps in solutions]


class Bytes(ScriptedLM):
    """A model over bytes that writes one text, whoever asks, one byte per token."""

    def __init__(self, text: str) -> None:
        super().__init__(n_ctx=1000)
        self.whole = [*text.encode(), END]

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenize(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t != END).decode("utf-8", "replace")

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], *, progress: Any = None
    ) -> list[RequestOutput]:
        del progress
        results = []
        for prompt, params in zip(prompts, sampling, strict=True):
            rest = self.whole[len(prompt) - 1 :]  # the prompt is one byte
            stream, tokens, reason = Detokenizer(params.stop), [], "length"
            for token in rest[: params.max_tokens]:
                tokens.append(token)
                if token == END or stream.feed(bytes([token])):
                    reason = "stop"
                    break
            sample = CompletionOutput(0, stream.text, tokens, reason, 0, stop_reason=stream.stop_string)  # type: ignore[arg-type]
            usage = Usage(prompt_tokens=len(prompt), completion_tokens=len(tokens))
            results.append(RequestOutput("", list(prompt), [sample] * params.n, usage, 0))
        return results


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("text", ["né\n\u4e16\u754c \U0001f600\nend é", "\U0001f600", "é\né\n", "a\n\nb"])
def test_characters_that_span_rounds_are_whole(text: str, size: int) -> None:
    search = BeamSearch(Points({}), 1, max_steps=100, max_step_tokens=size)
    result = search.infer(Bytes(text), "p", 1, sampling=SamplingParams(seed=0, max_tokens=None))
    assert result.best.text == text
    assert [(list(t.steps), t.finished) for t in result.trajectories] == [(split_steps(text), True)]


@pytest.mark.parametrize(("stop", "expected"), [("\u754c", "né\n\u4e16"), ("\n\u4e16", "né"), ("é\n", "n")])
def test_stop_strings_of_several_bytes_end_a_text(stop: str, expected: str) -> None:
    for size in (1, 2, 100):
        search = BeamSearch(Points({}), 1, max_steps=100, max_step_tokens=size)
        params = SamplingParams(seed=0, max_tokens=None, stop=stop)
        result = search.infer(Bytes("né\n\u4e16\u754c\nx"), "p", 1, sampling=params)
        assert (result.best.text, result.trajectories[0].finished) == (expected, True)


# --- real models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LM]:
    path = write_model(tmp_path_factory.mktemp("model") / "m.gguf", preset("tiny", arch="llama", type="f32"))
    with tilebeam.load(path, "cpu", n_ctx=1024, n_seq_max=8, threads=1, **EXACT) as model:
        yield model


TEXT = "the question is how many times the number"


def test_read_gives_the_logits_of_the_model(lm: LM) -> None:
    ids = lm.tokenize(TEXT)
    whole = lm.logits(ids)
    (some,) = lm.read([ids], [[-1, 0, 3, 3]], [5, 7])
    np.testing.assert_allclose(some.logits, whole[[-1, 0, 3, 3]][:, [5, 7]], atol=1e-4)
    assert (some.decoded_tokens, some.cached_tokens) == (len(ids), 0)
    (everything,) = lm.read([TEXT], [[2]])
    np.testing.assert_allclose(everything.logits[0], whole[2], atol=1e-4)
    assert everything.decoded_tokens == 3  # nothing behind the last position is needed
    assert lm.read([ids], [[]], [1])[0].logits.shape == (0, 1)


def test_read_refuses_what_it_cannot(lm: LM) -> None:
    with pytest.raises(TilebeamError, match="Position 3"):
        lm.read([[1, 2, 3]], [[3]])
    with pytest.raises(TilebeamError, match="1 texts but 2"):
        lm.read([[1, 2, 3]], [[0], [0]])
    with pytest.raises(TilebeamError, match="not in the vocabulary"):
        lm.read([[1, 2, 3]], [[0]], [-1])
    with pytest.raises(TilebeamError, match="context"):
        lm.read([[1] * 2000], [[0]])


def test_beam_search_over_real_models(lm: LM) -> None:
    reward = TokenReward(lm, tag="?", good="1", bad="2", aggregate="min")
    search = BeamSearch(reward, 4, max_steps=4, step_stop="e", max_step_tokens=12)
    params = SamplingParams(seed=5, temperature=1.0)
    result = search.infer(lm, TEXT, budget=8, sampling=params)
    again = search.infer(lm, TEXT, budget=8, sampling=params)
    assert [c.token_ids for c in result.candidates] == [c.token_ids for c in again.candidates]
    rivals = [s for s, t in zip(result.scores, result.trajectories, strict=True) if t.finished] or result.scores
    assert result.scores[result.best_index] == max(rivals)
    # The accounts: of what each continuation began with, one token was decoded again.
    assert result.usage.prompt_tokens == len(lm.tokenize(TEXT))
    assert result.usage.recomputed_tokens <= 2 * result.rounds + 8 * result.rounds
    assert result.usage.scored_tokens > 0
    whole = reward.score_steps([TEXT] * len(result.scores), [t.steps for t in result.trajectories])
    for mine, fresh in zip(result.trajectories, whole, strict=True):
        np.testing.assert_allclose(mine.scores, fresh, atol=1e-4)
    assert not lm.engine.kv.live
    best = BestOfN(reward).infer(lm, TEXT, budget=4, sampling=SamplingParams(max_tokens=20, seed=1))
    assert best.scores == pytest.approx(reward.score(TEXT, best.candidates), abs=1e-4)


def test_searches_of_several_threads_share_a_model_and_a_reward_model(lm: LM) -> None:
    reward = TokenReward(lm, tag="?", good="1", bad="2", aggregate="mean")
    options = {"max_steps": 3, "step_stop": "e", "max_step_tokens": 8}
    found: dict[int, Any] = {}

    def search(i: int) -> None:
        method = [BeamSearch, DVTS][i % 2](reward, 2, **options)
        found[i] = method.infer(lm, f"{i} {TEXT}", 4, sampling=SamplingParams(seed=i))

    threads = [threading.Thread(target=search, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(6))
    for i, result in found.items():
        assert result.prompt == f"{i} {TEXT}"
        assert result.usage.prompt_tokens == len(lm.tokenize(result.prompt))
        assert result.usage.scored_tokens > 0
        fresh = reward.score_steps([result.prompt] * len(result.scores), [t.steps for t in result.trajectories])
        for mine, again in zip(result.trajectories, fresh, strict=True):
            np.testing.assert_allclose(mine.scores, again, atol=1e-4)
    assert not lm.engine.kv.live


def test_a_token_that_ends_a_text_is_no_part_of_it(lm: LM) -> None:
    for seed in range(4):
        drawn = lm.generate([TEXT], seed=seed, max_tokens=12, ignore_eos=True)[0].outputs[0]
        params = SamplingParams(seed=seed, max_tokens=12, ignore_eos=True, stop_tokens=[drawn.token_ids[6]])
        plain = lm.generate([TEXT], params)[0].outputs[0]
        found = BeamSearch(Points({}), 1, step_stop="no such").infer(lm, TEXT, budget=1, sampling=params).best
        assert (found.text, found.token_ids) == (plain.text, plain.token_ids)


def test_control_tokens_that_are_shown_stand_in_the_text(lm: LM) -> None:
    """The marks of calls and thoughts are, in chats that are prepared."""
    bias = {lm.bos: 8.0}
    params = SamplingParams(seed=1, max_tokens=12, ignore_eos=True, logit_bias=bias, shown_tokens=[lm.bos])
    plain = lm.generate([TEXT], params)[0].outputs[0]
    assert "<s>" in plain.text
    found = BeamSearch(Points({}), 1, step_stop="no such").infer(lm, TEXT, budget=1, sampling=params)
    assert found.best.text == plain.text

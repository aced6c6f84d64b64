"""Likelihoods of continuations against the full logits of every text, read alone, and numpy; where a text is cut, what
is read once, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import engine_kit
import numpy as np
import pytest
import tilebeam
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tilebeam import LM, Likelihood, TilebeamError
from tilebeam.engine.likelihood import continued_text

from bench.lib.synth import preset, write_model

EXACT = {**engine_kit.EXACT, "threads": 1, "n_ctx": 512, "n_seq_max": 6}
LONG = "it was the number of the people in the world that for the time " * 6
PROMPT = LONG + "the answer is"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for arch in ("qwen2", "gemma3"):
        write_model(folder / f"{arch}.gguf", preset("tiny", arch=arch, type="f32", n_layer=2))
    return folder


@pytest.fixture(scope="module")
def lm(models: Path) -> Iterator[LM]:
    with tilebeam.load(models / "qwen2.gguf", "cpu", **EXACT) as model:
        yield model


@pytest.fixture(scope="module")
def windowed(models: Path) -> Iterator[LM]:
    """A model with a sliding window of 128 tokens; PROMPT is longer."""
    with tilebeam.load(models / "gemma3.gguf", "cpu", **EXACT) as model:
        assert 0 < model.engine.context.model.n_swa < len(model.tokenize(PROMPT))
        yield model


def oracle(lm: LM, text: Sequence[int], start: int) -> tuple[list[float], bool]:
    """Log-probabilities of a text's tokens from `start` on, and whether each is the likeliest."""
    logits = lm.logits(text).astype(np.float64)[start - 1 : -1]
    logits -= logits.max(1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(1, keepdims=True))
    tail = np.asarray(text[start:])
    return logits[range(len(tail)), tail].tolist(), bool((logits.argmax(1) == tail).all())


def compare(lm: LM, found: Likelihood, text: Sequence[int], start: int) -> None:
    logprobs, greedy = oracle(lm, text, start)
    assert found.token_ids == list(text[start:])
    np.testing.assert_allclose(found.logprobs, logprobs, atol=2e-3)
    assert found.logprob == pytest.approx(sum(logprobs), abs=1e-2)
    assert found.greedy == greedy


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lm", "windowed"])
def test_values_are_those_of_the_whole_texts_logits(request: pytest.FixtureRequest, name: str) -> None:
    lm = request.getfixturevalue(name)
    prompts = [
        (PROMPT, [" the number", " the number of the people", " was", " of " * 20, " the number"]),
        ("the question", [" is", " was that for the time"]),
        (LONG, ["that", "with"]),
    ]
    for (prompt, continuations), found in zip(prompts, lm.loglikelihoods(prompts), strict=True):
        start = len(lm.tokenize(prompt.rstrip()))
        for continuation, likelihood in zip(continuations, found, strict=True):
            compare(lm, likelihood, lm.tokenize(prompt + continuation), start)
            assert (likelihood.characters, likelihood.bytes) == (len(continuation), len(continuation))
            assert likelihood.per_token == likelihood.logprob / len(likelihood.token_ids)
    assert not lm.engine.kv.live


def test_the_likeliest_continuation_is_greedy(lm: LM) -> None:
    prompt = lm.tokenize(PROMPT)
    ids = lm.generate(prompt, tilebeam.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].outputs[0]
    other = [*ids.token_ids[:3], (ids.token_ids[3] + 1) % lm.n_vocab]
    first, second = lm.loglikelihood(prompt, [ids.token_ids, other])
    assert first.greedy
    assert not second.greedy


TEXTS = st.lists(st.lists(st.integers(5, 30), min_size=1, max_size=12), min_size=1, max_size=5)


@pytest.mark.parametrize("name", ["lm", "windowed"])
@given(data=st.data(), tails=st.lists(TEXTS, min_size=1, max_size=3))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tokens_together_are_as_each_alone(
    request: pytest.FixtureRequest, name: str, data: st.DataObject, tails: list[list[list[int]]]
) -> None:
    lm = request.getfixturevalue(name)
    heads = st.sampled_from([[7], list(range(5, 60)), list(range(5, 205)), [*range(5, 150), 9]])
    prompts = [(data.draw(heads), some) for some in tails]
    for (prompt, some), found in zip(prompts, lm.loglikelihoods(prompts), strict=True):
        for tail, likelihood in zip(some, found, strict=True):
            compare(lm, likelihood, prompt + tail, len(prompt))


# --- the border -------------------------------------------------------------------------------------------------------


def test_white_space_at_the_border_belongs_to_the_continuation(lm: LM) -> None:
    (before,) = lm.loglikelihood("the number ", ["of the people"])
    (after,) = lm.loglikelihood("the number", [" of the people"])
    assert lm.tokenize("the number ")[-1] != lm.tokenize("the number")[-1]
    assert before.token_ids == after.token_ids
    assert before.logprobs == pytest.approx(after.logprobs, abs=1e-4)
    assert (before.characters, after.characters) == (13, 14)  # of the text that was given


def test_a_token_over_the_border_is_the_continuations(lm: LM) -> None:
    """ "the quest" + "ion" is "the question", whose last token the prompt alone does not have."""
    whole = lm.tokenize("the question is")
    start = len(lm.tokenize("the"))
    assert lm.tokenize("the quest")[start:] != whole[start : start + 1]
    (alone,) = lm.loglikelihood("the quest", ["ion is"])
    compare(lm, alone, whole, start)
    # Continuations of one prompt begin at the same token: sums are of texts with the same beginning.
    first, second = lm.loglikelihood("the quest", ["ion is", " is"])
    compare(lm, first, whole, start)
    compare(lm, second, lm.tokenize("the quest is"), start)


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_bos(lm: LM, prompt: str) -> None:
    (found,) = lm.loglikelihood(prompt, ["the number"])
    compare(lm, found, lm.tokenize(prompt + "the number"), 1)


class Words:
    """A vocabulary of words; what it adds to texts can be chosen."""

    size = 100

    def __init__(self, bos: int = -1, eos: int = -1, adds_eos: bool = False) -> None:
        self.bos, self.eos, self.adds_eos = bos, eos, adds_eos

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        assert add_special
        assert parse_special
        words = [sum(map(ord, w)) % 50 + 10 for w in text.split()]
        return words + [self.eos] * self.adds_eos


def test_models_without_bos_begin_with_eos() -> None:
    found = continued_text(Words(eos=3), "", ["a b", "c"], True)  # type: ignore[arg-type]
    assert (found.start, [t[0] for t in found.texts], [len(t) for t in found.texts]) == (1, [3, 3], [3, 2])
    # "ab" is another word than "a": no token of the prompt is left.
    found = continued_text(Words(bos=2, eos=3), "a", ["b"], True)  # type: ignore[arg-type]
    assert (found.start, found.texts[0][0], len(found.texts[0])) == (1, 2, 2)
    with pytest.raises(TilebeamError, match="neither BOS nor EOS"):
        continued_text(Words(), "", ["a"], True)  # type: ignore[arg-type]


def test_an_eos_that_the_tokenizer_adds_is_not_scored() -> None:
    found = continued_text(Words(eos=3, adds_eos=True), "a b", [" c", " d e"], True)  # type: ignore[arg-type]
    assert found.start == 2
    assert [t[2:] for t in found.texts] == [t[-n:] for t, n in zip(found.texts, (1, 2), strict=True)]
    assert all(3 not in t for t in found.texts)


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_continuations_of_one_token_cost_their_prompt(lm: LM) -> None:
    prompt = lm.tokenize(PROMPT)
    found = lm.loglikelihood(prompt, [[5], [6], [7], [8]])
    assert [x.decoded_tokens for x in found] == [len(prompt), 0, 0, 0]
    assert len({x.logprob for x in found}) == 4


def test_shared_beginnings_are_decoded_once(lm: LM) -> None:
    prompt = lm.tokenize(PROMPT)
    tail = list(range(5, 45))
    found = lm.loglikelihood(prompt, [[*tail, 9, 9], [*tail, 8, 8], [*tail[:20], 7, 7, 7]])
    # The first is read but for its last token, of the others what comes behind their common beginning.
    assert [x.decoded_tokens for x in found] == [len(prompt) + 41, 1, 2]
    assert [x.cached_tokens for x in found] == [0, len(prompt) + 40, len(prompt) + 20]


def test_prompts_with_common_examples_share_them(lm: LM, windowed: LM) -> None:
    for model in (lm, windowed):
        head = model.tokenize(PROMPT)
        found = model.loglikelihoods([([*head, i], [[5], [6]]) for i in range(10, 14)])
        assert sum(x.decoded_tokens for some in found for x in some) == len(head) + 4


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_scored_is_refused(lm: LM) -> None:
    for prompt, continuations, reason in (
        ("the", [" of", ""], "Continuation 1 is empty"),
        ("the", " of", "a list of texts"),
        ([], [[1]], "The prompt has no tokens"),
        ([1], [[1], []], "Continuation 1 is empty"),
        ([1], [[1], [lm.n_vocab]], "Continuation 1: token 1024 is not in the vocabulary"),
        ([-1], [[1]], "Token -1 is not in the vocabulary"),
        ([1], [" of"], "all texts, or all token ids"),
        ("the", [[1]], "all texts, or all token ids"),
        ("the", [" of" * 600], "Prompt 0 with continuation 0 has 604 tokens, the context 512"),
    ):
        with pytest.raises(TilebeamError, match=reason):
            lm.loglikelihood(prompt, continuations)  # type: ignore[arg-type]
    assert lm.loglikelihood("the", []) == []


def test_a_text_as_long_as_the_context_is_scored(lm: LM) -> None:
    ids = [5 + i % 40 for i in range(lm.n_ctx)]
    (found,) = lm.loglikelihood(ids[:1], [ids[1:]])
    compare(lm, found, ids, 1)


def test_tokens_without_text_have_no_length(lm: LM) -> None:
    (found,) = lm.loglikelihood([5, 6], [[lm.eos]])
    assert (found.characters, found.bytes, found.per_byte, found.per_character) == (0, 0, -math.inf, -math.inf)
    (found,) = lm.loglikelihood("the", [" é"])
    assert (found.characters, found.bytes) == (2, 3)
    assert found.per_byte == found.logprob / 3


def test_a_call_that_its_hook_ends_leaves_the_cache_to_others(lm: LM) -> None:
    class Stop(Exception):
        pass

    def hook(_decoded: int, _total: int) -> None:
        raise Stop

    texts = [[token] * 50 for token in (7, 8, 9)]
    with lm.keep_prefixes():
        lm.generate(PROMPT, max_tokens=1)
        before = lm.figures().cells_used
        for ask in (
            lambda: lm.token_logprobs(texts, progress=hook),
            lambda: lm.hidden(texts, [[0, -1]] * 3, progress=hook),
        ):
            with pytest.raises(Stop):
                ask()
            usage = lm.generate(PROMPT, max_tokens=1)[0].usage
            assert usage.cached_tokens == usage.prompt_tokens - 1
        assert before > 0
    assert lm.figures().cells_used == 0
    with pytest.raises(Stop):
        lm.token_logprobs(texts, progress=hook)
    assert lm.figures().cells_used == 0


def test_tokens_that_there_are_not_are_refused_alike(lm: LM) -> None:
    for token in (-1, lm.n_vocab):
        said = rf"Token {token} is not in the vocabulary \(0 to {lm.n_vocab - 1}\)"
        for ask in (
            lambda t: lm.logits([t, 1]),
            lambda t: lm.read([[1, t]], [[0]]),
            lambda t: lm.read([[1]], [[0]], tokens=[3, t]),
            lambda t: lm.token_logprobs([[1, t]]),
            lambda t: lm.generate([[1, t]], max_tokens=1),
        ):
            with pytest.raises(TilebeamError, match=said):
                ask(token)

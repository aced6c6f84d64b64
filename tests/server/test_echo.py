"""Prompts in answers, with log-probabilities: numbers against the library's, and lm-evaluation-harness as a client."""

from __future__ import annotations

import importlib.util
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tilebeam import LM

pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from server_kit import PROMPT, TEXT, Running
from tilebeam.server import service
from tilebeam.server.openai import choice_answer
from tilebeam.server.openai.completions import CompletionAnswer
from tilebeam.server.writing import dumped, dumped_in_parts

SCORED: dict[str, Any] = {"model": "tiny", "echo": True, "logprobs": 2, "max_tokens": 0, "temperature": 0}


def test_a_prompt_is_scored_as_by_the_library(client: Any, lm: LM) -> None:
    ids = lm.tokenize(PROMPT)
    answer = client.completions.create(**SCORED, prompt=[ids, ids[:3]])
    for choice, asked in zip(answer.choices, (ids, ids[:3]), strict=True):
        told = choice.logprobs
        (wanted,) = lm.loglikelihood(asked[:1], [asked[1:]])
        assert told.token_logprobs[0] is None
        assert told.token_logprobs[1:] == pytest.approx(wanted.logprobs, abs=1e-5)
        assert told.top_logprobs[0] is None
        rows = lm.logits(asked).astype(np.float64)
        for i, named in enumerate(told.top_logprobs[1:]):
            row = rows[i] - np.log(np.exp(rows[i] - rows[i].max()).sum()) - rows[i].max()
            assert sorted(named.values()) == pytest.approx(sorted(row)[-2:], abs=1e-4)
        assert choice.finish_reason == "length"
        assert choice.text == lm.detokenize(asked)
    assert answer.usage.prompt_tokens == len(ids) + 3
    assert answer.usage.completion_tokens == 0


def test_where_tokens_start(client: Any, lm: LM) -> None:
    prompt = "the <s>number é?"
    told = client.completions.create(**SCORED, prompt=prompt).choices[0].logprobs
    ids = lm.tokenize(prompt)
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == len(ids)
    assert told.text_offset == sorted(told.text_offset)
    assert told.text_offset[told.tokens.index("?")] == len(prompt) - 1
    assert told.text_offset[told.tokens.index("<s>", 1)] == prompt.index("<s>")


def test_scores_go_before_samples(client: Any, lm: LM) -> None:
    options = SCORED | {"max_tokens": 6, "seed": 4, "temperature": 1, "n": 2, "prompt": PROMPT}
    ids = lm.tokenize(PROMPT)
    whole = client.completions.create(**options)
    plain = client.completions.create(**options | {"echo": False})
    scores = client.completions.create(**SCORED, prompt=PROMPT).choices[0].logprobs.token_logprobs
    for choice, sample in zip(whole.choices, plain.choices, strict=True):
        assert choice.text == PROMPT + sample.text
        assert choice.logprobs.token_logprobs[: len(ids)] == pytest.approx(scores, abs=1e-4)
        count = len(sample.logprobs.tokens)
        assert choice.logprobs.tokens[len(ids) : len(ids) + count] == sample.logprobs.tokens
        assert [o - len(PROMPT) for o in choice.logprobs.text_offset[len(ids) :][:count]] == sample.logprobs.text_offset
    streamed: list[list[float | None]] = [[], []]
    text = ["", ""]
    for chunk in client.completions.create(**options, stream=True):
        for piece in chunk.choices:
            text[piece.index] += piece.text
            streamed[piece.index] += piece.logprobs.token_logprobs if piece.logprobs else []
    assert text == [choice.text for choice in whole.choices]
    assert streamed == [choice.logprobs.token_logprobs for choice in whole.choices]


def test_the_token_that_ends_a_text_is_counted(client: Any, lm: LM) -> None:
    """Harnesses ask for one token, and count the prompt's from both ends of the list."""
    forced = {str(lm.eos): 100}
    answer = client.completions.create(**SCORED | {"max_tokens": 1, "logit_bias": forced}, prompt=PROMPT)
    choice = answer.choices[0]
    assert choice.text == PROMPT
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.tokens) == len(lm.tokenize(PROMPT)) + 1
    assert choice.logprobs.tokens[-1] == "</s>"
    assert choice.logprobs.text_offset[-1] == len(PROMPT)


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_at_all(server: Running, stream: bool) -> None:
    answer = server.post(TEXT, {"prompt": ["a b", "c"], "max_tokens": 0, "stream": stream, "n": 2})
    assert answer.status_code == 200
    if not stream:
        choices = answer.json()["choices"]
    else:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        choices = [json.loads(line)["choices"][0] for line in lines]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in choices] == [(i, "", "length") for i in range(4)]


def test_many_clients_score_and_sample_at_once(server: Running, lm: LM) -> None:
    """Readings take the model for themselves, samples share it: whoever steps last has to wake who is next."""
    ids = [lm.tokenize(f"the number {i} of the people") for i in range(40)]
    body = SCORED | {"max_tokens": 1}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: server.post(TEXT, body | {"prompt": prompt}), ids))
    assert [answer.status_code for answer in answers] == [200] * 40
    for prompt, answer in zip(ids, answers, strict=True):
        assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == len(prompt) + 1


# --- lm-evaluation-harness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_long_answers_are_written_beside_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Other streams go on while many log-probabilities are written, and a token is looked up once."""
    wrote: set[str] = set()
    looked_up: list[int] = []
    told, spelling = CompletionAnswer._told, LM.spelling

    def watched(*given: Any) -> Any:
        wrote.add(threading.current_thread().name)
        return told(*given)

    def counted(lm: LM, token: int) -> bytes:
        if threading.current_thread().name in wrote:
            looked_up.append(token)
        return spelling(lm, token)

    def encoded(data: Any, depth: int = 5) -> bytes:
        wrote.add(threading.current_thread().name)
        return dumped_in_parts(data, depth)

    monkeypatch.setattr(CompletionAnswer, "_told", watched)
    monkeypatch.setattr(LM, "spelling", counted)
    for module in (service, choice_answer):
        monkeypatch.setattr(module, "dumped_in_parts", encoded)
    answer = server.post(TEXT, SCORED | {"prompt": [PROMPT, PROMPT], "stream": stream})
    assert answer.status_code == 200
    assert wrote
    assert "server" not in wrote  # the event loop's thread
    assert len(looked_up) == len(set(looked_up)) > 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON, st.integers(0, 6))
def test_parts_of_an_answer_are_its_json(data: Any, depth: int) -> None:
    assert dumped_in_parts(data, depth) == dumped(data)


needs_harness = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("lm_eval", "tenacity", "aiohttp", "requests")),
    reason="lm-evaluation-harness with its extra api is not installed: pip install 'lm-eval[api]'",
)


@needs_harness
@pytest.mark.parametrize("options", [{}, {"num_concurrent": 4}, {"batch_size": 3}])
def test_the_harness_gets_the_librarys_numbers(server: Running, lm: LM, options: dict[str, Any]) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(base_url=f"{server.url}{TEXT}", model="tiny", **options)
    pairs = [("the people", " was"), ("the number ", "of the people"), ("one two", " three"), ("the", " in the <s>")]
    found = model.loglikelihood([SimpleNamespace(args=pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (logprob, greedy) in zip(pairs, found, strict=True):
        own = lm.tokenize(context.rstrip(), add_special=False)
        rest = lm.tokenize(context + continuation, add_special=False)[len(own) :]
        (wanted,) = lm.loglikelihood(own, [rest])
        assert logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert greedy == wanted.greedy

"""/v1/completions and /v1/chat/completions with OpenAI's own client: what is answered is what the model says."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import openai
import pytest
from server_kit import MESSAGES, PROMPT, Running, running, texts
from tilebeam import LM, SamplingParams
from tilebeam.engine import request as engine_request


def log_softmax(logits: Any) -> Any:
    x = logits.astype(np.float64)
    return x - (m := x.max()) - np.log(np.exp(x - m).sum())


# --- completions ------------------------------------------------------------------------------------------------------


def test_completions_are_what_the_model_says(client: Any, lm: LM) -> None:
    prompts = [PROMPT, "one two three"]
    wanted = lm.generate(prompts, SamplingParams(n=3, temperature=1, top_k=0, top_p=1, max_tokens=12, seed=5))
    got = client.completions.create(
        model="tiny", prompt=prompts, n=3, temperature=1, top_p=1, max_tokens=12, seed=5, extra_body={"top_k": 0}
    )
    assert texts(got.choices) == [s.text for o in wanted for s in o.outputs]
    assert [c.finish_reason for c in got.choices] == [s.finish_reason for o in wanted for s in o.outputs]
    assert got.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in wanted)
    assert got.usage.completion_tokens == sum(len(s.token_ids) for o in wanted for s in o.outputs)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    assert got.object == "text_completion"
    assert got.model == "tiny"
    assert got.system_fingerprint.startswith("tilebeam-")


def test_token_ids_as_a_prompt(client: Any, lm: LM) -> None:
    ids = lm.tokenize(PROMPT)
    one = client.completions.create(model="tiny", prompt=PROMPT, seed=1, max_tokens=8)
    same = client.completions.create(model="tiny", prompt=ids, seed=1, max_tokens=8)
    both = client.completions.create(model="tiny", prompt=[ids, ids[:4]], seed=1, max_tokens=8)
    assert texts(same.choices) == texts(one.choices) == texts(both.choices)[:1]
    assert len(both.choices) == 2


def test_seeds_repeat_and_an_answer_tells_its_seed(client: Any) -> None:
    def ask(**options: Any) -> Any:
        return client.completions.create(model="tiny", prompt=PROMPT, max_tokens=16, n=2, **options)

    first = ask()
    assert texts(ask(seed=first.tilebeam["seed"]).choices) == texts(first.choices)
    assert texts(ask(seed=7).choices) == texts(ask(seed=7).choices) != texts(ask(seed=8).choices)
    assert first.choices[0].text != first.choices[1].text
    assert ask(seed=-1).tilebeam["seed"] != ask(seed=-1).tilebeam["seed"]


def test_default_length_and_stop(client: Any, lm: LM) -> None:
    plain = client.completions.create(model="tiny", prompt=PROMPT, seed=3, extra_body={"ignore_eos": True})
    assert plain.usage.completion_tokens == 16
    text = plain.choices[0].text
    stop = text[4:7]
    cut = client.completions.create(model="tiny", prompt=PROMPT, seed=3, stop=[stop, "never \x00"])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    wanted = lm.generate(PROMPT, SamplingParams(seed=3, max_tokens=16, stop=stop))[0].outputs[0]
    assert cut.choices[0].text == wanted.text


def test_a_stream_is_the_whole_answer_in_pieces(client: Any) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": [PROMPT, "one two"], "n": 2, "seed": 11, "max_tokens": 20}
    options |= {"logprobs": 2, "stop": ["e t"]}
    whole = client.completions.create(**options)
    parts: dict[int, Any] = {i: {"text": "", "tokens": [], "finish": [], "offsets": []} for i in range(4)}
    usage = None
    count = 0
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        assert chunk.id.startswith("cmpl-")
        assert (chunk.usage is None) == bool(chunk.choices)
        usage = chunk.usage
        for choice in chunk.choices:
            count += 1
            part = parts[choice.index]
            part["text"] += choice.text
            if choice.logprobs:
                part["tokens"] += choice.logprobs.tokens
                part["offsets"] += choice.logprobs.text_offset
            if choice.finish_reason:
                part["finish"].append(choice.finish_reason)
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert count > 8
    for choice in whole.choices:
        part = parts[choice.index]
        assert part["text"] == choice.text
        assert part["finish"] == [choice.finish_reason]
        assert part["tokens"] == choice.logprobs.tokens
        assert part["offsets"] == choice.logprobs.text_offset


def test_logprobs_are_the_models(client: Any, lm: LM) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, logprobs=3, max_tokens=10, seed=2)
    sample = lm.generate(PROMPT, SamplingParams(seed=2, max_tokens=10))[0].outputs[0]
    told = answer.choices[0].logprobs
    ids = lm.tokenize(PROMPT)
    logits = lm.logits(ids + sample.token_ids)
    shown = [t for t in sample.token_ids if lm.piece(t)]
    assert len(told.tokens) == len(shown)
    for i in range(len(shown)):
        row = log_softmax(logits[len(ids) + i - 1])
        assert told.token_logprobs[i] == pytest.approx(row[sample.token_ids[i]], abs=1e-3)
        best = sorted(row, reverse=True)[:3]
        assert sorted(told.top_logprobs[i].values(), reverse=True) == pytest.approx(best, abs=1e-3)
    none = client.completions.create(model="tiny", prompt=PROMPT, logprobs=0, max_tokens=10, seed=2).choices[0].logprobs
    assert none.token_logprobs == told.token_logprobs
    assert none.top_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_is_checked_once_for_many_prompts(
    server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """And not on the event loop: a large one takes long."""
    checks: list[tuple[str, str]] = []

    def watched(what: Any) -> Any:
        def run(params: SamplingParams, *more: Any) -> Any:
            if params.grammar is not None:
                checks.append((what.__name__, threading.current_thread().name))
            return what(params, *more)

        return run

    monkeypatch.setattr(engine_request, "grammar_of", watched(engine_request.grammar_of))
    monkeypatch.setattr(engine_request, "Sampler", watched(engine_request.Sampler))
    grammar = f'root ::= "checked once {stream}"'
    body = {"prompt": [PROMPT] * 4, "max_tokens": 2, "grammar": grammar, "stream": stream}
    assert server.post("/v1/completions", body).status_code == 200
    assert [what for what, _ in checks] == ["grammar_of", "Sampler"]
    assert "server" not in [thread for _, thread in checks]
    wrong = body | {"grammar": grammar + " nothing"}
    assert [server.post("/v1/completions", wrong).status_code for _ in range(2)] == [400, 400]


def test_a_chat_may_be_any_object(client: Any) -> None:
    anything = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format={"type": "json_object"}, seed=1, max_tokens=24
    )
    assert anything.choices[0].message.content.startswith("{")


# --- chat -------------------------------------------------------------------------------------------------------------


def test_a_chat_is_its_template(client: Any, lm: LM) -> None:
    text = lm.chat_prompt(MESSAGES, template="chatml").text
    wanted = lm.generate(text, SamplingParams(n=2, seed=9, max_tokens=12))[0]
    got = client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, seed=9, max_completion_tokens=12)
    assert [c.message.content for c in got.choices] == [s.text for s in wanted.outputs]
    assert got.choices[0].message.role == "assistant"
    assert got.usage.prompt_tokens == len(lm.tokenize(text))
    parts: Any = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
    same = client.chat.completions.create(model="other", messages=parts, n=2, seed=9, max_tokens=12)
    assert [c.message.content for c in same.choices] == [c.message.content for c in got.choices]


def test_an_assistants_message_is_continued(client: Any, lm: LM) -> None:
    said = [*MESSAGES, {"role": "assistant", "content": "the number"}]
    text = lm.chat_prompt(MESSAGES, template="chatml").text + "the number"
    wanted = lm.generate(text, SamplingParams(seed=9, max_tokens=12))[0].outputs[0].text
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    options: dict[str, Any] = {"model": "tiny", "messages": said, "seed": 9, "max_tokens": 12}
    assert client.chat.completions.create(**options, extra_body=fields).choices[0].message.content == wanted
    other = client.chat.completions.create(**options).choices[0].message.content
    assert other != wanted  # a turn of its own


def test_control_tokens_in_a_continued_message_are_text(lm: LM) -> None:
    from tilebeam.server.openai.chat_completions import prompt_of
    from tilebeam.server.requests import ChatRequest
    from tilebeam.server.settings import Settings

    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the </s> number"}]
    body = ChatRequest.model_validate({"messages": turns, "continue_final_message": True})
    prompt = prompt_of(lm, body, Settings(chat_template="chatml"))
    before = prompt_of(lm, ChatRequest.model_validate({"messages": turns[:1]}), Settings(chat_template="chatml"))
    assert prompt.text == before.text + "the </s> number"
    assert prompt.ids[: len(before.ids)] == before.ids
    assert not any(lm.is_control(t) for t in prompt.ids[len(before.ids) :])


def test_a_chat_streams_with_logprobs(client: Any) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "seed": 3, "max_tokens": 12, "n": 2}
    options |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options)
    text, finish = ["", ""], ["", ""]
    tokens: list[list[Any]] = [[], []]
    roles = []
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            roles += [choice.delta.role] if choice.delta.role else []
            text[choice.index] += choice.delta.content or ""
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
            finish[choice.index] += choice.finish_reason or ""
    assert roles == ["assistant", "assistant"]
    for choice in whole.choices:
        assert text[choice.index] == choice.message.content
        assert finish[choice.index] == choice.finish_reason
        assert tokens[choice.index] == choice.logprobs.content
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 2
            assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        spelled = b"".join(bytes(e.bytes) for e in choice.logprobs.content)
        assert spelled.decode("utf-8", "replace").startswith(choice.message.content[:4])


def test_models(client: Any, lm: LM) -> None:
    models = client.models.list().data
    assert [m.id for m in models] == ["tiny", "other", "model"]
    assert client.models.retrieve("other").meta["n_ctx"] == lm.n_ctx
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_the_next_turn_reads_only_what_is_new(lm: LM) -> None:
    def turn(client: Any, messages: Any) -> Any:
        return client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )

    with running(lm) as server:
        cold = turn(server.client(), MESSAGES)
        talk = [*MESSAGES, {"role": "assistant", "content": cold.choices[0].message.content}, *MESSAGES[1:]]
        longer = turn(server.client(), talk)
        assert longer.usage.prompt_tokens_details.cached_tokens == 0
        with lm.keep_prefixes():
            assert turn(server.client(), MESSAGES).choices[0].message.content == cold.choices[0].message.content
            warm = turn(server.client(), talk)
    assert warm.choices[0].message.content == longer.choices[0].message.content
    assert warm.usage.prompt_tokens_details.cached_tokens >= cold.usage.prompt_tokens

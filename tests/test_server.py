"""The HTTP server with OpenAI's own client: what it answers is what the model says, and every error has its name."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
import tilebeam.methods
from tilebeam import LM, BeamSearch, BestOfN, LogProb, SamplingParams, SelfConsistency, TokenReward

openai = pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
httpx = pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from server_kit import Running, running, until  # noqa: E402

from gguf_tools.synth import preset, write_model  # noqa: E402

PROMPT = "the question is how many"
MESSAGES: Any = [{"role": "system", "content": "answer"}, {"role": "user", "content": "how many"}]
# Scheduling then never changes a text: see test_engine.py.
EXACT: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "flash_attn": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("server") / "tiny.gguf", preset("tiny", type="f32"))


@pytest.fixture(scope="module")
def lm(path: Path) -> Iterator[LM]:
    with tilebeam.load(path, "cpu", n_ctx=1024, n_seq_max=4, threads=1, **EXACT) as model:
        yield model


@pytest.fixture(scope="module")
def reward(path: Path) -> Iterator[TokenReward]:
    with tilebeam.load(path, "cpu", n_ctx=1024, n_seq_max=4, threads=1, **EXACT) as model:
        yield TokenReward(model, tag="?", good="1", bad="2")


@pytest.fixture(scope="module")
def server(lm: LM, reward: TokenReward) -> Iterator[Running]:
    with running(lm, reward=reward, max_body=1 << 16) as it:
        yield it


@pytest.fixture(scope="module")
def client(server: Running) -> Any:
    return server.client()


def texts(choices: Any) -> list[str]:
    return [c.text for c in sorted(choices, key=lambda c: c.index)]


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


def test_samples_are_what_requests_with_their_seeds_give(client: Any) -> None:
    several = client.completions.create(model="tiny", prompt=PROMPT, n=3, seed=21, max_tokens=12)
    single = [client.completions.create(model="tiny", prompt=PROMPT, seed=21 + i, max_tokens=12) for i in range(3)]
    assert texts(several.choices) == [one.choices[0].text for one in single]


def test_default_length_echo_and_stop(client: Any, lm: LM) -> None:
    plain = client.completions.create(model="tiny", prompt=PROMPT, seed=3, extra_body={"ignore_eos": True})
    assert plain.usage.completion_tokens == 16
    echoed = client.completions.create(model="tiny", prompt=PROMPT, seed=3, echo=True, extra_body={"ignore_eos": True})
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
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


def test_echo_in_a_stream(client: Any) -> None:
    chunks = client.completions.create(model="tiny", prompt=PROMPT, echo=True, stream=True, seed=1, max_tokens=4)
    pieces = [c.choices[0].text for c in chunks]
    assert pieces[0] == PROMPT
    whole = client.completions.create(model="tiny", prompt=PROMPT, echo=True, seed=1, max_tokens=4)
    assert "".join(pieces) == whole.choices[0].text


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


def test_best_of(client: Any, lm: LM) -> None:
    got = client.completions.create(model="tiny", prompt=PROMPT, n=2, best_of=6, seed=4, max_tokens=10)
    samples = lm.generate(PROMPT, SamplingParams(n=6, seed=4, max_tokens=10, logprobs=True))[0].outputs
    ranked = sorted(samples, key=lambda s: -(s.cumulative_logprob or 0) / len(s.token_ids))
    assert texts(got.choices) == [s.text for s in ranked[:2]]
    assert got.usage.completion_tokens == sum(len(s.token_ids) for s in samples)
    assert got.choices[0].logprobs is None


def test_logit_bias_and_penalties_reach_the_sampler(client: Any, lm: LM) -> None:
    token = lm.tokenize(" step", add_special=False)[-1]
    forced = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, logit_bias={str(token): 100}, seed=1)
    assert forced.choices[0].text == lm.detokenize([token] * 4)
    free = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=4, logit_bias={str(token): 100}, frequency_penalty=2, temperature=0
    )
    assert free.choices[0].text == forced.choices[0].text  # two per token do not outweigh a hundred
    greedy = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1, temperature=0).choices[0].text
    (first,) = lm.tokenize(greedy, add_special=False)[-1:]
    banned = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, temperature=0, logit_bias={str(first): -100}
    )
    assert banned.choices[0].text != greedy


def test_formats_bind_the_text(client: Any) -> None:
    schema = {"type": "object", "properties": {"ok": {"enum": ["yes", "no"]}}, "required": ["ok"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format=wanted, seed=1, max_tokens=100
    )
    assert json.loads(answer.choices[0].message.content)["ok"] in ("yes", "no")
    assert answer.choices[0].finish_reason == "stop"
    grammar = 'root ::= "one " ("two" | "three")'
    for extra in ({"grammar": grammar}, {"response_format": {"type": "grammar", "grammar": grammar}}):
        told = client.completions.create(model="tiny", prompt=PROMPT, seed=1, max_tokens=50, extra_body=extra)
        assert told.choices[0].text in ("one two", "one three")
    anything = client.chat.completions.create(
        model="tiny", messages=MESSAGES, response_format={"type": "json_object"}, seed=1, max_tokens=24
    )
    assert anything.choices[0].message.content.startswith("{")


# --- chat -------------------------------------------------------------------------------------------------------------


def test_a_chat_is_its_template(client: Any, lm: LM) -> None:
    text = lm.apply_chat_template(MESSAGES, template="chatml")
    wanted = lm.generate(text, SamplingParams(n=2, seed=9, max_tokens=12))[0]
    got = client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, seed=9, max_completion_tokens=12)
    assert [c.message.content for c in got.choices] == [s.text for s in wanted.outputs]
    assert got.choices[0].message.role == "assistant"
    assert got.usage.prompt_tokens == len(lm.tokenize(text))
    parts: Any = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
    same = client.chat.completions.create(model="other", messages=parts, n=2, seed=9, max_tokens=12)
    assert [c.message.content for c in same.choices] == [c.message.content for c in got.choices]


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


# --- errors -----------------------------------------------------------------------------------------------------------

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: Any = [{"role": "user", "content": "hi"}]

BANNED = {str(t): -100 for t in range(1024)}  # every token

WRONG: list[tuple[str, Any, int, str | None, str]] = [
    (TEXT, {}, 400, "missing_required_parameter", "prompt"),
    (TEXT, {"prompt": "a", "temprature": 1}, 400, "unknown_parameter", "temprature"),
    (TEXT, {"prompt": "a", "suffix": "b"}, 400, "unknown_parameter", "suffix"),
    (TEXT, {"prompt": "a", "n": 0}, 400, "invalid_value", "n: "),
    (TEXT, {"prompt": "a", "n": "2"}, 400, "invalid_value", "n: "),
    (TEXT, {"prompt": "a", "n": True}, 400, "invalid_value", "n: "),
    (TEXT, {"prompt": "a", "n": 129}, 400, "too_many_samples", "129"),
    (TEXT, {"prompt": ["a"] * 65, "n": 2}, 400, "too_many_samples", "130"),
    (TEXT, {"prompt": "a", "temperature": -1}, 400, "invalid_value", "temperature"),
    (TEXT, {"prompt": "a", "top_p": 0}, 400, "invalid_value", "top_p"),
    (TEXT, {"prompt": "a", "presence_penalty": 3}, 400, "invalid_value", "presence_penalty"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    (TEXT, {"prompt": "a", "stop": ["x"] * 17}, 400, "invalid_value", "stop"),
    (TEXT, {"prompt": "a", "stop": ""}, 400, "invalid_value", "empty"),
    (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "invalid_value", "token ids"),
    (TEXT, {"prompt": "a", "logit_bias": {"1": 101}}, 400, "invalid_value", "-100"),
    (TEXT, {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "invalid_value", "99999"),
    (TEXT, {"prompt": "a", "logprobs": 21}, 400, "invalid_value", "logprobs"),
    (TEXT, {"prompt": "a", "logprobs": 1, "echo": True}, 400, None, "echo"),
    (TEXT, {"prompt": "a", "best_of": 2, "n": 3}, 400, None, "best_of (2)"),
    (TEXT, {"prompt": "a", "best_of": 2, "stream": True}, 400, None, "cannot be streamed"),
    (TEXT, {"prompt": "a", "stream_options": {}}, 400, None, "stream_options"),
    (TEXT, {"prompt": "a", "model": "gpt-9"}, 404, "model_not_found", "'tiny'"),
    (TEXT, {"prompt": "a " * 3000}, 400, "context_length_exceeded", "1024"),
    (TEXT, {"prompt": []}, 400, None, "prompt"),
    (TEXT, {"prompt": [5, 2000]}, 400, None, "2000"),
    (TEXT, {"prompt": [-1]}, 400, None, "-1"),
    (TEXT, {"prompt": [[]]}, 400, "invalid_value", "no tokens"),
    (TEXT, {"prompt": [1.5]}, 400, "invalid_value", "prompt: must be a text, a list of token ids"),
    (TEXT, {"prompt": "a", "stop": [5]}, 400, "invalid_value", "stop: must be a text or a list"),
    (TEXT, {"prompt": "a", "search": "beam"}, 400, "invalid_value", "search"),
    (TEXT, {"prompt": "a", "grammar": "root ::= ("}, 400, "invalid_value", "grammar"),
    (TEXT, {"prompt": "a", "grammar": "(" * 100}, 400, "invalid_grammar", "nested deeper"),
    (
        TEXT,
        {"prompt": "a", "grammar": 'root ::= "é\\u4f60"', "logit_bias": {"5": 1, "x": 2}},
        400,
        "invalid_value",
        "x",
    ),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "invalid_value", "json_schema"),
    (
        TEXT,
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
        400,
        None,
        "cannot be turned into a grammar",
    ),
    (
        TEXT,
        {
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "https://x.example/s"}}},
        },
        400,
        None,
        "not followed",
    ),
    (TEXT, {"prompt": "a", "grammar": 'root ::= "\\U0001F600"', "logit_bias": BANNED}, 400, "nothing_allowed", "allow"),
    (CHAT, {"messages": []}, 400, "invalid_value", "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, 400, "invalid_value", "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": "a\0b"}]}, 400, "invalid_value", "NUL"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, 400, "invalid_value", "tools"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, 400, None, "logprobs: true"),
    (CHAT, {"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}, 400, None, "differ"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "invalid_value",
        "content",
    ),
    (CHAT, {"messages": HI, "search": {"method": "magic"}}, 400, "invalid_search", "magic"),
    (CHAT, {"messages": HI, "search": {"method": "beam", "beam_with": 4}}, 400, "invalid_search", "beam_with"),
    (CHAT, {"messages": HI, "search": {"method": "beam", "beam_width": 0}}, 400, "invalid_search", "beam_width"),
    (
        CHAT,
        {"messages": HI, "search": {"method": "beam", "beam_width": 3, "budget": 4}},
        400,
        "search_failed",
        "multiple",
    ),
    (CHAT, {"messages": HI, "search": {"method": "vote", "extract": "(a+)+$"}}, 400, None, "last-number"),
    (CHAT, {"messages": HI, "search": {"method": "vote", "extract": 5}}, 400, None, "last-number"),
    (CHAT, {"messages": HI, "search": {"method": "vote", "equal": "x"}}, 400, None, "equal"),
    (CHAT, {"messages": HI, "search": {"method": "best-of-n", "scorer": "oracle"}}, 400, "invalid_search", "oracle"),
    (CHAT, {"messages": HI, "search": {"method": "beam"}, "stream": True}, 400, None, "no stream"),
    (CHAT, {"messages": HI, "search": {"method": "beam", "budget": 256}}, 400, "too_many_samples", "256"),
]


def named(value: Any) -> str:
    return json.dumps(value)[:50] if isinstance(value, dict) else ""


@pytest.mark.parametrize(("where", "body", "status", "code", "says"), WRONG, ids=named)
def test_what_is_wrong_is_said(
    server: Running, where: str, body: Any, status: int, code: str | None, says: str
) -> None:
    answer = server.post(where, body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert error["code"] == code
    assert says in error["message"]
    assert error["type"] == "invalid_request_error" if status == 400 else error["type"] == "not_found_error"
    assert set(error) == {"message", "type", "param", "code"}


def test_what_is_no_request(server: Running) -> None:
    def said(response: Any) -> str:
        return str(response.json()["error"]["message"])

    url = server.url
    broken = httpx.post(f"{url}{TEXT}", content=b'{"prompt": ', headers={"content-type": "application/json"})
    assert (broken.status_code, "not valid JSON" in said(broken)) == (400, True)
    deep = httpx.post(f"{url}{TEXT}", content=b"[" * 60000, headers={"content-type": "application/json"})
    assert deep.status_code == 400
    surrogate = httpx.post(
        f"{url}{TEXT}", content=b'{"prompt": "\\ud800"}', headers={"content-type": "application/json"}
    )
    assert surrogate.status_code == 400
    form = httpx.post(f"{url}{TEXT}", data={"prompt": "a"})
    assert (form.status_code, "application/json" in said(form)) == (400, True)
    listed = server.post(TEXT, ["a"])
    assert (listed.status_code, "JSON object" in said(listed)) == (400, True)
    large = server.post(TEXT, {"prompt": "a" * (1 << 16)})
    assert (large.status_code, "larger than" in said(large)) == (413, True)
    # Sent in chunks, no header tells how large it is.
    chunks = httpx.post(f"{url}{TEXT}", content=iter([b"x" * 1000] * 100), headers={"content-type": "application/json"})
    assert chunks.status_code == 413
    assert httpx.get(f"{url}/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert httpx.get(f"{url}{TEXT}").status_code == 405
    foreign = server.post(TEXT, {"prompt": "a"}, headers={"host": "evil.example"})
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "host_not_allowed")
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}, headers={"host": "localhost:1"}).status_code == 200
    assert (
        "access-control-allow-origin" not in httpx.get(f"{url}/health", headers={"origin": "http://a.example"}).headers
    )


def test_the_openai_client_knows_the_errors(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a " * 3000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="Unrecognized request argument"):
        client.completions.create(model="tiny", prompt="a", extra_body={"magic": 1})


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys(lm: LM) -> None:
    with running(lm, api_keys=("secret", "other one"), cors_origins=("http://good.example",)) as server:
        for key in ("secret", "other one"):
            assert server.client(api_key=key).completions.create(model="tiny", prompt="a", max_tokens=1).choices
        for wrong in ("secret2", "secre", "none"):
            with pytest.raises(openai.AuthenticationError):
                server.client(api_key=wrong).models.list()
        assert httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "secret"}).status_code == 200
        for where in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            refused = httpx.get(f"{server.url}{where}")
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "missing_api_key"
        assert httpx.get(f"{server.url}/health").status_code == 200
        allowed = {"origin": "http://good.example", "access-control-request-method": "POST"}
        asked = httpx.options(f"{server.url}{CHAT}", headers=allowed)
        assert asked.headers["access-control-allow-origin"] == "http://good.example"
        stranger = httpx.options(f"{server.url}{CHAT}", headers=allowed | {"origin": "http://bad.example"})
        assert "access-control-allow-origin" not in stranger.headers


# --- clients that share and leave -------------------------------------------------------------------------------------

LONG: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 900, "extra_body": {"ignore_eos": True}}


def idle(server: Running) -> bool:
    now = server.metrics()
    return now["tilebeam_samples_admitted"] == now["tilebeam_kv_cells_used"] == now["tilebeam_samples_running"] == 0


def test_clients_share_batches(server: Running, client: Any) -> None:
    before = server.lm.figures().batches
    with client.completions.create(**LONG, stream=True) as first:
        next(iter(first))
        alone = client.completions.create(model="tiny", prompt="one two", seed=3, n=2, max_tokens=24)
    now = server.lm.figures().batches
    assert now.get(3, 0) - before.get(3, 0) >= 20  # one of the stream and two of the other
    until(lambda: idle(server))
    assert texts(
        client.completions.create(model="tiny", prompt="one two", seed=3, n=2, max_tokens=24).choices
    ) == texts(alone.choices)
    told = server.metrics()
    sizes = server.lm.figures().batches
    assert told["tilebeam_batch_samples_count"] == sum(sizes.values())
    assert told["tilebeam_batch_samples_sum"] == sum(size * count for size, count in sizes.items())


def test_a_stream_that_is_closed_frees_its_cells(server: Running, client: Any) -> None:
    until(lambda: idle(server))
    left = server.metrics().get('tilebeam_requests_total{path="/v1/completions",status="499"}', 0)
    with client.completions.create(**LONG, n=3, stream=True) as stream:
        next(iter(stream))
        assert server.metric("tilebeam_samples_running") == 3
        assert server.metric("tilebeam_kv_cells_used") > 0
    until(lambda: idle(server))
    assert server.metrics()['tilebeam_requests_total{path="/v1/completions",status="499"}'] == left + 1


@pytest.mark.parametrize("extra", [{}, {"search": {"method": "vote", "budget": 4}}], ids=["completion", "search"])
def test_a_client_that_leaves_frees_its_cells(server: Running, extra: dict[str, Any]) -> None:
    until(lambda: idle(server))
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True} | extra

    content = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        until(lambda: server.lm.figures().running > 0)
    until(lambda: idle(server))
    assert server.post(TEXT, {"prompt": PROMPT, "max_tokens": 2}).status_code == 200


def test_a_crowd(server: Running, client: Any) -> None:
    """Clients of all kinds at once, some of which leave: who stays gets what it would get alone, and nothing is left
    behind."""
    search: dict[str, Any] = {"method": "beam", "budget": 4, "beam_width": 2, "max_steps": 3, "step_stop": "e"}

    def ask(number: int) -> str | None:
        options: dict[str, Any] = {"model": "tiny", "prompt": f"{PROMPT} {number % 5}", "seed": number}
        match number % 6:
            case 0 | 1:
                return "|".join(texts(client.completions.create(**options, n=3, max_tokens=20).choices))
            case 2:
                chunks = client.completions.create(**options, stream=True, max_tokens=30, logprobs=1)
                return "".join(c.choices[0].text for c in chunks)
            case 3:
                with client.completions.create(**options, stream=True, max_tokens=400) as stream:
                    for _, _chunk in zip(range(number % 4), stream, strict=False):
                        pass
                return None
            case 4:
                found = client.completions.create(**options, max_tokens=16, extra_body={"search": search})
                return str(found.choices[0].text)
            case _:
                with pytest.raises(openai.BadRequestError):
                    client.completions.create(**options, extra_body={"grammar": "root ::= ["})
                return None

    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, range(36)))
    until(lambda: idle(server))
    assert [ask(number) for number in range(36)] == together
    until(lambda: idle(server))


def test_a_full_queue_says_so(lm: LM) -> None:
    with running(lm, max_waiting=1) as server:
        client = server.client()
        with client.completions.create(**LONG, n=4, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model="tiny", prompt="a", n=2)
            assert caught.value.code == "queue_full"
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="tiny", prompt="a", n=2, stream=True)
            with ThreadPoolExecutor(1) as pool:
                waits = pool.submit(client.completions.create, model="tiny", prompt="a", max_tokens=2)
                until(lambda: server.metric("tilebeam_samples_waiting") == 1)
                with pytest.raises(openai.RateLimitError):
                    client.completions.create(model="tiny", prompt="a")
                stream.close()
                assert waits.result().choices
        until(lambda: idle(server))
        # An idle server takes a request of any size that it takes at all.
        assert len(client.completions.create(model="tiny", prompt="a", n=9, max_tokens=1).choices) == 9
        assert server.metric("tilebeam_requests_refused_total") == 3


def test_figures_of_requests(lm: LM) -> None:
    with running(lm) as server:
        client = server.client()
        client.completions.create(model="tiny", prompt=PROMPT, n=2, max_tokens=5, extra_body={"ignore_eos": True})
        for _ in client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, stream=True):
            pass
        server.post(TEXT, {"prompt": "a", "n": 0})
        told = server.metrics()
        assert told['tilebeam_requests_total{path="/v1/completions",status="200"}'] == 2
        assert told['tilebeam_requests_total{path="/v1/completions",status="400"}'] == 1
        assert told["tilebeam_prompt_tokens_total"] == 2 * len(lm.tokenize(PROMPT))
        assert 11 <= told["tilebeam_generated_tokens_total"] <= 15
        assert told["tilebeam_first_token_seconds_count"] == 1
        assert told['tilebeam_request_seconds_count{path="/v1/completions"}'] == 3
        assert told["tilebeam_slots"] == 4
        assert told["tilebeam_kv_cells"] == 1024
        assert told["tilebeam_ready"] == 1
        assert told['tilebeam_seconds_total{kind="decode"}'] > 0


# --- searches ---------------------------------------------------------------------------------------------------------


def test_searches_are_the_algorithms(client: Any, lm: LM, reward: TokenReward) -> None:
    params = SamplingParams(seed=6, max_tokens=24)

    def ask(**search: Any) -> Any:
        extra = {"search": search | {"candidates": True}}
        return client.completions.create(model="tiny", prompt=PROMPT, seed=6, max_tokens=24, extra_body=extra).choices[
            0
        ]

    told = ask(method="best-of-n", budget=6, scorer="logprob")
    direct = BestOfN(LogProb()).infer(lm, PROMPT, 6, sampling=params)
    assert told.text == direct.the_one.text
    assert told.search["scores"] == pytest.approx(direct.scores, abs=1e-4)
    assert [c["text"] for c in told.search["candidates"]] == [c.text for c in direct.candidates]
    told = ask(method="best-of-n", budget=6)  # there is a reward model
    rated = BestOfN(reward).infer(lm, PROMPT, 6, sampling=params)
    assert told.text == rated.the_one.text
    assert told.search["scores"] == pytest.approx(rated.scores, abs=1e-4)
    told = ask(method="vote", budget=8, extract="text")
    voted = SelfConsistency(tilebeam.extract.extractor("text")).infer(lm, PROMPT, 8, sampling=params)
    assert (told.text, told.search["answer"]) == (voted.the_one.text, voted.answer)
    told = ask(method="beam", budget=8, beam_width=2, max_steps=3, step_stop="e")
    grown = BeamSearch(reward, 2, 3, "e").infer(lm, PROMPT, 8, sampling=params)
    assert told.text == grown.the_one.text
    assert told.search["budget"] == 8
    told = ask(method="adaptive", budget=6, extract="text")
    options: dict[str, Any] = {"scorer": reward, "extract": "text"}
    settled = tilebeam.methods.create("adaptive", **options).infer(lm, PROMPT, 6, sampling=params)
    assert (told.text, told.search["votes"]) == (settled.the_one.text, settled.votes)  # type: ignore[attr-defined]


def test_a_search_in_a_chat_counts_what_it_cost(server: Running, client: Any) -> None:
    before = server.metrics().get('tilebeam_searches_total{method="dvts"}', 0)
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=16,
        seed=1,
        extra_body={"search": {"method": "dvts", "budget": 4, "beam_width": 2, "max_steps": 2, "step_stop": "e"}},
    )
    assert answer.choices[0].message.role == "assistant"
    assert "candidates" not in answer.choices[0].search
    assert answer.tilebeam["scored_tokens"] > 0
    assert answer.usage.completion_tokens > 0
    assert server.metrics()['tilebeam_searches_total{method="dvts"}'] == before + 1
    without = {"messages": HI, "search": {"method": "best-of-n", "scorer": "reward", "budget": 2}, "max_tokens": 4}
    assert server.post(CHAT, without).status_code == 200


@pytest.mark.parametrize("method", ["best-of-n", "vote", "beam", "dvts", "adaptive"])
def test_searches_without_a_limit_end(server: Running, method: str) -> None:
    """A chat may go on until the context is full; logits forced to the end of text keep that short here."""
    sent: Any = [*MESSAGES, {"role": "assistant", "content": "so", "refusal": None, "tool_calls": None}, *MESSAGES[1:]]
    body = {"messages": sent, "search": {"method": method, "budget": 4}, "logit_bias": {str(server.lm.eos): 8}}
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    assert len(answer.json()["choices"][0]["search"]["scores"]) <= 4
    until(lambda: idle(server))


def test_searches_of_several_clients_run_together(server: Running, client: Any) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24}
    search = {"search": {"method": "beam", "budget": 4, "beam_width": 2, "max_steps": 4, "step_stop": "e"}}
    alone = [client.completions.create(**options, seed=s, extra_body=search).choices[0].text for s in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = [pool.submit(client.completions.create, **options, seed=s, extra_body=search) for s in range(4)]
        assert [t.result().choices[0].text for t in together] == alone
    until(lambda: idle(server))


def test_examples_of_the_manual(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/server.md: its Python and its curl, as pasted but for the port and fewer tokens."""
    manual = (Path(__file__).parent.parent / "docs" / "server.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", manual, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        code = example.replace("http://localhost:8080", server.url).replace(
            'model="model",', 'model="model", max_tokens=9,'
        )
        exec(code.replace("max_tokens=512,", ""), names)
    assert len(names["answer"].choices) == 4
    assert str(names["found"].tilebeam["scored_tokens"]) in capsys.readouterr().out
    asked = re.findall(r"curl localhost:8080(/\S+) -H '(.*?): (.*?)'[\s\\]* -d '(.*?)'", manual, re.DOTALL)
    assert [where for where, _, _, _ in asked] == [TEXT, CHAT]
    for where, header, value, body in asked:
        limited = json.dumps(json.loads(body) | {"max_tokens": 5})
        answer = httpx.post(server.url + where, content=limited, headers={header: value}, timeout=60)
        assert answer.status_code == 200, answer.text


def test_a_beam_needs_a_reward_model(lm: LM) -> None:
    with running(lm) as server:
        for scorer in ({}, {"scorer": "reward"}):
            answer = server.post(TEXT, {"prompt": "a", "search": {"method": "beam"} | scorer})
            assert answer.status_code == 400
            assert "reward model" in answer.json()["error"]["message"]

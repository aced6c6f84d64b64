"""Fields that common clients send: those that change nothing, and those that have another name elsewhere."""

from __future__ import annotations

import importlib
import json
import math
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from server_kit import CHAT, HI, PATIENCE, PROMPT, TEXT, Running
from tilebeam import LM, SamplingParams
from tilebeam.server.openai.chat_completions import prompt_of
from tilebeam.server.openai.response_requests import ResponsesRequest
from tilebeam.server.reading_routes import EmbeddingRequest
from tilebeam.server.requests import ChatRequest, CompletionRequest
from tilebeam.server.settings import Settings

NEUTRAL: dict[str, Any] = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "verbosity": "low",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "cache_prompt": False,
    "id_slot": -1,
    "timings_per_token": True,
    "return_progress": True,
    "t_max_prompt_ms": 500,
    "request_id": "r",
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
}
SHORT: dict[str, Any] = {"seed": 3, "max_tokens": 6}
TEMPLATE = "{{ reasoning_effort }}|{{ enable_thinking }}|{% for m in messages %}{{ m.content }}{% endfor %}"


def answer(server: Running, where: str, body: Any) -> Any:
    told = server.post(where, body)
    assert told.status_code == 200, told.text
    choice = told.json()["choices"][0]
    return choice["text"] if where == TEXT else choice["message"]["content"]


@pytest.mark.parametrize(("where", "body"), [(TEXT, {"prompt": PROMPT}), (CHAT, {"messages": HI})])
def test_fields_without_effect(server: Running, where: str, body: Any) -> None:
    assert answer(server, where, body | SHORT | NEUTRAL) == answer(server, where, body | SHORT)


# Each kind of request: its path, its class, what it needs, and where OpenAI's client has the types of its fields.
REQUESTS: list[tuple[str, type[BaseModel], dict[str, Any], str]] = [
    (TEXT, CompletionRequest, {"prompt": PROMPT}, "completion_create_params.CompletionCreateParamsBase"),
    (CHAT, ChatRequest, {"messages": HI}, "chat.completion_create_params.CompletionCreateParamsBase"),
    ("/v1/responses", ResponsesRequest, {"input": "hi"}, "responses.response_create_params.ResponseCreateParamsBase"),
    ("/v1/embeddings", EmbeddingRequest, {"input": "hi"}, "embedding_create_params.EmbeddingCreateParams"),
]


@pytest.mark.parametrize(("where", "kind", "body", "types"), REQUESTS, ids=[where for where, *_ in REQUESTS])
def test_null_is_a_field_that_is_left_out(
    server: Running, where: str, kind: type[BaseModel], body: dict[str, Any], types: str
) -> None:
    """Every field that OpenAI's client knows, and every field of the server's own."""
    module, _, name = types.rpartition(".")
    known = getattr(importlib.import_module(f"openai.types.{module}"), name)
    names = {*known.__annotations__, *kind.model_fields, "stream"} - body.keys()
    assert len(names) >= 4
    plain = kind.model_validate(body)
    for field in names:
        assert kind.model_validate(body | {field: None}) == plain, field
    for field in body:
        told = server.post(where, {field: None})
        assert (told.status_code, told.json()["error"]["param"]) == (400, field)
    short = body | ({} if where == "/v1/embeddings" else {"seed": 3, "temperature": 0})
    short |= {"max_output_tokens": 3} if "responses" in where else {"max_tokens": 3} if where in (TEXT, CHAT) else {}
    first, second = (server.post(where, short | given) for given in ({}, dict.fromkeys(names - short.keys())))
    assert (first.status_code, second.status_code) == (200, 200), second.text
    for part in ("choices", "data"):
        assert first.json().get(part) == second.json().get(part)


def test_nulls_within_a_request() -> None:
    said: dict[str, Any] = {"role": "assistant", "content": "a"}
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f"}}
    form = {"type": "json_schema", "json_schema": {"name": "n"}}
    nulls = dict.fromkeys(("name", "refusal", "audio", "function_call", "annotations", "tool_calls", "tool_call_id"))
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"messages": [*HI, said]}, {"messages": [*HI, said | nulls]}),
        (
            {"messages": [*HI, {"role": "assistant", "tool_calls": [call]}]},
            {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call | {"id": None}]}]},
        ),
        (
            {"messages": HI, "tools": [tool]},
            {"messages": HI, "tools": [{**tool, "function": {"name": "f", "parameters": None, "strict": None}}]},
        ),
        (
            {"messages": HI, "response_format": form},
            {"messages": HI, "response_format": form | {"json_schema": {"name": "n", "schema": None, "strict": None}}},
        ),
        ({"messages": HI, "stream": True}, {"messages": HI, "stream": True, "stream_options": None}),
        (
            {"messages": HI, "stream": True, "stream_options": {}},
            {"messages": HI, "stream": True, "stream_options": {"include_usage": None}},
        ),
    ]
    for plain, given in pairs:
        assert ChatRequest.model_validate(given) == ChatRequest.model_validate(plain)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_until_the_context_is_full(server: Running, lm: LM, field: str) -> None:
    ids = [5] * (lm.n_ctx - 8)
    body = {"prompt": ids} if field == "max_tokens" else {"messages": HI, "stop": ["e", "a", " "]}
    where = TEXT if field == "max_tokens" else CHAT
    told = server.post(where, body | {field: -1, "ignore_eos": True, "seed": 1}).json()
    if field == "max_tokens":
        assert told["usage"]["completion_tokens"] == lm.n_ctx - len(ids)
    assert told["choices"][0]["finish_reason"] == ("length" if field == "max_tokens" else "stop")


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"json": {"enum": [1, 2]}}, lambda text: json.loads(text) in (1, 2)),
        ({"json": '{"enum": [1, 2]}'}, lambda text: json.loads(text) in (1, 2)),
        ({"regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= {"a", "b"}),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"grammar": 'root ::= "x" | "y"'}, lambda text: text in ("x", "y")),
    ],
)
def test_structured_outputs(server: Running, wanted: Any, fits: Any) -> None:
    assert fits(answer(server, CHAT, {"messages": HI, "seed": 1, "max_tokens": 20, "structured_outputs": wanted}))


def test_structured_outputs_that_are_none(server: Running) -> None:
    for wanted in ({}, {"json": True, "regex": "a"}, {"choice": [""]}, {"json": "{"}):
        told = server.post(TEXT, {"prompt": "a", "structured_outputs": wanted})
        assert told.status_code == 400
        assert "structured_outputs" in told.json()["error"]["param"]
    told = server.post(TEXT, {"prompt": "a", "structured_outputs": {"regex": "(?=a)"}})
    assert told.json()["error"]["param"] == "structured_outputs.regex"
    told = server.post(TEXT, {"prompt": "a", "structured_outputs": {"regex": "a"}, "grammar": 'root ::= "a"'})
    assert "exclude each other" in told.json()["error"]["message"]


def test_the_effort_is_a_variable_of_the_template(server: Running, lm: LM) -> None:
    def prompt(**fields: Any) -> str:
        return prompt_of(
            lm, ChatRequest.model_validate({"messages": HI} | fields), Settings(chat_template=TEMPLATE)
        ).text

    assert prompt(reasoning_effort="high").startswith("high|True|")
    assert prompt(reasoning_effort="none").startswith("|False|")
    assert prompt(reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"}).startswith("low|True|")
    told = server.post(CHAT, {"messages": HI, "reasoning_effort": "much"})
    assert (told.status_code, told.json()["error"]["param"]) == (400, "reasoning_effort")


@pytest.mark.parametrize("where", ["/health", "/v1/health", "/v1/models", "/models"])
def test_heads(server: Running, where: str) -> None:
    told = httpx.head(f"{server.url}{where}", timeout=PATIENCE)
    assert (told.status_code, told.content) == (200, b"")
    assert httpx.head(f"{server.url}{TEXT}", timeout=PATIENCE).status_code == 405


def test_tokens_that_end_the_text(server: Running, lm: LM, client: Any) -> None:
    drawn = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
    whole = lm.generate([PROMPT], drawn)[0].outputs[0]
    at = next(i for i in range(5, 20) if whole.token_ids[i] not in whole.token_ids[:i])
    ended = lm.generate([PROMPT], drawn, stop_tokens=[whole.token_ids[at]])[0].outputs[0]
    assert ended.token_ids == whole.token_ids[: at + 1]
    assert ended.finish_reason == "stop"
    assert ended.text == lm.generate([PROMPT], drawn, max_tokens=at)[0].outputs[0].text
    extra = {"ignore_eos": True, "stop_token_ids": [whole.token_ids[at]]}
    options: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "seed": 3, "max_tokens": 20, "extra_body": extra}
    told = client.completions.create(**options)
    assert (told.choices[0].text, told.choices[0].finish_reason) == (ended.text, "stop")
    assert told.usage.completion_tokens == at + 1
    assert "".join(c.choices[0].text for c in client.completions.create(**options, stream=True)) == ended.text
    for wrong in ({"stop_token_ids": [-1]}, {"stop_token_ids": [3], "search": {"method": "vote"}}):
        refused = server.post(TEXT, {"prompt": "a"} | wrong)
        assert (refused.status_code, "stop_token" in refused.text) == (400, True)


@pytest.mark.parametrize("more", [{}, {"top_k": 0}, {"temperature": 0.0}, {"logit_bias": {7: 2.0}, "top_k": 0}])
def test_no_token_ends_a_text_before_it_has_so_many(lm: LM, more: dict[str, Any]) -> None:
    """By native code and by llama.cpp's chain: what follows is what would follow a text that does not end."""
    drawn = SamplingParams(seed=3, max_tokens=24, n=3, **{"top_k": 40} | more)
    whole = lm.generate([PROMPT], drawn, ignore_eos=True, logit_bias={lm.eos: -math.inf, **more.get("logit_bias", {})})
    stops = sorted({sample.token_ids[3] for sample in whole[0].outputs})
    free = lm.generate([PROMPT], drawn, stop_tokens=stops)[0].outputs
    assert all(len(sample.token_ids) <= 4 for sample in free)
    held = lm.generate([PROMPT], drawn, stop_tokens=stops, min_tokens=8)[0].outputs
    for sample in held:
        assert not {*stops, lm.eos} & {*sample.token_ids[:8]}
        assert len(sample.token_ids) >= 8
    always = lm.generate([PROMPT], drawn, stop_tokens=stops, min_tokens=24)[0].outputs
    assert [sample.finish_reason for sample in always] == ["length"] * 3
    assert [sample.token_ids[:8] for sample in always] == [sample.token_ids[:8] for sample in held]
    banned = dict.fromkeys((*stops, lm.eos), -math.inf)
    same = lm.generate([PROMPT], drawn, logit_bias=more.get("logit_bias", {}) | banned)[0].outputs
    assert [sample.token_ids for sample in always] == [sample.token_ids for sample in same]


def test_least_tokens(server: Running, lm: LM, client: Any) -> None:
    short: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "seed": 3, "max_tokens": 20}
    extra: dict[str, Any] = {"logit_bias": {lm.eos: 100}}
    told = client.completions.create(**short, extra_body=extra)
    assert told.usage.completion_tokens == 1
    told = client.completions.create(**short, extra_body=extra | {"min_tokens": 7})
    assert (told.usage.completion_tokens, told.choices[0].finish_reason) == (8, "stop")
    for wrong in ({"max_tokens": 3}, {"grammar": 'root ::= "a"'}, {"search": {"method": "vote"}}):
        refused = server.post(TEXT, {"prompt": "a", "max_tokens": 20, "min_tokens": 7} | wrong)
        assert (refused.status_code, "min_tokens" in refused.text) == (400, True)
    for where, body in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": HI})):
        refused = server.post(where, body | {"max_tokens": 3, "min_tokens": 7})
        assert refused.json()["error"]["param"] == "min_tokens"
        assert "at most max_tokens, 3, not 7" in refused.text


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("where", "body"),
    [
        ("/chat/completions", {"messages": HI, "max_tokens": 3, "seed": 1}),
        ("/embeddings", {"input": "a cat"}),
        ("/responses", {"input": "hi", "max_output_tokens": 3, "seed": 1}),
    ],
)
def test_paths_without_a_version(server: Running, where: str, body: Any) -> None:
    short, long = (server.post(prefix + where, body).json() for prefix in ("", "/v1"))
    assert short["usage"] == long["usage"]
    for key in ("choices", "data"):
        assert short.get(key) == long.get(key)
    listed = [httpx.get(f"{server.url}{prefix}/models", timeout=PATIENCE).json() for prefix in ("", "/v1")]
    assert [m["id"] for m in listed[0]["data"]] == [m["id"] for m in listed[1]["data"]]


@pytest.mark.parametrize(
    ("where", "body"),
    [
        (TEXT, {"prompt": "a", "json_schema": SCHEMA}),
        (CHAT, {"messages": HI, "json_schema": SCHEMA}),
        (CHAT, {"messages": HI, "response_format": {"type": "json_object", "schema": SCHEMA}}),
    ],
)
def test_schemas_by_llama_servers_names(server: Running, where: str, body: Any) -> None:
    answer = server.post(where, body | {"max_tokens": 60, "seed": 2}).json()
    (choice,) = answer["choices"]
    text = choice["text"] if where == TEXT else choice["message"]["content"]
    assert json.loads(text) in ({"n": 1}, {"n": 2})

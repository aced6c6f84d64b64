"""Every error of the server has its name and status; keys."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from server_kit import ANSWER, CHAT, HI, TEXT, Running, running
from tilebeam import LM

BANNED = {str(t): -100 for t in range(1024)}  # every token

TOOLS = [{"type": "function", "function": {"name": "f"}}]
ODD = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}]
CHOSEN = {"type": "function", "function": {"name": "g"}}
UNNAMED = [{"type": "function", "function": {"name": "a b"}}]
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
NOTHING = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
NARROW = {"method": "beam", "beam_width": 3, "budget": 4}
BROKEN = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}


def tool(parameters: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


DEEP: Any = json.loads('{"a":' * 400 + "1" + "}" * 400)
DEEP_CALL = {"function": {"name": "f", "arguments": json.dumps(DEEP)}}
RESULT = {"role": "tool", "content": "a"}
LISTED = {"prompt": [[5]] * 16, "n": 8, "logprobs": 20, "max_tokens": 900}
WRONG: list[tuple[str, Any, int, str | None, str]] = [
    (TEXT, {}, 400, "missing_required_parameter", "prompt"),
    (TEXT, {"prompt": "a", "temprature": 1}, 400, "unknown_parameter", "temprature"),
    (TEXT, {"prompt": "a", "echo": True}, 400, "unknown_parameter", "echo"),
    (TEXT, {"prompt": "a", "top-k": 5}, 400, "unknown_parameter", "argument: top-k."),
    (TEXT, {"prompt": "a", "int": 5}, 400, "unknown_parameter", "argument: int."),
    (TEXT, {"prompt": "a", "body": 5}, 400, "unknown_parameter", "argument: body."),
    (
        TEXT,
        {"prompt": "a", "stream": True, "stream_options": {"a b": 1}},
        400,
        "unknown_parameter",
        "argument: stream_options.a b.",
    ),
    (TEXT, {"prompt": "a", "json_schema": {"not": {}}}, 400, "unsupported_schema", "json_schema cannot be turned"),
    (TEXT, {"prompt": "a", "json_schema": True, "grammar": "a"}, 400, None, "grammar and json_schema exclude"),
    (CHAT, {"messages": HI, "response_format": {"type": "text", "schema": {}}}, 400, "invalid_value", "json_object"),
    (ANSWER, {"input": []}, 400, "invalid_value", "input: must be a text or a list: of messages"),
    (ANSWER, {"input": "a", "max_tokens": 5}, 400, "unknown_parameter", "max_tokens"),
    (ANSWER, {"input": "a", "previous_response_id": "resp_1"}, 400, "invalid_value", "keeps no answers"),
    (ANSWER, {"input": "a", "conversation": {"id": "b"}}, 400, "invalid_value", "keeps no answers"),
    (ANSWER, {"input": "a", "tools": [{"type": "web_search"}]}, 400, "invalid_value", "tools[0].type"),
    (ANSWER, {"input": "a", "tool_choice": "required"}, 400, None, "goes with tools"),
    (ANSWER, {"input": "a", "model": "b"}, 404, "model_not_found", "'b'"),
    (ANSWER, {"input": "a " * 3000}, 400, "context_length_exceeded", "1024"),
    (TEXT, {"prompt": "a", "n": 0}, 400, "invalid_value", "n: "),
    (TEXT, {"prompt": "a", "n": "2"}, 400, "invalid_value", "n: "),
    (TEXT, {"prompt": "a", "n": 129}, 400, "too_many_samples", "129"),
    (TEXT, {"prompt": ["a"] * 65, "n": 2}, 400, "too_many_samples", "130"),
    (TEXT, {"prompt": "a", "structured_outputs": {"choice": ["a"] * 1025}}, 400, "invalid_value", "at most 1024"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "invalid_value", "at most 2048"),
    ("/v1/rerank", {"query": "a", "documents": ["a"] * 2049}, 400, "invalid_value", "at most 2048"),
    ("/v1/score", {"prompt": "a", "texts": ["a"] * 257}, 400, "invalid_value", "at most 256"),
    ("/v1/embeddings", {"input": {}}, 400, "invalid_value", "input: must be a text or a list"),
    ("/v1/score", {"prompt": "a", "texts": [5]}, 400, "invalid_value", "texts: must be a text or a list of texts"),
    ("/v1/embeddings", {"input": []}, 400, "invalid_value", "input"),
    ("/v1/embeddings", {"input": [[]]}, 400, "invalid_value", "no tokens"),
    ("/v1/embeddings", {"input": [1, "a"]}, 400, "invalid_value", "input"),
    ("/v1/embeddings", {"input": [99999]}, 400, None, "99999"),
    ("/v1/embeddings", {"input": "two " * 2000}, 400, "context_length_exceeded", "at most 1023"),
    ("/v1/embeddings", {"input": "a", "dimensions": 64}, 400, "invalid_value", "256 elements"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, 400, "invalid_value", "encoding_format"),
    ("/v1/embeddings", {"input": "a", "truncate": True}, 400, "unknown_parameter", "truncate"),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, 400, "no_rerank_model", "no rerank model"),
    ("/v1/rerank", {"query": "a", "documents": []}, 400, "invalid_value", "documents"),
    ("/v1/rerank", {"query": "a"}, 400, "missing_required_parameter", "documents"),
    ("/v1/score", {"prompt": "a", "texts": []}, 400, "invalid_value", "texts"),
    ("/v1/score", {"prompt": "a"}, 400, "missing_required_parameter", "texts"),
    ("/v1/score", {"prompt": "a", "texts": "two " * 2000}, 400, "invalid_value", "context has 1024"),
    (TEXT, {"prompt": "a", "temperature": -1}, 400, "invalid_value", "temperature"),
    (TEXT, {"prompt": "a", "structured_outputs": {"choice": []}}, 400, "invalid_value", "choice"),
    (TEXT, {"prompt": "a", "structured_outputs": {"choice": ["a\0"]}}, 400, "invalid_value", "NUL"),
    (TEXT, {"prompt": "a", "structured_outputs": {"regex": "(a"}}, 400, "invalid_grammar", "regex: invalid grammar: "),
    (TEXT, {"prompt": "a", "structured_outputs": {"json": "[" * 9000}}, 400, "invalid_value", "json"),
    (TEXT, {"prompt": "a", "structured_outputs": {"json": "5"}}, 400, "invalid_value", "JSON schema"),
    (TEXT, {"prompt": "a", "logit_bias": {str(t): 1 for t in range(4097)}}, 400, "invalid_value", "at most 4096"),
    (TEXT, {"prompt": "a", "max_tokens": -2}, 400, "invalid_value", "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    (TEXT, {"prompt": "a", "stop": ["x"] * 17}, 400, "invalid_value", "stop"),
    (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "invalid_value", "token ids"),
    (TEXT, {"prompt": "a", "logit_bias": {"1": 101}}, 400, "invalid_value", "-100"),
    (TEXT, {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "invalid_value", "99999"),
    (TEXT, {"prompt": "a", "logprobs": 21}, 400, "invalid_value", "logprobs"),
    (TEXT, {"prompt": "a", "stream_options": {}}, 400, None, "stream_options"),
    (TEXT, {"prompt": "a", "model": "gpt-9"}, 404, "model_not_found", "'tiny'"),
    (TEXT, {"prompt": "a " * 3000}, 400, "context_length_exceeded", "1024"),
    (TEXT, {"prompt": []}, 400, "invalid_value", "prompt: the list is empty"),
    (TEXT, {"prompt": "a", "min_tokens": 17}, 400, "invalid_value", "min_tokens: must be at most max_tokens, 16"),
    (TEXT, {"prompt": "a", "stop_token_ids": [10**6]}, 400, "invalid_value", "token 1000000 is not in the vocabulary"),
    (TEXT, {"prompt": [5, 2000]}, 400, None, "2000"),
    (TEXT, {"prompt": [[]]}, 400, "invalid_value", "no tokens"),
    (TEXT, {"prompt": [1.5]}, 400, "invalid_value", "prompt: must be a text, a list of token ids"),
    (TEXT, {"prompt": "a", "stop": [5]}, 400, "invalid_value", "stop: must be a text or a list"),
    (TEXT, {"prompt": "a", "search": "beam"}, 400, "invalid_value", "search"),
    (TEXT, {"prompt": "a", "grammar": "root ::= ("}, 400, "invalid_value", "grammar"),
    (TEXT, {"prompt": "a", "grammar": "(" * 100}, 400, "invalid_grammar", "nested deeper"),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "invalid_value", "json_schema"),
    (
        TEXT,
        {"prompt": "a", "response_format": NOTHING},
        400,
        "unsupported_schema",
        "#: type: 'nothing' is none of null",
    ),
    (TEXT, {"prompt": "a", "grammar": 'root ::= "\\U0001F600"', "logit_bias": BANNED}, 400, "nothing_allowed", "allow"),
    (CHAT, {"messages": []}, 400, "invalid_value", "messages"),
    (TEXT, {"prompt": "a", "store": True}, 400, "invalid_value", "store"),
    (TEXT, {"prompt": "a", "skip_special_tokens": False}, 400, "invalid_value", "skip_special_tokens"),
    (CHAT, {"messages": HI, "continue_final_message": True}, 400, None, "must be the assistant's"),
    (CHAT, {"messages": HI, "add_generation_prompt": False}, 400, None, "is false with continue_final_message"),
    (CHAT, {"messages": HI, "search": {"method": "best-of-n", "scorer": "examples"}}, 400, "invalid_search", "one of"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, 400, "invalid_value", "messages[0].role"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, 400, "missing_required_parameter", "tools[0].function"),
    (CHAT, {"messages": HI, "tools": [{"type": "web_search"}]}, 400, "invalid_value", "tools[0].type"),
    (CHAT, {"messages": HI, "tools": TOOLS * 2}, 400, "invalid_value", "two functions are named 'f'"),
    (CHAT, {"messages": HI, "tools": UNNAMED}, 400, "invalid_value", "name"),
    (CHAT, {"messages": HI, "tools": [tool({"a": DEEP})]}, 400, "invalid_value", "nested deeper"),
    (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [DEEP_CALL]}]}, 400, "invalid_value", "nested no"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 20, "n": 128}, 400, "too_many_logprobs", "most 524288"),
    (TEXT, LISTED, 400, "too_many_logprobs", "at most 524288"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, 400, None, "goes with tools"),
    (CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": "some"}, 400, "invalid_value", "tool_choice"),
    (CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": CHOSEN}, 400, None, "no function 'g'"),
    (CHAT, {"messages": HI, "tools": TOOLS, "grammar": "a"}, 400, None, "grammar with tools"),
    (CHAT, {"messages": HI, "tools": TOOLS, "search": {"method": "tir"}}, 400, None, "tir with tools"),
    (
        CHAT,
        {"messages": HI, "tools": [tool({"type": "array"})]},
        400,
        "invalid_value",
        "arguments of 'f' are an object",
    ),
    (CHAT, {"messages": HI, "tools": ODD, "tool_choice": "required"}, 400, "unsupported_schema", "tools[0].function"),
    (CHAT, {"messages": [*HI, {"role": "assistant"}]}, 400, "invalid_value", "content is required"),
    (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [BROKEN]}]}, 400, "invalid_value", "is no JSON"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "name": "b<|c"}]}, 400, "invalid_value", "messages[0].name"),
    (CHAT, {"messages": [*HI, RESULT | {"tool_call_id": "</s>"}]}, 400, "invalid_value", "messages[1].tool_call_id"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]}, 400, "invalid_value", "role tool"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, 400, None, "logprobs: true"),
    (CHAT, {"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}, 400, None, "differ"),
    (CHAT, {"messages": PICTURE}, 400, "invalid_value", "content"),
    (CHAT, {"messages": HI, "search": {"method": "magic"}}, 400, "invalid_search", "magic"),
    (CHAT, {"messages": HI, "search": {"method": "beam", "beam_with": 4}}, 400, "invalid_search", "beam_with"),
    (CHAT, {"messages": HI, "search": NARROW}, 400, "search_failed", "multiple"),
    (CHAT, {"messages": HI, "search": {"method": "vote", "extract": "(a+)+$"}}, 400, None, "last-number"),
    (CHAT, {"messages": HI, "search": {"method": "vote", "equal": "x"}}, 400, None, "equal"),
    (CHAT, {"messages": HI, "search": {"method": "best-of-n", "scorer": "oracle"}}, 400, "invalid_search", "oracle"),
    (CHAT, {"messages": HI, "search": {"method": "beam"}, "n": 2}, 400, None, "no n; set its budget"),
    (CHAT, {"messages": HI, "search": {"method": "no"}, "stream": True}, 400, "invalid_search", "Unknown search"),
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
    talk = [{"role": "user", "content": "a"}]
    function = {"name": "f", "parameters": {"type": "object", "description": "\ud800"}}
    for field in (
        {"prompt": "\ud800"},
        {"messages": talk, "tools": [{"type": "function", "function": function}]},
        {"messages": talk, "json_schema": {"const": "\ud800"}},
    ):
        surrogate = httpx.post(f"{url}{CHAT if 'messages' in field else TEXT}", content=json.dumps(field))
        assert (surrogate.status_code, "half of a surrogate pair" in said(surrogate)) == (400, True)
    form = httpx.post(f"{url}{TEXT}", data={"prompt": "a"})
    assert (form.status_code, "not valid JSON" in said(form)) == (400, True)
    plain = httpx.post(f"{url}{TEXT}", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    assert (plain.status_code, "application/json" in said(plain)) == (400, True)
    listed = server.post(TEXT, ["a"])
    assert (listed.status_code, "JSON object" in said(listed)) == (400, True)
    body = json.dumps({"prompt": "a" * (1 << 16)}).encode()
    for content in (body, iter([body])):  # the latter does not say how long it is
        large = httpx.post(f"{url}{TEXT}", content=content)
        assert (large.status_code, "larger than" in said(large)) == (413, True)
        assert large.json()["error"]["code"] == "body_too_large"
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


def test_json_without_its_content_type(server: Running) -> None:
    def sent(**headers: str) -> httpx.Response:
        return httpx.post(f"{server.url}{TEXT}", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)

    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):
        assert sent(**headers).status_code == 200
        # A web page would be spared asking for permission.
        assert sent(origin="http://a.example", **headers).status_code == 400
        assert sent(**headers | {"sec-fetch-site": "cross-site"}).status_code == 400
    assert sent(**{"content-type": "text/plain"}).status_code == 400


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

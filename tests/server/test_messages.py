"""/v1/messages: the same answers as chats, in the form of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from server_kit import Running, running
from tilebeam import LM
from tools_kit import HERMES, THINKS, WEATHER

WHERE = "/v1/messages"
USER: Any = [{"role": "user", "content": "how many"}]
TOOL: Any = {"name": "weather", "description": "Forecast", "input_schema": WEATHER}
BODY: dict[str, Any] = {"messages": USER, "max_tokens": 12, "seed": 3}


def asked(server: Running, **fields: Any) -> dict[str, Any]:
    """The whole answer, which the events of the streamed one add up to."""
    whole = server.post(WHERE, BODY | fields)
    assert whole.status_code == 200, whole.text
    found: dict[str, Any] = whole.json()
    streamed = put_together(events(server.post(WHERE, BODY | fields | {"stream": True})))
    for name in ("type", "role", "model", "stop_reason", "stop_sequence"):
        assert streamed[name] == found[name]
    ids = {"id": None}
    assert [block | ids for block in streamed["content"]] == [block | ids for block in found["content"]]
    assert streamed["usage"]["output_tokens"] == found["usage"]["output_tokens"]
    return found


def events(answer: Any) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for part in answer.text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Read a stream as Anthropic describes it, strictly."""
    first, *middle, delta, last = told
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    assert message["usage"]["input_tokens"] > 0
    open_ = None
    for event in middle:
        if event["type"] == "content_block_start":
            assert open_ is None
            open_ = event["index"]
            assert open_ == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
        assert event["index"] == open_
        block = message["content"][event["index"]]
        if event["type"] == "content_block_delta":
            kinds = {"text": "text", "thinking": "thinking", "tool_use": "input_json"}
            assert event["delta"]["type"] == f"{kinds[block['type']]}_delta"
            field = {"tool_use": "json"}.get(block["type"], block["type"])
            block[field] += event["delta"].get("partial_json") or event["delta"].get(block["type"])
        elif event["type"] == "content_block_stop":
            open_ = None
            if written := block.pop("json"):
                block["input"] = json.loads(written)
    assert open_ is None
    usage = message["usage"]
    assert usage["input_tokens"] == sum(delta["usage"][f"{n}input_tokens"] for n in ("", "cache_read_"))
    return message | delta["delta"] | {"usage": delta["usage"]}


def chat(server: Running, **fields: Any) -> dict[str, Any]:
    told = server.post("/v1/chat/completions", {"messages": USER, "max_tokens": 12, "seed": 3} | fields)
    assert told.status_code == 200, told.text
    return dict(told.json())


def test_an_answer_is_a_chats(server: Running) -> None:
    messages: Any = [{"role": "system", "content": "answer"}, *USER]
    other = chat(server, messages=messages)
    choice = other["choices"][0]
    blocks = [
        {"type": "text", "text": "how "},
        {"type": "text", "text": "many", "cache_control": {"type": "ephemeral"}},
    ]
    for fields in (
        {"system": "answer"},
        {"system": [{"type": "text", "text": "answer"}], "messages": [{"role": "user", "content": blocks}]},
        {"messages": messages, "metadata": {"user_id": "u"}, "service_tier": "auto", "system": ""},
    ):
        answer = asked(server, **fields)
        assert answer["content"] == [{"type": "text", "text": choice["message"]["content"]}]
        assert answer["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[choice["finish_reason"]]
        usage = answer["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == other["usage"]["prompt_tokens"]
        assert usage["output_tokens"] == other["usage"]["completion_tokens"]
    text = choice["message"]["content"]
    stopped = asked(server, system="answer", stop_sequences=[text[4:6]])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[4:6])
    assert stopped["content"] == [{"type": "text", "text": text[: text.index(text[4:6])]}]


def test_what_is_read_from_the_cache(server: Running) -> None:
    with server.lm.keep_prefixes():
        first, second = (server.post(WHERE, BODY).json()["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] == first["input_tokens"] - 1
    assert second["input_tokens"] == 1


def test_a_last_message_of_the_assistants_is_continued(server: Running) -> None:
    begun: Any = [*USER, {"role": "assistant", "content": "I count"}]
    other = chat(server, messages=begun, continue_final_message=True, add_generation_prompt=False)
    assert asked(server, messages=begun)["content"][0]["text"] == other["choices"][0]["message"]["content"]


def test_forms_and_tokens(server: Running) -> None:
    schema = {"type": "object", "properties": {"ok": {"enum": ["yes", "no"]}}, "required": ["ok"]}
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = asked(server, output_config=form, max_tokens=60)
    assert json.loads(answer["content"][0]["text"])["ok"] in ("yes", "no")
    counted = server.post(f"{WHERE}/count_tokens", {"messages": USER, "system": "answer", "model": "tiny"}).json()
    other = chat(server, messages=[{"role": "system", "content": "answer"}, *USER])
    assert counted == {"input_tokens": other["usage"]["prompt_tokens"]}


@pytest.fixture(scope="module", params=["chatml", HERMES], ids=["json", "hermes"])
def caller(request: pytest.FixtureRequest, lm: LM) -> Iterator[Running]:
    with running(lm, chat_template=request.param) as server:
        yield server


def test_functions(caller: Running) -> None:
    options = {"tools": [TOOL, {"name": "now", "input_schema": {"type": "object"}}], "max_tokens": 200}
    answer = asked(caller, **options, tool_choice={"type": "tool", "name": "weather"})
    (call,) = answer["content"]
    assert (answer["stop_reason"], call["type"], call["name"]) == ("tool_use", "tool_use", "weather")
    jsonschema.validate(call["input"], WEATHER)
    several = asked(caller, **options, tool_choice={"type": "any"}, seed=2)
    assert {block["type"] for block in several["content"]} == {"tool_use"}
    one = asked(caller, **options, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert len(one["content"]) == 1
    free = asked(caller, **options | {"max_tokens": 5})
    assert [block["type"] for block in free["content"]] == ["text"]
    told = caller.post(f"{WHERE}/count_tokens", {"messages": USER, "tools": [TOOL]}).json()["input_tokens"]
    assert told > caller.post(f"{WHERE}/count_tokens", {"messages": USER}).json()["input_tokens"]


def test_half_a_call_is_none(caller: Running) -> None:
    forced = BODY | {"tools": [TOOL], "tool_choice": {"type": "any"}}
    for most in (1, 20, 70, 100):
        whole = caller.post(WHERE, forced | {"max_tokens": most})
        for block in whole.json()["content"]:
            jsonschema.validate(block["input"], WEATHER)
        *_, delta, last = events(caller.post(WHERE, forced | {"max_tokens": most, "stream": True}))
        assert (delta["delta"]["stop_reason"], last["type"]) == (whole.json()["stop_reason"], "message_stop")


def test_results_are_the_chats(caller: Running) -> None:
    first: Any = [
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "a", "name": "now", "input": {"x": 1}},
        {"type": "tool_use", "id": "b", "name": "now", "input": {}},
    ]
    results: Any = [
        {"type": "tool_result", "tool_use_id": "a", "content": "noon"},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "late"}], "is_error": True},
        {"type": "text", "text": "so?"},
    ]
    talk = [*USER, {"role": "assistant", "content": first}, {"role": "user", "content": results}]
    calls = [
        {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    same = [
        *USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
        {"role": "tool", "tool_call_id": "b", "content": "late"},
        {"role": "user", "content": "so?"},
    ]
    other = chat(caller, messages=same)
    without = chat(caller, messages=[{**m, "content": ""} if m["role"] == "tool" else m for m in same])
    assert other["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]  # the template shows results
    assert asked(caller, messages=talk)["content"][0]["text"] == other["choices"][0]["message"]["content"]


def test_thoughts(lm: LM) -> None:
    with running(lm, chat_template=THINKS) as server:
        (thought,) = asked(server)["content"]
        assert (thought["type"], thought["signature"]) == ("thinking", "")
        assert thought["thinking"]
        (text,) = asked(server, thinking={"type": "disabled"})["content"]
        assert text["type"] == "text"
        (again,) = asked(server, thinking={"type": "enabled", "budget_tokens": 1024})["content"]
        assert again == thought
        both = [thought, {"type": "text", "text": "two"}]
        talk: Any = [*USER, {"role": "assistant", "content": both}, {"role": "user", "content": "so?"}]
        same: Any = [
            *USER,
            {"role": "assistant", "content": "two", "reasoning_content": thought["thinking"]},
            {"role": "user", "content": "so?"},
        ]
        counted = server.post(f"{WHERE}/count_tokens", {"messages": talk}).json()["input_tokens"]
        assert counted == chat(server, messages=same)["usage"]["prompt_tokens"]


LONG: Any = [{"role": "user", "content": "very " * 2000}]
RESULT: Any = {"type": "tool_result", "tool_use_id": "a\0", "content": "x"}
DEEP: Any = {"type": "tool_use", "id": "a", "name": "f", "input": json.loads('{"a":' * 80 + "1" + "}" * 80)}
NESTED: Any = [{"role": "user", "content": [RESULT | {"tool_use_id": "a", "content": [RESULT]}]}]
PICTURE: Any = [{"role": "user", "content": [{"type": "image"}]}]
FORM: Any = {"format": {"type": "json_schema", "schema": {"not": {}}}}
WRONG: list[tuple[Any, int, str]] = [
    ({"messages": USER}, 400, "max_tokens"),
    (BODY | {"messages": LONG}, 400, "context holds"),
    (BODY | {"model": "opal-9"}, 404, "'opal-9' is not served here; this server serves 'tiny'"),
    (BODY | {"temprature": 1}, 400, "temprature"),
    (BODY | {"messages": PICTURE}, 400, "messages[0].content[0].type: Input should be 'text', 'thinking'"),
    (BODY | {"messages": [*USER, {"role": "user", "content": [RESULT]}]}, 400, "messages[1].content[0].tool_use_id"),
    (BODY | {"tools": [TOOL | {"input_schema": {"type": "array"}}]}, 400, "tools[0].input_schema"),
    (BODY | {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}]}, 400, "has id, input, name"),
    (BODY | {"messages": NESTED}, 400, "messages[0].content[0].content: must be a text"),
    (BODY | {"messages": [*USER, {"role": "assistant", "content": [DEEP]}]}, 400, "content[0].input: is nested deeper"),
    (BODY | {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "messages[9].x"}}, 400, "'messages[9].x'"),
    (BODY | {"stop_sequences": ["x"] * 17}, 400, "stop_sequences: at most 16"),
    (BODY | {"tools": [TOOL, TOOL]}, 400, "two functions are named"),
    (BODY | {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, 400, "no function 'f'"),
    (BODY | {"output_config": FORM}, 400, "output_config.format.schema"),
]


KINDS = {400: "invalid_request_error", 404: "not_found_error"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "status", "said"), WRONG, ids=range(len(WRONG)))
def test_errors_have_anthropics_form(server: Running, body: Any, status: int, said: str, stream: bool) -> None:
    answer = server.post(WHERE, body | {"stream": stream})
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", KINDS[status])
    assert said in told["error"]["message"]
    assert "tool_calls" not in told["error"]["message"]


def test_keys_and_sizes(lm: LM) -> None:
    with running(lm, api_keys=("secret",), max_body=1000) as server:
        for path in (WHERE, f"{WHERE}/count_tokens"):
            refused = server.post(path, BODY)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
            large = server.post(path, BODY | {"system": "x" * 1000}, headers={"x-api-key": "secret"})
            assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
        assert server.post(WHERE, BODY, headers={"x-api-key": "secret"}).status_code == 200

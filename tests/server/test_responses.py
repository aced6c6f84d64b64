"""/v1/responses with OpenAI's own client: the same answers as chats, in another form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from server_kit import ANSWER, Running
from tilebeam import SamplingParams
from tilebeam.chat.answer_parts import Text
from tilebeam.server.answer_events import Event, Grown, Started
from tilebeam.server.errors import ApiError
from tilebeam.server.event_stream import EventStream
from tilebeam.server.openai.response_requests import ResponsesRequest
from tilebeam.server.openai.responses import ResponsesAnswer
from tilebeam.server.plan import AnswerPlan, Ready

TOOL: Any = {
    "type": "function",
    "name": "forecast",
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["days"],
    },
}
SCHEMA = {"type": "object", "properties": {"ok": {"enum": ["yes", "no"]}}, "required": ["ok"]}
FORM: Any = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}}
NAMED: Any = {"type": "function", "name": "forecast"}


def ask(client: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "model": "tiny",
        "input": "how many",
        "max_output_tokens": 12,
        "extra_body": {"seed": 3},
    }
    return client.responses.create(**defaults | options)


def test_an_answer_is_a_chats(client: Any) -> None:
    messages: Any = [{"role": "system", "content": "answer"}, {"role": "user", "content": "how many"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, seed=3, max_tokens=12)
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "how many"}]}]
    for fields in ({"instructions": "answer"}, {"instructions": "answer", "input": items}, {"input": messages}):
        answer = ask(client, **fields)
        assert answer.output_text == chat.choices[0].message.content
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
        assert answer.usage.output_tokens == chat.usage.completion_tokens
        assert (answer.object, answer.model, answer.error) == ("response", "tiny", None)
        cut = chat.choices[0].finish_reason == "length"
        assert answer.status == ("incomplete" if cut else "completed")
        assert answer.output[0].status == answer.status
        assert answer.tilebeam["seed"] == 3


def test_an_answer_is_sent_back(client: Any) -> None:
    first = ask(client)
    items = [{"role": "user", "content": "how many"}, *[item.model_dump(exclude_none=True) for item in first.output]]
    more = ask(client, input=[*items, {"role": "user", "content": "more"}])
    talk: Any = [
        {"role": "user", "content": "how many"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
    ]
    chat = client.chat.completions.create(model="tiny", messages=talk, seed=3, max_tokens=12)
    assert more.output_text == chat.choices[0].message.content


def test_a_stream_has_the_events_of_an_answer(client: Any) -> None:
    whole = ask(client)
    events = list(ask(client, stream=True))
    assert [told.sequence_number for told in events] == list(range(len(events)))
    kinds = [told.type for told in events]
    opening = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
    assert [kind.removeprefix("response.") for kind in kinds[:5]] == opening
    closing = ["output_text.done", "content_part.done", "output_item.done", whole.status]
    assert [kind.removeprefix("response.") for kind in kinds[-4:]] == closing
    assert events[2].item.content == []
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-4].text == whole.output_text
    final = events[-1].response
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    assert final.id == events[0].response.id
    with client.responses.stream(model="tiny", input="how many", text=FORM) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text
    assert json.loads(text)["ok"] in ("yes", "no")


def test_functions(client: Any) -> None:
    options = {"tools": [TOOL], "tool_choice": NAMED, "max_output_tokens": 200}
    answer = ask(client, **options)
    (call,) = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "forecast", "completed")
    assert 1 <= json.loads(call.arguments)["days"] <= 99
    events = list(ask(client, **options, stream=True))
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert done.arguments == call.arguments
    assert events[-1].type == "response.completed"
    assert events[-1].response.output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    talk = [{"role": "user", "content": "how many"}, call.model_dump(exclude_none=True), result]
    asked: Any = [
        {"role": "user", "content": "how many"},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": "forecast", "arguments": call.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "name": "forecast", "content": "rain"},
    ]
    chat = client.chat.completions.create(model="tiny", messages=asked, seed=3, max_tokens=12)
    assert ask(client, input=talk).output_text == chat.choices[0].message.content


def test_what_reasoning_models_are_asked_with(client: Any, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    thoughts = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc", "status": "completed"}
    talk: Any = [USER, thoughts, {"role": "assistant", "content": "yes"}, thoughts, {"role": "user", "content": "so"}]
    plain = ask(client, input=[item for item in talk if item is not thoughts])
    options: Any = {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}, "truncation": "disabled"}
    asked = ask(client, input=talk, **options, reasoning={"effort": "low", "summary": "auto"})
    assert asked.output_text == plain.output_text
    assert asked.usage.input_tokens == plain.usage.input_tokens
    template = "{{ reasoning_effort }}{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(server.service, "settings", replace(server.service.settings, chat_template=template))
    lengths = [ask(client, input="hi", reasoning=r).usage.input_tokens for r in ({"effort": "high"}, {})]
    assert lengths[0] > lengths[1]
    told = server.post(ANSWER, {"input": "hi", "max_output_tokens": 2, "timings_per_token": True, "user": "u"})
    assert told.status_code == 200
    told = server.post(ANSWER, {"input": "hi", "include": ["message.output_text.logprobs"]})
    assert (told.status_code, told.json()["error"]["code"]) == (400, "invalid_value")
    assert server.post(ANSWER, {"input": [thoughts]}).json()["error"]["param"] == "input"
    assert server.post(ANSWER, {"input": [USER, thoughts, BROKEN]}).json()["error"]["param"] == "input[2].arguments"


USER = {"role": "user", "content": "hi"}
BROKEN = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}
RESULT = {"type": "function_call_output", "call_id": "a\0", "output": "x"}
LISTED = TOOL | {"name": "g", "parameters": {"type": "array"}}
ODD = TOOL | {"parameters": {"properties": {"a": {"not": {}}}}}
WRONG: list[tuple[Any, str | None, str]] = [
    ({"input": "very " * 2000}, "input", "tokens"),
    ({"input": "hi", "tools": [TOOL, TOOL]}, "tools", "two functions are named"),
    ({"input": "hi", "tools": [TOOL, ODD | {"name": "g"}], "tool_choice": "required"}, "tools[1].parameters", "turned"),
    ({"input": "hi", "tools": [TOOL, LISTED]}, "tools[1].parameters", "the arguments of 'g' are an object"),
    ({"input": "hi", "text": {"format": FORM["format"] | {"schema": {"not": {}}}}}, "text.format.schema", "turned"),
    ({"input": "hi", "text": FORM, "tools": [TOOL]}, None, "text.format with tools"),
    ({"input": [USER, USER, BROKEN]}, "input[2].arguments", "input[2].arguments: is no JSON"),
    ({"input": [USER, RESULT]}, "input[1].call_id", "input[1].call_id: "),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param", "said"), WRONG, ids=range(len(WRONG)))
def test_errors_name_the_requests_own_fields(
    server: Running, body: Any, param: str | None, said: str, stream: bool
) -> None:
    answer = server.post(ANSWER, body | {"stream": stream})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == param
    assert said in error["message"]
    assert "messages" not in error["message"]


def test_errors_before_and_within_a_stream(server: Running) -> None:
    refused = server.post(ANSWER, {"input": "a " * 3000, "stream": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")

    async def broken(*_: Any) -> AsyncGenerator[list[Event]]:
        yield [Started(0)]
        yield [Grown(0, [Text("some")])]
        raise ApiError(503, "It broke.", code="npu_failed")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.sleep(60)

    body = ResponsesRequest(input="a", stream=True)
    make = partial(ResponsesAnswer, body, SamplingParams())
    plan = AnswerPlan(body.chat(), make, False, SamplingParams(), 1, "tiny", lambda _, params: Ready([], params))
    service = server.service
    stream = EventStream(service.gate, plan, service.with_model, broken)
    asyncio.run(stream({"path": ANSWER}, receive, send))
    kinds = [
        line for message in sent[1:] for line in message["body"].decode().split("\n") if line.startswith("event: ")
    ]
    assert kinds[-2:] == ["event: response.output_text.delta", "event: error"]
    assert not sent[-1]["more_body"]
    name, data = sent[-1]["body"].decode().strip().split("\n")
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert (told["type"], told["code"], told["message"]) == ("error", "npu_failed", "It broke.")

"""What a client gets of a chat is what a user of the library gets: over all families of calls, and end to end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tilebeam import LM, CompletionOutput, Prompt, RequestOutput, SamplingParams, Usage
from tilebeam.chat.prepared import PreparedChat
from tilebeam.chat.thoughts import CHANNELS, THINK, Thinking
from tilebeam.chat.tool_families import FAMILIES, Family
from tilebeam.chat.tools import Tool, ToolUse
from tilebeam.outputs import Delta

pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from server_kit import CHAT, HI, running
from tilebeam.server.answer_events import Ended, SampleEvents, Started
from tilebeam.server.openai.chat_completions import ChatAnswer
from tilebeam.server.plan import AnswerPlan, Ready
from tilebeam.server.requests import ChatRequest

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
OBJECT = '{"name": "weather", "arguments": {"city": "Bern"}}'
HERMES = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{{ tools }}<tool_call>"
ARGUMENTS = {
    "json": '{"city": "Bern"}',
    "elements": "<parameter=city>\nBern\n</parameter>\n",
    "pairs": "<arg_key>city</arg_key><arg_value>Bern</arg_value>",
    "python": 'city="Bern"',
    "gemma": '{city:<|"|>Bern<|"|>}',
}


def call_in(family: Family) -> str:
    """A call as a family of models writes it, in its first way."""
    head = family.heads[0]
    opens = head.replace("{name}", "weather").replace("{id}", "0")
    fence = "".join(family.fences[:1])
    if "{name}" not in head:
        return f"{fence}{OBJECT}"
    return f"{fence}{opens}{ARGUMENTS[family.arguments]}{family.end}"


def library(chat: PreparedChat, said: str) -> list[CompletionOutput]:
    """The answer as `LM.chat` gives it."""
    sample = CompletionOutput(0, said, [], "stop", 1)
    return chat.read(RequestOutput("", [], [sample], Usage(), 1)).outputs


def client(lm: LM, chat: PreparedChat, said: str, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message as the server writes it: whole, and put together of what it streams."""
    body = ChatRequest.model_validate({"messages": HI, "tools": TOOLS})
    plan = AnswerPlan(body, ChatAnswer, False, chat.params, 1, "tiny", lambda _, params: Ready([], params))
    whole = ChatAnswer(plan, lm.spelling)
    grown = SampleEvents(0, lm.piece, reader=chat.reader()).whole(CompletionOutput(0, said, [], "stop", 1))
    (choice,) = whole.whole([Started(0), grown, Ended(Usage(), 1)])["choices"]
    streamed, sample, text = ChatAnswer(plan, lm.spelling), SampleEvents(0, lm.piece, reader=chat.reader()), b""
    streamed.add(Started(0))
    deltas = [Delta(0, said[i : i + size], []) for i in range(0, len(said), size)]
    for delta in [*deltas, Delta(0, "", [], finish_reason="stop")]:
        if (part := sample.grown(delta)) is not None:
            text += streamed.add(part)
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for line in text.decode().split("\n\n")[:-1]:
        (piece,) = json.loads(line.removeprefix("data: "))["choices"]
        for name in ("content", "reasoning_content"):
            message[name] += piece["delta"].get(name) or ""
        for call in piece["delta"].get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return choice["message"], message


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("before", ["", "Let me see.\n"])
def test_every_family_of_calls(lm: LM, family: str, before: str) -> None:
    kind = FAMILIES[family]
    marks = CHANNELS if family == "gpt-oss" else THINK
    use = ToolUse(kind, [Tool("weather", parameters=SCHEMA)], False, True)
    chat = PreparedChat(Prompt("", []), SamplingParams(), use, Thinking(marks))
    if family in ("json", "gpt-oss"):
        before = ""  # without a mark, a call begins the answer; the others have marks for text, too
    thought = f"{marks.opens}hm{marks.closes}" + ("<|start|>assistant" if marks == CHANNELS else "")
    said = thought + before + call_in(kind)
    (answer,) = library(chat, said)
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [("weather", {"city": "Bern"})]
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("hm", before.rstrip(), "tool_calls")
    calls = [{"name": call.name, "arguments": call.arguments} for call in answer.tool_calls]
    for size in (1, 3, len(said)):
        whole, streamed = client(lm, chat, said, size)
        assert [one["function"] for one in whole["tool_calls"]] == streamed["tool_calls"] == calls
        assert (whole["content"] or "") == streamed["content"] == answer.text
        assert whole["reasoning_content"] == streamed["reasoning_content"] == answer.reasoning


@pytest.mark.parametrize("template", ["chatml", HERMES], ids=["json", "hermes"])
@pytest.mark.parametrize("choice", ["auto", "required", TOOLS[0] | {"function": {"name": "weather"}}, "none"], ids=str)
def test_a_client_and_a_user_get_the_same(lm: LM, template: str, choice: Any) -> None:
    schema = SCHEMA | {"properties": {"days": {"type": "integer"}}, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    body: Any = {"messages": HI, "tools": tools, "tool_choice": choice, "seed": 4, "max_tokens": 90, "n": 2}
    with running(lm, chat_template=template) as server:
        choices = server.post(CHAT, body).json()["choices"]
    options = {name: value for name, value in body.items() if name != "messages"}
    for told, answer in zip(choices, lm.chat(HI, template=template, **options).outputs, strict=True):
        message = told["message"]
        assert (message["content"] or "", told["finish_reason"]) == (answer.text, answer.finish_reason)
        assert message.get("reasoning_content") == answer.reasoning
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        assert calls == [(call.name, call.arguments) for call in answer.tool_calls]

"""Functions that a model may or must call, with OpenAI's own client; templates that know tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from server_kit import CHAT, HI, running
from tilebeam import LM
from tilebeam.chat.answer_reader import AnswerReader
from tilebeam.chat.tools import ToolUse, tool_use, tools_of
from tilebeam.outputs import CompletionOutput, Delta, Usage
from tilebeam.sampling_params import SamplingParams
from tilebeam.server.answer_events import Ended, SampleEvents, Started
from tilebeam.server.openai.chat_completions import ChatAnswer
from tilebeam.server.plan import AnswerPlan, Ready
from tilebeam.server.requests import ChatRequest
from tools_kit import HERMES, NAMED, TOOLS, WEATHER


@pytest.fixture(scope="module", params=["chatml", HERMES], ids=["json", "hermes"])
def caller(request: pytest.FixtureRequest, lm: LM) -> Iterator[Any]:
    """A client of a server whose template is of each family."""
    with running(lm, chat_template=request.param) as server:
        yield server.client()


def ask(client: Any, **options: Any) -> Any:
    defaults = {"model": "tiny", "messages": HI, "tools": TOOLS, "seed": 3, "max_tokens": 200}
    return client.chat.completions.create(**defaults | options)


def test_a_named_function_is_called(caller: Any) -> None:
    choice = ask(caller, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert len(call.id) == 9
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


def test_calls_are_streamed_in_pieces(caller: Any) -> None:
    options = {"tool_choice": "required", "n": 4, "logprobs": True}
    whole = ask(caller, **options)
    found: dict[int, list[Any]] = {i: [] for i in range(4)}
    finish, tokens = {}, dict.fromkeys(range(4), 0)
    for chunk in ask(caller, **options, stream=True):
        (choice,) = chunk.choices
        assert not choice.delta.content
        finish[choice.index] = choice.finish_reason
        tokens[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
        for part in choice.delta.tool_calls or []:
            if part.function.name:
                assert part.id
                assert part.index == len(found[choice.index])
                found[choice.index].append([part.function.name, "", 0])
            found[choice.index][part.index][1] += part.function.arguments or ""
            found[choice.index][part.index][2] += 1
    for choice in whole.choices:
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
        assert [(name, arguments) for name, arguments, _ in found[choice.index]] == calls
        assert finish[choice.index] == choice.finish_reason
        assert tokens[choice.index] == len(choice.logprobs.content)
    assert max(pieces for calls in found.values() for _, _, pieces in calls) > 3


def test_half_a_call_is_no_text(caller: Any) -> None:
    for most in (1, 5, 20, 70, 110, 170):
        options = {"tool_choice": "required", "max_tokens": most}
        choice = ask(caller, **options).choices[0]
        assert not choice.message.content
        deltas = [chunk.choices[0].delta for chunk in ask(caller, **options, stream=True)]
        assert not any(delta.content for delta in deltas)
        assert sum(bool(c.id) for d in deltas for c in d.tool_calls or ()) == len(choice.message.tool_calls or ())


def test_the_example_of_the_manual(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    (code,) = [e for e in re.findall(r"```python\n(.*?)```", manual, re.DOTALL) if "tools=" in e]
    exec(code.replace('model="model",', 'model="model", max_tokens=200,'), {"client": client})
    assert capsys.readouterr().out.startswith("forecast {")


# --- answers of a model that calls by itself --------------------------------------------------------------------------


def use(several: bool = True) -> ToolUse:
    found = tool_use(tools_of(TOOLS), None, HERMES, several=several)
    assert found is not None
    return found


def answered(lm: LM, said: str, several: bool = True) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole choice, and the pieces of a stream that gets every character by itself."""
    body = ChatRequest.model_validate({"messages": HI, "tools": TOOLS})
    plan = AnswerPlan(body, ChatAnswer, False, SamplingParams(), 1, "tiny", lambda _, params: Ready([], params))

    def sample() -> SampleEvents:
        return SampleEvents(0, lm.piece, reader=AnswerReader(use(several), None))

    ended = Ended(Usage(), 1)
    grown = sample().whole(CompletionOutput(0, said, [], "stop", 1))
    whole = ChatAnswer(plan, lm.spelling).whole([Started(0), grown, ended])["choices"][0]
    streamed, growing = ChatAnswer(plan, lm.spelling), sample()
    streamed.add(Started(0))
    deltas = [Delta(0, char, []) for char in said] + [Delta(0, "", [], finish_reason="stop")]
    text = b"".join(streamed.add(grown) for delta in deltas if (grown := growing.grown(delta)) is not None)
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.decode().split("\n\n") if line]
    return whole, [chunk["choices"][0] for chunk in chunks]


def test_text_and_calls_of_one_answer(lm: LM) -> None:
    said = 'Let me see.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    choice, chunks = answered(lm, said)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "Let me see."
    assert chunks[-1]["finish_reason"] == "tool_calls"
    assert [c["function"]["name"] for x in chunks for c in x["delta"].get("tool_calls", []) if "id" in c] == ["now"]


def test_a_request_may_allow_one_call(lm: LM) -> None:
    said = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now"}</tool_call>'
    for allowed, count in ((True, 2), (False, 1)):
        choice, chunks = answered(lm, said, allowed)
        assert len(choice["message"]["tool_calls"]) == count
        assert sum("id" in c for chunk in chunks for c in chunk["delta"].get("tool_calls", [])) == count


# --- clients and users of the library ---------------------------------------------------------------------------------

CITY = {"type": "object", "properties": {"days": {"type": "integer"}}, "additionalProperties": False}
ONE: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


@pytest.mark.parametrize("template", ["chatml", HERMES], ids=["json", "hermes"])
@pytest.mark.parametrize("choice", ["auto", "required", ONE[0] | {"function": {"name": "weather"}}, "none"], ids=str)
def test_a_client_and_a_user_get_the_same(lm: LM, template: str, choice: Any) -> None:
    body: Any = {"messages": HI, "tools": ONE, "tool_choice": choice, "seed": 4, "max_tokens": 90, "n": 2}
    with running(lm, chat_template=template) as server:
        choices = server.post(CHAT, body).json()["choices"]
    options = {name: value for name, value in body.items() if name != "messages"}
    for told, answer in zip(choices, lm.chat(HI, template=template, **options).outputs, strict=True):
        message = told["message"]
        assert (message["content"] or "", told["finish_reason"]) == (answer.text, answer.finish_reason)
        assert message.get("reasoning_content") == answer.reasoning
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        assert calls == [(call.name, call.arguments) for call in answer.tool_calls]

"""`LM.chat` with functions and thoughts, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest
import tools_kit
from tilebeam import LM, CompletionOutput, TilebeamError
from tilebeam.outputs import Delta, ToolCall
from tools_kit import NAMED, TOOLS, WEATHER

HI: Any = [{"role": "user", "content": "weather?"}]
HERMES = tools_kit.HERMES.replace("{{ m.role }}:", "{{ m.role }} {{ m.name }}:")
TEMPLATES = {"json": "chatml", "hermes": HERMES, "mistral": tools_kit.MISTRAL, "llama": tools_kit.LLAMA}
THOUGHT = {"grammar": 'root ::= "\\n<think>\\n" [a-c]{4} "\\n</think>\\n\\nok"', "max_tokens": 60, "seed": 1}


def streamed(deltas: Any) -> dict[int, CompletionOutput]:
    """The answers that deltas make up."""
    found: dict[int, CompletionOutput] = {}
    for delta in deltas:
        assert isinstance(delta, Delta)
        one = found.setdefault(delta.index, CompletionOutput(delta.index, "", [], "aborted", 0))
        one.text += delta.text
        one.token_ids += delta.token_ids
        one.reasoning = (one.reasoning or "") + delta.reasoning or None
        for part in delta.tool_calls:
            if part.name is not None:
                assert part.call == len(one.tool_calls)
                one.tool_calls.append(ToolCall(part.id or "", part.name, part.arguments))
            else:
                call = one.tool_calls[part.call]
                one.tool_calls[part.call] = ToolCall(call.id, call.name, call.arguments + part.arguments)
        one.finish_reason = delta.finish_reason or one.finish_reason
    return found


def told(answer: CompletionOutput) -> tuple[Any, ...]:
    """What there is of an answer but the ids of its calls, which are drawn."""
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    return answer.text, answer.token_ids, answer.reasoning, calls, answer.finish_reason


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_must_be_is_valid(lm: LM, family: str, choice: Any) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": choice, "template": TEMPLATES[family], "seed": 3, "max_tokens": 200}
    output = lm.chat(HI, n=2, **options)
    ended = [answer for answer in output.outputs if answer.finish_reason == "tool_calls"]
    assert ended  # a random model may write one text until its limit
    assert [answer.text for answer in output.outputs] == ["", ""]
    for answer in ended:
        assert 1 <= len(answer.tool_calls) <= (1 if choice is NAMED else 16)
        for call in answer.tool_calls:
            jsonschema.validate(json.loads(call.arguments), WEATHER if call.name == "weather" else {"maxProperties": 0})
    pieces = streamed(lm.stream_chat(HI, n=2, **options))
    assert [told(pieces[i]) for i in range(2)] == [told(answer) for answer in output.outputs]


def test_an_answer_is_the_next_turns_message(lm: LM) -> None:
    options: Any = {"tools": TOOLS, "template": HERMES, "seed": 3, "max_tokens": 200}
    answer = lm.chat(HI, tool_choice=NAMED, **options).outputs[0]
    (call,) = answer.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    text = lm.chat([*HI, answer.message, result], **options).prompt
    assert f'<tool_call>{{"name": "weather", "arguments": {json.dumps(json.loads(call.arguments))}}}' in text
    assert "<s>tool weather: rain</s>" in text


def test_thoughts_are_apart(lm: LM) -> None:
    answer = lm.chat(HI, template="chatml", **THOUGHT).outputs[0]
    assert answer.text == "ok"
    assert answer.reasoning is not None
    assert len(answer.reasoning) == 4
    assert answer.message == {"role": "assistant", "content": "ok", "reasoning_content": answer.reasoning}
    assert answer.as_dict()["reasoning"] == answer.reasoning
    assert told(streamed(lm.stream_chat(HI, template="chatml", **THOUGHT))[0]) == told(answer)
    kept = lm.chat(HI, template="chatml", reasoning="text", **THOUGHT).outputs[0]
    assert (kept.text, kept.reasoning) == (f"\n<think>\n{answer.reasoning}\n</think>\n\nok", None)
    cut = lm.chat(HI, template="chatml", **THOUGHT | {"max_tokens": 9}).outputs[0]
    assert (cut.text, cut.finish_reason) == ("", "length")
    # A form that knows no thoughts leaves no room for them, whoever asks for it.
    bound = lm.chat(HI, template="chatml", regex="<think>abc", max_tokens=60).outputs[0]
    assert (bound.text, bound.reasoning) == ("<think>abc", None)


def test_a_coroutine_prepares_and_reads(lm: LM) -> None:
    chat = lm.prepare_chat(HI, tools=TOOLS, tool_choice=NAMED, template=HERMES, seed=3, max_tokens=60)

    async def asked() -> Any:
        (output,) = await lm.agenerate(chat.prompt, chat.params)
        return chat.read(output)

    whole = lm.chat(HI, tools=TOOLS, tool_choice=NAMED, template=HERMES, seed=3, max_tokens=60)
    assert told(asyncio.run(asked()).outputs[0]) == told(whole.outputs[0])


def test_what_is_not_called_is_not_told(lm: LM) -> None:
    options: Any = {"template": HERMES, "max_tokens": 2, "seed": 1}
    assert "Forecast" in lm.chat(HI, tools=TOOLS, **options).prompt
    plain = lm.chat(HI, **options).prompt
    assert lm.chat(HI, tools=TOOLS, tool_choice="none", **options).prompt == plain
    assert lm.chat(HI, tools=None, **options).prompt == plain


def test_a_message_without_text_is_continued(lm: LM) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": {}}}
    said = [*HI, {"role": "assistant", "tool_calls": [call]}]
    output = lm.chat(said, template="chatml", continue_final_message=True, max_tokens=2)
    assert output.prompt.endswith('[{"name": "now", "arguments": {}}]')


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tools": TOOLS, "regex": "a"}, "grammar, json_schema or regex with tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "two functions are named 'weather'"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\] must be"),
        ({"tools": [1]}, r"tools\[0\] must be"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice must be"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "no function 'g' in tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "an object"),
        ({"reasoning": "no"}, "reasoning must be"),
        ({"zzz": 1}, "no field 'zzz'"),
    ],
)
def test_what_does_not_fit_is_named(lm: LM, options: Any, reason: str) -> None:
    for ask in (lm.chat, lm.stream_chat):
        with pytest.raises(TilebeamError, match=reason):
            ask(HI, template=HERMES, **options)


@pytest.mark.parametrize(
    "call",
    [{"function": {"arguments": "{}"}}, {"function": {"name": "f", "arguments": "{"}}, {"function": None}, "f()", {}],
)
def test_calls_that_are_none_are_named(lm: LM, call: Any) -> None:
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(TilebeamError, match=r"messages\[1\]\.tool_calls must be like"):
        lm.chat(messages, template=HERMES)


def test_many_conversations_streams_and_coroutines(lm: LM) -> None:
    other: Any = [{"role": "user", "content": "and then?"}]
    options: Any = {"template": "chatml", "max_tokens": 6, "seed": 5}
    alone = [told(lm.chat(talk, **options).outputs[0]) for talk in (HI, other)]
    assert [told(o.outputs[0]) for o in lm.chat([HI, other], **options)] == alone
    assert [told(o.outputs[0]) for o in lm.chat([HI], **options)] == alone[:1]
    assert told(streamed(lm.stream_chat(HI, **options))[0]) == alone[0]

    async def asked() -> Any:
        both = await lm.achat([HI, other], **options)
        return both, await lm.achat(HI, **options), [d async for d in lm.astream_chat(HI, **options)]

    both, one, deltas = asyncio.run(asked())
    assert [told(o.outputs[0]) for o in both] == alone
    assert told(one.outputs[0]) == told(streamed(deltas)[0]) == alone[0]


class Reading:
    """What pydantic's classes have, without pydantic."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "array", "items": {"enum": [1, 22]}, "minItems": 2, "maxItems": 2}

    @classmethod
    def model_validate_json(cls, text: str) -> Reading:
        return cls(json.loads(text))


def test_a_class_reads_what_is_valid_under_its_schema(lm: LM) -> None:
    whole: Any = {"json_schema": Reading, "max_tokens": 60, "seed": 2}
    for output in (
        lm.generate("a", **whole)[0],
        lm.chat(HI, template="chatml", **whole),
        dict(lm.completed(["a"], **whole))[0],
    ):
        sample = output.outputs[0]
        assert sample.parsed.value == json.loads(output.text)
        assert set(sample.parsed.value) <= {1, 22}
        assert "parsed" not in sample.as_dict()
    assert lm.generate("a", **whole | {"max_tokens": 2})[0].outputs[0].parsed is None
    assert lm.generate("a", **whole | {"json_schema": Reading.model_json_schema()})[0].outputs[0].parsed is None


def test_results_are_short(lm: LM) -> None:
    output = lm.generate("a b\nc" + "x" * 300, n=2, max_tokens=3, seed=1, ignore_eos=True)[0]
    assert output.text == output.outputs[0].text
    assert repr(output).startswith("<answer to 'a b cxxx")
    assert repr(output).endswith("3 tokens, length> and 1 more>")
    assert len(repr(output)) < 250


@pytest.mark.parametrize("way", ["generate", "stream", "agenerate", "completed"])
def test_messages_are_no_prompt(lm: LM, way: str) -> None:
    def ask() -> None:
        result = getattr(lm, way)(HI)
        asyncio.run(result) if way == "agenerate" else list(result)

    with pytest.raises(TilebeamError, match=r"lm.chat\(messages\)"):
        ask()
    with pytest.raises(TilebeamError, match=r"lm.chat\(messages\)"):
        lm.generate([HI])

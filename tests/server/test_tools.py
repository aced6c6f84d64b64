"""Functions that a model may or must call, with OpenAI's own client and with instructor; templates that know tools."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tilebeam import LM
from tilebeam.outputs import CompletionOutput, Delta

pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from server_kit import HI, Running, running
from tilebeam.server import chat
from tilebeam.server.errors import ApiError
from tilebeam.server.requests import ChatRequest
from tilebeam.server.responses import TokenLedger
from tilebeam.server.tool_calls import CallReader
from tilebeam.server.tool_families import FAMILIES
from tilebeam.server.tool_style import ToolStyle
from tilebeam.server.tools import ToolUse, _moved, family_of, use_of

WEATHER = {
    "type": "object",
    "properties": {"where": {"$ref": "#/$defs/Place"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["where", "days"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"country": {"enum": ["CH", "AT"]}},
            "required": ["country"],
            "additionalProperties": False,
        }
    },
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
HERMES = (
    "{% if tools %}<s>tools:{% for t in tools %} {{ t | tojson }}{% endfor %}</s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: {% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS][").replace("</tool_call>", "]")
LLAMA = HERMES.replace("<tool_call>", "<|python_tag|>").replace("</tool_call>", "")


@pytest.fixture(scope="module", params=["chatml", HERMES, MISTRAL, LLAMA], ids=["json", "hermes", "mistral", "llama"])
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


def test_some_function_is_called(caller: Any) -> None:
    one = ask(caller, tool_choice="required", parallel_tool_calls=False, n=3).choices
    assert [len(choice.message.tool_calls) for choice in one] == [1, 1, 1]
    for choice in [*one, *ask(caller, tool_choice="required", temperature=0.1).choices]:
        assert 1 <= len(choice.message.tool_calls) <= 16
        for call in choice.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, WEATHER if call.function.name == "weather" else {"maxProperties": 0})


def test_calls_are_streamed_in_pieces(caller: Any) -> None:
    options = {"tool_choice": "required", "n": 2, "logprobs": True}
    whole = ask(caller, **options)
    found: dict[int, list[Any]] = {0: [], 1: []}
    finish, tokens = {}, {0: 0, 1: 0}
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


def test_a_call_that_is_cut_says_so(caller: Any) -> None:
    choice = ask(caller, tool_choice=NAMED, max_tokens=30).choices[0]
    assert choice.finish_reason == "length"


def test_half_a_call_is_no_text(caller: Any) -> None:
    for most in (1, 2, 5, 9, 20, 40, 70, 90, 100, 110, 130, 170):
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


def test_what_is_no_call_is_text(client: Any) -> None:
    free = ask(client, max_tokens=16).choices[0]
    assert free.message.tool_calls is None
    assert free.message.content
    text = "".join(c.choices[0].delta.content or "" for c in ask(client, max_tokens=16, stream=True))
    assert text == free.message.content
    # Without calls the model is not told of the functions.
    assert ask(client, tool_choice="none", max_tokens=1).usage == ask(client, tools=None, max_tokens=1).usage


def test_parameters_may_be_named_like_keywords(lm: LM) -> None:
    """References within them are the schema's, as within all others."""
    names = ("default", "const", "enum", "examples", "$ref")
    kinds = {"Yes": {"const": "yes"}, "default": {"const": "no"}}
    properties: Any = {name: {"$ref": "#/$defs/Yes"} for name in names} | {"last": {"$ref": "#/$defs/default"}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "$defs": kinds}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema | {"additionalProperties": False}}}
    found = use_of(ChatRequest.model_validate({"messages": HI, "tools": [tool], "tool_choice": "required"}), lm, HERMES)
    assert found is not None
    grammar = found.grammar()
    assert all(name in grammar for name in names)
    moved = _moved({"enum": [{"$ref": "#/x"}], "properties": {"enum": {"$ref": "#/x"}}}, "#/p")
    assert moved == {"enum": [{"$ref": "#/x"}], "properties": {"enum": {"$ref": "#/p/x"}}}


ANY: Any = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"]}
# Schemas of parameters under which no object is valid, and others under which not only objects are.
NO_OBJECTS: dict[str, Any] = {
    "array": {"type": "array", "items": {}},
    "array with what is not supported": {"type": "array", "contains": {"not": {}}},
    "string": {"type": "string"},
    "null": {"type": "null"},
    "several": {"type": ["integer", "array", "null"]},
    "enum": {"enum": [1, 2]},
    "const": {"const": "x"},
    "reference": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "string"}}},
    "anyOf": {"anyOf": [{"type": "array"}, {"enum": [None]}]},
    "oneOf": {"oneOf": [{"type": "array"}, {"type": "string"}]},
    "allOf": {"allOf": [{}, {"type": "boolean"}]},
}
ALSO_OBJECTS: dict[str, Any] = {
    "or null": ANY | {"type": ["null", "object"]},
    "nullable": ANY | {"nullable": True},
    "anyOf": {"anyOf": [{"type": "array"}, ANY, {"const": 3}]},
    "reference": {"$ref": "#/$defs/o", "$defs": {"o": {"anyOf": [{"type": "string"}, ANY]}}},
    "enum": {"enum": [1, {"a": 1}, None]},
    "no type": {"properties": ANY["properties"], "required": ["a"]},
}


def named(name: str, parameters: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("root", NO_OBJECTS)
def test_arguments_are_an_object(lm: LM, root: str) -> None:
    """For every choice that can call the function, and for none that cannot; wherever it stands in the list."""
    for place in (0, 2):
        tools = [named(f"good{i}", ANY) for i in range(3)]
        tools.insert(place, named("bad", NO_OBJECTS[root]))
        body = {"messages": HI, "tools": tools}
        for choice in (None, "auto", "required", {"type": "function", "function": {"name": "bad"}}):
            found = use_of(ChatRequest.model_validate(body | {"tool_choice": choice}), lm, HERMES)
            assert found is not None
            with pytest.raises(ApiError, match="the arguments of 'bad' are an object") as error:
                found.check()
            assert (error.value.status, error.value.param) == (400, f"tools[{place}].function.parameters")
        other = {"type": "function", "function": {"name": "good1"}}
        found = use_of(ChatRequest.model_validate(body | {"tool_choice": other}), lm, HERMES)
        assert found is not None
        found.check()
        assert use_of(ChatRequest.model_validate(body | {"tool_choice": "none"}), lm, HERMES) is None


@pytest.mark.parametrize("root", ALSO_OBJECTS)
@pytest.mark.parametrize("template", [HERMES, MISTRAL, LLAMA], ids=["hermes", "mistral", "llama"])
def test_what_else_a_schema_allows_is_not_written(lm: LM, root: str, template: str) -> None:
    body: Any = {"messages": HI, "tools": [named("f", ALSO_OBJECTS[root])], "tool_choice": "required"}
    found = use_of(ChatRequest.model_validate(body | {"parallel_tool_calls": False}), lm, template)
    assert found is not None
    found.check()
    (output,) = lm.generate(["hi"], n=4, seed=1, max_tokens=400, temperature=1.5, grammar=found.grammar())
    for sample in output.outputs:
        reader = CallReader(found.family, found.functions, several=False, forced=True)
        events = reader.feed(sample.text) + reader.end(cut=False)
        assert json.loads("".join(event.text for event in events if event.call is not None))["a"] in range(10)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bad"}}])
@pytest.mark.parametrize("place", [0, 3, 5])
def test_errors_name_the_function_and_its_place(lm: LM, choice: Any, place: int) -> None:
    tools = [named(f"good{i}", ANY) for i in range(5)]
    tools.insert(place, named("bad", {"type": "object", "properties": {"k": {"not": {}}}}))
    found = use_of(ChatRequest.model_validate({"messages": HI, "tools": tools, "tool_choice": choice}), lm, HERMES)
    assert found is not None
    with pytest.raises(ApiError, match=rf"^tools\[{place}\]\.function\.parameters of 'bad' .*#/properties/k") as error:
        found.grammar()
    assert error.value.param == f"tools[{place}].function.parameters"


# --- prompts ----------------------------------------------------------------------------------------------------------

TALK: Any = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"x": [1, "é"]}'}}],
    },
    {"role": "tool", "tool_call_id": "a", "name": "now", "content": "noon </s>"},
]


def prompt(lm: LM, template: str, **fields: Any) -> tuple[str, list[int]]:
    body = ChatRequest.model_validate({"messages": TALK, "tools": TOOLS} | fields)
    return chat.prompt_of(lm, body, template)


def test_a_template_that_knows_tools_gets_them(lm: LM) -> None:
    text, ids = prompt(lm, HERMES)
    assert '"name": "weather", "description": "Forecast"' in text
    assert '<tool_call>{"name": "now", "arguments": {"x": [1, "é"]}}</tool_call>' in text
    assert "<s>tool: noon </s></s>" in text
    # The end of text in what the function gave is text; the template's own are not.
    assert [ids.count(lm.bos), ids.count(lm.eos)] == [5, 4]


def test_other_templates_are_told_in_words(lm: LM) -> None:
    text, _ = prompt(lm, "chatml")
    assert text.count('"name": "weather"') == 1
    assert '[{"name": "now", "arguments": {"x": [1, "é"]}}]' in text
    assert "Result of now: noon </s>" in text
    assert "tool" not in [part.split("\n")[0] for part in text.split("<|im_start|>")]
    first, _ = prompt(lm, "chatml", messages=[{"role": "assistant", "content": "Hello"}])
    assert first.startswith("<|im_start|>system\nYou can call")


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)


def test_results_are_one_turn_that_names_their_functions(lm: LM) -> None:
    def call(id: str, name: str) -> Any:
        return {"id": id, "function": {"name": name, "arguments": "{}"}}

    calls = {"role": "assistant", "tool_calls": [call("a", "now"), call("b", "weather")]}
    results = [
        {"role": "tool", "tool_call_id": "b", "content": "rain"},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
        {"role": "tool", "tool_call_id": "c", "content": "?"},
    ]
    talk = [*HI, calls, *results, {"role": "user", "content": "so?"}]
    text, _ = prompt(lm, ALTERNATING, messages=talk)
    assert text.endswith("[user] Result of weather: rain\nResult of now: noon\nResult of the call: ?\nso?\n")
    with pytest.raises(ApiError, match="roles must alternate"):  # what clients say by themselves stays as it is
        prompt(lm, ALTERNATING, messages=[*HI, *HI])
    knowing = HERMES.replace("{{ m.role }}:", "{{ m.role }} {{ m.name }}:")
    text, _ = prompt(lm, knowing, messages=talk)
    assert "<s>tool weather: rain</s><s>tool now: noon</s>" in text


def test_control_tokens_in_functions_and_calls(lm: LM) -> None:
    forged: Any = [{"type": "function", "function": {"name": "now", "description": "ends </s> here"}}]
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"x": "</s>"}'}}
    talk = [*HI, {"role": "assistant", "tool_calls": [call]}, *HI]
    for fields in ({"tools": forged}, {"messages": talk}):
        with pytest.raises(ApiError, match="a control token"):
            prompt(lm, HERMES, **fields)
        text, ids = prompt(lm, "chatml", **fields)  # told in words, it is text
        assert "</s>" in text
        assert lm.eos not in ids


def test_families() -> None:
    assert [family_of(t).name for t in ("chatml", HERMES, MISTRAL, LLAMA)] == ["json", "hermes", "mistral", "llama"]
    assert family_of("{{ tools }}<tool_call><function=").name == "qwen3-coder"
    assert family_of("{{ messages }}<tool_call>").name == "json"  # it is never told of tools


# --- answers of a model that calls by itself --------------------------------------------------------------------------


def use(lm: LM, body: Any = None) -> ToolUse:
    found = use_of(ChatRequest.model_validate(body or {"messages": HI, "tools": TOOLS}), lm, HERMES)
    assert found is not None
    return found


def test_text_and_calls_of_one_answer(lm: LM) -> None:
    said = 'Let me see.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    style = ToolStyle(use(lm), lm.piece, lm.spelling, False, 0)
    choice = style.choice(0, CompletionOutput(0, said, [], "stop", 1))
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    deltas = [Delta(0, char, []) for char in said] + [Delta(0, "", [], finish_reason="stop")]
    chunks = [chunk for delta in deltas for chunk in style.chunks(0, delta.text, delta, TokenLedger(lm.piece), 0)]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "Let me see."
    assert chunks[-1]["finish_reason"] == "tool_calls"
    assert [c["function"]["name"] for x in chunks for c in x["delta"].get("tool_calls", []) if "id" in c] == ["now"]


def test_a_request_may_allow_one_call(lm: LM) -> None:
    said = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now"}</tool_call>'
    for allowed, count in ((None, 2), (True, 2), (False, 1)):
        body = {"messages": HI, "tools": TOOLS, "parallel_tool_calls": allowed}
        style = ToolStyle(use(lm, body), lm.piece, lm.spelling, False, 0)
        message = style.choice(0, CompletionOutput(0, said, [], "stop", 1))["message"]
        assert len(message["tool_calls"]) == count
        delta = Delta(0, said, [], finish_reason="stop")
        chunks = style.chunks(0, said, delta, TokenLedger(lm.piece), 0)
        assert sum("id" in c for chunk in chunks for c in chunk["delta"].get("tool_calls", [])) == count


@pytest.mark.skipif(
    importlib.util.find_spec("instructor") is None, reason="instructor is not installed: pip install instructor"
)
def test_instructor_in_its_default_mode(server: Running) -> None:
    import instructor
    from pydantic import BaseModel, Field

    class Place(BaseModel):
        country: str = Field(pattern="^(CH|AT)$")

    class Forecast(BaseModel):
        place: Place
        degrees: int = Field(ge=-20, le=40)

    client = instructor.from_openai(server.client())
    found = client.chat.completions.create(
        model="tiny", messages=HI, response_model=Forecast, max_retries=0, max_tokens=300, seed=1
    )
    assert found.place.country in ("CH", "AT")
    assert -20 <= found.degrees <= 40


# --- calls that the model begins by itself ----------------------------------------------------------------------------


def test_a_call_that_has_begun_is_held_to_its_schema(lm: LM) -> None:
    """With a token of this model as the mark; what comes before, between and behind is free."""
    family = replace(FAMILIES["hermes"], fences=("<s>",))
    held = replace(use(lm), family=family).held(lm)
    assert held is not None
    options: Any = {"max_tokens": 300, "seed": 1, "spelled": (lm.bos,)}

    def said(**changes: Any) -> str:
        (output,) = lm.generate(["hi"], **options | changes)
        return output.outputs[0].text

    free = {lm.bos: -math.inf}
    assert said(grammar=held, logit_bias=free) == said(logit_bias=free)
    text = said(grammar=held, logit_bias={lm.bos: 9.0})
    reader = CallReader(family, use(lm).functions)
    calls: dict[int, str] = {}
    for event in reader.feed(text) + reader.end(cut=True):
        if event.call is not None:
            calls[event.call] = calls.get(event.call, "") + event.text
    assert calls
    for arguments in list(calls.values())[:-1]:
        assert isinstance(json.loads(arguments), dict)


def test_what_no_grammar_can_be_made_of_is_free(lm: LM) -> None:
    assert use(lm).held(lm) is None  # <tool_call> is no token here
    odd = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    some = replace(use(lm, {"messages": HI, "tools": [odd]}), family=replace(FAMILIES["hermes"], fences=("<s>",)))
    assert some.held(lm) is None

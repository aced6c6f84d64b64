"""Functions of a chat: how the prompt tells of them, and the grammars of calls that must be or have begun."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from tilebeam import LM, TilebeamError
from tilebeam.chat.answer_parts import ToolCallDelta
from tilebeam.chat.chat_template import MessagesRefused
from tilebeam.chat.refused import FieldRefused
from tilebeam.chat.tool_calls import CallReader
from tilebeam.chat.tool_families import FAMILIES
from tilebeam.chat.tool_grammar import _moved, forced_grammar, held_grammar
from tilebeam.chat.tools import ToolUse, family_of, tool_use, tools_of
from tools_kit import HERMES, LLAMA, MISTRAL, TOOLS

HI: Any = [{"role": "user", "content": "hi"}]


def use(tools: Any, choice: Any = None, template: str = HERMES, **options: Any) -> ToolUse:
    found = tool_use(tools_of(tools), choice, template, **options)
    assert found is not None
    return found


def test_parameters_may_be_named_like_keywords() -> None:
    """References within them are the schema's, as within all others."""
    names = ("default", "const", "enum", "examples", "$ref")
    kinds = {"Yes": {"const": "yes"}, "default": {"const": "no"}}
    properties: Any = {name: {"$ref": "#/$defs/Yes"} for name in names} | {"last": {"$ref": "#/$defs/default"}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "$defs": kinds}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema | {"additionalProperties": False}}}
    grammar = forced_grammar(use([tool], "required"))
    assert all(name in grammar for name in names)
    moved = _moved({"enum": [{"$ref": "#/x"}], "properties": {"enum": {"$ref": "#/x"}}}, "#/p")
    assert moved == {"enum": [{"$ref": "#/x"}], "properties": {"enum": {"$ref": "#/p/x"}}}


ANY: Any = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"]}
# Schemas of parameters that are no objects, and others under which not only objects are valid.
NO_OBJECTS: dict[str, Any] = {
    "array with what is not supported": {"type": "array", "contains": {"not": {}}},
    "string": {"type": "string"},
    "several": {"type": ["integer", "array", "null"]},
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
def test_arguments_are_an_object(root: str) -> None:
    """For every choice that can call the function, and for none that cannot; wherever it stands in the list."""
    for place in (0, 2):
        tools = [named(f"good{i}", ANY) for i in range(3)]
        tools.insert(place, named("bad", NO_OBJECTS[root]))
        for choice in (None, "auto", "required", {"type": "function", "function": {"name": "bad"}}):
            with pytest.raises(FieldRefused, match="the arguments of 'bad' are an object") as error:
                use(tools, choice).check()
            assert error.value.param == f"tools[{place}].function.parameters"
        use(tools, {"type": "function", "function": {"name": "good1"}}).check()
        assert tool_use(tools_of(tools), "none", HERMES) is None


@pytest.mark.parametrize("root", ALSO_OBJECTS)
@pytest.mark.parametrize("template", [HERMES, MISTRAL, LLAMA], ids=["hermes", "mistral", "llama"])
def test_what_else_a_schema_allows_is_not_written(lm: LM, root: str, template: str) -> None:
    found = use([named("f", ALSO_OBJECTS[root])], "required", template, several=False)
    found.check()
    (output,) = lm.generate(["hi"], n=4, seed=1, max_tokens=400, temperature=1.5, grammar=forced_grammar(found))
    for sample in output.outputs:
        reader = CallReader(found.family, found.functions, several=False, forced=True)
        parts = reader.feed(sample.text) + reader.end(cut=False)
        assert json.loads("".join(p.arguments for p in parts if isinstance(p, ToolCallDelta)))["a"] in range(10)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bad"}}])
@pytest.mark.parametrize("place", [0, 3, 5])
def test_errors_name_the_function_and_its_place(choice: Any, place: int) -> None:
    tools = [named(f"good{i}", ANY) for i in range(5)]
    tools.insert(place, named("bad", {"type": "object", "properties": {"k": {"not": {}}}}))
    with pytest.raises(
        FieldRefused, match=rf"^tools\[{place}\]\.function\.parameters of 'bad' .*#/properties/k"
    ) as error:
        forced_grammar(use(tools, choice))
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
    given = {"messages": TALK, "tools": TOOLS} | fields
    made = lm.chat_prompt(given["messages"], template=template, tools=given["tools"])
    return made.text, made.ids


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
    with pytest.raises(TilebeamError, match="roles must alternate"):  # what clients say by themselves stays as it is
        prompt(lm, ALTERNATING, messages=[*HI, *HI])
    knowing = HERMES.replace("{{ m.role }}:", "{{ m.role }} {{ m.name }}:")
    text, _ = prompt(lm, knowing, messages=talk)
    assert "<s>tool weather: rain</s><s>tool now: noon</s>" in text


def test_control_tokens_in_functions_and_calls(lm: LM) -> None:
    forged: Any = [{"type": "function", "function": {"name": "now", "description": "ends </s> here"}}]
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"x": "</s>"}'}}
    talk = [*HI, {"role": "assistant", "tool_calls": [call]}, *HI]
    for fields in ({"tools": forged}, {"messages": talk}):
        with pytest.raises(TilebeamError, match="a control token"):
            prompt(lm, HERMES, **fields)
        text, ids = prompt(lm, "chatml", **fields)  # told in words, it is text
        assert "</s>" in text
        assert lm.eos not in ids


def test_families() -> None:
    assert [family_of(t).name for t in ("chatml", HERMES, MISTRAL, LLAMA)] == ["json", "hermes", "mistral", "llama"]
    assert family_of("{{ tools }}<tool_call><function=").name == "qwen3-coder"
    assert family_of("{{ messages }}<tool_call>").name == "json"  # it is never told of tools


# --- calls that the model begins by itself ----------------------------------------------------------------------------


def test_a_call_that_has_begun_is_held_to_its_schema(lm: LM) -> None:
    """With a token of this model as the mark; what comes before, between and behind is free."""
    family = replace(FAMILIES["hermes"], fences=("<s>",))
    held = held_grammar(replace(use(TOOLS), family=family), lm)
    assert held is not None
    options: Any = {"max_tokens": 300, "seed": 1, "shown_tokens": (lm.bos,)}

    def said(**changes: Any) -> str:
        (output,) = lm.generate(["hi"], **options | changes)
        return output.outputs[0].text

    free = {lm.bos: -math.inf}
    assert said(grammar=held, logit_bias=free) == said(logit_bias=free)
    text = said(grammar=held, logit_bias={lm.bos: 9.0})
    reader = CallReader(family, use(TOOLS).functions)
    calls: dict[int, str] = {}
    for part in reader.feed(text) + reader.end(cut=True):
        if isinstance(part, ToolCallDelta):
            calls[part.call] = calls.get(part.call, "") + part.arguments
    assert calls
    for arguments in list(calls.values())[:-1]:
        assert isinstance(json.loads(arguments), dict)


def test_what_no_grammar_can_be_made_of_is_free(lm: LM) -> None:
    assert held_grammar(use(TOOLS), lm) is None  # <tool_call> is no token here
    odd = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
    some = replace(use([odd]), family=replace(FAMILIES["hermes"], fences=("<s>",)))
    assert held_grammar(some, lm) is None


def test_what_is_no_function_or_call_is_refused(lm: LM) -> None:
    for wrong in ({"parameters": [1]}, {"parameters": "x"}, {"description": 5}):
        with pytest.raises(FieldRefused, match=r"tools\[1\] must be"):
            tools_of([named("f", None), {"type": "function", "function": {"name": "g"} | wrong}])
    for calls in (5, [5], {"a": 1}):
        with pytest.raises(MessagesRefused, match=r"messages\[1\].tool_calls must be"):
            lm.chat_prompt([*HI, {"role": "assistant", "tool_calls": calls}], template="chatml")
    deep: Any = {}
    for _ in range(3000):
        deep = {"a": deep}
    with pytest.raises(MessagesRefused, match="nested too deeply"):
        lm.chat_prompt(HI, template=HERMES, chat_template_kwargs=deep)

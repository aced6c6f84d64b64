"""Calls read out of texts, by the family of the template, and however the text is cut into pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam.chat import tool_arguments
from tilebeam.chat.answer_parts import Part, Text, ToolCallDelta, text_in
from tilebeam.chat.tool_calls import CallReader
from tilebeam.chat.tool_families import FAMILIES

NAMES: dict[str, Any] = {"weather": {}, "add_two": {}, "a.b": {}}
W = '{"name": "weather", "arguments": {"city": "Bern }\\" [", "n": [1, {"x": 2}]}}'
A = '{"name":"add_two","parameters":{"a":1,"b":-2}}'
Z = '{"name": "a.b", "arguments": {}}'
CITY = '{"city": "Bern }\\" [", "n": [1, {"x": 2}]}'
TWO = '{"a":1,"b":-2}'

CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "just text <tool", "just text <tool", []),
    ("hermes", f"<tool_call>\n{W}\n</tool_call>", "", [("weather", CITY)]),
    ("hermes", f"Let me see.\n<tool_call>\n{W}\n</tool_call>\n<tool_call>{A}</tool_call>\n", "Let me see.",
     [("weather", CITY), ("add_two", TWO)]),
    ("hermes", f"<tool_call>\n{W}", "", [("weather", CITY)]),  # no closing mark
    ("hermes", f"<tool_call>\n{A}\n</tool_call>\nDone.", "\nDone.", [("add_two", TWO)]),
    ("hermes", '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>', None, []),  # type: ignore[list-item]
    ("hermes", "<tool_call>\nno json\n</tool_call>", None, []),  # type: ignore[list-item]
    ("hermes", '<tool_call>{"name": "weather", "arg', None, []),  # type: ignore[list-item]
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Be', "", [("weather", '{"city": "Be')]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add_two"}</tool_call>', "", [("add_two", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add_two", "arguments": "{\\"a\\": 1}"}', "", [("add_two", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add_two", "arguments": "hi"}</tool_call>', None, []),  # type: ignore[list-item]
    ("hermes", '<tool_call>{"name": "a.b"}</tool_call>', "", [("a.b", "{}")]),
    ("hermes", '<tool_call>{"name": "a.b", "arguments": {}, "id": "}"}</tool_call>', "", [("a.b", "{}")]),
    ("hermes", W, "", [("weather", CITY)]),  # small models leave the marks out
    ("hermes", f"```json\n{A}\n```", "", [("add_two", TWO)]),
    ("hermes", f"{A}\n{Z}\n", "", [("add_two", TWO), ("a.b", "{}")]),
    ("hermes", '{"name": "Bern", "arguments": {}}', '{"name": "Bern", "arguments": {}}', []),
    ("mistral", f"[TOOL_CALLS][{W}, {Z}]", "", [("weather", CITY), ("a.b", "{}")]),
    ("mistral", f" [{W}]", "", [("weather", CITY)]),  # the mark is a control token, which is no text
    ("mistral", f"Well: [TOOL_CALLS] [ {A} ]", "Well:", [("add_two", TWO)]),
    ("mistral", f"[TOOL_CALLS]add_two[ARGS]{TWO}", "", [("add_two", TWO)]),
    ("mistral", f"add_two{TWO}weather{CITY}", "", [("add_two", TWO), ("weather", CITY)]),
    ("mistral", "add two numbers", "add two numbers", []),
    ("mistral", "[1, 2]", "[1, 2]", []),
    ("llama", A, "", [("add_two", TWO)]),
    ("llama", f"<|python_tag|>{A}; {Z}", "", [("add_two", TWO), ("a.b", "{}")]),
    ("llama", '{"type": "function", "name": "add_two", "parameters": {"a": 1}}', "", [("add_two", '{"a": 1}')]),
    ("llama", '{"type": "function", "function": {"name": "a.b", "arguments": {}}}', "", [("a.b", "{}")]),
    ("llama", '{"answer": 5}', '{"answer": 5}', []),
    ("llama", f"See: {A}", f"See: {A}", []),
    ("json", f"\n[{W},\n{A}]", "", [("weather", CITY), ("add_two", TWO)]),
    ("json", f"```json\n{A}\n```", "", [("add_two", TWO)]),
    ("json", '[{"a": 1}, 2]', '[{"a": 1}, 2]', []),
    ("json", "  text with spaces \n", "  text with spaces \n", []),
    ("json", "", "", []),
    ("json", "{", "{", []),
    ("json", " ", " ", []),
]  # fmt: skip


def read(family: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = CallReader(FAMILIES[family], NAMES)
    text, calls = "", []
    for part in [e for piece in pieces for e in reader.feed(piece)] + reader.end():
        if isinstance(part, Text):
            text += part.text
        elif part.name is not None:
            assert part.call == len(calls)
            calls.append([part.name, part.arguments])
        else:
            calls[part.call][1] += part.arguments
    assert reader.calls == len(calls)
    return text, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(("family", "text", "said", "calls"), CASES)
def test_calls_in_a_text(family: str, text: str, said: str | None, calls: Any) -> None:
    wanted = (text if said is None else said, calls)
    assert read(family, [text]) == wanted
    assert read(family, list(text)) == wanted
    rng = random.Random(text)
    for _ in range(5):
        cuts = sorted(rng.sample(range(len(text) + 1), min(3, len(text) + 1)))
        assert read(family, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == wanted


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json\n", "```", "<tool"]
BITS = ["[", "]", "{", "}", ",", ";", " ", "\n", '{"name": "', '"', "\\", "é", '"arguments": ', "a.b", ":", "weather"]
PARTS = st.sampled_from([*MARKS, *BITS, W, A, Z])


@settings(deadline=None, max_examples=300)
@given(st.lists(PARTS, max_size=10), st.sampled_from(["hermes", "mistral", "llama", "json"]), st.integers(1, 7))
def test_pieces_make_no_difference(parts: list[str], family: str, size: int) -> None:
    text = "".join(parts)
    whole = read(family, [text])
    assert read(family, [text[i : i + size] for i in range(0, len(text), size)]) == whole
    assert all(name in NAMES for name, _ in whole[1])
    if not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize(("family", "text", "said", "calls"), [case for case in CASES if case[3]])
def test_only_the_first_call_is_told_where_one_is_allowed(family: str, text: str, said: str, calls: Any) -> None:
    for pieces in ([text], list(text)):
        reader = CallReader(FAMILIES[family], NAMES, several=False)
        parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end()
        told = [part for part in parts if isinstance(part, ToolCallDelta)]
        assert text_in(parts) == said
        assert [part.name for part in told if part.name is not None] == [calls[0][0]]
        assert "".join(part.arguments for part in told) == calls[0][1]


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(FAMILIES["hermes"], NAMES)
    parts: list[Part] = [part for char in f"<tool_call>\n{W}\n</tool_call>" for part in reader.feed(char)]
    arguments = [p.arguments for p in parts if isinstance(p, ToolCallDelta) and p.name is None]
    assert len(arguments) > 20
    assert json.loads("".join(arguments)) == json.loads(CITY)


CUT: list[tuple[str, str, str, int]] = [
    ("hermes", f"See: <tool_call>{W}</tool_call>\n<tool_call>\n{{", "See:", 1),
    ("hermes", f"<tool_call>{W}</tool_call>\n<tool_c", "", 1),
    ("hermes", f"<tool_call>{W}\n</t", "", 1),
    ("hermes", 'See: <tool_call>{"name": "wea', "See:", 0),
    ("hermes", "See: <tool_call>", "See:", 0),
    ("hermes", '{"name": "add', "", 0),
    ("hermes", '{"name": "Ada", "born": ', '{"name": "Ada", "born": ', 0),
    ("hermes", '{"answer": ', '{"answer": ', 0),
    ("hermes", "1 <", "1 <", 0),
    ("json", f'[{W}, {{"name":\n"a', "", 1),
    ("json", f"[{W},", "", 1),
    ("json", "[", "[", 0),
    ("mistral", "[TOOL_CALLS]add_t", "", 0),
    ("qwen3-coder", "Well.\n<tool_call>\n<function=weather>\n<parameter=city>\nBe", "Well.", 0),
    ("glm", "<tool_call>add_two\n<arg_key>a</arg_key>\n<arg_value>1", "", 0),
    ("lfm2", "<|tool_call_start|>[add_two(a=1), weather(city='B", "", 1),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add_", "", 0),
]


@pytest.mark.parametrize(("family", "text", "said", "calls"), CUT)
def test_half_a_call_is_dropped_where_the_answer_was_cut(family: str, text: str, said: str, calls: int) -> None:
    for pieces in ([text], list(text)):
        reader = CallReader(FAMILIES[family], NAMES)
        parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end(cut=True)
        assert text_in(parts) == said
        assert reader.calls == calls


def test_values_have_the_types_of_the_schema() -> None:
    kinds: Any = {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "e": {"enum": ["1", "two"]},
        "n": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "r": {"$ref": "#/$defs/R"},
        "o": {},
        "a": {"allOf": [{"type": "string"}]},
        "none": {"enum": None},
    }
    functions = {"f": {"properties": kinds, "$defs": {"R": {"type": "boolean"}}}}
    values = {"s": "[1]", "i": "7", "e": "1", "n": "12", "r": "True", "o": "{'a': None}", "x": "no json"}
    values |= {"a": "12", "none": "3", "nan": "NaN", "inf": "1e999"}
    listed = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    reader = CallReader(FAMILIES["qwen3-coder"], functions)
    (began, told) = reader.feed(f"<tool_call>\n<function=f>\n{listed}</function>\n</tool_call>")[:2]
    wanted = {"s": "[1]", "i": 7, "e": "1", "n": "12", "r": True, "o": {"a": None}, "x": "no json"}
    wanted |= {"a": "12", "none": 3, "nan": "NaN", "inf": "1e999"}  # JSON has no infinite numbers
    assert isinstance(began, ToolCallDelta)
    assert isinstance(told, ToolCallDelta)
    assert (began.name, json.loads(told.arguments)) == ("f", wanted)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("pairs", "<arg_key>" + " " * 9999),
        ("pairs", "<arg_key>a</arg_key><arg_value>" * 3000),
        ("elements", "<parameter=a<" * 3000),
        ("elements", '<parameter name="' * 3000),
    ],
)
def test_arguments_that_repeat_themselves_are_read_to_their_end(kind: str, text: str) -> None:
    """Expressions that go back over them would take hours."""
    assert tool_arguments.read(kind, text, {}) == "{}"

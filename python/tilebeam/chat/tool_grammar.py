"""Grammars of calls: of answers that must call, and of calls that a model has begun by itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from tilebeam.chat.refused import FieldRefused, grammar_of_field
from tilebeam.chat.tools import Tool, ToolUse
from tilebeam.grammars import constraint
from tilebeam.grammars.gbnf import MAX_LENGTH, literal

# Calls of one answer that must call.
_MOST_CALLS = 16
# Families whose calls are held to their schemas once they have begun, where the model is free to call.
_HELD = ("hermes", "granite", "tool_calls", "nemotron-v2")
# Keywords of schemas whose members have names of the schema's own choice, which may look like keywords.
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


class ModelTokens(Protocol):
    """What knows a model's tokens: a model."""

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the tokens of a text, control tokens among them."""
        ...

    def is_control(self, token: int) -> bool:
        """Tell whether a token is no text."""
        ...

    def spelling(self, token: int) -> bytes:
        """Return the bytes that stand for a token, those of its text or the name of a control token."""
        ...


def forced_grammar(use: ToolUse) -> str:
    """Return the grammar of an answer that calls.

    Raises:
        FieldRefused: the parameters of a function cannot be turned into one.
    """
    for i, tool in enumerate(use.tools, use.first):  # one by one, so that errors name the right one
        field = f"tools[{i}].function.parameters"
        grammar_of_field(field, constraint.of_schema, tool.arguments, f" of {tool.name!r}")
    rules = _call_rules(use.tools, "parameters" if use.family.name == "llama" else "arguments")
    return grammar_of_field("tools", constraint.checked, f"root ::= {_answer(use)}\n{rules}")


def held_grammar(use: ToolUse, model: ModelTokens) -> str | None:
    """Return the grammar of an answer that may call: any text, in which a call that has begun is held to the schemas.

    None where it cannot be told from single tokens that a call begins, or no grammar can be made of the schemas: the
    model is as free as without one then.
    """
    marks = [token for mark in use.family.fences if (token := _token_of(model, mark)) is not None]
    if use.family.name not in _HELD or len(marks) != 1:
        return None
    try:
        rules = _rules_of(json.dumps([[tool.name, tool.arguments] for tool in use.tools]))
    except FieldRefused:
        return None
    ends = " | ".join(_spelled(model, mark) for mark in use.family.closes if mark.startswith("<"))
    space, mark = "[ \\n]{0,4}", marks[0]
    several = f'"[" {space} call ( {space} "," {space} call )* {space} "]"'
    calls = "call" if use.family.name == "hermes" else f"( call | {several} )"
    root = f"root ::= ( !<[{mark}]> | <[{mark}]> {space} {calls} {space} ( {ends} ) )*"
    text = f"{root}\n{rules}"
    return text if len(text) <= MAX_LENGTH else None


def _answer(use: ToolUse) -> str:
    most = _MOST_CALLS - 1 if use.several else 0
    if use.family.name == "hermes":
        one = f"{literal('<tool_call>' + chr(10))} call {literal(chr(10) + '</tool_call>')}"
        return one + (f' ( "\\n" {one} ){{0,{most}}}' if most else "")
    if use.family.name == "llama":
        return "call" + (f' ( "; " call ){{0,{most}}}' if most else "")
    listed = '"[" call' + (f' ( ", " call ){{0,{most}}}' if most else "") + ' "]"'
    return f'"[TOOL_CALLS]" {listed}' if use.family.name == "mistral" else listed


def _token_of(model: ModelTokens, mark: str) -> int | None:
    """Return the token that a mark is, None: it is several."""
    ids = model.tokenize(mark, add_special=False)
    return ids[0] if len(ids) == 1 else None


def _spelled(model: ModelTokens, mark: str) -> str:
    """Write a mark in a grammar: its token, or its characters."""
    token = _token_of(model, mark)
    return literal(mark) if token is None else f"<[{token}]> | {literal(mark)}"


@lru_cache(maxsize=64)
def _rules_of(functions: str) -> str:
    """Do what `_call_rules` does, for names and schemas as JSON."""
    return _call_rules([Tool(name, parameters=schema) for name, schema in json.loads(functions)], "arguments")


def _call_rules(tools: Sequence[Tool], key: str) -> str:
    """Return the rules of a call of any of these functions, whose arguments stand under `key`; the first is `call`.

    Raises:
        FieldRefused: no grammar can be made of them.
    """
    definitions = {f"f{i}": _moved(tool.arguments, f"#/$defs/f{i}") for i, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: {"type": "object", "$ref": f"#/$defs/f{i}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    grammar = grammar_of_field("tools", constraint.of_schema, {"$defs": definitions, "anyOf": calls})
    return f"call ::= {grammar.removeprefix('root ::= ')}"


def _moved(schema: Any, place: str) -> Any:
    """Make a schema part of another document: references to its own parts are put right."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: _moved(part, place) for name, part in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            found[key] = place + value[1:]
        elif key in ("enum", "const", "default", "examples"):
            found[key] = value
        else:
            found[key] = _moved(value, place)
    return found

"""Functions that a request offers to the model: how the prompt tells of them, and the grammar of calls that must be.

The model's own template gets them where it knows tools; else they are told in the first message, and calls and results
of earlier turns as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from tilebeam.grammars import constraint
from tilebeam.grammars.combining import allows_objects
from tilebeam.grammars.gbnf import MAX_LENGTH, literal
from tilebeam.model.chat_template import takes_tools
from tilebeam.server.errors import ApiError, bad_request
from tilebeam.server.grammar import made
from tilebeam.server.requests import ChatRequest, Message, NamedTool, Tool
from tilebeam.server.tool_families import FAMILIES, Family, family_in

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

# Calls of one answer that must call.
_MOST_CALLS = 16
# Families whose calls are forced in their own form; others' calls become JSON.
_OWN_GRAMMAR = ("hermes", "mistral", "llama")
# Families whose calls are held to their schemas once they have begun, where the model is free to call.
_HELD = ("hermes", "granite", "tool_calls", "nemotron-v2")
# Keywords of schemas whose members have names of the schema's own choice, which may look like keywords.
_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


@dataclass(frozen=True)
class ToolUse:
    """The functions of a request, and what the model may or must do with them.

    Attributes:
        family: how this model writes calls.
        tools: those that it may call.
        forced: it must call.
        several: more than one call is allowed.
        first: where `tools` begin in the request's list.
    """

    family: Family
    tools: Sequence[Tool]
    forced: bool
    several: bool
    first: int = 0

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        """The schemas of their parameters, by their names."""
        return {tool.function.name: tool.arguments for tool in self.tools}

    def check(self) -> None:
        """Raise `ApiError` for a function that takes no object; not for the event loop."""
        for i, tool in enumerate(self.tools, self.first):
            if not allows_objects(tool.arguments):
                param = f"tools[{i}].function.parameters"
                why = f"the arguments of {tool.function.name!r} are an object, and this schema allows none"
                raise bad_request(f"{param}: {why}.", param=param, code="invalid_value")

    def grammar(self) -> str:
        """The grammar of an answer that calls.

        Raises:
            ApiError: the parameters of a function cannot be turned into one.
        """
        return made("tools", lambda: constraint.checked(self._text()))

    def held(self, lm: LM) -> str | None:
        """The grammar of an answer that may call: any text, in which a call that has begun is held to the schemas.

        None where it cannot be told from single tokens that a call begins, or no grammar can be made of the schemas:
        the model is as free as without one then.
        """
        marks = [token for mark in self.family.fences if (token := _token_of(lm, mark)) is not None]
        if self.family.name not in _HELD or len(marks) != 1:
            return None
        try:
            rules = _rules_of(json.dumps([[tool.function.name, tool.arguments] for tool in self.tools]))
        except ApiError:
            return None
        ends = " | ".join(_spelled(lm, mark) for mark in self.family.closes if mark.startswith("<"))
        space, mark = "[ \\n]{0,4}", marks[0]
        several = f'"[" {space} call ( {space} "," {space} call )* {space} "]"'
        calls = "call" if self.family.name == "hermes" else f"( call | {several} )"
        root = f"root ::= ( !<[{mark}]> | <[{mark}]> {space} {calls} {space} ( {ends} ) )*"
        text = f"{root}\n{rules}"
        return text if len(text) <= MAX_LENGTH else None

    def _text(self) -> str:
        schema, calls = _calls_schema(self.tools, "parameters" if self.family.name == "llama" else "arguments")
        for i, tool in enumerate(self.tools, self.first):  # one by one, so that errors name the right one
            make = partial(constraint.of_schema, tool.arguments)
            made(f"tools[{i}].function.parameters", make, f" of {tool.function.name!r}")
        text = made("tools", partial(constraint.of_schema, schema | {"anyOf": calls}))
        head, body = text.split("\n", 1)
        call = f"call ::= {head.removeprefix('root ::= ')}"
        return f"root ::= {self._answer()}\n{call}\n{body}"

    def _answer(self) -> str:
        most = _MOST_CALLS - 1 if self.several else 0
        if self.family.name == "hermes":
            one = f"{literal('<tool_call>' + chr(10))} call {literal(chr(10) + '</tool_call>')}"
            return one + (f' ( "\\n" {one} ){{0,{most}}}' if most else "")
        if self.family.name == "llama":
            return "call" + (f' ( "; " call ){{0,{most}}}' if most else "")
        listed = '"[" call' + (f' ( ", " call ){{0,{most}}}' if most else "") + ' "]"'
        return f'"[TOOL_CALLS]" {listed}' if self.family.name == "mistral" else listed


def _token_of(lm: LM, mark: str) -> int | None:
    """The token that a mark is, None: it is several."""
    ids = lm.tokenize(mark, add_special=False)
    return ids[0] if len(ids) == 1 else None


def _spelled(lm: LM, mark: str) -> str:
    """A mark in a grammar: its token, or its characters."""
    token = _token_of(lm, mark)
    return literal(mark) if token is None else f"<[{token}]> | {literal(mark)}"


@lru_cache(maxsize=64)
def _rules_of(functions: str) -> str:
    """The rules of a call of any of these functions, names and schemas as JSON; the first one is `call`.

    Raises:
        ApiError: no grammar can be made of them.
    """
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}})
        for name, schema in json.loads(functions)
    ]
    schema, calls = _calls_schema(tools, "arguments")
    text = made("tools", partial(constraint.of_schema, schema | {"anyOf": calls}))
    return f"call ::= {text.removeprefix('root ::= ')}"


def _calls_schema(tools: Sequence[Tool], key: str) -> tuple[dict[str, Any], list[Any]]:
    """Definitions of all parameters, and a schema for a call of each function."""
    definitions = {f"f{i}": _moved(tool.arguments, f"#/$defs/f{i}") for i, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, key: {"type": "object", "$ref": f"#/$defs/f{i}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    return {"$defs": definitions}, calls


def _moved(schema: Any, place: str) -> Any:
    """A schema as a part of another document: references to its own parts are put right."""
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


def use_of(body: ChatRequest, lm: LM, template: str | None) -> ToolUse | None:
    """What a request wants of its functions, None if the model is not to call any.

    Raises:
        ApiError: its function is not there.
    """
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return None
    tools, first = body.tools, 0
    if isinstance(choice, NamedTool):
        name = choice.function.name
        first = next((i for i, tool in enumerate(tools) if tool.function.name == name), len(tools))
        tools = tools[first : first + 1]
        if not tools:
            raise bad_request(f"tool_choice: there is no function {name!r} in tools.", param="tool_choice")
    forced = choice == "required" or isinstance(choice, NamedTool)
    several = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    family = family_of(template or lm.chat_template or "")
    if forced and family.name not in _OWN_GRAMMAR:
        family = FAMILIES["json"]  # what the grammar makes of it
    return ToolUse(family, tools, forced, several, first)


def family_of(template: str) -> Family:
    """How a model with this template writes calls: what it is told in words, if the template knows no tools. DeepSeek's
    models may still write theirs then, which is read beside that."""
    family = family_in(template)
    return family if takes_tools(template) or family.name == "deepseek" else FAMILIES["json"]


def turns_of(
    messages: Sequence[Message], tools: Sequence[Tool], template: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages for the template, and the functions that it is to tell of."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    turns = [_turn(message, names) for message in messages]
    if '"thinking" in message' in template:  # gpt-oss has another name for thoughts, and takes them with calls alone
        for turn in turns:
            thoughts = turn.pop("reasoning_content", None)
            if thoughts and turn.get("tool_calls") and not turn["content"]:
                turn["thinking"] = thoughts
    if takes_tools(template):
        return turns, [tool.as_dict() for tool in tools]
    turns = _all_told(turns)
    if tools:
        text = _instructions(tools)
        if turns[0]["role"] == "assistant":
            turns.insert(0, {"role": "system", "content": text})
        else:
            turns[0]["content"] = f"{text}\n\n{turns[0]['content']}"
    return turns, []


def _turn(message: Message, names: Mapping[str, str]) -> dict[str, Any]:
    """A message for the template; a result that does not say of which function it is gets the name of its call's."""
    turn: dict[str, Any] = {"role": message.role.replace("developer", "system"), "content": message.text}
    if message.tool_call_id and message.tool_call_id in names:
        turn["name"] = names[message.tool_call_id]
    if message.tool_calls:
        turn["tool_calls"] = [call.as_dict() for call in message.tool_calls]
    for name in ("tool_call_id", "name", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    return turn


def _all_told(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turns without calls and results. Results that follow each other, and what the user says behind them, are one turn
    of the user: many templates demand that roles alternate."""
    found: list[dict[str, Any]] = []
    after_result = False
    for turn in turns:
        told = _told(turn)
        is_result = turn["role"] == "tool"
        if found and found[-1]["role"] == told["role"] == "user" and (after_result or is_result):
            found[-1]["content"] += f"\n{told['content']}"
        else:
            found.append(told)
        after_result = is_result
    return found


def _told(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn without calls and results: these are text in it."""
    text = turn["content"]
    if turn["role"] == "tool":
        return {"role": "user", "content": f"Result of {turn.get('name') or 'the call'}: {text}"}
    if "tool_calls" in turn:
        calls = json.dumps([call["function"] for call in turn["tool_calls"]], ensure_ascii=False)
        text = f"{text}\n{calls}" if text else calls
    return {"role": turn["role"], "content": text}


def _instructions(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(tool.as_dict()["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, given as JSON:\n{listed}\n"
        'To call functions, answer with nothing but a JSON list: [{"name": "NAME", "arguments": {..}}]. '
        "You are then told the results. Otherwise answer in plain text."
    )

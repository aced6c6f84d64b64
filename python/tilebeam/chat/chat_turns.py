"""Messages and functions as a template takes them: those that know no tools are told of functions, calls and results in
words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tilebeam.chat.chat_template import MessagesRefused, takes_tools
from tilebeam.chat.tools import Tool


def turns_of(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return messages for the template, and the functions that it is to tell of.

    Args:
        messages: as OpenAI's API has them; arguments of calls are objects, or their JSON.
        tools: functions that the model is to be told of.
        template: the chat's.

    Raises:
        MessagesRefused: a message is none.
    """
    names = _called(messages)
    turns = [_turn(i, message, names) for i, message in enumerate(messages)]
    if not turns:
        raise MessagesRefused("A conversation needs at least one message.")
    if '"thinking" in message' in template:  # gpt-oss has another name for thoughts, and takes them with calls alone
        for turn in turns:
            thoughts = turn.pop("reasoning_content", None)
            if thoughts and turn.get("tool_calls") and not turn["content"]:
                turn["thinking"] = thoughts
    if takes_tools(template):
        return turns, [tool.as_dict() for tool in tools]
    turns = _all_told(turns, template)
    if tools:
        text = _instructions(tools)
        if turns[0]["role"] == "assistant":
            turns.insert(0, {"role": "system", "content": text})
        else:
            turns[0]["content"] = f"{text}\n\n{turns[0]['content']}"
    return turns, []


def _called(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Map ids of calls to the names of their functions."""
    given = [m.get("tool_calls") for m in messages if isinstance(m, Mapping)]
    calls = [c for several in given if isinstance(several, list | tuple) for c in several if isinstance(c, Mapping)]
    return {str(call.get("id")): function["name"] for call in calls if "name" in (function := _function(call))}


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else {}


def _turn(i: int, message: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Make a message a turn; a result that does not say of which function it is gets the name of its call's."""
    if (
        not isinstance(message, Mapping)
        or "role" not in message
        or not ("content" in message or "tool_calls" in message)
    ):
        raise MessagesRefused(f'messages[{i}] must be a dict with "role" and "content".')
    calls, content = message.get("tool_calls"), message.get("content")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise MessagesRefused(f"messages[{i}].content must be a text, not {type(content).__name__}.")
    turn: dict[str, Any] = {"role": str(message["role"]).replace("developer", "system"), "content": content}
    if turn["role"] == "tool" and (name := names.get(str(message.get("tool_call_id")))) is not None:
        turn["name"] = name
    if calls:
        turn["tool_calls"] = [_call(i, call) for call in (calls if isinstance(calls, list | tuple) else [calls])]
    others = {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}
    return turn | {key: value for key, value in others.items() if value is not None}


def _call(i: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Make a call what templates want: its arguments as an object."""
    function = _function(given) if isinstance(given, Mapping) else {}
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    except (ValueError, TypeError, RecursionError):
        arguments = None
    if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise MessagesRefused(
            f'messages[{i}].tool_calls must be like {{"id": .., "type": "function", "function": {{"name": .., '
            '"arguments": ..}}, where arguments are an object or its JSON.'
        )
    return {"id": given.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _all_told(turns: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Return turns without calls and results. Results that follow each other, and what the user says behind them, are
    one turn of the user: many templates demand that roles alternate."""
    found: list[dict[str, Any]] = []
    after_result = False
    for turn in turns:
        told = _told(turn)
        if "reasoning_content" not in template:
            told.pop("reasoning_content", None)
        is_result = turn["role"] == "tool"
        if found and found[-1]["role"] == told["role"] == "user" and (after_result or is_result):
            found[-1]["content"] += f"\n{told['content']}"
        else:
            found.append(told)
        after_result = is_result
    return found


def _told(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn without calls and results: these are text in it."""
    text = turn["content"]
    if turn["role"] == "tool":
        return {"role": "user", "content": f"Result of {turn.get('name') or 'the call'}: {text}"}
    told = dict(turn)
    if "tool_calls" in told:
        calls = json.dumps([call["function"] for call in told.pop("tool_calls")], ensure_ascii=False)
        told["content"] = f"{text}\n{calls}" if text else calls
    return told


def _instructions(tools: Sequence[Tool]) -> str:
    listed = "\n".join(json.dumps(tool.as_dict()["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, given as JSON:\n{listed}\n"
        'To call functions, answer with nothing but a JSON list: [{"name": "NAME", "arguments": {..}}]. '
        "You are then told the results. Otherwise answer in plain text."
    )

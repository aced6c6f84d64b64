"""What the answer of a chat grows by: its text, its thoughts, its calls of functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tilebeam.outputs import ToolCall, ToolCallDelta


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks, which is no part of the text."""

    text: str


Part = Text | Reasoning | ToolCallDelta


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return the same with neighbours that belong together as one; a call's beginning stays by itself."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, ToolCallDelta):
            if isinstance(last, ToolCallDelta) and (last.call, last.name, part.name) == (part.call, None, None):
                found[-1] = replace(last, arguments=last.arguments + part.arguments)
            elif part.arguments or part.name is not None:
                found.append(part)
        elif last is not None and type(last) is type(part):
            found[-1] = type(part)(last.text + part.text)
        elif part.text:
            found.append(part)
    return found


def text_in(parts: Sequence[Part]) -> str:
    """Return the text that is told in these, without thoughts and calls."""
    return "".join(part.text for part in parts if isinstance(part, Text))


def reasoning_in(parts: Sequence[Part]) -> str:
    """Return the thoughts that are told in these."""
    return "".join(part.text for part in parts if isinstance(part, Reasoning))


def calls_in(parts: Sequence[Part]) -> list[ToolCall]:
    """Return the calls that all parts of an answer make up."""
    found: list[ToolCall] = []
    for part in parts:
        if isinstance(part, ToolCallDelta) and part.name is not None:
            found.append(ToolCall(part.id or "", part.name, part.arguments))
        elif isinstance(part, ToolCallDelta):
            found[part.call] = replace(found[part.call], arguments=found[part.call].arguments + part.arguments)
    return found

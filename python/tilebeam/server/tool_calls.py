"""Calls of functions in what a model writes: a reader for each family of chat templates, fed piece by piece.

    hermes    <tool_call>\\n{"name": .., "arguments": {..}}\\n</tool_call>, anywhere, several (Qwen, Hermes); and what
              json takes: small models leave the marks out
    mistral   [TOOL_CALLS][{"name": .., "arguments": {..}}, ..], or [TOOL_CALLS]NAME[ARGS]{..}
    llama     {"name": .., "parameters": {..}}, the whole answer (Llama 3)
    json      {"name": .., "arguments": {..}}, or a list of them, the whole answer: what other models are told to write

What looks like a call of a function that the request does not have is text. However a text is cut into pieces, the same
calls come of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

Family = Literal["hermes", "mistral", "llama", "json"]

# What begins a call: anywhere, or at the beginning of the answer. Control tokens may be missing from the text.
_ANYWHERE: dict[Family, str] = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}
_AT_START: dict[Family, tuple[str, ...]] = {
    "hermes": ("```json\n", "{", "["),
    "mistral": ("[",),
    "llama": ("<|python_tag|>", "{", "["),
    "json": ("```json\n", "{", "["),
}
_CLOSING = ("</tool_call>", "```", "]")
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_SPACE = " \t\r\n"


class Event(NamedTuple):
    """What a piece of a text adds: to the answer's text (no call), or to a call.

    Attributes:
        text: of the answer, or of the call's arguments.
        call: its number.
        name: its function, where it begins.
    """

    text: str
    call: int | None = None
    name: str | None = None


class CallReader:
    """Reads one answer.

    Args:
        family: how the model writes calls.
        names: the functions that there are.
        several: tell more than the first call.
    """

    def __init__(self, family: Family, names: Collection[str], several: bool = True) -> None:
        self._family = family
        self._names = names
        self._several = several
        self._held = ""  # text that is not understood yet
        self._opened = ""  # what began the call under way: text, if it is none
        self._state: Callable[[], bool] = self._begin
        self._events: list[Event] = []
        self._final = False
        self._json = _Scanner()
        self._seen = 0  # characters of an object that the scanner has been given
        self._within = False  # an object around the arguments
        self.calls = 0

    def feed(self, text: str) -> list[Event]:
        """What new text adds, as far as it is clear."""
        self._held += text
        return self._run()

    def end(self) -> list[Event]:
        """What is left when the answer ends."""
        self._final = True
        return self._run()

    def _run(self) -> list[Event]:
        while self._state():
            pass
        events, self._events = self._events, []
        return _joined([event for event in events if self._several or not event.call])

    # --- states: each returns whether there may be more to do --------------------------------------------------------

    def _begin(self) -> bool:
        """Nothing but white space yet."""
        text = self._held.lstrip(_SPACE)
        for start in _AT_START[self._family]:
            if text.startswith(start):
                rest = text[len(start) if start not in ("{",) else 0 :].lstrip(_SPACE)
                if not rest and not self._final:
                    return False
                if rest.startswith("{"):
                    return self._open(self._held[: len(self._held) - len(rest)])
            elif start.startswith(text) and not self._final:
                return False
        if self._family == "mistral" and (named := self._named(text)) is not None:
            return named
        self._state = self._text
        return True

    def _text(self) -> bool:
        """Text, until a call begins."""
        opener = _ANYWHERE.get(self._family)
        at = self._held.find(opener) if opener else -1
        if opener and at >= 0:
            told = self._held[:at].rstrip(_SPACE)
            self._tell(told)
            self._opened, self._held = self._held[len(told) : at], self._held[at:]
            self._state = self._opening
            return True
        keep = 0
        if not self._final:
            keep = max((n for n in range(len(opener or "")) if self._held.endswith((opener or "")[:n])), default=0)
            while keep < len(self._held) and self._held[-keep - 1] in _SPACE:
                keep += 1
        told = self._held[: len(self._held) - keep]
        if not (self.calls and told.isspace()):
            self._tell(told)
        self._held = self._held[len(told) :]
        return False

    def _opening(self) -> bool:
        """Behind the mark of a call."""
        opener = _ANYWHERE[self._family]
        rest = self._held[len(opener) :].lstrip(_SPACE)
        if self._family == "mistral":
            if rest.startswith("["):
                rest = rest[1:].lstrip(_SPACE)
            elif rest and (named := self._named(rest)) is not None:
                return named
        if rest.startswith("{"):
            return self._open(self._held[: len(self._held) - len(rest)])
        if not rest and not self._final:
            return False
        return self._give_up(opener)

    def _named(self, text: str) -> bool | None:
        """A name and its arguments without an object around: a call, or its beginning; None: it is neither."""
        found = re.match(r"([\w.:-]+)(?:\[ARGS\])?", text)
        name = found[1] if found else ""
        if found and name in self._names and text[found.end() :].startswith("{"):
            self._held = text[found.end() :]
            self._begin_call(name, within=False)
            return True
        waits = any(f"{n}[ARGS]".startswith(text) for n in self._names) and not self._final
        return False if waits else None

    def _open(self, opened: str) -> bool:
        """An object begins that may be a call."""
        self._opened, self._held = self._opened + opened, self._held[len(opened) :]
        self._json, self._seen = _Scanner(), 0
        self._state = self._object
        return True

    def _object(self) -> bool:
        """An object whose function is not known yet."""
        found = _HEAD.match(self._held)
        if found and found[1] in self._names:
            self._held = self._held[found.end() :]
            self._begin_call(found[1], within=True)
            return True
        end = self._json.end(self._held[self._seen :])
        if end is None:
            self._seen = len(self._held)
            return self._final and self._give_up("")
        end += self._seen
        call = _whole_call(self._held[:end])
        if call is None or call[0] not in self._names:
            return self._give_up(self._held[:end])
        self._held = self._held[end:]
        self._begin_call(call[0], within=False)
        self._events.append(Event(call[1], self.calls - 1))
        self._state = self._after
        return True

    def _begin_call(self, name: str, within: bool) -> None:
        self._events.append(Event("", self.calls, name))
        self.calls += 1
        self._opened = ""
        self._json, self._within = _Scanner(), within
        self._state = self._arguments

    def _arguments(self) -> bool:
        """Within a call's arguments."""
        end = self._json.end(self._held)
        told = self._held if end is None else self._held[:end]
        self._events.append(Event(told, self.calls - 1))
        self._held = self._held[len(told) :]
        if end is None:
            return False
        self._json = _Scanner(1)
        self._state = self._closing if self._within else self._after
        return True

    def _closing(self) -> bool:
        """Behind the arguments: what else the object holds is nobody's."""
        end = self._json.end(self._held)
        self._held = "" if end is None else self._held[end:]
        if end is None:
            return False
        self._state = self._after
        return True

    def _after(self) -> bool:
        """Behind a call: its closing mark, another one, or text."""
        rest = self._held.lstrip(_SPACE)
        for mark in _CLOSING:
            if mark.startswith(rest) and rest != mark and not self._final:
                return False
            if rest.startswith(mark):
                self._held = rest[len(mark) :]
                return True
        if rest[:1] in (",", ";", "{"):
            following = rest.lstrip(",;" + _SPACE)
            if following.startswith("{"):
                return self._open(self._held[: len(self._held) - len(following)])
            if not following and not self._final:
                return False
        if self._family == "mistral" and (named := self._named(rest)) is not None:
            return named
        self._state = self._text
        return True

    def _give_up(self, text: str) -> bool:
        """What looked like a call is text, up to the end of `text` at least."""
        self._tell(self._opened + text)
        self._held, self._opened = self._held[len(text) :], ""
        self._state = self._text
        return True

    def _tell(self, text: str) -> None:
        if text:
            self._events.append(Event(text))


class _Scanner:
    """Finds the end of a JSON object that comes piece by piece.

    Args:
        depth: of brackets that are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._quoted = self._escaped = False

    def end(self, text: str) -> int | None:
        """Where in this piece the object is complete, None: not in it."""
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of an object, None: it is no call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get("arguments", value.get("parameters", {}))
    if isinstance(given, str):
        return value["name"], given
    return (value["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None


def _joined(events: list[Event]) -> list[Event]:
    """Neighbours that belong together as one."""
    found: list[Event] = []
    for event in events:
        if found and event.name is None and found[-1].name is None and found[-1].call == event.call:
            found[-1] = found[-1]._replace(text=found[-1].text + event.text)
        elif event.text or event.name is not None:
            found.append(event)
    return found

"""Calls of functions in what a model writes: one reader, which a family of `tool_families` tells what to look for, fed
piece by piece.

What looks like a call of a function that the request does not have is text. However a text is cut into pieces, the same
calls come of it. JSON arguments are told as they come, others when they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, Literal, NamedTuple

from tilebeam.chat import tool_arguments
from tilebeam.chat.answer_parts import Part, Text, joined
from tilebeam.chat.thoughts import half_mark
from tilebeam.chat.tool_families import Family
from tilebeam.outputs import ToolCallDelta

# What may stand between calls.
_BETWEEN = (",", ";")
_PART = re.compile(r"(\{name\}|\{id\}|\s+)")
_IN_NAME = re.compile(r"[\w.:-]")
_WORD = re.compile(r"[^<>\[\]{}\"\s]*")
_HEAD = re.compile(
    r'\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"[^"\\]*"\s*,\s*)*"(?:tool_)?name"\s*:\s*"([^"\\]*)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_KEYS = ("name", "tool_name", "arguments", "parameters", "type", "function", "id", "tool_call_id")
_SPACE = " \t\r\n"
_SPACES = re.compile(f"[{_SPACE}]*")


class _Wait(Enum):
    WAIT = 0  # more text will tell


_WAIT = _Wait.WAIT


class _Found(NamedTuple):
    """A pattern in the text: where it ends, and the function that it names."""

    end: int
    name: str | None


class CallReader:
    """Reads one answer.

    Args:
        family: how the model writes calls.
        functions: the parameters' schemas of the functions that there are, by name.
        several: tell more than the first call.
        forced: the answer is nothing but calls.
    """

    def __init__(
        self, family: Family, functions: Mapping[str, Mapping[str, Any]], several: bool = True, forced: bool = False
    ) -> None:
        self._family = family
        self._functions = functions
        self._names = sorted(functions, key=len, reverse=True)
        self._several = several
        self._forced = forced
        self._held = ""  # text that is not understood yet
        self._opened = ""  # what began the call under way: text, if it is none
        self._state: Callable[[], bool] = self._begin
        self._parts: list[Part] = []
        self._final = self._cut = False
        self._scanner = _Scanner()
        self._seen = 0  # characters of an object or arguments that have been searched for their end
        self._within = False  # an object around the arguments
        self._name = ""  # of a call whose arguments are not complete
        self.calls = 0

    def feed(self, text: str) -> list[Part]:
        """Return what new text adds, as far as it is clear."""
        self._held += text
        return self._run()

    def end(self, cut: bool = False) -> list[Part]:
        """Return what is left when the answer ends.

        Args:
            cut: not by the model: what may have become a call is dropped.
        """
        self._final, self._cut = True, cut
        return self._run()

    def _run(self) -> list[Part]:
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return joined(p for p in parts if self._several or not isinstance(p, ToolCallDelta) or p.call == 0)

    # --- states: each returns whether there may be more to do --------------------------------------------------------

    def _begin(self) -> bool:
        """Read on while there is nothing but white space."""
        if self._family.bare is not None:
            found = self._call_at(0, self._family.bare)
            if found is _WAIT:
                marked = self._held.lstrip(_SPACE).startswith(_openers(self._family))
                return self._final and self._dropped(self._forced or marked)
            if found is not None:
                return self._open(found)
        self._state = self._text
        return True

    def _text(self) -> bool:
        """Read text, until a mark comes."""
        marks, silent = _openers(self._family), self._family.silent
        places = ((p, -len(m), m) for m in marks + silent if (p := self._held.find(m)) >= 0)
        at, _, mark = min(places, default=(-1, 0, ""))
        if at >= 0 and (self._final or not self._may_grow(at, mark)):
            told = self._held[:at]
            if mark in silent and mark not in marks:
                self._tell(told)
                self._held = self._held[at + len(mark) :]
                return True
            kept = told.rstrip(_SPACE)
            self._tell(kept)
            self._opened, self._held = told[len(kept) :], self._held[at:]
            self._state = self._opening
            return True
        keep = half_mark(self._held, marks + silent)
        if self._final:
            if self._cut and (keep > 1 or self._forced):  # half a mark
                self._held = self._held[: len(self._held) - keep]
            if self.calls:
                self._held = self._held.rstrip(_SPACE)
            keep = 0
        while not self._final and keep < len(self._held) and self._held[-keep - 1] in _SPACE:
            keep += 1
        told = self._held[: len(self._held) - keep]
        self._tell(told)
        self._held = self._held[len(told) :]
        return False

    def _may_grow(self, at: int, mark: str) -> bool:
        """Return whether a mark at the end may be a longer one."""
        rest = self._held[at:]
        return any(m != mark and m.startswith(rest) for m in self._family.silent + _openers(self._family))

    def _opening(self) -> bool:
        """Read on at the mark of a call."""
        found = self._call_at(0)
        if found is _WAIT:
            return self._final and self._dropped(True)
        if found is None:
            rest = self._held
            mark = max((m for m in _openers(self._family) if rest.startswith(m)), key=len)
            return self._give_up(mark)
        return self._open(found)

    def _call_at(self, at: int, more: Sequence[str] = ()) -> _Found | _Wait | None:
        """Find what begins there: a call, up to its arguments; or it is not clear yet; or none."""
        text = self._held
        fences = (*self._family.fences, *more)
        while True:
            at = _past_space(text, at)
            mark = max((m for m in fences if text.startswith(m, at)), key=len, default="")
            waits = not self._final and any(m.startswith(text[at:]) and m != mark for m in fences)
            if waits and (not mark or any(len(m) > len(mark) for m in fences if m.startswith(text[at:]))):
                return _WAIT
            if not mark:
                break
            at += len(mark)
        return _first(self._matched(_parts(head), at, None) for head in self._family.heads)

    def _matched(self, parts: tuple[str, ...], at: int, name: str | None) -> _Found | _Wait | None:
        """Match a pattern in the text from there on."""
        text = self._held
        if not parts:
            return self._arguments_at(at, name)
        part, rest = parts[0], parts[1:]
        if part.isspace():
            return self._matched(rest, _past_space(text, at), name)
        if part == "{name}":
            there = [one for one in self._names if text.startswith(one, at)]
            begun = any(one.startswith(text[at:]) for one in self._names if one not in there)
            return _first([_WAIT if begun else None, *(self._matched(rest, at + len(one), one) for one in there)])
        if part == "{id}":
            end = _WORD.match(text, at).end()  # type: ignore[union-attr]
            return _WAIT if end == len(text) else self._matched(rest, end, name)
        if text.startswith(part, at):
            return self._matched(rest, at + len(part), name)
        return _WAIT if part.startswith(text[at:]) else None

    def _arguments_at(self, at: int, name: str | None) -> _Found | _Wait | None:
        """Find the arguments that begin there, if any do."""
        text = self._held
        if name is None or self._family.arguments in ("json", "gemma"):
            at = _past_space(text, at)
            return _WAIT if at == len(text) else _Found(at, name) if text[at] == "{" else None
        if text.endswith(name, 0, at):  # nothing is behind the name: it has to end here
            if at == len(text):
                return _WAIT
            if _IN_NAME.match(text[at]):
                return None
        return _Found(at, name)

    def _open(self, found: _Found) -> bool:
        """Begin a call, or an object that may be one."""
        opened, self._held = self._held[: found.end], self._held[found.end :]
        self._opened += opened
        self._scanner, self._seen = _Scanner(), 0
        if found.name is None:
            self._state = self._object
        elif self._family.arguments == "json":
            self._begin_call(found.name, within=False)
        else:
            self._scanner = _Scanner(1, "'\"")
            self._name, self._state = found.name, self._block
        return True

    def _object(self) -> bool:
        """Go on in an object whose function is not known yet."""
        found = _HEAD.match(self._held)
        if found and found[1] in self._functions:
            self._held = self._held[found.end() :]
            self._begin_call(found[1], within=True)
            return True
        end = self._scanner.end(self._held[self._seen :])
        if end is None:
            self._seen = len(self._held)
            return self._final and self._dropped(
                bool(self.calls or self._opened.strip(_SPACE + "[{,;")) or self._like()
            )
        end += self._seen
        call = _whole_call(self._held[:end])
        if call is None or call[0] not in self._functions:
            return self._give_up(self._held[:end])
        self._held = self._held[end:]
        self._told_call(*call)
        return True

    def _like(self) -> bool:
        """Return whether the beginning of an object is that of a call."""
        key = re.match(r'\{\s*(?:$|"(\w*)(?:$|"\s*(?:$|:\s*(?:$|"([^"]*)))))', self._held)
        if self._forced or key is None:
            return self._forced
        begun = key[1] or ""
        if begun in ("name", "tool_name") and key[2]:
            return any(name.startswith(key[2]) for name in self._names)
        return any(name.startswith(begun) for name in _KEYS)

    def _block(self) -> bool:
        """Wait for arguments that are read when they are complete."""
        kind, mark = self._family.arguments, self._family.end
        if kind == "python":
            end = self._scanner.end(self._held[self._seen :])
            at = -1 if end is None else self._seen + end - 1
        else:
            at = self._held.find(mark, max(0, self._seen - len(mark)))
        if at < 0:
            self._seen = len(self._held)
            return self._final and self._dropped(True)
        given = tool_arguments.read(kind, self._held[:at], self._functions[self._name])
        if given is None:
            return self._give_up(self._held[: at + len(mark)])
        self._held = self._held[at + len(mark) :]
        self._told_call(self._name, given)
        return True

    def _told_call(self, name: str, arguments: str) -> None:
        """Tell a complete call."""
        self._begin_call(name, within=False)
        self._parts.append(ToolCallDelta(self.calls - 1, arguments))
        self._state = self._after

    def _begin_call(self, name: str, within: bool) -> None:
        self._parts.append(ToolCallDelta(self.calls, name=name))
        self.calls += 1
        self._opened = ""
        self._scanner, self._within = _Scanner(), within
        self._state = self._arguments

    def _arguments(self) -> bool:
        """Read on within a call's arguments."""
        end = self._scanner.end(self._held)
        told = self._held if end is None else self._held[:end]
        self._parts.append(ToolCallDelta(self.calls - 1, told))
        self._held = self._held[len(told) :]
        if end is None:
            return False
        self._scanner = _Scanner(1)
        self._state = self._closing if self._within else self._after
        return True

    def _closing(self) -> bool:
        """Skip what stands behind the arguments: what else the object holds is nobody's."""
        end = self._scanner.end(self._held)
        self._held = "" if end is None else self._held[end:]
        if end is None:
            return False
        self._state = self._after
        return True

    def _after(self) -> bool:
        """Read on behind a call: its closing mark, another one, or text."""
        at = _past_space(self._held, 0)
        for mark in self._family.closes:
            rest = self._held[at:]
            if rest.startswith(mark):
                self._held = rest[len(mark) :]
                return True
            if mark.startswith(rest):
                if not self._final:
                    return False
                if self._cut:  # within the mark
                    self._held, at = "", 0
        while self._held[at : at + 1] in _BETWEEN:
            at = _past_space(self._held, at + 1)
        found = self._call_at(at)
        if found is _WAIT and not self._final:
            return False
        if isinstance(found, _Found):
            return self._open(found)
        if found is _WAIT and self._cut:
            self._held = ""
        self._state = self._text
        return True

    def _dropped(self, cut: bool) -> bool:
        """Drop what may have become a call, had the answer not ended, if it was cut; else it is text."""
        if self._cut and cut:
            self._held = self._opened = ""
            self._state = self._text
            return True
        return self._give_up(self._held)

    def _give_up(self, text: str) -> bool:
        """Take what looked like a call for text, up to the end of `text` at least."""
        self._tell(self._opened + text)
        self._held, self._opened = self._held[len(text) :], ""
        self._state = self._text
        return True

    def _tell(self, text: str) -> None:
        if text:
            self._parts.append(Text(text))


class _Scanner:
    """Finds the end of a bracketed text that comes piece by piece: JSON, or a call of Python.

    Args:
        depth: of brackets that are open already.
        quotes: characters around texts.
    """

    def __init__(self, depth: int = 0, quotes: Literal['"', "'\""] = '"') -> None:
        self._depth = depth
        self._quotes, self._quoted = quotes, ""
        self._opens, self._closes = ("{[", "}]") if quotes == '"' else ("{[(", "}])")
        self._escaped = False

    def end(self, text: str) -> int | None:
        """Return behind which character of this piece it is complete; None: not in it."""
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = char == "\\"
                if char == self._quoted:
                    self._quoted = ""
            elif char in self._quotes:
                self._quoted = char
            elif char in self._opens:
                self._depth += 1
            elif char in self._closes:
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None


def _first(tried: Iterable[_Found | _Wait | None]) -> _Found | _Wait | None:
    """Return the first that is found; else that one may be, if so; else that none is."""
    waits = False
    for found in tried:
        if isinstance(found, _Found):
            return found
        waits = waits or found is _WAIT
    return _WAIT if waits else None


def _past_space(text: str, at: int) -> int:
    return _SPACES.match(text, at).end()  # type: ignore[union-attr]


@cache
def _parts(head: str) -> tuple[str, ...]:
    """Return a pattern's pieces."""
    return tuple(part for part in _PART.split(head) if part)


@cache
def _openers(family: Family) -> tuple[str, ...]:
    """Return the marks that begin calls anywhere: fences, and what patterns begin with."""
    begun = [parts[0] for head in family.heads if (parts := _parts(head)) and parts[0] not in ("{name}", "[", "{")]
    return tuple(dict.fromkeys((*family.fences, *begun)))


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of an object, None: it is no call."""
    try:
        value = json.loads(text)
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict):
            return None
        name = value.get("name", value.get("tool_name"))
        given = value.get("arguments", value.get("parameters", {}))
        told = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return (name, told) if isinstance(name, str) and isinstance(json.loads(told or "{}"), dict) else None
    except (ValueError, RecursionError):
        return None

"""JSON as an answer: the last value of a text, when two are equal, and which of several most agrees with the others.

Of calls of functions the names are voted on first, and other calls have no say in the arguments. Then a value that
several candidates gave wins; where all differ, each of their fields has a vote, and so has each place of an array.
Numbers are equal by value, texts but for case, white space, commas and full stops.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

from tilebeam.grammars.combining import key_of

_DEPTH = 64  # of values
_DIGITS = 400  # of whole numbers; others are doubles
_TRIED = 256  # brackets of a text that begin no value
_BRACKET = re.compile(r"[\[\]{}]")
_FENCED = re.compile(r"\s*```\w*\n(.*?)\n\s*```\s*\Z", re.DOTALL)
_NONE: Any = object()  # a value that is none, or a field that is left out


class Structures:
    """Find the last JSON value of a text, and let such values vote field by field: an extractor of JSON.

        tilebeam.SelfConsistency("json").infer(lm, prompt, 8, json_schema=schema).answer

    The winner is the heaviest value that several candidates gave; where all differ, the one whose fields have the most
    votes.

    Args:
        calls: texts are answers to a chat with functions: one that holds no JSON calls none, which is the answer "[]".
    """

    def __init__(self, *, calls: bool = False) -> None:
        self.calls = calls

    def __call__(self, text: str) -> str | None:
        """Return the last JSON value of a text as JSON on one line, None if there is none."""
        value = _last_value(text)
        if value is _NONE and self.calls and text and not _BRACKET.search(text):
            value = []
        return None if value is _NONE else _json(value)

    def equal(self, a: str, b: str) -> bool:
        """Tell whether two answers are the same value."""
        return _key(a) == _key(b)

    def elect(self, answers: Sequence[str], weights: Sequence[float]) -> str:
        """Let answers, at least one, vote; returns the winner.

        Args:
            weights: of each, at least 0.
        """
        values = [json.loads(answer) for answer in answers]
        by_names = _grouped([_names(value) for value in values])
        among = max(by_names, key=lambda members: sum(weights[i] for i in members))
        fields = _agreement([values[i] for i in among], [weights[i] for i in among])
        rank = {i: (0.0, vote, -i) for i, vote in zip(among, fields, strict=True)}
        for same in _grouped([_key(answers[i]) for i in among]):
            if len(same) > 1:
                first = among[same[0]]
                rank[first] = (sum(weights[among[j]] for j in same), *rank[first][1:])
        return answers[max(rank, key=lambda i: rank[i])]


# --- reading ----------------------------------------------------------------------------------------------------------


def _last_value(text: str) -> Any:
    """Find the last complete object or array in a text, else the value that is all of it; `_NONE` if there is none.

    Parts of a value that breaks off or is no JSON are none, nor is one that `_sound` refuses.
    """
    ends: dict[int, int] = {}  # where brackets close, by where they open
    opened: list[int] = []
    for bracket in _BRACKET.finditer(text):
        if bracket[0] in "[{":
            opened.append(bracket.start())
        elif opened:
            ends[opened.pop()] = bracket.end()
    found, behind, tries = _NONE, 0, 0
    for at in sorted([*ends, *opened]):
        if at >= behind and tries < _TRIED:
            value, behind = _value_at(text, at)
            if value is not _NONE:
                found = value
            else:
                behind, tries = ends.get(at, behind), tries + 1
    if not ends:
        fenced = _FENCED.match(text)
        alone = (fenced[1] if fenced else text).strip()
        value, end = _value_at(alone, 0)
        found = value if end == len(alone) else _NONE
    return found


def _number(digits: str) -> Any:
    return int(digits) if len(digits) <= _DIGITS else _NONE


_decoder = json.JSONDecoder(parse_int=_number, parse_constant=lambda _: _NONE)


def _value_at(text: str, at: int) -> tuple[Any, int]:
    """Read the value that begins there, and where it ends; `_NONE` if it is none, and where that shows."""
    try:
        value, end = _decoder.raw_decode(text, at)
    except json.JSONDecodeError as error:
        return _NONE, error.pos
    except RecursionError:
        return _NONE, len(text)
    return (value if _sound(value) else _NONE), end


def _sound(value: Any, depth: int = _DEPTH) -> bool:
    """Tell whether a value has no NaN, no number beyond a double or too long, and is not too deep."""
    if isinstance(value, dict | list):
        return depth > 0 and all(_sound(v, depth - 1) for v in (value.values() if isinstance(value, dict) else value))
    return value is not _NONE and (not isinstance(value, float) or abs(value) != float("inf"))


def _json(value: Any) -> str:
    """Write a value, also one with half a surrogate pair, which is no text."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if re.search("[\ud800-\udfff]", text) else text


# --- votes ------------------------------------------------------------------------------------------------------------


def _plain(text: str) -> str:
    """Return what equal texts have in common."""
    return re.sub(r"[\s,]+", " ", text).casefold().strip(" .")


@lru_cache(maxsize=1024)
def _key(answer: str) -> Hashable:
    return key_of(json.loads(answer), _plain)


def _grouped(keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the places of equal keys together, in the order of their first ones."""
    found: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return list(found.values())


def _names(value: Any) -> Hashable:
    """Return the functions that a call, or a list of calls, names; of other values nothing."""
    calls = value if isinstance(value, list) else [value]
    return tuple(map(_side, calls)) if any(map(_is_call, calls)) else None


def _is_call(value: Any) -> bool:
    if not (isinstance(value, dict) and isinstance(value.get("name"), str)):
        return False
    return any(isinstance(value.get(key), dict) for key in ("arguments", "parameters"))


def _side(value: Any) -> Hashable:
    """Return what values have in common whose parts may be compared: of a call its function, of a scalar all."""
    if value is _NONE or isinstance(value, list):
        return value is _NONE
    if not isinstance(value, dict):
        return key_of(value, _plain)
    return "call", value["name"] if _is_call(value) else None


def _agreement(values: Sequence[Any], weights: Sequence[float]) -> list[float]:
    """Return for each value the share of the votes that agree with it, 0 to 1, the mean over its fields."""
    sides = {_side(values[members[0]]): members for members in _grouped([_side(value) for value in values])}
    total = sum(weights) or 1.0
    shares = {side: sum(weights[i] for i in members) / total for side, members in sides.items()}
    winner = max(shares, key=lambda side: shares[side])
    among, own = [values[i] for i in sides[winner]], [weights[i] for i in sides[winner]]
    if not isinstance(among[0], dict | list):
        return [0.0 if isinstance(v, dict | list) else shares[_side(v)] for v in values]
    fields = [value if isinstance(value, dict) else dict(enumerate(value)) for value in among]
    names = dict.fromkeys(name for value in fields for name in value)
    votes = [_agreement([value.get(name, _NONE) for value in fields], own) for name in names]
    found = [0.0] * len(values)
    for place, i in enumerate(sides[winner]):
        found[i] = shares[winner] * (sum(vote[place] for vote in votes) / len(votes) if votes else 1.0)
    return found

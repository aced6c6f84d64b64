"""What fields of requests must be beyond their types; errors are sentences without the field's name."""

from __future__ import annotations

import json
from typing import Any

# llama-server's samplers in the order of its default, which is that of the engine. Those that no field of a request
# turns on (dry, top_n_sigma, typ_p, xtc) change nothing.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
SAMPLERS_NAMED = {"typical_p": "typ_p"}


def encodable(value: str) -> str:
    """Return a text that has a UTF-8 form."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("must be text, but holds half of a surrogate pair") from None
    return value


def no_zero(value: int) -> int:
    """Return a number of tokens that is one, or -1."""
    if value == 0:
        raise ValueError("must be at least 1, or -1: until the context is full")
    return value


def parsed_schema(value: dict[str, Any] | bool | str) -> dict[str, Any] | bool:
    """Return a schema, which may come as a text."""
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("must be a JSON schema")
    return schema


def checked_choices(value: list[str]) -> list[str]:
    """Return texts of which the model writes one."""
    if not all(value) or any("\0" in choice for choice in value):
        raise ValueError("a choice must not be empty, nor hold a NUL character")
    return value


def checked_samplers(value: list[str]) -> list[str]:
    """Return names of samplers that are there, in the order in which they work; those that are left out do nothing."""
    names = [SAMPLERS_NAMED.get(name, name) for name in value]
    if others := [name for name in names if name not in SAMPLERS]:
        raise ValueError(f"there is no sampler {others[0][:40]!r}, only {', '.join(SAMPLERS)}")
    if [SAMPLERS.index(name) for name in names] != sorted({SAMPLERS.index(name) for name in names}):
        raise ValueError(f"they work in the order {', '.join(SAMPLERS)}, each once")
    return names

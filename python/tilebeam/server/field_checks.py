"""What fields of requests must be beyond their types; errors are sentences without the field's name."""

from __future__ import annotations

import json
from typing import Any


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

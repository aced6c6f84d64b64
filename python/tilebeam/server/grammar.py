"""From what a request says of its text's form to a GBNF grammar, with errors that name the request's field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tilebeam.chat.refused import grammar_of_field
from tilebeam.grammars import constraint
from tilebeam.server.requests import Generation


def grammar_of(body: Generation) -> str | None:
    """Return the grammar that the text has to match, None for any text.

    Raises:
        FieldRefused: a schema that cannot be turned into one, or one beyond the limits.
    """
    for field, make, wanted in _fields(body):
        if wanted is not None:
            return grammar_of_field(field, make, wanted)
    if body.response_format is not None and body.response_format.type == "json_object":
        return constraint.of_schema({"type": "object"})
    return None


def _fields(body: Generation) -> Iterator[tuple[str, Callable[[Any], str], Any]]:
    """Yield the fields that may ask for a form, what makes a grammar of them, and what they hold."""
    yield "grammar", constraint.checked, body.grammar
    yield "json_schema", constraint.of_schema, body.json_schema
    if (wanted := body.structured_outputs) is not None:
        yield "structured_outputs.json", constraint.of_schema, wanted.json_
        yield "structured_outputs.regex", constraint.of_regex, wanted.regex
        yield "structured_outputs.choice", constraint.of_choices, wanted.choice
        yield "structured_outputs.grammar", constraint.checked, wanted.grammar
    if (given := body.response_format) is not None:
        schema = None if given.json_schema is None else given.json_schema.schema_
        yield "response_format.schema", constraint.of_schema, given.schema_
        yield "response_format.json_schema.schema", constraint.of_schema, schema

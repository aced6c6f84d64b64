"""From a request's response_format to a GBNF grammar, with limits: grammars come from clients and llama.cpp's parser
recurses."""

from __future__ import annotations

import json

from tilebeam.grammars.combining import SchemaError
from tilebeam.grammars.json_schema import grammar_of_schema
from tilebeam.server.errors import ApiError, bad_request
from tilebeam.server.requests import MAX_GRAMMAR, Generation, ResponseFormat

_MAX_DEPTH = 64


def grammar_of(body: Generation) -> str | None:
    """The grammar that the text has to match, None for any text.

    Raises:
        ApiError: 400, a schema that cannot be turned into one, or one beyond the limits.
    """
    if body.grammar is not None:
        return _checked(body.grammar, "grammar")
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return grammar_of_schema({"type": "object"})
    if wanted.grammar is not None:
        return _checked(wanted.grammar, "response_format.grammar")
    return _checked(_of_schema(wanted), "response_format.json_schema")


def _of_schema(wanted: ResponseFormat) -> str:
    assert wanted.json_schema is not None
    param = "response_format.json_schema.schema"
    schema = wanted.json_schema.schema_
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > MAX_GRAMMAR or _depth(text, "{[", "}]") > _MAX_DEPTH:
        raise bad_request(f"{param}: larger than {MAX_GRAMMAR} characters or deeper than {_MAX_DEPTH}.", param=param)
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise bad_request(f"{param}: holds half of a surrogate pair.", param=param, code="invalid_value")
    try:
        return grammar_of_schema(schema)
    except SchemaError as error:
        code = "unsupported_schema" if error.keyword else "invalid_value"
        raise bad_request(f"{param} cannot be turned into a grammar: {error}.", param=param, code=code) from None


def _checked(grammar: str, param: str) -> str:
    if len(grammar) > MAX_GRAMMAR:
        raise _too_much(param, f"it is longer than {MAX_GRAMMAR} characters")
    if not grammar.strip():
        raise _too_much(param, "it is empty")
    if "\0" in grammar:
        raise _too_much(param, "it contains a NUL character")
    # Brackets within literals count too: rather refuse a strange grammar than overflow the parser's stack.
    if _depth(grammar, "(", ")") > _MAX_DEPTH:
        raise _too_much(param, f"it is nested deeper than {_MAX_DEPTH}")
    return grammar


def _too_much(param: str, what: str) -> ApiError:
    return bad_request(f"{param}: invalid grammar: {what}.", param=param, code="invalid_grammar")


def _depth(text: str, opening: str, closing: str) -> int:
    """How deep brackets are nested at most; a closing one without its opening one counts for nothing."""
    depth = most = 0
    for char in text:
        if char in opening:
            depth += 1
            most = max(most, depth)
        elif char in closing:
            depth = max(0, depth - 1)
    return most

"""From what a request says of its text's form to a GBNF grammar, with limits: grammars come from clients and
llama.cpp's parser recurses."""

from __future__ import annotations

import json
from typing import Any

from tilebeam.grammars.combining import SchemaError
from tilebeam.grammars.gbnf import either, literal
from tilebeam.grammars.json_schema import grammar_of_schema
from tilebeam.grammars.patterns import PatternError, text_grammar
from tilebeam.server.errors import ApiError, bad_request
from tilebeam.server.requests import MAX_GRAMMAR, Generation

_MAX_DEPTH = 64


def grammar_of(body: Generation) -> str | None:
    """The grammar that the text has to match, None for any text.

    Raises:
        ApiError: 400, a schema that cannot be turned into one, or one beyond the limits.
    """
    if body.grammar is not None:
        return _checked(body.grammar, "grammar")
    if body.guided_json is not None:
        assert not isinstance(body.guided_json, str)  # it was parsed
        return _checked(of_schema(body.guided_json, "guided_json"), "guided_json")
    if body.guided_regex is not None:
        return _checked(_of_pattern(body.guided_regex), "guided_regex")
    if body.guided_choice is not None:
        return _checked(f"root ::= {either(*map(literal, body.guided_choice))}\n", "guided_choice")
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return grammar_of_schema({"type": "object"})
    if wanted.grammar is not None:
        return _checked(wanted.grammar, "response_format.grammar")
    assert wanted.json_schema is not None
    grammar = of_schema(wanted.json_schema.schema_, "response_format.json_schema.schema")
    return _checked(grammar, "response_format.json_schema")


def of_schema(schema: dict[str, Any] | bool, param: str) -> str:
    """The grammar of a JSON schema, whose own size is not checked.

    Raises:
        ApiError: 400, a schema that cannot be turned into one, or one beyond the limits.
    """
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


def _of_pattern(pattern: str) -> str:
    try:
        return text_grammar(pattern)
    except PatternError as error:
        raise _too_much("guided_regex", str(error)) from None


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

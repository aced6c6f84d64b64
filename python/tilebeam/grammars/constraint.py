"""Constraints on a text, as grammars: GBNF, a JSON schema or a regular expression.

All of them have limits: parsers recurse, and texts may come from clients.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.grammars.combining import SchemaError
from tilebeam.grammars.gbnf import MAX_LENGTH, either, literal
from tilebeam.grammars.json_schema import grammar_of_schema
from tilebeam.grammars.patterns import PatternError, text_grammar
from tilebeam.grammars.rules import MAX_DEPTH
from tilebeam.sampling_params import SamplingParams


class GrammarError(TilebeamError):
    """A constraint that no grammar can be made of, or a grammar beyond the limits.

    Attributes:
        what: is wrong with it.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"Invalid grammar: {what}.")
        self.what = what


def grammar_of(params: SamplingParams) -> str | None:
    """Make the grammar that a text has to match, None for any text.

    Raises:
        GrammarError: it is empty or beyond the limits, or `regex` asks for what no grammar can keep.
        SchemaError: the same of `json_schema`.
    """
    if params.json_schema is not None:
        schema = params.json_schema
        try:
            return of_schema(json.loads(schema) if isinstance(schema, str) else schema)
        except SchemaError as error:
            raise SchemaError(f"json_schema cannot be turned into a grammar: {error}.", error.keyword) from None
    if params.regex is not None:
        return of_regex(params.regex)
    return None if params.grammar is None else checked(params.grammar)


def of_schema(schema: Any) -> str:
    """Make a grammar of texts that are valid under a JSON schema.

    Args:
        schema: as parsed from JSON: an object or a boolean.

    Raises:
        SchemaError: see `grammar_of_schema`; or it is beyond the limits.
        GrammarError: the grammar would be beyond the limits.
    """
    try:
        text = json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"it is no JSON: {error}") from None
    if len(text) > MAX_LENGTH or _depth(text, "{[", "}]") > MAX_DEPTH:
        raise SchemaError(f"it is larger than {MAX_LENGTH} characters or deeper than {MAX_DEPTH}")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise SchemaError("it holds half of a surrogate pair")
    return _of_schema_text(text)


@lru_cache(maxsize=32)
def _of_schema_text(text: str) -> str:
    return checked(grammar_of_schema(json.loads(text)))


def of_regex(pattern: str) -> str:
    """Make a grammar of texts that match a regular expression from their beginning to their end.

    Raises:
        GrammarError: it is none, has what no grammar can keep (look-around, references), or is beyond the limits.
    """
    if len(pattern) > MAX_LENGTH:
        raise GrammarError(f"a regular expression longer than {MAX_LENGTH} characters")
    try:
        return checked(text_grammar(pattern))
    except PatternError as error:
        raise GrammarError(f"{error}, in the regular expression {pattern[:80]!r}") from None


def of_choices(texts: Sequence[str]) -> str:
    """Make a grammar of the given texts; GrammarError: there are none, or they are beyond the limits."""
    if not texts or not all(texts):
        raise GrammarError("there must be choices, none of them empty")
    return checked(f"root ::= {either(*map(literal, texts))}\n")


def checked(grammar: str) -> str:
    """Check that a grammar is within the limits, and return it; GrammarError: why it is not."""
    if len(grammar) > MAX_LENGTH:
        raise GrammarError(f"it is longer than {MAX_LENGTH} characters")
    if not grammar.strip():
        raise GrammarError("it is empty")
    if "\0" in grammar:
        raise GrammarError("it contains a NUL character")
    # Brackets within literals count too: rather refuse a strange grammar than overflow the parser's stack.
    if _depth(grammar, "(", ")") > MAX_DEPTH:
        raise GrammarError(f"it is nested deeper than {MAX_DEPTH}")
    return grammar


def _depth(text: str, opening: str, closing: str) -> int:
    """Count how deep brackets are nested at most; a closing one without its opening one counts for nothing."""
    depth = most = 0
    for char in text:
        if char in opening:
            depth += 1
            most = max(most, depth)
        elif char in closing:
            depth = max(0, depth - 1)
    return most

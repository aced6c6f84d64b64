"""From what a request says of its text's form to a GBNF grammar, with errors that name the request's field."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tilebeam.grammars import constraint
from tilebeam.grammars.combining import SchemaError
from tilebeam.server.errors import bad_request
from tilebeam.server.requests import Generation, StructuredOutputs


def grammar_of(body: Generation) -> str | None:
    """The grammar that the text has to match, None for any text.

    Raises:
        ApiError: 400, a schema that cannot be turned into one, or one beyond the limits.
    """
    if body.grammar is not None:
        return made("grammar", partial(constraint.checked, body.grammar))
    if body.json_schema is not None:
        return made("json_schema", partial(constraint.of_schema, body.json_schema))
    if body.guided_json is not None:
        return made("guided_json", partial(constraint.of_schema, body.guided_json))
    if body.guided_regex is not None:
        return made("guided_regex", partial(constraint.of_regex, body.guided_regex))
    if body.guided_choice is not None:
        return made("guided_choice", partial(constraint.of_choices, body.guided_choice))
    if body.structured_outputs is not None:
        return _of_structured(body.structured_outputs)
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.schema_ is not None:
        return made("response_format.schema", partial(constraint.of_schema, wanted.schema_))
    if wanted.type == "json_object":
        return constraint.of_schema({"type": "object"})
    if wanted.grammar is not None:
        return made("response_format.grammar", partial(constraint.checked, wanted.grammar))
    assert wanted.json_schema is not None
    return made("response_format.json_schema.schema", partial(constraint.of_schema, wanted.json_schema.schema_))


def _of_structured(wanted: StructuredOutputs) -> str:
    if wanted.json_ is not None:
        return made("structured_outputs.json", partial(constraint.of_schema, wanted.json_))
    if wanted.regex is not None:
        return made("structured_outputs.regex", partial(constraint.of_regex, wanted.regex))
    if wanted.choice is not None:
        return made("structured_outputs.choice", partial(constraint.of_choices, wanted.choice))
    return made("structured_outputs.grammar", partial(constraint.checked, wanted.grammar or ""))


def made(param: str, make: Callable[[], str]) -> str:
    """What a function of `constraint` makes of a request's field.

    Raises:
        ApiError: 400, why it makes nothing of it.
    """
    try:
        return make()
    except SchemaError as error:
        code = "unsupported_schema" if error.keyword else "invalid_value"
        raise bad_request(f"{param} cannot be turned into a grammar: {error}.", param=param, code=code) from None
    except constraint.GrammarError as error:
        raise bad_request(f"{param}: invalid grammar: {error.what}.", param=param, code="invalid_grammar") from None

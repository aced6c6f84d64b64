"""What a field of a chat is refused for, named so that a program can tell which one it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.grammars import constraint
from tilebeam.grammars.combining import SchemaError


class FieldRefused(TilebeamError):
    """A field of a chat or of a request that cannot be what it is.

    Attributes:
        param: the field, such as "tools[1].function.parameters".
        code: a name for programs, None: there is none.
    """

    param = ""
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = self.param if param is None else param
        self.code = code or self.code


def grammar_of_field(param: str, make: Callable[[Any], str], given: Any, of: str = "") -> str:
    """Return what a function of `constraint` makes of a field.

    Args:
        param: the field.
        make: the function.
        given: what the field holds.
        of: whose field it is, for errors: " of .." or nothing.

    Raises:
        FieldRefused: why it makes nothing of it.
    """
    try:
        return make(given)
    except SchemaError as error:
        code = "unsupported_schema" if error.keyword else "invalid_value"
        raise FieldRefused(f"{param}{of} cannot be turned into a grammar: {error}.", param=param, code=code) from None
    except constraint.GrammarError as error:
        what = f"{param}{of}: invalid grammar: {error.what}."
        raise FieldRefused(what, param=param, code="invalid_grammar") from None

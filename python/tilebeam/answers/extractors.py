"""Extractors by name, as options and requests give them."""

from __future__ import annotations

import re

from tilebeam.answers.code import code
from tilebeam.answers.extract import Extractor, boxed, last_number, marked_number, regex, whole_text
from tilebeam.answers.formulas import MathAnswer
from tilebeam.answers.letters import choice
from tilebeam.errors import TilebeamError

_BY_NAME: dict[str, Extractor] = {
    "last-number": last_number,
    "gsm8k": marked_number,
    "text": whole_text,
    "choice": choice(),
    "boxed": boxed,
    "code": code,
}


def extractor(name: str) -> Extractor:
    """Return an extractor by name: "last-number", "gsm8k" (`marked_number`), "text" (`whole_text`), "choice", "boxed",
    "code", "math" (`tilebeam.MathAnswer`), or a regular expression whose first group (if it has one) is the answer.

    Raises:
        TilebeamError: it is no name, and no expression either.
    """
    if name == "math":
        return MathAnswer()
    if name in _BY_NAME:
        return _BY_NAME[name]
    try:
        return regex(name)
    except re.error as error:
        raise TilebeamError(
            f"{name!r} is neither {', '.join(_BY_NAME)}, math, nor a regular expression: {error}."
        ) from None

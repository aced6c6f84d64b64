"""Extractors by name, as options and requests give them."""

from __future__ import annotations

import re
from difflib import get_close_matches

from tilebeam.answers.code import code
from tilebeam.answers.extract import Extractor, boxed, last_number, marked_number, regex, whole_text
from tilebeam.answers.formulas import MathAnswer
from tilebeam.answers.letters import choice
from tilebeam.answers.program_answers import ProgramAnswer
from tilebeam.answers.structures import Structures
from tilebeam.errors import TilebeamError

_BY_NAME: dict[str, Extractor] = {
    "last-number": last_number,
    "gsm8k": marked_number,
    "text": whole_text,
    "choice": choice(),
    "boxed": boxed,
    "code": code,
    "json": Structures(),
    "calls": Structures(calls=True),
}
NAMES = (*_BY_NAME, "program", "math")


def extractor(name: str) -> Extractor:
    """Return an extractor by name: "last-number", "gsm8k" (`marked_number`), "text" (`whole_text`), "choice", "boxed",
    "code", "json" and "calls" (`tilebeam.Structures`), "math" (`tilebeam.MathAnswer`), "program"
    (`tilebeam.ProgramAnswer`), or a regular expression whose first group is the answer.

    Raises:
        TilebeamError: it is no name, and no expression with a group either.
    """
    if name == "math":
        return MathAnswer()
    if name == "program":
        return ProgramAnswer()
    if name in _BY_NAME:
        return _BY_NAME[name]
    wrong = "without a group in parentheses around the answer"
    try:
        if re.compile(name).groups:
            return regex(name)
    except re.error as error:
        wrong = f"that can be read ({error})"
    if near := get_close_matches(name, NAMES, 1):
        raise TilebeamError(f"{name!r}: do you mean {near[0]}?")
    raise TilebeamError(f"{name!r} is neither {', '.join(NAMES)}, nor a regular expression {wrong}.")


def as_extractor(given: Extractor | str) -> Extractor:
    """Return an extractor as it is, or the `extractor` of a name.

    Raises:
        TilebeamError: it is neither.
    """
    if isinstance(given, str):
        return extractor(given)
    if callable(given):
        return given
    raise TilebeamError(f"An extractor must be a function of a text, or the name of one, not {given!r}.")

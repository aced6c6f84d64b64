"""Files of questions: JSON lines as people have them, with the question under one of the usual names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.text_files import json_lines

FIELDS = ("prompt", "question", "problem", "messages")


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        text: the question; of a conversation what the user said last.
        before: of a conversation the turns before that.
        id: what its line calls itself, else the line's number in the file, from 1; None: it is of no file.
    """

    text: str
    before: tuple[Mapping[str, Any], ...] = ()
    id: Any = None

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """Return the conversation."""
        return [*self.before, {"role": "user", "content": self.text}]

    @property
    def asked(self) -> str | list[Mapping[str, Any]]:
        """Return the text, or the conversation if it has turns before it."""
        return self.messages if self.before else self.text

    @property
    def alone(self) -> str:
        """Return the text of a question that has no turns before it.

        Raises:
            TilebeamError: it has some.
        """
        if self.before:
            raise TilebeamError(f"Question {self.id} is a conversation: it needs the model's chat template.")
        return self.text


def question_of(line: Any, where: str, number: int, field: str | None = None, first: str = FIELDS[0]) -> Question:
    """Find the question in a line: a text, a conversation that ends with one, or an object that has either.

    Args:
        where: file and number of the line, for errors.
        number: of the line.
        field: the question's name in the object; None: the first of `FIELDS` that it has, `first` before all.

    Raises:
        TilebeamError: there is none; says what there is.
    """
    names = (field,) if field else tuple(dict.fromkeys((first, *FIELDS)))
    named = line if isinstance(line, Mapping) else {"": line}
    found = next((named[name] for name in (*names, "") if named.get(name)), None)
    own = named.get("id", number)
    if isinstance(found, list) and all(isinstance(turn, Mapping) for turn in found):
        *before, last = found
        if last.get("role") != "user" or not isinstance(last.get("content"), str):
            raise TilebeamError(f"{where}: a conversation must end with a text of the user.")
        return Question(last["content"], tuple(before), own)
    if not isinstance(found, str):
        wanted = " or ".join(f'"{name}"' for name in names)
        held = ", ".join(f'"{name}"' for name in named) or "nothing"
        raise TilebeamError(f"{where} has no text under {wanted}; it has {held}. --field NAME says where it is.")
    return Question(found, id=own)


def questions_of(file: Path, field: str | None = None) -> Iterator[Question]:
    """Read a file's questions, one a line; see `question_of`."""
    for number, line in json_lines(file):
        yield question_of(line, f"{file} line {number}", number, field)

"""Files of questions: JSON lines as people have them, with the question under one of the usual names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilebeam.errors import TilebeamError

FIELDS = ("prompt", "question", "problem", "messages")
Message = Mapping[str, Any]


@dataclass(frozen=True)
class UserQuestion:
    """What is asked.

    Attributes:
        text: the question; of a conversation what the user said last.
        before: of a conversation the turns before that.
        id: what its line calls itself, else the line's number in the file, from 1; None: it is of no file.
    """

    text: str
    before: tuple[Message, ...] = ()
    id: Any = None

    @property
    def messages(self) -> list[Message]:
        """Return the conversation."""
        return [*self.before, {"role": "user", "content": self.text}]

    @property
    def asked(self) -> str | list[Message]:
        """Return the text, or the conversation if there is more of it."""
        return self.messages if self.before else self.text

    @property
    def alone(self) -> str:
        """Return the text of a question that has no turns before it; raise `TilebeamError` if it has some."""
        if self.before:
            raise TilebeamError(f"Question {self.id} is a conversation: it needs the model's chat template.")
        return self.text


def question_of(line: Any, where: str, number: int, field: str | None = None, first: str = FIELDS[0]) -> UserQuestion:
    """Find the question in a line: a text, a conversation that ends with one, or an object that has either.

    Args:
        where: file and number of the line, for errors.
        number: of the line.
        field: the question's name in the object; None: the first of `FIELDS` that it has, `first` before all.

    Raises:
        TilebeamError: there is none; says what there is.
    """
    names = [field] if field else list(dict.fromkeys((first, *FIELDS)))
    named = line if isinstance(line, Mapping) else {names[0]: line}
    found = next((named[name] for name in names if named.get(name)), None)
    before: list[Any] = []
    if isinstance(found, list) and all(isinstance(turn, Mapping) for turn in found):
        *before, last = found
        found = last.get("content") if last.get("role") == "user" else None
        if not isinstance(found, str):
            raise TilebeamError(f"{where}: a conversation must end with a text of the user.")
    if not isinstance(found, str):
        wanted = " or ".join(f'"{name}"' for name in names)
        held = ", ".join(f'"{name}"' for name in named) if named is line else "no names"
        raise TilebeamError(f"{where} has no text under {wanted}; it has {held}. --field NAME says where it is.")
    return UserQuestion(found, tuple(before), named.get("id", number))

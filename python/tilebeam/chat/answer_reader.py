"""What a model writes in a chat, read into its text, its thoughts and its calls of functions."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from tilebeam.chat.thoughts import Piece, Thinking
from tilebeam.chat.tool_calls import CallReader, Event, joined
from tilebeam.chat.tools import ToolUse


def new_id() -> str:
    """Of a call. Mistral's templates take nine letters and digits, and nothing else."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class AnswerReader:
    """Reads one answer: its thoughts, its calls and its text.

    Args:
        use: functions that the model may call, None: none.
        thinking: how it thinks, None: all is its answer.
    """

    def __init__(self, use: ToolUse | None, thinking: Thinking | None) -> None:
        self._calls = None if use is None else CallReader(use.family, use.functions, use.several, use.forced)
        self._thoughts = None if thinking is None else thinking.reader()
        self._apart = thinking is not None and thinking.apart

    @property
    def calls(self) -> int:
        """How many there are so far."""
        return self._calls.calls if self._calls is not None else 0

    def feed(self, text: str) -> list[Event]:
        """What new text adds, as far as it is clear."""
        return self._read([Piece(text, False)] if self._thoughts is None else self._thoughts.feed(text))

    def end(self, cut: bool) -> list[Event]:
        """What is left when the answer ends.

        Args:
            cut: before the model had ended it.
        """
        events = [] if self._thoughts is None else self._read(self._thoughts.end())
        return joined(events + ([] if self._calls is None else self._calls.end(cut)))

    def _read(self, pieces: Sequence[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if piece.thought:
                events.append(Event(piece.text, thought=self._apart))
            else:
                events += [Event(piece.text)] if self._calls is None else self._calls.feed(piece.text)
        return joined(events)

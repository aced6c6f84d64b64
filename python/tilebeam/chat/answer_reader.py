"""What a model writes in a chat, read into its text, its thoughts and its calls of functions."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import replace

from tilebeam.chat.answer_parts import Part, Reasoning, Text, joined
from tilebeam.chat.thoughts import TextPiece, Thinking
from tilebeam.chat.tool_calls import CallReader
from tilebeam.chat.tools import ToolUse
from tilebeam.outputs import FinishReason, ToolCallDelta


def new_id() -> str:
    """Draw the id of a call. Mistral's templates take nine letters and digits, and nothing else."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class AnswerReader:
    """Reads one answer, piece by piece.

    Args:
        use: functions that the model may call, None: none.
        thinking: how it thinks, None: all is its answer.
    """

    def __init__(self, use: ToolUse | None, thinking: Thinking | None) -> None:
        self._calls = None if use is None else CallReader(use.family, use.functions, use.several, use.forced)
        self._thoughts = None if thinking is None else thinking.reader()
        self._separate = thinking is not None and thinking.separate

    def take(self, text: str, finish: FinishReason | None = None) -> tuple[list[Part], FinishReason | None]:
        """Return what an answer grew by because of new text, and why it ended.

        Args:
            text: new.
            finish: why the sample ended, None: it goes on. A complete answer that calls ends with "tool_calls".
        """
        parts = self.feed(text)
        if finish is not None:
            parts = joined(parts + self.end(cut=finish != "stop"))
        return parts, "tool_calls" if finish == "stop" and self.calls else finish

    @property
    def calls(self) -> int:
        """Count the calls so far."""
        return self._calls.calls if self._calls is not None else 0

    def feed(self, text: str) -> list[Part]:
        """Return what new text adds, as far as it is clear."""
        return self._read([TextPiece(text, False)] if self._thoughts is None else self._thoughts.feed(text))

    def end(self, cut: bool) -> list[Part]:
        """Return what is left when the answer ends.

        Args:
            cut: before the model had ended it.
        """
        parts = [] if self._thoughts is None else self._read(self._thoughts.end())
        return joined(parts + ([] if self._calls is None else self._named(self._calls.end(cut))))

    def _read(self, pieces: Sequence[TextPiece]) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            if piece.thought:
                parts.append(Reasoning(piece.text) if self._separate else Text(piece.text))
            else:
                parts += [Text(piece.text)] if self._calls is None else self._named(self._calls.feed(piece.text))
        return joined(parts)

    def _named(self, parts: Sequence[Part]) -> list[Part]:
        """Give calls that begin an id."""
        return [replace(p, id=new_id()) if isinstance(p, ToolCallDelta) and p.name is not None else p for p in parts]

"""A prompt: the text that people read, the tokens that a model reads, and the question in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tilebeam.errors import TilebeamError


class Tokenizer(Protocol):
    """What makes tokens of texts; `tilebeam.LM` is one."""

    def tokenize(self, text: str) -> list[int]:
        """Return token ids."""
        ...


@dataclass(frozen=True)
class Prompt:
    """What a model is asked: what searches, scorers, judges and tasks hand on. A plain text stands for `Prompt(text)`.

    `LM.chat_prompt` makes one of a conversation, `LM.filled_prompt` one of a template.

    Attributes:
        text: what people read; it spells out the control tokens of a chat template.
        token_ids: what the model reads, so that control tokens that a message spells out stay text. None: the tokens
            of the text, in which such spellings count as control tokens.
        question: what a user asked, without examples and chat template: what judges and reward models are shown. None:
            the text.
    """

    text: str
    token_ids: Sequence[int] | None = field(default=None, hash=False)
    question: str | None = None

    def __post_init__(self) -> None:
        if self.token_ids is not None:
            object.__setattr__(self, "token_ids", tuple(int(t) for t in self.token_ids))

    @classmethod
    def of(cls, given: object) -> Prompt:
        """Return a prompt as it is, or make one of a text.

        Raises:
            TilebeamError: it is neither.
        """
        if isinstance(given, str):
            return cls(given)
        if not isinstance(given, Prompt):
            refuse_messages(given)
            raise TilebeamError(f"A prompt is a text or a tilebeam.Prompt, not {type(given).__name__}.")
        return given

    @property
    def asked(self) -> str:
        """The question; without one, the text."""
        return self.text if self.question is None else self.question

    @property
    def ids(self) -> list[int]:
        """The token ids as a list.

        Raises:
            TilebeamError: the prompt is a text.
        """
        if self.token_ids is None:
            raise TilebeamError("This prompt is a text without token ids: `Prompt.tokens(lm)` makes them.")
        return list(self.token_ids)

    def tokens(self, lm: Tokenizer) -> list[int]:
        """Return what a model reads: the token ids, or those of the text."""
        return lm.tokenize(self.text) if self.token_ids is None else self.ids


# What a model can be given.
PromptLike = str | Sequence[int] | Prompt
# The turns of a conversation, like {"role": "user", "content": "..."}.
Messages = Sequence[Mapping[str, Any]]


def is_messages(given: object) -> bool:
    """Tell whether these are the turns of one conversation."""
    return isinstance(given, Sequence) and len(given) > 0 and all(isinstance(turn, Mapping) for turn in given)


def is_one(given: object) -> bool:
    """Tell whether this is one prompt or conversation, where several could stand; a single message counts too, for
    whoever reads prompts to refuse."""
    return isinstance(given, str | Prompt | Mapping) or is_messages(given)


class _NotAPromptError(TilebeamError, TypeError):
    pass


def refuse_messages(given: object) -> None:
    """Raise an error, `TilebeamError` and `TypeError`, for messages where a prompt is expected."""
    if isinstance(given, Mapping) or is_messages(given):
        raise _NotAPromptError(
            "These are messages, not a prompt: call lm.chat(messages), or pass what lm.chat_prompt(messages) returns."
        )

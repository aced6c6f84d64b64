"""The prompts of completions: texts or token ids, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilebeam.server.errors import bad_request

if TYPE_CHECKING:
    from tilebeam.model.lm import LM


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        text, ids: what the model reads.
        question: of a chat the last user's message, else the text.
    """

    text: str
    ids: list[int]
    question: str


def completion_prompt(lm: LM, given: str | list[int]) -> Prompt:
    """A prompt of /v1/completions.

    Raises:
        ApiError: a token that the model does not have.
    """
    if isinstance(given, str):
        return Prompt(given, lm.tokenize(given), given)
    check_tokens(lm, given, "prompt")
    text = lm.detokenize(given)
    return Prompt(text, given, text)


def check_tokens(lm: LM, ids: Sequence[int], param: str) -> None:
    """Raise `ApiError` for a token that the model does not have."""
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= lm.n_vocab:
        wrong = low if low < 0 else high
        raise bad_request(f"{param}: token {wrong} is not in the vocabulary (0 to {lm.n_vocab - 1}).", param=param)

"""What an answer is made of, whatever its form: each choice begins, grows and ends, and then the cost is known.

Whole answers are made of the same events as streams: of a choice that grows once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tilebeam.chat.answer_parts import Part, Text
from tilebeam.chat.answer_reader import AnswerReader
from tilebeam.outputs import CompletionOutput, Delta, Usage

TokenBytes = Callable[[int], bytes]  # the bytes of a token
Json = dict[str, Any]


class Shown(NamedTuple):
    """A token that a text shows: the character at which it starts, and what is known of it."""

    start: int
    token: int
    logprob: float
    top: dict[int, float] | None


class TokenLedger:
    """Which of a sample's tokens are in its text, and with which log-probabilities.

    A sample draws more tokens than its text shows: those behind a stop string, the end-of-text token, bytes of a
    character that is not complete yet. `take` returns what text that was told covers.
    """

    def __init__(self, piece: TokenBytes) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # characters of all tokens so far
        self._waiting: list[Shown] = []
        self._told = 0  # characters

    def feed(
        self, tokens: Sequence[int], logprobs: Sequence[float] | None, tops: Sequence[dict[int, float]] | None
    ) -> None:
        """Take tokens that were drawn."""
        for i, token in enumerate(tokens):
            if logprobs is not None:
                self._waiting.append(Shown(self._length, token, logprobs[i], tops[i] if tops else None))
            self._length += len(self._decoder.decode(self._piece(token)))

    def take(self, text: str) -> list[Shown]:
        """Return the tokens of text that is told now, each once, with the character at which it starts."""
        self._told += len(text)
        count = 0
        while count < len(self._waiting) and self._waiting[count].start < self._told:
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


def token_text(piece: bytes) -> str:
    """Write a token's bytes as a text; OpenAI writes those that are no text by themselves as bytes:\\x.."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """A choice begins.

    Attributes:
        index: of the choice.
        prompt_tokens: that the model reads for it, where that is known.
    """

    index: int
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Grown:
    """A choice grew, or ended.

    Attributes:
        index: of the choice.
        parts: by what, in order.
        tokens: that are told with them, None: no log-probabilities are.
        finish: OpenAI's finish_reason, None: it goes on.
        stop: the stop string that ended it.
        search: what a search tells with it.
    """

    index: int
    parts: Sequence[Part] = ()
    tokens: Sequence[Shown] | None = None
    finish: str | None = None
    stop: str | None = None
    search: Json | None = None


@dataclass(frozen=True)
class Ended:
    """All choices have ended.

    Attributes:
        usage: what they cost.
        seed: what repeats them.
        reasoning_tokens: that the text of thoughts has, where they are told apart, without their marks.
    """

    usage: Usage
    seed: int
    reasoning_tokens: int = 0


Event = Started | Grown | Ended


class SampleEvents:
    """From what one sample draws to what its choice grows by.

    Args:
        index: of the choice.
        piece: the bytes of a token.
        logprobs: tell log-probabilities.
        reader: tells thoughts and calls apart, None: all is text.
    """

    def __init__(
        self,
        index: int,
        piece: TokenBytes,
        *,
        logprobs: bool = False,
        reader: AnswerReader | None = None,
    ) -> None:
        self._index = index
        self._ledger = TokenLedger(piece) if logprobs else None
        self._reader = reader
        self._untold: list[Shown] = []  # tokens of text that the reader holds back

    def grown(self, delta: Delta) -> Grown | None:
        """Return what a delta adds, None: nothing yet."""
        if self._ledger is not None:
            self._ledger.feed(delta.token_ids, delta.logprobs, delta.top_logprobs)
        if not delta.text and delta.finish_reason is None:
            return None
        text, finish = delta.text, delta.finish_reason
        parts: list[Part] = [Text(text)] if text else []
        if self._reader is not None:
            parts, finish = self._reader.take(text, finish)
        tokens = self._tokens(text, bool(parts) or finish is not None)
        if not parts and finish is None and tokens is None:
            return None
        return Grown(self._index, parts, tokens, finish, delta.stop_reason)

    def whole(self, sample: CompletionOutput) -> Grown:
        """Return all of a choice at once."""
        delta = Delta(
            *(0, sample.text, sample.token_ids, sample.logprobs, sample.finish_reason),
            *(sample.stop_reason, sample.top_logprobs),
        )
        found = self.grown(delta)
        assert found is not None  # it ends
        return replace(found, tokens=()) if found.tokens is None and self._ledger is not None else found

    def _tokens(self, text: str, tells: bool) -> list[Shown] | None:
        """Return the tokens to tell now."""
        if self._ledger is None:
            return None
        self._untold += self._ledger.take(text)
        if not (self._untold and tells) and (self._reader is not None or not text):
            return None
        tokens, self._untold = self._untold, []
        return tokens

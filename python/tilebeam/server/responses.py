"""From results to the JSON of OpenAI's API."""

from __future__ import annotations

import codecs
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tilebeam._version import __version__
from tilebeam.outputs import CompletionOutput, Delta, RequestOutput, Usage

Piece = Callable[[int], bytes]  # the bytes of a token
Json = dict[str, Any]

# An answer, its choices, one of them, its log-probabilities, their list: an entry of it is encoded in one go.
_PART_DEPTH = 5


@dataclass(frozen=True)
class Head:
    """What every answer, and every chunk of a stream, begins with."""

    kind: str  # "text_completion", "chat.completion" or "chat.completion.chunk"
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def as_dict(self) -> Json:
        """For JSON."""
        prefix = "cmpl" if self.kind == "text_completion" else "chatcmpl"
        told = {"id": f"{prefix}-{self.id}", "object": self.kind, "created": self.created, "model": self.model}
        return told | {"system_fingerprint": f"tilebeam-{__version__}"}  # what else may change answers is the model's


def usage_of(usage: Usage) -> Json:
    """OpenAI's count of tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
        },
    }


def extras(usage: Usage, seed: int) -> Json:
    """What Tilebeam tells besides: the seed that repeats the request, and what it cost."""
    return {
        "seed": seed,
        "recomputed_tokens": usage.recomputed_tokens,
        "scored_tokens": usage.scored_tokens,
        "prefill_seconds": round(usage.prefill_seconds, 6),
        "decode_seconds": round(usage.decode_seconds, 6),
        "sampling_seconds": round(usage.sampling_seconds, 6),
        "scoring_seconds": round(usage.scoring_seconds, 6),
    }


def finish_of(reason: str | None) -> str | None:
    """OpenAI's finish_reason. A candidate that a search gave up is one that was cut."""
    return "length" if reason == "aborted" else reason


# --- log-probabilities ------------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """A token that a text shows: the character at which it starts, and what is known of it; of a prompt's first token
    nothing is."""

    start: int
    token: int
    logprob: float | None
    top: dict[int, float] | None


@dataclass(frozen=True)
class Echo:
    """A prompt that its answer begins with.

    Attributes:
        text: as it came.
        tokens: with their log-probabilities, if these are wanted.
    """

    text: str
    tokens: Sequence[Shown] = ()


class TokenLedger:
    """Which of a sample's tokens are in its text, and with which log-probabilities.

    A sample draws more tokens than its text shows: those behind a stop string, the end-of-text token, bytes of a
    character that is not complete yet. `take` returns what text that was told covers.
    """

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0  # characters of all tokens so far
        self._waiting: list[Shown] = []
        self._told = 0  # characters

    def feed(
        self, tokens: Sequence[int], logprobs: Sequence[float] | None, tops: Sequence[dict[int, float]] | None
    ) -> None:
        """Tokens that were drawn."""
        for i, token in enumerate(tokens):
            if logprobs is not None:
                self._waiting.append(Shown(self._length, token, logprobs[i], tops[i] if tops else None))
            self._length += len(self._decoder.decode(self._piece(token)))

    def take(self, text: str) -> list[Shown]:
        """The tokens of text that is told now, each once, with the character at which it starts."""
        self._told += len(text)
        count = 0
        while count < len(self._waiting) and self._waiting[count].start < self._told:
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def rest(self) -> list[Shown]:
        """The tokens that `take` did not return, at the end of the text that was told."""
        taken, self._waiting = self._waiting, []
        return [shown._replace(start=min(shown.start, self._told)) for shown in taken]


def token_text(piece: bytes) -> str:
    """A token's bytes as a text; OpenAI writes those that are no text by themselves as bytes:\\x.."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _chat_entry(piece: bytes, logprob: float | None) -> Json:
    return {"token": token_text(piece), "logprob": logprob, "bytes": list(piece)}


# --- choices ----------------------------------------------------------------------------------------------------------


class Style(ABC):
    """How one kind of endpoint writes its choices.

    Args:
        piece: the bytes of a token.
        spelling: the same, with names of control tokens.
        logprobs: whether they are wanted.
        top: how many of the likeliest tokens to list at each position.
        scored: the prompt's tokens are listed, too, and all that were drawn: clients count them from both ends.
    """

    kind = ""
    chunk_kind = ""

    def __init__(self, piece: Piece, spelling: Piece, logprobs: bool, top: int, scored: bool = False) -> None:
        self.piece = piece
        self.spelling = spelling
        self.logprobs = logprobs
        self.top = top
        self.scored = scored

    def choice(self, index: int, sample: CompletionOutput, echo: Echo | None = None) -> Json:
        """A complete one."""
        logprobs = None
        before = echo.text if echo else ""
        if self.logprobs:
            ledger = TokenLedger(self.piece)
            ledger.feed(sample.token_ids, sample.logprobs, sample.top_logprobs)
            tokens = ledger.take(sample.text)
            if self.scored and not sample.stop_reason:
                tokens += ledger.rest()
            logprobs = self.told(tokens, len(before), echo.tokens if echo else ())
        return self.whole(index, before + sample.text, logprobs, finish_of(sample.finish_reason))

    def chunk(self, index: int, text: str, delta: Delta, ledger: TokenLedger, offset: int) -> Json:
        """A piece of one: `text` told now because of `delta`; `offset` characters of a prompt went before."""
        tokens = ledger.take(text)
        if self.scored and delta.finish_reason and not delta.stop_reason:
            tokens += ledger.rest()
        logprobs = self.told(tokens, offset) if self.logprobs and (text or tokens) else None
        return self.part(index, text, logprobs, finish_of(delta.finish_reason))

    def chunks(self, index: int, text: str, delta: Delta, ledger: TokenLedger, offset: int) -> list[Json]:
        """`chunk`, where one delta may be several pieces, or none yet."""
        return [self.chunk(index, text, delta, ledger, offset)]

    @abstractmethod
    def opening(self, index: int, echo: Echo | None) -> Json | None:
        """A chunk that goes before a sample's first token, None: there is none."""

    @abstractmethod
    def whole(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        """A complete choice."""

    @abstractmethod
    def part(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        """A piece of one, in a stream."""

    @abstractmethod
    def told(self, tokens: list[Shown], offset: int, before: Sequence[Shown] = ()) -> Json:
        """Log-probabilities; `offset` characters went before the text, and in them the tokens `before`."""


class CompletionStyle(Style):
    """/v1/completions."""

    kind = chunk_kind = "text_completion"

    def opening(self, index: int, echo: Echo | None) -> Json | None:
        """The prompt, if it was to be echoed."""
        if echo is None:
            return None
        return self.whole(index, echo.text, self.told([], 0, echo.tokens) if self.scored else None, None)

    def whole(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        """A choice of a text completion; in a stream a piece of one looks alike."""
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}

    part = whole

    def told(self, tokens: list[Shown], offset: int, before: Sequence[Shown] = ()) -> Json:
        """Lists side by side, an entry per token; offsets are in characters of the whole text."""
        listed = [*before, *tokens]
        tops: list[Json | None] = []
        for shown in listed:
            named: dict[str, float] = {}
            for token, logprob in (shown.top or {}).items():
                named.setdefault(token_text(self.spelling(token)), logprob)  # the likeliest of those that look alike
            tops.append(None if shown.logprob is None else named)
        return {
            "tokens": [token_text(self.spelling(shown.token)) for shown in listed],
            "token_logprobs": [shown.logprob for shown in listed],
            "top_logprobs": tops if self.top else None,
            "text_offset": [shown.start for shown in before] + [offset + shown.start for shown in tokens],
        }


class InfillStyle(CompletionStyle):
    """/infill, which tells the stop string that ended the text."""

    def choice(self, index: int, sample: CompletionOutput, echo: Echo | None = None) -> Json:
        """A complete one, with its `stop_reason`."""
        return super().choice(index, sample, echo) | {"stop_reason": sample.stop_reason}


class ChatStyle(Style):
    """/v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, index: int, echo: object) -> Json | None:  # noqa: ARG002 - a chat has nothing to echo
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def whole(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        """A choice of a chat: the assistant's message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def part(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        """What a message grew by; the last piece of one may be without text."""
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def told(self, tokens: list[Shown], offset: int, before: Sequence[Shown] = ()) -> Json:  # noqa: ARG002
        """An entry per token, each with its bytes; OpenAI counts no offsets in chats."""
        content = []
        for shown in tokens:
            entry = _chat_entry(self.spelling(shown.token), shown.logprob)
            entry["top_logprobs"] = [_chat_entry(self.spelling(t), p) for t, p in (shown.top or {}).items()]
            content.append(entry)
        return {"content": content, "refusal": None}


def best(outputs: Sequence[CompletionOutput], count: int) -> list[CompletionOutput]:
    """OpenAI's best_of: the samples with the highest log-probability per token, best first."""
    if count >= len(outputs):
        return list(outputs)
    return sorted(outputs, key=lambda o: (-(o.cumulative_logprob or 0.0) / max(1, len(o.token_ids)), o.index))[:count]


def total_of(outputs: Sequence[RequestOutput]) -> Usage:
    """What all prompts of a request cost."""
    return sum((o.usage for o in outputs), Usage())


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dumped(data: Json | str) -> bytes:
    """JSON."""
    return _encoder.encode(data).encode()


def dumped_in_parts(data: Any, depth: int = _PART_DEPTH) -> bytes:
    """The same JSON, for threads that write long answers: the interpreter encodes each part in one go, in which no
    other thread runs, the event loop's neither.

    Args:
        data: what can be JSON; keys of its outer objects are texts.
        depth: levels of objects and lists whose members are encoded by themselves.
    """
    if depth and isinstance(data, dict):
        members = [dumped(key) + b":" + dumped_in_parts(value, depth - 1) for key, value in data.items()]
        return b"{" + b",".join(members) + b"}"
    if depth and isinstance(data, list) and data and isinstance(data[0], dict | list):
        return b"[" + b",".join([dumped_in_parts(item, depth - 1) for item in data]) + b"]"
    return dumped(data)


def event(data: Json | str) -> bytes:
    """One server-sent event."""
    return b"data: " + (data.encode() if isinstance(data, str) else dumped(data)) + b"\n\n"

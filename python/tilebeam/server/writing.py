"""How answers are written: JSON, server-sent events, and what all forms share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from tilebeam.server.answer_events import Ended, Event, Json
from tilebeam.server.errors import ApiError

# An answer, its choices, one of them, its log-probabilities, their list: an entry of it is encoded in one go.
_PART_DEPTH = 5


class Answer(ABC):
    """Writes the answer to one request in the form of one endpoint, whole or as a stream."""

    @abstractmethod
    def whole(self, events: Iterable[Event]) -> Json:
        """Return the answer that all events make up."""

    def begin(self) -> bytes:
        """Return what goes before all events."""
        return b""

    @abstractmethod
    def add(self, event: Event) -> bytes:
        """Return what an event adds."""


def usage_of(ended: Ended) -> Json:
    """Write OpenAI's count of tokens."""
    usage = ended.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": ended.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
        },
    }


def extras(ended: Ended) -> Json:
    """Write what Tilebeam tells besides: the seed that repeats the request, and what it cost."""
    usage = ended.usage
    return {
        "seed": ended.seed,
        "recomputed_tokens": usage.recomputed_tokens,
        "scored_tokens": usage.scored_tokens,
        "prefill_seconds": round(usage.prefill_seconds, 6),
        "decode_seconds": round(usage.decode_seconds, 6),
        "sampling_seconds": round(usage.sampling_seconds, 6),
        "scoring_seconds": round(usage.scoring_seconds, 6),
    }


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dumped(data: Json | str) -> bytes:
    """Encode JSON."""
    return _encoder.encode(data).encode()


def dumped_in_parts(data: Any, depth: int = _PART_DEPTH) -> bytes:
    """Encode the same JSON, for threads that write long answers: the interpreter encodes each part in one go, in
    which no other thread runs, the event loop's neither.

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


def server_sent(data: Json | str, kind: str = "") -> bytes:
    """Write one server-sent event, of a kind where its form has any."""
    head = f"event: {kind}\n".encode() if kind else b""
    return head + b"data: " + (data.encode() if isinstance(data, str) else dumped(data)) + b"\n\n"


def last_event(error: ApiError, path: str, number: int) -> bytes:
    """Write what tells that nothing more comes, in the form of a path.

    Args:
        number: of events before it.
    """
    body = error.body(path)
    if path.startswith("/v1/messages"):
        return server_sent(body, "error")
    if path not in ("/v1/responses", "/responses"):
        return server_sent(body)
    told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return server_sent(told | {"sequence_number": number}, "error")

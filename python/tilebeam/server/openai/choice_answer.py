"""Answers with choices: what /v1/completions and /v1/chat/completions write alike."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable
from functools import cache

from tilebeam._version import __version__
from tilebeam.server.answer_events import Ended, Event, Grown, Json, Shown, Started, TokenBytes
from tilebeam.server.plan import AnswerPlan
from tilebeam.server.writing import Answer, dumped, extras, server_sent, usage_of

_DONE = server_sent("[DONE]")


class ChoicesAnswer(Answer):
    """An answer with choices, as two endpoints have them.

    Args:
        plan: the request.
        spelling: the bytes of a token, of a control token its name.
    """

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(self, plan: AnswerPlan, spelling: TokenBytes) -> None:
        self._spelling = cache(spelling)  # the same tokens are told again and again
        self._plan = plan
        self._top = plan.params.top_logprobs
        told = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "object": self.kind, "created": int(time.time())}
        # What else may change answers is the model's.
        self._head = told | {"model": plan.model, "system_fingerprint": f"tilebeam-{__version__}"}
        options = plan.body.stream_options
        self._usage = options is not None and options.include_usage
        # All but the choices is the same in every chunk.
        chunk = self._head | {"object": self.chunk_kind}
        self._chunk = chunk | {"choices": [None]} | ({"usage": None} if self._usage else {})
        before, after = server_sent(self._chunk).split(b'"choices":[null]')
        self._before, self._after = before + b'"choices":[', b"]" + after

    @abstractmethod
    def choice(self, grown: Grown) -> Json:
        """Write a complete choice."""

    def opening(self, index: int) -> Json | None:  # noqa: ARG002
        """Write a piece that goes before a choice's first token, None: there is none."""
        return None

    @abstractmethod
    def pieces(self, grown: Grown) -> list[Json]:
        """Write what a choice grew by, at least one piece."""

    def whole(self, events: Iterable[Event]) -> Json:
        """Return the JSON of all choices."""
        choices: list[Json] = []
        answer = self._head | {"choices": choices}
        for one in events:
            if isinstance(one, Grown):
                told = self.choice(one)
                choices.append(told if one.search is None else told | {"search": one.search})
            elif isinstance(one, Ended):
                answer |= {"usage": usage_of(one), "tilebeam": extras(one)}
        return answer

    def add(self, event: Event) -> bytes:
        """Return the chunks that an event adds."""
        if isinstance(event, Started):
            opening = self.opening(event.index)
            return b"" if opening is None else self._before + dumped(opening) + self._after
        if isinstance(event, Grown):
            pieces = self.pieces(event)
            if event.search is not None:
                pieces[-1] |= {"search": event.search}
            return b"".join([self._before + dumped(piece) + self._after for piece in pieces])
        if not self._usage:
            return _DONE
        told = {"choices": [], "usage": usage_of(event), "tilebeam": extras(event)}
        return server_sent(self._chunk | told) + _DONE

    def _entries(self, shown: Shown) -> list[tuple[bytes, float]]:
        """Return the likeliest tokens in a token's place."""
        return [(self._spelling(token), logprob) for token, logprob in (shown.top or {}).items()]

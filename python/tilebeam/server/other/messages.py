"""/v1/messages, in the form of Anthropic's Messages API: how answers are written, whole and as events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from fastapi import FastAPI, Request
from starlette.responses import Response

from tilebeam.chat.answer_parts import Part, Text, calls_in, reasoning_in, text_in
from tilebeam.outputs import ToolCallDelta, Usage
from tilebeam.server.answer_events import Ended, Event, Grown, Json, Started, TokenBytes
from tilebeam.server.chat_forms import answered
from tilebeam.server.errors import ApiError
from tilebeam.server.models import Models
from tilebeam.server.openai.chat_completions import prompt_of
from tilebeam.server.other.message_requests import CountRequest, MessagesRequest
from tilebeam.server.plan import AnswerPlan
from tilebeam.server.writing import Answer, extras, server_sent

_PATH = "/v1/messages"
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def add_message_routes(app: FastAPI, models: Models) -> None:
    """Serve these paths."""

    @app.post(_PATH, response_model=None)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, in the form of Anthropic's Messages API."""
        return await answered(models, body, request, MessageAnswer)

    @app.post(f"{_PATH}/count_tokens", response_model=None)
    async def count_tokens(body: CountRequest, request: Request) -> Json:
        """Return how many tokens a conversation's prompt has; nothing is generated."""
        chat = body.chat()
        try:
            made = await models.of(body.model).run_template(request, lambda lm: prompt_of(lm, chat, models.settings))
        except ApiError as error:
            raise body.as_sent(error) from error
        return {"input_tokens": len(made.ids)}


class MessageAnswer(Answer):
    """Writes one message: blocks of thoughts, text and calls."""

    def __init__(self, plan: AnswerPlan, _spelling: TokenBytes) -> None:
        name = f"msg_{secrets.token_hex(12)}"
        self._head = {"id": name, "type": "message", "role": "assistant", "model": plan.model}
        self._blocks = 0  # begun so far
        self._open = ""  # the type of the one that may grow
        self._reason: Json = {"stop_reason": None, "stop_sequence": None}

    def whole(self, events: Iterable[Event]) -> Json:
        """Return the JSON of the message."""
        _, grown, ended = events
        assert isinstance(grown, Grown)
        assert isinstance(ended, Ended)
        self._end(grown)
        said = {"thinking": reasoning_in(grown.parts), "text": text_in(grown.parts)}
        blocks = [_block(kind, text) for kind, text in said.items() if text]
        blocks += _calls(grown.parts)
        told = {"usage": _usage(ended.usage), "tilebeam": extras(ended)}
        return {**self._head, "content": blocks, **self._reason, **told}

    def add(self, event: Event) -> bytes:
        """Return the events of the Messages API that an event adds."""
        return b"".join(server_sent(told, told["type"]) for told in self._told(event))

    def _end(self, grown: Grown) -> None:
        if grown.finish is not None:
            reason = "stop_sequence" if grown.stop is not None else _REASONS.get(grown.finish, "end_turn")
            self._reason = {"stop_reason": reason, "stop_sequence": grown.stop}

    def _told(self, event: Event) -> Iterator[Json]:
        if isinstance(event, Started):
            usage = _usage(Usage(prompt_tokens=event.prompt_tokens))
            yield {"type": "message_start", "message": self._head | {"content": [], **self._reason, "usage": usage}}
        elif isinstance(event, Grown):
            for part in event.parts:
                yield from self._grown(part)
            self._end(event)
        else:
            yield from self._close()
            told = {"type": "message_delta", "delta": self._reason, "usage": _usage(event.usage)}
            yield told | {"tilebeam": extras(event)}
            yield {"type": "message_stop"}

    def _grown(self, part: Part) -> Iterator[Json]:
        if isinstance(part, ToolCallDelta):
            if part.name is not None:
                yield from self._begin(_call(part.id or "", part.name, {}), anew=True)
            if part.arguments:
                yield self._at("delta", delta={"type": "input_json_delta", "partial_json": part.arguments})
            return
        kind = "text" if isinstance(part, Text) else "thinking"
        yield from self._begin(_block(kind, ""))
        yield self._at("delta", delta={"type": f"{kind}_delta", kind: part.text})

    def _begin(self, block: Json, anew: bool = False) -> Iterator[Json]:
        """Begin a block, unless one of its type may grow."""
        if self._open != block["type"] or anew:
            yield from self._close()
            self._open = block["type"]
            self._blocks += 1
            yield self._at("start", content_block=block)

    def _close(self) -> Iterator[Json]:
        if self._open:
            self._open = ""
            yield self._at("stop")

    def _at(self, what: str, **fields: Json) -> Json:
        return {"type": f"content_block_{what}", "index": self._blocks - 1, **fields}


def _block(kind: str, text: str) -> Json:
    # Only Anthropic's own server can check signatures.
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def _calls(parts: Sequence[Part]) -> Iterator[Json]:
    """Yield the calls that parts make up; one that `max_tokens` cut is none."""
    for call in calls_in(parts):
        with suppress(ValueError, RecursionError):
            yield _call(call.id, call.name, json.loads(call.arguments or "{}"))


def _call(name: str, function: str, arguments: Json) -> Json:
    return {"type": "tool_use", "id": name, "name": function, "input": arguments}


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }

"""Chats in other forms than that of /v1/chat/completions: each becomes such a chat, and what is wrong with that is told
with the fields that the client sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fastapi import Request
from pydantic import ValidationError
from starlette.responses import Response

from tilebeam.server.answer_events import Json
from tilebeam.server.errors import ApiError, from_validation
from tilebeam.server.event_stream import EventStream
from tilebeam.server.models import Models
from tilebeam.server.plan import AnswerMaker
from tilebeam.server.requests import ChatRequest, Strict, Text

_IN_MESSAGE = re.compile(r"\bmessages\[(\d+)\]((?:\.\w+(?:\[\d+\])?)*)")
_IN_CALL = re.compile(r"\.tool_calls\[(\d+)\](?:\.function)?")


@dataclass
class FormTurn:
    """A message of the chat, and the field that it and each of its calls are made of."""

    own: str
    message: Json
    calls: list[str] = field(default_factory=list)

    def add_call(self, own: str, id_: str, name: str, arguments: str) -> None:
        """Add a call, made of the field `own`."""
        self.calls.append(own)
        call = {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.message.setdefault("tool_calls", []).append(call)

    def of(self, part: str) -> str:
        """Return the field that a part of the message is made of."""
        call = _IN_CALL.match(part)
        if call is None or int(call[1]) >= len(self.calls):
            return self.own + part
        return self.calls[int(call[1])] + part[call.end() :]


class ChatForm(Strict):
    """A body that asks for a chat.

    Attributes:
        own_names: regular expressions for a chat's fields, and what they are called in this form.
    """

    own_names: ClassVar[Sequence[tuple[str, str]]] = ()

    model: Text | None = None

    def turns(self) -> list[FormTurn]:
        """Return the chat's messages."""
        raise NotImplementedError

    def fields(self) -> Json:
        """Return the other fields of the chat."""
        raise NotImplementedError

    def chat(self) -> ChatRequest:
        """Return the same as a request of /v1/chat/completions; ApiError: what does not fit together."""
        messages = [turn.message for turn in self.turns()]
        try:
            return ChatRequest.model_validate(self.fields() | {"messages": messages, "model": self.model})
        except ValidationError as error:
            raise self.as_sent(from_validation(error)) from None

    def as_sent(self, error: ApiError) -> ApiError:
        """Return an error of the chat, which names the fields of this request."""
        turns = {str(i): turn for i, turn in enumerate(self.turns())}

        def renamed(text: str) -> str:
            # A name that the client sent may look like a field that is not there.
            text = _IN_MESSAGE.sub(lambda found: turns[found[1]].of(found[2]) if found[1] in turns else found[0], text)
            for pattern, own in self.own_names:
                text = re.sub(pattern, own, text)
            return text

        param, again = error.param and renamed(error.param), error.retry_after
        return ApiError(error.status, renamed(error.message), code=error.code, param=param, retry_after=again)


async def answered(models: Models, body: ChatForm, request: Request, answer: AnswerMaker) -> Response:
    """Answer a chat in another form; ApiError: what is wrong, with the names of the body's fields."""
    chat = body.chat()  # its errors are in the client's words already
    try:
        found = await models.of(body.model).chat(chat, request, answer)
    except ApiError as error:
        raise body.as_sent(error) from error
    if isinstance(found, EventStream):
        found.as_sent = body.as_sent
    return found


def function(name: str | None, description: str | None = None, parameters: Json | None = None) -> Json:
    """Write a function that the model may call, or its name alone, which is the one that it must call."""
    told = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}

"""Answers of /v1/responses, whole and as events, made of those of a chat."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from tilebeam.server.errors import ApiError
from tilebeam.server.models import Models
from tilebeam.server.response_requests import ResponsesRequest
from tilebeam.server.responses import Json, dumped
from tilebeam.server.service import EventStream, Service


def add_response_routes(app: FastAPI, models: Models) -> None:
    """Serve this path."""

    @app.post("/v1/responses", response_model=None)
    @app.post("/responses", response_model=None, include_in_schema=False)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a text or a conversation, in the form of OpenAI's Responses API."""
        chat = body.chat()
        service = models.of(body.model)
        try:
            answer = await service.chat(chat, request)
        except ApiError as error:
            raise body.as_sent(error) from error
        made = Answer(body, service)
        if isinstance(answer, EventStream):
            answer.told = body.as_sent
            return Events(answer, made)
        assert isinstance(answer, dict)
        (choice,) = answer["choices"]
        for _ in made.grow(choice | {"delta": _as_delta(choice["message"])}):
            pass
        made.close()
        return JSONResponse(made.body(answer["usage"]) | {"tilebeam": answer["tilebeam"]})


def _as_delta(message: Json) -> Json:
    calls = [call | {"index": i} for i, call in enumerate(message.get("tool_calls", ()))]
    return {"reasoning_content": message.get("reasoning_content"), "content": message["content"], "tool_calls": calls}


class Answer:
    """An answer that grows.

    Args:
        body: the request.
        service: whose defaults hold where the request says nothing.
    """

    def __init__(self, body: ResponsesRequest, service: Service) -> None:
        self._body = body
        default = service.settings.sampling
        self._temperature = default.temperature if body.temperature is None else body.temperature
        self._top_p = default.top_p if body.top_p is None else body.top_p
        self._model = service.told_name(body.model)
        self._id = f"resp_{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._output: list[Json] = []
        self._open = False  # whether the last item may grow
        self._status = "in_progress"

    def body(self, usage: Json | None = None) -> Json:
        """As far as it is."""
        body, cut = self._body, self._status == "incomplete"
        wanted = body.text.format if body.text is not None else None
        choice = body.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": self._output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._temperature,
            "text": {"format": wanted.model_dump(by_alias=True, exclude_unset=True) if wanted else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": self._top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "usage": None if usage is None else _usage(usage),
        }

    def grow(self, choice: Json) -> Iterator[Json]:
        """The events of a chat's chunk."""
        delta = choice["delta"]
        if delta.get("reasoning_content"):
            yield from self._thought(delta["reasoning_content"])
        if delta.get("content"):
            yield from self._text(delta["content"])
        for call in delta.get("tool_calls") or ():
            yield from self._call(call)
        if choice["finish_reason"] is not None:
            self._status = "incomplete" if choice["finish_reason"] == "length" else "completed"

    def close(self) -> list[Json]:
        """The events of its end."""
        return list(self._close_item())

    def _thought(self, text: str) -> Iterator[Json]:
        if not self._open or self._output[-1]["type"] != "reasoning":
            yield from self._close_item()
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": [], "content": [part]}
            yield self._begun(item | {"status": "in_progress"})
        self._output[-1]["content"][0]["text"] += text
        yield self._at("response.reasoning_text.delta", content_index=0, delta=text)

    def _text(self, text: str) -> Iterator[Json]:
        if not self._open or self._output[-1]["type"] != "message":
            yield from self._close_item()
            item = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
            yield self._begun(item | {"status": "in_progress", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._output[-1]["content"].append(part)
            yield self._at("response.content_part.added", content_index=0, part=dict(part))
        self._output[-1]["content"][0]["text"] += text
        yield self._at("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _call(self, call: Json) -> Iterator[Json]:
        function = call["function"]
        if "id" in call:
            yield from self._close_item()
            item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": call["id"]}
            yield self._begun(item | {"name": function["name"], "arguments": "", "status": "in_progress"})
        if function["arguments"]:
            self._output[-1]["arguments"] += function["arguments"]
            yield self._at("response.function_call_arguments.delta", delta=function["arguments"])

    def _begun(self, item: Json) -> Json:
        self._output.append(item)
        self._open = True
        return {"type": "response.output_item.added", "output_index": len(self._output) - 1, "item": deepcopy(item)}

    def _close_item(self) -> Iterator[Json]:
        if not self._open:
            return
        self._open = False
        item = self._output[-1]
        item["status"] = self._status if self._status == "incomplete" else "completed"
        if item["type"] == "message":
            part = item["content"][0]
            yield self._at("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
            yield self._at("response.content_part.done", content_index=0, part=part)
        elif item["type"] == "reasoning":
            yield self._at("response.reasoning_text.done", content_index=0, text=item["content"][0]["text"])
        else:
            yield self._at("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        yield {"type": "response.output_item.done", "output_index": len(self._output) - 1, "item": item}

    def _at(self, kind: str, **fields: Any) -> Json:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return {"type": kind} | place | fields


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


class Events(Response):
    """A chat's stream, told in the events of the Responses API.

    Args:
        chat: the stream.
        answer: what it makes up.
    """

    def __init__(self, chat: Response, answer: Answer) -> None:
        super().__init__(None)
        self._chat = chat
        self._answer = answer
        self._number = 0
        self._streams = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._streams = message["status"] == 200
                await send(message)
                if self._streams:
                    await send(self._message(self._begin()))
                return
            if not self._streams:
                await send(message)
                return
            events = [e for data in _data(message.get("body", b"")) for e in self._translated(data)]
            await send(self._message(events, message.get("more_body", False)))

        await self._chat(scope, receive, told)

    def _begin(self) -> list[Json]:
        body = self._answer.body()
        return [{"type": kind, "response": body} for kind in ("response.created", "response.in_progress")]

    def _translated(self, data: bytes) -> Iterator[Json]:
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            error = chunk["error"]
            yield {"type": "error"} | {key: error[key] for key in ("code", "message", "param")}
            return
        for choice in chunk["choices"]:
            yield from self._answer.grow(choice)
        if not chunk["choices"]:  # the last one, with the cost
            yield from self._answer.close()
            body = self._answer.body(chunk["usage"])
            yield {"type": f"response.{body['status']}", "response": body | {"tilebeam": chunk["tilebeam"]}}

    def _message(self, events: list[Json], more: bool = True) -> Message:
        body = b""
        for event in events:
            told = event | {"sequence_number": self._number}
            self._number += 1
            body += b"event: " + event["type"].encode() + b"\ndata: " + dumped(told) + b"\n\n"
        return {"type": "http.response.body", "body": body, "more_body": more}


def _data(body: bytes) -> list[bytes]:
    """The data of server-sent events, which come whole."""
    return [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part]

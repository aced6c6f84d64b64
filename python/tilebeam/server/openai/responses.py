"""/v1/responses: how answers are written, whole and as events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from tilebeam.chat.answer_parts import Part, Text
from tilebeam.outputs import ToolCallDelta
from tilebeam.sampling_params import SamplingParams
from tilebeam.server.answer_events import Ended, Event, Grown, Json, TokenBytes
from tilebeam.server.chat_forms import answered
from tilebeam.server.models import Models
from tilebeam.server.openai.response_requests import ResponsesRequest
from tilebeam.server.plan import AnswerPlan
from tilebeam.server.writing import Answer, extras, server_sent, usage_of


def add_response_routes(app: FastAPI, models: Models) -> None:
    """Serve this path."""

    @app.post("/v1/responses", response_model=None)
    @app.post("/responses", response_model=None, include_in_schema=False)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a text or a conversation, in the form of OpenAI's Responses API."""
        return await answered(models, body, request, partial(ResponsesAnswer, body, models.settings.sampling))


class ResponsesAnswer(Answer):
    """Writes items: messages, thoughts and calls.

    Args:
        body: the request.
        default: what holds where the request says nothing.
        plan: the chat that it asks for.
    """

    def __init__(
        self, body: ResponsesRequest, default: SamplingParams, plan: AnswerPlan, _spelling: TokenBytes
    ) -> None:
        self._body = body
        self._temperature = default.temperature if body.temperature is None else body.temperature
        self._top_p = default.top_p if body.top_p is None else body.top_p
        self._model = plan.model
        self._id = f"resp_{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._output: list[Json] = []
        self._open = False  # whether the last item may grow
        self._status = "in_progress"
        self._number = 0  # events so far

    def whole(self, events: Iterable[Event]) -> Json:
        """Return the JSON of all items."""
        *_, last = (told for event in events for told in self._told(event))
        response: Json = last["response"]
        return response

    def begin(self) -> bytes:
        """Return the events before the first item."""
        body = self._response()
        kinds = ("response.created", "response.in_progress")
        return self._written({"type": kind, "response": body} for kind in kinds)

    def add(self, event: Event) -> bytes:
        """Return the events of the Responses API that an event adds."""
        return self._written(self._told(event))

    def _written(self, events: Iterable[Json]) -> bytes:
        text = b""
        for event in events:
            told = event | {"sequence_number": self._number}
            self._number += 1
            text += server_sent(told, event["type"])
        return text

    def _told(self, event: Event) -> Iterator[Json]:
        """Yield what an event adds."""
        if isinstance(event, Grown):
            for part in event.parts:
                yield from self._grown(part)
            if event.finish is not None:
                self._status = "incomplete" if event.finish == "length" else "completed"
        elif isinstance(event, Ended):
            yield from self._close_item()
            body = self._response(event)
            yield {"type": f"response.{self._status}", "response": body | {"tilebeam": extras(event)}}

    def _response(self, ended: Ended | None = None) -> Json:
        """Write it as far as it is."""
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
            "usage": None if ended is None else _usage(ended),
        }

    def _grown(self, part: Part) -> Iterator[Json]:
        if isinstance(part, ToolCallDelta):
            if part.name is not None:
                yield from self._begin("fc", "function_call", call_id=part.id, name=part.name, arguments="")
            if part.arguments:
                self._output[-1]["arguments"] += part.arguments
                yield self._at("response.function_call_arguments.delta", delta=part.arguments)
            return
        grows = self._output[-1]["type"] if self._open else ""
        if isinstance(part, Text):
            if grows != "message":
                yield from self._begin("msg", "message", role="assistant", content=[])
                piece = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                self._output[-1]["content"].append(piece)
                yield self._at("response.content_part.added", content_index=0, part=dict(piece))
            told = self._at("response.output_text.delta", content_index=0, delta=part.text, logprobs=[])
        else:
            if grows != "reasoning":
                yield from self._begin("rs", "reasoning", summary=[], content=[{"type": "reasoning_text", "text": ""}])
            told = self._at("response.reasoning_text.delta", content_index=0, delta=part.text)
        self._output[-1]["content"][0]["text"] += part.text
        yield told

    def _begin(self, prefix: str, kind: str, **fields: Any) -> Iterator[Json]:
        yield from self._close_item()
        self._open = True
        item = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", **fields}
        self._output.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self._output) - 1, "item": deepcopy(item)}

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


def _usage(ended: Ended) -> Json:
    told = usage_of(ended)
    return {
        "input_tokens": told["prompt_tokens"],
        "input_tokens_details": told["prompt_tokens_details"],
        "output_tokens": told["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": ended.reasoning_tokens},
        "total_tokens": told["total_tokens"],
    }

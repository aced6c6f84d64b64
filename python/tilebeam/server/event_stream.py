"""A streamed answer: server-sent events, ended when the client goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tilebeam.server.admission import ClientGone, Gate, Job
from tilebeam.server.answer_events import Event
from tilebeam.server.errors import ApiError, from_exception
from tilebeam.server.logs import note
from tilebeam.server.model_host import LoadedModel
from tilebeam.server.plan import AnswerPlan
from tilebeam.server.writing import Answer, last_event

WithModel = Callable[[Job, Callable[[LoadedModel], Coroutine[Any, Any, None]], bool], Coroutine[Any, Any, None]]
Events = Callable[[LoadedModel, AnswerPlan, float], AsyncGenerator[list[Event]]]

# A client that does not take what is sent to it for so long counts as gone.
_READ_SECONDS = 60.0


class EventStream(Response):
    """Answers one request with the events that come of it.

    Errors before the first event are ordinary answers; later ones are an event of their own.

    Args:
        gate: lets requests in.
        plan: the request.
        with_model: runs work with the model.
        events: of the answer, of the model and when the request came, by `time.monotonic`.

    Attributes:
        as_sent: how an error is put for this client.
    """

    def __init__(self, gate: Gate, plan: AnswerPlan, with_model: WithModel, events: Events) -> None:
        super().__init__(None)
        self._gate = gate
        self._plan = plan
        self._with_model = with_model
        self._events = events
        self._began = time.monotonic()
        self._answer: Answer | None = None  # from the first event on
        self._sending: float | None = None  # since when
        self._count = 0  # events so far
        self.as_sent: Callable[[ApiError], ApiError] = lambda error: error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        plan = self._plan
        try:
            with self._gate.enter(plan.samples) as job:
                watcher = asyncio.create_task(self._watch(job))
                try:
                    work = self._with_model(job, lambda loaded: self._send(loaded, send), plan.body.restricted)
                    await job.run(work, receive)
                finally:
                    watcher.cancel()
        except ClientGone:
            note(status=499)
        except Exception as found:
            error, foreseen = self.as_sent(from_exception(found)), isinstance(found, ApiError)
            if self._answer is not None:
                error.note()
                body = last_event(error, scope.get("path", ""), self._count)
                await send({"type": "http.response.body", "body": body, "more_body": False})
            elif foreseen:
                await error.response(scope.get("path", ""))(scope, receive, send)
            if not foreseen:
                raise  # the traceback goes to the log

    async def _watch(self, job: Job) -> None:
        """End the job if its client takes nothing of what is sent."""
        while True:
            await asyncio.sleep(_READ_SECONDS / 4)
            if self._sending is not None and time.monotonic() - self._sending > _READ_SECONDS:
                job.stop(ClientGone())

    async def _begin(self, answer: Answer, send: Send) -> None:
        """Send what goes before all events."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers.append((b"x-accel-buffering", b"no"))  # nginx would hold events back
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._answer = answer
        await self._put(answer.begin(), send)

    async def _put(self, text: bytes, send: Send) -> None:
        """Send events, while `_watch` sees whether the client takes them."""
        if text:
            self._count += text.count(b"\n\n")
            self._sending = time.monotonic()
            await send({"type": "http.response.body", "body": text, "more_body": True})
            self._sending = None

    async def _send(self, loaded: LoadedModel, send: Send) -> None:
        """Send what comes."""
        found = self._events(loaded, self._plan, self._began)
        answer = self._plan.answer(self._plan, loaded.lm.spelling)
        async with aclosing(found):
            async for events in found:
                if self._answer is None:
                    await self._begin(answer, send)
                await self._put(b"".join(map(answer.add, events)), send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

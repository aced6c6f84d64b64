"""What stands before the replicas: it checks who asks, sends each request to one replica, and hands the answer back.

A replica that dies costs the requests that it was answering an error, in the form that their clients read. All other
requests go to the others.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tilebeam.server.app import add_access_rules, add_error_handlers
from tilebeam.server.errors import ApiError, unavailable
from tilebeam.server.replicas.routing import Ticket, ticket_for
from tilebeam.server.settings import Settings
from tilebeam.server.writing import last_event

log = logging.getLogger("tilebeam.server")

# Seconds that a replica has to tell how it is.
_PATIENCE = 5.0
# What an answer is that begins before its end is known.
_STREAMED = (b"text/event-stream", b"application/x-ndjson")
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")


class RemoteAnswer(Protocol):
    """An answer that comes from another process."""

    def __aiter__(self) -> AsyncIterator[list[Message]]: ...

    def cancel(self) -> None:
        """End it: the client has left, and nobody wants it any longer."""


class Replicas(Protocol):
    """The processes that answer."""

    lost: tuple[type[Exception], ...]  # what tells that a process died

    def ask(self, ticket: Ticket, scope: dict[str, Any], body: bytes) -> RemoteAnswer:
        """Have one of them answer; the ticket then says which."""

    async def all(self, method: str, patience: float) -> dict[str, Any]:
        """Return what a method of each returns, by its name; without those that do not answer in so many seconds."""


def create_ingress(replicas: Replicas, settings: Settings) -> FastAPI:
    """Return an ASGI application that has replicas answer.

    Args:
        replicas: the processes.
        settings: who may ask, and how much may be sent.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    @app.get("/v1/health")
    @app.head("/health")
    @app.head("/v1/health")
    async def health() -> JSONResponse:
        """Return 200 while a replica answers."""
        told = await replicas.all("health", _PATIENCE)
        status = min((status for status, _ in told.values()), default=503)
        bodies = {name: body for name, (_, body) in sorted(told.items())}
        return JSONResponse({"status": "ok" if status == 200 else "unavailable", "replicas": bodies}, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the figures of all replicas, each with the label `replica`."""
        return Response(merged_metrics(await replicas.all("metrics", _PATIENCE)), media_type=CONTENT_TYPE_LATEST)

    app.router.add_route("/{path:path}", Relay(replicas), methods=None)  # type: ignore[arg-type]
    add_error_handlers(app)
    add_access_rules(app, settings)
    return app


class Relay:
    """An ASGI application: sends a request to a replica and its answer back."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        body = await Request(scope, receive).body()
        ticket = ticket_for(body)
        answer = self._replicas.ask(ticket, {name: scope[name] for name in _SCOPE if name in scope}, body)
        sending = asyncio.create_task(self._send(answer, _Reply(ticket, scope["path"], send)))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            answer.cancel()  # does nothing to one that is complete
            ticket.close()
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, answer: RemoteAnswer, reply: _Reply) -> None:
        try:
            async for messages in answer:
                for message in messages:
                    await reply.put(message)
        except self._replicas.lost as error:
            log.warning("replica %s is lost: %s", reply.replica, error)
            await reply.fail(
                unavailable(
                    "The replica that was answering this request died. Send it again: others answer.",
                    code="replica_lost",
                    retry_after=1,
                )
            )
        if not reply.complete:
            await reply.fail(
                ApiError(500, "The answer ended early; the replica's log has more.", code="internal_error")
            )


class _Reply:
    """What goes to the client. Only streams begin before their end is known: any other answer can still become an
    error."""

    def __init__(self, ticket: Ticket, path: str, send: Send) -> None:
        self._ticket = ticket
        self._path = path
        self._send = send
        self._held: list[Message] = []
        self._streams = False
        self._events = 0
        self.complete = False

    @property
    def replica(self) -> str:
        """The replica's name."""
        return str(self._ticket.replica)

    async def put(self, message: Message) -> None:
        """Send a message of the answer, or keep it until the answer is complete."""
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (b"x-tilebeam-replica", self.replica.encode())]
            message = {**message, "headers": headers}
            self._streams = any(k == b"content-type" and v.startswith(_STREAMED) for k, v in headers)
        else:
            self._events += message.get("body", b"").count(b"\n\n")
            self.complete = not message.get("more_body", False)
        self._held.append(message)
        if self._streams or self.complete:
            for held in self._held:
                await self._send(held)
            self._held = []

    async def fail(self, error: ApiError) -> None:
        """End the answer with an error."""
        if self.complete:
            return
        self.complete = True
        if self._streams:
            await self._send(
                {"type": "http.response.body", "body": last_event(error, self._path, self._events), "more_body": False}
            )
            return
        answer = error.response(self._path)
        await self._send({"type": "http.response.start", "status": error.status, "headers": answer.raw_headers})
        await self._send({"type": "http.response.body", "body": answer.body})


async def _left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (.+)$")


def merged_metrics(told: dict[str, bytes]) -> str:
    """Return several processes' figures in Prometheus' text format as one text, each with the label `replica`.

    Args:
        told: by the process's name what it tells.
    """
    families: dict[str, list[str]] = {}  # by name; first its HELP and TYPE
    for replica, text in sorted(told.items()):
        name = ""
        for line in text.decode().splitlines():
            if line.startswith("# "):
                name = line.split(" ", 3)[2]
                family = families.setdefault(name, [])
                if line not in family:
                    family.append(line)
            elif found := _SAMPLE.match(line):
                labels = ",".join(filter(None, (f'replica="{replica}"', found[2])))
                families[name].append(f"{found[1]}{{{labels}}} {found[3]}")
    return "".join(f"{line}\n" for line in _flat(families.values()))


def _flat(families: Iterable[list[str]]) -> list[str]:
    return [line for family in families for line in family]

"""What stands before the replicas: it checks who asks, sends each request to one replica, and hands the answer back.

A replica that dies costs the requests that it was answering an error, in the form that their clients read. All other
requests go to the others.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from tilebeam.server.admission import ClientGone, Job
from tilebeam.server.app import add_access_rules, add_error_handlers
from tilebeam.server.errors import ApiError, unavailable
from tilebeam.server.replicas.routing import Ticket, ticket_for
from tilebeam.server.settings import Settings
from tilebeam.server.writing import last_event

log = logging.getLogger("tilebeam.server")

# Has a replica answer, of a ticket that then says which, a scope and a body: its ASGI messages, in lists of those that
# came together. Closing it ends the request. `ReplicaLost`: the process died.
Ask = Callable[[Ticket, dict[str, Any], bytes], AsyncGenerator[list[Message]]]
# Returns each replica's /health, status and body, by its name; without those that do not answer soon.
AskAll = Callable[[], Awaitable[dict[str, tuple[int, dict[str, Any]]]]]

_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")


class ReplicaLost(Exception):
    """The process that was answering died."""


def create_ingress(ask: Ask, ask_all: AskAll, settings: Settings) -> FastAPI:
    """Return an ASGI application that has replicas answer.

    Args:
        ask, ask_all: of the replicas.
        settings: who may ask, and how much may be sent.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.api_route("/health", methods=["GET", "HEAD"])
    @app.api_route("/v1/health", methods=["GET", "HEAD"])
    async def health() -> JSONResponse:
        """Return 200 while a replica answers."""
        told = await ask_all()
        status = min((status for status, _ in told.values()), default=503)
        bodies = {name: body for name, (_, body) in sorted(told.items())}
        return JSONResponse({"status": "ok" if status == 200 else "unavailable", "replicas": bodies}, status)

    @app.get("/metrics")
    async def metrics() -> None:
        """Refuse: one replica's figures would be taken for all."""
        raise ApiError(404, "Replicas have no figures in common; /health tells what each is doing.")

    async def relay(scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        ticket = ticket_for(body)
        asked = {name: scope[name] for name in _SCOPE if name in scope}

        async def answer() -> None:
            async with aclosing(ask(ticket, asked, body)) as found:
                await _hand_back(found, ticket, scope, receive, send)

        try:
            with suppress(ClientGone):
                await Job(ticket.samples).run(answer(), receive)
        finally:
            ticket.close()

    app.mount("/", relay)
    add_error_handlers(app)
    add_access_rules(app, settings)
    return app


async def _hand_back(
    found: AsyncGenerator[list[Message]], ticket: Ticket, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send what comes. Only streams begin before their end is known: any other answer can still become an error."""
    held: list[Message] = []
    streams = complete = False
    events = 0
    error = ApiError(500, "The answer ended early; the replica's log has more.", code="internal_error")
    try:
        async for messages in found:
            for message in messages:
                if message["type"] == "http.response.start":
                    streams = any(k == b"content-type" and v[:10] == b"text/event" for k, v in message["headers"])
                    message["headers"] += [(b"x-tilebeam-replica", str(ticket.replica).encode())]
                else:
                    events += message.get("body", b"").count(b"\n\n")
                    complete = not message.get("more_body", False)
                held.append(message)
            while held and (streams or complete):
                await send(held.pop(0))
    except ReplicaLost as lost:
        log.warning("replica %s is lost: %s", ticket.replica, lost)
        said = "The replica that was answering this request died. Send it again: others answer."
        error = unavailable(said, code="replica_lost", retry_after=1)
    if complete:
        return
    if streams:
        body = last_event(error, scope["path"], events)
        await send({"type": "http.response.body", "body": body, "more_body": False})
    else:
        await error.response(scope["path"])(scope, receive, send)

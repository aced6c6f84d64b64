"""One of several processes that serve the same model: the whole application, asked by another process (`ingress`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp, Message

from tilebeam.ray_cluster import Place
from tilebeam.server.app import create_app
from tilebeam.server.model_host import decoding_first
from tilebeam.server.replicas.routing import Ticket
from tilebeam.server.served_model import ServedModel, models_of
from tilebeam.server.settings import Settings

log = logging.getLogger("tilebeam.server")

# Messages of an answer that wait for the other process; the application then waits, too.
_WAITING = 256


class Replica:
    """The application with models of its own.

    Args:
        served: the models.
        settings: how to serve; who may ask is not looked at again.
        place: where to find the files.

    Raises:
        TilebeamError: the model cannot be loaded.
    """

    def __init__(self, served: Sequence[ServedModel], settings: Settings, place: Place) -> None:
        place.enter()
        # The host of a server that anybody may reach: the names of hosts were checked.
        settings = replace(settings, api_keys=(), cors_origins=(), host="0.0.0.0")
        self._models, _ = models_of(served, settings)
        self._app: ASGIApp = create_app(self._models)
        self._counts_idle_seconds = False
        self._running: set[asyncio.Task[None]] = set()
        decoding_first()

    async def answer(self, ticket: Ticket, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Yield the application's answer: its ASGI messages, those that are there together in one list.

        Args:
            ticket: what the request was sent here for.
            scope: of the request.
            body: all of it.
        """
        del ticket
        exchange = _Exchange(body)
        task = asyncio.create_task(self._run(scope, exchange))
        self._running.add(task)  # it ends by itself, also after its client has left
        task.add_done_callback(self._running.discard)
        try:
            async for messages in exchange.sent():
                yield messages
        finally:
            exchange.leave()

    async def health(self) -> tuple[int, dict[str, Any]]:
        """Return HTTP status and body of /health."""
        return self._models.health()

    async def metrics(self) -> bytes:
        """Return what /metrics tells."""
        return self._models.metrics.text()

    async def drain(self, seconds: float) -> None:
        """Take no new requests, and wait until the others are done; after so many seconds they are stopped."""
        self._models.shut()
        await self._models.drain(seconds)

    async def check_health(self) -> None:
        """Answer Ray now and then. RuntimeError: this replica cannot go on, and another must take its place."""
        if not self._counts_idle_seconds:
            self._counts_idle_seconds = True
            self._models.start()
        hosts = [service.host for service in self._models.services]
        for host in hosts:
            host.look()
        if all(host.state == "failed" for host in hosts):
            raise RuntimeError(hosts[0].reason)

    async def close(self) -> None:
        """Free the models."""
        await self._models.close()

    async def _run(self, scope: MutableMapping[str, Any], exchange: _Exchange) -> None:
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
        finally:
            exchange.end()


class _Exchange:
    """The two sides of one request: the application's `receive` and `send`, and what it sent."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._gone = asyncio.Event()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._taken = asyncio.Event()

    async def receive(self) -> Message:
        """Return the body, and after it that the client has left, once it has."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Hand a message on; waits while too many have not been taken."""
        while self._messages.qsize() >= _WAITING and not self._gone.is_set():
            self._taken.clear()
            await self._taken.wait()
        if not self._gone.is_set():
            self._messages.put_nowait(message)

    async def sent(self) -> AsyncIterator[list[Message]]:
        """Yield what is sent until `end`."""
        ended = False
        while not ended and (message := await self._messages.get()) is not None:
            messages = [message]
            while not ended and not self._messages.empty():
                more = self._messages.get_nowait()
                if more is None:
                    ended = True
                else:
                    messages.append(more)
            self._taken.set()
            yield messages
            if messages[-1]["type"] == "http.response.body" and not messages[-1].get("more_body", False):
                return

    def end(self) -> None:
        """Note that the application is done."""
        self._messages.put_nowait(None)

    def leave(self) -> None:
        """Note that the client has left, or has all of its answer."""
        self._gone.set()
        self._taken.set()

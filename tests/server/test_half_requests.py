"""Clients that send half a request and wait: they are told, and their connections do not stay."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from tilebeam import LM

pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

import uvicorn
from server_kit import PATIENCE, PROMPT, Running, running, until
from tilebeam.server import connections, security
from uvicorn.server import ServerState

BODY = json.dumps({"prompt": PROMPT, "max_tokens": 3}).encode()
ANSWER = 32 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def hasty(lm: LM) -> Iterator[Running]:
    """A server that waits half a second where others wait half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "HEAD_SECONDS", 0.5)
        patch.setattr(security, "_BODY_SECONDS", 0.5)
        patch.setattr(security, "_SLOWEST_BODY", 1 << 40)
        with running(lm, max_body=1 << 22) as server:
            yield server


class Client:
    """A socket, by hand."""

    def __init__(self, url: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), PATIENCE)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def one(self) -> bytes:
        """The next answer."""
        found = b""
        while b"\r\n\r\n" not in found:
            found += self._socket.recv(1 << 16)
        head, _, body = found.partition(b"\r\n\r\n")
        size = int(re.findall(rb"content-length: (\d+)", head)[0])
        while len(body) < size:
            body += self._socket.recv(size - len(body))
        return head + body

    def rest(self, pause: float = 0) -> bytes:
        """All that comes until the server closes the connection, with a pause behind each piece."""
        with self._socket:
            found = bytearray()
            while data := self._socket.recv(1 << 16):
                found += data
                time.sleep(pause)
            return bytes(found)


@pytest.mark.parametrize("sent", [b"POST /v1/compl", HEAD, HEAD + b"content-length: 10\r\nx-half"])
def test_half_a_head(hasty: Running, sent: bytes) -> None:
    client = Client(hasty.url)
    client.send(sent)
    answer = client.rest()
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"connection: close" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("sent", [b"", b"{", BODY[:-2]])
def test_half_a_body(hasty: Running, sent: bytes) -> None:
    client = Client(hasty.url)
    client.send(HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + sent)
    answer = client.rest()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer.lower()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_a_silent_connection_is_closed_without_a_word(hasty: Running) -> None:
    assert Client(hasty.url).rest() == b""


def test_a_head_without_end(hasty: Running) -> None:
    client = Client(hasty.url)
    client.send(HEAD + b"x-long: " + b"a" * (connections.MAX_HEAD + 1))
    assert client.rest().startswith(b"HTTP/1.1 431 ")


def test_a_second_request_on_a_connection_has_its_own_deadline(hasty: Running) -> None:
    whole = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    client = Client(hasty.url)
    for _ in range(2):
        client.send(whole)
        assert client.one().startswith(b"HTTP/1.1 200 OK")
    client.send(HEAD)
    assert client.rest().startswith(b"HTTP/1.1 408 ")


@pytest.fixture(scope="module")
def generous() -> Iterator[tuple[str, list[Exception | None]]]:
    """Where 32 MiB are answered to whatever comes, and connections that were lost."""
    lost: list[Exception | None] = []

    class Noted(connections.Connection):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.append(exc)

    async def answer(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * ANSWER})

    server = uvicorn.Server(uvicorn.Config(answer, port=0, http=Noted, lifespan="off", log_level="error"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "STALL_SECONDS", 2.0)
        thread = threading.Thread(target=server.run)
        thread.start()
        until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", lost
        server.should_exit = True
        thread.join(PATIENCE)


@pytest.mark.parametrize("ending", [b"", b"connection: close\r\n"])
def test_a_client_that_takes_nothing_is_cut_off(generous: tuple[str, list[Exception | None]], ending: bytes) -> None:
    url, lost = generous
    before = len(lost)
    client = Client(url)
    client.send(b"GET / HTTP/1.1\r\nhost: localhost\r\n" + ending + b"\r\n")
    until(lambda: len(lost) > before)
    with suppress(ConnectionResetError):
        assert len(client.rest()) < ANSWER


class Waiting(asyncio.Transport):
    """A transport whose client has not taken some bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent = 0
        self.ended = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.ended.set()

    def close(self) -> None:
        """Waits for the client."""


@pytest.mark.parametrize("complete", [True, False])
def test_a_client_that_leaves_the_last_bytes_is_cut_off(monkeypatch: pytest.MonkeyPatch, complete: bool) -> None:
    """The end of an answer may be too little to keep the application from writing, and still wait for ever. While an
    answer goes on, what waits may grow although the client takes it."""

    async def talk() -> bool:
        config = uvicorn.Config(lambda *_: None, lifespan="off")
        config.load()
        protocol, transport = connections.Connection(config, ServerState(), {}), Waiting()
        protocol.connection_made(transport)
        transport.unsent = 100_000
        protocol.pause_writing()
        protocol.cycle = SimpleNamespace(response_complete=complete, message_event=asyncio.Event(), disconnected=False)  # type: ignore[assignment]
        transport.unsent = 10_000
        protocol.resume_writing()
        try:
            await asyncio.wait_for(transport.ended.wait(), 10 if complete else 0.5)
        except TimeoutError:
            return False
        finally:
            protocol.connection_lost(None)
        return True

    monkeypatch.setattr(connections, "STALL_SECONDS", 0.08)
    assert asyncio.run(talk()) == complete


def test_a_slow_client_gets_all(generous: tuple[str, list[Exception | None]]) -> None:
    client = Client(generous[0])
    client.send(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert len(client.rest(pause=0.001)) > ANSWER


def test_a_body_that_is_refused_may_be_sent_to_its_end(hasty: Running) -> None:
    """A client that reads its answer only when it has sent everything gets one."""
    size = (1 << 22) + 1
    client = Client(hasty.url)
    client.send(HEAD + b"content-length: %d\r\n\r\n" % size + b"x" * size)
    assert client.rest().startswith(b"HTTP/1.1 413 ")

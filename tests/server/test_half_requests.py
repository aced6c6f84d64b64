"""Clients that send half a body and wait: they are told, and their connections do not stay."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from server_kit import PATIENCE, PROMPT, Running, running
from tilebeam import LM
from tilebeam.server import security

BODY = json.dumps({"prompt": PROMPT, "max_tokens": 3}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def hasty(lm: LM) -> Iterator[Running]:
    """A server that waits half a second where others wait half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(security, "_BODY_SECONDS", 0.5)
        patch.setattr(security, "_SLOWEST_BODY", 1 << 40)
        with running(lm, max_body=1 << 22) as server:
            yield server


def connected(url: str, data: bytes) -> socket.socket:
    """A connection over which this was sent."""
    client = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), PATIENCE)
    client.sendall(data)
    return client


@pytest.mark.parametrize("sent", [b"", b"{", BODY[:-2]])
def test_half_a_body(hasty: Running, sent: bytes) -> None:
    with connected(hasty.url, HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + sent) as client:
        answer = b"".join(iter(lambda: client.recv(1 << 16), b""))  # until the server closes it
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer.lower()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_a_body_that_is_refused_may_be_sent_to_its_end(hasty: Running) -> None:
    """A client that reads its answer only when it has sent everything gets one."""
    size = (1 << 22) + 1
    with connected(hasty.url, HEAD + b"content-length: %d\r\n\r\n" % size + b"x" * size) as client:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413 ")

"""Servers in processes of their own, and many clients of OpenAI's API at once: Tilebeam's and others'."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_START = 300  # seconds that a server has to load its model


@dataclass
class Load:
    """What is asked, by client.

    Attributes:
        requests: each client's, prompt (token ids) and tokens of its answer.
    """

    requests: Sequence[Sequence[tuple[list[int], int]]]

    @property
    def tokens(self) -> int:
        return sum(n for asked in self.requests for _, n in asked)


class Served(NamedTuple):
    """A server's process."""

    port: int
    pid: int


@dataclass
class Answers:
    """What came back.

    Attributes:
        seconds: of each request.
        failures: what was wrong, one line each.
    """

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@contextmanager
def server(command: Sequence[str] | Callable[[int], Sequence[str]], health: str = "/health") -> Iterator[Served]:
    """Run a server as a process of its own.

    Args:
        command: gets `--port`; or a function that makes it of a port.
        health: the path that answers with 200 once the model is loaded.

    Raises:
        RuntimeError: it ended, or did not answer for five minutes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = command(port) if callable(command) else [*command, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(words, stdout=said, stderr=said, env=os.environ)
        try:
            deadline = time.monotonic() + _START
            while not _healthy(port, health):
                if process.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    raise RuntimeError(f"{words[0]} did not start: {' '.join(said.read().split()[-60:])}")
                time.sleep(0.1)
            yield Served(port, process.pid)
        finally:
            process.terminate()
            process.wait(60)


def _healthy(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


async def post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: Mapping[str, Any]
) -> tuple[bool, bytes]:
    """One request over an open connection: whether the status is 200, and the answer's body.

    HTTP by hand: a client library would take more CPU than the server's own HTTP, on the CPUs that both share.
    """
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = re.search(r"content-length: (\d+)", answer)
    if length:
        text = await reader.readexactly(int(length[1]))
    else:
        text = b""
        while (size := int(await reader.readuntil(b"\r\n"), 16)) > 0:
            text += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    return " 200 " in answer.split("\r\n")[0], text


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> str | None:
    """One completion. None, or what was wrong."""
    fine, text = await post(reader, writer, "/v1/completions", body)
    if not fine:
        return text.decode(errors="replace")
    if body["stream"]:
        events = text.split(b"\n\n")
        if b"[DONE]" not in events[-2]:
            return "the stream was cut"
        usage = json.loads(events[-3].removeprefix(b"data: "))["usage"]
    else:
        usage = json.loads(text)["usage"]
    got, wanted = usage["completion_tokens"], body["max_tokens"]
    return None if got == wanted else f"{got} tokens instead of {wanted}"


# What makes a text as long as it is asked to be, for servers that know llama-server's field.
IGNORE_EOS: Mapping[str, Any] = {"ignore_eos": True}


async def ask_all(
    port: int,
    load: Load,
    stream: bool,
    answers: Answers,
    until: float = 0.0,
    fields: Mapping[str, Any] = IGNORE_EOS,
) -> None:
    """Every client's requests, one after the other; all clients at once.

    Args:
        until: a time of time.monotonic() up to which the clients begin anew with their requests.
        fields: of every request.
    """

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        asked = load.requests[number]
        for i in itertools.count():
            if i >= len(asked) and time.monotonic() >= until:
                break
            prompt, n = asked[i % len(asked)]
            body = {"prompt": prompt, "max_tokens": n, "seed": 1000 * number + i, "stream": stream}
            body |= dict(fields) | ({"stream_options": {"include_usage": True}} if stream else {})
            began = time.perf_counter()
            try:
                wrong = await _ask(reader, writer, body)
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                wrong = f"{type(error).__name__}: {error}"
            answers.seconds.append(time.perf_counter() - began)
            if wrong:
                answers.failures.append(wrong)
        writer.close()

    await asyncio.gather(*(client(i) for i in range(len(load.requests))))

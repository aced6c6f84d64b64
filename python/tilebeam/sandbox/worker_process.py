"""A process beside this one that answers requests: started when it is first asked, again when it was lost, given up
when it does not answer in time."""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.native.fork_locks import free_in_children

_START_SECONDS = 120.0  # large libraries are imported; on a busy machine that takes a while


class WorkerProcess:
    """A module of Tilebeam run as a program: its stdin is a socket that requests come through, and its first line of
    JSON on stdout says that it is ready.

    May be used from any thread.

    Args:
        module: what is run with -m, and its arguments.
        purpose: what it is for, for errors: "The process for ... did not start".
        environment: its variables; None: this process's.
        longest: bytes of a reply.
    """

    def __init__(
        self,
        module: Sequence[str],
        purpose: str,
        environment: Mapping[str, str] | None = None,
        *,
        longest: int = 1 << 20,
    ) -> None:
        self._module = tuple(module)
        self._purpose = purpose
        self._environment = environment
        self._longest = longest
        self._lock = free_in_children()
        self.process: subprocess.Popen[bytes] | None = None  # the last; None: none was started, or it was given up
        self._requests: socket.socket | None = None
        self._greeting: dict[str, Any] = {}
        self._owner = 0  # a fork has the pipes, but they are its parent's
        atexit.register(self.close)

    def ask(self, request: bytes, seconds: float) -> dict[str, Any] | None:
        """Return the reply, a line of JSON; None if there was none in time, and then the process is gone. Requests wait
        for each other.

        Raises:
            TilebeamError: the process does not start.
        """
        with self._lock:
            return self._reply(*self._running(), request, seconds)

    def send(self, request: bytes, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
        """Send a request that brings the descriptors along on which it is answered, and return the process that has it.

        Raises:
            TilebeamError: the process does not start.
        """
        with self._lock:
            for _ in range(2):
                process, requests = self._running()
                try:
                    socket.send_fds(requests, [request], descriptors)
                    return process
                except OSError:  # it died meanwhile
                    self._end()
            raise TilebeamError(f"The process for {self._purpose} ends as soon as it is started.")

    def greeting(self) -> dict[str, Any]:
        """Return what the process said first.

        Raises:
            TilebeamError: it does not start.
        """
        with self._lock:
            self._running()
            return self._greeting

    def close(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            if self._owner == os.getpid():
                self._end()

    def _running(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        process, requests = self.process, self._requests
        if process is None or requests is None or self._owner != os.getpid() or process.poll() is not None:
            return self._start()
        return process, requests

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        environment = os.environ if self._environment is None else self._environment
        if self._requests is not None:
            self._requests.close()
        self._requests, stdin = socket.socketpair()
        with stdin:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self._module],
                stdin=stdin.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is the asker's business
            )
        self._owner = os.getpid()
        running = self.process, self._requests
        greeting = self._reply(*running, b"", _START_SECONDS)
        if greeting is None:
            raise TilebeamError(
                f"The process for {self._purpose} did not start: try python -m {' '.join(self._module)}."
            )
        self._greeting = greeting
        return running

    def _reply(
        self, process: subprocess.Popen[bytes], requests: socket.socket, request: bytes, seconds: float
    ) -> dict[str, Any] | None:
        """Send a request and read the process's next line; None if it says nothing in time, too much, or never will.
        Then the process is ended, and also where this is interrupted: the late line would pass for the next reply."""
        assert process.stdout is not None
        until = time.monotonic() + seconds
        got = bytearray()
        try:
            pipe = process.stdout.fileno()
            poll = select.poll()  # unlike select.select, it takes any file descriptor
            poll.register(pipe, select.POLLIN)
            requests.sendall(request)
            while not got.endswith(b"\n"):
                left = until - time.monotonic()
                if left <= 0 or len(got) > self._longest or not poll.poll(left * 1000):
                    return None
                if not (piece := os.read(pipe, 65536)):
                    return None
                got += piece
        except OSError:  # it died meanwhile
            return None
        finally:
            if not got.endswith(b"\n"):
                self._end()
        reply: dict[str, Any] = json.loads(got)
        return reply

    def _end(self) -> None:
        process, self.process = self.process, None
        requests, self._requests = self._requests, None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if requests is not None:
            requests.close()

"""A process beside this one that answers requests: started when it is first asked, again when it was lost, given up
when it does not answer in time."""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.native.fork_locks import free_in_children

_START_SECONDS = 120.0  # large libraries are imported; on a busy machine that takes a while


class WorkerProcess:
    """A module of Tilebeam run as a program: requests in on its stdin, a line of JSON out for each.

    May be used from any thread; requests wait for each other. Its first line says that it is ready.

    Args:
        module: what is run with -m.
        purpose: what it is for, for errors: "The process for ... did not start".
        environment: its variables; None: this process's.
    """

    def __init__(self, module: str, purpose: str, environment: Mapping[str, str] | None = None) -> None:
        self._module = module
        self._purpose = purpose
        self._environment = environment
        self._lock = free_in_children()
        self._process: subprocess.Popen[bytes] | None = None
        self._greeting: dict[str, Any] = {}
        self._owner = 0  # a fork has the pipes, but they are its parent's
        atexit.register(self.close)

    def ask(self, request: bytes, seconds: float) -> dict[str, Any] | None:
        """The reply; None if there was none in time, and then the process is gone.

        Raises:
            TilebeamError: the process does not start.
        """
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            try:
                process.stdin.write(request)
                process.stdin.flush()
                line = self._line(seconds)
            except OSError:  # it died meanwhile
                line = None
            except BaseException:  # interrupted: the late reply would pass for the next request's
                self._end()
                raise
            if line is None:
                self._end()
                return None
            reply: dict[str, Any] = json.loads(line)
            return reply

    def greeting(self) -> dict[str, Any]:
        """What the process said first.

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

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        return self._process

    def _start(self) -> None:
        environment = os.environ if self._environment is None else self._environment
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is the asker's business
        )
        self._owner = os.getpid()
        try:
            line = self._line(_START_SECONDS)
        except BaseException:
            self._end()
            raise
        if line is None:
            self._end()
            raise TilebeamError(f"The process for {self._purpose} did not start: try python -m {self._module}.")
        self._greeting = json.loads(line)

    def _line(self, seconds: float) -> bytes | None:
        """What the process says next; None if it says nothing in time, or never will."""
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        poll = select.poll()  # unlike select.select, it takes any file descriptor
        poll.register(pipe, select.POLLIN)
        until = time.monotonic() + seconds
        got = b""
        while not got.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return None
            piece = os.read(pipe, 65536)
            if not piece:
                return None
            got += piece
        return got

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except OSError:  # what was not written any more
                    continue

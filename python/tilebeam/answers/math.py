"""Mathematical answers, found and compared by the math-verify library (the extra "math")."""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from functools import lru_cache
from importlib.util import find_spec

from tilebeam.answers.extract import boxed
from tilebeam.answers.normalize import plain_math
from tilebeam.errors import TilebeamError

_START_SECONDS = 120.0  # sympy is imported; on a busy machine that takes a while


class MathAnswer:
    r"""Finds mathematical answers (boxed LaTeX, LaTeX between dollars, or the last number or fraction), and knows which
    of them are equal: 0.5, \frac{1}{2} and 2/4 are, (x+1)^2 and x^2+2x+1 are.

    May be used from any thread. math-verify runs in a process of its own, which all instances share; an expression
    that keeps it busy for longer than `timeout` is no answer, and equals nothing.

    Args:
        timeout: seconds.

    Raises:
        TilebeamError: math-verify is not installed.
    """

    def __init__(self, *, timeout: int = 5) -> None:
        if find_spec("math_verify") is None:
            raise TilebeamError("Mathematical answers need the math-verify library: pip install 'tilebeam[math]'.")
        if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 1:
            raise TilebeamError(f"timeout must be a whole number of seconds of at least 1, not {timeout!r}.")
        self.timeout = timeout

    def __call__(self, text: str) -> str | None:
        """The answer in the text, as `plain_math` writes it: the last box whose braces close, else what math-verify
        finds; None if it finds nothing."""
        if (framed := boxed(text)) is not None:
            return framed
        found = _extract(text, self.timeout)
        return (plain_math(found) or None) if found is not None else None

    def equal(self, a: str, b: str) -> bool:
        """Whether two answers are the same."""
        return a == b or _equal(min(a, b), max(a, b), self.timeout)


@lru_cache(maxsize=4096)
def _extract(text: str, timeout: int) -> str | None:
    reply = _WORKER.ask({"text": text, "timeout": timeout}, timeout)
    return reply if isinstance(reply, str) else None


@lru_cache(maxsize=4096)
def _equal(a: str, b: str, timeout: int) -> bool:
    return _WORKER.ask({"a": a, "b": b, "timeout": timeout}, 2 * timeout) is True


class _Worker:
    """The process, started when first needed and again when it was lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a fork has the pipes, but they are its parent's

    def ask(self, request: dict[str, str | int], seconds: float) -> str | bool | None:
        """The reply; None if there was none in time, and then the process is gone.

        Raises:
            TilebeamError: the process does not start.
        """
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            except OSError:  # it died meanwhile
                line = None
            else:
                # Its own timeouts come first where they can.
                line = self._line(2 * seconds + 5)
            if line is None:
                self._end()
                return None
            reply: str | bool | None = json.loads(line)["reply"]
            return reply

    def close(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            if self._owner == os.getpid():
                self._end()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tilebeam.answers.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is the asker's business
        )
        self._owner = os.getpid()
        if self._line(_START_SECONDS) is None:
            self._end()
            raise TilebeamError(
                "The process for mathematical answers did not start: try python -m tilebeam.answers.math_worker."
            )

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


_WORKER = _Worker()
atexit.register(_WORKER.close)

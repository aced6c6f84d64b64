"""A process of the sandbox, for its client: starting it, hearing it, ending it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import BinaryIO, TypeVar

from tilebeam.errors import TilebeamError
from tilebeam.sandbox.plain_data import END, REQUEST
from tilebeam.sandbox.worker_process import WorkerProcess

SECONDS = 5
PATIENCE = 10  # times as long by the clock, where a machine is busy or a program waits for what never comes
MEMORY = 512 << 20  # bytes for a program, beyond what the interpreter has
_ENDING_SECONDS = 60.0  # for the zygote to end a process; it takes milliseconds
_CLOSING_SECONDS = 1.0  # for a zygote that was killed to be gone; one that only could not fork stays

_LIBRARIES = ("numpy", "mpmath", "sympy")
_NEEDS_LIBRARIES = re.compile(rf"\b(?:{'|'.join(_LIBRARIES)})\b")
# Programs can read the variables: they get those that Python needs to start. Equal programs behave alike, and numpy
# starts no threads, which a fork would lose.
_VARIABLES = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
_VARIABLES |= {"PYTHONHASHSEED": "0"}
_VARIABLES |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "BLIS")}

_PLAIN = WorkerProcess(["tilebeam.sandbox.zygote"], "programs", _VARIABLES)
# One of its own, so that what a program finds does not depend on which ran before.
_WITH_LIBRARIES = WorkerProcess(["tilebeam.sandbox.zygote", *_LIBRARIES], "programs with libraries", _VARIABLES)

T = TypeVar("T")


@cache
def _slots() -> threading.BoundedSemaphore:
    """Return programs at a time: each may take all of its memory."""
    from tilebeam._ext import cpus  # not where the processes of programs are made: it needs numpy

    return threading.BoundedSemaphore(min(8, cpus.default_threads()))


os.register_at_fork(after_in_child=_slots.cache_clear)  # those who hold one are not in the child


class Lost(Exception):
    """A process ended that was none of the program's doing."""


def need_confinement(*, unsafe: bool = False) -> bool:
    """Make sure that programs can be run safely, and tell whether they will be confined.

    Raises:
        TilebeamError: they cannot, and `unsafe` is false.
    """
    reason = _PLAIN.greeting()["unconfined"]
    if reason and not unsafe:
        raise TilebeamError(
            f"Programs that a model writes cannot be confined on this machine ({reason}): seccomp filters are missing. "
            "Run this elsewhere, or in a virtual machine that may be lost, with --unsafe-code (unsafe=True)."
        )
    return not reason


def attempt(once: Callable[[], T]) -> T:
    """Return what a function gives that starts processes, called a second time if it loses one; no more than a few such
    functions run at a time.

    Raises:
        TilebeamError: it loses one again.
    """
    for last in (False, True):
        try:
            with _slots():
                return once()
        except (Lost, OSError) as error:
            if last:
                raise TilebeamError(f"No program can be run at the moment ({error}): try again.") from error
    raise AssertionError


class Child:
    """A process of the sandbox. At the end of a with block it has ended.

    Args:
        source: what it runs; it tells which libraries are needed.
        channel: between program and judge.
        other: takes the program's output, or what the judge says.
        judges: whether it is a judge.
        confined: whether it is confined.
        seconds: of CPU time.

    Attributes:
        patience: seconds by the clock that it is waited for.

    Raises:
        TilebeamError: the zygote does not start.
    """

    def __init__(
        self,
        source: str,
        channel: socket.socket,
        other: socket.socket | BinaryIO,
        *,
        judges: bool = False,
        confined: bool,
        seconds: int,
    ) -> None:
        self._zygote = _WITH_LIBRARIES if _NEEDS_LIBRARIES.search(source) else _PLAIN
        self._ended: tuple[int, float] | None = None
        self.patience = PATIENCE * seconds
        self._control, given = socket.socketpair()
        with given:
            descriptors = [given.fileno(), channel.fileno(), other.fileno()]
            self._parent = self._zygote.send(REQUEST.pack(judges, confined, seconds, MEMORY), descriptors)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._control, contextlib.suppress(*[Lost] if kind else []):  # an interrupt is more than a lost process
            self.end()

    def hear(self, most: Mapping[socket.socket, int]) -> list[bytes]:
        """Read until the process has ended or patience has.

        Args:
            most: bytes that are kept of what comes from each socket; the rest is read and forgotten.

        Raises:
            Lost: the zygote has ended.
        """
        until = time.monotonic() + self.patience
        sockets = {s.fileno(): s for s in most}
        heard = {s: bytearray() for s in most}
        poll = select.poll()
        for descriptor in (*sockets, self._control.fileno()):
            poll.register(descriptor, select.POLLIN)
        while (left := until - time.monotonic()) > 0:
            # What an ended process said is there, and after it nothing comes.
            ready = [fd for fd, _ in poll.poll(0 if self._ended else left * 1000)]
            if not ready and self._ended:
                break
            for descriptor in ready:
                if descriptor == self._control.fileno():
                    poll.unregister(descriptor)
                    self.end()
                    continue
                source, piece = sockets[descriptor], b""
                with contextlib.suppress(ConnectionError):  # it ended without having read all
                    piece = source.recv(1 << 16)
                if not piece:
                    poll.unregister(descriptor)
                heard[source] += piece[: most[source] - len(heard[source])]
        return [bytes(heard[s]) for s in most]

    def end(self) -> tuple[int, float]:
        """End the process if it has not ended yet.

        Returns:
            The status that wait() gives, and the seconds of CPU time that it took.

        Raises:
            Lost: the zygote has ended, or does not answer.
        """
        if self._ended is None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
            self._control.settimeout(_ENDING_SECONDS)
            try:
                self._ended = END.unpack(self._control.recv(END.size))
            except TimeoutError as error:
                self._zygote.close()
                raise Lost("the process that they are forked from does not answer") from error
            except Exception as error:
                # Who is killed closes its sockets a moment before it can be seen to have ended: whoever tries again
                # must not ask it.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._parent.wait(_CLOSING_SECONDS)
                raise Lost("the process that they are forked from was ended, or could start none") from error
        return self._ended

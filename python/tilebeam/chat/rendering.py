"""Chat templates run in a process beside this one, which is ended where a template does not come to an end.

There are two such processes. A template that had to be stopped once runs in the second one from then on, until it comes
to an end again: it holds up nobody but those that ask for the same, and these for no longer than its own time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from tilebeam.native.fork_locks import free_in_children
from tilebeam.sandbox.worker_process import WorkerProcess

SECONDS = 2  # of CPU time for a template; those in use take a thousandth
_PATIENCE = 5  # times as long by the clock, where a machine is busy
_LONGEST = 1 << 28  # bytes of a reply; the process itself has a closer limit
# No other variables: a key may be among them.
_VARIABLES = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "TZ") if name in os.environ}


class _Lane:
    """A process, and a lock for those who wait for it."""

    def __init__(self) -> None:
        self.lock = free_in_children()
        self._process = WorkerProcess(["tilebeam.chat.template_worker"], "chat templates", _VARIABLES, longest=_LONGEST)

    def ask(self, request: bytes) -> dict[str, Any] | None:
        """Send [template, variables] and return the reply; None if there is none in time."""
        return self._process.ask(b"[%f, %s]\n" % (SECONDS, request), _PATIENCE * SECONDS)


_USUAL, _SLOW = _Lane(), _Lane()
_STOPPED = set[int]()  # hashes of templates


def render(template: str, variables: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Run a template. Safe to call from any thread.

    Args:
        template: Jinja.
        variables: what it finds set: what JSON has; None: it is not run, only looked at.

    Returns:
        {"text"}; or why there is none: {"refused"} by the template itself, {"invalid", "line"}, {"failed"}. None: it
        was stopped, or those before it that were stopped did not leave it the time.

    Raises:
        TypeError, ValueError, RecursionError: a variable is nothing that JSON has.
        TilebeamError: the process does not start.
    """
    request = json.dumps([template, variables], default=_plain).encode()
    known = hash(template)
    if known not in _STOPPED:
        with _USUAL.lock:
            if known not in _STOPPED:  # one before it may have been
                reply = _USUAL.ask(request)
                if reply is None:
                    _STOPPED.add(known)
                return reply
    if not _SLOW.lock.acquire(timeout=SECONDS):
        return None
    try:
        reply = _SLOW.ask(request)
        if reply is not None:
            _STOPPED.discard(known)
        return reply
    finally:
        _SLOW.lock.release()


def _plain(value: Any) -> Any:
    """Convert a value of another type to what JSON has for it."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no type of JSON")

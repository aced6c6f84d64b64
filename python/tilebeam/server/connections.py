"""Connections: uvicorn's protocol with deadlines, so that a client that sends half a request does not hold one.

uvicorn closes connections that idle after an answer, but waits without end for the rest of a request's head, and for
clients to take the rest of an answer, which it holds as long. What is late with its body gets 408 from
`security.Guard`, which sees bodies as they come.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tilebeam.server.errors import ApiError

# Seconds from the first byte of a request (or from the connection's beginning) to the end of its head.
HEAD_SECONDS = 30.0
# Seconds in which a client must take something of what waits for it, and how often that is looked at in them.
STALL_SECONDS = 60.0
_LOOKS = 8
# Bytes of a request's head.
MAX_HEAD = 64 << 10


class Connection(HttpToolsProtocol):
    """One client's connection."""

    _timer: asyncio.TimerHandle | None = None
    _received = 0  # bytes of a head that is not complete
    _in_body = False  # of a request whose body is not complete
    _watch: asyncio.TimerHandle | None = None  # of bytes that the client has not taken
    _unsent = 0  # when they were looked at last
    _idle_looks = 0  # that saw none of them taken

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._disarm()
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Much waits to be taken."""
        super().pause_writing()
        self._look_later()

    def resume_writing(self) -> None:
        """Most of it was taken. What is left is watched once nothing more comes: until then it may grow."""
        super().resume_writing()
        self._stop_watching()
        if self.cycle is None or self.cycle.response_complete:
            self._look_later()

    def on_response_complete(self) -> None:
        """An answer is written, as far as the application is concerned."""
        super().on_response_complete()
        self._look_later()

    def on_headers_complete(self) -> None:
        """The head is there: the application answers."""
        self._disarm()
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next byte begins another request."""
        self._in_body = False
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Read, and set a deadline where no request is being answered: for its head, or for what is left of the body
        of one that was refused."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            return
        self._received += 0 if self._in_body else len(data)
        if self._received > MAX_HEAD:
            self._refuse(431, f"The head of the request is larger than {MAX_HEAD} bytes.")
        elif self._timer is None:
            self._arm()

    def _arm(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._late)

    def _disarm(self) -> None:
        self._received = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self._received:
            self._refuse(408, "The request did not arrive in time.")
        self._disarm()
        self.transport.close()

    def _look_later(self) -> None:
        """Watch what the client has not taken."""
        if self._watch is None:
            self._unsent, self._idle_looks = self.transport.get_write_buffer_size(), 0
            if self._unsent:
                self._watch = self.loop.call_later(STALL_SECONDS / _LOOKS, self._look)

    def _look(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._idle_looks = 0 if unsent < self._unsent else self._idle_looks + 1
        self._unsent = unsent
        if self._idle_looks == _LOOKS:
            self.transport.abort()  # close() would wait for the client, too
        elif unsent:
            self._watch = self.loop.call_later(STALL_SECONDS / _LOOKS, self._look)
        else:
            self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _refuse(self, status: int, why: str) -> None:
        """Answer by hand: there is no request that the application could answer."""
        if self.transport.is_closing():
            return
        body = json.dumps(ApiError(status, why, code="request_timeout" if status == 408 else None).body()).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()

"""The process around the server: load, listen, and stop in good order."""

from __future__ import annotations

import asyncio
import faulthandler
import socket
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI

from tilebeam.errors import TilebeamError
from tilebeam.server.app import create_app
from tilebeam.server.logs import tell
from tilebeam.server.model_host import Entry, LoadedModel, decoding_first
from tilebeam.server.models import Models, check_names
from tilebeam.server.served_model import ServedModel
from tilebeam.server.settings import Settings

# After the deadline of running requests, seconds until their connections are cut.
_LAST_WORDS = 5
# Then, seconds to free the models.
_CLOSING = 20
# Connections that wait to be accepted.
_BACKLOG = 1024


class Server(uvicorn.Server):
    """uvicorn's server, which on a signal first lets running requests end, up to a deadline.

    Args:
        app: what it serves.
        alone: the process is there for nothing else: it ends some time after a signal, whatever its threads do.
    """

    def __init__(self, app: FastAPI, *, alone: bool = False) -> None:
        self._models: Models = app.state.models
        self._settings = settings = self._models.settings
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(settings.shutdown_seconds) + _LAST_WORDS,
            server_header=False,
            backlog=_BACKLOG,
        )
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._signals = 0
        self._alone = alone

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal: no new requests, a deadline for the others. The second one ends them, the third does not wait.

        uvicorn's own would have the signal end the process once all is done; an end in good order is exit code 0.
        """
        del sig, frame
        self._signals += 1
        self.should_exit = True
        self.force_exit = self._signals > 2
        if self._alone:
            # Not a thread of Python's, which would wait for one that keeps Python to itself.
            left = self._patience + _LAST_WORDS + _CLOSING if self._signals < 3 else 1
            faulthandler.dump_traceback_later(left, file=2, exit=True)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)

    @property
    def _patience(self) -> float:
        """Seconds that requests have to end."""
        return self._settings.shutdown_seconds if self._signals == 1 else 0.0

    def _drain(self) -> None:
        count = self._models.requests
        waits = f"waiting for {count} request{'s' * (count != 1)}, at most {self._settings.shutdown_seconds:g} s"
        tell("stopping" if not count else waits if self._signals == 1 else "ending the requests", requests=count)
        self._models.shut()
        self._draining = asyncio.ensure_future(self._models.drain(self._patience))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket for an address; port 0: the system chooses one.

    Raises:
        TilebeamError: the address is taken or none of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise TilebeamError(f"Cannot listen on {host}:{port}: {error.strerror or error}.") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise TilebeamError(f"Cannot listen on {host}:{port}: {error.strerror or error}. Try another --port.") from None
    return listener


def serve(
    served: Sequence[ServedModel],
    settings: Settings,
    *,
    ready: Callable[[Models, LoadedModel | None, str], None],
) -> None:
    """Serve until a signal comes. A single model is loaded first; of several each when it is asked for.

    Args:
        served: the models.
        settings: how to serve.
        ready: called with the models, the one that is loaded (None: there are several) and the server's URL, without a
            path, once requests are accepted.

    Raises:
        TilebeamError: the model cannot be loaded, two have the same name, or nobody can listen there.
    """
    listener = listen(settings.host, settings.port)  # before the model is loaded, which takes longer
    with listener:
        check_names([one.names for one in served])
        loaded = served[0].open() if len(served) == 1 else None
        entries = [Entry(one.names, one.load["n_seq_max"], one.open, loaded) for one in served]
        rates_steps = any(one.reward is not None and not one.reward.outcome for one in served)
        models = Models(entries, settings, rates_steps=rates_steps)
        app = create_app(models)
        listener.listen(_BACKLOG)  # before `ready`: who is told the URL may ask at once
        where = settings.host if ":" not in settings.host else f"[{settings.host}]"
        ready(models, loaded, f"http://{where}:{listener.getsockname()[1]}")
        decoding_first()
        Server(app, alone=True).run(sockets=[listener])
        tell("stopped")

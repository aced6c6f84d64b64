"""The process around the server: load, listen, and stop in good order."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from tilebeam.errors import TilebeamError
from tilebeam.model.loader import load as load_model
from tilebeam.scoring.load_reward import RewardSpec
from tilebeam.server.app import create_app
from tilebeam.server.connections import Connection
from tilebeam.server.model_host import Loaded
from tilebeam.server.models import Entry, Models, check_names
from tilebeam.server.searches import Questions, SearchPool
from tilebeam.server.settings import Settings

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.scoring.own_reward import OwnReward
    from tilebeam.scoring.reward_model import RewardModel

log = logging.getLogger("tilebeam.server")

# After the deadline of running requests, seconds until their connections are cut.
_LAST_WORDS = 5
# Connections that wait to be accepted.
_BACKLOG = 1024
# How long the event loop's thread may keep Python to itself while the decoding thread waits for it.
_SWITCH_SECONDS = 0.0005


class Server(uvicorn.Server):
    """uvicorn's server, which on a signal first lets running requests end, up to a deadline."""

    def __init__(self, app: FastAPI, *, log_level: str = "warning") -> None:
        self._models: Models = app.state.models
        self._settings = settings = self._models.settings
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            log_level=log_level,
            access_log=False,
            timeout_graceful_shutdown=int(settings.shutdown_seconds) + _LAST_WORDS,
            server_header=False,
            backlog=_BACKLOG,
        )
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: no new requests, a deadline for the others. The second one ends them, the third does not wait.

        uvicorn's own would have the signal end the process once all is done; an end in good order is exit code 0.
        """
        del sig, frame
        self._signals += 1
        self.should_exit = True
        self.force_exit = self._signals > 2
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        seconds = self._settings.shutdown_seconds if self._signals == 1 else 0.0
        self._models.shut()
        self._draining = asyncio.ensure_future(self._models.drain(seconds))


@dataclass(frozen=True)
class States:
    """Where KV cells outlast models: they are written when a model is closed, and read when it is loaded.

    Attributes:
        folder: theirs.
        limit: bytes of its files.
    """

    folder: Path
    limit: int

    def load(self, lm: LM) -> None:
        """Read what there is room for. What cannot be read is logged."""
        try:
            tokens = lm.load_prefixes(self.folder, skipped=log.warning)
            log.info("%d tokens read from %s", tokens, self.folder)
        except (TilebeamError, OSError) as error:
            log.warning("no saved state: %s", error)

    def save(self, lm: LM) -> None:
        """Write what is kept, if the model is sound. What cannot be written is logged."""
        if lm.failure is not None:
            return
        try:
            count = lm.save_prefixes(self.folder, limit=self.limit, skipped=log.warning)
            log.info("%d texts saved in %s", count, self.folder)
        except (TilebeamError, OSError) as error:
            log.warning("the state was not saved: %s", error)


def loader(
    model: str,
    load: dict[str, Any],
    reward: RewardSpec | None,
    step_stop: str,
    questions: Questions,
    *,
    own: Mapping[str, Any] | None = None,
    cache_prompt: bool = True,
    states: States | None = None,
) -> Callable[[], Loaded]:
    """What loads the model and its reward model, again and again.

    Args:
        model: the file.
        load: further arguments of `tilebeam.load`, for both.
        reward: the reward model, None for none.
        step_stop: what ends a step of the texts that it rates.
        questions: of searches' prompts.
        own: arguments for the model alone: its adapters, its draft model.
        cache_prompt: KV cells of finished requests stay while there is room, for those that begin alike: a
            conversation's next turn.
        states: where they outlast the model, None: nowhere.
    """

    def make() -> Loaded:
        with ExitStack() as stack:
            lm = stack.enter_context(load_model(model, **(own or {}), **load))
            if cache_prompt and lm.info.generates:
                stack.enter_context(lm.keep_prefixes())
                if states is not None:
                    states.load(lm)
                    stack.callback(states.save, lm)
            scorer: RewardModel | OwnReward | None = None
            if reward is not None:
                scorer = reward.open(lm, step_stop=step_stop, question=questions, **load)
                stack.callback(scorer.close)
            return Loaded(lm, scorer, stack.pop_all())

    return make


def listen(host: str, port: int) -> socket.socket:
    """A socket for an address; port 0: the system chooses one.

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
    entries: Sequence[Entry],
    settings: Settings,
    searches: SearchPool,
    *,
    rates_steps: bool,
    ready: Callable[[Loaded | None, str], None],
    verbose: bool = False,
) -> None:
    """Serve until a signal comes. A single model is loaded first; of several each when it is asked for.

    Args:
        entries: the models, see `loader`.
        settings: how to serve.
        searches: the threads of searches.
        rates_steps: whether the models have a reward model for searches by steps.
        ready: called with the model (None: there are several) and the API's URL, once requests are accepted.
        verbose: log a line for every request.

    Raises:
        TilebeamError: the model cannot be loaded, or nobody can listen there.
    """
    check_names([entry.names for entry in entries])
    listener = listen(settings.host, settings.port)  # before the model is loaded, which takes longer
    with listener:
        _log_to_stderr(verbose)
        loaded = entries[0].load() if len(entries) == 1 else None
        if loaded is not None:
            entries = [replace(entries[0], loaded=loaded)]
        app = create_app(Models(entries, settings, searches, rates_steps=rates_steps))
        listener.listen(_BACKLOG)  # before `ready`: who is told the URL may ask at once
        where = settings.host if ":" not in settings.host else f"[{settings.host}]"
        ready(loaded, f"http://{where}:{listener.getsockname()[1]}/v1")
        # The thread that decodes needs Python for a moment between two batches: it must not wait for it any longer.
        sys.setswitchinterval(_SWITCH_SECONDS)
        Server(app).run(sockets=[listener])


def _log_to_stderr(verbose: bool) -> None:
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.propagate = False

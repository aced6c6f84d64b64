"""One model behind the server, with its reward model: loaded when it is asked for, and again after the NPU failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tilebeam.errors import TilebeamError
from tilebeam.server.errors import ApiError, from_exception, unavailable

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.scoring.own_reward import OwnReward
    from tilebeam.scoring.reward_model import RewardModel

State = Literal["unloaded", "loading", "ready", "restarting", "failed", "stopped"]

log = logging.getLogger("tilebeam.server")

# A model that fails again and again is given up: so many loads within so many seconds.
_RESTARTS = 3
_RESTART_WINDOW = 600.0
# Pauses before the first, second .. attempt to load, seconds.
_PAUSES = (0.0, 2.0, 10.0)
# How long the event loop's thread may keep Python to itself while the decoding thread waits for it.
_SWITCH_SECONDS = 0.0005


@dataclass
class LoadedModel:
    """A model and, for searches, its reward model.

    Attributes:
        lm: the model.
        scorer: its reward model, None if there is none.
        resources: what to close.
    """

    lm: LM
    scorer: RewardModel | OwnReward | None = None
    resources: ExitStack = field(default_factory=ExitStack)

    @property
    def failure(self) -> TilebeamError | None:
        """Why one of them is lost."""
        return self.lm.failure or (self.scorer.lm.failure if self.scorer is not None else None)


@dataclass(frozen=True)
class Entry:
    """A model to serve.

    Attributes:
        names: what it may be called in requests; the first is its name in answers.
        slots: samples that it decodes at the same time.
        load: makes it; called again after it was lost.
        loaded: made already; None: it is loaded for the first request.
    """

    names: tuple[str, ...]
    slots: int
    load: Callable[[], LoadedModel]
    loaded: LoadedModel | None = None


class ModelHost:
    """Owns the model. Everything but `LoadedModel` itself is used on the event loop's thread.

    Args:
        load: makes a model.
        loaded: the first one; None: it is loaded when it is asked for.
        name: of it, for the log.
    """

    def __init__(self, load: Callable[[], LoadedModel], loaded: LoadedModel | None = None, *, name: str = "") -> None:
        self._load = load
        self._loaded = loaded
        self._name = name
        self.state: State = "unloaded" if loaded is None else "ready"
        self.reason = ""  # why it is not ready
        self.restarts = 0
        self._recent: deque[float] = deque()  # when restarts began
        self._restarting: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @property
    def newest(self) -> LM | None:
        """The model, usable or not, for figures; None: it is not loaded."""
        return None if self._loaded is None else self._loaded.lm

    @property
    def waits(self) -> bool:
        """Return whether a request has to wait until it is loaded."""
        self.look()
        return self.state in ("unloaded", "loading")

    @asynccontextmanager
    async def using(self) -> AsyncIterator[LoadedModel]:
        """Give the model, loaded first where it is not; it is not freed before this ends.

        Raises:
            ApiError: 503, it is not ready, or it could not be loaded.
        """
        if self.waits:
            # Requests that come meanwhile share the load and its failure. It goes on when they leave.
            if self._loading is None:
                self._loading = asyncio.ensure_future(self._load_once())
                self._loading.add_done_callback(_looked_at)
            await asyncio.shield(self._loading)
        self.look()
        if self.state == "restarting":
            raise unavailable(f"The model is being loaded again: {self.reason}", code="model_restarting", retry_after=2)
        if self.state != "ready" or self._loaded is None:
            raise unavailable(f"The model is not available: {self.reason}", code=f"model_{self.state}")
        self._users += 1
        self._unused.clear()
        try:
            yield self._loaded
        finally:
            self._users -= 1
            if self._users == 0:
                self._unused.set()
            self.look()

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return HTTP status and body of /health: 200 if requests are answered, be it after loading."""
        self.look()
        if self.state in ("restarting", "failed", "stopped"):
            return 503, {"status": self.state, "reason": self.reason, "restarts": self.restarts}
        return 200, {"status": "ok", "restarts": self.restarts}

    def status(self) -> dict[str, Any]:
        """Return how far it is loaded, as /v1/models tells it: "loaded", or one of the other states; with the reason if
        it is lost or its last load failed."""
        self.look()
        told = {"value": "loaded" if self.state == "ready" else self.state}
        return told | {"reason": self.reason} if self.reason else told

    # --- loading on demand ------------------------------------------------------------------------------------------

    async def _load_once(self) -> None:
        self.state = "loading"
        try:
            self._loaded = await self._load_in_thread()
        except Exception as error:
            self.state = "unloaded"
            raise unavailable(f"The model cannot be loaded: {self.reason}", code="model_load_failed") from error
        finally:
            self._loading = None
        self.state, self.reason = "ready", ""

    async def _load_in_thread(self) -> LoadedModel:
        """Load it; if that fails, the log tells why, and `reason` does."""
        try:
            return await asyncio.to_thread(self._load)
        except Exception as error:
            known = isinstance(error, TilebeamError | OSError)
            self.reason = str(error) if known else from_exception(error).message
            log.error("loading %s failed: %s", self._name, error, exc_info=None if known else error)
            raise

    async def _free(self) -> None:
        """Free what is loaded once nobody uses it."""
        await self._unused.wait()
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            try:
                await asyncio.to_thread(loaded.resources.close)
            except Exception:  # the next load goes its own way
                log.exception("closing a model failed")

    # --- failures ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Notice that the model is lost, and begin to load it again."""
        if self.state != "ready" or self._loaded is None or self._loaded.failure is None:
            return
        self.reason = str(self._loaded.failure)
        log.error("%s failed: %s", self._name, self.reason)
        now = time.monotonic()
        while self._recent and now - self._recent[0] > _RESTART_WINDOW:
            self._recent.popleft()
        if len(self._recent) >= _RESTARTS:
            self.reason += f" It failed {_RESTARTS + 1} times within {_RESTART_WINDOW / 60:.0f} minutes: given up."
            self.state = "failed"
            self._restarting = asyncio.ensure_future(self._free())
            return
        self._recent.append(now)
        self.state = "restarting"
        self._restarting = asyncio.ensure_future(self._restart())

    async def _restart(self) -> None:
        await self._free()  # whoever uses the lost model fails soon
        for pause in _PAUSES:
            await asyncio.sleep(pause)
            try:
                self._loaded = await self._load_in_thread()
            except Exception:
                continue
            self.restarts += 1
            self.state, self.reason = "ready", ""
            return
        self.state = "failed"

    async def close(self) -> None:
        """Free the model once nobody uses it."""
        for task in (self._restarting, self._loading):
            if task is not None:
                # A load cannot be interrupted; what it gives is freed below.
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    await task
        self.state, self.reason = "stopped", "the server is shutting down"
        await self._free()


def _looked_at(task: asyncio.Task[None]) -> None:
    """Log its failure, for which nobody may wait any more."""
    if not task.cancelled() and not isinstance(task.exception(), ApiError | None):
        log.error("loading failed", exc_info=task.exception())


def decoding_first() -> None:
    """Have this process's event loop give way to the thread that decodes, which needs Python for a moment between two
    batches."""
    sys.setswitchinterval(_SWITCH_SECONDS)

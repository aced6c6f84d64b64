"""One model behind the server, with its reward model: loaded when it is asked for, unloaded when it is not, and loaded
again after the NPU failed; and how many are loaded at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tilebeam.errors import TilebeamError
from tilebeam.server.errors import ApiError, unavailable
from tilebeam.server.logs import tell

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.scoring.own_reward import OwnReward
    from tilebeam.scoring.reward_model import RewardModel

State = Literal["unloaded", "loading", "ready", "unloading", "restarting", "failed", "stopped"]

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


class LoadQueue:
    """Places of loaded models: how many are loaded at the same time, and which of them makes room for another.

    A model that is to be loaded takes a place. While none is free, the model that was idle longest is unloaded; one
    with requests running never is. Where all have requests running, the one whose last request began first takes no new
    ones until somebody has got a place: otherwise those that wait for another model would wait as long as requests keep
    coming.

    Args:
        most: how many there are; None: one for every model.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._held: dict[ModelHost, None] = {}
        self._queue: dict[ModelHost, asyncio.Future[None]] = {}  # first come, first served
        self._changed: asyncio.Future[None] | None = None

    def hold(self, model: ModelHost) -> None:
        """Give a model that is there from the start its place."""
        self._held[model] = None

    async def take(self, model: ModelHost) -> None:
        """Wait for a place. Cancelling leaves the queue."""
        place = self._queue[model] = asyncio.get_running_loop().create_future()
        self.turn()
        try:
            await place
        except asyncio.CancelledError:
            self._queue.pop(model, None)
            self._held.pop(model, None)
            self.turn()
            raise

    def give(self, model: ModelHost) -> None:
        """Take back the place of a model that does not need it any more."""
        self._held.pop(model, None)
        self.turn()

    def turn(self) -> None:
        """Hand out what is free, as something changed, and see that more becomes free where some wait."""
        while self._queue and (self._most is None or len(self._held) < self._most):
            model = next(iter(self._queue))
            place = self._queue.pop(model)
            self._held[model] = None
            if not place.done():
                place.set_result(None)
        missing = len(self._queue) - sum(model.state == "unloading" for model in self._held)
        for model in sorted((t for t in self._held if t.idle), key=lambda t: t.last_used)[: max(0, missing)]:
            model.unload()
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None

    def leaves(self, model: ModelHost) -> bool:
        """Return whether this model, which is loaded, takes no new requests because another one waits for its place."""
        if not self._queue or any(t.state == "unloading" for t in self._held):
            return False
        loaded = [t for t in self._held if t.state == "ready"]
        return bool(loaded) and min(loaded, key=lambda t: t.last_used) is model

    async def changed(self) -> None:
        """Return when `leaves` may answer otherwise."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)


class ModelHost:
    """Owns the model. Everything but `LoadedModel` itself is used on the event loop's thread.

    Args:
        load: makes a model.
        loaded: the first one; None: it is loaded when it is asked for.
        name: of it, for the log.
        load_queue: where models that are loaded stand; None: there is one for this model.
        idle_seconds: without requests, after which it is unloaded; None: it stays.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        loaded: LoadedModel | None = None,
        *,
        name: str = "",
        load_queue: LoadQueue | None = None,
        idle_seconds: float | None = None,
    ) -> None:
        self._load = load
        self._loaded = loaded
        self._name = name
        self._load_queue = load_queue or LoadQueue()
        if loaded is not None:
            self._load_queue.hold(self)
        self._idle_seconds = idle_seconds
        self.state: State = "unloaded" if loaded is None else "ready"
        self.reason = ""  # why it is not ready
        self.restarts = 0
        self.last_used = 0.0  # when the last request began
        self._recent: deque[float] = deque()  # when restarts began
        self._restarting: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None  # until it has been idle for too long
        self._expected = 0  # requests that wait for it to be loaded
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @property
    def newest(self) -> LM | None:
        """The model, usable or not, for figures; None: it is not loaded."""
        return None if self._loaded is None else self._loaded.lm

    @property
    def idle(self) -> bool:
        """Return whether it is loaded and nobody wants it."""
        return self.state == "ready" and self._users == 0 and self._expected == 0

    @property
    def waits(self) -> bool:
        """Return whether a request has to wait: until it is loaded, or for those that wait for its place."""
        self.look()
        if self.state == "ready":
            return self._load_queue.leaves(self)
        return self.state in ("unloaded", "loading", "unloading")

    @asynccontextmanager
    async def using(self) -> AsyncIterator[LoadedModel]:
        """Give the model, loaded first where it is not; it is not freed before this ends.

        Raises:
            ApiError: 503, it is not ready, or it could not be loaded.
        """
        await self._ready()
        with self.use() as loaded:
            yield loaded

    @contextmanager
    def use(self) -> Iterator[LoadedModel]:
        """Give the model if it is ready. It is not freed before this ends.

        Raises:
            ApiError: 503, it is not.
        """
        self.look()
        if self.state == "restarting":
            raise unavailable(f"The model is being loaded again: {self.reason}", code="model_restarting", retry_after=2)
        if self.state != "ready" or self._loaded is None:
            raise unavailable(f"The model is not available: {self.reason}", code=f"model_{self.state}")
        self._users += 1
        self._unused.clear()
        self.last_used = time.monotonic()
        try:
            yield self._loaded
        finally:
            self._users -= 1
            if self._users == 0:
                self._unused.set()
            self.look()
            self.watch_idleness()
            self._load_queue.turn()

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

    async def _ready(self) -> None:
        """Return when it may be used, or when `use` says why not."""
        while True:
            self.look()
            if self.state in ("unloaded", "loading"):
                await self._loaded_soon()
                return  # at once: others may wait for this model's place already
            if self.state == "unloading" and self._unloading is not None:
                await asyncio.shield(self._unloading)
            elif self.state == "ready" and self._load_queue.leaves(self):
                await self._load_queue.changed()  # behind those that wait for its place
            else:
                return

    async def _loaded_soon(self) -> None:
        """Have it loaded; requests that come meanwhile share the load and its failure. It goes on when they leave."""
        if self._loading is None:
            self._loading = asyncio.ensure_future(self._load_once())
            self._loading.add_done_callback(_looked_at)
        self._expected += 1
        try:
            await asyncio.shield(self._loading)
        except asyncio.CancelledError:
            # Others may wait for the place of a model that nobody wants any more.
            asyncio.get_running_loop().call_soon(self._load_queue.turn)
            raise
        finally:
            self._expected -= 1
            if self._expected == 0 and self.state == "unloaded" and self._loading is not None:
                self._loading.cancel()  # it waits for a place that nobody needs any more
                self._loading = None  # who comes next begins anew

    async def _load_once(self) -> None:
        try:
            await self._load_queue.take(self)
            self.state = "loading"
            try:
                self._loaded = await self._load_in_thread()
            except Exception as error:
                self.state = "unloaded"
                self._load_queue.give(self)
                raise unavailable(f"The model cannot be loaded: {self.reason}", code="model_load_failed") from error
            self.state, self.reason, self.last_used = "ready", "", time.monotonic()
            self.watch_idleness()
            self._load_queue.turn()
        finally:
            if self._loading is asyncio.current_task():
                self._loading = None

    async def _load_in_thread(self) -> LoadedModel:
        """Load it; if that fails, the log tells why, and `reason` does."""
        try:
            return await asyncio.to_thread(self._load)
        except Exception as error:
            self.reason, known = _reason_of(error)
            log.error("loading %s failed: %s", self._name, error, exc_info=None if known else error)
            raise

    def unload(self) -> None:
        """Free an idle model; the next request loads it again."""
        self.state = "unloading"
        self._unloading = asyncio.ensure_future(self._unload())

    async def _unload(self) -> None:
        began = time.monotonic()
        await self._free()
        self.state = "unloaded"
        self._load_queue.give(self)
        tell("unloaded", model=self._name, seconds=round(time.monotonic() - began, 3))

    async def _free(self) -> None:
        """Free what is loaded once nobody uses it."""
        await self._unused.wait()
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            try:
                await asyncio.to_thread(loaded.resources.close)
            except Exception:  # the next load goes its own way
                log.exception("closing a model failed")

    def watch_idleness(self) -> None:
        """Begin to count the seconds without requests."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._idle_seconds is not None and self.idle:
            self._timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self.idle:
            self.unload()

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
            self._restarting = asyncio.ensure_future(self._give_up())
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
            self.watch_idleness()
            self._load_queue.turn()
            return
        self.state = "failed"
        self._load_queue.give(self)

    async def _give_up(self) -> None:
        await self._free()
        self._load_queue.give(self)

    async def close(self) -> None:
        """Free the model once nobody uses it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._loading is not None and self.state == "unloaded":
            self._loading.cancel()  # it waits for a place
        for task in (self._restarting, self._loading, self._unloading):
            if task is not None:
                # A load cannot be interrupted; what it gives is freed below.
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    await task
        self.state, self.reason = "stopped", "the server is shutting down"
        await self._free()


def _reason_of(error: Exception) -> tuple[str, bool]:
    """Return why a load failed, for clients, and whether such failures are known."""
    if isinstance(error, TilebeamError | OSError):
        return str(error), True
    return f"Unexpected {type(error).__name__}; the server's log has more.", False


def _looked_at(task: asyncio.Task[None]) -> None:
    """Log its failure, for which nobody may wait any more."""
    if not task.cancelled() and not isinstance(task.exception(), ApiError | None):
        log.error("loading failed", exc_info=task.exception())


def decoding_first() -> None:
    """Have this process's event loop give way to the thread that decodes, which needs Python for a moment between two
    batches."""
    sys.setswitchinterval(_SWITCH_SECONDS)

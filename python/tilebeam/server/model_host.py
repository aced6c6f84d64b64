"""The model behind the server, with its reward model: watched, and loaded again after the NPU failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tilebeam.errors import TilebeamError
from tilebeam.server.errors import unavailable

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.scoring.own_reward import OwnReward
    from tilebeam.scoring.reward_model import RewardModel

State = Literal["ready", "restarting", "failed", "stopped"]

log = logging.getLogger("tilebeam.server")

# A model that fails again and again is given up: so many loads within so many seconds.
_RESTARTS = 3
_RESTART_WINDOW = 600.0
# Pauses before the first, second .. attempt to load, seconds.
_PAUSES = (0.0, 2.0, 10.0)


@dataclass
class Loaded:
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


class ModelHost:
    """Owns the model. Everything but `Loaded` itself is used on the event loop's thread.

    Args:
        load: makes a model; called again after a failure.
        loaded: the first one.
    """

    def __init__(self, load: Callable[[], Loaded], loaded: Loaded) -> None:
        self._load = load
        self._loaded = loaded
        self.state: State = "ready"
        self.reason = ""  # why it is not ready
        self.restarts = 0
        self._recent: deque[float] = deque()  # when restarts began
        self._restarting: asyncio.Task[None] | None = None
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @property
    def newest(self) -> LM:
        """The model, usable or not, for figures and names."""
        return self._loaded.lm

    @property
    def rates_steps(self) -> bool:
        """Whether there is a reward model for searches by steps."""
        scorer = self._loaded.scorer
        return scorer is not None and not getattr(scorer, "outcome", False)

    @contextmanager
    def use(self) -> Iterator[Loaded]:
        """The model, which is not freed before this ends.

        Raises:
            ApiError: 503, it is not ready.
        """
        self.look()
        if self.state == "restarting":
            raise unavailable(f"The model is being loaded again: {self.reason}", code="model_restarting", retry_after=2)
        if self.state != "ready":
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
        """HTTP status and body of /health."""
        self.look()
        if self.state == "ready":
            return 200, {"status": "ok", "restarts": self.restarts}
        return 503, {"status": self.state, "reason": self.reason, "restarts": self.restarts}

    def look(self) -> None:
        """Notice that the model is lost, and begin to load it again."""
        failure = self._loaded.failure
        if self.state != "ready" or failure is None:
            return
        self.reason = str(failure)
        log.error("the model failed: %s", self.reason)
        now = time.monotonic()
        while self._recent and now - self._recent[0] > _RESTART_WINDOW:
            self._recent.popleft()
        if len(self._recent) >= _RESTARTS:
            self.state = "failed"
            self.reason += f" It failed {_RESTARTS + 1} times within {_RESTART_WINDOW / 60:.0f} minutes: given up."
            return
        self._recent.append(now)
        self.state = "restarting"
        self._restarting = asyncio.ensure_future(self._restart())

    async def _restart(self) -> None:
        await self._unused.wait()  # whoever uses the lost model fails soon
        for pause in _PAUSES:
            await asyncio.sleep(pause)
            try:
                self._loaded = await asyncio.to_thread(self._replace, self._loaded)
            except (TilebeamError, OSError) as error:
                self.reason = str(error)
                log.error("loading it again failed: %s", error)
                continue
            self.restarts += 1
            self.state, self.reason = "ready", ""
            log.warning("the model is loaded again")
            return
        self.state = "failed"

    def _replace(self, old: Loaded) -> Loaded:
        old.resources.close()
        return self._load()

    async def close(self) -> None:
        """Free the model once nobody uses it."""
        if self._restarting is not None:
            # A load cannot be interrupted; what it gives is freed below.
            with contextlib.suppress(Exception):
                await self._restarting
        self.state, self.reason = "stopped", "the server is shutting down"
        await self._unused.wait()
        await asyncio.to_thread(self._loaded.resources.close)

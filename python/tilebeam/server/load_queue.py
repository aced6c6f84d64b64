"""How many models are loaded at the same time, and which of them makes room for another.

A model that is to be loaded takes a place. While none is free, the model that was idle longest is unloaded; one with
requests running never is. Where all have requests running, the one whose last request began first takes no new ones
until somebody has got a place: otherwise those that wait for another model would wait as long as requests keep coming.
All of it runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol


class LoadableModel(Protocol):
    """What is asked of a model's host."""

    state: Literal["unloaded", "loading", "ready", "unloading", "restarting", "failed", "stopped"]
    last_used: float

    @property
    def idle(self) -> bool:
        """Return whether it is loaded and nobody wants it."""
        ...

    def unload(self) -> None:
        """Begin to free it; it gives its place back in the end."""


class LoadQueue:
    """Places of loaded models.

    Args:
        most: how many there are; None: one for every model.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._held: dict[LoadableModel, None] = {}
        self._queue: dict[LoadableModel, asyncio.Future[None]] = {}  # first come, first served
        self._changed: asyncio.Future[None] | None = None

    def hold(self, model: LoadableModel) -> None:
        """Give a model that is there from the start its place."""
        self._held[model] = None

    async def take(self, model: LoadableModel) -> None:
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

    def give(self, model: LoadableModel) -> None:
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

    def leaves(self, model: LoadableModel) -> bool:
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

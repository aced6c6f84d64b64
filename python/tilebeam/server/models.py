"""The models behind the server: which there are, which of them a request asks for, and what they share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.server.errors import ApiError
from tilebeam.server.metrics import Metrics
from tilebeam.server.model_host import Entry
from tilebeam.server.service import Service
from tilebeam.server.settings import Settings


class Models:
    """All models of a server.

    Args:
        entries: the models; the first one answers requests that name none.
        settings: how to serve.
        rates_steps: whether they have a reward model for searches by steps.

    Attributes:
        services: one for each, in their order.
    """

    def __init__(self, entries: Sequence[Entry], settings: Settings, *, rates_steps: bool = False) -> None:
        check_names([entry.names for entry in entries])
        self.settings = settings
        self.metrics = Metrics([entry.names[0] for entry in entries])
        self.rates_steps = rates_steps
        self._searches = searches = ThreadPoolExecutor(settings.max_searches, "tilebeam-search")
        self._started = int(time.time())
        self.services = [Service(entry, settings, searches, self.metrics.of(entry.names[0])) for entry in entries]
        self._by_name = {name: service for service in self.services for name in service.names}
        self.metrics.watch(lambda: {service.name: service.snapshot() for service in self.services})

    def of(self, name: str | None) -> Service:
        """Return the model that a request asks for; the first one if it says none.

        Raises:
            ApiError: 404, there is no such model.
        """
        if name is None:
            return self.services[0]
        if name not in self._by_name:
            there = ", ".join(repr(service.name) for service in self.services)
            raise ApiError(
                404,
                f"The model {name[:200]!r} is not served here; this server serves {there}.",
                param="model",
                code="model_not_found",
            )
        return self._by_name[name]

    def listed(self) -> dict[str, Any]:
        """Return the answer of /v1/models: every model under each of its names."""
        return {"object": "list", "data": [self.entry(name) for name in self._by_name]}

    def entry(self, name: str) -> dict[str, Any]:
        """Return what /v1/models tells of one.

        Raises:
            ApiError: 404, there is no such model.
        """
        service = self.of(name)
        told = {"id": name, "object": "model", "created": self._started, "owned_by": "tilebeam"}
        told |= {"status": service.host.status()}
        lm = service.host.newest
        if lm is None:
            return told
        return told | {"meta": {"n_ctx": lm.n_ctx, "n_vocab": lm.n_vocab, "n_params": lm.n_params, "size": lm.n_bytes}}

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return HTTP status and body of /health: 200 while one of the models answers."""
        told = [service.host.health() for service in self.services]
        if len(told) == 1:
            return told[0]
        status = min(code for code, _ in told)
        states = {service.name: service.host.status() for service in self.services}
        restarts = sum(body["restarts"] for _, body in told)
        return status, {"status": "ok" if status == 200 else "failed", "restarts": restarts, "models": states}

    # --- life -------------------------------------------------------------------------------------------------------

    @property
    def requests(self) -> int:
        """Requests that were let in and are not done."""
        return sum(service.gate.requests for service in self.services)

    def shut(self) -> None:
        """Let no request in from now on."""
        for service in self.services:
            service.gate.close()

    async def drain(self, seconds: float) -> None:
        """Wait until all requests are done; those that are not after so many seconds are stopped."""
        await asyncio.gather(*(service.gate.drain(seconds) for service in self.services))

    async def close(self) -> None:
        """End all requests and free the models."""
        self.shut()
        await self.drain(0)
        self._searches.shutdown(wait=True, cancel_futures=True)
        await asyncio.gather(*(service.close() for service in self.services))


def check_names(names: Sequence[tuple[str, ...]]) -> None:
    """Raise `TilebeamError` if a model has no name, or two have the same."""
    seen: set[str] = set()
    for own in names:
        if not own or not all(own):
            raise TilebeamError("The model needs a name.")
        if double := seen.intersection(own):
            raise TilebeamError(f"Two models are called {min(double)!r}: give them names with -m NAME=FILE.")
        seen.update(own)

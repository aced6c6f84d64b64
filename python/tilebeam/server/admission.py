"""Requests on their way: how many are let in, and how each can be stopped.

All of it runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from tilebeam.server.errors import ApiError, bad_request, unavailable
from tilebeam.server.metrics import ModelMetrics

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


class Job:
    """One request that was let in.

    Args:
        samples: texts it draws, which is what it counts for in the queue.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.stopped: BaseException | None = None  # why
        self.began: float | None = None  # when it had its model, by `time.monotonic`
        self._task: asyncio.Task[Any] | None = None

    def stop(self, reason: BaseException) -> None:
        """End what it is doing; `run` raises the reason."""
        if self.stopped is None:
            self.stopped = reason
            if self._task is not None:
                self._task.cancel()

    async def run(self, work: Coroutine[Any, Any, T], receive: Receive) -> T:
        """Return the work's result; the work is cancelled when the client goes away or the job is stopped.

        Args:
            receive: of the request, whose body has been read.

        Raises:
            ClientGone: it went away.
            ApiError: the reason given to `stop`.
        """
        if (reason := self.stopped) is not None:
            work.close()
            raise reason
        self._task = task = asyncio.ensure_future(work)
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            await asyncio.wait([task])
        finally:
            watcher.cancel()
            task.cancel()  # does nothing to a task that is done
            await asyncio.gather(task, watcher, return_exceptions=True)
            self._task = None
        if (reason := self.stopped) is not None and (task.cancelled() or task.exception() is not None):
            raise reason
        return task.result()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.stop(ClientGone())


class Gate:
    """Lets requests in, up to a number of samples that run or wait.

    Args:
        slots: samples that decode at the same time.
        waiting: samples that may wait for a slot. A request that comes to an idle server is always let in.
        most: samples of one request.
    """

    def __init__(self, slots: int, waiting: int, most: int, metrics: ModelMetrics) -> None:
        self.slots = slots
        self.waiting = waiting
        self.most = most
        self._metrics = metrics
        self._jobs: set[Job] = set()
        self._closed = False
        self._seconds_per_sample = 1.0  # a slot's time per sample, smoothed
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def load(self) -> int:
        """Samples that run or wait."""
        return sum(job.samples for job in self._jobs)

    @property
    def requests(self) -> int:
        """Requests that run or wait."""
        return len(self._jobs)

    @contextmanager
    def enter(self, samples: int) -> Iterator[Job]:
        """Let in a request of so many samples, and give its job.

        Raises:
            ApiError: 400 for a request that is too large, 429 when the queue is full, 503 while the server stops.
        """
        if self._closed:
            raise stopping()
        if samples > self.most:
            raise bad_request(
                f"The request asks for {samples} samples; this server draws at most {self.most} for one request.",
                param="n",
                code="too_many_samples",
            )
        load = self.load
        if load and load + samples > self.slots + self.waiting:
            self._metrics.refuse()
            ahead = max(1, load + samples - self.slots - self.waiting)
            raise ApiError(
                429,
                f"The queue is full: {load} samples run or wait, at most {self.slots + self.waiting} may. Try again.",
                code="queue_full",
                retry_after=min(60.0, ahead * self._seconds_per_sample / self.slots),
            )
        job = Job(samples)
        self._jobs.add(job)
        self._idle.clear()
        try:
            yield job
        finally:
            self._jobs.discard(job)
            if not self._jobs:
                self._idle.set()
            if job.stopped is None and job.began is not None:
                rounds = -(-samples // self.slots)
                taken = (time.monotonic() - job.began) / rounds
                self._seconds_per_sample += 0.2 * (taken - self._seconds_per_sample)

    def close(self) -> None:
        """Let nobody in from now on."""
        self._closed = True

    async def drain(self, seconds: float) -> None:
        """Wait until all requests are done; those that are not after so many seconds are stopped."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            for job in list(self._jobs):
                job.stop(stopping())
            await self._idle.wait()


def stopping() -> ApiError:
    """Return what clients are told while the server shuts down."""
    return unavailable("The server is shutting down.", code="shutting_down", retry_after=5)

"""Texts while they grow: what `LM.stream` and `LM.astream` return; and waiting for a call, in a thread or a
coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial

from tilebeam.engine.dispatcher import Call, Dispatcher
from tilebeam.errors import TilebeamError
from tilebeam.outputs import Delta, ProgressHook, RequestOutput, SampleHook


class _Streaming:
    """What both kinds of streams share: one call of one prompt.

    Args:
        model: the model, which lives as long as its streams.
    """

    def __init__(self, model: object, dispatcher: Dispatcher, call: Call) -> None:
        self._model = model
        self._dispatcher = dispatcher
        self._call = call

    def cancel(self) -> None:
        """End what is not finished, as "aborted", and free its KV cells. Idempotent, and does not wait."""
        self._dispatcher.cancel(self._call)

    def take(self) -> list[Delta]:
        """Return the deltas that have come already, without waiting."""
        deltas = self._call.deltas
        return [deltas.popleft() for _ in range(len(deltas))]

    @property
    def done(self) -> bool:
        """Return whether all samples have ended, or the call has failed."""
        return self._call.done

    @property
    def output(self) -> RequestOutput:
        """The whole result, once all samples have ended.

        Raises:
            TilebeamError: they have not ended, or the call failed.
        """
        if not self.done:
            raise TilebeamError("The stream has not ended: read it to its end, or cancel it.")
        return self._call.outputs()[0]

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None and not call.done:
            self._dispatcher.abandon(call)


class Stream(_Streaming):
    """The deltas of one prompt's samples, as they come. Iterate; leaving the `with` block or dropping it cancels.

    The samples decode in the batches of all calls under way. Without other calls they move on only while the
    stream is iterated.
    """

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        call = self._call
        if not call.deltas:
            self._dispatcher.wait(call, ready=lambda: bool(call.deltas))
        if call.deltas:
            return call.deltas.popleft()
        if call.error is not None:
            call.outputs()  # raises it
        raise StopIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class AsyncStream(_Streaming):
    """The deltas of one prompt's samples, as they come. Iterate with `async for`; leaving the `async with` block,
    cancelling the task or dropping it cancels."""

    def __init__(self, model: object, dispatcher: Dispatcher, call: Call) -> None:
        super().__init__(model, dispatcher, call)
        self._changes = _Changes(call)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        call = self._call
        try:
            while not (call.deltas or call.done):
                await self._changes.wait()
        except BaseException:
            self.cancel()
            raise
        if call.deltas:
            return call.deltas.popleft()
        if call.error is not None:
            call.outputs()  # raises it
        raise StopAsyncIteration

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class _Changes:
    """Tells the event loop of a call's task, from the thread that steps, that the call has changed."""

    def __init__(self, call: Call) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._scheduled = False
        call.notify = self._notify

    def _notify(self) -> None:
        if self._scheduled:
            return
        self._scheduled = True
        with suppress(RuntimeError):  # the loop is closed, and the task with it
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        self._scheduled = False
        self._event.set()

    async def wait(self) -> None:
        """Return when the call has changed since the last time."""
        await self._event.wait()
        self._event.clear()


async def run_async(
    model: object, dispatcher: Dispatcher, call: Call, progress: ProgressHook | None
) -> list[RequestOutput]:
    """Submit a call and wait for its results in a coroutine; see `LM.agenerate`.

    Args:
        model: the model, which lives as long as the call.
    """
    changes = _Changes(call)
    dispatcher.submit(call, background=model)
    try:
        seen = 0
        while not call.done:
            await changes.wait()
            if progress is not None and call.steps > seen and call.error is None:
                seen = call.steps
                if progress(call.snapshot()) is False:
                    progress = None
                    dispatcher.cancel(call)
    except BaseException:
        dispatcher.cancel(call)
        raise
    return call.outputs()


def run(
    dispatcher: Dispatcher, call: Call, progress: ProgressHook | None, on_sample: SampleHook | None = None
) -> list[RequestOutput]:
    """Submit a call and wait for its results in this thread; see `LM.generate`."""
    dispatcher.submit(call)
    try:
        while (progress is not None or on_sample is not None) and not call.done:
            seen = call.steps
            dispatcher.wait(call, ready=partial(_has_stepped, call, seen))
            if call.steps == seen or call.error is not None:
                continue
            _tell_ended(dispatcher, call, on_sample)
            if progress is not None and progress(call.snapshot()) is False:
                progress = on_sample = None
                dispatcher.cancel(call)
        dispatcher.wait(call)
        if call.error is None:
            _tell_ended(dispatcher, call, on_sample)
    except BaseException:
        dispatcher.cancel(call)
        raise
    return call.outputs()


def _tell_ended(dispatcher: Dispatcher, call: Call, on_sample: SampleHook | None) -> None:
    if on_sample is not None:
        for number, sample in call.ended():
            for unwanted in on_sample(number, sample) or ():
                dispatcher.cancel_prompt(call, unwanted)


def run_each(dispatcher: Dispatcher, calls: Iterator[Call], samples: int) -> Iterator[tuple[int, RequestOutput]]:
    """Return results of calls of one prompt each, with their numbers, as they complete; see `LM.completed`.

    Args:
        calls: made as they are needed. One that cannot be made ends the iteration, after those before it.
        samples: that are submitted at the same time, at least.
    """
    numbered = enumerate(calls)
    running: dict[Call, int] = {}
    refused: TilebeamError | None = None
    try:
        while True:
            while refused is None and sum(len(r.samples) for call in running for r in call.requests) < samples:
                try:
                    i, call = next(numbered)
                except StopIteration:
                    break
                except TilebeamError as error:
                    refused = error
                    break
                dispatcher.submit(call)
                running[call] = i
            if not running:
                break
            dispatcher.wait(*running)
            for call in [call for call in running if call.done]:
                output = call.outputs()[0]
                yield running.pop(call), output
    finally:
        for call in running:
            dispatcher.cancel(call)
    if refused is not None:
        raise refused


def _has_stepped(call: Call, seen: int) -> bool:
    return call.steps > seen

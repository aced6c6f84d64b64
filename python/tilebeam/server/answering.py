"""From a request that is ready to the events of its answer: all at once, or as they come."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from tilebeam.chat.answer_parts import reasoning_in
from tilebeam.outputs import Delta, RequestOutput, Usage
from tilebeam.server.answer_events import Ended, Event, Grown, SampleEvents, Started
from tilebeam.server.errors import ApiError, unavailable
from tilebeam.server.metrics import ModelMetrics
from tilebeam.server.plan import AnswerPlan, Ready

if TYPE_CHECKING:
    from tilebeam.engine.streams import AsyncStream
    from tilebeam.model.lm import LM
    from tilebeam.search.contract import SearchResult


async def generated(lm: LM, plan: AnswerPlan, ready: Ready) -> list[Event]:
    """Generate, and return all events.

    Raises:
        TilebeamError: the model failed.
        ApiError: 503, it was stopped.
    """
    outputs = await lm.agenerate(ready.prompts, ready.params)
    if any(s.finish_reason == "aborted" for o in outputs for s in o.outputs):
        raise _stopped()

    def told() -> list[Event]:  # in a thread, as there may be many log-probabilities
        found: list[Event] = []
        for i, output in enumerate(outputs):
            for j, sample in enumerate(output.outputs):
                index = i * plan.body.n + j
                found += [Started(index), ready.events_of(index, lm, plan).whole(sample)]
        return [*found, ended(lm, plan, outputs, found)]

    return await asyncio.to_thread(told)


async def streamed(lm: LM, plan: AnswerPlan, ready: Ready, times: StreamTimes) -> AsyncGenerator[list[Event]]:
    """Generate, and yield events as they come, those that came together in one list. Closing it ends the samples.

    Args:
        times: told of tokens.

    Raises:
        TilebeamError, ApiError: see `generated`.
    """
    n = plan.body.n
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(lm.astream(p, ready.params)) for p in ready.prompts]
        yield [Started(i * n + j, len(prompt.ids)) for i, prompt in enumerate(ready.prompts) for j in range(n)]
        samples, thinking = dict[int, SampleEvents](), list[Event]()
        stopped = False
        async for deltas in merged(streams):
            stopped = stopped or any(delta.finish_reason == "aborted" for _, delta in deltas)
            if stopped:
                continue  # the reason, if there is one, comes behind
            found: list[Event] = []
            for i, delta in deltas:
                index = i * n + delta.index
                times.take(index, delta)
                if index not in samples:
                    samples[index] = ready.events_of(index, lm, plan)
                if (grown := samples[index].grown(delta)) is not None:
                    found.append(grown)
                    thinking += [grown] if reasoning_in(grown.parts) else []
            if found:
                yield found
        if stopped:
            raise _stopped()
        outputs = [stream.output for stream in streams]
    yield [ended(lm, plan, outputs, thinking)]


def ended(lm: LM, plan: AnswerPlan, outputs: Sequence[RequestOutput | SearchResult], events: Sequence[Event]) -> Ended:
    """Return what tells that all choices have ended.

    Args:
        outputs: what was generated, or the results of a search.
        events: those in which there are thoughts, at least.
    """
    thoughts = defaultdict[int, str](str)
    for event in events:
        if isinstance(event, Grown):
            thoughts[event.index] += reasoning_in(event.parts)
    counts = (len(lm.tokenize(thought, add_special=False, parse_special=False)) for thought in thoughts.values())
    usage = sum((output.usage for output in outputs), Usage())
    # Bytes that are no text by themselves are written longer than they were drawn.
    return Ended(usage, plan.params.seed or 0, min(sum(counts), usage.completion_tokens))


def _stopped() -> ApiError:
    return unavailable("The model was stopped.", code="aborted", retry_after=2)


class StreamTimes:
    """Tells the metrics how long the tokens of a stream take.

    Args:
        metrics: of the model.
        began: when the request came, by `time.monotonic`.
    """

    def __init__(self, metrics: ModelMetrics, began: float) -> None:
        self._metrics = metrics
        self._began = began
        self._first: dict[int, tuple[float, int]] = {}  # of each sample: when its first token came, tokens since

    def take(self, index: int, delta: Delta) -> None:
        """Take a delta of a choice that has come now."""
        now = time.monotonic()
        if delta.token_ids:
            if not self._first:
                self._metrics.first_token(now - self._began)
            first, count = self._first.get(index, (now, -len(delta.token_ids)))
            self._first[index] = (first, count + len(delta.token_ids))
        if delta.finish_reason is not None and index in self._first:
            first, count = self._first[index]
            if count > 0:
                self._metrics.token((now - first) / count)


async def merged(streams: Sequence[AsyncStream]) -> AsyncIterator[list[tuple[int, Delta]]]:
    """Yield the deltas of several streams with the stream's number, as they come: those that came together in one list,
    so that they can be sent together."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield [(0, d) for d in (delta, *streams[0].take())]
        return
    queue: asyncio.Queue[list[tuple[int, Delta]] | None] = asyncio.Queue()

    async def drain(i: int, stream: AsyncStream) -> None:
        async for delta in stream:
            queue.put_nowait([(i, d) for d in (delta, *stream.take())])

    async def drain_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for i, stream in enumerate(streams):
                    group.create_task(drain(i, stream))
        finally:
            queue.put_nowait(None)

    pump = asyncio.create_task(drain_all())
    try:
        while (item := await queue.get()) is not None:
            yield item
        await pump
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        pump.cancel()

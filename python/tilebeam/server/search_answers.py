"""Answers to requests with a search: whole, or as a stream of what happens in it that ends with the answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from tilebeam.chat.prepared import PreparedChat
from tilebeam.checks import without_infinities
from tilebeam.errors import NpuError, TilebeamError
from tilebeam.outputs import Progress
from tilebeam.pages.search_page import search_page
from tilebeam.prompt import Prompt
from tilebeam.search.contract import Algorithm, SearchResult
from tilebeam.search.events import EventHook, SearchEvent
from tilebeam.server.answer_events import Event, Grown, Json, Started
from tilebeam.server.answering import ended
from tilebeam.server.errors import bad_request
from tilebeam.server.metrics import ModelMetrics
from tilebeam.server.model_host import LoadedModel
from tilebeam.server.plan import AnswerPlan, Ready
from tilebeam.server.requests import Search
from tilebeam.server.searches import in_thread

# What a report leaves out unless the request wants candidates.
_LONG = frozenset({"candidates", "trajectories", "pruned"})
# What stands elsewhere in the answer.
_ELSEWHERE = frozenset({"prompt", "text", "usage", "seed"})


@dataclass(frozen=True)
class SearchAnswer:
    """One request's search.

    Attributes:
        search: the request's "search".
        algorithm: which that is.
        pool: the threads that searches run in.
        loaded: the model and its reward model.
        plan: the request.
        ready: what is asked.
        metrics: where it is counted.
    """

    search: Search
    algorithm: Algorithm[SearchResult]
    pool: ThreadPoolExecutor
    loaded: LoadedModel
    plan: AnswerPlan
    ready: Ready
    metrics: ModelMetrics

    async def whole(self) -> list[Event]:
        """Search, and return the events of the answer.

        Raises:
            TilebeamError: the model failed. ApiError: 400, the search did.
        """
        results = await self._run(None)
        return [*map(Started, range(len(results))), *await asyncio.to_thread(self._answers, results, {})]

    async def stream(self) -> AsyncGenerator[list[Event]]:
        """Search, and yield each thing that happens, then the answers. Closing it ends the search.

        Raises:
            TilebeamError, ApiError: see `whole`.
        """
        yield [Started(i) for i in range(len(self.ready.prompts))]
        queue: asyncio.Queue[SearchEvent | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hook(event: SearchEvent) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        task = asyncio.create_task(self._run(hook))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (event := await queue.get()) is not None:
                yield [self._happened(event)]
            results = await task
        finally:
            task.cancel()
            await asyncio.wait([task])
        yield await asyncio.to_thread(self._answers, results, {"object": "tilebeam.search"})

    async def _run(self, events: EventHook | None) -> list[SearchResult]:
        params, chat = self.ready.params, self.ready.chat
        prompts: Sequence[Prompt | PreparedChat] = (
            self.ready.prompts if chat is None else [replace(chat, params=params)]
        )
        lm, budget = self.loaded.lm, self.search.budget
        cancelled = threading.Event()

        def go_on(_: Progress) -> bool:
            return not cancelled.is_set()

        def search() -> list[SearchResult]:  # in a thread, which calls both hooks
            return self.algorithm.run(lm, prompts, budget, sampling=params, progress=go_on, events=events)

        try:
            results = await in_thread(self.pool, search, cancelled)
        except NpuError:
            raise
        except TilebeamError as error:
            if self.loaded.failure is not None:
                raise
            raise bad_request(f"search: {error}", param="search", code="search_failed") from error
        self.metrics.search(self.algorithm.name)
        return results

    def _happened(self, event: SearchEvent) -> Grown:
        """Return that something happened: a choice grows by nothing, as every chunk of OpenAI's has one."""
        told = event.as_dict()
        del told["prompt"]  # the choice's index
        if not self.search.candidates:
            del told["text"]
        return Grown(event.prompt, search={"object": "tilebeam.search.event"} | without_infinities(told))

    def _answers(self, results: Sequence[SearchResult], kind: Json) -> list[Event]:
        """Return the chosen candidates, whose log-probabilities not every search knows, and what all of it cost."""
        found: list[Grown] = []
        for i, result in enumerate(results):
            best = result.best
            if best.finish_reason == "tool_calls":  # which the reader finds
                best = replace(best, finish_reason="stop")
            # Nobody drew the tokens of what programs print.
            known = best.logprobs is not None and len(best.logprobs) == len(best.token_ids)
            events = self.ready.events_of(i, self.loaded.lm, self.plan, logprobs=known)
            grown = events.whole(best if best.written is None else replace(best, text=best.written))
            found.append(replace(grown, search=kind | self._report(i, result)))
        return [*found, ended(self.loaded.lm, self.plan, results, found)]

    def _report(self, i: int, result: SearchResult) -> Json:
        """Return what a search tells besides its text."""
        hidden = _ELSEWHERE if self.search.candidates else _ELSEWHERE | _LONG
        shown = {key: value for key, value in result.as_dict().items() if key not in hidden}
        report: Json = {"method": self.algorithm.name} | without_infinities(shown)
        if self.search.page:
            report["page"] = search_page(self.algorithm.name, [result], [self.ready.prompts[i].asked])
        return report

"""Answers to requests with a search: whole, or as a stream of what happens in it that ends with the answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from tilebeam.errors import NpuError, TilebeamError
from tilebeam.outputs import Delta, Usage
from tilebeam.prompt import Prompt
from tilebeam.sampling_params import SamplingParams
from tilebeam.search.base import Algorithm, SearchResult
from tilebeam.search.events import EventHook, SearchEvent
from tilebeam.server.errors import bad_request
from tilebeam.server.metrics import ModelMetrics
from tilebeam.server.model_host import Loaded
from tilebeam.server.requests import Search
from tilebeam.server.responses import Echo, Json, Style, TokenLedger
from tilebeam.server.searches import SearchPool, algorithm_of
from tilebeam.server.streams import Plan, Writer

# What a report leaves out unless the request wants candidates.
_LONG = frozenset({"candidates", "trajectories", "pruned"})
# What stands elsewhere in the answer.
_ELSEWHERE = frozenset({"prompt", "text", "usage", "seed"})


class SearchAnswer:
    """One request's search.

    Args:
        searches: the threads that it runs in.
        loaded: the model and its reward model.
        plan: the request.
        metrics: where it is counted.

    Raises:
        ApiError: 400, the request asks for a search that cannot be.
    """

    def __init__(self, searches: SearchPool, loaded: Loaded, plan: Plan, metrics: ModelMetrics) -> None:
        assert plan.body.search is not None
        self._search: Search = plan.body.search
        self._searches = searches
        self._loaded = loaded
        self._plan = plan
        self._metrics = metrics
        self._algorithm: Algorithm[SearchResult] = algorithm_of(self._search, loaded.scorer, programs=searches.programs)

    async def whole(self, prompts: Sequence[Prompt], params: SamplingParams) -> tuple[list[Json], Usage]:
        """The choices and what they cost.

        Raises:
            TilebeamError: the model failed. ApiError: 400, the search did.
        """
        results = await self._run(prompts, params, None)
        choices = []
        for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            choice = self._style(result).choice(i, result.best, Echo(prompt.text) if self._plan.echo else None)
            choices.append(choice | {"search": self._report(result)})
        return choices, total(results)

    async def stream(self, prompts: Sequence[Prompt], params: SamplingParams, began: float) -> AsyncGenerator[bytes]:
        """The chunks of a stream: each thing that happens, then the answers. Closing it ends the search.

        Raises:
            TilebeamError, ApiError: see `whole`.
        """
        plan = self._plan
        writer = _SearchWriter(plan, plan.style(self._loaded.lm), self._metrics, began)
        yield writer.opening([Echo(p.text) if plan.echo else None for p in prompts])
        queue: asyncio.Queue[SearchEvent | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hook(event: SearchEvent) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        task = asyncio.create_task(self._run(prompts, params, hook))
        task.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (event := await queue.get()) is not None:
                yield writer.happened(event, self._search.candidates)
            results = await task
        finally:
            task.cancel()
            await asyncio.wait([task])
        usage = total(results)
        self._metrics.observe(usage)
        for i, result in enumerate(results):
            yield writer.answer(i, result, self._style(result), self._report(result))
        yield writer.closing(usage)

    async def _run(
        self, prompts: Sequence[Prompt], params: SamplingParams, events: EventHook | None
    ) -> list[SearchResult]:
        budget = self._search.budget
        try:
            results = await self._searches.run(self._loaded.lm, self._algorithm, prompts, budget, params, events)
        except NpuError:
            raise
        except TilebeamError as error:
            if self._loaded.failure is not None:
                raise
            raise bad_request(f"search: {error}", param="search", code="search_failed") from error
        self._metrics.search(self._algorithm.name)
        return results

    def _style(self, result: SearchResult) -> Style:
        """Writes the chosen candidate, whose log-probabilities not every search knows."""
        lm, plan, chosen = self._loaded.lm, self._plan, result.best
        wanted = plan.logprobs and chosen.logprobs is not None
        return plan.endpoint(lm.piece, lm.spelling, wanted, plan.top if chosen.top_logprobs else 0)

    def _report(self, result: SearchResult) -> Json:
        """What a search tells besides its text."""
        hidden = _ELSEWHERE if self._search.candidates else _ELSEWHERE | _LONG
        shown = {key: value for key, value in result.as_dict().items() if key not in hidden}
        report: Json = {"method": self._algorithm.name} | finite(shown)
        return report


class _SearchWriter(Writer):
    """Writes the events of a stream that is a search. Every chunk has a choice, as OpenAI's have."""

    def happened(self, event: SearchEvent, texts: bool) -> bytes:
        """Something happened: a piece without text."""
        told = event.as_dict()
        del told["prompt"]  # the choice's index
        if not texts:
            del told["text"]
        choice = self._style.part(event.prompt, "", None, None)
        return self._event(choice | {"search": {"object": "tilebeam.search.event"} | finite(told)})

    def answer(self, i: int, result: SearchResult, style: Style, report: Json) -> bytes:
        """The chosen candidate of prompt `i`, in one piece."""
        chosen = result.best
        ledger = TokenLedger(style.piece)
        if style.logprobs:
            ledger.feed(chosen.token_ids, chosen.logprobs, chosen.top_logprobs)
        end = Delta(0, chosen.text, [], finish_reason=chosen.finish_reason, stop_reason=chosen.stop_reason)
        choice = style.chunk(i, chosen.text, end, ledger, self._offsets[i])
        return self._event(choice | {"search": {"object": "tilebeam.search"} | report})


def total(results: Sequence[SearchResult]) -> Usage:
    """What all prompts of a request cost."""
    return sum((r.usage for r in results), Usage())


def finite(value: Any) -> Any:
    """JSON has no infinities: a score that is one becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(v) for key, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value

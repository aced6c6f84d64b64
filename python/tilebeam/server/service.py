"""What the endpoints do: from a checked body to answers, whole or as a stream."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from tilebeam.chat.thoughts import marks_of
from tilebeam.errors import GrammarTooComplexError, NpuError, TilebeamError
from tilebeam.outputs import EngineFigures
from tilebeam.prompt import Prompt
from tilebeam.sampling_params import SamplingParams
from tilebeam.search.limits import share_of_context
from tilebeam.server.admission import Gate, Job
from tilebeam.server.answer_events import Ended, Event, Grown
from tilebeam.server.answering import StreamTimes, generated, streamed
from tilebeam.server.errors import bad_request, check_tokens, errors_for_client, from_exception, unavailable
from tilebeam.server.event_stream import EventStream
from tilebeam.server.grammar import grammar_of
from tilebeam.server.logs import note
from tilebeam.server.metrics import ModelMetrics, Snapshot
from tilebeam.server.model_host import Entry, LoadedModel, ModelHost
from tilebeam.server.openai import chat_completions
from tilebeam.server.plan import AnswerMaker, AnswerPlan, Ready
from tilebeam.server.requests import ChatRequest, CompletionRequest, Generation, Search, each_of, given
from tilebeam.server.search_answers import SearchAnswer
from tilebeam.server.searches import algorithm_of, in_thread
from tilebeam.server.settings import Settings
from tilebeam.server.writing import dumped_in_parts

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

T = TypeVar("T")

# Requests that read texts at the same time; the model reads one after the other.
_READERS = 4
# Chats whose template is run at the same time, or waits for those before: not in the threads that all requests share.
_CHATS = 16
# OpenAI's default for completions.
_COMPLETION_TOKENS = 16
# Log-probabilities of one answer, of tokens and of the likeliest others: each takes up to 400 bytes until it is sent.
_MOST_LOGPROBS = 1 << 19


class Service:
    """One model's queue and figures, and what is asked of it.

    Args:
        entry: the model.
        settings: how to serve.
        searches: the threads of searches.
        metrics: its figures.
    """

    def __init__(self, entry: Entry, settings: Settings, searches: ThreadPoolExecutor, metrics: ModelMetrics) -> None:
        self.names = entry.names
        self.settings = settings
        self.host = ModelHost(entry.load, entry.loaded, name=self.name)
        self.metrics = metrics
        self.searches = searches
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="tilebeam-read")
        self._chats = ThreadPoolExecutor(_CHATS, thread_name_prefix="tilebeam-chat")
        self.gate = Gate(entry.slots, settings.max_waiting, settings.max_samples, metrics)

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.names[0]

    def snapshot(self) -> Snapshot:
        """Return the figures of this moment."""
        lm, host = self.host.newest, self.host
        now = EngineFigures(0, 0, self.gate.slots, 0, 0, {}) if lm is None else lm.figures()
        return Snapshot(host.health()[0] == 200, host.state == "ready", host.restarts, self.gate.load, now)

    async def close(self) -> None:
        """Free the model, once no request runs and none is let in."""
        for pool in (self._readers, self._chats):
            pool.shutdown(wait=True, cancel_futures=True)
        await self.host.close()

    # --- endpoints --------------------------------------------------------------------------------------------------

    async def complete(self, body: CompletionRequest, request: Request, answer: AnswerMaker) -> Response:
        """Answer POST /v1/completions.

        Args:
            answer: makes the writer of the answer.

        Raises:
            ApiError: what is wrong.
        """
        wanted = body.logprobs is not None
        params = self._params(body, body.limit(_COMPLETION_TOKENS), wanted, body.logprobs or 0)
        prompts = each_of(body.prompt)
        if not prompts:
            raise bad_request("prompt: the list is empty.", param="prompt", code="invalid_value")

        def prepare(lm: LM, params: SamplingParams) -> Ready:
            return Ready([_completion_prompt(lm, given) for given in prompts], params)

        plan = AnswerPlan(body, answer, wanted, params, body.samples * len(prompts), self.name, prepare)
        return await self._answer(plan, request)

    async def chat(self, body: ChatRequest, request: Request, answer: AnswerMaker) -> Response:
        """Answer POST /v1/chat/completions, or what is like it; see `complete`."""
        params = self._params(body, body.limit(self.settings.max_tokens), body.logprobs, body.top_logprobs or 0)
        settings = self.settings

        def prepare(lm: LM, params: SamplingParams) -> Ready:
            if body.search is not None and not body.calls:  # candidates are texts as they are
                marks = None if settings.chat_template is None else marks_of(settings.chat_template)
                params = replace(params, thinking_marks=marks)
                return Ready([chat_completions.prompt_of(lm, body, settings)], params)
            made = chat_completions.prepared(lm, body, settings, params)
            return Ready([made.prompt], made.params, made.reader, made if body.search is not None else None)

        plan = AnswerPlan(body, answer, body.logprobs, params, body.samples, self.name, prepare)
        return await self._answer(plan, request)

    # --- what they share --------------------------------------------------------------------------------------------

    def _params(self, body: Generation, max_tokens: int | None, logprobs: bool, top: int) -> SamplingParams:
        if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
            message = f"min_tokens: must be at most max_tokens, {max_tokens}, not {body.min_tokens}."
            raise bad_request(message, param="min_tokens", code="invalid_value")
        # llama.cpp's convention: a negative seed is a new one.
        seed = {"seed": None} if body.seed is None or body.seed < 0 else {}
        more = {"repeat_penalty": body.repeat_penalty, "budget_message": body.reasoning_budget_message}
        try:
            return replace(
                self.settings.sampling,
                **given(body.sampling() | more) | seed,
                thinking_budget=body.thinking_budget(self.settings.sampling.thinking_budget),
                n=body.samples,
                frequency_penalty=body.frequency_penalty,
                presence_penalty=body.presence_penalty,
                max_tokens=max_tokens,
                min_tokens=body.min_tokens or 0,
                stop=body.stop or (),
                stop_tokens=tuple(body.stop_token_ids or ()),
                ignore_eos=body.ignore_eos,
                logprobs=logprobs,
                top_logprobs=top,
                logit_bias=body.biases,
            ).resolved()
        except TilebeamError as error:
            raise bad_request(str(error), code="invalid_value") from None

    async def _answer(self, plan: AnswerPlan, request: Request) -> Response:
        """Let the request in, generate, answer."""
        note(model=plan.model)
        if plan.body.stream:
            return EventStream(self.gate, plan, self.with_model, self.streamed)
        with self.gate.enter(plan.samples) as job:
            work = self.with_model(job, lambda loaded: self._whole(loaded, plan), plan.body.restricted)
            return Response(await job.run(work, request.receive), media_type="application/json")

    async def in_thread(self, request: Request, work: Callable[[LoadedModel, threading.Event], T]) -> T:
        """Let a request in that does not generate: what a function gives that reads texts with the model, in a thread.

        Args:
            work: called with the model, and an event that tells it to end because the client is gone.

        Raises:
            ApiError: what is wrong.
        """
        stopped = threading.Event()
        note(model=self.name)

        async def read(loaded: LoadedModel) -> T:
            return await in_thread(self._readers, lambda: work(loaded, stopped), stopped)

        with self.gate.enter(1) as job:
            return await job.run(self.with_model(job, read), request.receive)

    async def run_template(self, request: Request, work: Callable[[LM], T]) -> T:
        """Return what a function gives that runs a chat template and nothing else, in a thread: such requests pass the
        queue by, unless they wait for the model to be loaded.

        Raises:
            ApiError: what is wrong.
        """

        note(model=self.name)

        async def run() -> T:
            async with self.host.using() as loaded:
                return await in_thread(self._chats, lambda: work(loaded.lm), threading.Event())

        if not self.host.waits:
            return await run()
        with self.gate.enter(1) as job:
            return await job.run(run(), request.receive)

    async def with_model(
        self, job: Job, work: Callable[[LoadedModel], Coroutine[Any, Any, T]], restricted: bool = False
    ) -> T:
        """Return the result of work with the model, which is loaded first where it is not; its errors as `ApiError`.

        Args:
            restricted: not every token may follow every text.
        """
        async with self.host.using() as loaded:
            job.began = time.monotonic()  # loading is not what those behind it wait for
            try:
                return await work(loaded)
            except NpuError as error:
                raise unavailable(str(error), code="npu_failed", retry_after=2) from error
            except GrammarTooComplexError as error:
                raise bad_request(str(error), code="grammar_too_complex") from error
            except TilebeamError as error:
                if loaded.failure is not None:
                    raise unavailable(str(error), code="model_failed", retry_after=2) from error
                if restricted:
                    # The only failure of a sound model: nothing that may follow is in its vocabulary.
                    raise bad_request(str(error), code="nothing_allowed") from error
                raise from_exception(error) from error

    async def prepared(self, lm: LM, plan: AnswerPlan) -> Ready:
        """Make a request ready for this model, which will not refuse it then. Not on the event loop: a long text or a
        large schema takes its time.

        Raises:
            ApiError: the model cannot do what is asked.
        """
        if not lm.info.generates:
            asked = "/v1/rerank" if lm.info.pooling == "rank" else "/v1/embeddings"
            raise bad_request(f"This server's model writes no text: ask {asked}.", code="no_generation")

        def prepare() -> Ready:
            with errors_for_client(lm):
                ready = plan.prepare(lm, replace(plan.params, grammar=grammar_of(plan.body)))
                for prompt in ready.prompts:
                    _check_length(lm, plan, prompt)
                    lm.check(prompt.ids, ready.params)
                _check_logprobs(lm, plan, ready)
                if plan.body.search is not None and ready.params.max_tokens is None:
                    ids = [prompt.ids for prompt in ready.prompts]
                    share = share_of_context(lm.n_ctx, lm.n_seq_max, ids, plan.body.search.budget)
                    ready = replace(ready, params=replace(ready.params, max_tokens=share))
                return ready

        pool = self._chats if isinstance(plan.body, ChatRequest) else None
        return await asyncio.get_running_loop().run_in_executor(pool, prepare)

    async def _whole(self, loaded: LoadedModel, plan: AnswerPlan) -> bytes:
        """Return the JSON of an answer that does not stream."""
        ready = await self.prepared(loaded.lm, plan)
        if plan.body.search is not None:
            events = await self._search(plan.body.search, loaded, plan, ready).whole()
        else:
            events = await generated(loaded.lm, plan, ready)
        self._observe(events)
        answer = plan.answer(plan, loaded.lm.spelling)
        return await asyncio.to_thread(lambda: dumped_in_parts(answer.whole(events)))

    async def streamed(self, loaded: LoadedModel, plan: AnswerPlan, began: float) -> AsyncGenerator[list[Event]]:
        """Yield the events of an answer as they come. Closing it ends the work.

        Args:
            began: when the request came, by `time.monotonic`.
        """
        ready = await self.prepared(loaded.lm, plan)
        if plan.body.search is not None:
            found = self._search(plan.body.search, loaded, plan, ready).stream()
        else:
            found = streamed(loaded.lm, plan, ready, StreamTimes(self.metrics, began))
        async with aclosing(found):
            async for events in found:
                self._observe(events)
                yield events

    def _search(self, search: Search, loaded: LoadedModel, plan: AnswerPlan, ready: Ready) -> SearchAnswer:
        """Return a request's search; ApiError: 400, it asks for one that cannot be."""
        algorithm = algorithm_of(search, loaded.lm, loaded.scorer, plan.body, programs=self.settings.programs)
        return SearchAnswer(search, algorithm, self.searches, loaded, plan, ready, self.metrics)

    def _observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Grown) and event.finish is not None:
                note(finish=event.finish)
            elif isinstance(event, Ended):
                self.metrics.observe(event.usage)


def _completion_prompt(lm: LM, given: str | list[int]) -> Prompt:
    if isinstance(given, str):
        return Prompt(given, lm.tokenize(given))
    check_tokens(lm, given, "prompt")
    return Prompt(lm.detokenize(given), given)


def _check_length(lm: LM, plan: AnswerPlan, prompt: Prompt) -> None:
    """Raise `ApiError` for a prompt that leaves no room for an answer."""
    if len(prompt.ids) >= lm.n_ctx:
        raise bad_request(
            f"The prompt has {len(prompt.ids)} tokens; this model's context holds {lm.n_ctx}, and at least one must "
            "stay free.",
            param="messages" if isinstance(plan.body, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )


def _check_logprobs(lm: LM, plan: AnswerPlan, ready: Ready) -> None:
    """Raise `ApiError` for a request whose log-probabilities might not fit into memory."""
    if not plan.logprobs:
        return
    tokens = 0
    for prompt in ready.prompts:
        room = lm.n_ctx - len(prompt.ids)
        tokens += ready.params.n * min(room, ready.params.max_tokens or room)
    told = tokens * (1 + plan.params.top_logprobs)
    if told > _MOST_LOGPROBS:
        raise bad_request(
            f"The answer may hold {told} log-probabilities; this server tells at most "
            f"{_MOST_LOGPROBS} in one: ask for fewer samples or prompts, fewer likeliest tokens, or set max_tokens.",
            param="logprobs",
            code="too_many_logprobs",
        )

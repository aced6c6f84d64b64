"""What the endpoints do: from a checked body to answers, whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tilebeam.errors import GrammarTooComplexError, NpuError, TilebeamError
from tilebeam.outputs import Delta, EngineFigures, RequestOutput, Usage
from tilebeam.sampling_params import SamplingParams
from tilebeam.server import chat, echo
from tilebeam.server import responses as formats
from tilebeam.server.adapters import Adapters
from tilebeam.server.admission import ClientGone, Gate, Job
from tilebeam.server.errors import ApiError, bad_request, from_exception, unavailable
from tilebeam.server.infill import Filling, InfillRequest
from tilebeam.server.metrics import ModelMetrics, Snapshot
from tilebeam.server.model_host import Loaded, ModelHost
from tilebeam.server.prompts import Prompt, completion_prompt
from tilebeam.server.requests import ChatRequest, CompletionRequest, Generation
from tilebeam.server.responses import Echo, Json, Style, event
from tilebeam.server.search_answers import SearchAnswer
from tilebeam.server.searches import SearchPool, in_thread
from tilebeam.server.settings import Settings
from tilebeam.server.streams import Plan, Writer, merged
from tilebeam.server.thoughts import marks_of
from tilebeam.server.tools import use_of

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

log = logging.getLogger("tilebeam.server")
T = TypeVar("T")

# A client that does not take what is sent to it for so long counts as gone.
_READ_SECONDS = 60.0
# Requests that read texts at the same time; the model reads one after the other.
_READERS = 4
# Chats whose template is run at the same time, or waits for those before: not in the threads that all requests share.
_CHATS = 16
# OpenAI's default for completions.
_COMPLETION_TOKENS = 16
# Log-probabilities of one answer, of tokens and of the likeliest others: each takes up to 400 bytes until it is sent.
_MOST_LOGPROBS = 1 << 19
# What switches each sampler off.
_OFF: dict[str, dict[str, Any]] = {
    "penalties": {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}


class Service:
    """One model's queue and figures, and what is asked of it.

    Args:
        host: the model.
        names: what it may be called in requests; the first is its name in answers.
        slots: samples that it decodes at the same time.
        settings: how to serve.
        searches: the threads of searches.
        metrics: its figures.
        lora: files and scales of its LoRA adapters.
    """

    def __init__(
        self,
        host: ModelHost,
        names: tuple[str, ...],
        slots: int,
        settings: Settings,
        searches: SearchPool,
        metrics: ModelMetrics,
        lora: Sequence[tuple[str, float]] = (),
    ) -> None:
        self.names = names
        self.adapters = Adapters(lora, names)
        self.settings = settings
        self.host = host
        self.metrics = metrics
        self.searches = searches
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="tilebeam-read")
        self._chats = ThreadPoolExecutor(_CHATS, thread_name_prefix="tilebeam-chat")
        self.gate = Gate(slots, settings.max_waiting, settings.max_samples, metrics)

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.names[0]

    def told_name(self, asked: str | None) -> str:
        """The name that an answer tells: the model's, or that of the adapter that was asked for."""
        return asked if asked is not None and asked in self.adapters.names else self.name

    def snapshot(self) -> Snapshot:
        """The figures of this moment."""
        lm, host = self.host.newest, self.host
        now = EngineFigures(0, 0, self.gate.slots, 0, 0, {}) if lm is None else lm.figures()
        return Snapshot(host.health()[0] == 200, host.state == "ready", host.restarts, self.gate.load, now)

    async def close(self) -> None:
        """End all requests and free the model."""
        self.gate.close()
        await self.gate.drain(0)
        for pool in (self._readers, self._chats):
            pool.shutdown(wait=True, cancel_futures=True)
        await self.host.close()

    # --- endpoints --------------------------------------------------------------------------------------------------

    async def complete(
        self, body: CompletionRequest, request: Request, style: type[Style] = formats.CompletionStyle
    ) -> Response | Json:
        """POST /v1/completions.

        Args:
            style: how choices are written.

        Raises:
            ApiError: what is wrong.
        """
        wanted = body.logprobs is not None
        most = max(1, limit) if (limit := body.limit(_COMPLETION_TOKENS)) is not None else None
        params = self._params(body, most, wanted, body.logprobs or 0)
        count = len(body.prompts)
        if count == 0:
            raise bad_request("prompt: the list is empty.", param="prompt", code="invalid_value")

        extra = [(chunk.filename, chunk.text) for chunk in body.extra] if isinstance(body, Filling) else []

        def prompts(lm: LM) -> list[Prompt]:
            leave = min(most or lm.n_ctx, lm.n_ctx // 4)
            return [completion_prompt(lm, given, body.suffix, extra, leave) for given in body.prompts]

        return await self._answer(body, request, style, wanted, params, count, prompts, body.echo)

    async def infill(self, body: InfillRequest, request: Request) -> Json:
        """POST /infill.

        Raises:
            ApiError: what is wrong.
        """
        answer = await self.complete(body.completion(), request, formats.InfillStyle)
        assert isinstance(answer, dict)
        (choice,), usage = answer["choices"], answer["usage"]
        word = choice["stop_reason"]
        text = body.indented(choice["text"])
        cut = choice["finish_reason"] == "length" or text != choice["text"]
        whole = {
            "content": text,
            "stop": True,
            "stop_type": "limit" if cut else "eos" if word is None else "word",
            "stopping_word": "" if cut else word or "",
            "model": answer["model"],
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
            "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
            "truncated": False,
        }
        return body.asked(whole)

    async def chat(self, body: ChatRequest, request: Request) -> Response | Json:
        """POST /v1/chat/completions.

        Raises:
            ApiError: what is wrong.
        """
        params = self._params(body, body.limit(self.settings.max_tokens), body.logprobs, body.top_logprobs or 0)

        def prompts(lm: LM) -> list[Prompt]:
            text, ids = chat.prompt_of(lm, body, self.settings.chat_template, self.settings.chat_template_kwargs)
            asked = [m.text for m in body.messages if m.role == "user"]
            return [Prompt(text, ids, asked[-1] if asked else text)]

        return await self._answer(body, request, formats.ChatStyle, body.logprobs, params, 1, prompts, False)

    # --- what they share --------------------------------------------------------------------------------------------

    def _params(self, body: Generation, max_tokens: int | None, logprobs: bool, top: int) -> SamplingParams:
        default = self.settings.sampling

        def chosen(value: Any, otherwise: Any) -> Any:
            return otherwise if value is None else value

        if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
            message = f"min_tokens: must be at most max_tokens, {max_tokens}, not {body.min_tokens}."
            raise bad_request(message, param="min_tokens", code="invalid_value")
        penalty = body.repetition_penalty if body.repeat_penalty is None else body.repeat_penalty
        try:
            params = replace(
                default,
                n=body.samples,
                temperature=chosen(body.temperature, default.temperature),
                top_k=chosen(body.top_k, default.top_k),
                top_p=chosen(body.top_p, default.top_p),
                min_p=chosen(body.min_p, default.min_p),
                repeat_penalty=chosen(penalty, default.repeat_penalty),
                frequency_penalty=body.frequency_penalty,
                presence_penalty=body.presence_penalty,
                max_tokens=max_tokens,
                min_tokens=body.min_tokens or 0,
                stop=body.stop or (),
                stop_tokens=tuple(body.stop_token_ids or ()),
                # llama.cpp's convention: a negative seed is a new one.
                seed=None if body.seed is None or body.seed < 0 else body.seed,
                ignore_eos=body.ignore_eos,
                logprobs=logprobs or (body.samples > body.n and body.search is None),
                top_logprobs=top,
                logit_bias=body.biases,
                lora=self.adapters.chosen(body.model, body.lora),
            )
            if body.samplers is None:
                return params
            off = [fields for name, fields in _OFF.items() if name not in body.samplers]
            return replace(params, **{name: value for fields in off for name, value in fields.items()})
        except TilebeamError as error:
            raise bad_request(str(error), code="invalid_value") from None

    async def _answer(
        self,
        body: Generation,
        request: Request,
        endpoint: type[Style],
        logprobs: bool,
        params: SamplingParams,
        count: int,
        prompts: Callable[[LM], list[Prompt]],
        echo: bool,
    ) -> Response | Json:
        """Let the request in, generate, answer."""
        params = params.resolved()
        name = self.told_name(body.model)
        plan = Plan(body, endpoint, logprobs, params.top_logprobs, params, count, prompts, echo, name)
        if body.stream:
            return EventStream(self, plan)
        with self.gate.enter(body.samples * count) as job:
            work = self._with_model(job, lambda loaded: self._whole(loaded, plan), body.restricted)
            return await job.run(work, request.receive)

    async def in_thread(self, request: Request, work: Callable[[Loaded, threading.Event], T]) -> T:
        """Let a request in that does not generate: what a function gives that reads texts with the model, in a thread.

        Args:
            work: called with the model, and an event that tells it to end because the client is gone.

        Raises:
            ApiError: what is wrong.
        """
        stopped = threading.Event()

        async def read(loaded: Loaded) -> T:
            return await in_thread(self._readers, lambda: work(loaded, stopped), stopped)

        with self.gate.enter(1) as job:
            return await job.run(self._with_model(job, read), request.receive)

    async def shortly(self, request: Request, work: Callable[[LM], T], *, chat: bool = False) -> T:
        """What a function gives that takes a moment, in a thread: such requests pass the queue by, unless they wait for
        the model to be loaded.

        Args:
            chat: the function runs a chat template.

        Raises:
            ApiError: what is wrong.
        """

        async def run() -> T:
            async with self.host.using() as loaded:
                pool = self._chats if chat else None
                return await in_thread(pool, lambda: work(loaded.lm), threading.Event())

        if not self.host.waits:
            return await run()
        with self.gate.enter(1) as job:
            return await job.run(run(), request.receive)

    async def _with_model(
        self, job: Job, work: Callable[[Loaded], Coroutine[Any, Any, T]], restricted: bool = False
    ) -> T:
        """The result of work with the model, which is loaded first where it is not; its errors as `ApiError`.

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

    def _fitted(self, lm: LM, plan: Plan) -> Plan:
        """The plan for this model, which may have been loaded for it.

        Raises:
            ApiError: the model cannot do what is asked.
        """
        if not lm.info.generates:
            asked = "/v1/rerank" if lm.info.pooling == "rank" else "/v1/embeddings"
            raise bad_request(f"This server's model writes no text: ask {asked}.", code="no_generation")
        if not isinstance(plan.body, ChatRequest):
            return plan
        if plan.body.search is not None:
            return plan
        template = self.settings.chat_template or lm.chat_template or ""
        tools = use_of(plan.body, lm, self.settings.chat_template)
        apart = (plan.body.reasoning_format or self.settings.reasoning_format) != "none"
        return replace(plan, tools=tools, marks=marks_of(template) if apart or tools else None, apart=apart)

    async def _prepared(self, lm: LM, plan: Plan) -> tuple[list[Prompt], SamplingParams]:
        """Prompts and how to sample, which the model will not refuse. Not on the event loop: a long text or a large
        schema takes its time."""

        def prepare() -> tuple[list[Prompt], SamplingParams]:
            params = replace(plan.params, grammar=plan.grammar(lm), spelled=plan.spelled(lm))
            prompts = plan.prompts(lm)
            for prompt in prompts:
                if len(prompt.ids) >= lm.n_ctx:
                    raise bad_request(
                        f"The prompt has {len(prompt.ids)} tokens; this model's context holds {lm.n_ctx}, and at least "
                        "one must stay free.",
                        param=plan.prompt_field,
                        code="context_length_exceeded",
                    )
                lm.check(prompt.ids, params)
            _check_logprobs(lm, plan, prompts, params)
            if plan.body.search is not None and params.max_tokens is None:
                params = replace(params, max_tokens=_share_of_context(lm, prompts, plan.body.search.budget))
            return prompts, params

        try:
            pool = self._chats if isinstance(plan.body, ChatRequest) else None
            return await asyncio.get_running_loop().run_in_executor(pool, prepare)
        except GrammarTooComplexError:
            raise
        except TilebeamError as error:
            if lm.failure is not None:
                raise
            raise bad_request(str(error), code="invalid_value") from None

    async def _whole(self, loaded: Loaded, plan: Plan) -> Json:
        """The answer to a request that does not stream."""
        plan = self._fitted(loaded.lm, plan)
        prompts, params = await self._prepared(loaded.lm, plan)
        if plan.body.search is not None:
            answer = SearchAnswer(self.searches, loaded, plan, self.metrics)
            return self._finished(plan, *await answer.whole(prompts, params))
        echoes, scoring = await echo.of(self._readers, loaded.lm, plan, prompts)
        if plan.body.draws_nothing:
            outputs = [echo.nothing(p, plan.params, plan.body.n) for p in prompts]
        elif isinstance(plan.body, Filling) and plan.body.seconds is not None:
            outputs = [await _within(loaded.lm, prompts[0], params, plan.body.seconds)]
        else:
            outputs = await loaded.lm.agenerate([p.ids for p in prompts], params)
        if any(s.finish_reason == "aborted" for o in outputs for s in o.outputs):
            raise unavailable("The model was stopped.", code="aborted", retry_after=2)
        choices = await asyncio.to_thread(_choices, plan, plan.style(loaded.lm, prompts, params), outputs, echoes)
        usage = echo.added(formats.total_of(outputs), scoring)
        return self._finished(plan, choices, usage)

    def _finished(self, plan: Plan, choices: list[Json], usage: Usage) -> Json:
        self.metrics.observe(usage)
        answer = plan.head(plan.endpoint.kind).as_dict()
        answer |= {"choices": choices, "usage": formats.usage_of(usage)}
        return answer | {"tilebeam": formats.extras(usage, plan.params.seed or 0)}


async def _within(lm: LM, prompt: Prompt, params: SamplingParams, seconds: float) -> RequestOutput:
    """One sample, which ends with the first line that ends later than so many seconds after its first token, as those
    of llama-server do."""
    began, late = math.inf, False
    async with lm.astream(prompt.ids, params) as stream:
        async for delta in stream:
            began = min(began, time.monotonic())
            if not late and delta.finish_reason is None and "\n" in delta.text:
                late = time.monotonic() - began > seconds
                if late:
                    stream.cancel()
        output = stream.output
    if late:
        output.outputs = [replace(sample, finish_reason="length") for sample in output.outputs]
    return output


def _choices(plan: Plan, style: Style, outputs: Sequence[RequestOutput], echoes: Sequence[Echo | None]) -> list[Json]:
    """The choices of a complete answer; in a thread, as there may be many log-probabilities."""
    choices = []
    for i, (before, output) in enumerate(zip(echoes, outputs, strict=True)):
        for j, sample in enumerate(formats.best(output.outputs, plan.body.n)):
            if plan.body.include_stop_str_in_output:
                sample = replace(sample, text=sample.text + (sample.stop_reason or ""))
            choices.append(style.choice(i * plan.body.n + j, sample, before))
    return choices


def _check_logprobs(lm: LM, plan: Plan, prompts: Sequence[Prompt], params: SamplingParams) -> None:
    """Raise `ApiError` for a request whose log-probabilities might not fit into memory."""
    if not plan.logprobs:
        return
    tokens = 0
    for prompt in prompts:
        room = lm.n_ctx - len(prompt.ids)
        drawn = 0 if plan.body.draws_nothing else min(room, params.max_tokens or room)
        tokens += params.n * (drawn + (len(prompt.ids) if plan.scored else 0))
    if tokens * (1 + plan.top) > _MOST_LOGPROBS:
        raise bad_request(
            f"The answer may hold {tokens * (1 + plan.top)} log-probabilities; this server tells at most "
            f"{_MOST_LOGPROBS} in one: ask for fewer samples or prompts, fewer likeliest tokens, or set max_tokens.",
            param="logprobs",
            code="too_many_logprobs",
        )


def _share_of_context(lm: LM, prompts: Sequence[Prompt], budget: int) -> int:
    """Tokens of a search's candidate where nobody limits them: as many as there is room for in the cache when all that
    decode at the same time are that long. Without it a model that does not stop would decode for budget times the
    context, and candidates would push each other out."""
    longest = max(len(prompt.ids) for prompt in prompts)
    together = min(lm.n_seq_max, budget * len(prompts))
    return max(1, (lm.n_ctx - longest) // together)


# --- streams ----------------------------------------------------------------------------------------------------------


class EventStream(Response):
    """A streamed answer: server-sent events, ended when the client goes away.

    Errors before the first event are ordinary answers; later ones are an event of their own.
    """

    def __init__(self, service: Service, plan: Plan) -> None:
        super().__init__(None)
        self._service = service
        self._plan = plan
        self._began = time.monotonic()
        self._started = False
        self._sending: float | None = None  # since when
        self.told: Callable[[ApiError], ApiError] = lambda error: error  # how an error is put for this client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        service, plan = self._service, self._plan
        try:
            with service.gate.enter(plan.body.samples * plan.count) as job:
                watcher = asyncio.create_task(self._watch(job))
                try:
                    work = service._with_model(job, lambda loaded: self._send(loaded, send), plan.body.restricted)
                    await job.run(work, receive)
                finally:
                    watcher.cancel()
        except ClientGone:
            scope["tilebeam.status"] = 499
        except ApiError as found:
            error = self.told(found)
            scope["tilebeam.status"] = error.status
            if not self._started:
                await error.response()(scope, receive, send)
            else:
                await send({"type": "http.response.body", "body": event(error.body()), "more_body": False})

    async def _watch(self, job: Job) -> None:
        """End the job if its client takes nothing of what is sent."""
        while True:
            await asyncio.sleep(_READ_SECONDS / 4)
            if self._sending is not None and time.monotonic() - self._sending > _READ_SECONDS:
                job.stop(ClientGone())

    async def _begin(self, send: Send) -> None:
        """Send what goes before all events."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        headers.append((b"x-accel-buffering", b"no"))  # nginx would hold events back
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._started = True

    async def _put(self, text: bytes, send: Send) -> None:
        """Send events, while `_watch` sees whether the client takes them."""
        self._sending = time.monotonic()
        await send({"type": "http.response.body", "body": text, "more_body": True})
        self._sending = None

    async def _send_search(self, chunks: AsyncGenerator[bytes], send: Send) -> None:
        """Search, and send what happens."""
        await self._begin(send)
        async with aclosing(chunks):
            async for text in chunks:
                if text:
                    await self._put(text, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, loaded: Loaded, send: Send) -> None:
        """Generate, and send what comes."""
        service, lm = self._service, loaded.lm
        plan = service._fitted(lm, self._plan)
        prompts, params = await service._prepared(lm, plan)
        if plan.body.search is not None:
            answer = SearchAnswer(service.searches, loaded, plan, service.metrics)
            await self._send_search(answer.stream(prompts, params, self._began), send)
            return
        echoes, scoring = await echo.of(service._readers, lm, plan, prompts)
        async with AsyncExitStack() as stack:
            drawn = [] if plan.body.draws_nothing else prompts
            streams = [await stack.enter_async_context(lm.astream(p.ids, params)) for p in drawn]
            await self._begin(send)
            writer = Writer(plan, plan.style(lm, prompts, params), service.metrics, self._began)

            text = await asyncio.to_thread(writer.opening, echoes)
            stopped = False
            async for deltas in merged(streams):
                stopped = stopped or any(delta.finish_reason == "aborted" for _, delta in deltas)
                if stopped:
                    continue  # the reason, if there is one, comes behind
                text += b"".join([writer.delta(i, delta) for i, delta in deltas])
                if text:
                    await self._put(text, send)
                text = b""
            if stopped:
                raise unavailable("The model was stopped.", code="aborted", retry_after=2)
            outputs = [stream.output for stream in streams]
        if plan.body.draws_nothing:
            outputs = [echo.nothing(p, plan.params, plan.body.n) for p in prompts]
            ends = [Delta(sample.index, "", [], finish_reason="length") for sample in outputs[0].outputs]
            text += b"".join(writer.delta(i, end) for i in range(len(prompts)) for end in ends)
        usage = echo.added(formats.total_of(outputs), scoring)
        service.metrics.observe(usage)
        await send({"type": "http.response.body", "body": text + writer.closing(usage), "more_body": False})

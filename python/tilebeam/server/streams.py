"""Streamed answers: what is written when a delta comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tilebeam.chat.thoughts import CHANNELS, Marks, Thinking, is_open, texts_of
from tilebeam.chat.tool_grammar import forced_grammar, held_grammar
from tilebeam.chat.tools import ToolUse
from tilebeam.grammars.gbnf import spells
from tilebeam.outputs import Delta, Usage
from tilebeam.sampling_params import SamplingParams
from tilebeam.server import responses as formats
from tilebeam.server.grammar import grammar_of
from tilebeam.server.metrics import ModelMetrics
from tilebeam.server.prompts import Prompt
from tilebeam.server.requests import ChatRequest, Generation
from tilebeam.server.responses import Echo, Head, Json, Style, TokenLedger, dumped, dumped_in_parts, event
from tilebeam.server.tool_style import ToolStyle

if TYPE_CHECKING:
    from tilebeam.engine.streams import AsyncStream
    from tilebeam.model.lm import LM


@dataclass(frozen=True)
class Plan:
    """A request, checked and ready to be worked on.

    Attributes:
        body: as it came.
        endpoint: how its answer is written.
        logprobs, top: whether it tells log-probabilities, and of how many of the likeliest tokens.
        params: how to sample, with a seed.
        count: prompts.
        prompts: makes them; takes its time.
        echo: the answer begins with the prompt.
        model: its name in the answer.
        tools: the functions that the model may call, None: it calls none.
        marks: around its thoughts, None: it has none that are read.
        apart: these are told apart from the text.
    """

    body: Generation
    endpoint: type[Style]
    logprobs: bool
    top: int
    params: SamplingParams
    count: int
    prompts: Callable[[LM], list[Prompt]]
    echo: bool
    model: str
    tools: ToolUse | None = None
    marks: Marks | None = None
    apart: bool = True

    def grammar(self, lm: LM) -> str | None:
        """The grammar that the text of this model has to match, None for any text.

        Raises:
            FieldRefused: none can be made of what the request says, or a function takes no object.
        """
        if self.tools is None:
            return grammar_of(self.body)
        self.tools.check()
        if self.tools.forced:
            return forced_grammar(self.tools)
        return None if self.body.ignore_eos else held_grammar(self.tools, lm)

    @property
    def prompt_field(self) -> str:
        """The field that prompts come from."""
        return "messages" if isinstance(self.body, ChatRequest) else "prompt"

    def spelled(self, lm: LM) -> tuple[int, ...]:
        """Control tokens that have to be seen to read calls and thoughts."""
        texts = [*(self.tools.family.marks if self.tools is not None else ()), *texts_of(self.marks)]
        return tuple({t for text in texts for t in lm.tokenize(text, add_special=False) if lm.is_control(t)})

    def style(self, lm: LM, prompts: Sequence[Prompt] = (), params: SamplingParams | None = None) -> Style:
        """Writes the answer of this model.

        Args:
            prompts, params: what it answers and how; none: it is a search.
        """
        spelled = params.spelled if params is not None else ()

        @cache  # the same tokens are told again and again
        def piece(token: int) -> bytes:
            return lm.spelling(token) if token in spelled else lm.piece(token)

        options = (piece, cache(lm.spelling), self.logprobs, self.top, self.scored)
        thinking = self._thinking(prompts[0].text, params.grammar) if prompts and params is not None else None
        if self.tools is None and thinking is None:
            return self.endpoint(*options)
        return ToolStyle(self.tools, *options, thinking=thinking)

    def _thinking(self, prompt: str, grammar: str | None) -> Thinking | None:
        """How the answer's thoughts are read, None: it has none. A grammar that spells no end of them leaves no room
        for any; gpt-oss has headers beside them."""
        if self.marks is None or not isinstance(self.body, ChatRequest):
            return None
        free = grammar is None or (self.tools is not None and not self.tools.forced)
        ends = free or spells(grammar or "", self.marks.closes)
        if not ends and self.marks != CHANNELS:
            return None
        continued = self.body.messages[-1].text if self.body.continue_final_message else None
        return Thinking(self.marks, ends and is_open(prompt, continued, self.marks), self.apart)

    @property
    def scored(self) -> bool:
        """Whether log-probabilities of the prompt are told."""
        return self.echo and self.logprobs

    def head(self, kind: str) -> Head:
        """The beginning of an answer, with a new id."""
        return Head(kind, self.model)


class Writer:
    """Writes the events of one stream."""

    def __init__(self, plan: Plan, style: Style, metrics: ModelMetrics, began: float) -> None:
        self._plan = plan
        self._style = style
        self._metrics = metrics
        self._began = began
        self._head = plan.head(style.chunk_kind).as_dict()
        options = plan.body.stream_options
        self._usage = options is not None and options.include_usage
        # All but the choices is the same in every chunk.
        before, after = event(self._head | {"choices": [None]} | ({"usage": None} if self._usage else {})).split(
            b"null", 1
        )
        self._before, self._after = before, after
        self._ledgers: dict[int, TokenLedger] = {}
        self._offsets: list[int] = []
        self._first: dict[int, tuple[float, int]] = {}  # of each sample: when its first token came, tokens since

    def opening(self, echoes: Sequence[Echo | None]) -> bytes:
        """What goes before the first token; not for the event loop: echoed prompts may be long."""
        style, n = self._style, self._plan.body.n
        self._offsets = [len(echo.text) if echo else 0 for echo in echoes]
        chunks = [style.opening(i * n + j, echo) for i, echo in enumerate(echoes) for j in range(n)]
        return b"".join(self._before + dumped_in_parts(chunk) + self._after for chunk in chunks if chunk is not None)

    def delta(self, i: int, delta: Delta) -> bytes:
        """What a delta of prompt `i` adds; nothing while there is no new text."""
        index = i * self._plan.body.n + delta.index
        self._time(index, delta)
        ledger = self._ledgers.get(index)
        if ledger is None:
            ledger = self._ledgers[index] = TokenLedger(self._style.piece)
        if self._style.logprobs:
            ledger.feed(delta.token_ids, delta.logprobs, delta.top_logprobs)
        if not delta.text and delta.finish_reason is None:
            return b""
        text = delta.text
        if self._plan.body.include_stop_str_in_output:
            text += delta.stop_reason or ""
        chunks = self._style.chunks(index, text, delta, ledger, self._offsets[i])
        return b"".join(map(self._event, chunks))

    def _time(self, index: int, delta: Delta) -> None:
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

    def closing(self, usage: Usage) -> bytes:
        """What goes behind the last token."""
        last = b""
        if self._usage:
            extras = formats.extras(usage, self._plan.params.seed or 0)
            last = event(self._head | {"choices": [], "usage": formats.usage_of(usage), "tilebeam": extras})
        return last + event("[DONE]")

    def _event(self, choice: Json) -> bytes:
        return self._before + dumped(choice) + self._after


async def merged(streams: Sequence[AsyncStream]) -> AsyncIterator[list[tuple[int, Delta]]]:
    """The deltas of several streams with the stream's number, as they come: those that came together in one list, so
    that they can be sent together."""
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

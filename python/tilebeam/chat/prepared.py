"""A chat between its messages and its answer: what the model reads, what it may write, and how that is read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace

from tilebeam.chat.answer_parts import calls_in, reasoning_in, text_in
from tilebeam.chat.answer_reader import AnswerReader
from tilebeam.chat.refused import FieldRefused
from tilebeam.chat.thoughts import CHANNELS, Marks, Thinking, is_open, texts_of
from tilebeam.chat.tool_grammar import ModelTokens, forced_grammar, held_grammar
from tilebeam.chat.tools import ToolUse
from tilebeam.engine.streams import AsyncStream, Stream
from tilebeam.grammars.constraint import grammar_of
from tilebeam.grammars.gbnf import spells
from tilebeam.outputs import CompletionOutput, Delta, RequestOutput, ToolCallDelta
from tilebeam.prompt import Prompt
from tilebeam.sampling_params import SamplingParams, parsed_under


@dataclass(frozen=True)
class PreparedChat:
    """A chat that is ready to be answered; see `LM.prepare_chat`.

    Attributes:
        prompt: what the model reads.
        params: how to sample: with the grammar of calls, and the control tokens that have to be seen.
        use: functions that the model may call, None: none.
        thinking: how its thoughts are read, None: they are text.
        schema: what its text is valid under, None: anything.
    """

    prompt: Prompt
    params: SamplingParams
    use: ToolUse | None
    thinking: Thinking | None
    schema: object = None

    def reader(self) -> AnswerReader | None:
        """Return a reader of one answer, None: all that is written is text."""
        return None if self.use is None and self.thinking is None else AnswerReader(self.use, self.thinking)

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return what was generated for the prompt, with thoughts and calls told apart from the texts."""
        return replace(output, outputs=[self.read_sample(sample) for sample in output.outputs])

    def as_candidate(self, sample: CompletionOutput) -> CompletionOutput:
        """Return a sample as searches compare it: its text is the calls that it writes as a JSON list of their names
        and arguments, else what it says without its thoughts."""
        found = self.read_sample(sample)
        try:
            calls = [{"name": c.name, "arguments": json.loads(c.arguments or "{}")} for c in found.tool_calls]
        except (ValueError, RecursionError):  # it was cut
            return sample
        text = json.dumps(calls, ensure_ascii=False) if calls else found.text
        return replace(sample, text=text, written=sample.text)

    def read_sample(self, sample: CompletionOutput) -> CompletionOutput:
        """Return a sample, or what `as_candidate` made of one, with thoughts and calls told apart from its text."""
        sample = replace(sample, text=sample.text if sample.written is None else sample.written)
        reader = self.reader()
        if reader is not None:
            parts, finish = reader.take(sample.text, sample.finish_reason)
            sample = replace(
                sample,
                text=text_in(parts),
                reasoning=reasoning_in(parts) or None,
                tool_calls=calls_in(parts),
                finish_reason=finish or sample.finish_reason,
                written=sample.text,
            )
        return replace(sample, parsed=parsed_under(self.schema, sample.text, sample.finish_reason))

    def read_stream(self, stream: Stream) -> Iterator[Delta]:
        """Yield a stream's deltas with thoughts and calls told apart from the texts; what is left of the stream is
        cancelled with the iterator."""
        readers: dict[int, AnswerReader | None] = {}
        with stream:
            for delta in stream:
                yield self._read_delta(delta, readers)

    async def aread_stream(self, stream: AsyncStream) -> AsyncIterator[Delta]:
        """Do what `read_stream` does, for coroutines."""
        readers: dict[int, AnswerReader | None] = {}
        async with stream:
            async for delta in stream:
                yield self._read_delta(delta, readers)

    def _read_delta(self, delta: Delta, readers: dict[int, AnswerReader | None]) -> Delta:
        if delta.index not in readers:
            readers[delta.index] = self.reader()
        if (reader := readers[delta.index]) is None:
            return delta
        parts, finish = reader.take(delta.text, delta.finish_reason)
        calls = tuple(part for part in parts if isinstance(part, ToolCallDelta))
        text, thoughts = text_in(parts), reasoning_in(parts)
        return replace(delta, text=text, reasoning=thoughts, tool_calls=calls, finish_reason=finish)


def bound(params: SamplingParams, model: ModelTokens, use: ToolUse | None, marks: Marks | None) -> SamplingParams:
    """Return how to sample an answer whose calls and thoughts are read.

    Args:
        params: how to sample.
        model: whose tokens they are.
        use: functions that it may call, None: none.
        marks: around its thoughts, None: these are not read.

    Raises:
        FieldRefused: calls and another form of the text are asked for, or no grammar can be made of the functions.
        TilebeamError: the form that is asked for is none.
    """
    texts = [*(use.family.marks if use is not None else ()), *texts_of(marks)]
    shown = tuple({t for text in texts for t in model.tokenize(text, add_special=False) if model.is_control(t)})
    params = replace(params, shown_tokens=(*params.shown_tokens, *shown))
    if use is None:
        return replace(params, grammar=grammar_of(params), json_schema=None, regex=None)
    if params.constrained:
        message = 'grammar, json_schema or regex with tools: set tool_choice to "none".'
        raise FieldRefused(message, param="tools", code="invalid_value")
    use.check()
    if use.forced:
        return replace(params, grammar=forced_grammar(use))
    return params if params.ignore_eos or params.min_tokens else replace(params, grammar=held_grammar(use, model))


def with_forcing(
    prompt: Prompt, continued: str | None, params: SamplingParams, model: ModelTokens, marks: Marks, *, opens: bool
) -> tuple[Prompt, SamplingParams]:
    """Return what a model reads and how it samples an answer upon which something may be forced.

    Args:
        prompt: what the model reads.
        continued: the message at its end that the answer goes on with, None: it begins a new one.
        params: how to sample.
        model: whose tokens they are.
        marks: around thoughts.
        opens: open thoughts that are limited in the prompt: a grammar, which holds from their end on, has no room for
            the mark.
    """
    ids, continues = list(prompt.tokens(model)), 0
    if continued:
        size = len(continued.encode())
        while size > 0 and continues < len(ids):
            continues += 1
            size -= len(model.spelling(ids[-continues]))
    decided = prompt.text.rstrip().endswith((marks.opens.rstrip(), marks.closes))
    if continued is None and opens and not decided and params.limits_thoughts and params.thinking_budget != 0:
        ids += model.tokenize(marks.opens, add_special=False)
        prompt = replace(prompt, text=prompt.text + marks.opens, token_ids=ids)
    return prompt, replace(params, thinking_marks=marks, continues=continues)


def thinking_of(
    prompt: Prompt, continued: str | None, params: SamplingParams, use: ToolUse | None, marks: Marks, separate: bool
) -> Thinking | None:
    """Tell how an answer's thoughts are read, None: it has none. A grammar that spells no end of them leaves no room
    for any, unless it waits for it; gpt-oss has headers beside them.

    Args:
        prompt: what the model reads.
        continued: the message at its end that the answer goes on with, None: it begins a new one.
        params: as `bound` made them.
        use: functions that it may call.
        marks: around thoughts.
        separate: they are told apart from the text.
    """
    free = params.grammar is None or (use is not None and not use.forced)
    waits = params.limits_thoughts and is_open(prompt.text, continued, marks)
    ends = free or waits or spells(params.grammar or "", marks.closes)
    if not ends and marks != CHANNELS:
        return None
    return Thinking(marks, ends and is_open(prompt.text, continued, marks), separate)

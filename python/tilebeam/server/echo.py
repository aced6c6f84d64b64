"""Prompts that answers begin with, and the log-probabilities of their tokens: what harnesses score texts by.

A prompt is read between the batches of other requests.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from tilebeam.errors import SearchCancelled
from tilebeam.outputs import CompletionOutput, RequestOutput, Usage
from tilebeam.prompt import Prompt
from tilebeam.sampling_params import SamplingParams
from tilebeam.server.answer_events import Echo, Shown, TokenBytes
from tilebeam.server.plan import AnswerPlan
from tilebeam.server.searches import in_thread

if TYPE_CHECKING:
    from tilebeam.engine.reading import TokenReading
    from tilebeam.model.lm import LM


async def of(
    pool: ThreadPoolExecutor, lm: LM, plan: AnswerPlan, prompts: Sequence[Prompt]
) -> tuple[list[Echo | None], Usage | None]:
    """Return what goes before each prompt's samples, and what it cost to read; None where nothing does. Cancelling ends
    the reading after its present batch.

    Raises:
        TilebeamError: decoding failed.
    """
    if not plan.echo:
        return [None] * len(prompts), None
    if not plan.scored:
        return [Echo(prompt.text) for prompt in prompts], None
    cancelled = threading.Event()

    def hook(_decoded: int, _total: int) -> None:
        if cancelled.is_set():
            raise SearchCancelled("The request was cancelled.")

    def read() -> tuple[list[Echo | None], Usage]:
        ids = [prompt.ids for prompt in prompts]
        readings = lm.token_logprobs(ids, top=plan.params.top_logprobs, progress=hook)
        usage = Usage(
            cached_tokens=sum(reading.cached_tokens for reading in readings),
            prefill_seconds=sum(reading.seconds for reading in readings),
        )
        return [_scored(lm, *pair) for pair in zip(prompts, readings, strict=True)], usage

    return await in_thread(pool, read, cancelled)


def _scored(lm: LM, prompt: Prompt, reading: TokenReading) -> Echo:
    starts, lead = _starts(prompt, lm.spelling) or _starts(prompt, lm.piece) or ([0] * len(prompt.ids), 0)
    tokens = [
        Shown(
            max(0, start - lead),
            token,
            float(reading.logprobs[i - 1]) if i else None,
            reading.top[i - 1] if i and reading.top else None,
        )
        for i, (start, token) in enumerate(zip(starts, prompt.ids, strict=True))
    ]
    return Echo(prompt.text, tokens)


def _starts(prompt: Prompt, piece: TokenBytes) -> tuple[list[int], int] | None:
    """Return the character at which each token starts, and how many of these come before the text: BOS, or a space that
    the tokenizer puts in front. None: the pieces do not make up the text, which spells control tokens or does not."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts, length, text = [], 0, []
    for token in prompt.ids:
        starts.append(length)
        text.append(decoder.decode(piece(token)))
        length += len(text[-1])
    whole = "".join(text) + decoder.decode(b"", final=True)
    return (starts, len(whole) - len(prompt.text)) if whole.endswith(prompt.text) else None


def nothing(prompt: Prompt, params: SamplingParams, n: int) -> RequestOutput:
    """Return the output of a request that draws no token."""
    samples = [
        CompletionOutput(i, "", [], "length", params.sample_seed(i), 0.0, [], None, [] if params.top_logprobs else None)
        for i in range(n)
    ]
    return RequestOutput(prompt.text, prompt.ids, samples, Usage(prompt_tokens=len(prompt.ids)), params.seed or 0)


def added(usage: Usage, scoring: Usage | None) -> Usage:
    """Return a request's cost with that of reading its prompts, which are then in the cache for its samples."""
    if scoring is None:
        return usage
    return replace(
        usage,
        cached_tokens=scoring.cached_tokens,
        prefill_seconds=usage.prefill_seconds + scoring.prefill_seconds,
    )

"""Prompts in, samples out: the part of a loaded model that generates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Unpack, cast

import numpy as np

from tilebeam.chat.thoughts import CHANNELS, Marks, is_open, marks_of
from tilebeam.engine.dispatcher import Call
from tilebeam.engine.forcing import Forcing
from tilebeam.engine.request import Request, check_prompt, make_request
from tilebeam.engine.streams import AsyncStream, Stream, run, run_async, run_each
from tilebeam.errors import NpuError, TilebeamError
from tilebeam.model.core import Core
from tilebeam.outputs import Progress, ProgressHook, RequestOutput, SampleHook
from tilebeam.prompt import Prompt, PromptLike, refuse_messages
from tilebeam.sampling_params import SamplingFields, SamplingParams, one_each, paired, updated

# The mark that opens thoughts, and white space behind it, are at most so many tokens.
_MARK_TOKENS = 64
# `completed` submits so many times the samples that can decode together: the next ones wait in the queue.
_AHEAD = 2


class Generating(Core):
    """`generate` and its kin."""

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: ProgressHook | None = None,
        on_sample: SampleHook | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[RequestOutput]:
        """Generate samples for one or several prompts.

        Args:
            prompts: texts, lists of token ids (taken as they are, without a BOS token being added), or what
                `chat_prompt` returned.
            sampling: for all prompts, or one per prompt.
            progress: called after every batch; returning False cancels what is not finished.
            on_sample: called after the batch in which a sample ended, in this thread, with the number of its prompt and
                the sample without its hidden states. It may return numbers of prompts: what is not finished of their
                samples ends as "aborted", and other prompts get the slots.
            fields: of `SamplingParams`, by name, in place of those of `sampling`: max_tokens=64, temperature=0.

        Returns:
            One result per prompt, in their order.

        Raises:
            TilebeamError: a prompt is empty or longer than the context, a field is unknown, or the grammar is none
                (before anything is decoded); decoding failed; or the model was closed meanwhile. NpuError: the NPU
                failed; the model must be loaded again.
        """
        call = Call(watched=progress is not None or on_sample is not None)
        self._fill(call, prompts, updated(sampling, fields))
        return run(self._dispatcher, call, progress, on_sample)

    async def agenerate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: ProgressHook | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[RequestOutput]:
        """Do what `generate` does, for coroutines: the event loop goes on meanwhile. Calls of different tasks share
        batches.

        Cancelling the task aborts the call and frees its KV cells. `progress` is called in the event loop's thread;
        after several batches at once, if it was busy.
        """
        call = Call(watched=progress is not None)
        self._fill(call, prompts, updated(sampling, fields))
        return await run_async(self, self._dispatcher, call, progress)

    def completed(
        self,
        prompts: Iterable[PromptLike],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Generate samples for many prompts and get each prompt's result as soon as it is complete.

            for i, output in lm.completed(prompts, max_tokens=64):
                file.write(json.dumps({"i": i, "text": output.outputs[0].text}) + "\n")

        Prompts are taken as slots come free, so there may be any number of them. Nothing is decoded while the results
        are not asked for. Leaving the loop cancels what is not finished.

        Args:
            prompts: as for `generate`, or an iterator of them.
            sampling, fields: as for `generate`.

        Returns:
            An iterator of a prompt's number and its result; shorter texts overtake longer ones.

        Raises:
            TilebeamError: a field is unknown. By the iterator: as `generate`; of a prompt that is refused the number is
                told, after all prompts before it are complete.
        """
        chosen = updated(sampling, fields)
        items: Iterable[PromptLike] = [prompts] if isinstance(prompts, str | Prompt) else prompts
        calls = (self._numbered_call(i, *pair) for i, pair in enumerate(paired(items, chosen)))
        return run_each(self._dispatcher, calls, _AHEAD * self.n_seq_max)

    def _numbered_call(self, i: int, prompt: PromptLike, params: SamplingParams) -> Call:
        call = Call(watched=True)
        try:
            call.add(self._request(prompt, params, call.progress))
        except NpuError:
            raise
        except TilebeamError as error:
            raise TilebeamError(f"Prompt {i}: {error}") from None
        return call

    def stream(
        self, prompt: PromptLike, sampling: SamplingParams | None = None, **fields: Unpack[SamplingFields]
    ) -> Stream:
        """Generate samples for one prompt and get them as they grow.

        Args:
            prompt: a text, a list of token ids, or what `chat_prompt` returned.
            sampling, fields: as for `generate`. With n above 1 the deltas of all samples come, each with its index.

        Returns:
            An iterator of `Delta`; the texts of a sample's deltas make up its text. Also a context manager.

        Raises:
            TilebeamError: as `generate`; what goes wrong while decoding is raised by the iterator.
        """
        call = Call(streams=True, watched=True)
        self._fill(call, [prompt], updated(sampling, fields))
        self._dispatcher.submit(call)
        return Stream(self, self._dispatcher, call)

    def astream(
        self, prompt: PromptLike, sampling: SamplingParams | None = None, **fields: Unpack[SamplingFields]
    ) -> AsyncStream:
        """Do what `stream` does, for coroutines: to be called in one, an async iterator and context manager. The
        samples grow at once, whether it is read or not."""
        call = Call(streams=True, watched=True)
        self._fill(call, [prompt], updated(sampling, fields))
        stream = AsyncStream(self, self._dispatcher, call)
        self._dispatcher.submit(call, background=self)
        return stream

    def _fill(
        self,
        call: Call,
        prompts: PromptLike | Sequence[PromptLike],
        sampling: SamplingParams | Sequence[SamplingParams],
    ) -> None:
        """Make requests of prompts, all of them checked before any is submitted."""
        items = _as_list(prompts)
        for prompt, p in zip(items, one_each(sampling, len(items)), strict=True):
            call.add(self._request(prompt, p, call.progress))

    def _request(self, prompt: PromptLike, params: SamplingParams, progress: Progress) -> Request:
        """Make a request of a prompt, checked."""
        self.check_generates()
        with self._dispatcher.using():
            ids = self._ids(prompt)
            if isinstance(prompt, str | Prompt):
                text = Prompt.of(prompt).text
            else:
                check_prompt(ids, self._context)
                text = self._model.vocab.text(ids)
            request = make_request(self._context, text, ids, params, progress)
            if params.forces:
                request.forcing = self._forcing(ids, request.params)
            return request

    def _forcing(self, ids: list[int], params: SamplingParams) -> Forcing:
        """Tell what is forced upon a prompt's samples, and whether it ends within a thought."""
        vocab, start = self._model.vocab, len(ids) - params.continues
        marks = Marks(*params.thinking_marks) if params.thinking_marks else marks_of(self.chat_template or "")
        end = "".join(map(vocab.spelling, ids[max(0, start - _MARK_TOKENS) : start]))
        opened = is_open(end, None, marks)
        return Forcing.of(params, vocab, marks, opened=opened, anywhere=marks == CHANNELS)

    def check(self, prompt: Sequence[int], sampling: SamplingParams) -> None:
        """Raise `TilebeamError` if `generate` would refuse these before decoding anything. Any thread may ask."""
        self.check_generates()
        with self._dispatcher.using():
            make_request(self._context, "", list(prompt), sampling, Progress())


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    if isinstance(prompts, str | Prompt):
        return [prompts]
    refuse_messages(prompts)
    items = list(prompts)
    if items and all(isinstance(item, (int, np.integer)) for item in items):
        return [cast(Sequence[int], items)]
    return cast(list[PromptLike], items)

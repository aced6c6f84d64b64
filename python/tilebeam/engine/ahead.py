"""Several steps in one call of native code: decode, draw, decode ..

A step costs some 50 us in Python, of a small model a tenth of the step. While every text goes on by one token and
nobody has to look at it (backend/sampling/sampling.h), native code makes the steps by itself, for a short time or until
somebody wants to join or to stop.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import llama_cpp.llama_cpp as C
import numpy as np

from tilebeam.engine.sampler import BatchSampler, SampleRows
from tilebeam.native.llama import Context
from tilebeam.native.sampling import address_of, ffi, lib

SECONDS = 0.05  # of steps in one call
_MOST = 128  # steps in one call, too


@dataclass(frozen=True)
class Steps:
    """What was made.

    Attributes:
        count: of steps.
        ends: in the last one somebody has to look at a text, which may end.
        tokens: of each row, all that it drew, in order.
        logprobs: their log-probabilities, where asked for.
        decoding: seconds.
        drawing: seconds.
    """

    count: int
    ends: bool
    tokens: list[list[int]]
    logprobs: list[list[float]]
    decoding: float
    drawing: float


class Ahead:
    """Makes steps over a context's last batch.

    Args:
        n_rows: that a batch has at most.
    """

    def __init__(self, context: Context, sampler: BatchSampler, n_rows: int) -> None:
        self._context, self._sampler = context, sampler
        self._most = _MOST
        self._tokens = np.empty(self._most * n_rows, np.int32)
        self._logprobs = np.empty(self._most * n_rows, np.float64)
        self._times = np.empty((self._most, 3), np.int64)
        steps = self._steps = ffi.new("struct tb_steps *")
        steps.decode = ffi.cast("int32_t (*)(void *, struct tb_batch)", address_of(C._lib.llama_decode))
        self._is_end = ffi.cast("bool (*)(const void *, int32_t)", address_of(C._lib.llama_vocab_is_eog))
        steps.vocab = ffi.cast("void *", address_of(context.model.vocab.pointer))
        steps.context, steps.get = sampler.source, sampler.get
        steps.tokens = ffi.from_buffer("int32_t[]", self._tokens)
        steps.logprobs = ffi.from_buffer("double[]", self._logprobs)
        steps.times = ffi.from_buffer("int64_t[]", self._times)
        # A llama.cpp whose batches have other parts is left alone.
        self._fits = ctypes.sizeof(C.llama_batch) == ffi.sizeof("struct tb_batch")
        if self._fits:
            ffi.memmove(ffi.addressof(steps.batch), context.batch, ctypes.sizeof(context.batch))

    def stop(self, on: bool) -> None:
        """Whether no further step may begin. Any thread may say so."""
        self._steps.stop = on

    def pays(self, n: int, seconds: float) -> bool:
        """Whether steps of so many rows, of which one takes so long, are worth a try."""
        return seconds <= SECONDS and self._fits and not self._sampler.shares(n)

    def run(self, rows: SampleRows, most: int, seconds: float, *, ends: bool, logprobs: bool) -> Steps | None:
        """Make steps in which each row's token is decoded by the batch entry of the row's number; None: there was none.

        Args:
            most: steps, at least 1.
            seconds: that one takes.
            ends: some text ends with the model's end of text.
            logprobs: they are asked for, of rows that have their norm.
        """
        n, context, steps = len(rows.tokens), self._context, self._steps
        steps.batch.n_tokens, steps.limit_ns, steps.step_ns = n, int(1e9 * SECONDS), int(1e9 * seconds)
        steps.is_end = self._is_end if ends and context.model.vocab.has_text else ffi.NULL
        count = lib.tb_run_steps(self._sampler.draws, steps, rows.pointer, min(most, self._most))
        if not count:
            return None
        times = self._times[:count]
        if context.on_decode is not None:
            for begin, end, _ in times.tolist():
                context.on_decode(begin, end)
        began, decoded, drawn = times.sum(axis=0).tolist()
        return Steps(
            count=count,
            ends=bool(steps.ends),
            tokens=self._tokens[: count * n].reshape(count, n).T.tolist(),
            logprobs=self._logprobs[: count * n].reshape(count, n).T.tolist() if logprobs else [],
            decoding=(decoded - began) / 1e9,
            drawing=(drawn - decoded) / 1e9,
        )

"""Drawing tokens: `Sampler` is how one sequence draws, `BatchSampler` draws for all sequences of a batch in one call.

Native code draws; backend/sampling/sampling.h tells how, and with which random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from tilebeam.engine.matcher import Matcher
from tilebeam.native.llama import Context, Vocab
from tilebeam.native.sampling import address_of, ffi, lib
from tilebeam.sampling_params import SamplingParams

NO_TOKEN: int = lib.TB_DRAW_NOTHING  # the sampler forbids every token
BAD_LOGITS: int = lib.TB_DRAW_DAMAGED  # the logits are not numbers
TOO_COMPLEX: int = lib.TB_DRAW_COMPLEX  # the grammar took more steps than it may
# What a row is to tell besides its token; each with what stands before it.
TOKEN_ONLY: int = lib.TB_DRAW_TOKEN
NORM: int = lib.TB_DRAW_NORM
SPREAD: int = lib.TB_DRAW_SPREAD

# Added to the logit of a token that is forced; others have no probability beside it.
_FORCE = 1e9
# Fewer logits than this are drawn from in less time than it takes to have other threads help.
_SHARED_LOGITS = 1 << 20

_ROW = np.dtype(
    [
        ("chain", np.uintp),
        ("entry", np.int32),
        ("wants", np.int32),
        ("logits", np.uintp),
        ("token", np.int32),
        ("logit", np.float32),
        ("norm", np.float64),
        ("entropy", np.float64),
        ("certainty", np.float64),
    ],
    align=True,
)
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
assert _ROW.itemsize == ffi.sizeof("struct tb_draw_row")
assert _CANDIDATE.itemsize == ffi.sizeof("struct tb_candidate")


class Banned(IntEnum):
    """Tokens that a sampler does not draw now, beside those that logit_bias bans."""

    NOTHING = 0
    ENDS = 1  # those that end a text
    CLOSING = 2  # these, and what closes thoughts


class Sampler:
    """Owns how one sequence draws: logit bias, penalties, top-k, top-p, min-p, temperature, then the draw; and a
    grammar that all tokens must satisfy.

    Attributes:
        state: a struct tb_chain.

    Args:
        prompt: its last tokens count for the penalties.
        n_ctx: tokens that prompt and text have at most.
        closers: tokens that `Banned.CLOSING` stands for, none: nothing is forced.
        thinks: the text begins within thoughts, behind which models write line breaks before a grammar holds.

    Raises:
        TilebeamError: the grammar is invalid.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab: Vocab,
        prompt: Sequence[int] = (),
        n_ctx: int = 1 << 16,
        closers: Sequence[int] = (),
        *,
        thinks: bool = False,
    ) -> None:
        state = self.state = ffi.new("struct tb_chain *")
        self._grammar = Matcher(params.grammar, vocab, behind_space=thinks) if params.grammar is not None else None
        state.grammar = self._grammar.pointer if self._grammar is not None else ffi.NULL
        state.top_k, state.top_p, state.min_p = params.top_k, params.top_p, params.min_p
        state.temperature = params.temperature
        state.repeat, state.frequency = params.repeat_penalty, params.frequency_penalty
        state.presence = params.presence_penalty
        # Tokens that are not banned all the time come last.
        bias = sorted((params.logit_bias or {}).items())
        ends = sorted({*params.stop_tokens, *vocab.ends}) if params.min_tokens or closers else []
        self._counts = list(accumulate((len(bias), len(ends), len(closers))))
        self._biases = ffi.new("struct tb_bias[]", [*bias, *((token, -math.inf) for token in (*ends, *closers))])
        self._forced = ffi.new("struct tb_bias[]", 1)
        self.steer(None, Banned.ENDS)
        size = min(params.penalty_last_n, n_ctx) if params.penalizes else 0
        last = prompt[-size:] if size else []
        self._recent = ffi.new("int32_t[]", size)
        self._recent[0 : len(last)] = last
        state.recent, state.n_recent, state.accepted = self._recent, size, len(last)
        lib.tb_chain_seed(state, seed)

    def steer(self, forced: int | None, banned: Banned, *, free: bool = False) -> None:
        """Say how the next token is drawn.

        Args:
            forced: the token that it is, if the grammar allows it; None: any.
            banned: what it is not.
            free: the grammar is not asked, and goes on from where it is later.
        """
        state = self.state
        state.biases, state.n_biases = self._biases, self._counts[banned]
        if forced is not None:
            self._forced[0] = (forced, _FORCE)
            state.biases, state.n_biases = self._forced, 1
        state.grammar = ffi.NULL if free or self._grammar is None else self._grammar.pointer

    def close(self) -> None:
        """Free the grammar."""
        if self._grammar is not None:
            self._grammar.close()
            self._grammar = None


class SampleRows:
    """Rows to draw for: a sampler and the batch entry whose logits it gets, and what was drawn.

    The same rows can be drawn again and again: the same samplers, from the same entries of the next batches.

    Attributes:
        pointer: struct tb_draw_row[], for native code.
        samplers, entries: of the rows.
        tokens: a view of what was drawn: int32 [rows], a token, `NO_TOKEN`, `BAD_LOGITS` or `TOO_COMPLEX`.

    Args:
        rows: sampler, entry, and what is wanted besides the token: `TOKEN_ONLY`, `NORM` or `SPREAD`.
    """

    def __init__(self, rows: list[tuple[Sampler, int, int]]) -> None:
        self.samplers = [sampler for sampler, _, _ in rows]  # alive as long as their addresses are used
        self.entries = [entry for _, entry, _ in rows]
        self._rows = np.zeros(len(rows), _ROW)
        self._rows["chain"] = [int(ffi.cast("uintptr_t", sampler.state)) for sampler in self.samplers]
        self._rows["entry"] = self.entries
        self._rows["wants"] = [wants for _, _, wants in rows]
        self.tokens: npt.NDArray[np.int32] = self._rows["token"]
        self.pointer = ffi.from_buffer("struct tb_draw_row[]", self._rows)
        self._parts: dict[int, list[tuple[Any, int]]] = {}

    def parts(self, most: int) -> list[tuple[Any, int]]:
        """Return where each of at most so many parts begins, about equally long ones, and its length. Rows that follow
        each other and draw from one entry stay together: they have one norm."""
        if most not in self._parts:
            n, entries = len(self._rows), self._rows["entry"]
            begins = np.flatnonzero(np.r_[True, entries[1:] != entries[:-1]])
            wanted = np.arange(most) * n / most
            cuts = [*dict.fromkeys(begins[np.searchsorted(begins, wanted).clip(0, len(begins) - 1)].tolist()), n]
            self._parts[most] = [(self.pointer + first, last - first) for first, last in pairwise(cuts)]
        return self._parts[most]

    @property
    def logits(self) -> list[float]:
        """Return the logits of the tokens drawn, as the model computed them."""
        return self._rows["logit"].tolist()

    @property
    def norms(self) -> list[float]:
        """Logarithm of the sum of exp(logit) over the vocabulary, where wanted: logit - norm is a log-probability."""
        return self._rows["norm"].tolist()

    def spread(self, row: int) -> tuple[float, float]:
        """Return entropy and self-certainty of a row's distribution, where wanted; see `CompletionOutput`."""
        return float(self._rows["entropy"][row]), float(self._rows["certainty"][row])


class BatchSampler:
    """Draws from the logits of a context's last batch.

    Args:
        threads: that draw side by side, where there is enough to do.
    """

    def __init__(self, context: Context, threads: int = 1) -> None:
        self._context = context
        self._n_vocab = context.model.vocab.size
        self._draws, self._kept = zip(*(draw_context(self._n_vocab) for _ in range(threads)), strict=True)
        self._helpers = ThreadPoolExecutor(threads - 1, "tilebeam-draw") if threads > 1 else None
        self._source = ffi.cast("void *", address_of(context.pointer))
        self._get = ffi.cast("const float *(*)(void *, int32_t)", address_of(C._lib.llama_get_logits_ith))

    def sample(self, rows: SampleRows) -> None:
        """Draw a token for every row; the samplers remember theirs."""
        n = len(rows.tokens)
        lib.tb_find_logits(self._source, self._get, rows.pointer, n)
        if self._helpers is None or n * self._n_vocab < _SHARED_LOGITS:
            lib.tb_draw_rows(self._draws[0], rows.pointer, n)
            return
        own, *others = zip(self._draws, rows.parts(len(self._draws)), strict=False)
        running = [self._helpers.submit(lib.tb_draw_rows, draws, *part) for draws, part in others]
        try:
            lib.tb_draw_rows(own[0], *own[1])
        finally:  # whatever interrupts this: nobody may free a chain that is drawn from
            wait(running)

    def top(self, entry: int, count: int) -> tuple[list[int], list[float]]:
        """Return the likeliest tokens of a batch entry, likeliest first, of equals the lower, and their logits."""
        logits = self._context.logits(entry)
        found = np.empty(min(count, self._n_vocab), _CANDIDATE)
        top = ffi.from_buffer("struct tb_candidate[]", found)
        found = found[: lib.tb_top(ffi.from_buffer("float[]", logits), self._n_vocab, len(found), top)]
        return found["id"].tolist(), found["logit"].tolist()


def draw_context(n_vocab: int) -> tuple[Any, list[Any]]:
    """Make a struct tb_draw_context with room for one row, and what must live as long as it."""
    candidates = np.empty(n_vocab * ffi.sizeof("struct tb_candidate"), np.uint8)
    adjusted = np.empty(n_vocab, np.float32)
    c = ffi.new("struct tb_draw_context *")
    c.n_vocab = n_vocab
    c.candidates = ffi.from_buffer("struct tb_candidate[]", candidates)
    c.adjusted = ffi.from_buffer("float[]", adjusted)
    return c, [candidates, adjusted]

"""Drawing tokens: `Sampler` is how one sequence draws, `BatchSampler` draws for all sequences of a batch in one call.

A sampler is a chain of llama.cpp's samplers and the state that native code needs to draw the same tokens without that
chain; backend/sampling/sampling.h tells which chains it draws.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from tilebeam.engine.matcher import Matcher
from tilebeam.native import releases
from tilebeam.native.llama import Context, Vocab
from tilebeam.native.sampling import address_of, ffi, lib
from tilebeam.sampling_params import SamplingParams

MAX_TOP: int = lib.TB_DRAW_TOP_MAX
NO_TOKEN: int = lib.TB_DRAW_NOTHING  # the sampler forbids every token
BAD_LOGITS: int = lib.TB_DRAW_DAMAGED  # the logits are not numbers
TOO_COMPLEX: int = lib.TB_DRAW_COMPLEX  # the grammar took more steps than it may

# Fewer logits than this are drawn from in less time than it takes to have other threads help.
_SHARED_LOGITS = 1 << 20

# Penalties look at so many of the last tokens one by one; for more, llama.cpp goes through the vocabulary.
_MOST_RECENT = 1024

_ROW = np.dtype(
    [
        ("chain", np.uintp),
        ("entry", np.int32),
        ("wants_norm", np.int32),
        ("logits", np.uintp),
        ("token", np.int32),
        ("logit", np.float32),
        ("norm", np.float64),
    ],
    align=True,
)
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
assert _ROW.itemsize == ffi.sizeof("struct tb_draw_row")
assert _CANDIDATE.itemsize == ffi.sizeof("struct tb_candidate")


class Sampler:
    """Owns how one sequence draws: logit bias, penalties, top-k, top-p, min-p, temperature, then the draw; and a
    grammar that all tokens must satisfy.

    Attributes:
        pointer: llama.cpp's chain of all but the grammar.
        state: a struct tb_chain.

    Args:
        prompt: its last tokens count for the penalties.

    Raises:
        TilebeamError: the grammar is invalid.
    """

    def __init__(self, params: SamplingParams, seed: int, vocab: Vocab, prompt: Sequence[int] = ()) -> None:
        self.pointer = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        self.state = ffi.new("struct tb_chain *")
        self._kept: list[Any] = []  # what the struct points to
        self._grammar: Matcher | None = None
        try:
            self._add_biases(params, vocab)
            if params.grammar is not None:
                self._grammar = Matcher(params.grammar, vocab)
        except BaseException:
            self.close()
            raise
        if params.penalizes:
            self._add_penalties(params, vocab, prompt)
        if params.temperature == 0:
            self._add(C.llama_sampler_init_greedy())
        else:
            if params.top_k:
                self._add(C.llama_sampler_init_top_k(params.top_k))
            if params.top_p < 1:
                self._add(C.llama_sampler_init_top_p(params.top_p, 1))
            if params.min_p > 0:
                self._add(C.llama_sampler_init_min_p(params.min_p, 1))
            self._add(C.llama_sampler_init_temp(params.temperature))
            draw = C.llama_sampler_init_dist(seed)
            self.state.draw = _pointer(draw)
            self._add(draw)
            lib.tb_chain_seed(self.state, seed)
        state = self.state
        state.links = _pointer(self.pointer)
        state.grammar = self._grammar.pointer if self._grammar is not None else ffi.NULL
        state.top_k, state.top_p, state.min_p = params.top_k, params.top_p, params.min_p
        state.temperature = params.temperature
        state.one_takes_one = one_takes_a_random_number()
        state.own = self._known(params, vocab) and (params.temperature == 0 or same_random_numbers())

    @staticmethod
    def _known(params: SamplingParams, vocab: Vocab) -> bool:
        """Whether native code draws what the chain draws."""
        if params.penalizes and params.penalty_last_n > min(vocab.size, _MOST_RECENT):
            return False
        cut = 0 < params.top_k <= MAX_TOP or (params.top_k == 0 and params.top_p == 1)
        return cut or params.temperature == 0

    @property
    def address(self) -> int:
        """The address of `state`, for native code."""
        return int(ffi.cast("uintptr_t", self.state))

    def _add(self, link: Any) -> None:
        C.llama_sampler_chain_add(self.pointer, link)

    def _add_biases(self, params: SamplingParams, vocab: Vocab) -> None:
        """logit_bias; and ends that are banned until `allow_ends`, first in the chain and last for native code."""
        bias = params.logit_bias or {}
        banned = dict.fromkeys({*params.stop_tokens, *vocab.ends}, -math.inf) if params.min_tokens else {}
        for each in filter(None, (banned, bias)):
            self._add(C.llama_sampler_init_logit_bias(vocab.size, len(each), _biases(each)))
        self._bans, self._lasting = bool(banned), len(bias)
        if bias or banned:
            biases = ffi.from_buffer("struct tb_bias[]", _biases(bias, banned))
            self._kept.append(biases)
            self.state.biases, self.state.n_biases = biases, len(biases)

    def allow_ends(self) -> None:
        """From now on the text may end."""
        if self._bans:
            self._bans = False
            self.state.n_biases = self._lasting
            C.llama_sampler_free(C.llama_sampler_chain_remove(self.pointer, 0))

    def _add_penalties(self, params: SamplingParams, vocab: Vocab, prompt: Sequence[int]) -> None:
        strength = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
        link = releases.penalties_sampler(vocab.size, params.penalty_last_n, *strength)
        last = prompt[-params.penalty_last_n :]
        for token in last:
            C.llama_sampler_accept(link, token)
        self._add(link)
        size = min(params.penalty_last_n, _MOST_RECENT)
        recent = ffi.new("int32_t[]", size)
        last = last[-size:]
        recent[0 : len(last)] = last
        self._kept.append(recent)
        state = self.state
        state.penalties, state.recent, state.n_recent, state.accepted = _pointer(link), recent, size, len(last)

    def close(self) -> None:
        """Free the chain."""
        if self.pointer is not None:
            C.llama_sampler_free(self.pointer)
            self.pointer = None
        if self._grammar is not None:
            self._grammar.close()
            self._grammar = None


def _biases(*parts: Mapping[int, float]) -> Any:
    """What is added to logits, in C."""
    items = [C.llama_logit_bias(token, bias) for part in parts for token, bias in sorted(part.items())]
    return (C.llama_logit_bias * len(items))(*items)


class SampleRows:
    """Rows to draw for: a sampler and the batch entry whose logits it gets, and what was drawn.

    The same rows can be drawn again and again: the same samplers, from the same entries of the next batches.

    Attributes:
        pointer: struct tb_draw_row[], for native code.
    """

    def __init__(self, rows: list[tuple[Sampler, int, bool]]) -> None:
        """`rows`: sampler, entry, and whether the row's log norm is wanted."""
        self._rows = np.zeros(len(rows), _ROW)
        self._rows["chain"] = [sampler.address for sampler, _, _ in rows]
        self._rows["entry"] = [entry for _, entry, _ in rows]
        self._rows["wants_norm"] = [wants for _, _, wants in rows]
        self._tokens: npt.NDArray[np.int32] = self._rows["token"]
        self.pointer = ffi.from_buffer("struct tb_draw_row[]", self._rows)
        self._parts: dict[int, list[tuple[Any, int]]] = {}
        self._samplers = [sampler for sampler, _, _ in rows]  # alive as long as their addresses are used

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """A view of what was drawn: int32 [rows], a token, `NO_TOKEN`, `BAD_LOGITS` or `TOO_COMPLEX`."""
        return self._tokens

    def parts(self, most: int) -> list[tuple[Any, int]]:
        """Where each of at most so many parts begins, about equally long ones, and its length. Rows that follow each
        other and draw from one entry stay together: they have one norm."""
        if most not in self._parts:
            n, entries = len(self._rows), self._rows["entry"]
            begins = np.flatnonzero(np.r_[True, entries[1:] != entries[:-1]])
            wanted = np.arange(most) * n / most
            cuts = [*dict.fromkeys(begins[np.searchsorted(begins, wanted).clip(0, len(begins) - 1)].tolist()), n]
            self._parts[most] = [(self.pointer + first, last - first) for first, last in pairwise(cuts)]
        return self._parts[most]

    @property
    def logits(self) -> list[float]:
        """Of the tokens drawn, as the model computed them."""
        return self._rows["logit"].tolist()

    @property
    def norms(self) -> list[float]:
        """Logarithm of the sum of exp(logit) over the vocabulary, where wanted: logit - norm is a log-probability."""
        return self._rows["norm"].tolist()


class BatchSampler:
    """Draws from the logits of a context's last batch.

    Attributes:
        source, get: the context and llama_get_logits_ith, for native code.

    Args:
        threads: that draw side by side, where there is enough to do.
    """

    def __init__(self, context: Context, threads: int = 1) -> None:
        self._context = context
        self._n_vocab = context.model.vocab.size
        self._scratch = np.empty(MAX_TOP, _CANDIDATE)
        self._draws, self._kept = zip(*(draw_context(self._n_vocab) for _ in range(threads)), strict=True)
        self._helpers = ThreadPoolExecutor(threads - 1, "tilebeam-draw") if threads > 1 else None
        self.source = ffi.cast("void *", address_of(context.pointer))
        self.get = ffi.cast("const float *(*)(void *, int32_t)", address_of(C._lib.llama_get_logits_ith))

    @property
    def draws(self) -> Any:
        """A struct tb_draw_context, of the thread that calls."""
        return self._draws[0]

    def shares(self, n: int) -> bool:
        """Whether so many rows are enough for threads to help."""
        return self._helpers is not None and n * self._n_vocab >= _SHARED_LOGITS

    def sample(self, rows: SampleRows) -> None:
        """Draw a token for every row; the samplers remember theirs."""
        n = len(rows.tokens)
        lib.tb_find_logits(self.source, self.get, rows.pointer, n)
        helpers = self._helpers if self.shares(n) else None
        if helpers is None:
            lib.tb_draw_rows(self.draws, rows.pointer, n)
            return
        own, *others = zip(self._draws, rows.parts(len(self._draws)), strict=False)
        running = [helpers.submit(lib.tb_draw_rows, draws, *part) for draws, part in others]
        try:
            lib.tb_draw_rows(own[0], *own[1])
        finally:  # whatever interrupts this: nobody may free a chain that is drawn from
            wait(running)

    def top(self, entry: int, count: int) -> tuple[list[int], list[float]]:
        """The likeliest tokens of a batch entry, likeliest first, of equals the lower, and their logits."""
        logits = self._context.logits(entry)
        count = min(count, self._n_vocab)
        if count <= MAX_TOP:
            found = lib.tb_top(
                ffi.from_buffer("float[]", logits),
                self._n_vocab,
                count,
                ffi.from_buffer("struct tb_candidate[]", self._scratch),
            )
            return self._scratch["id"][:found].tolist(), self._scratch["logit"][:found].tolist()
        order = np.lexsort((np.arange(self._n_vocab), -logits))[:count]
        return order.tolist(), logits[order].tolist()


def _pointer(sampler: Any) -> Any:
    """A llama_sampler, as cffi's void *."""
    return ffi.cast("void *", address_of(sampler))


def draw_context(n_vocab: int) -> tuple[Any, list[Any]]:
    """A struct tb_draw_context with llama.cpp's samplers and room for one row; and what must live as long as it."""
    candidates = np.empty(n_vocab * ffi.sizeof("struct tb_candidate"), np.uint8)
    adjusted = np.empty(n_vocab, np.float32)
    c = ffi.new("struct tb_draw_context *")
    c.apply = ffi.cast("void *", address_of(C._lib.llama_sampler_apply))
    c.accept = ffi.cast("void *", address_of(C._lib.llama_sampler_accept))
    c.n_vocab = n_vocab
    c.candidates = ffi.from_buffer("struct tb_candidate[]", candidates)
    c.adjusted = ffi.from_buffer("float[]", adjusted)
    return c, [candidates, adjusted]


@cache
def one_takes_a_random_number() -> bool:
    """Whether llama.cpp's draw takes a random number where a single candidate is left, too: since llama-cpp-python
    0.3.35."""
    drawn = []
    for first in (1, 2):
        draw = C.llama_sampler_init_dist(20)
        try:
            for size in (first, 1 << 12):
                candidates = (C.llama_token_data * size)()
                array = C.llama_token_data_array(candidates, size, -1, False)
                C.llama_sampler_apply(draw, ctypes.byref(array))
            drawn.append(array.selected)
        finally:
            C.llama_sampler_free(draw)
    return bool(drawn[0] == drawn[1])


@cache
def same_random_numbers() -> bool:
    """Whether llama.cpp draws from equal logits what C draws with its own random numbers: the C++ library that
    llama.cpp was built with decides how bits become a number."""
    n_vocab, n = 1 << 12, 16
    links = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
    draw = C.llama_sampler_init_dist(20)
    C.llama_sampler_chain_add(links, draw)
    try:
        c, _kept = draw_context(n_vocab)
        logits = np.zeros(n_vocab, np.float32)
        chains = ffi.new("struct tb_chain[2]")
        rows = ffi.new("struct tb_draw_row[2]")
        for chain, row, own in zip(chains, rows, (True, False), strict=True):
            chain.links, chain.draw, chain.own = _pointer(links), _pointer(draw), own
            chain.top_p, chain.temperature = 1, 1
            row.chain, row.logits = ffi.addressof(chain), ffi.from_buffer("float[]", logits)
            lib.tb_chain_seed(ffi.addressof(chain), 20)
        for _ in range(n):
            lib.tb_draw_rows(c, rows, 2)
            if rows[0].token != rows[1].token:
                return False
        return True
    finally:
        C.llama_sampler_free(links)

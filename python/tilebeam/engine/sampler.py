"""How one sequence draws its tokens: a chain of llama.cpp's samplers, and what C needs to draw without it.

See backend/sampling/sampling.h for what is drawn there.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

from tilebeam.errors import TilebeamError
from tilebeam.native.llama import Vocab, log_router
from tilebeam.native.sampling import ffi, lib
from tilebeam.sampling_params import SamplingParams

MAX_TOP: int = lib.TB_DRAW_TOP_MAX

# Of GBNF: what holds no rules (strings, character classes, comments), and repetitions with both bounds.
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_REPETITION = re.compile(r"\{\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\}")
# Penalties look at so many of the last tokens one by one; for more, llama.cpp goes through the vocabulary.
_MOST_RECENT = 1024


class Sampler:
    """Owns how one sequence draws: logit bias, penalties, top-k, top-p, min-p, temperature, then the draw; and a
    grammar that all tokens must satisfy.

    Attributes:
        pointer: llama.cpp's chain of all but the grammar.
        chain: a struct tb_chain.

    Args:
        prompt: its last tokens count for the penalties.
        own: draw without llama.cpp's chain where that gives the same tokens.

    Raises:
        TilebeamError: the grammar is none, or a bias is for a token that there is not.
    """

    def __init__(
        self, params: SamplingParams, seed: int, vocab: Vocab, prompt: Sequence[int] = (), *, own: bool = True
    ) -> None:
        self.pointer = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        self.chain = ffi.new("struct tb_chain *")
        self._kept: list[Any] = []  # what the struct points to
        self._grammar: Any = None
        try:
            if params.logit_bias:
                self._add_bias(params.logit_bias, vocab)
            if params.grammar is not None:
                self._grammar = _grammar(params.grammar, vocab)
        except TilebeamError:
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
            self.chain.draw = _pointer(draw)
            self._add(draw)
            lib.tb_chain_seed(self.chain, seed)
        chain = self.chain
        chain.links, chain.grammar = _pointer(self.pointer), _pointer(self._grammar)
        chain.top_k, chain.top_p, chain.min_p = params.top_k, params.top_p, params.min_p
        chain.temperature = params.temperature
        chain.own = own and self._known(params, vocab) and (params.temperature == 0 or same_random_numbers())

    @staticmethod
    def _known(params: SamplingParams, vocab: Vocab) -> bool:
        """Whether C draws what the chain draws."""
        if params.penalizes and params.penalty_last_n > min(vocab.size, _MOST_RECENT):
            return False
        cut = 0 < params.top_k <= MAX_TOP or (params.top_k == 0 and params.top_p == 1)
        return cut or params.temperature == 0

    @property
    def address(self) -> int:
        """The struct tb_chain, for C."""
        return int(ffi.cast("uintptr_t", self.chain))

    def _add(self, link: Any) -> None:
        C.llama_sampler_chain_add(self.pointer, link)

    def _add_bias(self, bias: Mapping[int, float], vocab: Vocab) -> None:
        if max(bias) >= vocab.size:
            raise TilebeamError(f"logit_bias: token {max(bias)} is not in the vocabulary (0 to {vocab.size - 1}).")
        items = (C.llama_logit_bias * len(bias))(*[C.llama_logit_bias(t, b) for t, b in sorted(bias.items())])
        self._add(C.llama_sampler_init_logit_bias(vocab.size, len(bias), items))
        biases = ffi.from_buffer("struct tb_bias[]", items)
        self._kept.append(biases)
        self.chain.biases, self.chain.n_biases = biases, len(bias)

    def _add_penalties(self, params: SamplingParams, vocab: Vocab, prompt: Sequence[int]) -> None:
        link = C.llama_sampler_init_penalties(
            vocab.size,
            params.penalty_last_n,
            params.repeat_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        last = prompt[-params.penalty_last_n :]
        for token in last:
            C.llama_sampler_accept(link, token)
        self._add(link)
        size = min(params.penalty_last_n, _MOST_RECENT)
        recent = ffi.new("int32_t[]", size)
        last = last[-size:]
        recent[0 : len(last)] = last
        self._kept.append(recent)
        chain = self.chain
        chain.penalties, chain.recent, chain.n_recent, chain.accepted = _pointer(link), recent, size, len(last)

    def close(self) -> None:
        """Free the chain."""
        if self.pointer is not None:
            C.llama_sampler_free(self.pointer)
            self.pointer = None
        if self._grammar is not None:
            C.llama_sampler_free(self._grammar)
            self._grammar = None


def _grammar(grammar: str, vocab: Vocab) -> Any:
    for least, most in _REPETITION.findall(_LITERAL.sub("", grammar)):
        if int(most) < int(least):  # llama.cpp would go on repeating for ever
            raise TilebeamError(
                f"The grammar is not one: {{{least},{most}}} asks for at least {least} and at most {most}."
            )
    with log_router().capture() as log:
        link = C.llama_sampler_init_grammar(vocab.pointer, grammar.encode("utf-8", "surrogatepass"), b"root")
    if not link:
        reason = " ".join("".join(text for _, text in log).split()) or "llama.cpp gave no reason"
        raise TilebeamError(f"The grammar is not one: {reason}")
    return link


def _pointer(sampler: Any) -> Any:
    """A llama_sampler, as cffi's void *; NULL for None."""
    return ffi.cast("void *", ctypes.cast(sampler, ctypes.c_void_p).value or 0) if sampler else ffi.NULL


def context_of(n_vocab: int) -> tuple[Any, list[Any]]:
    """A struct tb_draw_context with llama.cpp's samplers and room for one row, but no logits yet; and what must live as
    long as it does."""
    candidates = np.empty(n_vocab * ffi.sizeof("struct tb_candidate"), np.uint8)
    adjusted = np.empty(n_vocab, np.float32)
    c = ffi.new("struct tb_draw_context *")
    c.apply = ffi.cast("void *", function(C._lib.llama_sampler_apply))
    c.accept = ffi.cast("void *", function(C._lib.llama_sampler_accept))
    c.n_vocab = n_vocab
    c.candidates = ffi.from_buffer("struct tb_candidate[]", candidates)
    c.adjusted = ffi.from_buffer("float[]", adjusted)
    return c, [candidates, adjusted]


def function(pointer: Any) -> int:
    """Where a ctypes pointer or function points."""
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)


@cache
def same_random_numbers() -> bool:
    """Whether llama.cpp draws from equal logits what C draws with its own random numbers: the C++ library that
    llama.cpp was built with decides how bits become a number."""
    n_vocab, n = 1 << 12, 16
    links = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
    draw = C.llama_sampler_init_dist(20)
    C.llama_sampler_chain_add(links, draw)
    try:
        c, _kept = context_of(n_vocab)
        logits = np.zeros(n_vocab, np.float32)
        c.context = ffi.from_buffer(logits)
        chains = ffi.new("struct tb_chain[2]")
        rows = ffi.new("struct tb_draw_row[2]")
        for chain, row, own in zip(chains, rows, (True, False), strict=True):
            chain.links, chain.draw, chain.own = _pointer(links), _pointer(draw), own
            chain.top_p, chain.temperature = 1, 1
            row.chain = ffi.addressof(chain)
            lib.tb_chain_seed(ffi.addressof(chain), 20)
        for _ in range(n):
            lib.tb_draw_rows(c, rows, 2)
            if rows[0].token != rows[1].token:
                return False
        return True
    finally:
        C.llama_sampler_free(links)

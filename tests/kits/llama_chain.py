"""llama.cpp's own chain of samplers for `SamplingParams`: what a program over its functions draws with, and what
Tilebeam's draws are held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as C
from tilebeam import SamplingParams


class LlamaChain:
    """Owns a llama_sampler: logit bias, penalties, top-k, top-p, min-p, temperature.

    Args:
        n_vocab: tokens of the vocabulary.
        prompt: its last tokens count for the penalties.
        seed: of the draw at the end; None: the chain has none.
    """

    def __init__(
        self, params: SamplingParams, n_vocab: int, prompt: Sequence[int] = (), seed: int | None = None
    ) -> None:
        self.pointer = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        bias = [C.llama_logit_bias(token, value) for token, value in (params.logit_bias or {}).items()]
        if bias:
            self._add(C.llama_sampler_init_logit_bias(n_vocab, len(bias), (C.llama_logit_bias * len(bias))(*bias)))
        if params.penalizes:
            make: Any = C.llama_sampler_init_penalties
            values = (
                params.penalty_last_n,
                params.repeat_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
            # Since llama-cpp-python 0.3.35 it is told the size of the vocabulary, too.
            link = make(n_vocab, *values) if len(make.argtypes) > len(values) else make(*values)
            for token in prompt[-params.penalty_last_n :]:
                C.llama_sampler_accept(link, token)
            self._add(link)
        if params.temperature == 0:
            self._add(C.llama_sampler_init_greedy())
            return
        if params.top_k:
            self._add(C.llama_sampler_init_top_k(params.top_k))
        self._add(C.llama_sampler_init_top_p(params.top_p, 1))
        self._add(C.llama_sampler_init_min_p(params.min_p, 1))
        self._add(C.llama_sampler_init_temp(params.temperature))
        if seed is not None:
            self._add(C.llama_sampler_init_dist(seed))

    def _add(self, link: Any) -> None:
        C.llama_sampler_chain_add(self.pointer, link)

    def close(self) -> None:
        """Free the chain."""
        C.llama_sampler_free(self.pointer)

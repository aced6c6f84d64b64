"""Draws under a magnifying glass: one chain by itself, and of a whole model the logits that every token was drawn from.

A text that is generated among others need not be, token by token, the one that its request gives alone: matrix products
of the CPU backend add up in another order in a larger batch, so the last bits of a logit differ, and of two logits that
lie that close now the one is the likelier, now the other. What holds without exception is checked here: every logit is
what it is alone, to within a slack; every token is the one that its sampler draws from its logits; and a text leaves
the one that it is alone only at a token where logits that close draw differently.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tilebeam import LM, CompletionOutput, SamplingParams
from tilebeam.engine.sampler import SPREAD, Sampler, SampleRows, draw_context
from tilebeam.native.sampling import ffi, lib

F32 = npt.NDArray[np.float32]
# Some units in the last place of logits up to 8, for models of few layers; anything wrong about a KV cell or a position
# changes the first digits.
SLACK = 1e-5


@dataclass
class Tokens:
    """All that a chain without a grammar wants to know of a vocabulary."""

    size: int


class Numbers:
    """The random numbers of a seed, as sampling.h promises them: xoshiro256++ from four numbers of splitmix64."""

    def __init__(self, seed: int) -> None:
        self.state = []
        for _ in range(4):
            seed = (seed + 0x9E3779B97F4A7C15) % 2**64
            z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
            self.state.append(z ^ z >> 31)

    def bits(self) -> int:
        """The next 64."""
        a, b, c, d = self.state
        bits = (_rotated((a + d) % 2**64, 23) + a) % 2**64
        shifted, c, d = b << 17, c ^ a, d ^ b
        self.state = [a ^ d, b ^ c, c ^ shifted % 2**64, _rotated(d, 45)]
        return bits

    def next(self) -> float:
        """The next number in [0, 1)."""
        return (self.bits() >> 11) * 2.0**-53


def _rotated(x: int, by: int) -> int:
    return (x << by | x >> (64 - by)) % 2**64


class Ours:
    """Draws one token after the other with tb_draw_rows."""

    def __init__(self, params: SamplingParams, seed: int, n_vocab: int, prompt: Sequence[int]) -> None:
        self.sampler = Sampler(params, seed, Tokens(n_vocab), prompt)  # type: ignore[arg-type]
        self._c, self._kept = draw_context(n_vocab)
        self._row = ffi.new("struct tb_draw_row *")
        self._row.chain, self._row.wants = self.sampler.state, SPREAD

    @property
    def spread(self) -> tuple[float, float]:
        """Entropy and self-certainty of the last row."""
        return self._row.entropy, self._row.certainty

    def draw(self, logits: F32) -> int:
        self._row.logits = ffi.from_buffer("float[]", logits)
        lib.tb_draw_rows(self._c, self._row, 1)
        if self._row.token >= 0:
            x = logits.astype(np.float64)
            assert self._row.logit == logits[self._row.token]
            assert self._row.norm == pytest.approx(x.max() + math.log(np.exp(x - x.max()).sum()), abs=3e-6)
            log_p = np.maximum(x - x.max(), -87)
            log_p -= math.log(np.exp(log_p).sum())
            assert self._row.entropy == pytest.approx(-(np.exp(log_p) * log_p).sum(), abs=1e-5)
            assert self._row.certainty == pytest.approx(-log_p.mean() - math.log(len(x)), abs=1e-5, rel=1e-6)
        return int(self._row.token)


class Witness:
    """As a context: keeps the logits that each sample of a model draws from."""

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self._sampler: Any = lm.engine.sampler
        self._drawn: dict[int, tuple[list[int], list[F32]]] = {}  # by the identity of the sample's list of tokens

    def __enter__(self) -> Witness:
        real, scheduler = self._sampler.sample, self.lm.engine.scheduler

        def sample(rows: SampleRows) -> None:
            real(rows)
            samples = {id(s.sampler): s for s in scheduler.running}
            for sampler, entry in zip(rows.samplers, rows.entries, strict=True):
                tokens = samples[id(sampler)].tokens
                seen = self._drawn.setdefault(id(tokens), (tokens, []))[1]
                seen.append(self.lm.engine.context.logits(entry).copy())

        self._sampler.sample = sample
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        del self._sampler.sample

    def forget(self) -> None:
        """Forget what was drawn so far."""
        self._drawn.clear()

    def rows(self, sample: CompletionOutput) -> list[F32]:
        """The logits that the tokens of a sample were drawn from, float32 [vocabulary] each."""
        rows = self._drawn.get(id(sample.token_ids), (sample.token_ids, []))[1]
        assert len(rows) == len(sample.token_ids)
        return rows


def check(
    prompt: list[int],
    params: SamplingParams,
    sample: CompletionOutput,
    alone: CompletionOutput,
    by: Witness,
    other: Witness,
    slack: float = SLACK,
) -> bool:
    """A sample that the model of `by` made in whatever company against the same that `other`'s made alone; asserts what
    is said above. Whether it is the same text (or, aborted, a beginning of it)."""
    ids, rows, expected = sample.token_ids, by.rows(sample), other.rows(alone)
    assert sample.seed == alone.seed
    ours = Ours(params, sample.seed, len(expected[0]), prompt)
    assert [ours.draw(x) for x in rows] == ids
    ours.sampler.close()
    same = next((i for i, (a, b) in enumerate(zip(ids, alone.token_ids, strict=False)) if a != b), None)
    for mine, alike in zip(rows[: None if same is None else same + 1], expected, strict=False):
        np.testing.assert_allclose(mine, alike, rtol=0, atol=slack)
    if same is None:
        if sample.finish_reason == "aborted":
            assert len(ids) <= len(alone.token_ids)
        else:
            assert (ids, sample.text, sample.finish_reason) == (alone.token_ids, alone.text, alone.finish_reason)
        return True
    # From here on it is another text: its logits are those of this one, and it ends where it has to.
    where = range(len(prompt) + same, len(prompt) + len(ids) - 1)
    with other.lm._reading() as turns:
        (reading,) = other.lm._reader.logits(turns, [[*prompt, *ids[:-1]]], [where], None)
    for mine, alike in zip(rows[same + 1 :], reading.logits, strict=True):
        np.testing.assert_allclose(mine, alike, rtol=0, atol=slack)
    limit = by.lm.n_ctx - len(prompt)
    if params.max_tokens is not None:
        limit = min(limit, params.max_tokens)
    for n in range(1, len(ids)):
        assert ending(by.lm, params, limit, ids[:n])[1] is None
    text, reason = ending(by.lm, params, limit, ids)
    assert sample.text == text
    assert sample.finish_reason == (reason or "aborted")
    return False


def ending(lm: LM, params: SamplingParams, limit: int, ids: list[int]) -> tuple[str, str | None]:
    """The text of these tokens, and why there are no more of them; None: there are."""
    vocab = lm.engine.vocab
    ends = vocab.is_end(ids[-1]) and not params.ignore_eos
    pieces = b"".join(vocab.piece(t) for t in (ids[:-1] if ends else ids))
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(pieces)
    stops = [at for s in params.stop if (at := text.find(s)) >= 0]
    if stops:
        return text[: min(stops)], "stop"
    return text, "stop" if ends else "length" if len(ids) == limit else None

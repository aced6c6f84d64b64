"""A draft head that guesses for the model whose hidden states it reads: one layer, with a KV cache that follows the
model's own, sequence by sequence.

The head's cell at a position comes of the model's features there, fused to one state, and of the token behind it. So a
sequence's last state waits until the next token is drawn: with it the head guesses the one behind. Further guesses come
of its own state in place of the model's, and their cells are cut away before the model goes on.

All states of a sequence are kept, some KB each, since a fork goes on from one with another token. They are decoded when
somebody asks for guesses, or forks the sequence: what the model refuses of a draft never is.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tilebeam.engine.request import Sample
from tilebeam.engine.sampler import NORM, BatchSampler, Sampler, SampleRows
from tilebeam.errors import TilebeamError
from tilebeam.native.draft_head import HeadContexts
from tilebeam.native.llama import Context
from tilebeam.sampling_params import SamplingParams

F32 = npt.NDArray[np.float32]
_WAITING = 32  # states of a sequence that wait at most: more are a prompt's, and decoded at once
_SIGNS = 10  # classes of the probability that the head gives its token


class _Followed:
    """A sequence of the model as the head knows it.

    Attributes:
        first: the position of the first state; those before it were never seen.
        states, tokens: at the positions from there on.
        decoded: states that have cells, at positions from 0 on.
        behind: the token that the last state was decoded with, where all are.
        guessed: whether there are cells of guesses behind them.
    """

    __slots__ = ("behind", "decoded", "first", "guessed", "states", "tokens")

    def __init__(self, first: int, states: list[F32], tokens: list[int], decoded: int = 0) -> None:
        self.first, self.states, self.tokens, self.decoded = first, states, tokens, decoded
        self.guessed, self.behind = False, -1


class DraftHead:
    """Guesses for the sequences of a context, which it follows (`Context.follower`).

    Args:
        contexts: of the head.
        target: the context that it follows, with a tap of its layers.
        layers: of the target, whose outputs are its features.

    Attributes:
        failed: why it guesses nothing any more; None: it does.
        n_batch: states that it decodes at once, at most; never fewer than there are sequences.
    """

    def __init__(self, contexts: HeadContexts, target: Context, layers: Sequence[int]) -> None:
        self.failed: str | None = None
        self.n_batch = contexts.n_batch
        self._contexts = contexts
        self._decoder = contexts.decoder
        self._target = target
        self._layers = tuple(layers)
        self._followed: dict[int, _Followed] = {}
        self._draws = BatchSampler(contexts.decoder)
        self._likeliest = Sampler(SamplingParams(temperature=0), 0, contexts.decoder.model.vocab)
        self._seconds: dict[int, float] = {}  # of a pass, by its samples
        target.follower = self

    def close(self) -> None:
        """Follow no more."""
        self._target.follower = None
        self._likeliest.close()

    # --- what happens to the target's sequences -----------------------------------------------------------------------

    def decoded(self, n: int) -> None:
        """See `Follower`."""
        if self.failed is not None:
            return
        assert self._target.taps is not None
        features = self._target.taps.rows(self._layers)
        if features is None:
            self._fail(f"llama.cpp gives no outputs of the model's layers {self._layers}.")
            return
        try:
            states = self._contexts.fuse(features)
            ids, pos = self._target.seq[:n], self._target.pos[:n]
            borders = [0, *(np.flatnonzero((np.diff(ids) != 0) | (np.diff(pos) != 1)) + 1).tolist(), n]
            for first, end in pairwise(borders):
                self._append(
                    int(ids[first]), int(pos[first]), states[first:end], self._target.token[first:end].tolist()
                )
        except TilebeamError as error:
            self._fail(str(error))

    def _append(self, id: int, pos: int, states: F32, tokens: list[int]) -> None:
        known = self._followed.get(id)
        if known is None or known.first + len(known.states) != pos:  # what lies between was never seen
            self._decoder.drop(id)
            known = self._followed[id] = _Followed(pos, [], [])
        keep = len(known.states)
        self._cut(id, known, keep if known.behind == tokens[0] else keep - 1)
        known.states += list(states)
        known.tokens += tokens
        if len(known.states) - known.decoded > _WAITING:
            self._settle(id, known)

    def forked(self, source: int, target: int, length: int) -> None:
        """See `Follower`."""
        known = self._followed.get(source)
        if known is None or self.failed is not None or length <= known.first:
            return
        try:
            self._settle(source, known)
        except TilebeamError as error:
            self._fail(str(error))
            return
        n = length - known.first
        decoded = min(known.decoded, n - 1)
        if decoded:
            self._decoder.fork(source, target, decoded)
        self._followed[target] = _Followed(known.first, known.states[:n], known.tokens[:n], decoded)

    def truncated(self, seq: int, length: int) -> None:
        """See `Follower`."""
        known = self._followed.get(seq)
        if known is None or self.failed is not None:
            return
        n = length - known.first
        if n <= 0:
            self._decoder.drop(seq)
            del self._followed[seq]
        elif n < len(known.states):
            self._cut(seq, known, n - 1)  # the cell of its last token was made with a token that is gone
            del known.states[n:], known.tokens[n:]

    def cleared(self) -> None:
        """See `Follower`."""
        self._followed.clear()
        self._decoder.clear()

    def _cut(self, id: int, known: _Followed, decoded: int) -> None:
        """Remove the cells of guesses, and those of all states but the first so many."""
        if known.guessed or decoded < known.decoded:
            known.decoded, known.guessed = min(known.decoded, max(0, decoded)), False
            self._decoder.truncate(id, known.decoded)

    def _settle(self, id: int, known: _Followed) -> None:
        """Decode all states of a sequence that wait, but the last."""
        self._cut(id, known, known.decoded)
        while (first := known.decoded) < len(known.states) - 1:
            end = min(len(known.states) - 1, first + self._contexts.n_batch)
            self._contexts.states[: end - first] = known.states[first:end]
            self._decoder.fill([(id, first, known.tokens[first + 1 : end + 1], end - first)])
            self._contexts.decode(end - first)
            known.decoded = end

    def _fail(self, reason: str) -> None:
        self.failed = reason
        self._followed.clear()
        warnings.warn(f"The draft head guesses nothing any more: {reason}", RuntimeWarning, stacklevel=2)

    # --- for Speculation ----------------------------------------------------------------------------------------------

    def cost(self, samples: int) -> float:
        """Return seconds that one more token for so many samples takes, by what passes took; 0 before the first."""
        if not self._seconds:
            return 0.0
        nearest = min(self._seconds, key=lambda n: abs(n - samples))
        return self._seconds[nearest] * max(1.0, samples / nearest)

    def drafting(self, samples: Sequence[Sample]) -> HeadDrafting:
        """Return guesses for these samples."""
        return HeadDrafting(self, samples)

    def waiting(self, sample: Sample, room: int) -> _Span | None:
        """Return the states of a sample's sequence that wait and the tokens behind them, the drawn one included; None:
        there are none, or its last token is decoded already. Of more than `room` states all but the last are decoded at
        once."""
        if self.failed is not None or sample.kv is None or not sample.tokens:
            return None
        known = self._followed.get(sample.kv.id)
        length = len(sample.kv)
        if known is None or known.first + len(known.states) != length:
            return None
        text = sample.target()
        if len(text) != length + 1:
            return None
        if len(known.states) - known.decoded > room:
            self._settle(sample.kv.id, known)
        first = min(known.decoded, len(known.states) - 1)
        self._cut(sample.kv.id, known, first)
        return sample.kv.id, first, [*known.tokens[first + 1 :], text[-1]], known.states[first:]

    def guess(self, spans: Sequence[_Span]) -> list[tuple[int, float, F32]]:
        """Decode states and the tokens behind them, of several sequences.

        Returns:
            for each the likeliest token behind its last one, that token's probability, and the head's state there.
        """
        began = time.perf_counter()
        n = sum(len(tokens) for _, _, tokens, _ in spans)
        if self.failed is not None:
            return []
        self._decoder.fill([(id, start, tokens, len(tokens)) for id, start, tokens, _ in spans])
        self._contexts.states[:n] = np.concatenate([np.asarray(states) for _, _, _, states in spans])
        try:
            states = self._contexts.decode(n)
        except TilebeamError as error:
            self._fail(str(error))
            return []
        ends = np.cumsum([len(tokens) for _, _, tokens, _ in spans]) - 1
        rows = SampleRows([(self._likeliest, int(entry), NORM) for entry in ends])
        self._draws.sample(rows)
        for id, start, tokens, _ in spans:
            known = self._followed[id]
            if start >= len(known.states):
                known.guessed = True
            else:
                known.decoded, known.behind = start + len(tokens), tokens[-1]
        if n == len(spans):
            was = self._seconds.get(n, time.perf_counter() - began)
            self._seconds[n] = was + 0.2 * (time.perf_counter() - began - was)
        drawn = zip(rows.tokens.tolist(), rows.logits, rows.norms, states[ends], strict=True)
        return [(token, math.exp(min(0.0, logit - norm)), state) for token, logit, norm, state in drawn]


# A sequence, the position of its first state here, the tokens behind the states, and the states.
_Span = tuple[int, int, list[int], Sequence[F32]]


class HeadDrafting:
    """Guesses for some samples between two steps."""

    def __init__(self, head: DraftHead, samples: Sequence[Sample]) -> None:
        self._head = head
        room = head.n_batch // max(1, len(samples))
        spans = {i: head.waiting(sample, room) for i, sample in enumerate(samples)}
        self._spans = {i: span for i, span in spans.items() if span is not None}

    def ready(self, i: int) -> bool:
        """Return whether there are guesses for sample i."""
        return i in self._spans

    def next(self, active: Sequence[int]) -> list[tuple[int, int, float]]:
        """Return one more token for each of these samples, in which class its probability is, and the middle of that
        class; fewer where the head failed."""
        drawn = self._head.guess([self._spans[i] for i in active])
        for i, (token, _, state) in zip(active, drawn, strict=False):
            id, start, tokens, _ = self._spans[i]
            self._spans[i] = id, start + len(tokens), [token], [state]
        signs = [min(_SIGNS - 1, int(p * _SIGNS)) for _, p, _ in drawn]
        return [(token, sign, (sign + 0.5) / _SIGNS) for (token, _, _), sign in zip(drawn, signs, strict=True)]

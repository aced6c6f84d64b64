"""A draft head that guesses for the model whose hidden states it reads: one layer, with a KV cache that follows the
model's own, sequence by sequence.

The head computes its cell at a position from the model's features there, fused to one state, and from the token behind
it. So a sequence's last state waits until the next token is drawn: with it the head guesses the one behind. For further
guesses the head's own state takes the place of the model's; their cells are cut away before the model goes on.

The states of a sequence are kept, some KB each, since a fork goes on from one with another token. They are fused and
decoded when somebody asks for guesses, or forks the sequence: what the model refuses of a draft never is. Where nobody
asks for long, and of long prompts, only the last ones are: a head that is asked late, or not at all, costs little.

The head has fewer sequences than the model, since each takes memory for logits of the whole vocabulary: the one used
longest ago gives way, and is decoded again when it is asked for.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from tilebeam.engine.drafter import PassTimes, classed
from tilebeam.engine.request import Sample
from tilebeam.engine.sampler import NORM, BatchSampler, Sampler, SampleRows
from tilebeam.errors import TilebeamError
from tilebeam.native.head_contexts import HeadContexts
from tilebeam.native.llama import Context
from tilebeam.sampling_params import SamplingParams

F32 = npt.NDArray[np.float32]
# States that wait at most; of more, and where a sequence gives way to others, so many stay, as if the text began there.
_WAITING, LAST = 256, 128
# States that are decoded in the batch of the guess, where each has logits of the whole vocabulary; more have their own.
_TOGETHER = 8


class _Followed:
    """A sequence of the model as the head knows it.

    Attributes:
        first: the position of the first state; those before it are not known.
        states, tokens: at the positions from there on.
        features: of the positions behind the states, which are not fused yet.
        decoded: states that have cells, at positions from 0 on.
        behind: the token that the last state was decoded with, where all are.
        guessed: whether there are cells of guesses behind them.
    """

    __slots__ = ("behind", "decoded", "features", "first", "guessed", "states", "tokens")

    def __init__(self, first: int, states: list[F32], features: list[F32], tokens: list[int], decoded: int = 0) -> None:
        self.first, self.states, self.features, self.tokens, self.decoded = first, states, features, tokens, decoded
        self.guessed, self.behind = False, -1


class DraftHead:
    """Guesses for the sequences of a context, which it follows (`Context.follower`).

    Args:
        contexts: of the head.
        target: the context that it follows, with a tap of its layers.
        layers: of the target, whose outputs are its features.

    Attributes:
        failed: why it guesses nothing any more; None: it does.
        times: of its passes over one token of each sample.
    """

    def __init__(self, contexts: HeadContexts, target: Context, layers: Sequence[int]) -> None:
        self.failed: str | None = None
        self._contexts = contexts
        self._decoder = contexts.decoder
        self._target = target
        self._layers = tuple(layers)
        self._followed: dict[int, _Followed] = {}
        self._ids: dict[int, int] = {}  # the head's sequences by the model's; the one used longest ago first
        self._free = list(range(contexts.decoder.n_seq_max))
        self._draws = BatchSampler(contexts.decoder)
        self._likeliest = Sampler(SamplingParams(temperature=0), 0, contexts.decoder.model.vocab)
        self.times = PassTimes()
        target.follower = self

    def close(self) -> None:
        """Follow no more."""
        self._target.follower = None

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
        ids, pos, tokens = (array[:n] for array in (self._target.seq, self._target.pos, self._target.token))
        borders = [0, *(np.flatnonzero((np.diff(ids) != 0) | (np.diff(pos) != 1)) + 1).tolist(), n]
        for first, end in pairwise(borders):  # each has a copy, so that one row that waits does not keep the batch
            rows = features[first:end].copy()
            self._append(int(ids[first]), int(pos[first]), rows, tokens[first:end].tolist())

    def _append(self, id: int, pos: int, features: F32, tokens: list[int]) -> None:
        known = self._followed.get(id)
        if known is None or known.first + len(known.tokens) != pos:  # what lies between was never seen
            self._drop(id)
            known = self._followed[id] = _Followed(pos, [], [], [])
        keep = len(known.tokens)
        self._cut(id, known, keep if known.behind == tokens[0] else keep - 1)
        known.features += list(features)
        known.tokens += tokens
        if len(known.tokens) - known.decoded > _WAITING:
            self._drop(id)
            kept = [row.copy() for row in known.features[-LAST:]]
            self._followed[id] = _Followed(pos + len(tokens) - len(kept), [], kept, known.tokens[-len(kept) :])

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
            self._decoder.fork(self._id(source), self._id(target), decoded)
        self._followed[target] = _Followed(known.first, known.states[:n], [], known.tokens[:n], decoded)

    def truncated(self, seq: int, length: int) -> None:
        """See `Follower`."""
        known = self._followed.get(seq)
        if known is None or self.failed is not None:
            return
        n = length - known.first
        if n <= 0:
            self._drop(seq)
            del self._followed[seq]
        elif n < len(known.tokens):
            self._cut(seq, known, n - 1)  # the cell of its last token was made with a token that is gone
            del known.features[max(0, n - len(known.states)) :], known.states[n:], known.tokens[n:]

    def cleared(self) -> None:
        """See `Follower`."""
        self._followed.clear()
        self._free += self._ids.values()
        self._ids.clear()
        self._decoder.clear()

    def _cut(self, id: int, known: _Followed, decoded: int) -> None:
        """Remove the cells of guesses, and those of all states but the first so many."""
        if known.guessed or max(0, decoded) < known.decoded:
            known.decoded, known.guessed = min(known.decoded, max(0, decoded)), False
            self._decoder.truncate(self._id(id), known.decoded)

    def _id(self, id: int) -> int:
        """Return the head's sequence for one of the model's, which gives way to others last from now on."""
        if id not in self._ids:
            if not self._free:
                other = next(iter(self._ids))
                self._drop(other)
                known = self._followed[other]
                gone = min(len(known.states), max(0, len(known.tokens) - LAST))
                known.first, known.decoded, known.behind, known.guessed = known.first + gone, 0, -1, False
                del known.states[:gone], known.tokens[:gone]
            self._ids[id] = self._free.pop()
        self._ids[id] = found = self._ids.pop(id)
        return found

    def _drop(self, id: int) -> None:
        """Remove all cells of a sequence."""
        if (own := self._ids.pop(id, None)) is not None:
            self._decoder.drop(own)
            self._free.append(own)

    def _fuse(self, followed: Sequence[_Followed]) -> None:
        """Fuse what waits for it in some sequences."""
        features = [row for known in followed for row in known.features]
        if not features:
            return
        states = iter(self._contexts.fuse(np.stack(features)))
        for known in followed:
            known.states += islice(states, len(known.features))
            known.features.clear()

    def _settle(self, id: int, known: _Followed) -> None:
        """Decode all states of a sequence that wait, but the last."""
        self._fuse([known])
        self._cut(id, known, known.decoded)
        while (first := known.decoded) < len(known.states) - 1:
            end = min(len(known.states) - 1, first + self._contexts.n_batch)
            self._contexts.states[: end - first] = known.states[first:end]
            self._decoder.fill([(self._id(id), first, known.tokens[first + 1 : end + 1], 1)])
            self._contexts.decode(end - first, 1)
            known.decoded = end

    def _fail(self, reason: str) -> None:
        self.failed = reason
        self._target.follower = None
        self._followed.clear()
        warnings.warn(f"The draft head guesses nothing any more: {reason}", RuntimeWarning, stacklevel=2)

    # --- for Speculation ----------------------------------------------------------------------------------------------

    def drafting(self, samples: Sequence[Sample]) -> HeadDrafting:
        """Return guesses for these samples."""
        return HeadDrafting(self, samples)

    def waiting(self, samples: Sequence[Sample]) -> dict[int, _Span]:
        """Return, by their places, of those samples whose last token is drawn but not decoded: the states of their
        sequences that wait, and the tokens behind these, the drawn one included."""
        found = dict[int, tuple[Sample, _Followed]]()
        for i, sample in enumerate(samples):
            known = None if sample.kv is None else self._followed.get(sample.kv.id)
            length = len(sample.target()) - 1
            if known is None or sample.kv is None or len(found) == self._decoder.n_seq_max:
                continue
            if known.first + len(known.tokens) == length == len(sample.kv):
                found[i] = sample, known
                self._id(sample.kv.id)  # none of these gives way to another of them
        spans = dict[int, _Span]()
        try:
            self._fuse([known for _, known in found.values()])
            for i, (sample, known) in found.items():
                id, n = sample.kv.id, len(known.states)  # type: ignore[union-attr]
                if n - known.decoded > min(_TOGETHER, self._contexts.n_batch // len(found)):
                    self._settle(id, known)
                first = min(known.decoded, n - 1)
                self._cut(id, known, first)
                spans[i] = id, first, [*known.tokens[first + 1 :], sample.target()[-1]], known.states[first:]
        except TilebeamError as error:
            self._fail(str(error))
            return {}
        return spans

    def guess(self, spans: Sequence[_Span]) -> list[tuple[int, float, F32]]:
        """Decode states and the tokens behind them, of several sequences.

        Returns:
            for each the likeliest token behind its last one, that token's probability, and the head's state there.
        """
        began = time.perf_counter()
        n = sum(len(tokens) for _, _, tokens, _ in spans)
        if self.failed is not None:
            return []
        self._decoder.fill([(self._id(id), start, tokens, len(tokens)) for id, start, tokens, _ in spans])
        self._contexts.states[:n] = np.concatenate([np.asarray(states) for _, _, _, states in spans])
        try:
            states = self._contexts.decode(n)
        except TilebeamError as error:
            self._fail(str(error))
            return []
        ends = np.cumsum([len(tokens) for _, _, tokens, _ in spans]) - 1
        rows = SampleRows([(self._likeliest, int(entry), NORM) for entry in ends])
        self._draws.sample(rows)
        if rows.tokens.min() < 0:  # llama.cpp ends the process that decodes such a token
            self._fail("its logits are not numbers.")
            return []
        for id, start, tokens, _ in spans:
            known = self._followed[id]
            if start >= len(known.states):
                known.guessed = True
            else:
                known.decoded, known.behind = start + len(tokens), tokens[-1]
        if n == len(spans):
            self.times.add(n, time.perf_counter() - began)
        drawn = zip(rows.tokens.tolist(), rows.logits, rows.norms, states[ends], strict=True)
        return [(token, math.exp(min(0.0, logit - norm)), state) for token, logit, norm, state in drawn]


# A sequence, the position of its first state here, the tokens behind the states, and the states.
_Span = tuple[int, int, list[int], Sequence[F32]]


class HeadDrafting:
    """Guesses for some samples between two steps."""

    def __init__(self, head: DraftHead, samples: Sequence[Sample]) -> None:
        self._head = head
        self._spans = head.waiting(samples)

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
        return [classed(token, p) for token, p, _ in drawn]

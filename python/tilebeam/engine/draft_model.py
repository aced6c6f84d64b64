"""A small model of the same vocabulary that guesses for a large one: its likeliest token, one after the other, for many
samples in one batch. Each sample has a sequence in the small model's own KV cache, forked where texts begin alike."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from tilebeam.engine.drafter import MOST, PassTimes, classed
from tilebeam.engine.kv_cache import Limits, PrefixCache, common_prefix
from tilebeam.engine.kv_cache import Sequence as CachedSequence
from tilebeam.engine.request import Sample
from tilebeam.engine.sampler import NORM, BatchSampler, Sampler, SampleRows
from tilebeam.errors import TilebeamError
from tilebeam.native.llama import BatchPiece, Context
from tilebeam.sampling_params import SamplingParams

_AT_ONCE = 32  # tokens: what a sample lacks by more is a prompt
# Tokens of a prompt that are read for each that a sample may still get. Measured with a 0.5B model for a 1.5B on two
# cores: reading one takes 2.3 ms, and a guess saves 9 ms.
_WORTH_READING = 4


class NoCells(TilebeamError):
    """The draft model's windows have fewer cells than are counted, and no room for a batch."""


class DraftModel:
    """Guesses with a context of its own.

    Attributes:
        kv: its cells; times: of its passes.

    Args:
        context: of the draft model, with a unified KV cache.
        target: of the model that it guesses for.

    Raises:
        TilebeamError: the draft model has another vocabulary, or its cache cannot go back to an earlier token.
    """

    def __init__(self, context: Context, target: Context) -> None:
        own, theirs = context.model.vocab, target.model.vocab
        for token in range(min(own.size, theirs.size)):  # some models pad their matrices behind the last token
            if own.entry(token) != theirs.entry(token):
                raise TilebeamError(
                    f"The draft model has another vocabulary than the model: token {token} is "
                    f"{own.spelling(token)!r} there and {theirs.spelling(token)!r} here."
                )
        self._known = own.size if own.size < theirs.size else None
        self.context = context
        self.kv = PrefixCache(context, Limits.of(context, context.n_seq_max))
        if reason := self.kv.uncuttable():
            raise TilebeamError(f"This model cannot be a draft model: {reason}.")
        self._sequences: dict[Sample, CachedSequence] = {}
        self._draws = BatchSampler(context)
        self._likeliest = Sampler(SamplingParams(temperature=0), 0, own)
        self.times = PassTimes()

    def finished(self, sample: Sample) -> None:
        """Give back a sample's cells."""
        seq = self._sequences.pop(sample, None)
        if seq is not None:
            self.kv.close(seq)

    def drafting(self, samples: list[Sample]) -> Drafting:
        """Return guesses for these samples. What turns out wrong is cut away when a sample is asked for again."""
        return Drafting(self, samples)

    # --- for Drafting -----------------------------------------------------------------------------------------------

    def caught_up(self, sample: Sample, room: int) -> tuple[CachedSequence, list[int]] | None:
        """Return a sample's sequence, cut back to what its text still has, and the tokens it lacks, at least one; None
        where `room` cells are too few for it, or its text will be too short to pay for reading the prompt. A prompt is
        decoded at once: its other samples fork from it."""
        text = sample.target()
        if self._known is not None:
            text = [token for token in text if token < self._known]
        if not text:
            return None
        seq = self._sequences.get(sample)
        shared = 0 if seq is None else min(common_prefix(seq.tokens, text), len(text) - 1)
        if seq is not None and self.kv.forkable(seq, shared) < shared:  # others have taken cells of its window
            self.finished(sample)
            seq = None
        if seq is None:
            for idle in [s for s in self._sequences if s.kv is None]:  # preempted
                self.finished(idle)
            if not self.kv.free_ids:
                return None
            source, shared = self.kv.longest_prefix(text, len(text) - 1)
            seq = self._sequences[sample] = self.kv.open_from(source, shared)
        self.kv.truncate(seq, shared)
        lacks = text[shared:]
        left = sample.limit - len(sample.tokens)
        if len(lacks) > min(room, self.kv.free) or len(lacks) > max(_AT_ONCE, _WORTH_READING * left):
            return None
        if len(lacks) > _AT_ONCE:
            self.decode([(seq, lacks[:-1])])
            lacks = lacks[-1:]
        return seq, lacks

    def decode(self, spans: list[tuple[CachedSequence, list[int]]]) -> list[tuple[int, float]]:
        """Decode tokens of several sequences, each once.

        Returns:
            for each the likeliest token after its last one, and that token's probability.

        Raises:
            NoCells: for which llama.cpp has too few; all texts are forgotten.
            TilebeamError: decoding failed.
        """
        context, results = self.context, list[tuple[int, float]]()
        pending = list(spans)
        while pending:
            pieces, n, ends = list[BatchPiece](), 0, list[int]()
            while pending and n < context.n_batch and len(ends) < context.max_outputs:
                seq, tokens = pending.pop(0)
                part, rest = tokens[: context.n_batch - n], tokens[context.n_batch - n :]
                pieces.append((seq.id, len(seq), part, int(not rest)))
                self.kv.extend(seq, part)
                n += len(part)
                if rest:
                    pending.insert(0, (seq, rest))
                else:
                    ends.append(n - 1)
            context.fill(pieces)
            if (code := context.decode(n)) != 0:
                self._sequences.clear()
                self.kv.clear()
                if code == 1:
                    raise NoCells("The draft model has no room for these texts.")
                raise TilebeamError("The draft model failed to decode: load the model without it.")
            if ends:
                rows = SampleRows([(self._likeliest, entry, NORM) for entry in ends])
                self._draws.sample(rows)
                if rows.tokens.min() < 0:
                    raise TilebeamError("The draft model's logits are not numbers: load the model without it.")
                drawn = zip(rows.tokens.tolist(), rows.logits, rows.norms, strict=True)
                results += [(token, math.exp(min(0.0, logit - norm))) for token, logit, norm in drawn]
        return results


class Drafting:
    """Guesses for some samples between two steps."""

    def __init__(self, model: DraftModel, samples: list[Sample]) -> None:
        self._model = model
        self._spans: dict[int, tuple[CachedSequence, list[int]]] = {}
        for i, sample in enumerate(samples):
            # what the samples before still have to decode, and a draft for each
            taken = sum(len(tokens) + MOST for _, tokens in self._spans.values()) + MOST
            span = model.caught_up(sample, model.kv.free - taken)
            if span is not None:
                self._spans[i] = span

    def ready(self, i: int) -> bool:
        """Return whether there is room for guesses for sample i."""
        return i in self._spans

    def next(self, active: Sequence[int]) -> list[tuple[int, int, float]]:
        """Return one more token for each of these samples, in which class its probability is, and the middle of that
        class."""
        spans = [self._spans[i] for i in active]
        began = time.perf_counter()
        drawn = self._model.decode(spans)
        if all(len(tokens) == 1 for _, tokens in spans):
            self._model.times.add(len(spans), time.perf_counter() - began)
        for i, (token, _) in zip(active, drawn, strict=True):
            self._spans[i] = self._spans[i][0], [token]
        return [classed(token, p) for token, p in drawn]

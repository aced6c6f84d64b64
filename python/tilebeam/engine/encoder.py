"""Embeddings and ranks of whole texts by models that see a text in both directions: one batch holds all of a text, and
no cells are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Literal, NoReturn, get_args

import numpy as np
import numpy.typing as npt

from tilebeam.engine.turns import Turns
from tilebeam.errors import TilebeamError
from tilebeam.native.llama import Context, check_tokens

Floats = npt.NDArray[np.float32]
# How the hidden states of a text's tokens become one: their mean, the first token's, the last one's.
Pooling = Literal["mean", "cls", "last"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
EncodeHook = Callable[[int, int], object]

# Tokens of one batch of several texts: attention looks at all pairs of them.
_BATCH = 512


def pooled_positions(length: int, pooling: Pooling) -> range:
    """Return the tokens of a text whose hidden states are averaged."""
    return {"mean": range(length), "cls": range(1), "last": range(length - 1, length)}[pooling]


class Encoder:
    """Reads texts over a context that always gives embeddings, each batch in a turn of its own.

    Args:
        context: without pooling, or of a model that ranks with pooling by rank.
        fail: raises the exception for a failed llama_decode, given its return code.
    """

    def __init__(self, context: Context, fail: Callable[[int], NoReturn]) -> None:
        self._context = context
        self._fail = fail

    @property
    def longest(self) -> int:
        """Tokens of a text at most."""
        context = self._context
        return min(context.n_batch, context.n_ctx, context.model.n_ctx_train or context.n_ctx)

    def embed(
        self, turns: Turns, texts: SequenceOf[list[int]], pooling: Pooling, hook: EncodeHook | None = None
    ) -> Floats:
        """Return embeddings, float32 [texts, n_embd_out]."""
        context = self._context
        result = np.empty((len(texts), context.model.n_embd_out), np.float32)

        def take(batch: list[int]) -> None:
            at = 0
            for i in batch:
                rows = [context.embedding(at + p) for p in pooled_positions(len(texts[i]), pooling)]
                result[i] = np.mean(rows, axis=0)
                at += len(texts[i])

        self._encode(turns, texts, take, hook)
        return result

    def ranks(self, turns: Turns, texts: SequenceOf[list[int]], hook: EncodeHook | None = None) -> Floats:
        """Rate texts by the model's classifier, float32 [texts, labels]."""
        width = max(1, self._context.model.n_labels)
        result = np.empty((len(texts), width), np.float32)

        def take(batch: list[int]) -> None:
            for seq, i in enumerate(batch):
                result[i] = self._context.pooled(seq, width)

        self._encode(turns, texts, take, hook)
        return result

    def _encode(
        self, turns: Turns, texts: SequenceOf[list[int]], take: Callable[[list[int]], None], hook: EncodeHook | None
    ) -> None:
        """Encode texts.

        Args:
            take: called after each batch, in its turn, with the numbers of its texts.
        """
        self._check(texts)
        context, total, seen = self._context, sum(map(len, texts)), 0
        for batch in self._batches([len(text) for text in texts]):
            with turns():
                context.clear()
                context.fill([(seq, 0, texts[i], len(texts[i])) for seq, i in enumerate(batch)])
                tokens = sum(len(texts[i]) for i in batch)
                code = context.decode(tokens)
                if code != 0:
                    self._fail(code)
                take(batch)
                seen += tokens
                if hook is not None:
                    hook(seen, total)

    def _batches(self, sizes: SequenceOf[int]) -> Iterator[list[int]]:
        """Yield the numbers of the texts of each batch.

        Args:
            sizes: tokens of each text.
        """
        batch: list[int] = []
        for i, size in enumerate(sizes):
            full = sum(sizes[j] for j in batch) + size > min(_BATCH, self.longest)
            if batch and (full or len(batch) == self._context.n_seq_max):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _check(self, texts: SequenceOf[list[int]]) -> None:
        for i, text in enumerate(texts):
            if not text:
                raise TilebeamError(f"Text {i} has no tokens.")
            if len(text) > self.longest:
                raise TilebeamError(f"Text {i} has {len(text)} tokens; this model takes at most {self.longest}.")
            check_tokens(text, self._context.model.vocab.size, f"Text {i}")

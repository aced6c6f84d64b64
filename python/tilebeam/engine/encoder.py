"""Embeddings and ranks of whole texts by models that see a text in both directions: one batch holds all of a text, and
no cells are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Literal, NoReturn, get_args

import numpy as np
import numpy.typing as npt

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
    """The tokens of a text whose hidden states are averaged."""
    return {"mean": range(length), "cls": range(1), "last": range(length - 1, length)}[pooling]


class Encoder:
    """Reads texts over a context that nothing else uses meanwhile, which always gives embeddings.

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

    def embed(self, texts: SequenceOf[list[int]], pooling: Pooling, hook: EncodeHook | None = None) -> Floats:
        """Embeddings, float32 [texts, n_embd_out]."""
        context = self._context
        result = np.empty((len(texts), context.model.n_embd_out), np.float32)
        for batch in self._batches(texts, hook):
            at = 0
            for i in batch:
                rows = [context.embedding(at + p) for p in pooled_positions(len(texts[i]), pooling)]
                result[i] = np.mean(rows, axis=0)
                at += len(texts[i])
        return result

    def ranks(self, texts: SequenceOf[list[int]], hook: EncodeHook | None = None) -> Floats:
        """What the model's classifier says of texts, float32 [texts, labels]."""
        width = max(1, self._context.model.n_labels)
        result = np.empty((len(texts), width), np.float32)
        for batch in self._batches(texts, hook):
            for seq, i in enumerate(batch):
                result[i] = self._context.pooled(seq, width)
        return result

    def _batches(self, texts: SequenceOf[list[int]], hook: EncodeHook | None) -> Iterator[list[int]]:
        """Encode texts; gives the numbers of those of each batch, when it is done."""
        self._check(texts)
        total, seen = sum(map(len, texts)), 0
        batch: list[int] = []
        for i in range(len(texts) + 1):
            tokens = sum(len(texts[j]) for j in batch)
            full = i == len(texts) or tokens + len(texts[i]) > min(_BATCH, self.longest)
            if batch and (full or len(batch) == self._context.n_seq_max):
                self._encode([texts[j] for j in batch])
                yield batch
                seen, batch = seen + tokens, []
                if hook is not None:
                    hook(seen, total)
            batch.append(i)

    def _check(self, texts: SequenceOf[list[int]]) -> None:
        for i, text in enumerate(texts):
            if not text:
                raise TilebeamError(f"Text {i} has no tokens.")
            if len(text) > self.longest:
                raise TilebeamError(f"Text {i} has {len(text)} tokens; this model takes at most {self.longest}.")
            check_tokens(text, self._context.model.vocab.size, f"Text {i}")

    def _encode(self, texts: list[list[int]]) -> None:
        context = self._context
        context.clear()
        context.fill([(seq, 0, text, len(text)) for seq, text in enumerate(texts)])
        code = context.decode(sum(map(len, texts)))
        if code != 0:
            self._fail(code)

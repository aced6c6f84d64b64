"""The check that a loaded model's results do not depend on what else is computed: a model that shall be deterministic
is asked once.

That the device's kernels do not is by construction. What a family of models makes of them is llama.cpp's: attention
that does not run as flash attention, recurrent layers that read many tokens in another way than one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from tilebeam.engine.encoder import Encoder
from tilebeam.engine.turns import Turn
from tilebeam.native.llama import BatchPiece, Context

Floats = npt.NDArray[np.float32]
_TEXT, _LAST = 40, 4  # tokens of a text, and of its end that is read token by token
_OTHER = 7  # tokens of another one beside it


def reads_alike(context: Context, fail: Callable[[int], NoReturn], *, generates: bool, ranks: bool) -> bool:
    """Read a text alone, and beside another one with its last tokens one by one: whether the results are the same bits.

    Args:
        context: with an empty cache, which it leaves.
        fail: raises the exception for a failed llama_decode, given its return code.
        generates: of logits; else of the embeddings of texts, which are read as a whole, or of their ranks.
    """
    most = min(context.n_batch - _OTHER, context.model.n_ctx_train or _TEXT)
    last = min(_LAST, context.max_outputs, most // 2)
    n_vocab = context.model.vocab.size
    text, other = ([(first + 977 * i) % n_vocab for i in range(n)] for first, n in ((13, min(most, _TEXT)), (500, 64)))
    if generates:
        alone, beside = _logits(context, fail, text, other, last)
    else:
        encoder = Encoder(context, fail)

        def turns() -> AbstractContextManager[Turn]:
            return nullcontext(Turn(lambda: False))  # nobody else has the context yet

        read = partial(encoder.ranks, turns) if ranks else partial(encoder.embed, turns, pooling="mean")
        alone, beside = read([text])[0], read([other[:_OTHER], text])[1]
    context.clear()
    return np.array_equal(alone, beside)


def _logits(
    context: Context, fail: Callable[[int], NoReturn], text: list[int], other: list[int], last: int
) -> tuple[Floats, Floats]:
    """Return those of the last tokens, read both ways."""

    def decode(*pieces: BatchPiece) -> None:
        context.fill(pieces)
        if (code := context.decode(sum(len(tokens) for _, _, tokens, _ in pieces))) != 0:
            fail(code)

    begin = len(text) - last
    decode((0, 0, text, last))
    alone = np.stack([context.logits(i) for i in range(begin, len(text))])
    context.clear()
    decode((1, 0, other[:_OTHER], 0), (0, 0, text[:begin], 1))
    beside = []
    for i, token in enumerate(text[begin:]):
        decode((1, _OTHER + i, [other[_OTHER + i]], 1), (0, begin + i, [token], 1))
        beside.append(context.logits(1).copy())
    return alone, np.stack(beside)

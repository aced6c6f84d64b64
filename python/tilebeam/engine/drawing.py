"""Draws the tokens of a batch: one call into C for all rows, see backend/sampling/sampling.h."""

from __future__ import annotations

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from tilebeam.engine.sampler import Sampler, context_of, function
from tilebeam.native.llama import Context
from tilebeam.native.sampling import ffi, lib

NOTHING: int = lib.TB_DRAW_NOTHING  # the chain forbids every token
DAMAGED: int = lib.TB_DRAW_DAMAGED  # the logits are not numbers

_ROW = np.dtype(
    [
        ("chain", np.uintp),
        ("entry", np.int32),
        ("wants_norm", np.int32),
        ("token", np.int32),
        ("logit", np.float32),
        ("norm", np.float64),
    ],
    align=True,
)
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
assert _ROW.itemsize == ffi.sizeof("struct tb_draw_row")
assert _CANDIDATE.itemsize == ffi.sizeof("struct tb_candidate")


class Draws:
    """Rows to draw for: a sampler chain and the batch entry whose logits it gets, and what was drawn.

    The rows can be drawn again and again: the same chains, from the same entries of the next batches.
    """

    def __init__(self, rows: list[tuple[Sampler, int, bool]]) -> None:
        """`rows`: sampler, entry, and whether the row's log norm is wanted."""
        self._rows = np.zeros(len(rows), _ROW)
        self._rows["chain"] = [sampler.address for sampler, _, _ in rows]
        self._rows["entry"] = [entry for _, entry, _ in rows]
        self._rows["wants_norm"] = [wants for _, _, wants in rows]
        self._tokens: npt.NDArray[np.int32] = self._rows["token"]
        self._pointer = ffi.from_buffer("struct tb_draw_row[]", self._rows)
        self._samplers = [sampler for sampler, _, _ in rows]  # alive as long as their addresses are used

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """A view of what was drawn: int32 [rows], a token, `NOTHING` or `DAMAGED`."""
        return self._tokens

    @property
    def logits(self) -> list[float]:
        """Of the tokens drawn, as the model computed them."""
        return self._rows["logit"].tolist()

    @property
    def norms(self) -> list[float]:
        """Logarithm of the sum of exp(logit) over the vocabulary, where wanted: logit - norm is a log-probability."""
        return self._rows["norm"].tolist()


class Drawer:
    """Draws from the logits of a context."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._n_vocab = context.model.vocab.size
        self._scratch = np.empty(lib.TB_DRAW_TOP_MAX, _CANDIDATE)
        self._c, self._kept = context_of(self._n_vocab)
        self._c.context = ffi.cast("void *", function(context.pointer))
        self._c.logits = ffi.cast("void *", function(C._lib.llama_get_logits_ith))

    def draw(self, draws: Draws) -> None:
        """Draw a token for every row; the chains remember theirs."""
        lib.tb_draw_rows(self._c, draws._pointer, len(draws._tokens))

    def top(self, entry: int, count: int) -> tuple[list[int], list[float]]:
        """The likeliest tokens of a batch entry, likeliest first, of equals the lower, and their logits."""
        logits = self._context.logits(entry)
        count = min(count, self._n_vocab)
        if count <= lib.TB_DRAW_TOP_MAX:
            found = lib.tb_top(
                ffi.from_buffer("float[]", logits),
                self._n_vocab,
                count,
                ffi.from_buffer("struct tb_candidate[]", self._scratch),
            )
            return self._scratch["id"][:found].tolist(), self._scratch["logit"][:found].tolist()
        order = np.lexsort((np.arange(self._n_vocab), -logits))[:count]
        return order.tolist(), logits[order].tolist()

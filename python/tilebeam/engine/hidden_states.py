"""Takes the hidden states of the rows that a step decodes anyway, and the log-probabilities of the tokens that it
draws, and adds them up per sample.

The states are those behind the final norm, or, of a context with a tap, those behind one of the layers.

llama.cpp gives hidden states behind the norm and logits of one batch, but then of all its rows. So the scheduler keeps
prompts out of the batches that give them; all rows of such a batch draw tokens or check drafts, and have logits anyway.
A tap takes all rows of whatever batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from tilebeam.engine.request import Sample
from tilebeam.errors import TilebeamError
from tilebeam.native.llama import Context
from tilebeam.native.sampling import address_of, ffi, lib
from tilebeam.text_state import DECAY, Confidence, TextState

_ROWS = 16  # at first


@dataclass(frozen=True)
class StateRows:
    """Where the hidden states of a batch go.

    Attributes:
        entries: of the batch, int64 [samples].
        places: the samples' places.
        starts: the position from which on a sample's tokens are text.
    """

    entries: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]


class HiddenStates:
    """The states of all samples that want one."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._count = np.zeros(0, np.int64)
        # By place: total, recent, last.
        self._sums: npt.NDArray[np.float32] = np.zeros((3, 0, context.model.n_embd), np.float32)
        self._native: Any = None  # these arrays, until they grow
        if context.tap is not None:
            self._source, self._read = context.tap.pointer, context.tap.read
        else:
            self._source = ffi.cast("void *", address_of(context.pointer))
            self._read = ffi.cast("float *(*)(void *, int32_t)", address_of(C._lib.llama_get_embeddings_ith))
        self._confidence: dict[int, Confidence] = {}
        self._free: list[int] = []

    def open(self) -> int:
        """Return a place for a sample, with the state of an empty text."""
        if not self._free:
            held = len(self._count)
            more = max(_ROWS, held)
            self._count = np.concatenate([self._count, np.zeros(more, np.int64)])
            added = np.zeros((3, more, self._sums.shape[2]), np.float32)
            self._sums = np.concatenate([self._sums, added], axis=1)
            self._free = list(range(held + more - 1, held - 1, -1))
            self._native = None
        place = self._free.pop()
        self._count[place] = 0
        self._confidence[place] = Confidence()
        self._sums[:, place] = 0
        return place

    def state(self, place: int, *, ended: bool = False) -> TextState:
        """Return a sample's state by now.

        Args:
            ended: its last token ends the text.
        """
        total, recent, last = self._sums[:, place].copy()
        confidence = self._confidence[place]
        if ended:
            confidence = replace(confidence, ended=True)
        return TextState(int(self._count[place]), total, recent, last, confidence)

    def drew(self, place: int, logprob: float) -> None:
        """Record that a sample has drawn a token of this log-probability."""
        c = self._confidence[place]
        recent, lowest = c.recent * float(DECAY) + logprob, min(c.lowest, logprob)
        self._confidence[place] = Confidence(c.count + 1, c.total + logprob, c.squares + logprob**2, recent, lowest)

    def close(self, place: int) -> None:
        """Free the place for another sample."""
        self._free.append(place)

    @contextmanager
    def taken(self, n_tokens: int) -> Iterator[None]:
        """Take hidden states of a batch of so many tokens that is decoded in here."""
        if (tap := self._context.tap) is not None:
            with tap.copying(n_tokens):
                yield
            return
        self._context.output_hidden(True)
        try:
            yield
        finally:
            self._context.output_hidden(False)

    def rows(self, sampling: Sequence[tuple[Sample, int]]) -> StateRows | None:
        """Return where hidden states of batch entries go; None: nobody wants any."""
        wanted = [(entry, s.place, s.request.text_start) for s, entry in sampling if s.place is not None]
        return StateRows(*np.array(wanted, np.int64).T.copy()) if wanted else None

    def add(self, rows: StateRows) -> None:
        """Take the last batch's hidden states, but for those of tokens that belong to the prompt."""
        entries, places = rows.entries, rows.places
        of_text = self._context.pos[entries] >= rows.starts
        if not of_text.all():
            entries, places = entries[of_text], places[of_text]
        if not len(entries):
            return
        where = (ffi.from_buffer("int64_t[]", array) for array in (entries, places))
        if not lib.tb_states_add(self._arrays(), self._source, self._read, *where, len(entries)):
            layer = ""
            if (tap := self._context.tap) is not None:
                layer = f" behind layer {tap.layers[0]} (a tensor {tap.names[0]} with a row for each token)"
            raise TilebeamError(f"llama.cpp has no hidden state{layer} for an entry of the last batch.")

    def _arrays(self) -> Any:
        """Return what native code adds to: a struct tb_states."""
        if self._native is None:
            self._native = ffi.new("struct tb_states *")
            self._native.total, self._native.recent, self._native.last = (
                ffi.from_buffer("float[]", array) for array in self._sums
            )
            self._native.count = ffi.from_buffer("int64_t[]", self._count)
            self._native.n_embd, self._native.decay = self._sums.shape[2], DECAY
        return self._native

"""Hidden states behind some of a model's layers: llama.cpp's scheduler stops there, and a native callback copies them.

llama.cpp itself gives hidden states behind the final norm only, and those of all rows of a batch or of none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from tilebeam.native.sampling import address_of, ffi, lib

MOST_LAYERS: int = lib.TB_TAP_LAYERS
# Names of layers' outputs by architecture, where they are not l_out: so Nemotron-H calls what some layers add.
_OUTPUTS = dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "nemotron_h_block_out")


class LayerTap:
    """The output of some layers, a row for each token of the last batch that was decoded while it was on.

    Args:
        layers: from 0. The last layer computes rows with outputs only, so it is none of a tap's.
        n_embd: elements of a row.
        n_batch: tokens of a batch, at most.
        states: whether samples' hidden states are those of the first layer.
        architecture: of the model.

    Attributes:
        layers, states: as given.
        names: of their tensors.
        pointer, address: a struct tb_tap; the callback's argument, and `read`'s.
        read: tb_tap_row.
        callback: for llama_context_params.cb_eval.
    """

    def __init__(
        self, layers: Sequence[int], n_embd: int, n_batch: int, *, states: bool = True, architecture: str = ""
    ) -> None:
        self.layers, self.states = tuple(layers), states
        output = _OUTPUTS.get(architecture, "l_out")
        self.names = [f"{output}-{layer}" for layer in layers]
        self._names = [ffi.new("char[]", name.encode()) for name in self.names]
        self._rows = np.empty((len(layers), n_batch, n_embd), np.float32)
        self._tap = tap = ffi.new("struct tb_tap *")
        tap.names[0 : len(layers)] = self._names
        tap.rows = ffi.from_buffer("float[]", self._rows)
        tap.n_layers, tap.capacity, tap.n_embd = self._rows.shape
        base = ctypes.CDLL("libggml-base.so.0")  # by name: the copy that libllama resolved
        for field, name in (
            ("tensor_name", "ggml_get_name"),
            ("tensor_bytes", "ggml_nbytes"),
            ("tensor_get", "ggml_backend_tensor_get"),
        ):
            setattr(tap, field, ffi.cast(ffi.typeof(getattr(tap, field)), address_of(getattr(base, name))))
        self.pointer: Any = ffi.cast("void *", tap)
        self.address = int(ffi.cast("intptr_t", tap))
        self.read: Any = lib.tb_tap_row
        see = int(ffi.cast("intptr_t", ffi.addressof(lib, "tb_tap_see")))
        self.callback: Any = C.ggml_backend_sched_eval_callback(see)

    def start(self, n_tokens: int) -> None:
        """Copy what the next batch, of so many tokens, computes."""
        self._tap.n_tokens, self._tap.on = n_tokens, True
        self._tap.n_rows = [0] * MOST_LAYERS

    def stop(self) -> None:
        """Copy nothing any more; what there is stays."""
        self._tap.on = False

    @contextmanager
    def copying(self, n_tokens: int) -> Iterator[None]:
        """Copy what a batch of so many tokens computes that is decoded in here; what there is stays."""
        self.start(n_tokens)
        try:
            yield
        finally:
            self.stop()

    @property
    def on(self) -> bool:
        """Whether it copies."""
        return bool(self._tap.on)

    def arrange(self, places: npt.NDArray[np.int64]) -> None:
        """Put the rows into the order of the batch, which llama.cpp computed in another.

        Args:
            places: of the rows of its entries among those that were copied.
        """
        n = len(places)
        if all(self._tap.n_rows[i] == n for i in range(len(self.layers))) and (places != np.arange(n)).any():
            self._rows[:, :n] = self._rows[:, places]

    def rows(self, layers: Sequence[int]) -> npt.NDArray[np.float32] | None:
        """Return the rows of some of its layers side by side, float32 [tokens, layers x n_embd]; None: some are
        missing."""
        n = self._tap.n_tokens
        places = [self.layers.index(layer) for layer in layers]
        if any(self._tap.n_rows[i] != n for i in places):
            return None
        return np.concatenate([self._rows[i, :n] for i in places], axis=1)

"""Hidden states behind one of a model's layers: llama.cpp's scheduler stops there, and a native callback copies them.

llama.cpp itself gives hidden states behind the final norm only, and those of all rows of a batch or of none.
"""

from __future__ import annotations

from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

from tilebeam.native.ggml_base import ggml_base
from tilebeam.native.sampling import address_of, ffi, lib


class LayerTap:
    """The output of layer `layer`, a row for each token of the last batch that was decoded while it was on.

    Args:
        layer: from 0. The last layer computes rows with outputs only, so it is none of a tap's.
        n_embd: elements of a row.
        n_batch: tokens of a batch, at most.

    Attributes:
        layer: as given.
        name: of the tensor.
        pointer, address: a struct tb_tap; the callback's argument, and `read`'s.
        read: tb_tap_row.
        callback: for llama_context_params.cb_eval.
    """

    def __init__(self, layer: int, n_embd: int, n_batch: int) -> None:
        self.layer = layer
        self.name = f"l_out-{layer}"
        self._name = ffi.new("char[]", self.name.encode())
        self._rows = np.empty((n_batch, n_embd), np.float32)
        self._tap = tap = ffi.new("struct tb_tap *")
        tap.name, tap.rows = self._name, ffi.from_buffer("float[]", self._rows)
        tap.capacity, tap.n_embd = self._rows.shape
        base = ggml_base()
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
        self._tap.n_tokens, self._tap.n_rows, self._tap.on = n_tokens, 0, True

    def stop(self) -> None:
        """Copy nothing any more; what there is stays."""
        self._tap.on = False

"""A draft head of the `eagle3` architecture in llama.cpp: a fusion of hidden states of its model's layers, and one
layer over it that guesses tokens (EAGLE-3, arXiv 2503.01840; llama.cpp's src/models/eagle3.cpp).

llama.cpp's functions for the head's own hidden states are exported, but not declared in llama.h; they are the same in
all releases that this package runs with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError
from tilebeam.native.llama import Context, Model, log_router

F32 = npt.NDArray[np.float32]
_FLOATS = ctypes.POINTER(ctypes.c_float)
FUSED = 32  # tokens of a batch of features, at most


# llama_set_embeddings_nextn(llama_context *, bool, bool) and llama_get_embeddings_nextn(llama_context *), as compilers
# with the Itanium ABI name them.
_SET, _GET = "_Z26llama_set_embeddings_nextnP13llama_contextbb", "_Z26llama_get_embeddings_nextnP13llama_context"


def available() -> bool:
    """Tell whether this llama.cpp can run draft heads."""
    return all(hasattr(C._lib, name) for name in (_SET, _GET))


class HeadContexts:
    """Owns the two contexts of a head: one fuses features, one decodes.

    Two, since llama.cpp keeps a context's graph from one batch to the next as long as they are of one kind. Both have
    room for logits of the whole vocabulary: of as many sequences as they may have, and of as many tokens as a batch
    ever had. So batches are short.

    Args:
        model: the head.
        params: of the context that decodes; its sequences are few.

    Attributes:
        decoder: the context with the head's KV cache; its batches have both tokens and states, see `decode`.
        n_batch: tokens of a batch, at most.
        states: float32 [n_batch, n_embd], what goes in beside the tokens of a batch.

    Raises:
        TilebeamError: llama.cpp makes no context of it.
    """

    def __init__(self, model: Model, params: Any) -> None:
        lib = C._lib
        switch = _function(lib, _SET, None, ctypes.c_bool, ctypes.c_bool)
        self._get = _function(lib, _GET, _FLOATS)
        self._pointers = list[Any]()
        fusing = type(params).from_buffer_copy(params)
        fusing.n_ctx, fusing.n_seq_max, fusing.n_batch, fusing.n_ubatch = 256, 1, FUSED, FUSED
        for wanted in (fusing, params):
            pointer = C.llama_init_from_model(model.pointer, wanted)
            if not pointer:
                self.close()
                raise TilebeamError("llama.cpp makes no context of the draft head.")
            switch(pointer, True, True)
            self._pointers.append(pointer)
        self.n_embd, self.n_batch = model.n_embd, int(params.n_batch)
        self.decoder = Context(self._pointers[1], model, self.n_batch, self.n_batch)
        self.states: F32 = np.zeros((self.n_batch, model.n_embd), np.float32)
        self.decoder.batch.embd = self.states.ctypes.data_as(_FLOATS)
        self._all = np.ones(FUSED, np.int8)

    def fuse(self, features: F32) -> F32:
        """Fuse features of tokens, float32 [tokens, layers x n_embd of the head's model], to float32 [tokens, n_embd].

        Raises:
            TilebeamError: llama.cpp failed.
        """
        batch, parts = C.llama_batch(), list[F32]()
        batch.logits = self._all.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        for start in range(0, len(features), FUSED):
            part = np.ascontiguousarray(features[start : start + FUSED])
            batch.n_tokens, batch.embd = len(part), part.ctypes.data_as(_FLOATS)
            if C.llama_encode(self._pointers[0], batch) != 0:
                raise TilebeamError("llama.cpp failed to fuse features for the draft head.")
            parts.append(self._output(self._pointers[0], len(part)))
        return np.concatenate(parts)

    def decode(self, n: int, outputs: int | None = None) -> F32:
        """Decode the first n entries of the decoder's batch and of `states`; return the states behind the layer,
        float32 [n, n_embd]. All entries must have logits, since llama.cpp takes those of the first ones for those that
        have; if only the cells are wanted, so many `outputs`, whose states mean nothing.

        Raises:
            TilebeamError: llama.cpp failed.
        """
        if self.decoder.decode(n) != 0:
            raise TilebeamError("llama.cpp failed to decode with the draft head.")
        return self._output(self._pointers[1], n if outputs is None else outputs)

    def _output(self, pointer: Any, n: int) -> F32:
        return np.ctypeslib.as_array(self._get(pointer), (n, self.n_embd)).copy()

    def close(self) -> None:
        """Free both contexts."""
        with log_router().capture():  # it tells of its buffers
            for pointer in self._pointers:
                C.llama_free(pointer)
        self._pointers = []


def _function(lib: Any, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(lib, name)
    function.restype, function.argtypes = result, [ctypes.c_void_p, *arguments]  # type: ignore[attr-defined]
    return function

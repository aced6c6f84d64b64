"""llama.cpp's view of a model file without its weights: its tokenizer, and whether it has all tensors."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import GGUFError

Ids = npt.NDArray[np.int32]

ERROR = 4  # enum ggml_log_level


@contextmanager
def _log(C: Any) -> Iterator[list[str]]:
    """Collect llama.cpp's error lines while the block runs; its other lines are dropped."""
    former, data = C.llama_log_callback(), ctypes.c_void_p()
    C.llama_log_get(ctypes.byref(former), ctypes.byref(data))
    lines: list[str] = []

    def line(level: int, text: bytes, _data: Any) -> None:
        if level >= ERROR:
            lines.append(text.decode("utf-8", "replace").strip())

    callback = C.llama_log_callback(line)
    C.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        yield lines
    finally:
        C.llama_log_set(former, data)


def require_loadable(path: str | os.PathLike[str]) -> None:
    """Have llama.cpp look for all tensors of a model, without reading any.

    Raises:
        GGUFError: it would not load the file; says why.
    """
    import llama_cpp.llama_cpp as C

    C.llama_backend_init()
    params = C.llama_model_default_params()
    params.n_gpu_layers, params.no_alloc = 0, True
    if hasattr(params, "load_mode"):  # since 0.3.35; what is mapped cannot be left out
        params.load_mode = C.LLAMA_LOAD_MODE_NONE
    else:
        params.use_mmap = False
    with _log(C) as lines:
        model = C.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise GGUFError(f"llama.cpp cannot load {os.fspath(path)}: {' '.join(lines[:2])}")
    C.llama_model_free(model)


class LlamaTokenizer:
    """Text to token ids and back, as llama.cpp does it for this model. Special tokens are not looked for in text.

    Raises:
        GGUFError: llama.cpp does not take the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import llama_cpp.llama_cpp as C  # takes a while, and only trimming needs it

        self._c: Any = C
        C.llama_backend_init()
        params = C.llama_model_default_params()
        params.vocab_only = True
        with _log(C) as lines:
            self._model: Any = C.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise GGUFError(f"llama.cpp cannot load the vocabulary of {os.fspath(path)}: {' '.join(lines[:2])}")
        self._vocab = C.llama_model_get_vocab(self._model)

    def __call__(self, text: bytes) -> Ids:
        """Return token ids of UTF-8 text, nothing added."""
        size = len(text) + 8
        while True:
            out = np.empty(size, np.int32)
            n = self._c.llama_tokenize(self._vocab, text, len(text), _ids(out), size, False, False)
            if n >= 0:
                return out[:n].copy()
            if -n <= size:
                raise GGUFError("llama.cpp cannot cut this text into tokens")
            size = -n

    def text(self, ids: Ids) -> bytes:
        """Convert token ids to text; special tokens become their names."""
        given = np.ascontiguousarray(ids, np.int32)
        size = 8 * len(given) + 64
        while True:
            out = ctypes.create_string_buffer(size)
            n = self._c.llama_detokenize(self._vocab, _ids(given), len(given), out, size, False, True)
            if n >= 0:
                return out.raw[:n]
            size = -n

    def close(self) -> None:
        """Free the vocabulary. Idempotent."""
        if self._model:
            self._c.llama_model_free(self._model)
        self._model = None


def _ids(a: Ids) -> Any:
    return a.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))

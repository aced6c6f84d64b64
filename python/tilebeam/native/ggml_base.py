"""ggml's functions of tensors, in the copy of libggml-base that libllama uses."""

from __future__ import annotations

import ctypes


def ggml_base() -> ctypes.CDLL:
    """Load the library."""
    return ctypes.CDLL("libggml-base.so.0")  # by name: the copy that libllama resolved

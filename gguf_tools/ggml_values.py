"""Values of every ggml type, by ggml's own conversion: ``to_float`` of the libggml that llama-cpp-python brings.

Only ``libggml-base`` is opened, which has no backends and reads no files. A block's bytes may be anything: the
conversions index their tables with masked bits only.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from .errors import GGUFError

NAMES = ("libggml-base.so.0", "libggml-base.so")  # the first is the one that libllama itself resolves

ToFloat = Callable[[int, int, int], None]


class _Traits(ctypes.Structure):
    """``struct ggml_type_traits`` (ggml.h), to ``to_float``."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("block_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    )


@cache
def _library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise GGUFError("this type needs ggml: install llama-cpp-python")
    for name in NAMES:
        path = Path(spec.origin).parent / "lib" / name
        if path.is_file():
            library = ctypes.CDLL(str(path))
            library.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
            library.ggml_get_type_traits.argtypes = (ctypes.c_int,)
            return library
    raise GGUFError(f"llama-cpp-python in {Path(spec.origin).parent} has no {NAMES[0]}: install it again")


@cache
def conversion(type: gguf.GGMLQuantizationType) -> ToFloat | None:
    """Return ggml's ``to_float(from, to, elements)`` on addresses; None if the type has no values of its own.

    Raises:
        GGUFError: llama-cpp-python is missing, or its ggml lays the type out in another way than the gguf package.
    """
    block, size = gguf.GGML_QUANT_SIZES[type]
    traits = _library().ggml_get_type_traits(int(type)).contents
    if not traits.to_float:
        return None
    if (traits.block, traits.type_size) != (block, size):
        raise GGUFError(f"the installed llama-cpp-python and gguf disagree about the type {type.name}")
    convert: ToFloat = traits.to_float
    return convert


def to_float(type: gguf.GGMLQuantizationType, data: npt.NDArray[np.uint8], elements: int) -> npt.NDArray[np.float32]:
    """Return values of ``elements`` consecutive elements, whole blocks of contiguous bytes; the GIL is free meanwhile.

    Raises:
        ValueError: the size does not fit, or the type has no values.
    """
    block, size = gguf.GGML_QUANT_SIZES[type]
    convert = conversion(type)
    if convert is None or elements % block or data.size != elements // block * size or not data.flags.c_contiguous:
        raise ValueError(f"{data.size} bytes are not {elements} values of {type.name}")
    out = np.empty(elements, np.float32)
    convert(data.ctypes.data, out.ctypes.data, elements)
    return out

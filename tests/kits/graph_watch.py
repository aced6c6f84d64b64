"""Tensors of a model's graph, as llama.cpp's scheduler computes them: a watch sees those that it asks for."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt
from tilebeam.errors import TilebeamError


class Tensor(ctypes.Structure):
    """struct ggml_tensor of the pinned ggml."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]


def operation(name: str) -> int:
    """Return the number of an op of the ggml in use."""
    lib = ctypes.CDLL("libggml-base.so.0")
    lib.ggml_op_name.restype = ctypes.c_char_p
    lib.ggml_op_name.argtypes = [ctypes.c_int]
    for i in range(128):
        if lib.ggml_op_name(i) == name.encode():
            return i
    raise TilebeamError(f"This llama.cpp has no operation {name}.")


def name_of(t: Any) -> str:
    """Return a tensor's name."""
    return bytes(t.name).decode("utf-8", "replace")


def array(t: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return a view of a tensor in host memory, numpy's order of dimensions."""
    last = sum((t.ne[i] - 1) * t.nb[i] for i in range(4)) + np.dtype(dtype).itemsize
    raw = (ctypes.c_char * last).from_address(t.data)
    strides = tuple(t.nb[i] for i in reversed(range(4)))
    return np.ndarray(tuple(t.ne[i] for i in reversed(range(4))), dtype, raw, strides=strides)


class Watch(ABC):
    """What looks at a graph's tensors through the scheduler's callback.

    Attributes:
        error: what went wrong in there.
        enough: ends a window before its last op.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.enough = False
        self.callback = C.ggml_backend_sched_eval_callback(self._seen)

    @abstractmethod
    def wants(self, t: Any) -> bool:
        """Return whether to see a tensor once it is computed. The graph runs in one piece up to there."""

    @abstractmethod
    def add(self, t: Any) -> None:
        """Add a tensor that was wanted: the one of which `wants` was asked last."""

    def _seen(self, pointer: int, ask: bool, _data: Any) -> bool:
        """Answer the scheduler, which asks which results to stop at, and shows them. False ends the graph."""
        try:
            t = ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents
            if ask:
                return self.wants(t)
            self.add(t)
            return not self.enough
        except BaseException as e:  # nothing may leave a callback of C
            self.error = e
            return False

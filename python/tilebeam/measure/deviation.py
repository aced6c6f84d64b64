"""Where two devices begin to disagree: the same tokens through the same model on both, tensor by tensor.

For people who port a device. The scheduler of llama.cpp shows tensors as they are computed: the outputs of layers, with
everything in between running as it does in use, or all tensors, which has every op run alone.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError
from tilebeam.measure.graph_watch import TYPE_F32, Watch, decode, name_of, op_name
from tilebeam.measure.perplexity import Windows
from tilebeam.model.lm import LM
from tilebeam.native.ggml_base import ggml_base

F32 = npt.NDArray[np.float32]

# What comes out of a layer, and of the whole model, as llama.cpp's graphs name it (llama-graph.cpp, src/models).
LAYERS = re.compile(r"l_out-\d+|result_norm|result_output")
# Ops that compute nothing: their data is another tensor's.
_VIEWS = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "SET_ROWS", "CPY")
_END_OF_LAYER = re.compile(r"l_out-(\d+)")


@dataclass(frozen=True)
class Deviation:
    """How far a tensor on one device is from the same tensor on another.

    Attributes:
        name: of the tensor, with "#2" behind it where it is the second of that name.
        op: what computed it; shape: numpy's order, without leading ones.
        layer: the layer that it is computed in, one more than the last for what comes behind them.
        error: the root mean square of the difference, relative to that of the reference; infinite where one of them has
            values that are not numbers and the other has none there.
        worst: the greatest difference, relative to the same.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    layer: int
    error: float
    worst: float


class Recorded(NamedTuple):
    """A tensor."""

    op: str
    layer: int
    value: F32


class Recorder(Watch):
    """Keeps tensors.

    Args:
        everything: all tensors of float32 that something computes; else the outputs of layers.
        layer: everything, but only what this layer computes.

    Attributes:
        values: by name, in the order of the graph.
    """

    def __init__(self, everything: bool = False, layer: int | None = None) -> None:
        super().__init__()
        self.values: dict[str, Recorded] = {}
        # The layers of the tensor that was asked about last and of the next: the scheduler asks in the graph's order.
        self._at = self._next = 0
        self._everything = everything or layer is not None
        self._layer = layer
        self._lib = ggml_base()
        self._lib.ggml_is_contiguous.restype = ctypes.c_bool
        self._lib.ggml_is_contiguous.argtypes = [ctypes.c_void_p]
        get = self._lib.ggml_backend_tensor_get
        get.restype, get.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]

    def wants(self, t: Any) -> bool:
        """Return whether a tensor is one that was asked for, of float32."""
        name, self._at = name_of(t), self._next
        if found := _END_OF_LAYER.fullmatch(name):
            self._at = int(found[1])
            self._next = self._at + 1
        if t.type != TYPE_F32 or op_name(t.op) in _VIEWS:
            return False
        if not self._everything:
            return LAYERS.fullmatch(name) is not None
        return self._layer in (None, self._at) and bool(self._lib.ggml_is_contiguous(ctypes.addressof(t)))

    def add(self, t: Any) -> None:
        """Copy it, from wherever the device has it."""
        value = np.empty(tuple(t.ne[i] for i in reversed(range(4))), np.float32)
        self._lib.ggml_backend_tensor_get(ctypes.addressof(t), value.ctypes.data, 0, value.nbytes)
        name, number = name_of(t), 1
        while (unique := name if number == 1 else f"{name}#{number}") in self.values:
            number += 1
        self.values[unique] = Recorded(op_name(t.op), self._at, value)


def record(lm: LM, tokens: Sequence[int], recorder: Recorder, threads: int) -> None:
    """Have a model read tokens as one batch, from an empty cache.

    Raises:
        TilebeamError: the model cannot, or nothing that was asked for is in its graph.
    """
    decode(lm, Windows(np.array([tokens], np.int32), None), recorder, threads=threads)
    if not recorder.values:
        raise TilebeamError("llama.cpp names no such tensors in this model's graph.")


def deviations(reference: Recorder, other: Recorder) -> list[Deviation]:
    """Return all tensors that both devices computed, in the order of the reference's graph."""
    found = []
    for name, (op, layer, value) in reference.values.items():
        if name in other.values and other.values[name].value.shape == value.shape:
            shape = value.shape[next((i for i, n in enumerate(value.shape) if n > 1), -1) :]
            found.append(Deviation(name, op, shape, layer, *_distance(value, other.values[name].value)))
    return found


def _distance(a: F32, b: F32) -> tuple[float, float]:
    """Return, relative to a, the root mean square of the difference, and the greatest one. Masked values (-inf) may
    agree."""
    whole = np.isfinite(a)
    if not np.array_equal(a[~whole], b[~whole], equal_nan=True) or not np.isfinite(b[whole]).all():
        return float("inf"), float("inf")
    x, y = a[whole].astype(np.float64), b[whole].astype(np.float64)
    size = float(np.sqrt(np.mean(x * x))) if x.size else 0.0
    off = np.abs(x - y)
    if not off.any():
        return 0.0, 0.0
    if not size:
        return float("inf"), float("inf")
    return float(np.sqrt(np.mean(off * off))) / size, float(off.max()) / size


def first_beyond(found: Sequence[Deviation], tolerance: float) -> Deviation | None:
    """Find the first tensor whose error is greater."""
    return next((d for d in found if d.error > tolerance), None)

"""Float weights to tiles: round to nearest or a search for better scales, and the error that it costs.

A matrix comes in chunks of rows, each a multiple of 32 long but for the last one: the tiles of the chunks, one after
the other, are those of the whole. So memory stays bounded whatever the tensor's size, and threads share the work.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type

from .gguf_file import Bytes

Floats = npt.NDArray[np.float32]


@dataclass
class ErrorSum:
    """The error of quantizing: sums over weights x stored as y. Threads may add to one object."""

    squared: float = 0.0  # (x - y)^2
    energy: float = 0.0  # x^2
    count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, squared: float, energy: float, count: int) -> None:
        """Add the sums over `count` more weights. May be called from any thread."""
        with self._lock:
            self.squared += squared
            self.energy += energy
            self.count += count

    def add_values(self, x: Floats, y: Floats) -> None:
        """Add the error of ``y`` in place of ``x``, both (rows, K)."""
        a = x.astype(np.float64)
        self.add(float(np.square(a - y).sum()), float((a * a).sum()), x.size)

    @property
    def relative_rms(self) -> float:
        """Root mean square error over the weights' own; 0 for a tensor of zeros."""
        return math.sqrt(self.squared / self.energy) if self.energy else 0.0


def quantize_rows(type: Type, rows: Floats, *, search: bool = False, error: ErrorSum | None = None) -> Bytes:
    """Quantize float32 rows to tiles of any tiled type.

    Args:
        type: tiled type, ``column`` or ``tile`` grouping.
        rows: float32 (N, K), K a multiple of 32; a part of a matrix has N % 32 == 0, but the last one.
        search: choose every FP16 scale, its sign too, for the smallest sum of squared errors; never worse than round to
            nearest on any group of 32 weights. Without it, ggml's round to nearest.
        error: the error is added to it.

    Returns:
        The tiles, uint8, ``tilebeam._ext.tiled_bytes(type, K, N)`` long.

    Raises:
        ValueError: the shape does not fit, or a value is not finite or too large for an FP16 scale.
    """
    if rows.ndim != 2:
        raise ValueError(f"rows of a matrix needed, got an array of shape {list(rows.shape)}")
    sums = np.zeros(2)
    tiles = ggml_ext.quantize(type, np.ascontiguousarray(rows, np.float32), search=search, sums=sums)
    if error is not None:
        squared, energy = sums.tolist()
        error.add(squared, energy, rows.size)
    return tiles

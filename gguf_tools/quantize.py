"""Float weights to tiles: round to nearest or a search for better scales, on all cores, and the error that it costs.

A matrix may come in chunks of rows, each a multiple of 32 long but for the last one: the tiles of the chunks, one after
the other, are those of the whole. So memory stays bounded whatever the tensor's size.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from tilebeam import _ext as ggml_ext
from tilebeam._ext import TILE, Type, cpus

from .gguf_file import Bytes

Floats = npt.NDArray[np.float32]

PIECE = 1 << 18  # weights that one thread quantizes at a time, about


@dataclass
class ErrorSum:
    """The error of quantizing: sums over weights x stored as y. Threads may add to one object.

    ``weighted`` sums multiply each term by the importance of its input (1 where there is none).
    """

    squared: float = 0.0  # (x - y)^2
    weighted: float = 0.0
    energy: float = 0.0  # x^2
    weighted_energy: float = 0.0
    count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, squared: float, weighted: float, energy: float, weighted_energy: float, count: int) -> None:
        """Add the sums over `count` more weights. May be called from any thread."""
        with self._lock:
            self.squared += squared
            self.weighted += weighted
            self.energy += energy
            self.weighted_energy += weighted_energy
            self.count += count

    def add_values(self, x: Floats, y: Floats, weights: Floats | None = None) -> None:
        """Add the error of ``y`` in place of ``x``, both (rows, K); ``weights`` as in :func:`quantize_rows`."""
        a = x.astype(np.float64)
        squares, errors = a * a, np.square(a - y)
        squared, energy = float(errors.sum()), float(squares.sum())
        if weights is None:
            self.add(squared, squared, energy, energy, x.size)
        else:
            w = weights.astype(np.float64)
            self.add(squared, float((errors @ w).sum()), energy, float((squares @ w).sum()), x.size)

    @property
    def relative_rms(self) -> float:
        """Root mean square error over the weights' own; 0 for a tensor of zeros."""
        return math.sqrt(self.squared / self.energy) if self.energy else 0.0


def check_weights(weights: Floats | None, k: int) -> Floats | None:
    """Convert the importance of a matrix' K inputs to what the C code takes.

    Raises:
        ValueError: not K finite numbers of at least 0.
    """
    if weights is None:
        return None
    if weights.shape != (k,):
        raise ValueError(f"the matrix has {k} inputs, the importance {list(weights.shape)} values")
    out = np.ascontiguousarray(weights, np.float32)
    if not (np.isfinite(out).all() and (out >= 0).all()):
        raise ValueError("the importance has a value that is negative or not finite")
    return out


def quantize_rows(
    type: Type,
    rows: Floats,
    *,
    search: bool = False,
    weights: Floats | None = None,
    threads: int | None = None,
    error: ErrorSum | None = None,
) -> Bytes:
    """Quantize float32 rows to tiles of any tiled type.

    Args:
        type: tiled type, ``column`` or ``tile`` grouping.
        rows: float32 (N, K), K a multiple of 32; a part of a matrix has N % 32 == 0, but the last one.
        search: choose every FP16 scale, its sign too, for the smallest (weighted) sum of squared errors; never worse
            than round to nearest on any group of 32 weights. Without it, ggml's round to nearest.
        weights: importance of each of the K inputs, float32 (K,), e.g. from :func:`tilebeam.gguf.load_imatrix`.
            The search minimises the error weighted with it.
        threads: worker threads; one per usable core if None. The C code runs without the GIL.
        error: the error is added to it, weighted and not.

    Returns:
        The tiles, uint8, ``tilebeam._ext.tiled_bytes(type, K, N)`` long.

    Raises:
        ValueError: the shape does not fit, or a value is not finite or too large for an FP16 scale.
    """
    if rows.ndim != 2:
        raise ValueError(f"rows of a matrix needed, got an array of shape {list(rows.shape)}")
    n, k = rows.shape
    out = np.empty(ggml_ext.tiled_bytes(type, k, n), np.uint8)
    importance = check_weights(weights, k)
    x = np.ascontiguousarray(rows, np.float32)
    panel = ggml_ext.tiled_bytes(type, k, TILE)
    step = max(1, PIECE // (k * TILE)) * TILE

    def piece(at: int) -> None:
        part = x[at : at + step]
        tiles = out[at // TILE * panel : -(-(at + len(part)) // TILE) * panel]
        sums = np.zeros(4)
        ggml_ext.quantize(type, part, tiles, search=search, weights=importance, sums=sums)
        if error is not None:
            squared, weighted, energy, weighted_energy = sums.tolist()
            error.add(squared, weighted, energy, weighted_energy, part.size)

    starts = range(0, n, step)
    workers = min(threads or cpus.default_threads(), len(starts))
    if workers == 1:
        for at in starts:
            piece(at)
    else:
        with ThreadPoolExecutor(workers, "quantize") as pool:
            list(pool.map(piece, starts))
    return out

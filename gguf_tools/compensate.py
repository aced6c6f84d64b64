"""Error-compensating quantization of one matrix (GPTQ): what rounding the weights of one input costs, the weights of
other inputs make up for, as far as these inputs go together in a text.

With H = X^T X of the matrix' inputs, the error of a row of weights w stored as v is (w - v) H (w - v)^T. H = R R^T with
an upper triangular R, the Cholesky factor from the last input to the first, so that the error is the sum of squares of
(w - v) R, whose element j depends on inputs 0 .. j only. GPTQ's rule takes the inputs in order, each weight to the code
nearest to

    w[j] + sum over i < j of (w - v)[i] R[i, j] / R[j, j],

which makes one element after the other small. The columns that share a scale (32, or 2 of `tile` grouping) are one
step: the C code tries scales for them. Sweeps follow: every block is chosen again given all others, later ones too, and
stays as it is where nothing better is found. So the error only falls.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tilebeam import _ext as ggml_ext
from tilebeam._ext import TILE, Type, cpus

from .gguf_file import Bytes

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

DAMPING = 0.01  # of the mean of H's diagonal, added to it
SWEEPS = 4
PANEL = 256  # columns between two products with all others
ROWS = 256  # that one thread takes at a time, a multiple of 16


def group_width(tiled: Type) -> int:
    """Return columns that share a scale."""
    return TILE if tiled == ggml_ext.column_type(ggml_ext.source_type(tiled)) else 2


def factor(h: Doubles) -> Doubles:
    """Return R, upper triangular, with R R^T = H. Raises numpy.linalg.LinAlgError if H is not positive definite."""
    low = np.linalg.cholesky(h[::-1, ::-1])
    return low[::-1, ::-1].astype(np.float64, copy=False)


def damped(h: npt.NDArray[Any], damping: float = DAMPING) -> Doubles:
    """Return H in float64, a part of its mean square added to every input's; inputs that are always 0 count as the
    mean.

    Raises:
        ValueError: a value is not finite, a square is negative, or all are 0.
    """
    out: Doubles = h.astype(np.float64)
    diagonal = np.einsum("ii->i", out)
    if not np.isfinite(out).all() or (diagonal < 0).any():
        raise ValueError("the second moments of its inputs have a value that is not finite, or a negative square")
    mean = float(diagonal.mean())
    if mean <= 0:
        raise ValueError("all its inputs are 0 throughout the text")
    diagonal[diagonal == 0] = mean
    diagonal += damping * mean
    return out


@dataclass(frozen=True)
class Inputs:
    """Second moments of a matrix' inputs, ready for any matrix that has these inputs.

    Attributes:
        order: the inputs in the order of their turn: by falling mean square, as far as blocks that share a scale allow.
        h: damped, float64 (K, K), in this order.
        r: its factor.
        width: columns that share a scale.
    """

    order: npt.NDArray[np.intp]
    h: Doubles
    r: Doubles
    width: int

    @classmethod
    def of(cls, moments: npt.NDArray[Any], width: int, damping: float = DAMPING) -> Inputs:
        """Make the inputs of X^T X, (K, K).

        Raises:
            ValueError: the moments make no sense, or are not positive definite even with the damping.
        """
        h = damped(moments, damping)
        squares = np.einsum("ii->i", h).reshape(-1, width)
        inner = np.argsort(-squares, axis=1, kind="stable") + np.arange(len(squares))[:, None] * width
        order = inner[np.argsort(-squares.sum(axis=1), kind="stable")].reshape(-1)
        h = h[np.ix_(order, order)]
        try:
            return cls(order, h, factor(h), width)
        except np.linalg.LinAlgError:
            raise ValueError("the second moments of its inputs are not positive definite") from None


@dataclass(frozen=True)
class Compensated:
    """A matrix as tiles, and its error (w - v) H (w - v)^T summed over rows: after GPTQ's rule and after each sweep."""

    tiles: Bytes
    errors: list[float]


class _Matrix:
    """A matrix while it is quantized; columns are in the order of their turn."""

    def __init__(self, tiled: Type, w: Floats, inputs: Inputs, pool: ThreadPoolExecutor) -> None:
        n, k = w.shape
        self._tiled, self._inputs, self._pool, self._width = tiled, inputs, pool, inputs.width
        self._w = np.ascontiguousarray(w[:, inputs.order], np.float32)
        self._rows_of_scale = 1 if self._width == TILE else 16
        self._h32 = inputs.h.astype(np.float32)
        self._codes = np.zeros((k // self._width, n, self._width), np.float32)
        self._slope: Floats = np.zeros_like(self._w)  # (w - v) H: how the error would fall with each weight
        self._scales = np.zeros((k // self._width, -(-n // self._rows_of_scale)), np.float32)

    def _values(self, block: int) -> Floats:
        d = np.repeat(self._scales[block], self._rows_of_scale)[: len(self._w)]
        out: Floats = self._codes[block] * d[:, None]
        return out

    def _choose(self, block: int, x: npt.NDArray[Any], u: npt.NDArray[Any], again: bool) -> None:
        codes, scales, per = self._codes[block], self._scales[block], self._rows_of_scale
        triangle = np.ascontiguousarray(np.triu(u), np.float32)

        def part(at: int) -> None:
            rows = np.ascontiguousarray(x[at : at + ROWS], np.float32)
            own = scales[at // per : -(-(at + ROWS) // per)]
            ggml_ext.quantize_feedback(self._tiled, rows, triangle, own, codes[at : at + ROWS], again=again)

        list(self._pool.map(part, range(0, len(x), ROWS)))

    def _panels(self) -> Iterator[tuple[slice, list[tuple[int, slice]]]]:
        """Return columns that are worked on together, and the blocks among them by number."""
        k, width = self._w.shape[1], self._width
        for at in range(0, k, PANEL):
            to = min(at + PANEL, k)
            yield slice(at, to), [(c // width, slice(c, c + width)) for c in range(at, to, width)]

    def in_order(self) -> None:
        """Apply GPTQ's rule, block by block."""
        r = self._inputs.r
        r32 = r.astype(np.float32)
        carried = np.zeros_like(self._w)  # (w - v) R of the columns that are done
        for panel, blocks in self._panels():
            change = np.zeros((len(self._w), panel.stop - panel.start), np.float32)
            for block, at in blocks:
                u = np.linalg.inv(r[at, at])
                self._choose(block, self._w[:, at] + carried[:, at] @ u.astype(np.float32), u, again=False)
                error = self._w[:, at] - self._values(block)
                change[:, at.start - panel.start : at.stop - panel.start] = error
                carried[:, at.stop : panel.stop] += error @ r32[at, at.stop : panel.stop]
            carried[:, panel.stop :] += change @ r32[panel, panel.stop :]
        self._slope = ((self._w - self._dense()) @ self._h32).astype(np.float32, copy=False)

    def sweep(self) -> None:
        """Round every block again, given all others."""
        slope = self._slope
        for panel, blocks in self._panels():
            change = np.zeros((len(self._w), panel.stop - panel.start), np.float32)
            for block, at in blocks:
                own, old = self._inputs.h[at, at], self._values(block)
                x = old + slope[:, at] @ np.linalg.inv(own).astype(np.float32)
                self._choose(block, x, np.linalg.inv(factor(own)), again=True)
                step = old - self._values(block)
                change[:, at.start - panel.start : at.stop - panel.start] = step
                slope[:, panel] += step @ self._h32[at, panel]
            for others in (slice(0, panel.start), slice(panel.stop, None)):
                slope[:, others] += change @ self._h32[panel, others]

    def _dense(self) -> Floats:
        return np.concatenate([self._values(block) for block in range(len(self._codes))], axis=1)

    def error(self) -> float:
        """Return (w - v) H (w - v)^T, summed over rows."""
        return float(np.einsum("nk,nk->", self._slope, self._w - self._dense(), dtype=np.float64))

    def tiles(self) -> Bytes:
        """Return the result, columns where they were."""
        (n, k), order, width = self._w.shape, self._inputs.order, self._width
        codes = np.empty((n, k), np.float32)
        codes[:, order] = self._codes.transpose(1, 0, 2).reshape(n, k)
        scales = np.empty((self._scales.shape[1], k // width), np.float32)
        scales[:, order[::width] // width] = self._scales.T
        return ggml_ext.place_codes(self._tiled, codes, scales)


def compensate(
    tiled: Type, w: Floats, inputs: Inputs, *, sweeps: int = SWEEPS, threads: int | None = None
) -> Compensated:
    """Quantize a matrix for the smallest error on its inputs.

    Args:
        tiled: a tiled type that has a quantizer.
        w: float32 (N, K); N a multiple of 16 for ``tile`` grouping.
        inputs: made with the type's ``group_width``.
        sweeps: over all blocks, after GPTQ's rule.
        threads: of the C code; one per performance core if None.

    Raises:
        ValueError: a weight is not finite, or too large for an FP16 scale.
    """
    with ThreadPoolExecutor(threads or cpus.default_threads(), "compensate") as pool:
        m = _Matrix(tiled, w, inputs, pool)
        m.in_order()
        errors = [m.error()]
        for _ in range(sweeps):
            m.sweep()
            errors.append(m.error())
        return Compensated(m.tiles(), errors)

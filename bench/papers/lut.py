"""Low-bit weights as bit planes in nibbles, for lut_gemv.py: from ggml's blocks to what lut_gemv.cpp reads.

A weight is ``scale * integer / 2 * (sum of value[p] * sign[p] + offset) - minimum``, sign[p] = +-1 by plane p's bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
COLUMNS, BIG = 32, 256  # of a panel; k of a super-block
SLICE = 4 * BIG  # k
ONE, TWO, FOUR = np.arange(5, dtype=np.uint8)[[1, 2, 4]]
WORDS = np.array([0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15])  # the column of each word of a vector


@dataclass(frozen=True)
class Format:
    """How a type is looked up; the same numbers as in the C++.

    Attributes:
        number: of the kernels.
        values: of the planes.
        block: k of a float scale, and of a table's unit.
        sub: k of an integer sum.
        panels: of 32 columns, that pass by one table.
    """

    number: int
    values: tuple[int, ...]
    offset: int
    block: int
    sub: int
    panels: int

    @property
    def planes(self) -> int:
        return len(self.values)


FORMATS = {
    "1 bit": Format(0, (1,), 0, BIG, BIG, 2),
    "tq1_0": Format(1, (1, 1), 0, BIG, BIG, 2),
    "tq2_0": Format(1, (1, 1), 0, BIG, BIG, 2),
    "q2_k": Format(2, (1, 2), 3, BIG, 16, 1),
    "q3_k": Format(3, (1, 2, 4), -1, BIG, 16, 1),
    "q4_0": Format(4, (1, 2, 4, 8), -1, 32, 32, 1),
}


@dataclass(frozen=True)
class Planes:
    """A matrix (N, K) in planes.

    Attributes:
        bits: (N, K), bit p of plane p.
        scales: of each block, (N, K / block).
        minima: (N, K / 256), or None.
        integers: a byte for each 16 k, (N, K / 16), the minimum's factor in the high nibble; None: all are 1.
    """

    bits: U8
    scales: F32
    minima: F32 | None = None
    integers: U8 | None = None

    def factors(self) -> tuple[F32, F32]:
        """Return the scale and the minimum of each 16 k, (N, K / 16)."""
        count = self.bits.shape[1] // 16
        scales = np.repeat(self.scales, count // self.scales.shape[1], axis=1)
        if self.integers is None:
            return scales, np.zeros_like(scales)
        if self.minima is None:
            return scales * self.integers.view(np.int8), np.zeros_like(scales)
        return scales * (self.integers & 15), np.repeat(self.minima, BIG // 16, axis=1) * (self.integers >> 4)


def _halves(blocks: U8, at: int) -> F32:
    """Return the FP16 number at a byte of each block, (N, blocks, bytes)."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _fields(bytes: U8, bits: int, count: int) -> U8:
    """Fields of some bits, the lowest of all bytes first: (..., n) to (..., count, n)."""
    shifts = (bits * np.arange(count, dtype=np.uint8))[:, None]
    return np.asarray(bytes[..., None, :] >> shifts & ((1 << bits) - 1))


def planes(type: str, weights: U8, k: int, n: int) -> Planes:
    """Return the planes of ggml's blocks.

    Args:
        type: of FORMATS; "1 bit" is TQ2_0 without zeros.
        weights: N rows of K elements.
    """
    qtype = Q.TQ2_0 if type == "1 bit" else Q[type.upper()]
    elements, size = GGML_QUANT_SIZES[qtype]
    b = weights.reshape(n, k // elements, size)
    if type == "q4_0":
        return Planes(_fields(b[..., 2:], 4, 2).reshape(n, k), _halves(b, 0))
    if type == "q2_k":
        q = _fields(b[..., 16:80].reshape(n, -1, 2, 32), 2, 4)
        return Planes(q.reshape(n, k), _halves(b, 80), _halves(b, 82), b[..., :16].reshape(n, -1))
    if type == "q3_k":
        high = _fields(b[..., :32], 1, 8).reshape(n, k)
        low = _fields(b[..., 32:96].reshape(n, -1, 2, 32), 2, 4).reshape(n, k)
        scales = _fields(b[..., 96:104], 4, 2).reshape(n, -1) | _fields(b[..., 104:108], 2, 4).reshape(n, -1) << FOUR
        return Planes(low | high << TWO, _halves(b, 108), None, scales - np.uint8(32))
    if type == "tq1_0":
        parts = []
        for bytes, digits in ((b[..., :32], 5), (b[..., 32:48], 5), (b[..., 48:52], 4)):
            shifted = bytes[..., None, :] * np.array([1, 3, 9, 27, 81], np.uint8)[:digits, None]
            parts.append((shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(n, k // elements, -1))
        q, scales = np.concatenate(parts, axis=-1).reshape(n, k), _halves(b, 52)
    else:
        q, scales = _fields(b[..., :64].reshape(n, -1, 2, 32), 2, 4).reshape(n, k), _halves(b, 64)
    if type == "1 bit":
        return Planes(q >> ONE, 2 * scales)
    return Planes(np.array([0, 1, 3], np.uint8)[q], scales)  # -1, 0 and 1 as the half sum of two signs


def pack(f: Format, p: Planes) -> U8:
    """Return what the kernels read, in slices of K, panels of columns and blocks of K (bench/papers/lut_gemv.cpp)."""
    n, k = p.bits.shape
    blocks, groups = k // f.block, n // COLUMNS // f.panels
    shape = (n // COLUMNS, 2, 16, k // 8)  # panel, half, word, pair of groups
    vectors: list[U8] = []  # each (panel, pair, 32)
    for first in range(0, f.planes, 2):
        bytes = np.empty((*shape, 2), np.uint8)  # of one plane or two
        for i in range(2):
            bits = (p.bits >> (first + i) & 1).reshape(n, k // 8, 2, 4)
            nibbles = np.packbits(np.pad(bits, ((0, 0), (0, 0), (0, 0), (0, 4))), axis=-1, bitorder="little")[..., 0]
            bytes[..., i] = (nibbles[..., 0] | nibbles[..., 1] << 4).reshape(shape)[:, :, WORDS]
        if first + 1 == f.planes:  # a single one: its halves in place of planes
            vectors.append(bytes[..., 0].transpose(0, 3, 2, 1).reshape(-1, k // 8, COLUMNS))
        else:
            vectors += [bytes[:, h].transpose(0, 2, 1, 3).reshape(-1, k // 8, COLUMNS) for h in range(2)]
    quants = np.stack(vectors, axis=2).reshape(groups, f.panels, blocks, f.block // 32, 4, -1)
    chunks = quants.transpose(0, 2, 3, 4, 1, 5).reshape(groups, blocks, f.block // 32, -1)
    if p.integers is not None:
        integers = p.integers.reshape(groups, f.panels, COLUMNS, blocks, -1, 2).transpose(0, 3, 4, 1, 2, 5)
        chunks = np.concatenate([chunks, integers.reshape(*chunks.shape[:3], -1)], axis=3)
    parts = [chunks.reshape(groups, blocks, -1)]
    for halves in (p.scales, p.minima):
        if halves is not None:
            of_block = halves.astype(np.float16).reshape(groups, f.panels * COLUMNS, blocks).transpose(0, 2, 1)
            parts.append(np.ascontiguousarray(of_block).view(np.uint8))
    packed = np.concatenate(parts, axis=2)
    step = SLICE // f.block
    return np.concatenate([packed[:, at : at + step].reshape(-1) for at in range(0, blocks, step)])


def spread(f: Format, p: Planes, x: F32) -> F32:
    """Return the standard deviation of products (M, N) that rounding tables to bytes makes: of every entry evenly
    within half a unit, as of what sums begin with."""
    m, k = x.shape
    scales, minima = p.factors()
    fours = np.abs(x).reshape(m, k // f.block, f.block // 4, 4).sum(axis=3).max(axis=2)
    unit = np.repeat(fours / 127, f.block // 16, axis=1) ** 2  # of each 16 k
    entries = 4 * sum(v * v for v in f.values) / 12
    start = min(1.0, 16 / f.sub) / 12 if f.offset else 0.0
    least = unit @ (minima.T**2) / 12 * (16 / 128**2 + 1 / 64**2)
    return np.asarray(np.sqrt(unit / 4 @ scales.T**2 * (entries + start) + least), np.float32)

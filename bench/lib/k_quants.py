"""Floats to types of 64 to 256 k by rounding to nearest, for random models: gguf's code only reads most of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gguf
import gguf.quants
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Q

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

BLOCK = 256


def _half(x: F32) -> tuple[F32, U8]:
    """Values rounded to FP16, and their bytes (n, 2)."""
    half = x.astype("<f2")
    return half.astype(np.float32), half.view(np.uint8).reshape(-1, 2)


def _whole(x: F32, by: F32, low: int, high: int) -> npt.NDArray[Any]:
    """x / by as integers in [low, high]; 0 where `by` is 0."""
    ratio = np.divide(x, by, out=np.zeros_like(x), where=by != 0)
    return np.clip(np.rint(ratio), low, high).astype(np.int32)


def _with_minima(x: F32, bits: int) -> U8:
    """Q4_K and Q5_K: a scale and a minimum for each 32, six bits each."""
    n, most = len(x), (1 << bits) - 1
    sub = x.reshape(n, 8, 32)
    least = np.minimum(sub.min(axis=2), 0)
    step = (sub.max(axis=2) - least) / np.float32(most)
    d, d_bytes = _half(step.max(axis=1) / np.float32(63))
    dmin, dmin_bytes = _half((-least).max(axis=1) / np.float32(63))
    s = _whole(step, np.broadcast_to(d[:, None], step.shape), 0, 63)
    m = _whole(-least, np.broadcast_to(dmin[:, None], step.shape), 0, 63)
    by = np.broadcast_to((d[:, None] * s)[..., None], sub.shape)
    q = _whole(sub + (dmin[:, None] * m)[..., None], by, 0, most).astype(np.uint8)
    scales = np.concatenate(
        [
            s[:, :4] | s[:, 4:] >> 4 << 6,
            m[:, :4] | m[:, 4:] >> 4 << 6,
            (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4,
        ],
        axis=1,
    ).astype(np.uint8)
    pairs = q.reshape(n, 4, 2, 32)
    low = (pairs[:, :, 0] & 15) | (pairs[:, :, 1] & 15) << 4
    parts = [d_bytes, dmin_bytes, scales]
    if bits == 5:
        high = (q >> 4) << np.arange(8, dtype=np.uint8)[:, None]
        parts.append(np.bitwise_or.reduce(high, axis=1).astype(np.uint8))
    return np.concatenate([*parts, low.reshape(n, 128)], axis=1)


def _six_bits(x: F32) -> U8:
    """Q6_K: a signed 8-bit scale for each 16."""
    n = len(x)
    sub = x.reshape(n, 16, 16)
    at = np.abs(sub).argmax(axis=2)[..., None]
    step = np.take_along_axis(sub, at, axis=2)[..., 0] / np.float32(-32)
    d, d_bytes = _half(np.abs(step).max(axis=1) / np.float32(127))
    s = _whole(step, np.broadcast_to(d[:, None], step.shape), -128, 127)
    by = np.broadcast_to((d[:, None] * s)[..., None], sub.shape)
    q = (_whole(sub, by, -32, 31) + 32).astype(np.uint8).reshape(n, 2, 4, 32)
    low = (q[:, :, :2] & 15) | (q[:, :, 2:] & 15) << 4
    high = q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6
    parts = [low.reshape(n, 128), high.reshape(n, 64), s.astype(np.int8).view(np.uint8), d_bytes]
    return np.concatenate(parts, axis=1)


def _pairs(q: U8) -> U8:
    """Two bits of each of 256, (n, 256), as ggml has them: those of 128, 32 apart, in 32 bytes."""
    parts = (q & 3).reshape(-1, 2, 4, 32) << (2 * np.arange(4, dtype=np.uint8)[:, None])
    return np.asarray(np.bitwise_or.reduce(parts, axis=2).reshape(-1, 64))


def _two_bits(x: F32) -> U8:
    """Q2_K: a scale and a minimum for each 16, four bits each."""
    n = len(x)
    sub = x.reshape(n, 16, 16)
    least = np.minimum(sub.min(axis=2), 0)
    step = (sub.max(axis=2) - least) / np.float32(3)
    d, d_bytes = _half(step.max(axis=1) / np.float32(15))
    dmin, dmin_bytes = _half((-least).max(axis=1) / np.float32(15))
    s = _whole(step, np.broadcast_to(d[:, None], step.shape), 0, 15)
    m = _whole(-least, np.broadcast_to(dmin[:, None], step.shape), 0, 15)
    by = np.broadcast_to((d[:, None] * s)[..., None], sub.shape)
    q = _whole(sub + (dmin[:, None] * m)[..., None], by, 0, 3).astype(np.uint8)
    return np.concatenate([(s | m << 4).astype(np.uint8), _pairs(q), d_bytes, dmin_bytes], axis=1)


def _three_bits(x: F32) -> U8:
    """Q3_K: a signed scale of six bits for each 16."""
    n = len(x)
    sub = x.reshape(n, 16, 16)
    at = np.abs(sub).argmax(axis=2)[..., None]
    step = np.take_along_axis(sub, at, axis=2)[..., 0] / np.float32(-4)
    d, d_bytes = _half(np.abs(step).max(axis=1) / np.float32(31))
    s = _whole(step, np.broadcast_to(d[:, None], step.shape), -32, 31)
    by = np.broadcast_to((d[:, None] * s)[..., None], sub.shape)
    q = (_whole(sub, by, -4, 3) + 4).astype(np.uint8).reshape(n, 256)
    ones = (q >> 2).reshape(n, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    scales = (s + 32).astype(np.uint8)
    top = (scales >> 4).reshape(n, 4, 4) << (2 * np.arange(4, dtype=np.uint8)[:, None])
    low = (scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4
    parts = [np.bitwise_or.reduce(ones, axis=1), _pairs(q), low, np.bitwise_or.reduce(top, axis=1), d_bytes]
    return np.concatenate(parts, axis=1)


def _code_book(x: F32) -> U8:
    """IQ4_XS: a signed scale of six bits for each 32, and IQ4_NL's values."""
    n = len(x)
    book = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    sub = x.reshape(n, 8, 32)
    at = np.abs(sub).argmax(axis=2)[..., None]
    step = np.take_along_axis(sub, at, axis=2)[..., 0] / book[0]
    d, d_bytes = _half(np.abs(step).max(axis=1) / np.float32(31))
    s = _whole(step, np.broadcast_to(d[:, None], step.shape), -32, 31)
    by = np.broadcast_to((d[:, None] * s)[..., None], sub.shape)
    ratio = np.divide(sub, by, out=np.zeros_like(sub), where=by != 0)
    q = np.searchsorted((book[1:] + book[:-1]) / 2, ratio).astype(np.uint8)
    scales = (s + 32).astype(np.uint8)
    top = (scales >> 4).reshape(n, 2, 4) << (2 * np.arange(4, dtype=np.uint8))
    low = (scales[:, 0::2] & 15) | (scales[:, 1::2] & 15) << 4
    quants = (q[:, :, :16] | q[:, :, 16:] << 4).reshape(n, 128)
    return np.concatenate([d_bytes, np.bitwise_or.reduce(top, axis=2), low, quants], axis=1)


def _ternary(x: F32) -> F32:
    """-d, 0 or d, with each block's variance: gguf's own quantizer, after the largest magnitude, makes nearly all 0."""
    rms = np.sqrt(np.square(x).mean(axis=1, keepdims=True))
    t = np.sign(x) * (np.abs(x) > np.float32(0.6) * rms)
    full = np.maximum(np.abs(t).mean(axis=1, keepdims=True), np.float32(1 / BLOCK))
    return np.asarray(t * (rms / np.sqrt(full)), np.float32)


def _grid_points(x: F32, qtype: Q) -> U8:
    """IQ1 to IQ3: any bits, with the block's variance. Nothing here looks for the nearest point of a grid."""
    seed = int(np.abs(x).sum(dtype=np.float64) * 1e6)
    made = np.random.default_rng(seed).integers(0, 256, (len(x), gguf.GGML_QUANT_SIZES[qtype][1])).astype(np.uint8)
    place = [(48 + 2 * i + 1, 4 * i) for i in range(4)] if qtype is Q.IQ1_M else []

    def set_d(d: F32) -> None:
        half, both = _half(d)
        for at, shift in place:  # four bits of d above twelve of scales
            made[:, at] = (made[:, at] & 15) | ((half.astype("<f2").view("<u2") >> shift & 15) << 4).astype(np.uint8)
        if not place:
            made[:, :2] = both

    set_d(np.ones(len(x), np.float32))
    rms = np.sqrt(np.square(gguf.quants.dequantize(made, qtype)).mean(axis=1))
    set_d(np.sqrt(np.square(x).mean(axis=1)) / rms)
    return made


def _signs(x: F32) -> U8:
    """Q1_0: a sign each, times the mean magnitude of 128."""
    b = x.reshape(-1, 128)
    return np.concatenate([_half(np.abs(b).mean(axis=1))[1], np.packbits(b >= 0, axis=1, bitorder="little")], axis=1)


def _four_bit_floats(x: F32) -> U8:
    """NVFP4: the largest of 16 is 6 times a scale of 8 bits."""
    b, of = x.reshape(-1, 4, 16), gguf.quants.NVFP4
    codes = of.fp32_to_ue4m3(np.abs(b).max(axis=2) / 6)
    d = np.maximum(of.ue4m3_to_fp32(codes), np.float32(1e-9))[..., None]
    values = np.array(of.kvalues[:8], np.float32)
    q = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(b) / d) | (b < 0) << 3
    return np.concatenate([codes, (q[..., :8] | q[..., 8:] << 4).reshape(-1, 32)], axis=1).astype(np.uint8)


GRID_TYPES = (Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS, Q.IQ3_S, Q.IQ1_S, Q.IQ1_M)
_MAKERS: dict[Q, Callable[[F32], U8]] = {
    Q.Q2_K: _two_bits,
    Q.Q3_K: _three_bits,
    Q.Q4_K: lambda x: _with_minima(x, 4),
    Q.Q5_K: lambda x: _with_minima(x, 5),
    Q.Q6_K: _six_bits,
    Q.IQ4_XS: _code_book,
    Q.Q1_0: _signs,
    Q.NVFP4: _four_bit_floats,
    Q.TQ1_0: lambda x: gguf.quants.quantize(_ternary(x), Q.TQ1_0),
    Q.TQ2_0: lambda x: gguf.quants.quantize(_ternary(x), Q.TQ2_0),
    **{q: partial(_grid_points, qtype=q) for q in GRID_TYPES},
}
TYPES = tuple(_MAKERS)


def quantize(x: F32, qtype: Q) -> U8:
    """Float32 values, whole blocks of 256, to the bytes of `qtype` in file order."""
    made = _MAKERS[qtype](x.reshape(-1, BLOCK))
    assert made.shape[1] == gguf.GGML_QUANT_SIZES[qtype][1]
    return made.reshape(-1)

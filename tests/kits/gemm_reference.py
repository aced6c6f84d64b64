"""MUL_MAT by hand: random weights of every type, their values from the bytes, and the int8 numerics, all in numpy.

Nothing here calls the code under test, except :class:`Device`, which runs one MUL_MAT through ``libtilebeam_npu.so``.
Weights have K inputs and N outputs: ggml's ``ne = [K, N]``, numpy's shape ``(N, K)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import npu_ops
import numpy as np
import numpy.typing as npt
from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type
from tilebeam.native import executor as _npu

Array = npt.NDArray[Any]

IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
FLAG_FP16 = 1
FLOATS = (Type.F32, Type.F16, Type.BF16)
BLOCKS = (Type.Q4_0, Type.Q8_0, Type.IQ4_NL)
COLUMN = (Type.Q4_0_COL, Type.Q8_0_COL, Type.IQ4_NL_COL)
TILE = (Type.Q4_0_TILE, Type.Q8_0_TILE, Type.IQ4_NL_TILE)
# Blocks without `tile` grouping and without the numerics of one scale per 256 k.
MORE_BLOCKS = (Type.Q5_0, Type.Q4_1, Type.Q5_1, Type.MXFP4, Type.Q1_0, Type.Q2_0, Type.NVFP4)
MORE_COLUMN = tuple(Type[f"{t.name}_COL"] for t in MORE_BLOCKS)


@dataclass
class Weights:
    """One weight matrix: ``data`` as the device gets it, ``values`` (N, K) in float64, and for quantized types the
    integers ``q`` and scales ``d``, both (N, K), and the minima ``least`` if there are any: q d + least."""

    type: Type
    k: int
    n: int
    data: Array
    values: Array
    q: Array | None = None
    d: Array | None = None
    least: Array | None = None


def _more_blocks(type: Type, k: int, n: int, rng: np.random.Generator) -> tuple[Array, Array, Array, Array | None]:
    """As :func:`_blocks`, and the minima."""
    nb = k // 32
    if type in (Type.Q1_0, Type.Q2_0):
        bits, block = (1, 128) if type == Type.Q1_0 else (2, 64)
        half, q = rng.uniform(-1, 1, (n, k // block, 1)).astype(np.float16), rng.integers(0, 1 << bits, (n, k))
        codes = (q.reshape(n, -1, 8 // bits) << np.arange(0, 8, bits)).sum(axis=2).reshape(n, k // block, -1)
        both = np.concatenate([half.view(np.uint8), codes.astype(np.uint8)], axis=2)
        return both, 2 * q - 1 if bits == 1 else q - 1, np.repeat(half[..., 0].astype(np.float64), block, axis=1), None
    if type == Type.NVFP4:
        codes, nibbles = rng.integers(0, 0x50, (n, k // 64, 4)), rng.integers(0, 16, (n, k // 64, 4, 2, 8))
        quants = (nibbles[..., 0, :] | nibbles[..., 1, :] << 4).reshape(n, k // 64, 32)
        d = np.where(codes < 8, codes, (8 + codes % 8) * 2.0 ** (codes // 8 - 1)) * 2.0**-10
        both = np.concatenate([codes, quants], axis=2).astype(np.uint8)
        return both, MXFP4_VALUES[nibbles].reshape(n, k), np.repeat(d.reshape(n, -1), 16, axis=1), None
    if type == Type.MXFP4:
        powers, nibbles = rng.integers(118, 128, (n, nb)), rng.integers(0, 16, (n, nb, 32))
        quants = nibbles[..., :16] | nibbles[..., 16:] << 4
        both = np.concatenate([powers[..., None], quants], axis=2).astype(np.uint8)
        return both, MXFP4_VALUES[nibbles].reshape(n, k), np.exp2(np.repeat(powers, 32, axis=1) - 128.0), None
    parts = [rng.uniform(-1, 1, (n, nb, 1)).astype(np.float16)]
    if type != Type.Q5_0:
        parts.append((8 * rng.uniform(-1, 1, (n, nb, 1))).astype(np.float16))
    d, *minima = (np.repeat(x[..., 0].astype(np.float64), 32, axis=1) for x in parts)
    q = rng.integers(0, 16 if type == Type.Q4_1 else 32, (n, nb, 32))
    low = q & 15
    data = [x.view(np.uint8) for x in parts]
    if type != Type.Q4_1:
        fifth = ((q >> 4).astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(axis=2).astype(np.uint32)
        data.append(fifth[..., None].view(np.uint8))
    data.append((low[..., :16] | low[..., 16:] << 4).astype(np.uint8))
    stored = np.ascontiguousarray(np.concatenate(data, axis=2))
    return stored, q.reshape(n, k) - (16 if type == Type.Q5_0 else 0), d, minima[0] if minima else None


def _blocks(type: Type, k: int, n: int, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Random blocks of a plain type as bytes (N, K/32, block), and their integers and scales (N, K)."""
    nb = k // 32
    scales = rng.uniform(-1, 1, (n, nb)).astype(np.float16)
    if type == Type.Q8_0:
        q = rng.integers(-128, 128, (n, nb, 32))
        quants = q.astype(np.int8).view(np.uint8)
    else:
        nibbles = rng.integers(0, 16, (n, nb, 32))
        quants = (nibbles[..., :16] | nibbles[..., 16:] << 4).astype(np.uint8)
        q = IQ4_NL_VALUES[nibbles] if type == Type.IQ4_NL else nibbles - 8
    data = np.concatenate([scales[..., None].view(np.uint8), quants], axis=2)
    d = np.repeat(scales.astype(np.float64), 32, axis=1)
    return np.ascontiguousarray(data), q.reshape(n, k), d


def _tile_group(type: Type, k: int, n: int, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """`tile`-grouped data of random weights, and their integers and scales (N, K), read by the formulas of layout.h."""
    spread = np.exp2(rng.integers(-3, 1, (n, k)))
    if type == Type.IQ4_NL_TILE:  # random quants and scales
        tiles = rng.integers(0, 256, ((n + 31) // 32, k // 32, ggml_ext.tile_bytes(type))).astype(np.uint8)
        scales = (rng.standard_normal((*tiles.shape[:2], 32)) / 64).astype(np.float16)
        tiles[..., -64:] = scales.view(np.uint8)
        data = tiles.reshape(-1)
    else:
        data = ggml_ext.quantize(type, (rng.standard_normal((n, k)) * spread).astype(np.float32))
    tile = data.reshape((n + 31) // 32, k // 32, -1)
    kk, nn = np.meshgrid(np.arange(k), np.arange(n), indexing="ij")
    local_k, local_n = kk % 32, nn % 32
    v, p = local_k // 2, local_k % 2
    if type == Type.Q8_0_TILE:
        byte = tile[nn // 32, kk // 32, 128 * (local_k // 4) + 4 * local_n + 2 * p + v % 2]
        q = byte.view(np.int8).astype(np.int64)
    else:
        byte = tile[nn // 32, kk // 32, 128 * (local_k // 8) + 4 * local_n + 2 * p + v % 2]
        nibble = np.where(v & 2, byte >> 4, byte & 15).astype(np.int64)
        q = IQ4_NL_VALUES[nibble] if type == Type.IQ4_NL_TILE else nibble - 8
    scales = np.ascontiguousarray(tile[:, :, -64:]).view(np.float16)
    d = scales[nn // 32, kk // 32, (v * 64 + 2 * local_n + p) // 32].astype(np.float64)
    return data, q.T, d.T


def float_product(w: Weights, x: Array, isa: str) -> tuple[Array, Array]:
    """Products of float weights with what a kernel set multiplies them with, and how far float32 sums may be from them.

    avx512bf16 and amx round the activations of six rows and more to BF16 beside weights of it.
    """
    if w.type == Type.BF16 and isa in ("avx512bf16", "amx") and len(x) >= 6:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        x = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    exact = x.astype(np.float64) @ w.values.T
    return exact, (np.abs(x).astype(np.float64) @ np.abs(w.values).T) * 2.0**-23 * (w.k + 2)


def make_weights(type: Type, k: int, n: int, rng: np.random.Generator) -> Weights:
    """Random weights of any type; k is rounded up to whole blocks."""
    block = int(ggml_ext.lib.tb_tile_k(type) or ggml_ext.lib.tb_type_block(type))
    k = -(-k // block) * block
    if type in FLOATS:
        values = rng.standard_normal((n, k)).astype(np.float32)
        if type == Type.F16:
            data: Array = values.astype(np.float16)
        elif type == Type.BF16:
            data = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            data = values
        exact = (data.astype(np.uint32) << 16).view(np.float32) if type == Type.BF16 else data
        return Weights(type, k, n, data, exact.astype(np.float64))
    if type in MORE_BLOCKS or type in MORE_COLUMN:
        tiled = type in MORE_COLUMN
        data, q, d, least = _more_blocks(ggml_ext.source_type(type) if tiled else type, k, n, rng)
        if tiled:
            data = ggml_ext.pack(type, data.reshape(-1), k, n)
        return Weights(type, k, n, data, q * d + (0 if least is None else least), q, d, least)
    if type in TILE:
        data, q, d = _tile_group(type, k, n, rng)
    else:
        plain = type if type in BLOCKS else ggml_ext.source_type(type)
        data, q, d = _blocks(plain, k, n, rng)
        if type in COLUMN:
            data = ggml_ext.pack(type, data.reshape(-1), k, n)
    return Weights(type, k, n, data, q * d, q, d)


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """int8 activations and their scales, both (M, K): absolute maximum per 32 k, ties to even."""
    blocks = x.astype(np.float32).reshape(x.shape[0], -1, 32)
    amax = np.abs(blocks).max(axis=2, keepdims=True)
    live = amax >= np.float32(2.0**-110)
    safe = np.where(live, amax, np.float32(1))
    q = np.where(live, np.rint(blocks * (np.float32(127) / safe)), 0)
    scale = np.where(live, amax / np.float32(127), 0)
    shape = (x.shape[0], x.shape[1])
    return q.reshape(shape).astype(np.int64), np.repeat(scale, 32, axis=2).reshape(shape).astype(np.float64)


def requantize(w: Weights) -> tuple[Array, Array]:
    """What `tile` grouping becomes on the way to the integer kernels: q and d (N, K), one d per column and 32 k."""
    assert w.q is not None
    assert w.d is not None
    n, k = w.q.shape
    full = (n + 31) // 32 * 32
    scale = np.zeros((full, k), np.float32)
    scale[:n] = w.d
    # one common scale per 16 columns and 32 k; rows past n hold zeros, which change no maximum
    blocks = np.abs(scale).reshape(full // 16, 16, k // 32, 32)
    smax = blocks.max(axis=(1, 3), keepdims=True)
    d = smax if w.type != Type.Q4_0_TILE else smax * np.float32(np.float32(8) / np.float32(127))
    d = np.broadcast_to(d, blocks.shape).reshape(full, k)[:n]
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d > 0)
    shift = 11 if w.type == Type.Q4_0_TILE else 14
    ratio = np.rint(w.d.astype(np.float32) * inverse * np.float32(1 << shift)).astype(np.int64)
    q = (w.q.astype(np.int64) * (1 << (15 - shift)) * ratio + (1 << 14)) >> 15
    return q, d.astype(np.float64)


def int8_product(w: Weights, x: Array) -> tuple[Array, Array]:
    """The int8 numerics in float64, and the sum of the magnitudes that float rounding acts on; both (M, N)."""
    q, d = requantize(w) if w.type in TILE else (w.q, w.d)
    assert q is not None
    assert d is not None
    a, s = quantize_rows(x)
    step = 16 if w.type in (Type.NVFP4, Type.NVFP4_COL) else 32  # k of a scale
    m, nb = x.shape[0], x.shape[1] // step
    dots = np.einsum("mbk,nbk->mnb", a.reshape(m, nb, step), q.reshape(w.n, nb, step))
    terms = dots * (s[:, None, ::step] * d[None, :, ::step])
    total, magnitude = terms.sum(axis=2), np.abs(terms).sum(axis=2)
    if w.least is not None:
        of_minima = (a.reshape(m, 1, nb, 32).sum(axis=3) * s[:, None, ::32]) * w.least[None, :, ::32]
        total, magnitude = total + of_minima.sum(axis=2), magnitude + np.abs(of_minima).sum(axis=2)
    return total, magnitude


def int8_error_bound(w: Weights, x: Array) -> Array:
    """How far the int8 numerics may be from exact arithmetic, (M, N): half a step of each rounded operand."""
    _, s = quantize_rows(x)
    bound = (s / 2) @ np.abs(w.values).T
    if w.type in TILE:
        _, d = requantize(w)
        # half a step, and what rounding the fixed-point ratio adds
        bound = bound + (np.abs(x.astype(np.float64)) + s / 2) @ (d * 0.51).T
    return bound * 1.001 + 1e-30


class Device:
    """One executor. ``mul_mat`` runs a single op on copies of its operands."""

    def __init__(self, isa: str, threads: int) -> None:
        self.ffi, self.lib = _npu.load()[0], npu_ops.library(isa)
        self.npu = npu_ops.executor(isa, threads)

    def _tensor(self, t: Any, buffer: int, type: Type, ne: Sequence[int], nb: Sequence[int]) -> None:
        t.buffer, t.type, t.offset = buffer, type, 0
        for i in range(4):
            t.ne[i], t.nb[i] = ne[i], nb[i]

    def mul_mat(
        self,
        weights: Array,
        w_type: Type,
        w_ne: Sequence[int],
        w_nb: Sequence[int],
        x: Array,
        *,
        dst_pad: int = 0,
        flags: int = 0,
        name: list[str] | None = None,
    ) -> Array:
        """``weights``: the bytes behind the descriptor. ``x``: F32 or F16, shape (b3, b2, M, K), any strides over an
        array that owns its memory. Result (b3, b2, M, N); rows of dst are ``dst_pad`` floats apart and must keep what
        they held there."""
        ffi = self.ffi
        root = x if x.base is None else x.base
        assert isinstance(root, np.ndarray)
        b3, b2, m, _ = x.shape
        n = w_ne[1]
        dst = np.full((b3, b2, m, n + dst_pad), -7777.0, np.float32)
        op = ffi.new("tb_op *")
        op.code, op.flags, op.n_src = self.lib_const("TB_OP_MUL_MAT"), flags, 2
        self._tensor(op.src[0], 0, w_type, w_ne, w_nb)
        x_type = Type.F16 if x.dtype == np.float16 else Type.F32
        self._tensor(op.src[1], 1, x_type, x.shape[::-1], x.strides[::-1])
        op.src[1].offset = x.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        self._tensor(op.dst, 2, Type.F32, (n, m, b2, b3), dst.strides[::-1])
        arrays = [np.ascontiguousarray(weights).reshape(-1).view(np.uint8), root, dst]
        # mapped memory is aligned as tiles want it
        aligned = []
        for a in arrays:
            raw = np.empty(a.nbytes + 128, np.uint8)
            start = -raw.__array_interface__["data"][0] % 128
            body = raw[start : start + a.nbytes]
            body[:] = np.frombuffer(a.tobytes(), np.uint8)
            aligned.append(body)
        if name is not None:
            name.append(ffi.string(self.lib.tb_npu_kernel_name(self.npu, op)).decode())
        for i, body in enumerate(aligned):
            status = self.lib.tb_npu_map(self.npu, i, ffi.cast("void *", ffi.from_buffer(body)), body.nbytes, i == 2)
            assert status == 0
        reply = ffi.new("tb_reply *")
        status = self.lib.tb_npu_run(self.npu, op, 1, reply)
        for i in range(3):
            assert self.lib.tb_npu_unmap(self.npu, i) == 0
        assert status == 0, ffi.string(reply.why).decode()
        result = aligned[2].view(np.float32).reshape(dst.shape)
        assert np.all(result[..., n:] == -7777.0)
        return result[..., :n]

    def lib_const(self, name: str) -> int:
        """Value of an enumerator of the C headers."""
        return int(getattr(ggml_ext.lib, name))

    def product(self, w: Weights, x: Array, *, flags: int = 0, name: list[str] | None = None) -> Array:
        """One matrix, ``x`` (M, K): (M, N)."""
        if not ggml_ext.is_tiled(w.type):
            row = w.data.nbytes // w.n
            nb = (int(ggml_ext.lib.tb_type_size(w.type)), row, row * w.n, row * w.n)
        else:
            nb = (1, 1, w.data.nbytes, w.data.nbytes)
        out = self.mul_mat(w.data, w.type, (w.k, w.n, 1, 1), nb, x[None, None], flags=flags, name=name)
        return out[0, 0]


def device(isa: str, threads: int) -> Device:
    """An executor, kept for later tests."""
    return Device(isa, threads)


def run_experts(
    stack: list[Weights], x: Array, ids: Array, isa: str, threads: int, *, pad: int = 0, flags: int = 0
) -> tuple[int, str, Array, Array]:
    """MUL_MAT_ID of experts `stack`, x F32 (T, a divisor of n_used, K) and ids I32 (T, n_used).

    Rows of x, ids and dst are `pad` numbers apart. Status, why, dst (T, n_used, N), and the whole arena but for dst
    before and after, one behind the other.
    """
    w = stack[0]
    data = [np.ascontiguousarray(e.data).reshape(-1).view(np.uint8) for e in stack]
    arena = npu_ops.Arena(1 << 22)
    size = data[0].nbytes
    room = arena.add(npu_ops.I32, (-(-size * len(stack) // 4),))  # at offset 0: tiles want multiples of 128
    arena.bytes[room.offset : room.offset + size * len(stack)] = np.concatenate(data)
    src = arena.add(npu_ops.F32, (w.k, x.shape[1], x.shape[0]), x, pad=(pad, 0, 0, 0))
    src_ids = arena.add(npu_ops.I32, (ids.shape[1], ids.shape[0]), ids, pad=(pad, 0, 0, 0))
    dst = arena.add(npu_ops.F32, (w.n, ids.shape[1], ids.shape[0]), pad=(pad, 1, 0, 0))
    op = npu_ops.make_op("MUL_MAT_ID", dst, [room, src, src_ids])
    op.flags = flags
    op.src[0].type, op.src[0].offset = int(w.type), room.offset
    op.src[0].ne = [w.k, w.n, len(stack), 1]
    if not ggml_ext.is_tiled(w.type):
        op.src[0].nb = [int(ggml_ext.lib.tb_type_size(w.type)), size // w.n, size, size * len(stack)]
    else:
        op.src[0].nb = [1, 1, size, size * len(stack)]
    why = ggml_ext.ffi.new("const char **")
    assert ggml_ext.lib.tb_op_check_shape(op, why) == 0, ggml_ext.ffi.string(why[0])
    before = arena.bytes.copy()
    status, text = npu_ops.try_run(arena, op, isa, threads)
    after = arena.bytes.copy()
    result = dst.array[0].copy()
    for memory in (before, after):
        np.ndarray(dst.array.shape, np.float32, memory.data, dst.offset, dst.array.strides)[...] = 0
    return status, text, result, np.stack([before, after])

"""Drives single ops of the executor from tests: tensors in one arena of bytes, any strides, any kernel set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import hexagon_kit
import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray
from op_codes import BF16, F16, F32, I32, I64, IQ4_NL, OPS, Q4_0, Q8_0, float_param
from tilebeam import _ext as ggml_ext
from tilebeam.native import executor as _npu

DTYPES = {F32: np.float32, F16: np.float16, BF16: np.uint16, I32: np.int32, I64: np.int64}
BLOCK_BYTES = {Q4_0: 18, Q8_0: 34, IQ4_NL: 18}

# Of BF16 weights alone avx512bf16 has kernels of its own: only tests of those run on it, too.
ISAS = [isa for isa in _npu.isas() if isa != "avx512bf16"]
THREADS = (1, 3)
HEXAGON = ("qemu-hvx", "qemu-portable")  # kernel sets of the Hexagon executor under its emulator

_absent = hexagon_kit.missing()
_hexagon = [pytest.param(isa, marks=pytest.mark.skipif(_absent is not None, reason=str(_absent))) for isa in HEXAGON]
# A test of an op runs on every kernel set of this machine and on Hexagon, where conftest.py gives it fewer examples. Of
# most ops there is no HVX version: the set "hvx" then has the portable one, and the portable set would say no more.
runs = pytest.mark.parametrize("isa", [*ISAS, _hexagon[0]])
runs_with_bf16 = pytest.mark.parametrize("isa", [*_npu.isas(), *_hexagon])
runs_with_hvx = pytest.mark.parametrize("isa", [*ISAS, *_hexagon])
# Not about an op: kernel sets against each other, their names, and numbers that Hexagon has tests of its own for.
runs_here = pytest.mark.parametrize("isa", ISAS)
threads = pytest.mark.parametrize("n_threads", THREADS)

# Drawn tensors: sizes, types, random generators' seeds, in which order elements or rows are stored, gaps behind each.
SHAPES = st.tuples(
    st.one_of(st.integers(1, 70), st.sampled_from([128, 1023, 1025, 2100])),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
)
FLOATS = st.sampled_from([F32, F16, BF16])
SEEDS = st.integers(0, 2**31)
ORDERS = st.permutations([0, 1, 2, 3])
ROW_ORDERS = st.permutations([1, 2, 3]).map(lambda o: [0, *o])
PADS = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.integers(0, 1))


def normal(rng: np.random.Generator, *ne: int) -> NDArray[np.float32]:
    """Random values of a tensor `ne` (fastest first)."""
    return rng.standard_normal(ne[::-1]).astype(np.float32)


def close(got: NDArray[Any], want: NDArray[Any]) -> None:
    """Assert equality up to float32's rounding of sums."""
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * max(1.0, float(np.abs(want).max(initial=0))))


def shape_status(name: str, dst: Tensor, sources: Sequence[Tensor | None], params: dict[int, int | float]) -> int:
    """What the op's rules say of these shapes: 0, or an enum tb_status."""
    return int(ggml_ext.lib.tb_op_check_shape(make_op(name, dst, sources, params), ggml_ext.ffi.NULL))


def to_bf16(x: NDArray[Any]) -> NDArray[np.uint16]:
    """Round float32 to bfloat16 bits, to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Widen bfloat16 bits to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def dequantize(kind: int, blocks: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Values of ggml blocks, `[..., bytes]` to `[..., elements]`, written from the format's description."""
    size = BLOCK_BYTES[kind]
    b = blocks.reshape(*blocks.shape[:-1], -1, size)
    scale = np.ascontiguousarray(b[..., :2]).view(np.float16).astype(np.float64)
    if kind == Q8_0:
        q = np.ascontiguousarray(b[..., 2:]).view(np.int8).astype(np.float64)
    else:
        nibbles = np.concatenate([b[..., 2:] & 15, b[..., 2:] >> 4], axis=-1)
        if kind == Q4_0:
            q = nibbles.astype(np.float64) - 8
        else:
            table = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
            q = np.array(table, np.float64)[nibbles]
    return (q * scale).reshape(*blocks.shape[:-1], -1)


def random_blocks(rng: np.random.Generator, kind: int, shape: Sequence[int]) -> NDArray[np.uint8]:
    """Random valid blocks for rows of `shape[-1]` elements."""
    n = shape[-1] // 32
    out = rng.integers(0, 256, (*shape[:-1], n, BLOCK_BYTES[kind]), dtype=np.uint8)
    scale = rng.uniform(-0.1, 0.1, (*shape[:-1], n, 1)).astype(np.float16)
    out[..., :2] = scale.view(np.uint8)
    return out.reshape(*shape[:-1], -1)


@dataclass
class Tensor:
    """A tensor in an arena. `array` is its numpy view, slowest dimension first; blocks are rows of bytes."""

    kind: int
    offset: int
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    array: NDArray[Any]

    def floats(self) -> NDArray[np.float64]:
        """Values as float64, `[ne3, ne2, ne1, ne0]`."""
        if self.kind == BF16:
            return from_bf16(self.array).astype(np.float64)
        if self.kind in BLOCK_BYTES:
            return dequantize(self.kind, np.ascontiguousarray(self.array))
        return self.array.astype(np.float64)


class Arena:
    """Memory that tensors are laid into. Whatever lies between them is 0xff: NaN to whoever reads it by mistake."""

    def __init__(self, size: int = 1 << 22) -> None:
        self._raw = np.full(size + 64, 0xFF, np.uint8)
        start = -self._raw.ctypes.data % 64
        self.bytes = self._raw[start : start + size]
        self._used = 0

    def add(
        self,
        kind: int,
        ne: Sequence[int],
        values: NDArray[Any] | None = None,
        order: Sequence[int] = (0, 1, 2, 3),
        pad: Sequence[int] = (0, 0, 0, 0),
    ) -> Tensor:
        """Lay out a tensor `ne` (fastest first): `order` lists dimensions from the innermost in memory outwards, and
        each dimension has room for `pad` more elements (of rows of blocks: whole rows only)."""
        full = tuple(ne) + (1,) * (4 - len(ne))
        block = kind in BLOCK_BYTES
        unit = BLOCK_BYTES[kind] if block else np.dtype(DTYPES[kind]).itemsize
        counts = (full[0] // 32, *full[1:]) if block else full
        nb = [0, 0, 0, 0]
        step = unit
        for d in order:
            nb[d] = step
            step *= counts[d] + pad[d]
        offset = -(-self._used // 64) * 64
        self._used = offset + step
        assert self._used <= self.bytes.size, "the arena is too small"
        shape = tuple(reversed(full))
        if block:
            array = np.ndarray(
                (*shape[:3], counts[0] * unit), np.uint8, self.bytes.data, offset, (nb[3], nb[2], nb[1], 1)
            )
        else:
            array = np.ndarray(shape, DTYPES[kind], self.bytes.data, offset, tuple(reversed(nb)))
        if values is not None:
            if kind == BF16 and values.dtype != np.uint16:
                values = to_bf16(values)
            array[...] = values.reshape(array.shape)
        return Tensor(kind, offset, (full[0], full[1], full[2], full[3]), (nb[0], nb[1], nb[2], nb[3]), array)


def make_op(
    name: str, dst: Tensor, sources: Iterable[Tensor | None], params: dict[int, int | float] | None = None
) -> Any:
    """A `tb_op`; float params are stored as float32 bits."""
    ffi, _ = _npu.load()
    op = ffi.new("tb_op *")
    op.code = OPS[name]

    def fill(target: Any, t: Tensor | None) -> None:
        target.buffer = 0 if t is not None else 0xFFFFFFFF
        if t is not None:
            target.type = t.kind
            target.offset = t.offset
            target.ne = list(t.ne)
            target.nb = list(t.nb)

    fill(op.dst, dst)
    listed = list(sources)
    op.n_src = len(listed)
    for i in range(ggml_ext.lib.TB_MAX_SRC):
        fill(op.src[i], listed[i] if i < len(listed) else None)
    for i, value in (params or {}).items():
        op.params[i] = float_param(value) if isinstance(value, float) else value
    op.name = name.encode()
    return op


def library(isa: str) -> Any:
    """The functions of npu_api.h for this kernel set: this process' library, or what stands in for it on Hexagon."""
    return hexagon_kit.remote() if isa in HEXAGON else _npu.load()[1]


def executor(isa: str, threads: int) -> Any:
    """An executor with this kernel set, kept for later tests."""
    return hexagon_kit.remote().tb_npu_create(threads, isa.encode()) if isa in HEXAGON else _created(isa, threads)


@cache
def _created(isa: str, threads: int) -> Any:
    npu = _npu.load()[1].tb_npu_create(threads, isa.encode())
    assert npu, f"no executor for {isa}"
    return npu


def try_run(arena: Arena, op: Any, isa: str, threads: int) -> tuple[int, str]:
    """Run one op; status and, on failure, why."""
    ffi, lib = _npu.load()[0], library(isa)
    npu = executor(isa, threads)
    base = ffi.cast("void *", arena.bytes.ctypes.data)
    assert lib.tb_npu_map(npu, 0, base, arena.bytes.size, 1) == 0
    reply = ffi.new("tb_reply *")
    try:
        status = lib.tb_npu_run(npu, op, 1, reply)
    finally:
        assert lib.tb_npu_unmap(npu, 0) == 0
    return status, ffi.string(reply.why).decode()


def run(arena: Arena, op: Any, dst: Tensor, isa: str, threads: int) -> NDArray[np.float64]:
    """Run one op that must succeed and must write nothing but `dst`; the values of dst."""
    why = _npu.load()[0].new("const char **")
    assert ggml_ext.lib.tb_op_check_shape(op, why) == 0, ggml_ext.ffi.string(why[0])
    before = arena.bytes.copy()
    status, text = try_run(arena, op, isa, threads)
    assert status == 0, text
    after = np.ndarray(dst.array.shape, dst.array.dtype, before.data, dst.offset, dst.array.strides)
    after[...] = dst.array
    assert np.array_equal(before, arena.bytes), "bytes outside dst changed"
    return dst.floats()


def alibi_slopes(max_bias: float, heads: int) -> NDArray[np.float64]:
    """ALiBi's slopes as its paper and ggml define them; ones without a bias."""
    if max_bias <= 0:
        return np.ones(heads)
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-max_bias * (h + 1) / power) for h in range(power)]
    rest = [2.0 ** (-max_bias / 2 * (2 * h + 1) / power) for h in range(heads - power)]
    return np.array(first + rest)


def nmse(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Squared error relative to the squared reference."""
    return float(np.sum((got - want) ** 2) / max(float(np.sum(want**2)), 1e-12))

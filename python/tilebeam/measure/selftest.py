"""Run every kernel set of this CPU on small random problems and compare with numpy: what `tilebeam doctor` relies on.

The reference is arithmetic on the dequantized weights (`tilebeam._ext.dequantize`) in float64. The limit is the one of
ggml's own backend tests: a normalized mean squared error of 5e-4. Whatever is wrong with a build (a miscompiled
kernel, a CPU that lies about its features) shows up as numbers that are far beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilebeam import _ext as ggml_ext
from tilebeam._ext import Type
from tilebeam.gguf.closing import Closing
from tilebeam.native import executor as _npu

Array = npt.NDArray[Any]

NMSE_LIMIT = 5e-4
_ALIGNMENT = 128
_FLOATS: dict[Type, Callable[[Array], Array]] = {
    Type.F32: lambda x: x,
    Type.F16: lambda x: x.astype(np.float16),
    Type.BF16: lambda x: (x.view(np.uint32) >> 16).astype(np.uint16),
}
_WEIGHTS = tuple(kind for kind in Type if kind.is_multiplied)


@dataclass(frozen=True)
class KernelResult:
    """One kernel set on one op.

    Attributes:
        isa: kernel set.
        op: what ran, e.g. "mul_mat q4_0_col, 4 rows".
        kernel: the kernel's name, None if the op has none of its own.
        nmse: squared error relative to the reference's squared norm.
        why: the executor's own words if it refused; then nmse is infinite.
    """

    isa: str
    op: str
    kernel: str | None
    nmse: float
    why: str = ""

    @property
    def ok(self) -> bool:
        """Return whether the error is within the limit."""
        return self.nmse <= NMSE_LIMIT


def _aligned(a: Array) -> Array:
    """Copy an array as bytes, aligned as tiles want it."""
    raw = np.empty(a.nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    body = raw[start : start + a.nbytes]
    body[:] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    return body


class _Executor(Closing):
    """One op at a time on copies of its operands."""

    def __init__(self, isa: str, threads: int) -> None:
        self._ffi, self._lib = _npu.load()
        self._npu = self._lib.tb_npu_create(threads, isa.encode())
        if self._npu == self._ffi.NULL:
            raise RuntimeError(f"the executor does not start with kernel set {isa}")

    def close(self) -> None:
        self._lib.tb_npu_free(self._npu)

    def run(
        self,
        code: int,
        sources: Sequence[tuple[Array, Type, Sequence[int], Sequence[int]]],
        result_shape: Sequence[int],
        params: Sequence[float] = (),
    ) -> tuple[Array | None, str | None, str]:
        """Run one op.

        Args:
            code: enum tb_op_code.
            sources: (data, type, ne, nb) of each operand, ggml's order of dimensions.
            result_shape: numpy shape, 4 numbers, of the float32 result.
            params: float32 parameters from index 0.

        Returns:
            The result, the kernel's name if it has one, and why there is no result.
        """
        ffi, lib = self._ffi, self._lib
        result = np.zeros(result_shape, np.float32)
        op = ffi.new("tb_op *")
        op.code, op.n_src = code, len(sources)
        words = np.zeros(16, np.int32)
        words[: len(params)] = np.asarray(params, np.float32).view(np.int32)
        op.params = words.tolist()
        for i, (_, kind, ne, nb) in enumerate(sources):
            _describe(op.src[i], i, kind, ne, nb)
        _describe(op.dst, len(sources), Type.F32, result.shape[::-1], result.strides[::-1])
        memory = [_aligned(data) for data, *_ in sources] + [_aligned(result)]
        reply = ffi.new("tb_reply *")
        try:
            for i, body in enumerate(memory):
                pointer = ffi.cast("void *", ffi.from_buffer(body))
                if lib.tb_npu_map(self._npu, i, pointer, body.nbytes, i == len(sources)) != 0:
                    return None, None, "a buffer cannot be mapped"
            name = lib.tb_npu_kernel_name(self._npu, op)
            kernel = ffi.string(name).decode() if name != ffi.NULL else None
            if lib.tb_npu_run(self._npu, op, 1, reply) != 0:
                return None, kernel, ffi.string(reply.why).decode("utf-8", "replace")
        finally:
            for i in range(len(memory)):
                lib.tb_npu_unmap(self._npu, i)
        return memory[-1].view(np.float32).reshape(result_shape), kernel, ""


def _describe(tensor: Any, buffer: int, kind: Type, ne: Sequence[int], nb: Sequence[int]) -> None:
    tensor.buffer, tensor.type, tensor.offset = buffer, int(kind), 0
    for i in range(4):
        tensor.ne[i], tensor.nb[i] = int(ne[i]), int(nb[i])


def _plain(a: Array) -> tuple[Array, Type, Sequence[int], Sequence[int]]:
    """Make an operand of a contiguous 4-dimensional float array."""
    kind = Type.F16 if a.dtype == np.float16 else Type.F32
    return a, kind, a.shape[::-1], a.strides[::-1]


def _nmse(got: Array | None, want: Array) -> float:
    """Return the error of a result; where there is none it is infinite."""
    if got is None:
        return float("inf")
    error = float(np.mean((got.astype(np.float64) - want) ** 2) / np.mean(want**2))
    return error if np.isfinite(error) else float("inf")


def _weights(kind: Type, k: int, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return random weights: their bytes, and their values [n, k]."""
    values = rng.standard_normal((n, k)).astype(np.float32)
    data: Array
    if kind in _FLOATS:
        data = _FLOATS[kind](values).reshape(-1).view(np.uint8)
    elif kind == ggml_ext.tile_type(plain := ggml_ext.source_type(kind) if ggml_ext.is_tiled(kind) else kind):
        data = ggml_ext.quantize(kind, values)
    else:
        # bytes below 0x3c: wherever a block has an FP16 scale, it is below 1
        data = rng.integers(0, 0x3C, n * ggml_ext.row_bytes(plain, k), np.uint8)
        if plain != kind:
            data = ggml_ext.pack(kind, data, k, n)
    return data, ggml_ext.dequantize(kind, data, k, n).reshape(n, k).astype(np.float64)


def _mul_mat(executor: _Executor, isa: str, rng: np.random.Generator) -> Iterator[KernelResult]:
    k, n = 256, 96
    for kind in _WEIGHTS:
        data, values = _weights(kind, k, n, rng)
        row = data.nbytes // n
        size = int(ggml_ext.lib.tb_type_size(kind))
        nb = (1, 1, data.nbytes, data.nbytes) if size == 0 else (size, row, data.nbytes, data.nbytes)
        for m in (1, 4, 17):
            x = rng.standard_normal((1, 1, m, k)).astype(np.float32)
            sources = [(data, kind, (k, n, 1, 1), nb), _plain(x)]
            got, kernel, why = executor.run(ggml_ext.lib.TB_OP_MUL_MAT, sources, (1, 1, m, n))
            error = _nmse(got, x @ values.T)
            yield KernelResult(isa, f"mul_mat {kind.label}, {m} row{'s' * (m > 1)}", kernel, error, why)


def _attention(executor: _Executor, isa: str, rng: np.random.Generator) -> Iterator[KernelResult]:
    rows, cells, heads, groups = 3, 256, 4, 2
    for size in (64, 128):
        q = rng.standard_normal((1, heads, rows, size)).astype(np.float32)
        k, v = (rng.standard_normal((1, groups, cells, size)).astype(np.float16) for _ in range(2))
        seen = np.arange(cells)[None, :] < (200 + 10 * np.arange(rows))[:, None]
        mask = np.where(seen, 0, -np.inf).astype(np.float16)[None, None]
        scale = size**-0.5
        sources = [_plain(a) for a in (q, k, v, mask)]
        shape = (1, rows, heads, size)
        got, kernel, why = executor.run(ggml_ext.lib.TB_OP_FLASH_ATTN, sources, shape, [scale, 0.0, 0.0])
        each_head = [np.repeat(a.astype(np.float64), heads // groups, axis=1) for a in (k, v)]
        scores = scale * np.einsum("bhrd,bhcd->bhrc", q, each_head[0]) + mask
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        error = _nmse(got, np.einsum("bhrc,bhcd->brhd", weights, each_head[1]))
        yield KernelResult(isa, f"flash_attn, head size {size}", kernel, error, why)


def _norm(executor: _Executor, isa: str, rng: np.random.Generator) -> Iterator[KernelResult]:
    x = rng.standard_normal((1, 1, 5, 320)).astype(np.float32)
    got, kernel, why = executor.run(ggml_ext.lib.TB_OP_RMS_NORM, [_plain(x)], x.shape, [1e-6])
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + 1e-6)
    yield KernelResult(isa, "rms_norm", kernel, _nmse(got, want), why)


def run() -> list[KernelResult]:
    """Test every kernel set that this CPU can run, best first.

    Raises:
        FileNotFoundError, OSError: the native library cannot be loaded.
    """
    results: list[KernelResult] = []
    for isa in _npu.isas():
        rng = np.random.default_rng(1)
        with _Executor(isa, threads=2) as executor:
            for test in (_mul_mat, _attention, _norm):
                results += test(executor, isa, rng)
    return results

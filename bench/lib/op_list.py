"""Ops on the NPU executor alone, without the channel and without ggml: buffers, tensors, a list of ops, run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tilebeam import _ext as ggml_ext
from tilebeam.native import executor as _npu


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """Uninitialized memory that starts on a page, as mapped tiles do."""
    raw = np.empty(size + 4096, np.uint8)
    return raw[-raw.ctypes.data % 4096 :][:size]


@dataclass(frozen=True)
class Tensor:
    """An operand: where it lies and how. `ne` fastest first, `nb` in bytes; both as ggml has them."""

    buffer: int
    type: int
    ne: tuple[int, ...]
    nb: tuple[int, ...]
    offset: int = 0


class NpuOps:
    """A list of ops over buffers of its own.

    Args:
        isa: kernel set; None for the best.
    """

    def __init__(self, threads: int, isa: str | None = None) -> None:
        self._ffi, self._lib = _npu.load()
        self._npu = self._lib.tb_npu_create(threads, self._ffi.NULL if isa is None else isa.encode())
        if self._npu == self._ffi.NULL:
            raise RuntimeError(f"no kernel set {isa}")
        self._memory: list[npt.NDArray[np.uint8]] = []
        self._pending: list[Any] = []
        self._ops: Any = None
        self._reply = self._ffi.new("tb_reply *")

    def buffer(self, contents: npt.NDArray[Any] | int, writable: bool = False) -> int:
        """Map a copy of an array, or that many bytes; returns the buffer's number."""
        size = contents if isinstance(contents, int) else contents.nbytes
        body = aligned(size)
        if not isinstance(contents, int):
            body[:] = np.ascontiguousarray(contents).reshape(-1).view(np.uint8)
        number = len(self._memory)
        pointer = self._ffi.cast("void *", body.ctypes.data)
        if self._lib.tb_npu_map(self._npu, number, pointer, body.nbytes, writable):
            raise RuntimeError("mapping failed")
        self._memory.append(body)
        return number

    def add(
        self,
        code: int,
        dst: Tensor,
        sources: Sequence[Tensor | None],
        params: Sequence[float | int] = (),
        flags: int = 0,
    ) -> None:
        """Append an op; float params are stored as float32 bits."""
        op = self._ffi.new("tb_op *")
        op.code, op.flags, op.n_src = code, flags, len(sources)
        self._fill(op.dst, dst)
        for i in range(len(op.src)):
            op.src[i].buffer = ggml_ext.lib.TB_NO_BUFFER
        for i, source in enumerate(sources):
            if source is not None:
                self._fill(op.src[i], source)
        for i, value in enumerate(params):
            op.params[i] = int(np.float32(value).view(np.int32)) if isinstance(value, float) else value
        self._pending.append(op)
        self._ops = None

    def _fill(self, t: Any, source: Tensor) -> None:
        t.buffer, t.type, t.offset = source.buffer, source.type, source.offset
        ne, nb = (*source.ne, 1, 1, 1)[:4], (*source.nb, *[source.nb[-1]] * 3)[:4]
        for i in range(4):
            t.ne[i], t.nb[i] = ne[i], nb[i]

    def _list(self) -> Any:
        if self._ops is None:
            self._ops = self._ffi.new("tb_op[]", len(self._pending))
            for i, op in enumerate(self._pending):
                self._ops[i] = op[0]
        return self._ops

    @property
    def kernel(self) -> str:
        name = self._lib.tb_npu_kernel_name(self._npu, self._list())
        return "" if name == self._ffi.NULL else str(self._ffi.string(name).decode())

    def run(self) -> None:
        if self._lib.tb_npu_run(self._npu, self._list(), len(self._pending), self._reply) != 0:
            raise RuntimeError(self._ffi.string(self._reply.why).decode())

    def contents(self, buffer: int, dtype: Any) -> npt.NDArray[Any]:
        return self._memory[buffer].view(dtype)

    def close(self) -> None:
        """End the executor's threads; the object cannot be used afterwards."""
        self._lib.tb_npu_free(self._npu)

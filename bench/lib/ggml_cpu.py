"""Ops on the stock CPU backend of the libggml that llama-cpp-python ships, through ctypes: the baseline.

Weights go to the CPU's repacking buffer type where it takes them (as llama.cpp itself does), else to the plain one.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from tilebeam._ext import Type

GGML_TYPES = {t.label: t.ggml for t in Type}
_F32 = 0
_PTR, _INT, _I64, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
_FLOAT = ctypes.c_float
_SILENT = ctypes.CFUNCTYPE(None, _INT, ctypes.c_char_p, _PTR)(lambda *_: None)


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", _SIZE), ("mem_buffer", _PTR), ("no_alloc", ctypes.c_bool)]


@cache
def _library() -> ctypes.CDLL:
    import llama_cpp  # noqa: F401  (maps libggml and its parts)

    lib = ctypes.CDLL("libggml.so.0")
    for name, result, arguments in (
        ("ggml_init", _PTR, [_InitParams]),
        ("ggml_free", None, [_PTR]),
        ("ggml_new_tensor_2d", _PTR, [_PTR, _INT, _I64, _I64]),
        ("ggml_new_tensor_4d", _PTR, [_PTR, _INT, _I64, _I64, _I64, _I64]),
        ("ggml_permute", _PTR, [_PTR, _PTR, _INT, _INT, _INT, _INT]),
        ("ggml_mul_mat", _PTR, [_PTR, _PTR, _PTR]),
        ("ggml_flash_attn_ext", _PTR, [_PTR, _PTR, _PTR, _PTR, _PTR, _FLOAT, _FLOAT, _FLOAT]),
        ("ggml_log_set", None, [_PTR, _PTR]),
        ("ggml_new_graph", _PTR, [_PTR]),
        ("ggml_build_forward_expand", None, [_PTR, _PTR]),
        ("ggml_backend_dev_by_type", _PTR, [_INT]),
        ("ggml_backend_dev_init", _PTR, [_PTR, ctypes.c_char_p]),
        ("ggml_backend_dev_backend_reg", _PTR, [_PTR]),
        ("ggml_backend_dev_buffer_type", _PTR, [_PTR]),
        ("ggml_backend_dev_supports_op", ctypes.c_bool, [_PTR, _PTR]),
        ("ggml_backend_reg_get_proc_address", _PTR, [_PTR, ctypes.c_char_p]),
        ("ggml_backend_alloc_ctx_tensors_from_buft", _PTR, [_PTR, _PTR]),
        ("ggml_backend_buffer_free", None, [_PTR]),
        ("ggml_backend_tensor_set", None, [_PTR, _PTR, _SIZE, _SIZE]),
        ("ggml_backend_tensor_get", None, [_PTR, _PTR, _SIZE, _SIZE]),
        ("ggml_backend_graph_compute", _INT, [_PTR, _PTR]),
        ("ggml_backend_free", None, [_PTR]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.ggml_log_set(ctypes.cast(_SILENT, _PTR), None)
    return lib


def _weight_buffer_types(device: int) -> list[int]:
    """Return the CPU's repacking buffer types, then its plain one."""
    lib = _library()
    reg = lib.ggml_backend_dev_backend_reg(device)
    address = lib.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_dev_get_extra_bufts")
    found: list[int] = []
    if address:
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(_PTR), _PTR)(address)(device)
        while extra and extra[len(found)]:
            found.append(extra[len(found)])
    return [*found, lib.ggml_backend_dev_buffer_type(device)]


class _CpuGraph:
    """A graph on the CPU backend: its own contexts and buffers, freed by `close`."""

    def __init__(self, threads: int) -> None:
        lib = self._lib = _library()
        self._device = lib.ggml_backend_dev_by_type(0)
        reg = lib.ggml_backend_dev_backend_reg(self._device)
        self._backend = lib.ggml_backend_dev_init(self._device, None)
        set_threads = lib.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, _PTR, _INT)(set_threads)(self._backend, threads)
        self._contexts: list[int] = []
        self._buffers: list[int] = []

    def _context(self) -> int:
        self._contexts.append(self._lib.ggml_init(_InitParams(1 << 20, None, True)))
        return self._contexts[-1]

    def _finish(self, context: int, outputs: list[int]) -> None:
        self._graph = self._lib.ggml_new_graph(context)
        for out in outputs:
            self._lib.ggml_build_forward_expand(self._graph, out)
        plain = self._lib.ggml_backend_dev_buffer_type(self._device)
        self._buffers.append(self._lib.ggml_backend_alloc_ctx_tensors_from_buft(context, plain))

    def _set(self, tensor: int, values: npt.NDArray[Any]) -> None:
        body = np.ascontiguousarray(values)
        self._lib.ggml_backend_tensor_set(tensor, body.ctypes.data, 0, body.nbytes)

    def _release(self) -> None:
        while self._buffers:
            self._lib.ggml_backend_buffer_free(self._buffers.pop())
        while self._contexts:
            self._lib.ggml_free(self._contexts.pop())

    def _read(self, tensor: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        out = np.empty(shape, np.float32)
        self._lib.ggml_backend_tensor_get(tensor, out.ctypes.data, 0, out.nbytes)
        return out

    def run(self) -> None:
        if self._lib.ggml_backend_graph_compute(self._backend, self._graph) != 0:
            raise RuntimeError("the CPU backend failed")

    def close(self) -> None:
        """Free everything; the object cannot be used afterwards."""
        self._release()
        self._lib.ggml_backend_free(self._backend)


class CpuMulMat(_CpuGraph):
    """``copies`` products of one shape in one graph, each with its own weights; one result per product.

    Args:
        type: q4_0, q8_0, iq4_nl, f16, bf16 or f32.
        weights: the bytes of one matrix, N rows of K elements.
        x: F32, shape (M, K).
        n: rows of the weight matrix.
        copies: how many times the product is computed per run, from separate copies of the weights.
        threads: of the backend.
    """

    def __init__(
        self, type: str, weights: npt.NDArray[np.uint8], x: npt.NDArray[np.float32], n: int, copies: int, threads: int
    ) -> None:
        super().__init__(threads)
        lib, (m, k) = self._lib, x.shape
        for buffer_type in _weight_buffer_types(self._device):
            held, context = self._context(), self._context()
            tensors = [lib.ggml_new_tensor_2d(held, GGML_TYPES[type], k, n) for _ in range(copies)]
            inputs = lib.ggml_new_tensor_2d(context, _F32, k, m)
            outputs = [lib.ggml_mul_mat(context, w, inputs) for w in tensors]
            self._buffers.append(lib.ggml_backend_alloc_ctx_tensors_from_buft(held, buffer_type))
            if lib.ggml_backend_dev_supports_op(self._device, outputs[0]):
                break
            self._release()
        self._finish(context, outputs)
        for w in tensors:
            self._set(w, weights)
        self._set(inputs, x)
        self._result, self._shape = outputs[0], (m, n)

    def result(self) -> npt.NDArray[np.float32]:
        """Return the first product, shape (M, N)."""
        return self._read(self._result, self._shape)


class CpuAttention(_CpuGraph):
    """FLASH_ATTN_EXT as llama.cpp builds it: K and V are permuted views of a cache with one row per cell.

    Args:
        type: f16 or q8_0, of K and V.
        q: F32, shape (H, n, D).
        k, v: bytes of the cache, shape (n_kv, Hkv, bytes of D elements).
        mask: F16, shape (n, n_kv).
        copies: how many times it is computed per run, each with K and V of its own, as a model's layers have.
    """

    def __init__(
        self,
        type: str,
        q: npt.NDArray[np.float32],
        k: npt.NDArray[np.uint8],
        v: npt.NDArray[np.uint8],
        mask: npt.NDArray[np.float16],
        scale: float,
        threads: int,
        copies: int = 1,
    ) -> None:
        super().__init__(threads)
        lib, (heads, n, dim), (n_kv, kv_heads, _) = self._lib, q.shape, k.shape
        context = self._context()
        inputs = [
            lib.ggml_new_tensor_4d(context, _F32, dim, n, heads, 1),
            lib.ggml_new_tensor_4d(context, GGML_TYPES["f16"], n_kv, n, 1, 1),
        ]
        outputs, caches = [], []
        for _ in range(copies):
            cache = [lib.ggml_new_tensor_4d(context, GGML_TYPES[type], dim, kv_heads, n_kv, 1) for _ in range(2)]
            views = [lib.ggml_permute(context, t, 0, 2, 1, 3) for t in cache]
            outputs.append(lib.ggml_flash_attn_ext(context, inputs[0], *views, inputs[1], scale, 0.0, 0.0))
            caches.append(cache)
        self._finish(context, outputs)
        self._set(inputs[0], q)
        self._set(inputs[1], mask)
        for cache in caches:
            self._set(cache[0], k)
            self._set(cache[1], v)
        self._result = outputs[0]
        self._shape = (n, heads, dim)

    def result(self) -> npt.NDArray[np.float32]:
        """Shape (n, H, D)."""
        return self._read(self._result, self._shape)

"""MUL_MAT on the stock CPU backend of the libggml that llama-cpp-python ships, through ctypes: the baseline.

Weights go to the CPU's repacking buffer type where it takes them (as llama.cpp itself does), else to the plain one.
"""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt

GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "iq4_nl": 20}
_F32 = 0
_PTR, _INT, _I64, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t


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
        ("ggml_mul_mat", _PTR, [_PTR, _PTR, _PTR]),
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
    return lib


def _weight_buffer_types(device: int) -> list[int]:
    """The CPU's repacking buffer types, then its plain one."""
    lib = _library()
    reg = lib.ggml_backend_dev_backend_reg(device)
    address = lib.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_dev_get_extra_bufts")
    found: list[int] = []
    if address:
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(_PTR), _PTR)(address)(device)
        while extra and extra[len(found)]:
            found.append(extra[len(found)])
    return [*found, lib.ggml_backend_dev_buffer_type(device)]


class CpuMulMat:
    """``copies`` products of one shape in one graph, each with its own weights; one result per product.

    Args:
        type: q4_0, q8_0, iq4_nl, f16 or f32.
        weights: the bytes of one matrix, N rows of K elements.
        x: F32, shape (M, K).
        n: rows of the weight matrix.
        copies: how many times the product is computed per run, from separate copies of the weights.
        threads: of the backend.
    """

    def __init__(
        self, type: str, weights: npt.NDArray[np.uint8], x: npt.NDArray[np.float32], n: int, copies: int, threads: int
    ) -> None:
        lib = self._lib = _library()
        device = lib.ggml_backend_dev_by_type(0)
        reg = lib.ggml_backend_dev_backend_reg(device)
        self._backend = lib.ggml_backend_dev_init(device, None)
        set_threads = lib.ggml_backend_reg_get_proc_address(reg, b"ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, _PTR, _INT)(set_threads)(self._backend, threads)
        for buffer_type in _weight_buffer_types(device):
            tensors, inputs, outputs = self._build(type, x.shape, n, copies, device, buffer_type)
            if lib.ggml_backend_dev_supports_op(device, outputs[0]):
                break
            self._release()
        for w in tensors:
            lib.ggml_backend_tensor_set(w, weights.ctypes.data, 0, weights.nbytes)
        lib.ggml_backend_tensor_set(inputs, x.ctypes.data, 0, x.nbytes)
        self._result, self._shape = outputs[0], (x.shape[0], n)

    def _build(
        self, type: str, shape: tuple[int, ...], n: int, copies: int, device: int, buffer_type: int
    ) -> tuple[list[int], int, list[int]]:
        lib = self._lib
        m, k = shape
        params = _InitParams(1 << 20, None, True)
        w_context, context = self._contexts = [lib.ggml_init(params), lib.ggml_init(params)]
        tensors = [lib.ggml_new_tensor_2d(w_context, GGML_TYPES[type], k, n) for _ in range(copies)]
        inputs = lib.ggml_new_tensor_2d(context, _F32, k, m)
        outputs = [lib.ggml_mul_mat(context, w, inputs) for w in tensors]
        self._graph = lib.ggml_new_graph(context)
        for out in outputs:
            lib.ggml_build_forward_expand(self._graph, out)
        plain = lib.ggml_backend_dev_buffer_type(device)
        self._buffers = [
            lib.ggml_backend_alloc_ctx_tensors_from_buft(context, plain),
            lib.ggml_backend_alloc_ctx_tensors_from_buft(w_context, buffer_type),
        ]
        return tensors, inputs, outputs

    def _release(self) -> None:
        for buffer in self._buffers:
            self._lib.ggml_backend_buffer_free(buffer)
        for context in self._contexts:
            self._lib.ggml_free(context)

    def run(self) -> None:
        """Compute all products once."""
        if self._lib.ggml_backend_graph_compute(self._backend, self._graph) != 0:
            raise RuntimeError("the CPU backend failed")

    def result(self) -> npt.NDArray[np.float32]:
        """The first product, shape (M, N)."""
        out = np.empty(self._shape, np.float32)
        self._lib.ggml_backend_tensor_get(self._result, out.ctypes.data, 0, out.nbytes)
        return out

    def close(self) -> None:
        """Free everything; the object cannot be used afterwards."""
        self._release()
        self._lib.ggml_backend_free(self._backend)

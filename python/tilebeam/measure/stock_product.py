"""One product on llama.cpp's CPU backend, for `tilebeam doctor`, in a process that may die of it.

GCC before 11.5, 12.4 and 13.3 drops most of the tiles' configuration from a ggml that it compiles for AMX
(_tile_loadconfig, amxtileintrin.h), and the first product of quantized weights ends with a segmentation fault.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from typing import Any

_PTR, _INT, _I64, _SIZE = c.c_void_p, c.c_int, c.c_int64, c.c_size_t
_Q4_0, _F32 = 2, 0  # enum ggml_type


class _InitParams(c.Structure):
    _fields_ = [("mem_size", _SIZE), ("mem_buffer", _PTR), ("no_alloc", c.c_bool)]


def main() -> None:
    """Multiply with weights of each of the backend's buffer types that repack them."""
    import llama_cpp  # noqa: F401  (maps libggml and its parts)

    lib = c.CDLL("libggml.so.0")

    def call(name: str, result: Any, types: Sequence[Any], *arguments: object) -> int:
        function = getattr(lib, name)
        function.restype, function.argtypes = result, types
        return function(*arguments)  # type: ignore[no-any-return]

    device = call("ggml_backend_dev_by_type", _PTR, [_INT], 0)
    backend = call("ggml_backend_dev_init", _PTR, [_PTR, c.c_char_p], device, None)
    plain = call("ggml_backend_dev_buffer_type", _PTR, [_PTR], device)
    reg = call("ggml_backend_dev_backend_reg", _PTR, [_PTR], device)
    name = b"ggml_backend_dev_get_extra_bufts"
    address = call("ggml_backend_reg_get_proc_address", _PTR, [_PTR, c.c_char_p], reg, name)
    extra = c.CFUNCTYPE(c.POINTER(_PTR), _PTR)(address)(device) if address else None
    i = 0
    while extra and extra[i]:
        matrices, others = (call("ggml_init", _PTR, [_InitParams], _InitParams(1 << 20, None, True)) for _ in range(2))
        new, new_types = "ggml_new_tensor_2d", [_PTR, _INT, _I64, _I64]
        w = call(new, _PTR, new_types, matrices, _Q4_0, 256, 32)
        x = call(new, _PTR, new_types, others, _F32, 256, 4)
        allocate = "ggml_backend_alloc_ctx_tensors_from_buft"
        call(allocate, _PTR, [_PTR, _PTR], matrices, extra[i])
        product = call("ggml_mul_mat", _PTR, [_PTR, _PTR, _PTR], others, w, x)
        if call("ggml_backend_dev_supports_op", c.c_bool, [_PTR, _PTR], device, product):
            call(allocate, _PTR, [_PTR, _PTR], others, plain)
            for tensor, size in ((w, 256 * 32 // 32 * 18), (x, 256 * 4 * 4)):
                call("ggml_backend_tensor_set", None, [_PTR, _PTR, _SIZE, _SIZE], tensor, bytes(size), 0, size)
            graph = call("ggml_new_graph", _PTR, [_PTR], others)
            call("ggml_build_forward_expand", None, [_PTR, _PTR], graph, product)
            call("ggml_backend_graph_compute", _INT, [_PTR, _PTR], backend, graph)
        i += 1
    print(f"{i} kinds of repacked weights")


if __name__ == "__main__":
    main()

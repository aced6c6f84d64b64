"""A little ggml from Python: tensors, buffers and graphs on the device, through the C API of the libggml in use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from cffi import FFI
from tilebeam._ext import Type, dequantize
from tilebeam.native.control import Control, control
from tilebeam.native.plugin import register

U8 = npt.NDArray[np.uint8]

# enum ggml_type
F32, F16, Q4_0, Q5_1, Q8_0, IQ4_NL, I32, MXFP4 = 0, 1, 2, 7, 8, 20, 26, 39
PLAIN = {Q4_0: Type.Q4_0, Q5_1: Type.Q5_1, Q8_0: Type.Q8_0, IQ4_NL: Type.IQ4_NL, MXFP4: Type.MXFP4}
BLOCK_BYTES = {Q4_0: 18, Q5_1: 24, Q8_0: 34, IQ4_NL: 18, MXFP4: 17}
SUCCESS, FAILED = 0, -1
GPU = 1

ffi = FFI()
ffi.cdef("""
struct ggml_tensor {
    int type; void * buffer; int64_t ne[4]; size_t nb[4]; int op; int32_t op_params[16]; int32_t flags;
    struct ggml_tensor * src[10]; struct ggml_tensor * view_src; size_t view_offs; void * data; char name[64];
    void * extra; char padding[8];
};
struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };
struct dev_props {
    const char * name; const char * description; size_t memory_free, memory_total; int type; const char * device_id;
    bool async, host_buffer, buffer_from_host_ptr, events, mmap_support;
};
void * ggml_init(struct ggml_init_params params);
void ggml_free(void * ctx);
struct ggml_tensor * ggml_new_tensor_4d(void * ctx, int type, int64_t a, int64_t b, int64_t c, int64_t d);
struct ggml_tensor * ggml_set_name(struct ggml_tensor * t, const char * name);
struct ggml_tensor * ggml_view_2d(void * ctx, struct ggml_tensor * a, int64_t ne0, int64_t ne1, size_t nb1, size_t at);
struct ggml_tensor * ggml_mul_mat(void * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
struct ggml_tensor * ggml_mul_mat_id(void * c, struct ggml_tensor * a, struct ggml_tensor * b, struct ggml_tensor * i);
struct ggml_tensor * ggml_get_rows(void * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
struct ggml_tensor * ggml_add(void * ctx, struct ggml_tensor * a, struct ggml_tensor * b);
struct ggml_tensor * ggml_sin(void * ctx, struct ggml_tensor * a);
struct ggml_tensor * ggml_rope_ext(void * ctx, struct ggml_tensor * a, struct ggml_tensor * b, struct ggml_tensor * c,
    int n_dims, int mode, int n_ctx, float base, float scale, float ext, float attn, float fast, float slow);
void * ggml_new_graph(void * ctx);
void ggml_build_forward_expand(void * graph, struct ggml_tensor * t);
size_t ggml_nbytes(const struct ggml_tensor * t);

void * ggml_backend_buft_alloc_buffer(void * buft, size_t size);
bool ggml_backend_buft_is_host(void * buft);
const char * ggml_backend_buft_name(void * buft);
size_t ggml_backend_buft_get_alloc_size(void * buft, const struct ggml_tensor * t);
void * ggml_backend_alloc_ctx_tensors_from_buft(void * ctx, void * buft);
void * ggml_backend_cpu_buffer_type(void);
int ggml_backend_tensor_alloc(void * buffer, struct ggml_tensor * t, void * addr);
void ggml_backend_buffer_free(void * buffer);
void ggml_backend_buffer_clear(void * buffer, uint8_t value);
void ggml_backend_buffer_set_usage(void * buffer, int usage);
void * ggml_backend_buffer_get_base(void * buffer);
void ggml_backend_tensor_set(struct ggml_tensor * t, const void * data, size_t offset, size_t size);
void ggml_backend_tensor_get(const struct ggml_tensor * t, void * data, size_t offset, size_t size);
void ggml_backend_tensor_memset(struct ggml_tensor * t, uint8_t value, size_t offset, size_t size);
void ggml_backend_tensor_copy(struct ggml_tensor * src, struct ggml_tensor * dst);
void * ggml_backend_dev_init(void * dev, const char * params);
void * ggml_backend_dev_buffer_type(void * dev);
void ggml_backend_dev_get_props(void * dev, struct dev_props * props);
bool ggml_backend_dev_supports_op(void * dev, const struct ggml_tensor * op);
bool ggml_backend_dev_supports_buft(void * dev, void * buft);
void * ggml_backend_dev_buffer_from_host_ptr(void * dev, void * ptr, size_t size, size_t max_tensor_size);
void ggml_backend_free(void * backend);
int ggml_backend_graph_compute(void * backend, void * graph);
""")
lib: Any = None


class Device:
    """HMX0 with its buffer types and the plugin's own functions."""

    def __init__(self) -> None:
        global lib
        registry = register()
        lib = ffi.dlopen("libggml.so.0")
        self.pointer = ffi.cast("void *", registry.devices()[0])
        self.control: Control = control()
        self.plain = lib.ggml_backend_dev_buffer_type(self.pointer)
        extra = ffi.cast("void **(*)(void *)", registry.address("ggml_backend_dev_get_extra_bufts"))(self.pointer)
        self.tiled = extra[0]
        assert extra[1] == ffi.NULL

    def props(self) -> Any:
        props = ffi.new("struct dev_props *")
        lib.ggml_backend_dev_get_props(self.pointer, props)
        return props

    def supports(self, op: Any) -> bool:
        return bool(lib.ggml_backend_dev_supports_op(self.pointer, op))


@cache
def device() -> Device:
    return Device()


class Context:
    """A ggml context, the buffers and backends made for it; frees all of them at the end of a with block."""

    def __init__(self, mem: int = 1 << 20) -> None:
        self.device = device()
        self.ctx = lib.ggml_init(ffi.new("struct ggml_init_params *", {"mem_size": mem, "no_alloc": True})[0])
        self.buffers: list[Any] = []
        self.backends: list[Any] = []

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: object) -> None:
        for backend in self.backends:
            lib.ggml_backend_free(backend)
        for buffer in self.buffers:
            lib.ggml_backend_buffer_free(buffer)
        lib.ggml_free(self.ctx)

    def tensor(self, kind: int, *ne: int, name: str = "") -> Any:
        shape = [*ne, 1, 1, 1][:4]
        t = lib.ggml_new_tensor_4d(self.ctx, kind, *shape)
        if name:
            lib.ggml_set_name(t, name.encode())
        return t

    def probe(self, t: Any, buft: Any) -> None:
        """Give `t` the empty buffer with which the model loader asks whether a weight may go into `buft`."""
        t.buffer = self.keep_buffer(lib.ggml_backend_buft_alloc_buffer(buft, 0))

    def keep_buffer(self, buffer: Any) -> Any:
        assert buffer != ffi.NULL
        self.buffers.append(buffer)
        return buffer

    def allocate(self, buft: Any) -> Any:
        """Allocate all tensors of the context that have no buffer yet."""
        return self.keep_buffer(lib.ggml_backend_alloc_ctx_tensors_from_buft(self.ctx, buft))

    def backend(self) -> Any:
        """The context's backend, made at the first call."""
        if not self.backends:
            self.backends.append(lib.ggml_backend_dev_init(self.device.pointer, ffi.NULL))
            assert self.backends[0] != ffi.NULL
        return self.backends[0]

    def compute(self, *outputs: Any) -> int:
        graph = lib.ggml_new_graph(self.ctx)
        for t in outputs:
            lib.ggml_build_forward_expand(graph, t)
        return int(lib.ggml_backend_graph_compute(self.backend(), graph))


def put(t: Any, data: npt.NDArray[Any], offset: int = 0) -> None:
    """Write the bytes of `data` at byte `offset` of the tensor."""
    raw = np.ascontiguousarray(data)
    lib.ggml_backend_tensor_set(t, ffi.from_buffer(raw), offset, raw.nbytes)


def get(t: Any, offset: int = 0, size: int | None = None) -> U8:
    """Read bytes of the tensor; all of them by default."""
    size = lib.ggml_nbytes(t) - offset if size is None else size
    out = np.empty(size, np.uint8)
    lib.ggml_backend_tensor_get(t, ffi.from_buffer(out), offset, size)
    return out


def floats(t: Any) -> npt.NDArray[np.float32]:
    """The tensor's values, in numpy's axis order."""
    return get(t).view(np.float32).reshape(list(t.ne)[::-1])


def blocks(rng: np.random.Generator, kind: int, shape: Sequence[int]) -> U8:
    """Random bytes of ggml blocks with scales of sane size. `shape` in ggml's order, as the tensor's."""
    n = int(np.prod(shape)) // 32
    size = BLOCK_BYTES[kind]
    out = rng.integers(0, 256, (n, size), dtype=np.uint8)
    if kind == MXFP4:
        out[:, 0] = rng.integers(118, 122, n)
        return out.reshape(-1)
    for at in (0, 2) if kind == Q5_1 else (0,):
        out[:, at : at + 2] = rng.uniform(0.001, 0.02, n).astype(np.float16).view(np.uint8).reshape(n, 2)
    return out.reshape(-1)


@contextmanager
def options(device: Device, **changes: Any) -> Iterator[None]:
    """Options of the NPU for a while."""
    before = device.control.options()
    device.control.configure(**changes)
    try:
        yield
    finally:
        device.control.configure(**{name: before[name] for name in changes})


def reference(kind: int, weights: npt.NDArray[np.uint8], k: int, n: int, x: npt.NDArray[np.float32]) -> Any:
    """The product of rows `x` [M, k] and blocks of a matrix [k, n], in float64: [M, n]."""
    return x.astype(np.float64) @ dequantize(PLAIN[kind], weights, k, n).astype(np.float64).T

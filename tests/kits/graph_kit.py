"""Graphs as ggml itself runs them, from Python: its allocator, which computes in place, its scheduler, which spreads a
graph over backends, and the stock CPU backend to compare with."""

from __future__ import annotations

from typing import Any

import ggml_kit as kit
from ggml_kit import ffi
from tilebeam.native.plugin import register

T = "struct ggml_tensor *"
ffi.cdef(f"""
void ggml_set_input({T} t);
void ggml_set_output({T} t);
void * ggml_new_graph_custom(void * ctx, size_t size, bool grads);

void * ggml_gallocr_new(void * buft);
bool ggml_gallocr_alloc_graph(void * allocator, void * graph);
void ggml_gallocr_free(void * allocator);
void * ggml_backend_cpu_init(void);
void ggml_backend_cpu_set_n_threads(void * backend, int n);

void * ggml_backend_sched_new(void ** backends, void ** bufts, int n, size_t graph_size, bool parallel, bool offload);
void ggml_backend_sched_free(void * sched);
bool ggml_backend_sched_alloc_graph(void * sched, void * graph);
int ggml_backend_sched_graph_compute(void * sched, void * graph);
void * ggml_backend_sched_get_tensor_backend(void * sched, {T} t);
int ggml_backend_sched_get_n_splits(void * sched);

{T} ggml_add_inplace(void * ctx, {T} a, {T} b);
{T} ggml_concat(void * ctx, {T} a, {T} b, int dim);
{T} ggml_cont(void * ctx, {T} a);
{T} ggml_cpy(void * ctx, {T} a, {T} b);
{T} ggml_l2_norm(void * ctx, {T} a, float eps);
{T} ggml_mul(void * ctx, {T} a, {T} b);
{T} ggml_norm(void * ctx, {T} a, float eps);
{T} ggml_norm_inplace(void * ctx, {T} a, float eps);
{T} ggml_permute(void * ctx, {T} a, int x, int y, int z, int w);
{T} ggml_repeat_4d(void * ctx, {T} a, int64_t n0, int64_t n1, int64_t n2, int64_t n3);
{T} ggml_reshape_3d(void * ctx, {T} a, int64_t n0, int64_t n1, int64_t n2);
{T} ggml_rms_norm(void * ctx, {T} a, float eps);
{T} ggml_rms_norm_inplace(void * ctx, {T} a, float eps);
{T} ggml_rope(void * ctx, {T} a, {T} b, int n_dims, int mode);
{T} ggml_rope_inplace(void * ctx, {T} a, {T} b, int n_dims, int mode);
{T} ggml_scale(void * ctx, {T} a, float s);
{T} ggml_scale_inplace(void * ctx, {T} a, float s);
{T} ggml_set_rows(void * ctx, {T} a, {T} b, {T} c);
{T} ggml_silu(void * ctx, {T} a);
{T} ggml_silu_inplace(void * ctx, {T} a);
{T} ggml_sqr(void * ctx, {T} a);
{T} ggml_sqrt(void * ctx, {T} a);
{T} ggml_soft_max_ext(void * ctx, {T} a, {T} mask, float scale, float max_bias);
{T} ggml_soft_max_inplace(void * ctx, {T} a);
{T} ggml_sub(void * ctx, {T} a, {T} b);
{T} ggml_swiglu_split(void * ctx, {T} a, {T} b);
{T} ggml_view_3d(void * ctx, {T} a, int64_t n0, int64_t n1, int64_t n2, size_t nb1, size_t nb2, size_t at);
{T} ggml_cast(void * ctx, {T} a, int type);
""")

WEIGHTS = 1  # enum ggml_backend_buffer_usage


def cpu_backend(n_threads: int = 1) -> Any:
    """A new stock CPU backend; the caller frees it."""
    kit.device()
    cpu = ffi.dlopen("libggml-cpu.so.0")
    backend = cpu.ggml_backend_cpu_init()
    cpu.ggml_backend_cpu_set_n_threads(backend, n_threads)
    return backend


def set_threads(backend: Any, n_threads: int) -> None:
    """Threads for the device's next graphs, as llama.cpp asks for them."""
    address = register().address("ggml_backend_set_n_threads")
    ffi.cast("void (*)(void *, int)", address)(backend, n_threads)


def last_error() -> str:
    """Why the device's last graph failed."""
    return kit.device().control.last_error()

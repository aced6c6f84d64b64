"""Ops that write into another tensor are claimed only where that tensor will be on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ggml_kit as kit
import numpy as np
import pytest
from ggml_kit import ffi

T = "struct ggml_tensor *"
ffi.cdef(f"""
void ggml_set_input({T} t);
void ggml_set_output({T} t);
void * ggml_backend_cpu_init(void);
void * ggml_backend_sched_new(void ** backends, void ** bufts, int n, size_t graph_size, bool parallel, bool offload);
void ggml_backend_sched_free(void * sched);
bool ggml_backend_sched_alloc_graph(void * sched, void * graph);
int ggml_backend_sched_graph_compute(void * sched, void * graph);
void * ggml_backend_sched_get_tensor_backend(void * sched, {T} t);
{T} ggml_add_inplace(void * ctx, {T} a, {T} b);
{T} ggml_cpy(void * ctx, {T} a, {T} b);
{T} ggml_repeat_4d(void * ctx, {T} a, int64_t n0, int64_t n1, int64_t n2, int64_t n3);
{T} ggml_reshape_3d(void * ctx, {T} a, int64_t n0, int64_t n1, int64_t n2);
{T} ggml_scale_inplace(void * ctx, {T} a, float s);
{T} ggml_set_rows(void * ctx, {T} a, {T} b, {T} c);
{T} ggml_view_3d(void * ctx, {T} a, int64_t n0, int64_t n1, int64_t n2, size_t nb1, size_t nb2, size_t at);
""")
WEIGHTS = 1  # enum ggml_backend_buffer_usage
SIZE = (32, 6)


@pytest.fixture
def ctx() -> Iterator[kit.Context]:
    with kit.Context() as context:
        yield context


def into(ctx: kit.Context, name: str, target: Any) -> Any:
    """An op that writes into `target`, F32 of SIZE."""
    lib = kit.lib
    if name == "scale":
        return lib.ggml_scale_inplace(ctx.ctx, target, 0.5)
    other = ctx.tensor(kit.F32, SIZE[0], 2)
    if name == "set_rows":
        # as model code has it: into a reshaped tensor
        wide = lib.ggml_reshape_3d(ctx.ctx, target, *SIZE, 1)
        return lib.ggml_set_rows(ctx.ctx, wide, other, ctx.tensor(kit.I32, 2))
    rows = lib.ggml_view_3d(ctx.ctx, target, SIZE[0], 2, 1, target.nb[1], target.nb[2], target.nb[1])
    return lib.ggml_cpy(ctx.ctx, other, rows) if name == "cpy" else lib.ggml_add_inplace(ctx.ctx, rows, other)


writers = pytest.mark.parametrize("writer", ["scale", "set_rows", "cpy", "add"])


@writers
@pytest.mark.parametrize("place", ["computed", "not computed", "on the device", "on the CPU", "input", "by a weight"])
def test_into_what_is_on_the_device_only(ctx: kit.Context, writer: str, place: str) -> None:
    """Not into what it cannot compute, nor into an input of the graph or what is computed beside a weight of the CPU:
    the scheduler puts those on the CPU."""
    target = ctx.tensor(kit.F32, *SIZE)
    if place == "computed":
        target = kit.lib.ggml_add(ctx.ctx, target, target)
    elif place == "not computed":
        target = kit.lib.ggml_sin(ctx.ctx, target)
        assert not ctx.device.supports(target)
    elif place == "input":
        kit.lib.ggml_set_input(target)
    elif place == "by a weight":
        table = ctx.tensor(kit.F32, SIZE[0], 50)
        kit.lib.ggml_backend_buffer_set_usage(ctx.allocate(kit.lib.ggml_backend_cpu_buffer_type()), WEIGHTS)
        target = kit.lib.ggml_get_rows(ctx.ctx, table, ctx.tensor(kit.I32, SIZE[1]))
    else:
        ctx.allocate(ctx.device.plain if place == "on the device" else kit.lib.ggml_backend_cpu_buffer_type())
    assert ctx.device.supports(into(ctx, writer, target)) == (place in ("computed", "on the device"))


@pytest.mark.parametrize("foreign", [True, False], ids=["cpu", "device"])
def test_the_scheduler_keeps_destination_and_writer_together(ctx: kit.Context, foreign: bool) -> None:
    """A weight on the device draws ops there; rows are set in a tensor that the CPU, or the device, computes."""
    lib = kit.lib
    rng = np.random.default_rng(4)
    weight = ctx.tensor(kit.F32, 32, 32)
    lib.ggml_backend_buffer_set_usage(ctx.allocate(ctx.device.plain), WEIGHTS)
    inputs = [ctx.tensor(kit.F32, 32, 6), ctx.tensor(kit.F32, 32, 2), ctx.tensor(kit.I32, 2)]
    base, rows, index = inputs
    for t in inputs:
        lib.ggml_set_input(t)
    first = lib.ggml_mul_mat(ctx.ctx, weight, rows)
    small = lib.ggml_view_2d(ctx.ctx, base, 32, 2, base.nb[1], 0)
    target = lib.ggml_sin(ctx.ctx, base) if foreign else lib.ggml_repeat_4d(ctx.ctx, small, 32, 6, 1, 1)
    wide = lib.ggml_reshape_3d(ctx.ctx, target, 32, 6, 1)
    written = lib.ggml_set_rows(ctx.ctx, wide, first, index)
    out = lib.ggml_mul_mat(ctx.ctx, weight, written)
    lib.ggml_set_output(out)
    graph = lib.ggml_new_graph(ctx.ctx)
    lib.ggml_build_forward_expand(graph, out)

    cpu = ffi.dlopen("libggml-cpu.so.0").ggml_backend_cpu_init()
    ctx.backends += [lib.ggml_backend_dev_init(ctx.device.pointer, ffi.NULL), cpu]
    sched = lib.ggml_backend_sched_new(ffi.new("void *[]", ctx.backends), ffi.NULL, 2, 64, False, True)
    try:
        assert lib.ggml_backend_sched_alloc_graph(sched, graph)
        w, b, r = (rng.standard_normal(shape).astype(np.float32) for shape in [(32, 32), (6, 32), (2, 32)])
        for t, values in [(weight, w), (base, b), (rows, r), (index, np.array([4, 1], np.int32))]:
            kit.put(t, values)
        assert lib.ggml_backend_sched_graph_compute(sched, graph) == kit.SUCCESS, ctx.device.control.last_error()
        # The products run on the device either way.
        assert lib.ggml_backend_sched_get_tensor_backend(sched, out) == ctx.backends[0]
        on_cpu = lib.ggml_backend_sched_get_tensor_backend(sched, written) == cpu
        assert on_cpu == foreign
        got = kit.floats(out)[0, 0]
    finally:
        lib.ggml_backend_sched_free(sched)
    want = np.sin(b) if foreign else np.tile(b[:2], (3, 1))
    want[[4, 1]] = r @ w.T
    np.testing.assert_allclose(got, want @ w.T, rtol=1e-4, atol=1e-3)

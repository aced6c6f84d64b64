"""The plugin as ggml sees it: registration, buffers as bytes, placement rules, failures."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ggml_kit as kit
import llama_cpp
import numpy as np
import pytest
from ggml_kit import F16, F32, FAILED, I32, PLAIN, Q4_0, Q8_0, SUCCESS, Context, Device, ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam import TilebeamError
from tilebeam._ext import Type, column_type, dequantize, pack
from tilebeam.native import paths as _paths
from tilebeam.native.executor import usable_memory

from bench.lib import synth

KINDS = st.sampled_from(sorted(PLAIN))


def column(kind: int) -> Type:
    found = column_type(PLAIN[kind])
    assert found is not None
    return found


@pytest.fixture(scope="module")
def device() -> Device:
    return kit.device()


# ---- registration


def test_device_properties(device: Device) -> None:
    device.control.configure(executor="thread", memory_limit=0)  # whatever a model loaded before has left
    props = device.props()
    assert ffi.string(props.name) == b"HMX0"
    assert ffi.string(props.description).startswith(b"Tilebeam NPU (")
    assert props.type == kit.GPU
    total = usable_memory().total
    assert props.memory_total == total
    assert 0 < props.memory_free <= total
    assert not any(getattr(props, name) for name in ("async", "host_buffer", "events"))
    assert props.buffer_from_host_ptr
    assert props.mmap_support == hasattr(llama_cpp, "LLAMA_LOAD_MODE_MMAP")  # a device says so since 0.3.35


def test_buffer_types_are_not_host_memory(device: Device) -> None:
    for buft, name in ((device.plain, b"HMX0"), (device.tiled, b"HMX0_TILED")):
        assert ffi.string(kit.lib.ggml_backend_buft_name(buft)) == name
        assert not kit.lib.ggml_backend_buft_is_host(buft)
        assert kit.lib.ggml_backend_dev_supports_buft(device.pointer, buft)
    assert not kit.lib.ggml_backend_dev_supports_buft(device.pointer, kit.lib.ggml_backend_cpu_buffer_type())


def plugin_check(version: str | None, commit: str | None) -> str:
    library = ctypes.CDLL(str(_paths.native("libggml-tilebeam.so")))
    library.tilebeam_check_ggml.restype = ctypes.c_char_p
    library.tilebeam_check_ggml.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    encoded = [text.encode() if text is not None else None for text in (version, commit)]
    return str(library.tilebeam_check_ggml(*encoded).decode())


def test_only_the_ggml_it_was_built_for(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEBEAM_ALLOW_UNKNOWN_COMMIT", raising=False)
    status = device.control.status()
    version, commit = status["ggml_version"], status["ggml_commit"]
    assert plugin_check(None, None) == ""
    for good in (commit, commit[:7], commit[:12], commit[:7] + "-dirty"):
        assert plugin_check(version, good) == ""
    flipped = ("1" if commit[0] != "1" else "2") + commit[1:]
    for bad in (flipped, flipped[:7], flipped[:7] + "-dirty"):
        assert "commit " + bad in plugin_check(version, bad)
    assert version in plugin_check("9.9.9", commit)
    assert "9.9.9" in plugin_check("9.9.9", commit)
    for unknown in ("unknown", "", commit[:6], "not-a-commit"):
        text = plugin_check(version, unknown)
        assert "install git" in text
        assert "reinstall" in text
    monkeypatch.setenv("TILEBEAM_ALLOW_UNKNOWN_COMMIT", "1")
    assert plugin_check(version, "unknown") == ""
    assert plugin_check(version, flipped) != ""
    assert plugin_check("9.9.9", "unknown") != ""


def test_a_plugin_for_another_commit_does_not_load(device: Device, tmp_path: Path) -> None:
    """The real plugin with one digit of its built-in commit changed, as if it came from another build."""
    commit = device.control.status()["ggml_commit"].encode()
    other = (b"1" if commit[:1] != b"1" else b"2") + commit[1:]
    image = _paths.native("libggml-tilebeam.so").read_bytes()
    assert image.count(commit + b"\0") == 1
    copy = tmp_path / "libggml-tilebeam.so"
    copy.write_bytes(image.replace(commit + b"\0", other + b"\0"))
    code = (
        "import ctypes, sys, llama_cpp; lib = ctypes.CDLL('libggml.so.0');"
        "lib.ggml_backend_load.restype = ctypes.c_void_p; lib.ggml_backend_load.argtypes = [ctypes.c_char_p];"
        "print('pointer', lib.ggml_backend_load(sys.argv[1].encode()), llama_cpp.llama_supports_gpu_offload())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(copy)], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.split() == ["pointer", "None", "False"]
    assert f"Tilebeam was built for ggml {device.control.status()['ggml_version']}" in done.stderr


# ---- tiled buffers are bytes


@settings(max_examples=25, deadline=None)
@given(KINDS, st.integers(1, 3), st.integers(1, 70), st.integers(1, 2), st.integers(1, 2), st.data())
def test_any_byte_range_of_a_tiled_tensor(kind: int, kt: int, n: int, n2: int, n3: int, data: st.DataObject) -> None:
    shape = (32 * kt, n, n2, n3)
    with Context() as c:
        t = c.tensor(kind, *shape)
        buffer = c.allocate(c.device.tiled)
        kit.lib.ggml_backend_buffer_clear(buffer, 0)
        size = kit.lib.ggml_nbytes(t)
        want = kit.get(t).copy()
        assert np.unique(want).size == 1
        rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
        for _ in range(data.draw(st.integers(1, 8))):
            offset = data.draw(st.integers(0, size - 1))
            length = data.draw(st.integers(1, size - offset))
            piece = rng.integers(0, 256, length, dtype=np.uint8)
            kit.put(t, piece, offset)
            want[offset : offset + length] = piece
        assert np.array_equal(kit.get(t), want)
        offset = data.draw(st.integers(0, size - 1))
        length = data.draw(st.integers(1, size - offset))
        assert np.array_equal(kit.get(t, offset, length), want[offset : offset + length])
        # What lies in memory is the packer's own result, one padded matrix after the other.
        tiles = np.concatenate([pack(column(kind), m, 32 * kt, n) for m in want.reshape(n2 * n3, -1)])
        assert kit.lib.ggml_backend_buft_get_alloc_size(c.device.tiled, t) == tiles.size
        raw = np.frombuffer(ffi.buffer(ffi.cast("uint8_t *", t.data), tiles.size), np.uint8)
        assert np.array_equal(raw, tiles)


def test_a_large_tensor_is_packed_by_several_threads() -> None:
    rng = np.random.default_rng(3)
    with Context() as c:
        t = c.tensor(Q4_0, 2048, 12001)
        c.allocate(c.device.tiled)
        data = kit.blocks(rng, Q4_0, (2048, 12001))
        kit.put(t, data)
        assert np.array_equal(kit.get(t), data)
        # Rows seen through a view are the same bytes.
        row = 2048 // 32 * 18
        view = kit.lib.ggml_view_2d(c.ctx, t, 2048, 5, row, 33 * row)
        view.buffer, view.data = t.buffer, ffi.cast("uint8_t *", t.data) + view.view_offs
        assert np.array_equal(kit.get(view), data[33 * row : 38 * row])


@pytest.mark.parametrize("kind", [F32, F16])
def test_floats_in_a_tiled_buffer_stay_as_they_are(device: Device, kind: int) -> None:
    """llama.cpp puts the matrices of a LoRA adapter into the buffer type of the weight that they belong to."""
    rng = np.random.default_rng(8)
    k, n, rank, m = 64, 96, 5, 7
    real: Any = {F32: np.float32, F16: np.float16}[kind]
    weights, x = kit.blocks(rng, Q4_0, (k, n)), rng.standard_normal((m, k)).astype(np.float32)
    a, b = (rng.standard_normal(shape).astype(real) for shape in ((rank, k), (n, rank)))
    with Context() as cw, Context() as c:
        w, ta, tb = cw.tensor(Q4_0, k, n), cw.tensor(kind, k, rank), cw.tensor(kind, rank, n)
        cw.allocate(device.tiled)
        before = device.control.status()["tiled_tensors"]
        for t, data in ((w, weights), (ta, a), (tb, b)):
            kit.put(t, data)
        assert np.array_equal(kit.get(ta).view(real).reshape(rank, k), a)
        kit.lib.ggml_backend_tensor_memset(tb, 0, 6, 20)
        b.reshape(-1).view(np.uint8)[6:26] = 0
        assert np.array_equal(kit.get(tb).view(real).reshape(n, rank), b)
        kit.put(tb, b[3:5], 3 * rank * b.itemsize)
        y = c.tensor(F32, k, m)
        low = kit.lib.ggml_mul_mat(c.ctx, ta, y)
        high, base = kit.lib.ggml_mul_mat(c.ctx, tb, low), kit.lib.ggml_mul_mat(c.ctx, w, y)
        out = kit.lib.ggml_add(c.ctx, base, high)
        assert all(device.supports(op) for op in (low, high, base, out))
        c.allocate(device.plain)
        kit.put(y, x)
        assert c.compute(out) == SUCCESS
        assert np.array_equal(kit.get(w), weights)
        got, plain = kit.floats(out)[0, 0], kit.floats(base)[0, 0]
        assert device.control.status()["tiled_tensors"] == before
    want = x.astype(np.float64) @ a.astype(np.float64).T @ b.astype(np.float64).T
    assert np.abs(got - plain - want).max() < 0.02 * np.abs(want).max()


@pytest.mark.parametrize("target", ["plain", "tiled"])
def test_copies_between_host_and_device(device: Device, target: str) -> None:
    rng = np.random.default_rng(4)
    data = kit.blocks(rng, Q8_0, (96, 40))
    with Context() as host, Context() as far, Context() as back:
        h, f, b = host.tensor(Q8_0, 96, 40), far.tensor(Q8_0, 96, 40), back.tensor(Q8_0, 96, 40)
        host.allocate(kit.lib.ggml_backend_cpu_buffer_type())
        far.allocate(getattr(device, target))
        back.allocate(device.plain)
        kit.put(h, data)
        kit.lib.ggml_backend_tensor_copy(h, f)
        kit.lib.ggml_backend_tensor_copy(f, b)
        assert np.array_equal(kit.get(f), data)
        assert np.array_equal(kit.get(b), data)


# ---- placement: the loader's questions


def test_where_weights_may_go(device: Device) -> None:
    with Context() as c:

        def matmul(kind: int, k: int, n: int, buft: Any, ne2: int = 1) -> bool:
            w = c.tensor(kind, k, n, ne2)
            c.probe(w, buft)
            return device.supports(kit.lib.ggml_mul_mat(c.ctx, w, c.tensor(F32, k, 512, ne2)))

        for kind in PLAIN:
            assert matmul(kind, 64, 100, device.tiled)
            assert matmul(kind, 64, 96, device.tiled, 3)
            assert not matmul(kind, 64, 100, device.plain)
        for kind in (F32, F16):
            assert matmul(kind, 64, 100, device.plain)
            assert not matmul(kind, 64, 100, device.tiled)

        def add(buft: Any) -> bool:
            w = c.tensor(F32, 64)
            c.probe(w, buft)
            return device.supports(kit.lib.ggml_add(c.ctx, c.tensor(F32, 64), w))

        assert add(device.plain)
        assert not add(device.tiled)

        w = c.tensor(F32, 32)
        c.probe(w, device.plain)
        x, positions = c.tensor(F32, 64, 4, 512), c.tensor(I32, 512)
        assert device.supports(kit.lib.ggml_rope_ext(c.ctx, x, positions, w, *[0] * 9))

        w = c.tensor(Q4_0, 64, 100)
        c.probe(w, device.tiled)
        assert not device.supports(kit.lib.ggml_get_rows(c.ctx, w, c.tensor(I32, 512)))

        experts = c.tensor(Q4_0, 64, 32, 4)
        x, ids = c.tensor(F32, 64, 2, 512), c.tensor(I32, 2, 512)
        for buft, wanted in ((device.tiled, True), (device.plain, False)):
            c.probe(experts, buft)
            assert device.supports(kit.lib.ggml_mul_mat_id(c.ctx, experts, x, ids)) == wanted
        assert not device.supports(kit.lib.ggml_sin(c.ctx, c.tensor(F32, 64)))


def test_a_view_of_a_tiled_tensor_is_not_for_the_device(device: Device) -> None:
    with Context() as c:
        w = c.tensor(Q4_0, 64, 96)
        c.allocate(device.tiled)
        view = kit.lib.ggml_view_2d(c.ctx, w, 64, 32, 36, 32 * 36)
        x = c.tensor(F32, 64, 4)
        assert device.supports(kit.lib.ggml_mul_mat(c.ctx, w, x))
        assert not device.supports(kit.lib.ggml_mul_mat(c.ctx, view, x))


# ---- computing


@settings(max_examples=12, deadline=None)
@given(KINDS, st.integers(1, 4), st.integers(1, 80), st.integers(1, 20), st.integers(0, 1 << 30))
def test_tiled_and_plain_weights_give_the_same_numbers(kind: int, kt: int, n: int, m: int, seed: int) -> None:
    rng, k = np.random.default_rng(seed), 32 * kt
    weights = kit.blocks(rng, kind, (k, n))
    x = rng.standard_normal((m, k)).astype(np.float32)
    results = []
    for buft in (kit.device().tiled, kit.device().plain):
        with Context() as cw, Context() as c:
            w = cw.tensor(kind, k, n)
            cw.allocate(buft)
            kit.put(w, weights)
            b = c.tensor(F32, k, m)
            y = kit.lib.ggml_mul_mat(c.ctx, w, b)
            c.allocate(c.device.plain)
            kit.put(b, x)
            assert c.compute(y) == SUCCESS
            results.append(kit.floats(y)[0, 0])
    assert np.array_equal(results[0], results[1])
    want = kit.reference(kind, weights, k, n, x)
    # int8 activations: half a step of amax/127 per element, against weights of at most 128 * 0.02.
    scale = np.abs(dequantize(PLAIN[kind], weights, k, n)).astype(np.float64).sum(1)
    assert (np.abs(results[0] - want) <= np.abs(x).max() / 127 * 0.51 * scale[None, :] + 1e-4).all()


def test_counters_and_status(device: Device) -> None:
    before = device.control.status()
    with Context() as cw, Context() as c:
        w = cw.tensor(Q4_0, 64, 64)
        cw.allocate(device.tiled)
        kit.put(w, kit.blocks(np.random.default_rng(0), Q4_0, (64, 64)))
        x = c.tensor(F32, 64, 2)
        y = kit.lib.ggml_mul_mat(c.ctx, w, x)
        z = kit.lib.ggml_add(c.ctx, y, y)
        c.allocate(device.plain)
        kit.put(x, np.ones((2, 64), np.float32))
        assert c.compute(z) == SUCCESS
        during = device.control.status()
        assert during["session"] == "alive"
        assert during["isa"]
        assert during["n_threads"] >= 1
        assert during["graphs"] == before["graphs"] + 1
        assert during["ops"] == before["ops"] + 2
        assert during["tiled_tensors"] == before["tiled_tensors"] + 1
        assert during["buffers"] == before["buffers"] + 2
        assert during["buffer_bytes"] >= before["buffer_bytes"] + 64 * 64 // 32 * 18
    after = device.control.status()
    for name in ("buffers", "buffer_bytes", "tiled_tensors", "failures"):
        assert after[name] == before[name]


def test_an_impossible_allocation_fails_with_a_reason(device: Device) -> None:
    kit.device()
    assert kit.lib.ggml_backend_buft_alloc_buffer(device.plain, 1 << 60) == ffi.NULL
    assert "cannot allocate" in device.control.last_error()


def test_wrong_options_change_nothing(device: Device) -> None:
    before = device.control.options()
    bad: list[dict[str, Any]] = [{"n_threads": -1}, {"n_threads": 10**6}, {"deadline_ms": 0}, {"isa": "sse9"}]
    bad += [{"numerics": "int4"}, {"softmax": "log2"}]
    for changes in bad:
        with pytest.raises(TilebeamError):
            device.control.configure(**changes)
    assert device.control.options() == before


# ---- whole graphs of stock llama-cpp-python


# ---- a dead NPU


def test_a_killed_npu_fails_the_graph_and_the_next_buffer_gets_a_new_one(device: Device) -> None:
    def graph(c: Context) -> Any:
        x = c.tensor(F32, 64, 2)
        y = kit.lib.ggml_add(c.ctx, x, x)
        c.allocate(device.plain)
        kit.put(x, np.ones((2, 64), np.float32))
        return y

    with kit.options(device, executor="process"):
        with Context() as c:
            y = graph(c)
            assert c.compute(y) == SUCCESS
            status = device.control.status()
            assert status["executor"] == "process"
            assert status["npu_pid"] != os.getpid()
            os.kill(status["npu_pid"], signal.SIGKILL)
            assert c.compute(y) == FAILED
            assert device.control.status()["session"] == "dead"
            assert device.control.last_error()
            assert c.compute(y) == FAILED
            with Context() as fresh:
                z = graph(fresh)
                assert fresh.compute(z) == SUCCESS
                assert (kit.floats(z) == 2).all()
                assert device.control.status()["sessions"] == status["sessions"] + 1
                assert c.compute(y) == FAILED
        with Context() as again:
            assert again.compute(graph(again)) == SUCCESS


def test_llama_with_two_thread_counts_keeps_its_threads(tmp_path: Path) -> None:
    """llama.cpp has a count for one token and one for more, which `llama_cpp.Llama` makes different by default."""
    kit.device()
    path = synth.write_model(tmp_path / "model.gguf", synth.preset("tiny", n_layer=1))

    def threads() -> set[str]:
        tasks = Path("/proc/self/task").iterdir()
        return {task.name for task in tasks if (task / "comm").read_text() == "tilebeam-npu\n"}

    llm = llama_cpp.Llama(str(path), n_gpu_layers=-1, n_ctx=256, n_threads=1, n_threads_batch=2, verbose=False)
    try:
        llm.eval([5, 6, 7])
        before = threads()
        for i in range(20):
            llm.eval([8 + i] * (1 + i % 2))
        assert threads() == before
    finally:
        llm.close()


# ---- graphs


def test_graphs_without_a_number_are_told_apart() -> None:
    """Two contexts with a callback for their graphs' parts: none has a number of ggml, all share the device's NPU."""
    lib = kit.lib
    with Context() as c:
        a, b, d, e = (c.tensor(F32, 4) for _ in range(4))
        sums = lib.ggml_add(c.ctx, a, b), lib.ggml_add(c.ctx, d, e)
        c.allocate(c.device.plain)
        c.backends += [lib.ggml_backend_dev_init(c.device.pointer, ffi.NULL) for _ in sums]
        graphs = [lib.ggml_new_graph(c.ctx) for _ in sums]
        for i, t in enumerate((a, b, d, e)):
            kit.put(t, np.full(4, i + 1, np.float32))
        for graph, out in zip(graphs, sums, strict=True):
            lib.ggml_build_forward_expand(graph, out)
        for first in (1, 100, 200):
            kit.put(a, np.full(4, first, np.float32))
            for backend, graph in zip(c.backends, graphs, strict=True):
                assert lib.ggml_backend_graph_compute(backend, graph) == SUCCESS
            assert [kit.floats(out)[0, 0, 0, 0] for out in sums] == [first + 2, 7]


def test_a_transposed_column_is_filled_in_place() -> None:
    """Its elements lie one behind the other, whatever stride a dimension of one element has."""
    ffi.cdef("""
    struct ggml_tensor * ggml_fill_inplace(void * ctx, struct ggml_tensor * a, float c);
    struct ggml_tensor * ggml_transpose(void * ctx, struct ggml_tensor * a);
    """)
    with Context() as c:
        x, beside = c.tensor(F32, 8, 1), c.tensor(F32, 64)
        filled = kit.lib.ggml_fill_inplace(c.ctx, kit.lib.ggml_transpose(c.ctx, x), 3.0)
        c.allocate(c.device.plain)
        for t in (x, beside):
            kit.lib.ggml_backend_tensor_memset(t, 0, 0, kit.lib.ggml_nbytes(t))
        assert c.device.supports(filled)
        assert c.compute(filled) == SUCCESS
        assert (kit.floats(x) == 3).all()
        assert not kit.floats(beside).any()

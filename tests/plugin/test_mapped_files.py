"""Mapped model files: tiles and plain tensors without a copy, whatever became of the file, and what is refused."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ggml_kit as kit
import numpy as np
import numpy.typing as npt
import process_kit
import pytest
from ggml_kit import F16, F32, FAILED, Q4_0, SUCCESS, Context, Device, ffi
from tilebeam import TilebeamError
from tilebeam._ext import Type, dequantize, pack, quantize, tiled_bytes
from tilebeam.native.control import AnnouncedTensor, LoadResult

from bench.lib import synth


@pytest.fixture(scope="module")
def device() -> Device:
    return kit.device()


class Mapped:
    """A file with one tiled and one plain matrix, mapped as llama.cpp maps a model."""

    K, N = 128, 96

    def __init__(self, path: Path, tiled: Type, blocks: npt.NDArray[np.uint8], tiles: npt.NDArray[np.uint8]) -> None:
        self.path, self.start = path, 4096 * 3 + 256
        self.blocks, self.tiled = blocks, tiled
        self.plain_at = self.start + tiles.size
        path.write_bytes(bytes(self.start) + tiles.tobytes() + blocks.tobytes() + bytes(100))
        self.file = path.open("rb")
        self.map = mmap.mmap(self.file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        self.view = ffi.from_buffer(self.map)
        self.base = ffi.cast("uint8_t *", self.view)

    def manifest(self, **changes: Any) -> list[AnnouncedTensor]:
        fields = {"name": "w", "type": int(self.tiled), "ne": (self.K, self.N, 1, 1), "offset": self.start}
        return [AnnouncedTensor(**{**fields, **changes})]

    def buffer(self, first: int | None = None, size: int | None = None) -> Any:
        first = self.start if first is None else first
        size = self.plain_at + self.blocks.size - first if size is None else size
        return kit.lib.ggml_backend_dev_buffer_from_host_ptr(kit.device().pointer, self.base + first, size, size)

    def close(self) -> None:
        ffi.release(self.view)
        self.map.close()
        self.file.close()


@pytest.fixture(params=["column", "tile"])
def mapped(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mapped]:
    blocks = kit.blocks(np.random.default_rng(5), Q4_0, (Mapped.K, Mapped.N))
    if request.param == "column":
        tiled = Type.Q4_0_COL
        tiles = pack(tiled, blocks, Mapped.K, Mapped.N)
    else:
        tiled = Type.Q4_0_TILE
        tiles = quantize(tiled, dequantize(Type.Q4_0, blocks, Mapped.K, Mapped.N))
    m = Mapped(tmp_path / "model.bin", tiled, blocks, tiles)
    yield m
    m.close()


@pytest.fixture(params=[0, 1 << 30], ids=["unlimited", "limited"])
def limited(request: pytest.FixtureRequest, device: Device) -> Iterator[None]:
    """With a limit, tensors are mapped one by one."""
    with kit.options(device, memory_limit=request.param):
        yield


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_mapped_tiles_compute_without_a_copy(device: Device, mapped: Mapped, executor: str) -> None:
    k, n = mapped.K, mapped.N
    x = np.random.default_rng(6).standard_normal((5, k)).astype(np.float32)
    with kit.options(device, executor=executor), Context() as cw, Context() as c:
        before = device.control.status()
        with device.control.announced(str(mapped.path), mapped.manifest()):
            probe = cw.tensor(Q4_0, k, n, name="w")
            cw.probe(probe, device.plain)
            assert device.supports(kit.lib.ggml_mul_mat(cw.ctx, probe, cw.tensor(F32, k, 512)))
            buffer = cw.keep_buffer(mapped.buffer())
            w, plain = cw.tensor(Q4_0, k, n, name="w"), cw.tensor(Q4_0, k, n, name="other")
            assert kit.lib.ggml_backend_tensor_alloc(buffer, w, mapped.base + mapped.start) == SUCCESS
            assert kit.lib.ggml_backend_tensor_alloc(buffer, plain, mapped.base + mapped.plain_at) == SUCCESS
            assert device.control.loaded() == LoadResult(1, 1, 0, "")
        during = device.control.status()
        assert during["executor"] == executor
        assert during["mapped_bytes"] == before["mapped_bytes"] + mapped.plain_at + mapped.blocks.size - mapped.start
        b = c.tensor(F32, k, 5)
        y, z = kit.lib.ggml_mul_mat(c.ctx, w, b), kit.lib.ggml_mul_mat(c.ctx, plain, b)
        c.allocate(device.plain)
        kit.put(b, x)
        assert c.compute(y, z) == SUCCESS
        want = kit.reference(Q4_0, mapped.blocks, k, n, x)
        assert np.abs(kit.floats(z)[0, 0] - want).max() < 0.02 * np.abs(want).max()
        if mapped.tiled == Type.Q4_0_COL:
            assert np.array_equal(kit.floats(y), kit.floats(z))
            assert np.array_equal(kit.get(w), mapped.blocks)
        else:
            assert np.abs(kit.floats(y)[0, 0] - want).max() < 0.25 * np.abs(want).max()
        assert np.array_equal(kit.get(plain), mapped.blocks)


def test_tiles_read_instead_of_mapped(device: Device, mapped: Mapped) -> None:
    """A load without mmap: the file's bytes come through set_tensor and are tiles already."""
    k, n = mapped.K, mapped.N
    tiles = np.frombuffer(mapped.map, np.uint8, tiled_bytes(mapped.tiled, k, n), mapped.start).copy()
    results = []
    for kind in ("read", "mapped"):
        with Context() as cw, Context() as c:
            w = cw.tensor(Q4_0, k, n, name="w")
            with device.control.announced(str(mapped.path), mapped.manifest()):
                if kind == "read":
                    cw.allocate(device.plain)
                    kit.put(w, tiles[:1000])
                    kit.put(w, tiles[1000:], 1000)
                else:
                    buffer = cw.keep_buffer(mapped.buffer())
                    kit.lib.ggml_backend_tensor_alloc(buffer, w, mapped.base + mapped.start)
                assert device.control.loaded() == LoadResult(1, 1, 0, "")
            b = c.tensor(F32, k, 3)
            y = kit.lib.ggml_mul_mat(c.ctx, w, b)
            c.allocate(device.plain)
            kit.put(b, np.random.default_rng(7).standard_normal((3, k)).astype(np.float32))
            assert c.compute(y) == SUCCESS
            results.append(kit.floats(y))
    assert np.array_equal(*results)


@pytest.mark.usefixtures("limited")
def test_mapping_fails_closed(device: Device, mapped: Mapped, tmp_path: Path) -> None:
    k, n = mapped.K, mapped.N
    control = device.control
    # Memory that is no file.
    memory = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = ffi.from_buffer(memory)
    pointer = ffi.cast("uint8_t *", view)
    assert kit.lib.ggml_backend_dev_buffer_from_host_ptr(device.pointer, pointer, 4096, 4096) == ffi.NULL
    assert "not a mapping of one file" in control.last_error()
    ffi.release(view)
    memory.close()
    # Another file than the announced one.
    other = tmp_path / "other.bin"
    other.write_bytes(mapped.path.read_bytes())
    with control.announced(str(other), mapped.manifest()):
        assert mapped.buffer() == ffi.NULL
        assert "announced" in control.last_error()
    # The announced tensor lies elsewhere, or has another shape: its graphs fail.
    for changes, shape in (({"offset": mapped.start + 64}, (k, n)), ({}, (k, n // 2))):
        with Context() as cw, Context() as c, control.announced(str(mapped.path), mapped.manifest(**changes)):
            buffer = cw.keep_buffer(mapped.buffer())
            w = cw.tensor(Q4_0, *shape, name="w")
            assert kit.lib.ggml_backend_tensor_alloc(buffer, w, mapped.base + mapped.start) != SUCCESS
            made = control.loaded()
            assert (made.announced_tensors, made.bad_buffers) == (0, 1)
            assert "not what was announced" in made.reason
            y = kit.lib.ggml_mul_mat(c.ctx, w, c.tensor(F32, k, 2))
            c.allocate(device.plain)
            assert c.compute(y) == FAILED
            assert "not what was announced" in control.last_error()
    # Nonsense in the list itself.
    huge = 1 << 62
    for bad in (
        {"type": int(Type.Q4_0)},
        {"type": 99},
        {"ne": (k, n + 1, 1, 1)},
        {"ne": (k + 1, n, 1, 1)},
        {"ne": (k, huge, 1, 1)},
        {"ne": (k, n, 0, 1)},
        {"offset": huge},
        {"name": ""},
        {"name": "x" * 64},
    ):
        with pytest.raises(TilebeamError), control.announced(str(mapped.path), mapped.manifest(**bad)):
            pass
    with pytest.raises(TilebeamError), control.announced(str(mapped.path), mapped.manifest() * 2):
        pass
    with pytest.raises(TilebeamError), control.announced(str(tmp_path / "none"), []):
        pass


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("fate", ["deleted", "replaced", "no longer readable"])
def test_a_file_that_no_path_leads_to(device: Device, mapped: Mapped, fate: str, executor: str) -> None:
    """Between the loader's open and the mapping, the file may lose its name: the loader's descriptor leads to it."""
    if fate == "replaced":
        other = mapped.path.with_suffix(".new")
        other.write_bytes(bytes(mapped.path.stat().st_size))
        other.rename(mapped.path)
    else:
        mapped.path.unlink()
    if fate == "no longer readable":
        os.fchmod(mapped.file.fileno(), 0)
    with kit.options(device, executor=executor), Context() as cw, Context() as c:
        buffer = cw.keep_buffer(mapped.buffer())
        w = cw.tensor(Q4_0, mapped.K, mapped.N, name="w")
        kit.lib.ggml_backend_tensor_alloc(buffer, w, mapped.base + mapped.plain_at)
        x = c.tensor(F32, mapped.K, 2)
        y = kit.lib.ggml_mul_mat(c.ctx, w, x)
        c.allocate(device.plain)
        kit.put(x, np.ones((2, mapped.K), np.float32))
        assert c.compute(y) == SUCCESS
        want = dequantize(Type.Q4_0, mapped.blocks, mapped.K, mapped.N).sum(1)
        assert np.abs(kit.floats(y)[0, 0] - want).max() < 0.02 * np.abs(want).max()


def test_a_file_without_name_or_descriptor_is_refused(device: Device, mapped: Mapped) -> None:
    mapped.path.unlink()
    mapped.file.close()
    # Python's map keeps a descriptor of its own: find it, and make it lead elsewhere.
    deleted = [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]
    (own,) = [int(fd) for fd in deleted if os.readlink(f"/proc/self/fd/{fd}") == f"{mapped.path} (deleted)"]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, own, inheritable=False)
    os.close(null)
    assert mapped.buffer() == ffi.NULL
    assert "the program has no descriptor of it" in device.control.last_error()


NAMELESS = """
import ctypes, os, sys
import llama_cpp as lc, tilebeam
tilebeam.register()
libc = ctypes.CDLL(None)
libc.fdopen.restype, libc.tmpfile.restype, libc.fileno.argtypes = ctypes.c_void_p, ctypes.c_void_p, [ctypes.c_void_p]
data = open(sys.argv[1], "rb").read()
for kind in ("tmpfile", "memfd"):
    stream = ctypes.c_void_p(libc.tmpfile() if kind == "tmpfile" else libc.fdopen(os.memfd_create("model"), b"r+"))
    os.write(libc.fileno(stream), data)
    libc.rewind(stream)
    params = lc.llama_model_default_params()
    params.n_gpu_layers = 99
    model = lc.llama_model_load_from_file_ptr(stream, params)
    assert model, kind
    libc.fclose(stream)
    ctx = lc.llama_init_from_model(model, lc.llama_context_default_params())
    tokens = (ctypes.c_int32 * 4)(5, 6, 7, 8)
    assert lc.llama_decode(ctx, lc.llama_batch_get_one(tokens, 4)) == 0, kind
    print(kind, ["%.4f" % x for x in lc.llama_get_logits(ctx)[:4]])
    lc.llama_free(ctx)
    lc.llama_model_free(model)
"""


def test_whole_models_in_files_without_a_name(tmp_path: Path) -> None:
    model = synth.write_model(tmp_path / "model.gguf", synth.preset("tiny", type="q8_0"))
    done = process_kit.python(NAMELESS, model)
    assert done.returncode == 0, done.stderr[-2000:]
    by_kind = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert by_kind["tmpfile"] == by_kind["memfd"]


def test_a_truncated_file_is_not_mapped(device: Device, mapped: Mapped) -> None:
    os.truncate(mapped.path, mapped.start + 100)
    assert mapped.buffer() == ffi.NULL
    assert "truncated" in device.control.last_error()


@pytest.mark.usefixtures("limited")
def test_a_mapped_tensor_must_not_begin_inside_an_element(device: Device, mapped: Mapped) -> None:
    for kind, odd in ((F32, 2), (F16, 1), (Q4_0, 1)):
        with Context() as cw, Context() as c:
            buffer = cw.keep_buffer(mapped.buffer())
            w = cw.tensor(kind, 32, 4)
            assert kit.lib.ggml_backend_tensor_alloc(buffer, w, mapped.base + mapped.plain_at + odd) == FAILED
            y = kit.lib.ggml_mul_mat(c.ctx, w, c.tensor(F32, 32, 2))
            c.allocate(device.plain)
            assert c.compute(y) == FAILED
            assert "load the model without mmap" in device.control.last_error()


def test_a_load_counts_its_own_buffers_only(device: Device, mapped: Mapped) -> None:
    """Whatever other threads load and break meanwhile, and whatever goes that was there before."""

    def tile(c: Context) -> None:
        c.tensor(Q4_0, 64, 64)
        c.allocate(device.tiled)

    def broken_load() -> LoadResult:
        with Context() as c, device.control.announced():
            tile(c)
            tile(c)
            w = c.tensor(Q4_0, mapped.K, mapped.N, name="w")
            kit.lib.ggml_backend_tensor_alloc(c.keep_buffer(mapped.buffer()), w, mapped.base + mapped.plain_at)
            kit.put(w, np.zeros(10, np.uint8))
            return device.control.loaded()

    with pytest.raises(TilebeamError, match="No load is announced"):
        device.control.loaded()
    device.control.take_error()  # of earlier tests
    with ExitStack() as stack:
        tile(stack.enter_context(Context()))
        with Context() as c, device.control.announced():
            assert device.control.loaded() == LoadResult(0, 0, 0, "")
            tile(c)
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(broken_load).result()
            assert (other.tiled_tensors, other.bad_buffers) == (2, 1)
            assert "write to the mapped model file" in other.reason
            assert device.control.take_error() == ""
            stack.close()
            assert device.control.loaded() == LoadResult(0, 1, 0, "")
            with Context() as short:
                tile(short)
                assert device.control.loaded() == LoadResult(0, 2, 0, "")
            assert device.control.loaded() == LoadResult(0, 1, 0, "")


def test_writing_to_a_mapped_file_is_an_error(device: Device, mapped: Mapped) -> None:
    before = mapped.path.read_bytes()
    with Context() as cw, Context() as c:
        buffer = cw.keep_buffer(mapped.buffer())
        w = cw.tensor(Q4_0, mapped.K, mapped.N, name="w")
        kit.lib.ggml_backend_tensor_alloc(buffer, w, mapped.base + mapped.plain_at)
        kit.put(w, np.zeros(10, np.uint8))
        y = kit.lib.ggml_mul_mat(c.ctx, w, c.tensor(F32, mapped.K, 2))
        c.allocate(device.plain)
        assert c.compute(y) == FAILED
        assert "write to the mapped model file" in device.control.last_error()
    assert mapped.path.read_bytes() == before


def resident(view: npt.NDArray[np.uint8]) -> int:
    """Pages of the memory behind an array that this process has, in bytes."""
    at = view.ctypes.data
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(at // mmap.PAGESIZE * 8)
        entries = np.frombuffer(pagemap.read((at % mmap.PAGESIZE + view.nbytes) // mmap.PAGESIZE * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE


@pytest.mark.parametrize("kind", ["shared", "private", "locked"])
def test_pages_of_a_matrix_that_was_packed_are_given_back(tmp_path: Path, device: Device, kind: str) -> None:
    """Only where the file has them still: never what a program wrote into a mapping of its own, nor what it locked."""
    k, n, at = 1024, 6000, 5000
    blocks = kit.blocks(np.random.default_rng(7), Q4_0, (k, n))
    (tmp_path / "model.bin").write_bytes(bytes(at) + bytes(blocks.nbytes))
    access = {"private": mmap.ACCESS_COPY}.get(kind, mmap.ACCESS_READ)
    if kind != "private":
        (tmp_path / "model.bin").write_bytes(bytes(at) + blocks.tobytes())
    with (tmp_path / "model.bin").open("rb") as file, mmap.mmap(file.fileno(), 0, access=access) as mapped:
        view = np.frombuffer(mapped, np.uint8)[at:]
        if kind == "private":
            view[:] = blocks.reshape(-1)
        libc = ctypes.CDLL(None)
        if kind == "locked" and libc.mlock(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.nbytes)) != 0:
            pytest.skip("this process may lock no memory")
        assert int(view.sum()) > 0
        assert resident(view) > 0.9 * view.nbytes
        with Context() as c:
            before, w = c.tensor(F32, 1 << 19), c.tensor(Q4_0, k, n)
            c.allocate(device.tiled)
            floats = np.arange(1 << 19, dtype=np.float32) + 1
            kit.put(before, floats)
            kit.put(w, view)
            assert (resident(view) < 0.1 * view.nbytes) == (kind == "shared")
            assert (kit.get(w) == blocks.reshape(-1)).all()
            assert (kit.floats(before).reshape(-1) == floats).all()  # backing the tiles with huge pages changes nothing
        assert (view == blocks.reshape(-1)).all()
        del view

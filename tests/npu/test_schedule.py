"""Schedules: whatever is fused, shared or reordered, the results are those of the ops run one by one, bit for bit.

The oracle is the same executor with fusion off (a barrier after each op, in the order of the list), which the other
files compare with numpy.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accuracy import Job, got, run
from hypothesis import event, given, settings
from hypothesis import strategies as st
from npu_kit import FFI, LIB, OK, Executor
from npu_ops import F32, OPS, float_param
from numpy.typing import NDArray
from tilebeam._ext import ffi as contract

from bench.lib import synth

THREADS = (1, 2, 5)
TYPES = {name.removeprefix("TB_"): kind for name, kind in contract.typeof("enum tb_type").relements.items()}
ISAS = [FFI.string(LIB.tb_npu_isa_name(i)).decode() for i in range(4) if LIB.tb_npu_isa_name(i) != FFI.NULL]
ROOM = 1 << 20  # bytes of the buffer for activations
K = 64


class Graph:
    """Ops over buffer 0 (activations) and buffer 1 (weights)."""

    def __init__(self) -> None:
        self.ops: list[Any] = []

    def tensor(self, offset: int, ne: tuple[int, ...], kind: int = F32, buffer: int = 0, row: int = 0) -> Any:
        t = FFI.new("tb_tensor *")
        t.buffer, t.type, t.offset = buffer, kind, offset
        ne = (*ne, 1, 1, 1)[:4]
        size = 4 if kind == F32 else 8
        strides = [size, row or size * ne[0]]
        strides += [strides[1] * ne[1], strides[1] * ne[1] * ne[2]]
        t.ne, t.nb = list(ne), strides
        return t

    def add(self, name: str, dst: Any, *src: Any, params: tuple[float | int, ...] = ()) -> Any:
        op = FFI.new("tb_op *")
        op.code, op.n_src, op.dst = OPS[name], len(src), dst[0]
        for i in range(len(op.src)):
            op.src[i].buffer = 0xFFFFFFFF
        for i, t in enumerate(src):
            op.src[i] = t[0]
        for i, value in enumerate(params):
            op.params[i] = float_param(value) if isinstance(value, float) else value
        self.ops.append(op)
        return dst

    def array(self) -> Any:
        array = FFI.new("tb_op[]", max(1, len(self.ops)))
        for i, op in enumerate(self.ops):
            array[i] = op[0]
        return array

    def run(
        self, memory: NDArray[Any], weights: NDArray[Any], threads: int, isa: str, fuse: bool, hands: int | None = None
    ) -> tuple[int, str]:
        array = self.array()
        with Executor(threads, isa, hands=hands) as npu:
            LIB.tb_npu_set_fusion(npu.npu, fuse)
            assert npu.map(0, memory) == OK
            assert npu.map(1, weights, writable=False) == OK
            reply = FFI.new("tb_reply *")
            status = LIB.tb_npu_run(npu.npu, array, len(self.ops), reply)
            return status, FFI.string(reply.why).decode()

    def fused_as_plain(self, memory: NDArray[Any], weights: NDArray[Any], threads: int, isa: str) -> NDArray[Any]:
        """What becomes of the memory, fused and not."""
        want, got = memory.copy(), memory.copy()
        assert self.run(want, weights, threads, isa, fuse=False) == (OK, "")
        assert self.run(got, weights, threads, isa, fuse=True) == (OK, "")
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), threads
        return got


def start(seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(ROOM // 4).astype(np.float32), rng.standard_normal(1 << 18).astype(np.float32) / 8


def random_weights(kind: str) -> NDArray[np.float32]:
    """Bytes that pass for any weights of that type: quants are anything, scales and floats are small."""
    rng = np.random.default_rng(5)
    if kind == "F32":
        return start(0)[1]
    return rng.uniform(-0.1, 0.1, 1 << 19).astype(np.float16).view(np.float32)


def layer(rows: int, kind: str, with_bias: bool) -> Graph:
    """A transformer layer but for attention, results in the place of operands as ggml's allocator puts them."""
    g = Graph()
    float_size = {"F32": 4, "F16": 2, "BF16": 2}.get(kind)
    block_size = 34 if kind.startswith("Q8") else 18

    def weight(index: int, n: int, k: int = K) -> Any:
        t = g.tensor(index * 65536, (k, n), buffer=1)
        t.type = TYPES[kind]
        row = k * float_size if float_size else k // 32 * block_size
        t.nb = [float_size or block_size, row, row * n, row * n]
        return t

    def at(slot: int, n: int = K) -> Any:
        return g.tensor(slot * 65536, (n, rows))

    vector = g.tensor(15 * 65536, (K,))
    x, normed, q, k, v = at(0), at(1), at(2), at(3), at(4)
    g.add("RMS_NORM", normed, x, params=(1e-6,))
    g.add("MUL", normed, normed, vector)
    for i, t in enumerate((q, v, k)):
        g.add("MUL_MAT", t, weight(i % 3, K), normed)
        if with_bias:
            g.add("ADD", t, t, vector)
    g.add("SCALE", q, q, params=(0.125, 0.0))
    g.add("MUL", k, k, q)
    g.add("ADD", v, v, k)
    out = at(5)
    g.add("MUL_MAT", out, weight(1, K), v)
    g.add("ADD", out, out, x)
    g.add("RMS_NORM", normed, out, params=(1e-6,))
    g.add("MUL", normed, normed, vector)
    gate, up, hidden = at(6, 2 * K), at(8, 2 * K), at(10, 2 * K)
    g.add("MUL_MAT", gate, weight(0, 2 * K), normed)
    g.add("MUL_MAT", up, weight(2, 2 * K), normed)
    g.add("GLU", hidden, gate, up, params=(2, 0))
    g.add("MUL_MAT", x, weight(1, K, 2 * K), hidden)
    g.add("ADD", x, x, out)
    return g


KINDS = ("F32", "F16", "Q4_0_COL", "Q8_0_COL", "IQ4_NL_COL", "Q4_0_TILE", "Q4_0", "Q8_0")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_the_same_fused_and_not(isa: str, kind: str) -> None:
    for rows in (1, 2, 7, 33):
        for with_bias in (False, True):
            g = layer(rows, kind, with_bias)
            memory, _ = start(rows)
            weights = random_weights(kind)
            for threads in THREADS:
                got = g.fused_as_plain(memory, weights, threads, isa)
                assert not np.array_equal(got, memory)
                assert np.isfinite(got).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_layers_share_a_mask_until_it_changes(isa: str, tokens: int) -> None:
    cells, head = 320, 64
    rng = np.random.default_rng(tokens)
    g = Graph()

    def view(offset: int, ne: tuple[int, ...], size: int, kind: int) -> Any:
        t = g.tensor(offset, ne, kind)
        t.nb = [size, *(size * int(n) for n in np.cumprod((*ne, 1, 1, 1)[:3]))]
        return t

    q = view(0, (head, tokens, 2), 4, F32)
    kv = view(65536, (head, cells), 2, TYPES["F16"])
    masks = [view((3 + i) * 65536, (cells, tokens), 2, TYPES["F16"]) for i in range(2)]
    for i, mask in enumerate((masks[0], masks[0], masks[1], masks[0])):
        g.add(
            "FLASH_ATTN", view((6 + 2 * i) * 65536, (head, 2, tokens), 4, F32), q, kv, kv, mask, params=(0.1, 0.0, 0.0)
        )
    g.add("CPY", masks[0], masks[1])
    g.add("FLASH_ATTN", view(14 * 65536, (head, 2, tokens), 4, F32), q, kv, kv, masks[0], params=(0.1, 0.0, 0.0))
    memory, weights = start(1)
    halves = memory.view(np.float16)
    halves[32768 : 32768 + head * cells] = rng.standard_normal(head * cells)
    for i in range(2):
        hidden = np.where(rng.random(cells * tokens) < 0.4, -np.inf, 0.0)
        halves[(3 + i) * 32768 :][: cells * tokens] = hidden + (rng.random(hidden.size) if i else 0)
    for threads in THREADS:
        got = g.fused_as_plain(memory, weights, threads, isa)
        out = [got[(6 + 2 * i) * 16384 :][: 2 * head * tokens] for i in range(5)]
        assert np.array_equal(out[0], out[1])
        assert not np.array_equal(out[0], out[2])
        assert np.array_equal(out[0], out[3])
        assert np.array_equal(out[2], out[4])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_share_the_rows_they_convert_until_those_change(isa: str, tokens: int) -> None:
    g, experts, used = Graph(), 6, 2
    x, ids = g.tensor(0, (K, 1, tokens)), g.tensor(65536, (used, tokens), TYPES["I32"])
    ids.nb = [4, 4 * used, 4 * used * tokens, 4 * used * tokens]
    tile, tiles = 18 * 32, K // 32 * K // 32
    weights = [g.tensor(i * 65536, (K, K, experts), TYPES["Q4_0_COL"], buffer=1) for i in range(2)]
    for w in weights:
        w.nb = [1, 1, tile * tiles, tile * tiles * experts]
    out = [g.tensor((4 + i) * 65536, (K, used, tokens)) for i in range(3)]
    for i, w in enumerate(weights):
        g.add("MUL_MAT_ID", out[i], w, x, ids)
    g.add("SCALE", x, x, params=(0.5, 0.0))
    g.add("MUL_MAT_ID", out[2], weights[0], x, ids)
    memory, quants = start(2)[0], random_weights("Q4_0_COL")
    memory[16384:][: used * tokens].view(np.int32)[:] = np.random.default_rng(1).integers(0, experts, used * tokens)
    for threads in THREADS:
        got = g.fused_as_plain(memory, quants, threads, isa)
        first, _, halved = (got[(4 + i) * 16384 :][: K * used * tokens] for i in range(3))
        assert np.allclose(halved, first / 2, rtol=1e-3, atol=1e-4)
        assert np.abs(first).max() > 0


def work_of_all_kinds() -> tuple[Graph, NDArray[np.float32]]:
    """A layer, attention over so many cells that threads split them, a choice of experts, the largest of a row."""
    g = layer(1, "F32", with_bias=True)
    memory, _ = start(7)
    cells, head = 1100, 64
    kv = g.tensor(16 * 65536, (head, cells), TYPES["F16"])
    kv.nb = [2, 2 * head, 2 * head * cells, 2 * head * cells]
    kv_at = 16 * 65536 // 2
    memory = np.concatenate([memory, np.zeros(ROOM // 4, np.float32)])
    memory.view(np.float16)[kv_at : kv_at + head * cells] = np.random.default_rng(1).standard_normal(head * cells)
    g.add("FLASH_ATTN", g.tensor(11 * 65536, (head, 2, 1)), g.tensor(0, (head, 1, 2)), kv, kv, params=(0.1, 0.0, 0.0))
    experts, used, tokens = 6, 2, 5
    ids = g.tensor(20 * 65536, (used, tokens), TYPES["I32"])
    ids.nb = [4, 4 * used, 4 * used * tokens, 4 * used * tokens]
    chosen = np.random.default_rng(2).integers(0, experts, used * tokens, dtype=np.int32)
    memory[20 * 16384 :][: chosen.size].view(np.int32)[:] = chosen
    w = g.tensor(0, (K, K, experts), buffer=1)
    g.add("MUL_MAT_ID", g.tensor(12 * 65536, (K, used, tokens)), w, g.tensor(21 * 65536, (K, 1, tokens)), ids)
    memory[21 * 16384 :][: K * tokens] = start(3)[0][: K * tokens]
    top = g.tensor(22 * 65536, (10, 1), TYPES["I32"])
    top.nb = [4, 40, 40, 40]
    g.add("TOP_K", top, g.tensor(13 * 65536, (9000, 1)))
    return g, memory


@pytest.mark.parametrize("isa", ISAS)
def test_results_do_not_depend_on_how_many_threads_are_at_work(isa: str) -> None:
    g, memory = work_of_all_kinds()
    weights = start(0)[1]
    for threads in (2, 5):
        want = memory.copy()
        assert g.run(want, weights, threads, isa, fuse=False) == (OK, "")
        for hands in (0, 1, 2, 3, 4, 5):
            got = memory.copy()
            assert g.run(got, weights, threads, isa, fuse=True, hands=hands) == (OK, "")
            assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), (threads, hands)


def test_biases_by_index_wait_for_all_of_them() -> None:
    """ADD_ID reads rows that another thread writes, also where biases and result have as many rows."""
    g = Graph()
    start_, biases, x, result = (g.tensor(i * 65536, (1024, 8)) for i in range(4))
    ids = g.tensor(4 * 65536, (8, 1), TYPES["I32"])
    ids.nb = [4, 32, 32, 32]
    g.add("SCALE", biases, start_, params=(1.0, 0.0))
    g.add("ADD_ID", result, x, biases, ids)
    memory, weights = start(1)
    memory[4 * 16384 :][:8] = np.arange(7, -1, -1, dtype=np.int32).view(np.float32)
    for _ in range(100):
        g.fused_as_plain(memory, weights, 2, ISAS[0])


@pytest.mark.parametrize("hands", [8, 0])
def test_more_threads_than_cpus_beside_busy_programs(hands: int) -> None:
    """No hang and no wrong bit where threads lose their CPU at any point; with 0, where their number changes."""
    g, memory = work_of_all_kinds()
    weights = start(0)[1]
    want = memory.copy()
    assert g.run(want, weights, 8, "", fuse=False, hands=1) == (OK, "")
    array = g.array()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        with Executor(8, hands=hands) as npu:
            got = memory.copy()
            assert npu.map(0, got) == OK
            assert npu.map(1, weights, writable=False) == OK
            end = time.monotonic() + 3
            while time.monotonic() < end:
                got[:] = memory
                assert npu.run(array).status == OK
                assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
    finally:
        for program in busy:
            program.kill()
            program.wait()


def put_op(g: Graph, draw: Callable[[Any], Any]) -> None:
    """One more op over few places in memory, so that results overwrite operands of earlier ops in all ways."""
    rows = draw(st.sampled_from((1, 3, 40)))
    n = draw(st.sampled_from((32, 64, 992, 1056)))  # 40 rows of 1056 reach into the next place
    places = draw(st.permutations(range(6)))
    shift = draw(st.sampled_from((0, 0, 0, 64, 4096)))

    def at(i: int, ne: tuple[int, ...]) -> Any:
        return g.tensor(places[i] * 160 * 1024 + shift, ne)

    kind = draw(
        st.sampled_from(("norm", "mul_mat", "mul_mat", "binary", "scale", "glu", "set_rows", "cpy", "soft_max"))
    )
    if kind == "norm":
        dst = at(0, (n, rows))
        g.add(draw(st.sampled_from(("RMS_NORM", "NORM"))), dst, at(1, (n, rows)), params=(1e-5,))
        if draw(st.booleans()):
            g.add("MUL", dst, dst, at(2, (n,)))
        if draw(st.booleans()):
            g.add("ADD", dst, dst, at(3, (n,)))
    elif kind == "mul_mat":
        dst = at(0, (64, rows))
        x = at(1, (64, rows))
        for i in range(draw(st.integers(1, 3))):
            w = g.tensor(i * 65536, (64, 64), buffer=1)
            w.type = TYPES[draw(st.sampled_from(("F32", "Q8_0_COL")))]
            if w.type != F32:
                w.nb = [34 * 2, 34 * 2, 34 * 2 * 64, 34 * 2 * 64]
            y = dst if i == 0 else at(2, (64, rows))
            g.add("MUL_MAT", y, w, x)
            if draw(st.booleans()):
                b = at(3, (64, rows) if draw(st.booleans()) else (64,))
                g.add("ADD", y, *((b, y) if b.ne[1] == rows and draw(st.booleans()) else (y, b)))
    elif kind == "binary":
        dst = at(0, (n, rows))
        g.add(draw(st.sampled_from(("ADD", "MUL"))), dst, dst, at(1, (n, rows) if draw(st.booleans()) else (n,)))
    elif kind == "scale":
        dst = at(0, (n, rows))
        g.add("SCALE", dst, dst if draw(st.booleans()) else at(1, (n, rows)), params=(0.5, 0.25))
    elif kind == "glu":
        g.add("GLU", at(0, (n, rows)), at(1, (n, rows)), at(2, (n, rows)), params=(2, 0))
    elif kind == "cpy":
        g.add("CPY", at(0, (n, rows)), at(1, (n // 2, 2 * rows)))
    elif kind == "soft_max":
        g.add("SOFT_MAX", at(0, (n, rows)), at(1, (n, rows)), params=(1.0, 0.0))
    else:
        indices = g.tensor(8 * draw(st.integers(0, 3)) + (1 << 19), (rows,), kind=TYPES["I64"], buffer=1)
        g.add("SET_ROWS", at(0, (n, 40)), at(1, (n, rows)), indices)


def runs(op: Any, memory: NDArray[Any], weights: NDArray[Any]) -> bool:
    """Whether the checks let it pass: results that overlap an operand are no part of a graph."""
    one = Graph()
    one.ops = [op]
    return one.run(memory.copy(), weights, 1, "", fuse=False)[0] == OK


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_graph_is_the_same_fused_and_not(data: st.DataObject) -> None:
    g = Graph()
    for _ in range(data.draw(st.integers(1, 25))):
        put_op(g, data.draw)
    memory, weights = start(data.draw(st.integers(0, 3)))
    memory *= 0.1
    weights.view(np.float16)[: 3 * 32768] = np.random.default_rng(1).uniform(-0.05, 0.05, 3 * 32768)
    weights.view(np.int64)[1 << 16 : (1 << 16) + 64] = np.random.default_rng(2).permutation(40)[np.arange(64) % 40]
    g.ops = [op for op in g.ops if runs(op, memory, weights)]
    event(f"{len(g.ops)} ops")
    want = memory.copy()
    with np.errstate(all="ignore"):
        assert g.run(want, weights, 1, "", fuse=False)[0] == OK
        for threads in (1, data.draw(st.sampled_from((2, 3, 5)))):
            for fuse in (True, False):
                got = memory.copy()
                assert g.run(got, weights, threads, "", fuse=fuse)[0] == OK
                assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), (threads, fuse)


@pytest.mark.parametrize("threads", THREADS)
def test_memory_that_is_mapped_twice(threads: int) -> None:
    """Ops that meet only through another buffer's number for the same bytes keep their order."""
    n = 40000
    memory = np.ones(n, np.float32)
    ops = FFI.new("tb_op[]", 60)
    g = Graph()
    for i in range(60):
        t = g.tensor(0, (n,), buffer=i % 3)
        g.add("SCALE", t, t, params=((2.0, 0.0) if i % 2 else (1.0, 1.0)))
        ops[i] = g.ops[-1][0]
    want = np.ones(n, np.float32)
    for i in range(60):
        want = want * np.float32(2) if i % 2 else want + np.float32(1)
    with Executor(threads) as npu:
        for i in range(3):
            assert npu.map(i, memory) == OK
        assert LIB.tb_npu_run(npu.npu, ops, 60, FFI.NULL) == OK
    assert np.array_equal(memory, want)


def test_many_independent_ops_take_no_square_of_time() -> None:
    g = Graph()
    for i in range(16000):
        t = g.tensor(16 * i, (4,))
        g.add("SCALE", t, t, params=(2.0, 0.0))
    memory, weights = start(0)
    got = memory.copy()
    assert g.run(got, weights, 2, "", fuse=True) == (OK, "")
    assert np.array_equal(got[:64000], memory[:64000] * 2)
    assert np.array_equal(got[64000:], memory[64000:])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("schedule")
    paths = {}
    for arch in ("qwen2", "gemma3", "qwen3moe"):
        paths[arch] = folder / f"{arch}.gguf"
        experts = {"n_expert": 4, "n_expert_used": 2} if arch.endswith("moe") else {}
        synth.write_model(paths[arch], synth.SynthConfig(arch=arch, n_layer=2, type="q4_0", **experts))
    return paths


@pytest.mark.parametrize("arch", ["qwen2", "gemma3", "qwen3moe"])
def test_whole_models_are_the_same_fused_and_not(models: dict[str, Path], tmp_path: Path, arch: str) -> None:
    """Through llama.cpp, the plugin and the channel, with TILEBEAM_FUSE."""
    ways = [("prefill", 2, "thread"), ("decode", 1, "thread"), ("parallel", 2, "process"), ("parallel", 5, "thread")]
    for mode, threads, executor in ways:
        job = Job(str(models[arch]), "npu", mode, n_positions=32, n_threads=threads, executor=executor)
        jobs = [replace(job, env={"TILEBEAM_FUSE": value}) for value in ("0", "1")]
        plain, fused = (got(result) for result in run(jobs, tmp_path))
        assert plain.ops == fused.ops > 0
        assert np.array_equal(plain.logits.view(np.uint32), fused.logits.view(np.uint32)), (mode, threads, executor)

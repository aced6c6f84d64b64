"""The executor core: buffers, checks before anything runs, order of ops, failures, threads, limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from npu_kit import FFI, LIB, OK, STATUS, Executor, Op, Vec, add, get_rows, graph, scale
from npu_ops import I32
from numpy.typing import NDArray
from tilebeam.native import executor as _npu

THREADS = (1, 2, 5)


def floats(n: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def test_kernel_sets_end_with_portable() -> None:
    names = _npu.isas()
    assert names[-1] == "portable"
    assert len(set(names)) == len(names)
    for name in names:
        npu = LIB.tb_npu_create(1, name.encode())
        assert FFI.string(LIB.tb_npu_isa(npu)).decode() == name
        LIB.tb_npu_free(npu)
    best = LIB.tb_npu_create(1, FFI.NULL)
    assert FFI.string(LIB.tb_npu_isa(best)).decode() == names[0]
    LIB.tb_npu_free(best)
    assert LIB.tb_npu_create(1, b"sse17") == FFI.NULL
    assert LIB.tb_npu_isa_name(-1) == FFI.NULL
    assert LIB.tb_npu_isa_name(len(names)) == FFI.NULL


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_mix_of_small_and_large_ops_runs_in_order(data: st.DataObject) -> None:
    """Small ops run on one thread without a barrier between them, large ones on all."""
    threads = data.draw(st.sampled_from(THREADS))
    sizes = (1, 7, 500, 4096, 4097, 30000)
    room = 30000
    memory = floats(4 * room, seed=1)
    want = memory.copy()
    ops = []
    for _ in range(data.draw(st.integers(1, 30))):
        n = data.draw(st.sampled_from(sizes))
        d, x = data.draw(st.permutations(range(4)))[:2]
        ops.append(add(Vec(4 * room * d, n), Vec(4 * room * d, n), Vec(4 * room * x, n)))
        want[room * d : room * d + n] += want[room * x : room * x + n]
    with Executor(threads) as npu:
        npu.map(0, memory)
        for _ in range(2):
            before = memory.copy()
            assert npu.run(ops).status == OK
            memory, before = before, memory  # run twice from the same start: the same result
            npu.unmap(0)
            npu.map(0, memory)
            with np.errstate(all="ignore"):
                assert np.array_equal(before, want, equal_nan=True)


def test_buffers() -> None:
    memory = floats(64)
    with Executor() as npu:
        assert npu.map(3, memory) == OK
        assert npu.map(3, memory) == STATUS["TB_E_BUFFER"]
        assert npu.map(1024, memory) == STATUS["TB_E_BUFFER"]
        assert npu.unmap(4) == STATUS["TB_E_BUFFER"]
        assert npu.unmap(99999) == STATUS["TB_E_BUFFER"]
        assert LIB.tb_npu_map(npu.npu, 5, FFI.NULL, 64, 1) == STATUS["TB_E_BUFFER"]
        assert LIB.tb_npu_map(npu.npu, 5, FFI.cast("void *", memory.ctypes.data), 0, 1) == STATUS["TB_E_BUFFER"]
        assert LIB.tb_npu_map(npu.npu, 5, FFI.cast("void *", 4096), 2**64 - 1, 1) == STATUS["TB_E_BUFFER"]
        op = [scale(Vec(0, 64, buffer=3), Vec(0, 64, buffer=3), 2.0)]
        assert npu.run(op).status == OK
        assert npu.unmap(3) == OK
        assert npu.run(op).name == "TB_E_BUFFER"
        assert npu.map(3, memory, writable=False) == OK
        refused = npu.run(op)
        assert refused.name == "TB_E_BUFFER"
        assert "read-only" in refused.why


@pytest.mark.parametrize("threads", THREADS)
def test_nothing_runs_if_any_op_is_refused(threads: int) -> None:
    n = 5000
    memory = floats(2 * n)
    before = memory.copy()
    good = [scale(Vec(0, n), Vec(0, n), 3.0) for _ in range(5)]
    bad = {
        "TB_E_BOUNDS": scale(Vec(4 * n + 4, n), Vec(0, n), 3.0),
        "TB_E_SHAPE": scale(Vec(0, n), Vec(0, n - 1), 3.0),
        "TB_E_UNSUPPORTED": Op("SCALE", Vec(0, 8, kind=I32), (Vec(0, 8, kind=I32),), (1.0,)),
        "TB_E_BUFFER": scale(Vec(0, n, buffer=7), Vec(0, n), 3.0),
    }
    with Executor(threads) as npu:
        npu.map(0, memory)
        for name, op in bad.items():
            outcome = npu.run([*good, op, *good])
            assert (outcome.name, outcome.op_index) == (name, 5)
            assert outcome.why
            assert np.array_equal(memory, before)
        unknown = graph(good)
        unknown[2].code = 250
        reply = FFI.new("tb_reply *")
        unknown[2].tag = 77
        assert LIB.tb_npu_run(npu.npu, unknown, 5, reply) == STATUS["TB_E_UNSUPPORTED"]
        assert (reply.op_index, reply.op_code, reply.tag) == (2, 250, 77)
        assert np.array_equal(memory, before)
        assert npu.run([]).status == OK


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("rows", [1, 600])
def test_failure_while_running_stops_there(threads: int, rows: int) -> None:
    """An index that only the data shows to be wrong: the ops before it have run, those that need its result not."""
    n = 64
    memory = np.zeros(200000, np.float32)
    memory[:n] = 1
    indices = memory[1000 : 1000 + rows].view(np.int32)
    indices[:] = 0
    indices[rows // 2] = 3  # of 2 rows
    first, second = Vec(0, n), Vec(4 * 512, n)
    result, after = Vec(4 * 10000, n, rows), Vec(4 * 60000, n, rows)
    picked = get_rows(result, Vec(0, n, 2), Vec(4000, rows, kind=I32), tag=9)
    ops = [
        scale(first, first, 2.0),
        picked,
        scale(first, first, 5.0),
        scale(after, result, 0.0, 1.0),
        scale(second, first, 1.0),
    ]
    with Executor(threads) as npu:
        npu.map(0, memory)
        for factor in (2, 4):
            outcome = npu.run(ops)
            assert (outcome.name, outcome.op_index) == ("TB_E_BOUNDS", 1)
            assert outcome.why
            assert np.all(memory[:n] == factor)
            assert np.all(memory[512 : 512 + n] == 0)
            assert not memory[60000:110000].any()
        indices[:] = 0
        assert npu.run(ops).status == OK
        assert np.all(memory[:n] == 40)
        assert np.all(memory[60000 : 60000 + n * rows] == 1)


def test_callers_floating_point_mode_does_not_change_results() -> None:
    """Workers and caller compute with denormals and round to nearest, whatever mode the caller is in."""
    tiny = np.full(20000, 1e-40, np.float32)
    want = tiny * np.float32(0.5)
    assert want[0] != 0
    with Executor(2) as npu:
        npu.map(0, tiny)
        assert npu.run([scale(Vec(0, 20000), Vec(0, 20000), 0.5)]).status == OK
    assert np.array_equal(tiny, want)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_descriptors_never_touch_foreign_memory(data: st.DataObject) -> None:
    """Descriptors with random fields are refused or run inside their buffer; guard bytes around it stay as they are."""
    guard, n = 4096, 2048
    whole = np.full(2 * guard + 4 * n, 0xA5, np.uint8)
    inner = whole[guard : guard + 4 * n]
    # Sizes whose products stay small, or overflow; dst has no stride 0, or an op could be legal and take for ever.
    sizes = st.sampled_from([0, 1, 2, 3, 4, 31, 32, 33, 64, 2**31, 2**32 - 1])
    numbers = st.sampled_from([4, 8, 64, 128, 256, 4096, 8192, 2**40, 2**63, 1, 2, 3])
    op = FFI.new("tb_op[]", 1)
    op[0].code = data.draw(st.integers(0, 13))
    op[0].n_src = data.draw(st.integers(0, 6))
    for t in [op[0].dst, *op[0].src]:
        t.buffer = data.draw(st.sampled_from([0, 0, 0, 1, 0xFFFFFFFF]))
        t.type = data.draw(st.integers(0, 13))
        t.offset = data.draw(numbers) if data.draw(st.booleans()) else 0
        t.ne = [data.draw(sizes) for _ in range(4)] if data.draw(st.booleans()) else [32, 2, 1, 1]
        t.nb = [data.draw(numbers) for _ in range(4)] if data.draw(st.booleans()) else [4, 128, 256, 256]
    for i in range(16):
        op[0].params[i] = data.draw(st.sampled_from([0, 1, 2, 32, -1, 1 << 30]))
    with Executor(2) as npu:
        npu.map(0, inner)
        LIB.tb_npu_run(npu.npu, op, 1, FFI.NULL)
    assert np.all(whole[:guard] == 0xA5)
    assert np.all(whole[-guard:] == 0xA5)

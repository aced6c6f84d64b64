"""Traces: what the ring holds, what the CPU side believes of it, the timeline and the table."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tilebeam
from npu_kit import FFI, LIB, OK, Op, Session, SharedArray, Vec, add, scale, settled_possessions
from npu_ops import BF16, F16, F32, I32, Q4_0, Q8_0, Arena, Tensor, make_op
from numpy.typing import NDArray
from tilebeam import _ext as ggml_ext
from tilebeam.cli.main import app
from tilebeam.errors import TilebeamError
from tilebeam.measure import trace
from typer.testing import CliRunner

from bench.lib import synth

BOTH = pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
SPAN = dict(ggml_ext.ffi.typeof("enum tb_span").relements)
N = 6000  # elements: more than a thread runs alone


def take() -> tuple[NDArray[Any], int, int]:
    """All records collected by the library, and how many are missing."""
    room = FFI.new("tb_trace_record[]", 20000)
    lost, damaged = FFI.new("uint64_t *"), FFI.new("uint64_t *")
    n = LIB.tb_trace_take(room, 20000, lost, damaged)
    raw = bytes(FFI.buffer(room))[: n * FFI.sizeof("tb_trace_record")]
    return np.frombuffer(raw, trace.record_type()), int(lost[0]), int(damaged[0])


@pytest.fixture
def memory() -> Iterator[SharedArray]:
    array = SharedArray(4 * N)
    array.floats[:] = 1
    yield array
    LIB.tb_trace_stop()
    array.close()


def some_ops() -> list[Op]:
    a, b = Vec(0, N), Vec(4 * N, N)
    return [scale(a, a, 0.5, label="halve"), add(b, b, a, label="collect"), scale(Vec(8 * N, 8), Vec(0, 8), 2.0)]


@BOTH
def test_every_op_of_every_message_is_stamped(process: bool, memory: SharedArray) -> None:
    before = settled_possessions()
    with Session(process, n_threads=2) as s:
        s.map(memory)
        assert s.compute(some_ops(), 1).status == OK
        LIB.tb_trace_start(100000)
        for round_ in range(5):
            assert s.compute(some_ops()[: 3 - round_ % 2], 1 + round_ % 2).status == OK
            assert s.noop().status == OK
        LIB.tb_trace_stop()
        assert s.compute(some_ops(), 1).status == OK
        records, lost, damaged = take()
        assert LIB.tb_session_trace_ring(s.handle) == FFI.NULL
    assert settled_possessions() == before
    assert (lost, damaged) == (0, 0)
    assert len(np.unique(records["session"])) == 1
    graphs = np.unique(records["seq"][records["span"] == SPAN["TB_SPAN_OP"]])
    assert len(graphs) == 5
    for round_, seq in enumerate(graphs):
        of = records[records["seq"] == seq]
        (message,) = of[of["span"] == SPAN["TB_SPAN_MESSAGE"]]
        (wait,) = of[of["span"] == SPAN["TB_SPAN_WAIT"]]
        (send,) = of[of["span"] == SPAN["TB_SPAN_SEND"]]
        (notes,) = of[of["span"] == SPAN["TB_SPAN_NOTES"]]
        ops, times = trace.whole_ops(of[of["span"] == SPAN["TB_SPAN_OP"]])
        assert ops["index"].tolist() == list(range(3 - round_ % 2))
        assert ops["name"].tolist() == [b"halve", b"collect", b""][: 3 - round_ % 2]
        assert send["begin_ns"] <= send["end_ns"] == wait["begin_ns"] <= message["begin_ns"]
        assert message["begin_ns"] <= ops["begin_ns"].min()
        assert ops["end_ns"].max() <= message["end_ns"] == notes["begin_ns"] <= notes["end_ns"] <= wait["end_ns"]
        assert times.sum() <= message["end_ns"] - message["begin_ns"]
        workers = of[of["span"] == SPAN["TB_SPAN_OP"]]
        for lane in (0, 1):
            own = np.sort(workers[workers["lane"] == lane], order="begin_ns")
            assert (own["begin_ns"][1:] >= own["end_ns"][:-1]).all()  # one after the other
        for index in range(len(ops)):
            lanes = sorted(workers["lane"][workers["index"] == index].tolist())
            # Thread 0 has a part in all that is worth sharing; 1 too, unless other programs want its CPU (crew.h).
            assert lanes in ([[0], [0, 1]] if index < 2 else [[0], [1]])


@BOTH
def test_refused_and_failed_graphs_are_traced_as_far_as_they_came(process: bool, memory: SharedArray) -> None:
    rows = Vec(12 * N, 2, kind=I32)
    memory.floats[3 * N : 3 * N + 2].view(np.int32)[:] = 7  # of 2 rows
    bad = Op("GET_ROWS", Vec(4 * N, 8, 2), (Vec(0, 8, 2), rows))
    with Session(process, n_threads=1) as s:
        s.map(memory)
        LIB.tb_trace_start(1000)
        assert s.compute([scale(Vec(0, 64, buffer=9), Vec(0, 64), 1.0)]).name == "TB_E_BUFFER"
        assert s.compute([*some_ops(), bad, *some_ops()]).name == "TB_E_BOUNDS"
        LIB.tb_trace_stop()
        records, lost, damaged = take()
    assert (lost, damaged) == (0, 0)
    ops = records[records["span"] == SPAN["TB_SPAN_OP"]]
    assert ops["index"].tolist() == [0, 1, 2, 3]


def test_full_collection_counts_what_is_lost(memory: SharedArray) -> None:
    with Session(False, n_threads=1) as s:
        s.map(memory)
        LIB.tb_trace_start(5)
        assert s.compute(some_ops()).status == OK
        LIB.tb_trace_stop()
        records, lost, _ = take()
    assert len(records) == 5
    assert lost == 3 + 1 + 3 + 1 - 5  # CPU spans, the message, the ops, the notes


def test_no_room_for_the_ring(memory: SharedArray) -> None:
    """The session's limit leaves no address space for it: graphs go on, the trace says that something is missing."""
    with Session(False, n_threads=1, memory_limit=memory.size + 8192) as s:
        s.map(memory)
        LIB.tb_trace_start(1000)
        for _ in range(3):
            assert s.compute(some_ops()).status == OK
        LIB.tb_trace_stop()
        assert s.compute(some_ops()).status == OK
        records, lost, _ = take()
    assert len(records) == 0
    assert lost == 1


@BOTH
def test_hostile_ring(process: bool, memory: SharedArray) -> None:
    """Whatever stands in the ring, the CPU side neither crashes nor believes it, and the graphs are computed."""
    rng = np.random.default_rng(3)
    ops = some_ops()
    with Session(process, n_threads=1) as s:
        s.map(memory)
        LIB.tb_trace_start(10**6)
        assert s.compute(ops, 1).status == OK
        ring = LIB.tb_session_trace_ring(s.handle)
        size = FFI.sizeof("tb_trace_ring") + 4096 * FFI.sizeof("tb_trace_event")
        ring_bytes = np.frombuffer(FFI.buffer(ring, size), np.uint8)
        names = np.frombuffer(FFI.buffer(ring.kernels), np.uint8)
        names[:] = 0xFF
        done = threading.Event()

        def scribble() -> None:
            while not done.is_set():
                at = int(rng.integers(0, size - 64))
                ring_bytes[at : at + 64] = rng.integers(0, 256, 64, dtype=np.uint8)
                ring_bytes[:4] = rng.integers(0, 256, 4, dtype=np.uint8)  # `written`

        vandal = threading.Thread(target=scribble)
        vandal.start()
        try:
            for i in range(300):
                memory.floats[:] = 1
                assert s.compute(ops, 1 + i % 3).status == OK
                assert np.all(memory.floats[N : 2 * N] == 1.5)
        finally:
            done.set()
            vandal.join()
        LIB.tb_trace_stop()
        assert s.compute(ops, 1).status == OK  # the ring is gone now
    known = {*SPAN.values()}
    kept = 0
    while len(records := take()[0]):
        kept += len(records)
        assert set(records["span"]) <= known
        assert (records["begin_ns"] <= records["end_ns"]).all()
        assert (records["index"] <= len(ops)).all()
    assert kept > 900


# ---- costs


def cost(op: Any) -> tuple[int, int]:
    n_bytes, work = ggml_ext.ffi.new("uint64_t *"), ggml_ext.ffi.new("uint64_t *")
    ggml_ext.lib.tb_op_cost(op, n_bytes, work)
    return int(n_bytes[0]), int(work[0])


def test_cost_of_ops() -> None:
    """Bytes by numpy's own sizes, operations by counting."""
    arena = Arena()

    def new(kind: int, *ne: int) -> Tensor:
        return arena.add(kind, ne)

    w, x, y = new(Q8_0, 64, 96), new(F32, 64, 5), new(F32, 96, 5)
    assert cost(make_op("MUL_MAT", y, [w, x])) == (w.array.nbytes + x.array.nbytes + y.array.nbytes, 2 * 64 * 96 * 5)
    q, k, v, mask = new(F32, 32, 3, 4), new(F16, 32, 100, 2), new(F16, 16, 100, 2), new(F16, 100, 3)
    out = new(F32, 16, 4, 3)
    every = sum(t.array.nbytes for t in (q, k, v, mask, out))
    assert cost(make_op("FLASH_ATTN", out, [q, k, v, mask])) == (every, 2 * 3 * 4 * 100 * (32 + 16))
    cache, rows, at = new(F16, 64, 1000), new(F32, 64, 3), new(I32, 3)
    assert cost(make_op("SET_ROWS", cache, [rows, at])) == (3 * 64 * 4 + 3 * 4 + 3 * 64 * 2, 0)
    table, some, picked = new(Q4_0, 64, 1000), new(I32, 4), new(F32, 64, 4)
    assert cost(make_op("GET_ROWS", picked, [table, some])) == (4 * 36 + 4 * 4 + 4 * 64 * 4, 0)
    a, b = new(BF16, 50, 4), new(F32, 50, 4)
    assert cost(make_op("ADD", b, [a, b])) == (50 * 4 * (2 + 4 + 4), 0)
    assert cost(make_op("NOP", b, [])) == (0, 0)


# ---- whole models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth.write_model(tmp_path_factory.mktemp("trace") / "tiny.gguf", synth.preset("tiny", n_layer=2))


def nested(spans: list[tuple[float, float]]) -> bool:
    """Do spans of one lane lie within each other or apart, never across?"""
    open_ends: list[float] = []
    for begin, end in sorted(spans, key=lambda s: (s[0], -s[1])):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        if open_ends and end > open_ends[-1]:
            return False
        open_ends.append(end)
    return True


def test_command(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    arguments = ["trace", "-m", str(model), "-n", "5", "-N", "3", "--n-prompt", "20", "-c", "512", "-t", "2", "--seed"]
    done = CliRunner().invoke(app, [*arguments, "1", "--executor", "process", "-o", str(out), "--json"])
    assert done.exit_code == 0, done.output
    timeline = json.loads(out.read_text())
    spans = [e for e in timeline["traceEvents"] if e["ph"] == "X"]
    labels = {(e["pid"], e["name"]) for e in timeline["traceEvents"] if e["ph"] == "M"}
    assert {e["ph"] for e in timeline["traceEvents"]} == {"X", "M"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    assert (1, "process_name") in labels
    lanes = defaultdict(list)
    for e in spans:
        # rounded to nanoseconds: microseconds as floats do not add up exactly
        begin = round(e["ts"] * 1000)
        lanes[e["pid"], e["tid"]].append((begin, begin + round(e["dur"] * 1000)))
    assert all(nested(lane) for lane in lanes.values())
    names = {e["name"] for e in spans if e["pid"] == 1}
    assert names >= {"step", "llama_decode", "sampling"}
    assert names >= {"graph", "lower", "send", "wait for the NPU", "check the reply"}
    ops = [e for e in spans if "tensor" in e["args"]]
    assert {e["name"] for e in ops} >= {"MUL_MAT", "RMS_NORM", "ROPE", "SET_ROWS", "FLASH_ATTN", "GLU", "ADD"}
    # every op of every graph: as many as the plugin says that the graph's message has
    messages = {(e["pid"], e["args"]["message"]): e for e in spans if e["pid"] > 1 and "ops" in e["args"]}
    seen = defaultdict(set)
    for e in ops:
        seen[e["pid"], e["args"]["message"]].add(e["args"]["index"])
    assert seen.keys() == messages.keys()
    assert all(seen[key] == set(range(messages[key]["args"]["ops"])) for key in messages)
    assert all(e["args"]["kernel"].startswith("gemm_") for e in ops if e["name"] == "MUL_MAT")

    summary = json.loads(done.stdout)
    assert summary["graphs"] == len(messages)
    assert (summary["lost"], summary["damaged"]) == (0, 0)
    assert sum(row["count"] for row in summary["ops"]) == sum(len(indices) for indices in seen.values())
    within = sum(row["seconds"] for row in summary["ops"])
    assert within <= summary["busy_seconds"] <= summary["seconds"]["wait for the NPU"]
    assert summary["between_seconds"] == pytest.approx(summary["busy_seconds"] - within, abs=1e-9)
    assert summary["seconds"]["wait for the NPU"] <= summary["seconds"]["graph"] <= summary["seconds"]["llama_decode"]
    assert sum(row["share"] for row in summary["ops"]) <= 1
    products = [row for row in summary["ops"] if row["op"] == "MUL_MAT"]
    assert products
    assert all(row["gops"] > 0 for row in products)
    assert {row["weights"] for row in products} <= {"Q4_0_COL", "Q8_0_COL", "F16"}


def test_table_and_text_prompt(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    done = CliRunner().invoke(app, ["trace", "-m", str(model), "-p", "hello", "-n", "2", "-c", "256", "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["traceEvents"]
    for word in ("MUL_MAT", "between ops", "NPU busy", "GB/s", "GOPS"):
        assert word in done.stdout
    stock = CliRunner().invoke(app, ["trace", "-m", str(model), "--device", "cpu", "-o", str(out)])
    assert stock.exit_code == 1
    assert "A trace is of the NPU" in stock.stderr
    missing = CliRunner().invoke(app, ["trace", "-m", str(model), "-o", str(tmp_path / "no" / "t.json")])
    assert missing.exit_code == 1
    assert f"{tmp_path / 'no'}: No such file" in " ".join(missing.stderr.split())


def test_tracer_leaves_the_model_as_it_was(model: Path) -> None:
    params = tilebeam.SamplingParams(max_tokens=3, temperature=0, seed=1)
    with tilebeam.load(model, n_ctx=256, threads=1) as lm:
        plain = lm.generate("hello", params)[0].outputs[0].token_ids
        with trace.Tracer(lm) as first:
            assert lm.generate("hello", params)[0].outputs[0].token_ids == plain
            with pytest.raises(TilebeamError, match="Another trace"), trace.Tracer(lm):
                pass
        assert lm.engine.observer is lm.engine.context.on_decode is None
        with trace.Tracer(lm) as empty:
            pass
        assert len(first.records) > 0
        assert len(empty.records) == 0
        assert empty.timeline()["traceEvents"]
        assert empty.summary().ops == []
        assert lm.generate("hello", params)[0].outputs[0].token_ids == plain
    with tilebeam.load(model, device="cpu", n_ctx=256) as stock, pytest.raises(TilebeamError, match="on the NPU"):
        trace.Tracer(stock)

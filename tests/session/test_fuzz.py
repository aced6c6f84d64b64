"""The fuzz target's kept corpus, replayed; and mutated graphs against the process executor from here.

The long runs are libFuzzer's: tests/fuzz/README.md. `TILEBEAM_FUZZ_RUNS=N` runs N of its inputs here too, if a
clang build lies in build/fuzz.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hexagon_kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from npu_kit import FFI, LIB, NO_BUFFER, OK, REQUEST, Session, SharedArray

from bench.lib.built import built

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "fuzz" / "corpus.zip"
FILE_BYTES = (16384, 65536, 5000, 32768)  # unit.h
SANITIZER = {"ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=0"}
OP_BYTES = FFI.sizeof("tb_op")
HEXAGON_MUTATIONS = int(os.environ.get("TILEBEAM_HEXAGON_MUTATIONS", "100"))


def run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    """Run a program; whatever it printed last goes into the failure."""
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | SANITIZER
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return done


def test_corpus_is_small_and_replays(tmp_path: Path) -> None:
    """Every input that once reached new code, on this compiler and these flags."""
    assert CORPUS.stat().st_size < 1_000_000
    with zipfile.ZipFile(CORPUS) as archive:
        archive.extractall(tmp_path)
    inputs = sorted(tmp_path.iterdir())
    assert len(inputs) > 100
    seen = json.loads(run([built("tilebeam-fuzz-replay"), *inputs]).stdout)
    assert seen["inputs"] == len(inputs)
    assert seen["seeds_refused"] == 0
    assert seen["seeds"] >= 240
    assert seen["messages"] > 5 * len(inputs)
    assert 0 < seen["accepted"] < seen["messages"]
    assert seen["ops"] > seen["seeds"]


@pytest.mark.skipif("TILEBEAM_FUZZ_RUNS" not in os.environ, reason="TILEBEAM_FUZZ_RUNS is not set")
def test_libfuzzer_finds_nothing(tmp_path: Path) -> None:
    """As many new inputs as asked for, from the corpus on."""
    program = ROOT / "build" / "fuzz" / "lib" / "tilebeam-fuzz"
    if not program.is_file():
        pytest.skip(f"{program} is not built: see tests/fuzz/README.md")
    with zipfile.ZipFile(CORPUS) as archive:
        archive.extractall(tmp_path / "corpus")
    runs = f"-runs={os.environ['TILEBEAM_FUZZ_RUNS']}"
    options = [runs, "-max_len=12288", "-timeout=20", f"-artifact_prefix={ROOT}/build/fuzz/"]
    assert "messages answered" in run([program, *options, tmp_path / "corpus"]).stderr


# ---- from Python: one op at a time, fields replaced, run by tilebeam-npud


@pytest.fixture(scope="module")
def valid_ops(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The ops that the fuzz target starts from, taken out of its inputs."""
    folder = tmp_path_factory.mktemp("seeds")
    run([built("tilebeam-fuzz-replay"), "--seeds", folder])
    ops = set()
    for path in folder.iterdir():
        data, at = path.read_bytes(), 8
        while at < len(data):
            kind, _, size = struct.unpack_from("<BBH", data, at)
            if kind == REQUEST["TB_REQ_COMPUTE"]:
                ops |= {data[i : i + OP_BYTES] for i in range(at + 20, at + 4 + size, OP_BYTES)}
            at += 4 + size
    assert len(ops) > 200
    return sorted(ops)


class Npu:
    """A session with the fuzz target's buffers; started again only if it is gone, which fails the test."""

    def __init__(self, session: Session | None = None) -> None:
        self.files = [SharedArray(n // 4) for n in FILE_BYTES]
        self.session = session or Session(True, n_threads=2, deadline_ms=20000)
        assert [self.session.map(f, writable=i != 1) for i, f in enumerate(self.files)] == [0, 1, 2, 3]

    def close(self) -> None:
        self.session.stop()
        for f in self.files:
            f.close()


@pytest.fixture(scope="module")
def npu() -> Iterator[Npu]:
    it = Npu()
    yield it
    it.close()


@pytest.fixture(scope="module")
def hexagon_npu() -> Iterator[Npu]:
    if why := hexagon_kit.missing():
        pytest.skip(why)
    it = Npu(hexagon_kit.hexagon_session(n_threads=2))
    yield it
    it.close()


SIZES = st.one_of(st.integers(0, 130), st.sampled_from([256, 512, 577, 1024, 4096, 2**16, 2**31, 2**32 - 1]))
BYTES = st.one_of(
    st.integers(0, 300),
    st.sampled_from([1024, 4096, 5000, 16384, 32768, 65536, 2**31, 2**32, 2**40, 2**48, 2**63, 2**64 - 4]),
)


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Fields to replace: (operand and field, index, value)."""
    operand = draw(st.sampled_from(["dst", "src0", "src0", "src1", "src2", "src3", "src4"]))
    field = draw(
        st.sampled_from(["ne", "ne", "nb", "nb", "offset", "type", "buffer", "code", "flags", "n_src", "params"])
    )
    index = draw(st.integers(0, 3))
    if field in ("code", "flags", "n_src"):
        return [(field, 0, draw(st.integers(0, 30)))]
    if field == "params":
        bits = st.sampled_from([0, 1, 2, 3, 8, -1, 2**31 - 1, -(2**31), 0x7F800000, 0x7FC00000, 0x3F800000])
        return [(field, draw(st.integers(0, 15)), draw(bits))]
    if field == "ne":  # in several operands at once, or hardly anything gets past the shapes
        size = draw(SIZES)
        every = ["dst", "src0", "src1", "src2"] if draw(st.booleans()) else [operand]
        return [(f"{o}.ne", index, size) for o in every]
    others = {
        "nb": BYTES,
        "offset": BYTES,
        "type": st.integers(0, 15),
        "buffer": st.sampled_from([0, 1, 2, 3, 4, 1023, 1024, NO_BUFFER]),
    }
    return [(f"{operand}.{field}", index, draw(others[field]))]


def apply(op: Any, change: tuple[str, int, int]) -> None:
    path, index, value = change
    if path == "params":
        op.params[index] = value
        return
    if "." not in path:
        setattr(op, path, value)
        return
    operand, field = path.split(".")
    tensor = op.dst if operand == "dst" else op.src[int(operand[3])]
    if field in ("ne", "nb"):
        getattr(tensor, field)[index] = value
    else:
        setattr(tensor, field, value)


def too_much_work(op: Any) -> bool:
    """Arithmetic that would take longer than a test has: valid, and nothing to learn from."""
    matrix = int(op.src[0].ne[0]) * math.prod(op.dst.ne)
    attention = int(op.src[1].ne[1]) * math.prod(op.src[0].ne)
    return bool(max(matrix, attention) > 1 << 24)


def check_mutated_ops(npu: Npu, valid_ops: list[bytes], data: st.DataObject) -> None:
    """Refused with a reason, or run: the NPU process lives, and what it may not write stays as it is."""
    ops = FFI.new("tb_op[]", data.draw(st.integers(1, 3)))
    for op in ops:
        FFI.memmove(FFI.addressof(op), data.draw(st.sampled_from(valid_ops)), OP_BYTES)
        for change in [c for group in data.draw(st.lists(changes(), max_size=4)) for c in group]:
            apply(op, change)
        if too_much_work(op):
            op.code = 0
    for f in npu.files:
        f.floats.view("u1")[:] = data.draw(st.sampled_from([0, 0, 1, 0xFF]))
    npu.files[1].floats[:] = 0.5
    LIB.tb_session_compute(npu.session.handle, ops, len(ops), data.draw(st.integers(0, 3)), npu.session._result)
    outcome = npu.session._outcome()
    assert npu.session.alive, outcome.why
    assert (outcome.status == OK) == (outcome.why == "")
    assert npu.session.noop().status == OK
    assert (npu.files[1].floats == 0.5).all()


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_mutated_ops_of_every_kind(npu: Npu, valid_ops: list[bytes], data: st.DataObject) -> None:
    check_mutated_ops(npu, valid_ops, data)


@settings(max_examples=HEXAGON_MUTATIONS, deadline=None)
@given(data=st.data())
def test_mutated_ops_on_hexagon(hexagon_npu: Npu, valid_ops: list[bytes], data: st.DataObject) -> None:
    """Against addresses of 32 bits."""
    check_mutated_ops(hexagon_npu, valid_ops, data)

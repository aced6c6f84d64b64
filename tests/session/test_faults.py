"""A dead, stopped, lying or overwritten NPU gives a clear error in time, and the next session works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import process_kit
import pytest
from npu_kit import FFI, LIB, OK, STATUS, Op, Outcome, Session, SharedArray, Vec, scale, stop_process

N = 1 << 20
DEADLINE_MS = 400
SANITIZER = os.environ.get("ASAN_OPTIONS", "") + ":handle_sigbus=0"
SLACK_S = 20.0  # machines that build and test at the same time; a hang would be forever


@pytest.fixture
def memory() -> Iterator[SharedArray]:
    array = SharedArray(N)
    array.floats[:] = 1
    yield array
    array.close()


def long_graph() -> list[Any]:
    """Some hundred milliseconds of work."""
    return [scale(Vec(0, N), Vec(0, N), 1.0)] * 400


def compute_while(s: Session, action: Callable[[], None], delay: float) -> Outcome:
    """Run long graphs until one fails; `action` happens meanwhile."""
    timer = threading.Timer(delay, action)
    timer.start()
    ops = long_graph()
    try:
        for _ in range(200):
            r = s.compute(ops, 1)
            if r.status != OK:
                return r
    finally:
        timer.join()
    raise AssertionError("no call failed")


def check_stays_dead(s: Session, first: Outcome) -> None:
    assert not s.alive
    start = time.monotonic()
    assert s.noop() == first
    assert s.compute(long_graph(), 1) == first
    assert s.map_fd(0, 4096)[0] == first
    assert s.unmap(0) == first
    assert s.set_threads(1) == first
    assert time.monotonic() - start < SLACK_S


def test_killed_while_idle(memory: SharedArray) -> None:
    with Session(True, n_threads=1) as s:
        s.map(memory)
        os.kill(s.pid, signal.SIGTERM)
        while s.alive:
            time.sleep(0.01)
        r = s.noop()
        assert r.name == "TB_E_DEAD"
        assert "signal 15" in r.why
        check_stays_dead(s, r)


@pytest.mark.parametrize("call", ["noop", "map", "compute"])
def test_killed_before_a_call(memory: SharedArray, call: str) -> None:
    with Session(True, n_threads=1) as s:
        s.map(memory)
        os.kill(s.pid, signal.SIGKILL)
        r = {
            "noop": s.noop,
            "map": lambda: s.map_fd(memory.fd, 4096)[0],
            "compute": lambda: s.compute(long_graph()[:1]),
        }[call]()
        assert (r.name, "signal 9" in r.why) == ("TB_E_DEAD", True)
        check_stays_dead(s, r)


def test_stopped_beyond_the_deadline(memory: SharedArray) -> None:
    with Session(True, n_threads=2, deadline_ms=DEADLINE_MS) as s:
        s.map(memory)
        pid = s.pid
        r = compute_while(s, lambda: os.kill(pid, signal.SIGSTOP), 0.02)
        assert r.name == "TB_E_DEADLINE"
        assert f"deadline of {DEADLINE_MS} ms" in r.why
        check_stays_dead(s, r)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)  # a late NPU is ended: it must not write into memory that is used for something else


def test_a_long_graph_is_not_a_late_one(memory: SharedArray) -> None:
    """The deadline is for the time in which no op ends."""
    with Session(True, n_threads=1, deadline_ms=250) as s:
        s.map(memory)
        start = time.monotonic()
        ops = long_graph()
        while time.monotonic() - start < 1:
            assert s.compute(ops * 10, 2).status == OK


@pytest.mark.parametrize("serial", [0, 7])
def test_the_deadline_of_a_large_op_is_longer(serial: int) -> None:
    """As one product of float weights of a large model with a long prompt may take minutes on a slow CPU."""
    k, n, rows = 4096, 4096, 2048  # 2^36 operations; nothing of it is computed, so no page is touched
    memory = SharedArray(k * n + k * rows + n * rows)
    product = Op(
        "MUL_MAT", Vec(4 * k * (n + rows), n, rows), (Vec(0, k, n), Vec(4 * k * n, k, rows)), label="large product"
    )
    small = scale(Vec(0, 64), Vec(0, 64), 1.0)
    for graph, allowed_ms in (([small, product], 4 * 150), ([small] * 2, 150)):
        with Session(True, n_threads=1, deadline_ms=150) as s:
            s.map(memory)
            assert s.compute([small] * 2, serial).status == OK
            stop_process(s.pid)
            r = s.compute(graph, serial)
            assert r.name == "TB_E_DEADLINE"
            assert f"no op ended within the deadline of {allowed_ms} ms" in r.why
    memory.close()


# Computes graphs of one long op until a call fails; prints the NPU's pid, signs of life, and how it ended.
STOPPABLE = """
import sys
from npu_kit import OK, Op, Session, SharedArray, Vec
side = 512
memory = SharedArray(3 * side * side)
with Session(sys.argv[1] == "process", n_threads=2, deadline_ms=int(sys.argv[2])) as s:
    s.map(memory)
    print(s.pid, flush=True)
    product, a, b = (Vec(4 * side * side * i, side, side) for i in range(3))
    while (r := s.compute([Op("MUL_MAT", product, (a, b))], 1)).status == OK:
        print("going on", flush=True)
    print(r.name, r.why, flush=True)
"""


@pytest.fixture(params=["thread", "process"])
def stoppable(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A program that computes all the time, and its NPU's pid (its own one with the thread executor)."""
    program = subprocess.Popen(
        [sys.executable, "-c", STOPPABLE, request.param, str(DEADLINE_MS)],
        stdout=subprocess.PIPE,
        text=True,
        env=process_kit.environment(),
    )
    assert program.stdout is not None
    try:
        yield program, int(program.stdout.readline())
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def next_line(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def test_a_stopped_program_has_not_waited(stoppable: tuple[subprocess.Popen[str], int]) -> None:
    """Ctrl-Z, then fg: both sides stop for longer than the deadline, and go on as if nothing had been."""
    program, npu = stoppable
    for round_ in range(3):
        assert next_line(program) == "going on"
        time.sleep(0.003 * round_)
        for pid in {program.pid, npu}:
            stop_process(pid)
        time.sleep(3 * DEADLINE_MS / 1000)
        os.kill(npu, signal.SIGCONT)
        os.kill(program.pid, signal.SIGCONT)
        for _ in range(20):  # what was printed before the stop is among these
            assert next_line(program) == "going on"
    if npu != program.pid:
        os.kill(npu, signal.SIGKILL)
        while (line := next_line(program)) == "going on":
            pass
        assert line.startswith("TB_E_DEAD the NPU process was killed by signal 9")


def test_stop_while_stopped(memory: SharedArray) -> None:
    """Closing a session whose NPU does not react ends it all the same."""
    s = Session(True, n_threads=1)
    s.map(memory)
    pid = s.pid
    os.kill(pid, signal.SIGSTOP)
    s.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
@pytest.mark.parametrize("threads", [1, 3])
def test_truncated_model_file(process: bool, threads: int) -> None:
    """Pages that are gone fail the graphs that use the file, and only those; neither side of the channel dies of it."""
    with tempfile.TemporaryFile() as f, tempfile.TemporaryFile() as other:
        for file in (f, other):
            file.write(np.ones(N, np.float32).tobytes())
            file.flush()
        out = SharedArray(N)
        with Session(process, n_threads=threads) as s:
            target = s.map(out)
            buffers = [s.map_fd(file.fileno(), 4 * N, writable=False)[1] for file in (f, other)]
            lost, good = (
                [scale(Vec(0, N, buffer=target), Vec(0, N, buffer=b), factor, label="weights")]
                for b, factor in zip(buffers, (2.0, 3.0), strict=True)
            )
            assert s.compute(lost, 1).status == OK
            f.truncate(4096)
            for ops in (lost, good + lost):
                r = s.compute(ops, 1)
                assert (r.name, r.op_index) == ("TB_E_BUFFER", len(ops) - 1)
                assert "SCALE 'weights'" in r.why
                assert "truncated" in r.why
            assert s.alive
            assert s.compute(good, 2).status == OK
            assert np.all(out.floats == 3)
            f.truncate(4 * N)  # growing again brings no bytes back
            assert s.compute(lost, 1).name == "TB_E_BUFFER"
            assert s.unmap(buffers[0]).status == OK
            f.seek(0)
            f.write(np.full(N, 5, np.float32).tobytes())
            f.flush()
            outcome, again = s.map_fd(f.fileno(), 4 * N, writable=False)
            assert (outcome.status, again) == (OK, buffers[0])
            assert s.compute(lost, 1).status == OK
            assert np.all(out.floats == 10)
        out.close()


SIGBUS_SCRIPT = """
import ctypes, faulthandler, mmap, os, signal, sys, tempfile
import numpy as np
from npu_kit import Session, SharedArray, Vec, scale
early, action = sys.argv[1:]
if early == "1":
    faulthandler.enable()
f, foreign = tempfile.TemporaryFile(), tempfile.TemporaryFile()
for file in (f, foreign):
    file.write(bytes(1 << 20))
    file.flush()
out = SharedArray(1 << 18)
mapped = mmap.mmap(foreign.fileno(), 1 << 20, prot=mmap.PROT_READ)
with Session(False, n_threads=2) as s:
    target = s.map(out)
    weights = s.map_fd(f.fileno(), 1 << 20, writable=False)[1]
    ops = [scale(Vec(0, 1 << 18, buffer=target), Vec(0, 1 << 18, buffer=weights), 2.0)]
    for file in (f, foreign):
        file.truncate(0)
    assert s.compute(ops).name == "TB_E_BUFFER"
    print("survived", flush=True)
    if action == "fault":
        mapped[5000]
    elif action == "raise":
        os.kill(os.getpid(), signal.SIGBUS)
"""


@pytest.mark.parametrize("early", ["0", "1"])
@pytest.mark.parametrize("action", ["fault", "raise", "nothing"])
def test_only_the_own_sigbus_is_survived(early: str, action: str) -> None:
    """Beside a handler of the program: missing pages of a mapped model give an error, any other SIGBUS ends the program
    as it would have."""
    run = subprocess.run(
        [sys.executable, "-c", SIGBUS_SCRIPT, early, action],
        capture_output=True,
        text=True,
        env=process_kit.environment(ASAN_OPTIONS=SANITIZER),
        timeout=120,
        check=False,
    )
    assert run.stdout == "survived\n", run.stderr
    assert run.returncode == (0 if action == "nothing" else -signal.SIGBUS)
    assert ("Bus error" in run.stderr) == (action != "nothing" and early == "1")


def test_a_program_that_ignores_its_children(memory: SharedArray) -> None:
    """With SIGCHLD ignored the system collects exit codes itself: the end of the NPU is noticed all the same."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with Session(True, n_threads=1) as s:
            s.map(memory)
            assert s.compute(long_graph()[:1]).status == OK
        with Session(True, n_threads=1) as s:
            s.map(memory)
            os.kill(s.pid, signal.SIGKILL)
            r = s.compute(long_graph()[:1])
            assert (r.name, "has ended" in r.why) == ("TB_E_DEAD", True)
            check_stays_dead(s, r)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
@pytest.mark.parametrize("round_", range(3))
def test_overwritten_page(process: bool, memory: SharedArray, round_: int) -> None:
    """Whatever is scribbled over the shared page while graphs run, a call succeeds with the right numbers or fails."""
    rng = np.random.default_rng(round_)
    ops = [scale(Vec(0, 256), Vec(0, 256), 1.0, 1.0)] * 20
    stop = threading.Event()
    with Session(process, n_threads=1, deadline_ms=DEADLINE_MS) as s:
        s.map(memory)
        page = s.channel_bytes
        header = FFI.sizeof("tb_channel")

        def scribble() -> None:
            while not stop.is_set():
                at = int(rng.integers(0, header if rng.random() < 0.5 else 4096 + 16384))
                page[at] = bytes([int(rng.integers(256))])
                time.sleep(0.0002)

        memory.floats[:] = 0
        thread = threading.Thread(target=scribble)
        thread.start()
        done, failed = 0, None
        try:
            for i in range(3000):
                r = s.compute(ops, i % 3)
                if r.status == OK:
                    done += 20
                elif r.status == STATUS["TB_E_PROTOCOL"] and s.alive:
                    continue  # refused before anything ran
                else:
                    failed = r
                    break
        finally:
            stop.set()
            thread.join()
        if failed:
            assert failed.name in ("TB_E_PROTOCOL", "TB_E_DEADLINE", "TB_E_DEAD")
            assert failed.why
        else:
            assert np.all(memory.floats[:256] == done)
    with Session(process, n_threads=1) as s:
        s.map(memory)
        assert s.compute(ops).status == OK


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
@pytest.mark.parametrize(
    "damage",
    [
        {"npu_sleeping": 0},
        {"cpu_sleeping": 7},
        {"req_seq": 77},
        {"req_seq": 77, "rep_seq": 77},
        {"rep_seq": 12345},
        {"rep_seq": 0},
        {"npu_progress": 2**32 - 1},
        {"npu_ready": 0},
        {"npu_ready": 3, "req_seq": 0},
    ],
    ids=str,
)
def test_counters_heal(process: bool, damage: dict[str, int], memory: SharedArray) -> None:
    """Words that only one side may change, changed while nothing runs: graphs run all the same, and exactly once."""
    ops = [scale(Vec(0, 256), Vec(0, 256), 2.0)]
    memory.floats[:] = 1
    with Session(process, n_threads=1, spin_us=-1) as s:
        s.map(memory)
        for i in range(4):
            before = s.channel.req_seq
            for name, value in damage.items():
                setattr(s.channel, name, value)
            time.sleep(0.03)
            if "req_seq" in damage and i % 2:
                s.channel.req_seq = before  # the last request again
                LIB.tb_service_wake(FFI.addressof(s.channel, "req_seq"))
                time.sleep(0.03)
            assert s.compute(ops, 1).status == OK
            assert np.all(memory.floats[:256] == 2 ** (i + 1))


def test_progress_of_nothing_does_not_delay_the_deadline(memory: SharedArray) -> None:
    """A stopped NPU is late, whatever somebody writes where it tells how far it is."""
    ending = threading.Event()
    with Session(True, n_threads=1, deadline_ms=DEADLINE_MS) as s:
        s.map(memory)
        stop_process(s.pid)

        def write() -> None:
            rng = np.random.default_rng(1)
            while not ending.wait(0.001):
                s.channel.npu_progress = int(rng.integers(2**32))

        thread = threading.Thread(target=write)
        thread.start()
        try:
            assert s.compute(long_graph()).name == "TB_E_DEADLINE"
        finally:
            ending.set()
            thread.join()


def test_npu_ends_with_its_program() -> None:
    """A killed program leaves no tilebeam-npud behind, even while a forked child still holds its descriptors."""
    script = """
import os, time
from npu_kit import Session
s = Session(True, n_threads=1)
if os.fork() == 0:
    time.sleep(600)
print(s.pid, flush=True)
time.sleep(600)
"""
    program = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=process_kit.environment(),
        start_new_session=True,
    )
    assert program.stdout is not None
    npu = int(program.stdout.readline())
    program.kill()
    try:
        program.wait()
        end = time.monotonic() + SLACK_S
        while time.monotonic() < end:
            with suppress(FileNotFoundError):
                if Path(f"/proc/{npu}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    time.sleep(0.01)
                    continue
            break
        else:
            raise AssertionError("tilebeam-npud survived its program")
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.stdout.close()

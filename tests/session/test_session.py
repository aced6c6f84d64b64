"""The channel with both executors: handshake, graphs and patches, failures, clean starts and stops."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import process_kit
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from npu_kit import (
    FFI,
    LIB,
    OK,
    Executor,
    Op,
    Session,
    SharedArray,
    Vec,
    add,
    get_rows,
    mul,
    scale,
    settled_possessions,
)
from npu_ops import I32
from tilebeam._ext import ffi as contract
from tilebeam.native import executor as _npu
from tilebeam.native import paths as _paths

GUARDS: dict[str, int] = dict(contract.typeof("enum tb_guard").relements)
BOTH = pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
N = 20000
SANITIZED = "libasan" in Path("/proc/self/maps").read_text()


@pytest.fixture
def memory() -> Iterator[SharedArray]:
    array = SharedArray(4 * N)
    array.floats[:] = np.random.default_rng(3).standard_normal(4 * N).astype(np.float32)
    yield array
    array.close()


def vec(i: int, n: int = N, buffer: int = 0) -> Vec:
    return Vec(4 * N * i, n, buffer=buffer)


@BOTH
def test_start_reports_what_runs(process: bool) -> None:
    with Session(process, n_threads=3) as s:
        assert s.isa == _npu.isas()[0]
        assert s.threads == 3
        assert s.alive
        assert (s.pid != os.getpid()) == process
        filtered = 0 if SANITIZED else GUARDS["TB_GUARD_SYSCALLS"]
        assert s.guards == (sum(GUARDS.values()) - GUARDS["TB_GUARD_SYSCALLS"] + filtered if process else 0)
        assert s.noop().status == OK
        assert s.set_threads(2).status == OK
        assert s.threads == 2
        assert s.set_threads(100000).name == "TB_E_PROTOCOL"
        assert s.noop().status == OK


@BOTH
def test_kernel_set_is_obeyed(process: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(process, isa="portable") as s:
        assert s.isa == "portable"
    with pytest.raises(RuntimeError, match=r"no kernels named 'sse17', only .*portable"):
        Session(process, isa="sse17")
    monkeypatch.setenv("TILEBEAM_ISA", "portable")
    with Session(process) as s:
        assert s.isa == "portable"


def test_missing_or_foreign_npud(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"nowhere/npud' could not be started: No such file"):
        Session(True, npud_path=str(tmp_path / "nowhere" / "npud"))
    with pytest.raises(RuntimeError, match=r"did not start: it has exited with code 1"):
        Session(True, npud_path="/bin/false")


@BOTH
@pytest.mark.parametrize("threads", [1, 2])
def test_compute_equals_the_executor_alone(process: bool, threads: int, memory: SharedArray) -> None:
    ops = 40 * [add(vec(0), vec(0), vec(1)), mul(vec(1), vec(1), vec(2)), scale(vec(2, 50), vec(2, 50), 1.01)]
    want = memory.floats.copy()
    with Executor(threads) as npu:
        npu.map(0, want)
        assert npu.run(ops).status == OK
    with Session(process, n_threads=threads) as s:
        assert s.map(memory) == 0
        assert s.compute(ops).status == OK
    assert np.array_equal(memory.floats, want)


@BOTH
def test_failure_reports(process: bool, memory: SharedArray) -> None:
    memory.floats[100:101].view(np.int32)[:] = 7
    ops = [scale(vec(1), vec(1), 1.0), get_rows(vec(2, 4), Vec(0, 4, 2), Vec(400, 1, kind=I32), label="inp_out_ids")]
    with Session(process) as s:
        s.map(memory)
        for serial in (0, 5, 5):
            r = s.compute(ops, serial)
            assert (r.name, r.op_index) == ("TB_E_BOUNDS", 1)
            assert "GET_ROWS 'inp_out_ids'" in r.why
            assert "op 1" in r.why
        assert s.compute([scale(vec(9), vec(0), 1.0)]).name == "TB_E_BOUNDS"
        assert s.compute([scale(vec(0, buffer=4), vec(0), 1.0)]).name == "TB_E_BUFFER"
        assert s.compute(ops[:1]).status == OK  # a refused graph is no dead NPU


@BOTH
def test_map_and_unmap(process: bool, memory: SharedArray) -> None:
    page = os.sysconf("SC_PAGESIZE")
    with Session(process, memory_limit=memory.size + 2 * page) as s:
        first = s.map(memory)
        assert s.map_fd(memory.fd, page)[0].status == OK
        refused, _ = s.map_fd(memory.fd, 2 * page)
        assert refused.name == "TB_E_NOMEM"
        assert "limit" in refused.why
        assert s.map_fd(memory.fd, page, offset=17)[0].name == "TB_E_BOUNDS"
        assert s.map_fd(memory.fd, 0)[0].name == "TB_E_BOUNDS"
        assert s.map_fd(memory.fd, memory.size + 1)[0].name == "TB_E_BOUNDS"
        assert s.map_fd(memory.fd, 2**63, offset=2**63)[0].name == "TB_E_BOUNDS"
        assert s.map_fd(9999, page)[0].name == "TB_E_BUFFER"
        reading, _writing = os.pipe()
        assert s.map_fd(reading, page)[0].name == "TB_E_BUFFER"
        os.close(reading)
        os.close(_writing)
        assert s.unmap(first).status == OK
        assert s.unmap(first).name == "TB_E_BUFFER"
        assert s.unmap(2**32 - 1).name == "TB_E_BUFFER"
        again, buffer = s.map_fd(memory.fd, 4 * page, offset=page)
        assert again.status == OK
        assert buffer == first
        want = memory.floats.copy()
        want[page // 4 : page // 4 + 8] *= 3
        assert s.compute([scale(Vec(0, 8, buffer=buffer), Vec(0, 8, buffer=buffer), 3.0)]).status == OK
        assert np.array_equal(memory.floats, want)


@BOTH
def test_read_only_file(process: bool) -> None:
    """A model file is opened for reading only: it maps, is read, and cannot be written."""
    with tempfile.NamedTemporaryFile() as f:
        f.write(np.arange(2048, dtype=np.float32).tobytes())
        f.flush()
        fd = os.open(f.name, os.O_RDONLY)
        array = SharedArray(2048)
        with Session(process) as s:
            assert s.map_fd(fd, 8192, writable=True)[0].name == "TB_E_BUFFER"
            outcome, weights = s.map_fd(fd, 4096, offset=4096, writable=False)
            assert outcome.status == OK
            out = s.map(array)
            os.close(fd)
            assert s.compute([scale(Vec(0, 1024, buffer=out), Vec(0, 1024, buffer=weights), 2.0)]).status == OK
            assert np.array_equal(array.floats[:1024], 2 * np.arange(1024, 2048, dtype=np.float32))
            r = s.compute([scale(Vec(0, 8, buffer=weights), Vec(0, 8, buffer=out), 2.0)])
            assert "read-only" in r.why
        array.close()


@BOTH
def test_many_buffers(process: bool, memory: SharedArray) -> None:
    with Session(process) as s:
        for i in range(1024):
            outcome, buffer = s.map_fd(memory.fd, 4096)
            assert (outcome.status, buffer) == (OK, i)
        assert s.map_fd(memory.fd, 4096)[0].name == "TB_E_BUFFER"
        assert s.unmap(500).status == OK
        assert s.map_fd(memory.fd, 4096)[1] == 500


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@BOTH
def test_patched_graphs_equal_whole_ones(process: bool, memory: SharedArray, data: st.DataObject) -> None:
    """Graphs under more serials than the NPU keeps, with ops changed, added and removed between sends."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    pool = [0.5, 0.75, 1.25, 1.5]

    def random_op() -> Op:
        a, b, c = rng.integers(0, 4, 3)
        n = int(rng.choice([8, 300, 6000]))
        if rng.random() < 0.5:
            return scale(vec(a, n), vec(a, n), float(rng.choice(pool)))
        return add(vec(a, n), vec(a, n), vec(b if b != a else (a + 1) % 4, n), tag=int(c))

    graphs = {serial: [random_op() for _ in range(rng.integers(1, 12))] for serial in range(1, 21)}
    memory.floats[:] = rng.standard_normal(4 * N).astype(np.float32)
    want = memory.floats.copy()
    with Session(process, n_threads=2) as s, Executor(1) as npu:
        s.map(memory)
        npu.map(0, want)
        for _ in range(40):
            serial = data.draw(st.integers(1, 20))
            ops = graphs[serial]
            change = data.draw(st.sampled_from(["nothing", "one", "some", "longer", "shorter"]))
            if change == "one":
                ops[int(rng.integers(len(ops)))] = random_op()
            elif change == "some":
                for i in range(0, len(ops), 2):
                    ops[i] = random_op()
            elif change == "longer":
                ops.append(random_op())
            elif change == "shorter" and len(ops) > 1:
                ops.pop()
            assert s.compute(ops, serial).status == OK
            assert npu.run(ops).status == OK
            with np.errstate(all="ignore"):
                assert np.array_equal(memory.floats, want, equal_nan=True)


@BOTH
def test_kept_graph_sees_buffers_change(process: bool, memory: SharedArray) -> None:
    """A kept graph is checked again when its buffer goes away or gets smaller."""
    ops = [scale(vec(0), vec(1), 2.0)]
    with Session(process) as s:
        s.map(memory)
        assert s.compute(ops, 3).status == OK
        assert s.unmap(0).status == OK
        assert s.compute(ops, 3).name == "TB_E_BUFFER"
        assert s.map_fd(memory.fd, 4096)[1] == 0
        assert s.compute(ops, 3).name == "TB_E_BOUNDS"
        assert s.unmap(0).status == OK
        s.map(memory)
        assert s.compute(ops, 3).status == OK


@BOTH
def test_largest_graph(process: bool, memory: SharedArray) -> None:
    ops = [add(vec(0, 1), vec(0, 1), vec(1, 1))] * 16384
    memory.floats[0], memory.floats[N] = 0, 1
    with Session(process) as s:
        s.map(memory)
        assert s.compute(ops, 1).status == OK
        assert s.compute([scale(vec(0, 1), vec(0, 1), 1.0)] * 16384, 1).status == OK  # all ops patched
        assert s.compute([*ops, ops[0]]).name == "TB_E_PROTOCOL"
        assert s.noop().status == OK
    assert memory.floats[0] == 16384


@BOTH
def test_start_and_stop_leave_nothing_behind(process: bool, memory: SharedArray) -> None:
    before = settled_possessions()
    for i in range(300):
        with Session(process, n_threads=2) as s:
            s.map(memory)
            s.map_fd(memory.fd, 4096)
            assert s.compute([scale(vec(0), vec(0), 1.0)], 1).status == OK
            if i % 2:
                s.unmap(0)
    assert settled_possessions() == before


def test_npud_gives_up_what_it_does_not_need(memory: SharedArray) -> None:
    """A seccomp filter (not under a sanitizer), no descriptor but its own, and it works in there."""
    secret = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(secret, True)
    with Session(True, n_threads=2) as s:
        s.map(memory)
        assert s.set_threads(4).status == OK
        assert s.set_threads(0).status == OK
        assert s.compute([scale(vec(0), vec(0), 1.0)] * 10, 1).status == OK
        if os.geteuid() == 0:
            files = {name: os.readlink(f"/proc/{s.pid}/fd/{name}") for name in os.listdir(f"/proc/{s.pid}/fd")}
            assert files.pop("0") == files.pop("1") == "/dev/null"
            files.pop("2")
            assert sorted(kind.split(":")[0].split(" ")[0] for kind in files.values()) in (
                ["/memfd", "anon_inode", "socket"],
                ["/memfd", "socket"],
            )
        else:  # not even its own user may look
            with pytest.raises(PermissionError):
                os.listdir(f"/proc/{s.pid}/fd")
        if s.guards & GUARDS["TB_GUARD_SYSCALLS"]:
            status = dict(line.split(":\t") for line in Path(f"/proc/{s.pid}/status").read_text().splitlines())
            assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
    os.close(secret)


SANDBOX = """
import ctypes, errno, mmap, os, socket, sys, threading
from npu_kit import FFI, LIB
secret = os.open("/proc/self/status", os.O_RDONLY)
libc = ctypes.CDLL(None, use_errno=True)
granted = LIB.tb_session_enter_sandbox()

def refused(what, action):
    try:
        action()
    except OSError as error:
        if error.errno != errno.EPERM:
            os.write(2, f"{what}: {error}\\n".encode())
    else:
        os.write(2, f"{what} is possible\\n".encode())

def call(name, *args):
    ctypes.set_errno(0)
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)

refused("reading a file", lambda: os.open("/etc/hostname", os.O_RDONLY))
refused("making a file", lambda: os.open("tilebeam-sandbox", os.O_CREAT | os.O_WRONLY))
refused("making a memory file", lambda: os.memfd_create("x"))
refused("deleting", lambda: os.unlink("tilebeam-sandbox"))
refused("a network socket", lambda: socket.socket(socket.AF_INET))
refused("a local socket", lambda: socket.socket(socket.AF_UNIX))
refused("a new process", os.fork)
refused("another program", lambda: os.execv("/bin/true", ["true"]))
refused("a signal to the parent", lambda: os.kill(os.getppid(), 0))
refused("looking into the parent", lambda: call("ptrace", 16, os.getppid(), None, None))
refused("writing into a descriptor", lambda: os.write(secret, b"x"))
refused("executable memory", lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC))
refused("executable memory later", lambda: call("mprotect", ctypes.c_void_p(id(secret) // 4096 * 4096), 4096, 5))
refused("being looked into", lambda: call("prctl", 4, 1, 0, 0, 0))
refused("another filter", lambda: call("prctl", 22, 2, None))
# What the NPU needs still works.
thread = threading.Thread(target=lambda: mmap.mmap(-1, 1 << 20).close())
thread.start()
thread.join()
os._exit(granted)
"""


@pytest.mark.skipif(SANITIZED, reason="sanitizers read files of their own")
def test_sandbox() -> None:
    """The same filter as tilebeam-npud's, and everything tried that must not work."""
    run = process_kit.python(SANDBOX)
    assert run.stderr == ""
    assert run.returncode == GUARDS["TB_GUARD_SYSCALLS"] | GUARDS["TB_GUARD_PRIVATE"]


def test_npud_serves_its_parent_only() -> None:
    """With descriptors from somebody else, or started for another process, it ends at once."""
    npud = str(_paths.native("tilebeam-npud"))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    region = os.memfd_create("tilebeam-test")
    os.ftruncate(region, 1 << 20)
    code = f"""
import os, subprocess, sys
args = ["--region-fd={region}", "--socket-fd={theirs.fileno()}", f"--parent={{int(sys.argv[1]) or os.getpid()}}"]
sys.exit(subprocess.run([{npud!r}, *args], pass_fds=[{region}, {theirs.fileno()}]).returncode)
"""
    for parent, status, told in ((0, 2, "the socket is not its parent's"), (os.getpid(), 0, "")):
        run = subprocess.run(
            [sys.executable, "-c", code, str(parent)],
            pass_fds=[region, theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (run.returncode, told in run.stderr) == (status, True)
    for end in (ours, theirs):
        end.close()
    os.close(region)


def test_npud_of_another_build(tmp_path: Path) -> None:
    """Both sides must come from the same sources, whatever their protocol version says."""
    image = _paths.native("tilebeam-npud").read_bytes()
    build = bytes.fromhex(FFI.string(LIB.tb_session_build_id()).decode())
    assert build in image
    other = tmp_path / "tilebeam-npud"
    other.write_bytes(image.replace(build, bytes(reversed(build))))
    other.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"refused to serve: it was built from other sources than the program"):
        Session(True, npud_path=str(other))


@BOTH
def test_counters(process: bool, memory: SharedArray) -> None:
    with Session(process, n_threads=1) as s:
        s.map(memory)
        for i in range(5):
            assert s.compute([scale(vec(0), vec(0), 1.0 + i)], 1).status == OK
        assert s.noop().status == OK
        count = s.counters
        assert (count.requests, count.patched) == (7, 4)
        assert count.spun + count.slept == 7


@BOTH
def test_thread_counts_that_alternate(process: bool, memory: SharedArray) -> None:
    """No thread begins or ends, and no graph is scheduled anew, when a program goes back and forth between counts."""
    halve = [scale(vec(i), vec(i), 0.5) for i in range(4)]
    double = [scale(vec(i), vec(i), 2.0) for i in range(4)]
    want = memory.floats.copy()
    with Session(process, n_threads=2) as s:
        s.map(memory)

        def round_trip(n: int) -> None:
            assert s.set_threads(n).status == OK
            assert s.compute(halve, 1).status == OK
            assert s.compute(double, 2).status == OK
            assert np.array_equal(memory.floats, want)

        def threads() -> set[str]:
            return set(os.listdir(f"/proc/{s.pid}/task"))

        round_trip(1)
        round_trip(2)
        assert s.counters.schedules == 4
        before = threads()
        for i in range(40):
            round_trip(1 + i % 2)
        assert threads() == before
        assert s.counters.schedules == 4
        # A changed op means one schedule more for each count, a new count one for each graph.
        halve[0] = scale(vec(0), vec(0), 0.5, label="again")
        for n in (1, 2, 1, 2):
            round_trip(n)
        assert s.counters.schedules == 6
        for n in (3, 4, 1, 2, 3, 4):
            round_trip(n)
        assert s.counters.schedules == 10
        for n in (5, 5, 4, 3, 2):  # which takes the place of the count unused for longest
            round_trip(n)
        assert s.counters.schedules == 12


def test_npud_alone() -> None:
    npud = str(_paths.native("tilebeam-npud"))

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([npud, *args], capture_output=True, text=True, timeout=60, check=False)

    by_hand = call()
    assert by_hand.returncode == 2
    assert by_hand.stderr.count("\n") == 1
    assert "not by hand" in by_hand.stderr
    assert call("--region-fd=0", "--socket-fd=1", "--parent=1").returncode == 2
    assert "usage" in call("--help").stdout
    build = FFI.string(LIB.tb_session_build_id()).decode()
    assert re.fullmatch("[0-9a-f]{32}", build)
    assert call("--version").stdout == f"tilebeam-npud protocol 5 layout 2 build {build}\n"
    assert call("--frobnicate").returncode == 2

"""The channel's round trip, against ggml's RPC backend, and what an idle model costs.

Three things, each with the thread and the process executor, one NPU thread:

* an empty message, hot (the next follows at once, so both sides still spin) and after a pause (both sleep). With the
  thread executor the thread that asks answers itself, so that this is what making, checking and reading a message and
  its reply costs, whatever pause there was; the process executor's is compared with it;
* a graph of 1 and of 64 small ops through ggml's API, one result read, against ggml's own RPC backend with a CPU server
  in another process, over loopback: the same llama.cpp source, built here from the pinned source distribution;
* CPU time of a loaded model that nobody asks anything, from 100 ms after its last token on.

Rounds interleave what is compared; times are medians over all rounds, ratios of medians within a round.

    python -m bench.polling [--json] [--quick]
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import tilebeam
from tilebeam._ext import cpus
from tilebeam.native import executor as _npu
from tilebeam.native import paths as _paths
from tilebeam.native.control import control

from bench.lib import ROOT, report, synth
from bench.lib.options import Parser

Times = npt.NDArray[np.int64]
COLD_PAUSE_S = 0.005
IDLE_AFTER_S = 0.1
MOST_IDLE = 0.01  # of a core
EXECUTORS = ("thread", "process")


class Session:
    """A session that is asked for nothing but no-ops."""

    def __init__(self, process: bool, threads: int) -> None:
        self._ffi, self._lib = _npu.load()
        options = self._ffi.new("tb_session_options *")
        path = self._ffi.new("char[]", str(_paths.native("tilebeam-npud")).encode())
        options.process, options.n_threads, options.npud_path = process, threads, path
        self._result = self._ffi.new("tb_session_result *")
        self._handle = self._lib.tb_session_start(options, self._result)
        if self._handle == self._ffi.NULL:
            raise RuntimeError(self._ffi.string(self._result.why).decode())

    def noops(self, n: int) -> Times:
        """Time n no-ops, in nanoseconds."""
        times = np.zeros(n, np.int64)
        pointer = self._ffi.cast("int64_t *", times.ctypes.data)
        if self._lib.tb_session_time_noop(self._handle, n, pointer, self._result) != 0:
            raise RuntimeError(self._ffi.string(self._result.why).decode())
        return times

    def stop(self) -> None:
        self._lib.tb_session_stop(self._handle)


def _cold(call: Callable[[int], Times], n: int) -> Times:
    parts = []
    for _ in range(n):
        time.sleep(COLD_PAUSE_S)
        parts.append(call(1))
    return np.concatenate(parts)


def _row(name: str, ours: Sequence[Times], baseline: Sequence[Times], percentile: float = 50, **more: Any) -> Any:
    """Make a row in microseconds from the times of each round; a ratio above 1 means that Tilebeam is faster."""
    ratios = [
        float(np.percentile(b, percentile)) / float(np.percentile(a, percentile))
        for a, b in zip(ours, baseline, strict=True)
    ]
    value, against = (float(np.percentile(np.concatenate(t), percentile)) / 1e3 for t in (ours, baseline))
    return report.figures(name, round(against, 3), round(value, 3), f"us p{percentile:g}", ratios, None, **more)


def noop_rows(rounds: int, hot: int, cold: int) -> list[dict[str, Any]]:
    sessions = {name: Session(name == "process", 1) for name in EXECUTORS}
    seen: dict[str, list[Times]] = {name: [] for name in sessions}
    slow: dict[str, list[Times]] = {name: [] for name in sessions}
    try:
        for _ in range(rounds):
            for name, s in sessions.items():
                s.noops(200)  # both sides awake
                seen[name].append(s.noops(hot))
            for name, s in sessions.items():
                slow[name].append(_cold(s.noops, cold))
    finally:
        for s in sessions.values():
            s.stop()
    rows = []
    for name in sessions:
        late = np.concatenate(slow[name]) / 1e3
        more = {f"after_pause_p{p}_us": round(float(np.percentile(late, p)), 3) for p in (50, 99)}
        rows.append(_row(f"no-op / thread executor's, {name}", seen[name], seen["thread"], **more))
        rows.append(_row(f"no-op / thread executor's, {name}, 99 %", seen[name], seen["thread"], 99))
    return rows


# ---- ggml's RPC backend


def build_rpc() -> Path:
    """Build the program of rpc_graph.cpp, in build/bench-rpc, unless it is newer than its source; return it.

    Raises:
        RuntimeError: there is no C++ compiler, or no source of llama.cpp (build Tilebeam once: CMake fetches it).
    """
    libraries = Path(llama_cpp.__file__).parent / "lib"
    sources = sorted((ROOT / "build" / "ggml-source").glob("*/vendor/llama.cpp/ggml"))
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None or not sources:
        raise RuntimeError("no C++ compiler" if compiler is None else "no source of llama.cpp in build/ggml-source")
    ggml, program = sources[-1], ROOT / "build" / "bench-rpc" / "rpc_graph"
    source = Path(__file__).with_name("rpc_graph.cpp")
    if program.is_file() and program.stat().st_mtime > source.stat().st_mtime:
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    rpc = ggml / "src" / "ggml-rpc"
    command: list[str | Path] = [compiler, "-O2", "-std=c++17", "-w", "-pthread", "-o", program, source]
    command += [rpc / "ggml-rpc.cpp", rpc / "transport.cpp"]
    command += [f"-I{ggml / folder}" for folder in ("include", "src", "src/ggml-rpc")]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command += [f"-l:{name}.so.0" for name in ("libggml", "libggml-base", "libggml-cpu")]
    subprocess.run(command, check=True)
    return program


@contextmanager
def rpc_server(program: Path) -> Iterator[str]:
    """Run an RPC server on a free port of the loopback; yield its endpoint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"127.0.0.1:{port}"
    server = subprocess.Popen([program, "serve", endpoint], stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                if server.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the RPC server does not start") from None
                time.sleep(0.02)
        yield endpoint
    finally:
        server.kill()
        server.wait()


def rpc_rows(rounds: int, runs: int) -> list[dict[str, Any]]:
    program = build_rpc()
    plugin = _paths.native("libggml-tilebeam.so")
    rows = []
    for executor in EXECUTORS:
        for n_ops in (1, 64):
            with rpc_server(program) as endpoint:
                command = [str(c) for c in (program, "compare", endpoint, plugin, n_ops, rounds, runs)]
                env = os.environ | {"TILEBEAM_NPU": executor, "TILEBEAM_THREADS": "1"}
                lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
            times: dict[str, list[Times]] = {"rpc": [], "tilebeam": []}
            for line in lines.splitlines():
                name, _, values = line.partition(" ")
                times[name].append(np.array(values.split(), np.int64))
            name = f"graph of {n_ops} op{'s' * (n_ops > 1)} / ggml-rpc, {executor}"
            rows.append(_row(name, times["tilebeam"], times["rpc"]))
            rows.append(_row(f"{name}, 99 %", times["tilebeam"], times["rpc"], 99))
    return rows


# ---- idle


def _cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process so far, in nanoseconds."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())


def idle_rows(seconds: float) -> list[dict[str, Any]]:
    """CPU time of this program and its NPU with a model that is loaded, has just decoded, and is idle."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = synth.write_model(Path(folder) / "tiny.gguf", synth.preset("tiny"))
        for executor in EXECUTORS:
            with tilebeam.load(path, n_ctx=256, executor=executor) as lm:
                lm.generate("hello", tilebeam.SamplingParams(max_tokens=8, seed=1))
                pids = {os.getpid(), int(control().status()["npu_pid"])}
                time.sleep(IDLE_AFTER_S)
                before = sum(_cpu_ns(pid) for pid in pids)
                time.sleep(seconds)
                share = (sum(_cpu_ns(pid) for pid in pids) - before) / (seconds * 1e9)
            share = max(share, 1e-6)
            name, ratios = f"idle model / 1 % of a core, {executor}", [MOST_IDLE / share]
            rows.append(report.figures(name, MOST_IDLE, round(share, 6), "cores", ratios, share / MOST_IDLE))
    return rows


def main() -> None:
    p = Parser(__doc__, "fewer and shorter rounds")
    p.add_rounds(10, 3)
    p.add_argument("--no-rpc", action="store_true", help="leave ggml's RPC backend out: nothing is compiled")
    args = p.parse()
    hot, cold, runs, idle_s = (5000, 20, 500, 1.0) if args.quick else (20000, 100, 3000, 3.0)
    with _stdout_is_stderr():  # whatever a library prints must not get between
        measured = noop_rows(args.rounds, hot, cold)
        if not args.no_rpc:
            measured += rpc_rows(args.rounds, runs)
        measured += idle_rows(idle_s)
    rows = report.Rows("polling", args.json)
    for row in measured:
        rows.add(row)
    busy = os.getloadavg()[0] > cpus.usable_cpus().cpus
    note = "This machine is busy with other work: where spinning did not help, figures are of sleeping."
    rows.finish({"idle_cores": MOST_IDLE}, *([note] if busy else []))


@contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    report.start(main)

"""The channel's round trip: a no-op with the thread and the process executor against a Unix socket, and idle CPU use.

Rounds interleave what is compared; percentiles are over all rounds, ratios are of medians within a round. Hot: the
next request follows at once, so both sides still spin. Cold: a pause before each request, so both sides sleep.

    PYTHONPATH=python:. python bench/polling.py [--json] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from tilebeam import _npu, _paths

Times = npt.NDArray[np.int64]
COLD_PAUSE_S = 0.005


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

    def idle_share(self, seconds: float) -> float:
        """CPU time that this program and the NPU use while nothing happens, as a share of one core."""
        pids = {os.getpid(), int(self._lib.tb_session_pid(self._handle))}
        time.sleep(0.1)
        before = sum(_cpu_ns(pid) for pid in pids)
        time.sleep(seconds)
        return (sum(_cpu_ns(pid) for pid in pids) - before) / (seconds * 1e9)

    def stop(self) -> None:
        """End the NPU."""
        self._lib.tb_session_stop(self._handle)


def _cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process so far, in nanoseconds."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())


def _socket(n: int) -> Times:
    ffi, lib = _npu.load()
    times = np.zeros(n, np.int64)
    result = ffi.new("tb_session_result *")
    if lib.tb_time_socket_echo(n, ffi.cast("int64_t *", times.ctypes.data), result) != 0:
        raise RuntimeError(ffi.string(result.why).decode())
    return times


def _cold(call: Callable[[int], Times], n: int) -> Times:
    parts = []
    for _ in range(n):
        time.sleep(COLD_PAUSE_S)
        parts.append(call(1))
    return np.concatenate(parts)


def measure(rounds: int, hot: int, cold: int, idle_s: float) -> list[dict[str, Any]]:
    """One row per way to ask: p50 and p99 in microseconds, ratio to the socket, idle CPU share."""
    sessions = {"thread": Session(False, 1), "process": Session(True, 1)}
    calls: dict[str, Callable[[int], Times]] = {"unix socket": _socket, **{k: s.noops for k, s in sessions.items()}}
    seen: dict[str, list[Times]] = {name: [] for name in calls}
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    slow: dict[str, list[Times]] = {name: [] for name in sessions}
    try:
        for _ in range(rounds):
            medians = {}
            for name, call in calls.items():
                call(200)  # both sides awake
                times = call(hot)
                seen[name].append(times)
                medians[name] = float(np.median(times))
            for name in calls:
                ratios[name].append(medians["unix socket"] / medians[name])
            for name, s in sessions.items():
                slow[name].append(_cold(s.noops, cold))
        idle = {name: s.idle_share(idle_s) for name, s in sessions.items()}
    finally:
        for s in sessions.values():
            s.stop()
    rows = []
    for name in calls:
        every = np.concatenate(seen[name]) / 1e3
        late = np.concatenate(slow[name]) / 1e3 if name in slow else None
        rows.append(
            {
                "way": name,
                "p50_us": float(np.percentile(every, 50)),
                "p99_us": float(np.percentile(every, 99)),
                "faster_than_socket": median(ratios[name]),
                "spread": [min(ratios[name]), max(ratios[name])],
                "cold_p50_us": None if late is None else float(np.percentile(late, 50)),
                "cold_p99_us": None if late is None else float(np.percentile(late, 99)),
                "idle_cpu_share": idle.get(name),
            }
        )
    return rows


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    args = parser.parse_args()
    rounds, hot, cold, idle_s = (3, 5000, 20, 1.0) if args.quick else (10, 20000, 100, 3.0)
    rows = measure(rounds, hot, cold, idle_s)
    if args.json:
        json.dump(
            {"cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "rows": rows}, sys.stdout, indent=1
        )
        print()
        return 0
    table = Table(title="No-op round trip (one NPU thread)")
    for column in ("", "hot p50", "hot p99", "faster than socket", "cold p50", "cold p99", "idle CPU"):
        table.add_column(column, justify="right")
    for r in rows:
        low, high = r["spread"]
        table.add_row(
            r["way"],
            f"{r['p50_us']:.2f} us",
            f"{r['p99_us']:.2f} us",
            f"{r['faster_than_socket']:.1f}x ({low:.1f} to {high:.1f})",
            "" if r["cold_p50_us"] is None else f"{r['cold_p50_us']:.0f} us",
            "" if r["cold_p99_us"] is None else f"{r['cold_p99_us']:.0f} us",
            "" if r["idle_cpu_share"] is None else f"{100 * r['idle_cpu_share']:.2f} %",
        )
    console = Console()
    console.print(table)
    if os.getloadavg()[0] > len(os.sched_getaffinity(0)):
        console.print("This machine is busy with other work: where spinning did not help, figures are of sleeping.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

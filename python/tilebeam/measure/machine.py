"""What the reports say about the machine. Needs nothing but the standard library."""

from __future__ import annotations

import glob
import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def _cpuinfo(*keys: str) -> str | None:
    """Return the first value of one of these keys in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return None


def cpu_info() -> str:
    """Return the processor's name, or its architecture if it has none."""
    return _cpuinfo("model name") or platform.machine()


def cpu_features() -> set[str]:
    """Return the instruction set extensions that the kernel reports, by its names; empty if unknown."""
    return set((_cpuinfo("flags", "Features") or "").split())


def cpu_seconds() -> float:
    """Return CPU time of this process and of those that it started: an NPU process, checkers of answers."""
    times = os.times()
    return (
        time.process_time() + times.children_user + times.children_system + sum(map(_cpu_seconds_of, _children("self")))
    )


def _children(pid: str) -> list[str]:
    """List processes that a process started and that still run; none where the kernel does not tell."""
    found: list[str] = []
    for thread in glob.iglob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError):  # that thread has ended
            found += Path(thread).read_text(encoding="ascii").split()
    return found


def _cpu_seconds_of(pid: str) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended: its time is in that of its parent's children
        return 0.0
    ticks = stat.rpartition(")")[2].split()[11:15]  # utime, stime, cutime, cstime
    return sum(map(int, ticks)) / _TICKS + sum(map(_cpu_seconds_of, _children(pid)))


@dataclass(frozen=True)
class Cost:
    """What a piece of work costs.

    Attributes:
        seconds: by the clock.
        cpu_seconds: of this process and its children, on all CPUs together.
    """

    seconds: float
    cpu_seconds: float


class Stopwatch:
    """Begins when it is made."""

    def __init__(self) -> None:
        self._cpu = cpu_seconds()
        self._began = time.perf_counter()

    def cost(self) -> Cost:
        """Return the cost until now."""
        return Cost(time.perf_counter() - self._began, cpu_seconds() - self._cpu)


class OtherLoad:
    """How much of the machine other programs used while a block ran.

    Timings of spinning threads, and llama.cpp's CPU backend has them, collapse when others want the same CPUs: a
    comparison made then says little. Processes that this one started are no others.

    Attributes:
        share: CPU time of others over all CPU time, 0 to 1; set when the block ends, 0 if the kernel does not tell.
    """

    share: float = 0.0

    def __enter__(self) -> OtherLoad:
        self._start = self._sample()
        return self

    def __exit__(self, *_: object) -> None:
        own, busy, total = (after - before for before, after in zip(self._start, self._sample(), strict=True))
        self.share = max(0.0, busy - own) / total if total > 0 else 0.0

    @staticmethod
    def _sample() -> tuple[float, float, float]:
        """Return seconds: of this process, of all, and of all with idle ones."""
        try:
            words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        except OSError:
            words = []
        user, nice, system, idle, iowait, irq, softirq, steal = [int(w) / _TICKS for w in words] or [0.0] * 8
        busy = user + nice + system + irq + softirq + steal
        return cpu_seconds(), busy, busy + idle + iowait


def busy_note(share: float) -> str | None:
    """Return a sentence to print beside timings when others used enough of the machine to spoil them, else None."""
    if share < 0.1:
        return None
    return (
        f"Other programs used {share:.0%} of the CPUs meanwhile, which slows llama.cpp's spinning threads most: these "
        "ratios flatter Tilebeam, repeat on a quiet machine."
    )

"""The machine: its name, its limits (dot products, float FMAs, streaming reads), and C++ compiled for this CPU."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tilebeam._ext import cpus
from tilebeam.measure.machine import cpu_info

from bench.lib import ROOT

_READ_BYTES = 256 << 20


@cache
def compile(name: str, *flags: str) -> ctypes.CDLL:
    """Build a source file of bench/ for this very CPU, with further flags, and load it.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler: install the package g++")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "library.so"
        command = [compiler, "-O3", "-march=native", "-std=c++17", "-ffast-math", "-shared", "-fPIC", "-w", *flags]
        command += ["-I", str(ROOT / "ggml_ext" / "include")]
        subprocess.run([*command, str(ROOT / "bench" / name), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))


def machine() -> dict[str, str | int]:
    return {"cpu": cpu_info(), "cpus": cpus.usable_cpus().cpus, "system": platform.release()}


@cache
def _memory() -> npt.NDArray[np.uint8]:
    return np.ones(_READ_BYTES, np.uint8)


def _on_threads(n: int, probe: Callable[[int], float]) -> float:
    with ThreadPoolExecutor(n) as pool:
        return sum(pool.map(probe, range(n)))


@cache
def _peaks() -> ctypes.CDLL:
    lib = compile("lib/peaks.cpp")
    for function in (lib.limit_int8, lib.limit_fma, lib.limit_read):
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double]
    lib.limit_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return lib


def int8_gops(threads: int, seconds: float = 0.01) -> float:
    """Measure the 8-bit dot product peak of all threads together, 10^9 per second, multiply and add apart; 0 without
    such an instruction."""
    lib = _peaks()
    return _on_threads(threads, lambda _: float(lib.limit_int8(seconds)))


def fma_gflops(threads: int, seconds: float = 0.01) -> float:
    """Measure the float32 FMA peak of all threads together, 10^9 per second, multiply and add apart."""
    lib = _peaks()
    return _on_threads(threads, lambda _: float(lib.limit_fma(seconds)))


def read_gbs(threads: int) -> float:
    """Measure the bandwidth of streaming reads of all threads together over 256 MiB, 10^9 bytes per second.

    The best of several ways to read (in order, several streams, with and without software prefetch), because which one
    is fastest differs by CPU and by what else uses the memory. Timed from the first thread's start to the last one's
    end.
    """
    lib = _peaks()
    base = _memory().ctypes.data
    share = _READ_BYTES // threads // 4096 * 4096
    together = threading.Barrier(threads)

    def read(i: int, way: int) -> tuple[float, float]:
        together.wait()
        start = time.perf_counter()
        lib.limit_read(base + i * share, share, way)
        return start, time.perf_counter()

    def rate(way: int) -> float:
        starts, ends = zip(*pool.map(read, range(threads), [way] * threads), strict=True)
        return 1e-9 * share * threads / float(max(ends) - min(starts))

    with ThreadPoolExecutor(threads) as pool:
        return max(rate(way) for way in range(4))

"""The machine's own limits, measured beside what they are compared with: int8 dot products, float FMAs and reads."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

_READ_BYTES = 256 << 20


@cache
def compile(name: str) -> ctypes.CDLL:
    """Build a source file of this folder for this very CPU and load it.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler: install the package g++")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "library.so"
        source = Path(__file__).with_name(name)
        command = [compiler, "-O3", "-march=native", "-std=c++17", "-ffast-math", "-shared", "-fPIC", "-w", str(source)]
        subprocess.run([*command, "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))


@cache
def _library() -> ctypes.CDLL:
    lib = compile("limits.cpp")
    lib.tb_limit_int8.restype = ctypes.c_double
    lib.tb_limit_int8.argtypes = [ctypes.c_double]
    lib.tb_limit_fma.restype = ctypes.c_double
    lib.tb_limit_fma.argtypes = [ctypes.c_double]
    lib.tb_limit_read.restype = ctypes.c_double
    lib.tb_limit_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return lib


@cache
def _memory() -> np.ndarray:
    return np.ones(_READ_BYTES, np.uint8)


def _on_threads(n: int, probe: Callable[[int], float]) -> float:
    with ThreadPoolExecutor(n) as pool:
        return sum(pool.map(probe, range(n)))


def int8_gops(threads: int, seconds: float = 0.01) -> float:
    """8-bit dot product peak of ``threads`` threads together, multiply and add counted apart, in 10^9 per second."""
    lib = _library()
    return _on_threads(threads, lambda _: float(lib.tb_limit_int8(seconds)))


def fma_gflops(threads: int, seconds: float = 0.01) -> float:
    """Float32 FMA peak of ``threads`` threads together, multiply and add counted apart, in 10^9 per second."""
    lib = _library()
    return _on_threads(threads, lambda _: float(lib.tb_limit_fma(seconds)))


def read_gbs(threads: int) -> float:
    """Streaming read bandwidth of ``threads`` threads together over 256 MiB, in 10^9 bytes per second."""
    lib = _library()
    base = _memory().ctypes.data
    share = _READ_BYTES // threads // 4096 * 4096
    return _on_threads(threads, lambda i: float(lib.tb_limit_read(base + i * share, share)))


def machine() -> dict[str, str | int]:
    """Processor name and CPUs, for reports."""
    name = platform.machine()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    return {"cpu": name, "cpus": len(os.sched_getaffinity(0)), "system": platform.release()}

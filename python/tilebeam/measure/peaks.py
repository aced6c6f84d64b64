"""The machine's own limits: int8 dot products, float FMAs and streaming reads, measured where they are compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt

from tilebeam.native import executor as _npu

_READ_BYTES = 256 << 20


@cache
def _memory() -> npt.NDArray[np.uint8]:
    return np.ones(_READ_BYTES, np.uint8)


def _on_threads(n: int, probe: Callable[[int], float]) -> float:
    with ThreadPoolExecutor(n) as pool:
        return sum(pool.map(probe, range(n)))


def int8_gops(threads: int, seconds: float = 0.01) -> float:
    """Measure the 8-bit dot product peak of ``threads`` threads together, multiply and add counted apart, in 10^9 per
    second.

    0 on a CPU without such an instruction.
    """
    _, lib = _npu.load()
    return _on_threads(threads, lambda _: float(lib.tb_npu_limit_int8(seconds)))


def fma_gflops(threads: int, seconds: float = 0.01) -> float:
    """Measure the float32 FMA peak of ``threads`` threads together, multiply and add apart, in 10^9 per second."""
    _, lib = _npu.load()
    return _on_threads(threads, lambda _: float(lib.tb_npu_limit_fma(seconds)))


def read_gbs(threads: int) -> float:
    """Measure the streaming read bandwidth of ``threads`` threads together over 256 MiB, in 10^9 bytes per second.

    The best of several ways to read (in order, several streams, with and without software prefetch), because which one
    is fastest differs by CPU and by what else uses the memory. Timed from the first thread's start to the last one's
    end.
    """
    ffi, lib = _npu.load()
    base = _memory().ctypes.data
    share = _READ_BYTES // threads // 4096 * 4096
    together = threading.Barrier(threads)

    def read(i: int, way: int) -> tuple[float, float]:
        together.wait()
        start = time.perf_counter()
        lib.tb_npu_limit_read(ffi.cast("void *", base + i * share), share, way)
        return start, time.perf_counter()

    def rate(way: int) -> float:
        starts, ends = zip(*pool.map(read, range(threads), [way] * threads), strict=True)
        return 1e-9 * share * threads / float(max(ends) - min(starts))

    with ThreadPoolExecutor(threads) as pool:
        return max(rate(way) for way in range(int(lib.TB_NPU_READ_WAYS)))

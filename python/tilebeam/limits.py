"""The machine's own limits: int8 dot products, float FMAs and streaming reads, measured where they are compared."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt

from tilebeam import _npu

_READ_BYTES = 256 << 20


@cache
def _memory() -> npt.NDArray[np.uint8]:
    return np.ones(_READ_BYTES, np.uint8)


def _on_threads(n: int, probe: Callable[[int], float]) -> float:
    with ThreadPoolExecutor(n) as pool:
        return sum(pool.map(probe, range(n)))


def int8_gops(threads: int, seconds: float = 0.01) -> float:
    """8-bit dot product peak of ``threads`` threads together, multiply and add counted apart, in 10^9 per second.

    0 on a CPU without such an instruction.
    """
    _, lib = _npu.load()
    return _on_threads(threads, lambda _: float(lib.tb_npu_limit_int8(seconds)))


def fma_gflops(threads: int, seconds: float = 0.01) -> float:
    """Float32 FMA peak of ``threads`` threads together, multiply and add counted apart, in 10^9 per second."""
    _, lib = _npu.load()
    return _on_threads(threads, lambda _: float(lib.tb_npu_limit_fma(seconds)))


def read_gbs(threads: int) -> float:
    """Streaming read bandwidth of ``threads`` threads together over 256 MiB, in 10^9 bytes per second."""
    ffi, lib = _npu.load()
    base = _memory().ctypes.data
    share = _READ_BYTES // threads // 4096 * 4096
    return _on_threads(threads, lambda i: float(lib.tb_npu_limit_read(ffi.cast("void *", base + i * share), share)))

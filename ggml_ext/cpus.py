"""The CPUs that this process may use, as the backend's own threads count them (``backend/base/cpus.h``)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from ._library import native_file

_NAME = "libtilebeam_npu.so"


@dataclass(frozen=True)
class Cpus:
    """What the system grants this process of the machine's CPUs.

    Attributes:
        cpus: of its affinity mask and its cpuset.
        cores: that these belong to: two CPUs of one core (SMT) do hardly more than one.
        quota: CPUs' worth of time that its control groups leave it; None: no limit.
        threads: how many to start where nobody says how many: one per core, within the quota rounded up.
    """

    cpus: int
    cores: int
    quota: float | None
    threads: int


@cache
def _function() -> Any:
    path = native_file(_NAME)
    try:
        function = ctypes.CDLL(str(path)).tb_usable_cpus
    except (OSError, AttributeError) as e:
        raise ImportError(f"tilebeam: {path} cannot be used: {e}. Build or install it again.") from e
    function.argtypes = (ctypes.c_char_p, *[ctypes.POINTER(ctypes.c_int)] * 2, ctypes.POINTER(ctypes.c_double))
    return function


def usable_cpus(root: str = "") -> Cpus:
    """Return what this process may use now; a quota counts as it was when this was asked first.

    Args:
        root: the folder that has ``proc`` and ``sys``, for tests.

    Raises:
        ImportError: the native library is missing or of another version.
    """
    cpus, cores, quota = ctypes.c_int(), ctypes.c_int(), ctypes.c_double()
    threads = _function()(root.encode(), ctypes.byref(cpus), ctypes.byref(cores), ctypes.byref(quota))
    return Cpus(cpus.value, cores.value, quota.value or None, threads)


def default_threads() -> int:
    """Return how many threads to start where nobody says how many, at least 1."""
    return usable_cpus().threads

"""The CPUs that this process may use, as the backend's own threads count them (``backend/base/cpus.h``)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from ._library import native_file

_NAME = "libtilebeam_npu.so"


@dataclass(frozen=True)
class Cpus:
    """What the system grants this process of the machine's CPUs.

    Attributes:
        cpus: of its affinity mask and its cpuset.
        cores: that these belong to: two CPUs of one core (SMT) do hardly more than one.
        performance_cores: of them; all, if it may use efficiency cores only.
        nodes: of memory (NUMA) that these CPUs belong to and that it may use; 0: unknown.
        threads: how many to start where nobody says how many: one per performance core, within the quota rounded up.
        quota: CPUs' worth of time that its control groups leave it; None: no limit.
    """

    cpus: int
    cores: int
    performance_cores: int
    nodes: int
    threads: int
    quota: float | None


class _TbCpus(ctypes.Structure):  # tb_cpus of backend/capi/npu_api.h
    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("cpus", "cores", "performance_cores", "nodes", "threads")),
        ("quota", ctypes.c_double),
    ]


@cache
def _function() -> Any:
    path = native_file(_NAME)
    try:
        function = ctypes.CDLL(str(path)).tb_process_cpus
    except (OSError, AttributeError) as e:
        raise ImportError(f"tilebeam: {path} cannot be used: {e}. Build or install it again.") from e
    function.argtypes, function.restype = (ctypes.c_char_p, ctypes.POINTER(_TbCpus)), None
    return function


def usable_cpus(root: str = "") -> Cpus:
    """Return what this process may use now; a quota counts as it was when this was asked first.

    Args:
        root: the folder that has ``proc`` and ``sys``, for tests.

    Raises:
        ImportError: the native library is missing or of another version.
    """
    found = _TbCpus()
    _function()(root.encode(), ctypes.byref(found))
    return Cpus(found.cpus, found.cores, found.performance_cores, found.nodes, found.threads, found.quota or None)


def default_threads() -> int:
    """Return how many threads to start where nobody says how many, at least 1."""
    return usable_cpus().threads

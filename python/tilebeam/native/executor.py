"""The executor and the session as C libraries seen from Python (``libtilebeam_npu.so``, cffi ABI mode).

For tests, ``tilebeam doctor`` and benches; models run through the ggml plugin instead. The C declarations come from
the headers themselves, so the two cannot drift apart. Types (``tb_op``, ``tb_reply`` ..) are those of
`tilebeam._ext.ffi`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from cffi import FFI

from tilebeam._ext.cdef import declarations
from tilebeam.native import paths as _paths


@cache
def load() -> tuple[Any, Any]:
    """Return ``(ffi, lib)``: the cffi interface and the library.

    Raises:
        FileNotFoundError: the library or a header is missing.
        OSError: the library cannot be loaded.
    """
    from tilebeam import _ext as ggml_ext

    ffi = FFI()
    ffi.include(ggml_ext.ffi)
    for name in ("npu_api.h", "session_api.h"):
        ffi.cdef(declarations([_paths.header(f"backend/capi/{name}")]))
    return ffi, ffi.dlopen(str(_paths.native("libtilebeam_npu.so")))


def isas() -> list[str]:
    """Return the kernel sets that this CPU can run, best first; the last is ``portable``."""
    ffi, lib = load()
    names: list[str] = []
    while (name := lib.tb_npu_isa_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return names


class UsableMemory(NamedTuple):
    """Bytes that a process can have: all, what is available of them now, and that with what could be swapped out."""

    total: int
    available: int
    with_swap: int


def usable_memory(root: str = "") -> UsableMemory:
    """Return the memory that this process can have.

    The machine's, or what a control group (a container's, a service's) leaves of it. The plugin goes by the same.

    Args:
        root: the folder that has ``proc`` and ``sys``, for tests.
    """
    ffi, lib = load()
    sizes = ffi.new("uint64_t[3]")
    lib.tb_usable_memory(root.encode(), sizes, sizes + 1, sizes + 2)
    return UsableMemory(*map(int, sizes))

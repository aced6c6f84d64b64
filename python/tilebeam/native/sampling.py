"""Drawing tokens, as a C library seen from Python: ``ffi`` and ``lib`` of ``libtilebeam_sampling.so`` (cffi ABI mode).

The C declarations come from sampling.h itself, so the two cannot drift apart. Importing this module raises ImportError
where the installation lacks the library or its header.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cffi import FFI

from tilebeam._ext.cdef import declarations
from tilebeam.native import paths as _paths

ffi: Any = FFI()
lib: Any
try:
    ffi.cdef(declarations([_paths.header("backend/sampling/sampling.h")]))
    lib = ffi.dlopen(str(_paths.native("libtilebeam_sampling.so")))
except OSError as e:
    raise ImportError(f"tilebeam: {e}") from e


def address_of(pointer: Any) -> int:
    """Return the address that a ctypes pointer or function points to."""
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)

"""Finds and opens ``libtilebeam_ext.so`` and proves that it is the one this Python code was written for."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import cffi

from .cdef import contract

NAME = "libtilebeam_ext.so"


def native_file(name: str) -> Path:
    """Return where a native file should be; it may be missing.

    ``TILEBEAM_LIB_DIR`` if set, else ``tilebeam/lib`` beside this code, else ``tilebeam/lib`` on ``sys.path``: in a
    checkout the Python code runs from the source tree and the native files are installed in site-packages.
    """
    override = os.environ.get("TILEBEAM_LIB_DIR")
    if override:
        return Path(override) / name
    path = Path(__file__).parent.parent / "lib" / name
    if not path.is_file():
        for folder in sys.path:
            installed = Path(folder) / "tilebeam" / "lib" / name
            if installed.is_file():
                return installed
    return path


def open_library() -> tuple[Any, Any]:
    """Return ``(ffi, lib)`` of the contract library.

    Raises:
        ImportError: the library is missing, cannot be opened, or was built from other sources.
    """
    path = native_file(NAME)
    if not path.is_file():
        raise ImportError(
            f"tilebeam: {path} is missing. Install the tilebeam wheel, or build it (`make`) and set TILEBEAM_LIB_DIR "
            "to the folder that has it."
        )
    ffi = cffi.FFI()
    ffi.cdef(contract())
    try:
        lib = ffi.dlopen(str(path))
        version = int(lib.tb_layout_version())
    except (OSError, AttributeError) as e:
        raise ImportError(f"tilebeam: {path} cannot be used: {e}. Build or install it again.") from e
    if version != lib.TB_LAYOUT_VERSION:
        raise ImportError(
            f"tilebeam: {path} has tile layout version {version}, this package needs {lib.TB_LAYOUT_VERSION}. "
            "Build or install it again."
        )
    last = lib.TB_TYPE_COUNT - 1
    if not lib.tb_type_of(last) or lib.tb_type_of(last + 1):
        raise ImportError(f"tilebeam: {path} knows other types than this package. Build or install it again.")
    return ffi, lib

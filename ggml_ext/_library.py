"""Finds and opens ``libtilebeam_ext.so`` and proves that it is the one this Python code was written for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cffi

from .cdef import contract

NAME = "libtilebeam_ext.so"


def library_dir() -> Path:
    """Where native libraries are looked for: ``TILEBEAM_LIB_DIR`` if set, else ``lib`` inside this package."""
    override = os.environ.get("TILEBEAM_LIB_DIR")
    return Path(override) if override else Path(__file__).parent / "lib"


def open_library() -> tuple[Any, Any]:
    """``(ffi, lib)`` of the contract library.

    Raises:
        ImportError: the library is missing, cannot be opened, or speaks another layout version.
    """
    path = library_dir() / NAME
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
    return ffi, lib

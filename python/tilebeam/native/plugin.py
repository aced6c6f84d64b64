"""Make the NPU known to llama.cpp: load the plugin into the libggml that llama-cpp-python's libllama uses.

The process maps two copies of libggml (the wheel's libggml.so and libggml.so.0 are two files). libllama resolved the
one with the soname libggml.so.0; a plugin loaded through the other is invisible to it.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.native import releases
from tilebeam.native.fork_locks import free_in_children

_lock = free_in_children()
_registered: Registry | None = None


@dataclass(frozen=True, eq=False)
class Registry:
    """The plugin's backend registry inside libggml."""

    _ggml: ctypes.CDLL
    pointer: int
    path: str
    # What the plugin said of environment variables that it cannot use. llama.cpp alone would only log that.
    complaints: list[str]

    def address(self, name: str) -> int:
        """Address of one of the plugin's own functions.

        Raises:
            TilebeamError: the plugin lacks it, so it is of another version than this package.
        """
        address = self._ggml.ggml_backend_reg_get_proc_address(self.pointer, name.encode())
        if not address:
            raise TilebeamError(f"{self.path} has no function {name}: it is of another version; reinstall tilebeam.")
        return int(address)

    def devices(self) -> list[int]:
        """Return the NPU devices (ggml_backend_dev_t)."""
        count = self._ggml.ggml_backend_reg_dev_count(self.pointer)
        return [int(self._ggml.ggml_backend_reg_dev_get(self.pointer, i)) for i in range(count)]

    def device_names(self) -> list[str]:
        """Return their names: "HMX0" .."""
        return [self._ggml.ggml_backend_dev_name(d).decode() for d in self.devices()]


@cache
def ggml() -> ctypes.CDLL:
    """Return the libggml that libllama uses, with the functions needed here typed.

    Raises:
        TilebeamError: llama-cpp-python is missing.
    """
    releases.installed()
    import_module("llama_cpp")  # maps libllama and with it the right libggml
    try:
        lib = ctypes.CDLL("libggml.so.0")
    except OSError as error:
        raise TilebeamError(f"llama-cpp-python's libggml.so.0 cannot be found: {error}") from None
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_backend_load": (pointer, [text]),
        "ggml_backend_reg_dev_count": (size, [pointer]),
        "ggml_backend_reg_dev_get": (pointer, [pointer, size]),
        "ggml_backend_reg_get_proc_address": (pointer, [pointer, text]),
        "ggml_backend_dev_name": (text, [pointer]),
        "ggml_version": (text, []),
        "ggml_commit": (text, []),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def register() -> Registry:
    """Load the plugin, once per process; later calls return the same registry.

    Raises:
        TilebeamError: there is no plugin for this llama-cpp-python, or the plugin refuses its ggml.
    """
    global _registered
    with _lock:
        if _registered is not None:
            return _registered
        lib = ggml()
        path = str(releases.plugin_file())
        from tilebeam.native import llama

        with llama.log_router().capture() as log:
            pointer = lib.ggml_backend_load(os.fsencode(path))
        if not pointer:
            reason = " ".join("".join(text for _, text in log).split())
            built = f"{lib.ggml_version().decode()} ({lib.ggml_commit().decode()})"
            raise TilebeamError(f"ggml {built} did not take the plugin {path}: {reason or 'no reason was given'}")
        lines = "".join(text for _, text in log).splitlines()
        about = "tilebeam: TILEBEAM_"
        complaints = [x.removeprefix("tilebeam: ").rsplit(":", 1)[0] for x in lines if x.startswith(about)]
        _registered = Registry(lib, pointer, path, complaints)
        return _registered

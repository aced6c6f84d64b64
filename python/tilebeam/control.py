"""The plugin's own functions: announce a repacked file, configure the NPU, read its state.

The C declarations come from backend/plugin/control.h itself, so the two cannot drift apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from cffi import FFI

from ggml_ext.cdef import declarations
from tilebeam import _paths
from tilebeam.errors import TilebeamError
from tilebeam.registration import Registry, register

_STATES = {0: "none", 1: "alive", 2: "dead"}
EXECUTORS = ("thread", "process")


@dataclass(frozen=True)
class TiledTensor:
    """A tensor that a repacked file holds as tiles.

    Attributes:
        name: as in the file.
        type: enum tb_type.
        ne: shape, ggml order, 4 numbers.
        offset: bytes from the start of the file.
    """

    name: str
    type: int
    ne: tuple[int, int, int, int]
    offset: int


@cache
def _ffi() -> FFI:
    ffi = FFI()
    ffi.cdef(declarations([_paths.header("control.h", "backend/plugin/control.h")]))
    return ffi


class Control:
    """The functions of one registered plugin. All are thread-safe."""

    def __init__(self, registry: Registry) -> None:
        self._ffi = _ffi()
        for name in ("announce", "tiled_count", "get_options", "configure", "status", "last_error"):
            address = registry.address(f"tilebeam_{name}")
            setattr(self, f"_{name}", self._ffi.cast(f"tilebeam_{name}_t", address))

    _announce: Any
    _tiled_count: Any
    _get_options: Any
    _configure: Any
    _status: Any
    _last_error: Any

    def last_error(self) -> str:
        """The last failure as a sentence, "" if there was none."""
        return self._text(self._last_error())

    @contextmanager
    def announced(self, path: str, tensors: Sequence[TiledTensor]) -> Iterator[None]:
        """While in force, the load that this thread makes maps `path` with these tensors as tiles.

        Raises:
            TilebeamError: the plugin does not accept the list.
        """
        ffi = self._ffi
        names = [ffi.new("char[]", t.name.encode("utf-8")) for t in tensors]
        array = ffi.new("tilebeam_tensor[]", len(tensors))
        for item, name, tensor in zip(array, names, tensors, strict=True):
            item.name, item.type, item.offset, item.ne = name, tensor.type, tensor.offset, tensor.ne
        file = ffi.new("char[]", os.fsencode(path))
        manifest = ffi.new("tilebeam_manifest *", {"path": file, "tensors": array, "n_tensors": len(tensors)})
        if self._announce(manifest) != 0:
            raise TilebeamError(f"The plugin refuses {path}: {self.last_error() or 'no reason was given'}")
        try:
            yield
        finally:
            self._announce(ffi.NULL)

    def tiled_count(self, path: str) -> int:
        """Tensors of this file that the device holds as tiles now; -1 if the file cannot be found."""
        return int(self._tiled_count(self._ffi.new("char[]", os.fsencode(path))))

    def options(self) -> dict[str, Any]:
        """The options in force: executor, n_threads, deadline_ms, memory_limit, isa, npud_path, numerics."""
        options = self._options()
        return {
            "executor": EXECUTORS[options.executor],
            "numerics": "fp16" if options.numerics else "int8",
            "n_threads": options.n_threads,
            "deadline_ms": options.deadline_ms,
            "memory_limit": options.memory_limit,
            "isa": self._text(options.isa),
            "npud_path": self._text(options.npud_path),
        }

    def configure(
        self,
        *,
        executor: str | None = None,
        n_threads: int | None = None,
        deadline_ms: int | None = None,
        memory_limit: int | None = None,
        isa: str | None = None,
    ) -> None:
        """Change options for sessions started from now on; n_threads also changes the running one.

        Raises:
            TilebeamError: a value is not accepted.
        """
        options = self._options()
        if executor is not None:
            if executor not in EXECUTORS:
                raise TilebeamError(f"executor must be one of {', '.join(EXECUTORS)}, not {executor!r}.")
            options.executor = EXECUTORS.index(executor)
        if n_threads is not None:
            options.n_threads = n_threads
        if deadline_ms is not None:
            options.deadline_ms = deadline_ms
        if memory_limit is not None:
            options.memory_limit = memory_limit
        if isa is not None:
            options.isa = isa.encode()
        if self._configure(options) != 0:
            raise TilebeamError(f"The NPU cannot be configured so: {self.last_error() or 'no reason was given'}")

    def status(self) -> dict[str, Any]:
        """Everything in tilebeam_status of control.h, with names for the enums."""
        status = self._ffi.new("tilebeam_status *")
        if self._status(status) != 0:
            raise TilebeamError(f"The NPU tells no status: {self.last_error() or 'no reason was given'}")
        result: dict[str, Any] = {}
        for name, _ in self._ffi.typeof("tilebeam_status").fields:
            value = getattr(status, name)
            result[name] = value if isinstance(value, int) else self._text(value)
        result["session"] = _STATES.get(status.session, str(status.session))
        result["executor"] = EXECUTORS[status.executor]
        result["numerics"] = "fp16" if status.numerics else "int8"
        return result

    def _options(self) -> Any:
        options = self._ffi.new("tilebeam_options *")
        if self._get_options(options) != 0:
            raise TilebeamError(f"The NPU tells no options: {self.last_error() or 'no reason was given'}")
        return options

    def _text(self, value: Any) -> str:
        raw = self._ffi.string(value)
        return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


@cache
def control() -> Control:
    """The plugin's functions; registers the plugin first."""
    return Control(register())

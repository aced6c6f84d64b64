"""The plugin's own functions: announce a repacked file, configure the NPU, read its state.

The C declarations come from backend/plugin/control.h itself, so the two cannot drift apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, get_args

from cffi import FFI

from tilebeam import _ext as ggml_ext
from tilebeam._ext.cdef import declarations
from tilebeam.errors import TilebeamError
from tilebeam.native import paths as _paths
from tilebeam.native.npu_options import Executor, Numerics, Softmax
from tilebeam.native.plugin import Registry, register

_STATES = {0: "none", 1: "alive", 2: "dead"}
EXECUTORS: tuple[Executor, ...] = get_args(Executor)
# enum tilebeam_numerics: the matrix arithmetic, and what is added to it.
NUMERICS: dict[str, int] = dict(zip(get_args(Numerics), (0, 1), strict=True))
SOFTMAX: dict[str, int] = dict(zip(get_args(Softmax), (0, 16), strict=True))
DETERMINISTIC = 64
_FUNCTIONS = (  # of the plugin, without the prefix of their names
    *("announce", "loaded", "get_options", "configure", "status", "device_status", "device"),
    *("last_error", "take_error", "trace_start", "trace_stop", "trace_take"),
)


@dataclass(frozen=True)
class AnnouncedTensor:
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


@dataclass(frozen=True)
class LoadResult:
    """The results of one load, whatever other loads and models do meanwhile.

    Attributes:
        announced_tensors: tensors that the devices hold as the tiles that the file was announced to have.
        tiled_tensors: all tensors that they hold as tiles.
        bad_buffers: buffers that no graph can use.
        reason: what went wrong with the first of these, "" if there is none.
    """

    announced_tensors: int
    tiled_tensors: int
    bad_buffers: int
    reason: str


@cache
def _ffi() -> FFI:
    ffi = FFI()
    ffi.cdef(declarations([_paths.header("backend/plugin/control.h")]))
    return ffi


def _numerics(now: int, numerics: str | None, softmax: str | None, deterministic: bool | None) -> int:
    """Replace parts of the field of tilebeam_options."""
    parts = _arithmetic(now)
    for name, value, known in (("numerics", numerics, NUMERICS), ("softmax", softmax, SOFTMAX)):
        if value is not None and value not in known:
            raise TilebeamError(f"{name} must be one of {', '.join(known)}, not {value!r}.")
    alike = parts["deterministic"] if deterministic is None else deterministic
    return NUMERICS[numerics or parts["numerics"]] | SOFTMAX[softmax or parts["softmax"]] | alike * DETERMINISTIC


def _arithmetic(value: int) -> dict[str, Any]:
    """Name the field's parts."""
    return {
        "numerics": next(name for name, v in NUMERICS.items() if v == value & 15),
        "softmax": next(name for name, v in SOFTMAX.items() if v == value & ~15 & ~DETERMINISTIC),
        "deterministic": bool(value & DETERMINISTIC),
    }


class Control:
    """The functions of one registered plugin. All are thread-safe."""

    def __init__(self, registry: Registry) -> None:
        self._ffi = _ffi()
        self._call = SimpleNamespace()
        for name in _FUNCTIONS:
            address = registry.address(f"tilebeam_{name}")
            setattr(self._call, name, self._ffi.cast(f"tilebeam_{name}_t", address))

    def last_error(self) -> str:
        """Return the last failure as a sentence, "" if there was none."""
        return self._text(self._call.last_error())

    def take_error(self) -> str:
        """Return the last failure that this thread met since its last call, "" if it met none."""
        return self._text(self._call.take_error())

    @contextmanager
    def announced(self, path: str | None = None, tensors: Sequence[AnnouncedTensor] = ()) -> Iterator[None]:
        """Announce a load that this thread makes meanwhile, and on which `loaded` reports. It maps `path` with these
        tensors as tiles; without a path it is the load of an ordinary file.

        Raises:
            TilebeamError: the plugin does not accept the list.
        """
        ffi = self._ffi
        names = [ffi.new("char[]", t.name.encode("utf-8")) for t in tensors]
        array = ffi.new("tilebeam_tensor[]", len(tensors))
        for item, name, tensor in zip(array, names, tensors, strict=True):
            item.name, item.type, item.offset, item.ne = name, tensor.type, tensor.offset, tensor.ne
        file = ffi.NULL if path is None else ffi.new("char[]", os.fsencode(path))
        manifest = ffi.new("tilebeam_manifest *", {"path": file, "tensors": array, "n_tensors": len(tensors)})
        if self._call.announce(manifest) != 0:
            raise TilebeamError(f"The plugin refuses {path}: {self.last_error() or 'no reason was given'}")
        try:
            yield
        finally:
            self._call.announce(ffi.NULL)

    def loaded(self) -> LoadResult:
        """Return what this thread's load has made so far. Only while one is announced."""
        load = self._ffi.new("tilebeam_load *")
        if self._call.loaded(load) != 0:
            raise TilebeamError("No load is announced on this thread.")
        return LoadResult(load.announced_tensors, load.tiled_tensors, load.bad_buffers, self._text(load.reason))

    def options(self) -> dict[str, Any]:
        """Return the options in force, by the names of `configure`, and npud_path.

        memory_limit has an entry per device, in bytes of address space, 0 for none.
        """
        options = self._options()
        return {
            "executor": EXECUTORS[options.executor],
            **_arithmetic(options.numerics),
            "n_threads": options.n_threads,
            "deadline_ms": options.deadline_ms,
            "memory_limit": list(options.memory_limit),
            "isa": self._text(options.isa),
            "npud_path": self._text(options.npud_path),
        }

    def configure(
        self,
        *,
        executor: str | None = None,
        n_threads: int | None = None,
        deadline_ms: int | None = None,
        memory_limit: int | Sequence[int] | None = None,
        isa: str | None = None,
        numerics: str | None = None,
        softmax: str | None = None,
        deterministic: bool | None = None,
    ) -> None:
        """Change options for sessions started from now on; n_threads, numerics and softmax also change those that run,
        deterministic is for contexts made from now on.

        memory_limit is in bytes, 0 for none: one number for all devices, or a list whose last entry counts for all
        further devices.

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
            options.memory_limit = self.limits(memory_limit)
        if isa is not None:
            options.isa = isa.encode()
        options.numerics = _numerics(options.numerics, numerics, softmax, deterministic)
        if self._call.configure(options) != 0:
            raise TilebeamError(f"Invalid NPU options: {self.last_error() or 'no reason was given'}")

    def trace_start(self, most_records: int) -> None:
        """Trace all graphs from now on; what was collected before is forgotten."""
        self._call.trace_start(most_records)

    def trace_stop(self) -> None:
        """Trace no more; what was collected stays until `trace_take`."""
        self._call.trace_stop()

    def trace_take(self) -> tuple[bytearray, int, int]:
        """Take all records: tb_trace_record structs as bytes; how many were lost, and how many damaged."""
        size, chunk = ggml_ext.ffi.sizeof("tb_trace_record"), 65536
        lost, damaged = self._ffi.new("uint64_t *"), self._ffi.new("uint64_t *")
        room = self._ffi.new("char[]", size * chunk)
        records = bytearray()
        while n := self._call.trace_take(room, chunk, lost, damaged):
            records += self._ffi.buffer(room)[: n * size]
        return records, int(lost[0]), int(damaged[0])

    def status(self) -> dict[str, Any]:
        """Return everything in tilebeam_status of control.h, and what `device_status` says of HMX0."""
        status = self._ffi.new("tilebeam_status *")
        if self._call.status(status) != 0:
            raise TilebeamError(f"The NPU's status cannot be read: {self.last_error() or 'no reason was given'}")
        return {**self.device_status(0), **self._fields(status), **_arithmetic(status.numerics)}

    def device_status(self, index: int) -> dict[str, Any]:
        """Return everything in tilebeam_device_status of control.h, with names for the enums. Starts no session.

        Raises:
            TilebeamError: there is no such device.
        """
        status = self._ffi.new("tilebeam_device_status *")
        if not 0 <= index < self.max_devices or self._call.device_status(index, status) != 0:
            raise TilebeamError(f"Invalid device index {index}: devices are HMX0 to HMX{self.max_devices - 1}.")
        return self._fields(status)

    def devices(self) -> list[dict[str, Any]]:
        """Return `device_status` of HMX0, and of other devices that have had a session."""
        every = (self.device_status(i) for i in range(self.max_devices))
        return [d for d in every if d["index"] == 0 or d["sessions"]]

    def device(self, index: int) -> int:
        """Return the ggml_backend_dev_t of a device, for llama_model_params.devices."""
        return int(self._ffi.cast("uintptr_t", self._call.device(index)))

    @property
    def max_devices(self) -> int:
        """The number of devices that there can be."""
        return len(self._ffi.new("tilebeam_options *").memory_limit)

    def limits(self, memory_limit: int | Sequence[int]) -> list[int]:
        """Make a limit per device, as `configure` understands its argument."""
        given = [memory_limit] if isinstance(memory_limit, int) else list(memory_limit)
        if not given or any(not 0 <= n < 2**64 for n in given):
            raise TilebeamError(f"memory_limit must be bytes, 0 for none, or a list of them, not {memory_limit!r}.")
        return (given + [given[-1]] * self.max_devices)[: self.max_devices]

    def _fields(self, status: Any) -> dict[str, Any]:
        """Convert a status struct to a dict: numbers, texts, and names for `session` and `executor`."""
        result: dict[str, Any] = {}
        for name, _ in self._ffi.typeof(status).item.fields:
            value = getattr(status, name)
            result[name] = value if isinstance(value, int) else self._text(value)
        if "session" in result:
            result["session"] = _STATES.get(status.session, str(status.session))
            result["executor"] = EXECUTORS[status.executor]
        return result

    def _options(self) -> Any:
        options = self._ffi.new("tilebeam_options *")
        if self._call.get_options(options) != 0:
            raise TilebeamError(f"The NPU's options cannot be read: {self.last_error() or 'no reason was given'}")
        return options

    def _text(self, value: Any) -> str:
        raw = self._ffi.string(value)
        return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


@cache
def control() -> Control:
    """Return the plugin's functions; registers the plugin first."""
    return Control(register())

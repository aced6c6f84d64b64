"""Small graphs over float vectors, and both ways to run them: the executor itself, and a session with its channel."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from op_codes import F32, I32, OPS, float_param
from tilebeam._ext import ffi as contract
from tilebeam._ext import lib as contract_lib
from tilebeam.native import executor as _npu
from tilebeam.native import paths as _paths

FFI, LIB = _npu.load()
OK = contract.typeof("enum tb_status").relements["TB_OK"]
STATUS: dict[str, int] = dict(contract.typeof("enum tb_status").relements)
REQUEST = dict(contract.typeof("enum tb_request_kind").relements)
NO_BUFFER = 0xFFFFFFFF
MAX_SRC = contract_lib.TB_MAX_SRC


@dataclass(frozen=True)
class Vec:
    """`n` contiguous elements at byte `offset` of a buffer; `rows` of them one after the other."""

    offset: int
    n: int
    rows: int = 1
    buffer: int = 0
    kind: int = F32

    def put(self, t: Any) -> None:
        t.buffer, t.type, t.offset = self.buffer, self.kind, self.offset
        t.ne = [self.n, self.rows, 1, 1]
        size = 8 if self.kind == 4 else 4
        t.nb = [size, size * self.n, size * self.n * self.rows, size * self.n * self.rows]


@dataclass(frozen=True)
class Op:
    """One op of a graph; float params are stored as float32 bits."""

    name: str
    dst: Vec
    src: Sequence[Vec]
    params: tuple[float | int, ...] = ()
    tag: int = 0
    label: str = ""

    def put(self, op: Any) -> None:
        op.code = OPS[self.name]
        op.n_src = len(self.src)
        op.tag = self.tag
        op.name = self.label.encode()
        self.dst.put(op.dst)
        for i in range(MAX_SRC):
            if i < len(self.src):
                self.src[i].put(op.src[i])
            else:
                op.src[i].buffer = NO_BUFFER
        for i, value in enumerate(self.params):
            op.params[i] = float_param(value) if isinstance(value, float) else value


def add(dst: Vec, a: Vec, b: Vec, **kw: Any) -> Op:
    return Op("ADD", dst, (a, b), **kw)


def mul(dst: Vec, a: Vec, b: Vec, **kw: Any) -> Op:
    return Op("MUL", dst, (a, b), **kw)


def scale(dst: Vec, a: Vec, factor: float, bias: float = 0.0, **kw: Any) -> Op:
    return Op("SCALE", dst, (a,), (float(factor), float(bias)), **kw)


def get_rows(dst: Vec, rows: Vec, indices: Vec, **kw: Any) -> Op:
    assert indices.kind == I32
    return Op("GET_ROWS", dst, (rows, indices), **kw)


def graph(ops: Sequence[Op]) -> Any:
    """A `tb_op[]`; never empty memory, so that its address is valid."""
    array = FFI.new("tb_op[]", max(len(ops), 1))
    for i, op in enumerate(ops):
        op.put(array[i])
    return array


@dataclass(frozen=True)
class Outcome:
    """What a call reported."""

    status: int
    op_index: int
    why: str

    @property
    def name(self) -> str:
        return {value: name for name, value in STATUS.items()}[self.status]


class Executor:
    """The executor alone (`tb_npu`), as a context. All its threads are at work unless `hands` says otherwise."""

    def __init__(self, threads: int = 1, isa: str = "", limit: int = 0, hands: int | None = None) -> None:
        self.npu = LIB.tb_npu_create_limited(threads, isa.encode(), limit)
        assert self.npu != FFI.NULL
        LIB.tb_npu_set_hands(self.npu, threads if hands is None else hands)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        LIB.tb_npu_free(self.npu)

    def map(self, buffer: int, array: NDArray[Any], writable: bool = True) -> int:
        return int(LIB.tb_npu_map(self.npu, buffer, FFI.cast("void *", array.ctypes.data), array.nbytes, writable))

    def unmap(self, buffer: int) -> int:
        return int(LIB.tb_npu_unmap(self.npu, buffer))

    def run(self, ops: Sequence[Op] | Any) -> Outcome:
        array = graph(ops) if isinstance(ops, list | tuple) else ops
        reply = FFI.new("tb_reply *")
        status = LIB.tb_npu_run(self.npu, array, len(ops), reply)
        assert status == reply.status
        return Outcome(status, reply.op_index, FFI.string(reply.why).decode())


class SharedArray:
    """Floats in a memory file, to be mapped by a session."""

    def __init__(self, n: int) -> None:
        self.fd = os.memfd_create("tilebeam-test", os.MFD_CLOEXEC)
        self.size = n * 4
        os.ftruncate(self.fd, self.size)
        self._map = mmap.mmap(self.fd, self.size)
        self.floats = np.frombuffer(self._map, np.float32)

    def close(self) -> None:
        del self.floats
        self._map.close()
        os.close(self.fd)


class Session:
    """A session (`tb_session`), as a context. `process` selects the executor, as in session_api.h."""

    def __init__(self, process: int, **options: Any) -> None:
        o = FFI.new("tb_session_options *")
        keep = [FFI.new("char[]", str(_paths.native("tilebeam-npud")).encode())]
        o.process, o.npud_path = process, keep[0]
        for name, value in options.items():
            if isinstance(value, str):
                keep.append(FFI.new("char[]", value.encode()))
                value = keep[-1]
            setattr(o, name, value)
        self._result = FFI.new("tb_session_result *")
        self.handle = LIB.tb_session_start(o, self._result)
        if self.handle == FFI.NULL:
            raise RuntimeError(self._outcome().why)

    def _outcome(self) -> Outcome:
        r = self._result
        return Outcome(r.status, r.op_index, FFI.string(r.why).decode())

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        if self.handle != FFI.NULL:
            LIB.tb_session_stop(self.handle)
            self.handle = FFI.NULL

    def map_fd(self, fd: int, size: int, offset: int = 0, writable: bool = True) -> tuple[Outcome, int]:
        buffer = FFI.new("uint32_t *", NO_BUFFER)
        LIB.tb_session_map(self.handle, fd, offset, size, writable, buffer, self._result)
        return self._outcome(), int(buffer[0])

    def map(self, array: SharedArray, writable: bool = True) -> int:
        """Map all of a shared array; its buffer id."""
        outcome, buffer = self.map_fd(array.fd, array.size, writable=writable)
        assert outcome.status == OK, outcome.why
        return buffer

    def unmap(self, buffer: int) -> Outcome:
        LIB.tb_session_unmap(self.handle, buffer, self._result)
        return self._outcome()

    def compute(self, ops: Sequence[Op], serial: int = 0) -> Outcome:
        return self.compute_array(graph(ops), len(ops), serial)

    def compute_array(self, ops: Any, n_ops: int, serial: int = 0) -> Outcome:
        """Compute a `tb_op` array."""
        LIB.tb_session_compute(self.handle, ops, n_ops, serial, self._result)
        return self._outcome()

    def noop(self) -> Outcome:
        LIB.tb_session_noop(self.handle, self._result)
        return self._outcome()

    def set_threads(self, n: int) -> Outcome:
        LIB.tb_session_set_threads(self.handle, n, self._result)
        return self._outcome()

    @property
    def pid(self) -> int:
        return int(LIB.tb_session_pid(self.handle))

    @property
    def threads(self) -> int:
        return int(LIB.tb_session_n_threads(self.handle))

    @property
    def isa(self) -> str:
        return str(FFI.string(LIB.tb_session_isa(self.handle)).decode())

    @property
    def alive(self) -> bool:
        return bool(LIB.tb_session_alive(self.handle))

    @property
    def guards(self) -> int:
        return int(LIB.tb_session_guards(self.handle))

    @property
    def counters(self) -> Any:
        counters = FFI.new("tb_session_counters *")
        LIB.tb_session_count(self.handle, counters)
        return counters

    @property
    def channel(self) -> Any:
        return LIB.tb_session_channel(self.handle)

    @property
    def channel_bytes(self) -> Any:
        return FFI.buffer(self.channel, LIB.tb_session_channel_size(self.handle))


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until no thread of the process runs any more."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 20
    for task in Path(f"/proc/{pid}/task").iterdir():
        while (task / "stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < end, "the process does not stop"
            time.sleep(0.001)


@dataclass(frozen=True)
class Possessions:
    """What a process holds of the system, and could leak."""

    descriptors: tuple[str, ...]
    threads: int
    children: tuple[str, ...]
    memory_files: int  # mapped


def possessions() -> Possessions:
    """Those of this process now."""
    files = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            files.append(os.readlink(f"/proc/self/fd/{name}").split(":[")[0])
    tasks = list(Path("/proc/self/task").iterdir())
    return Possessions(
        descriptors=tuple(sorted(f for f in files if not f.startswith("/proc"))),
        threads=len(tasks),
        children=tuple(c for t in tasks for c in (t / "children").read_text().split()),
        memory_files=sum("memfd:tilebeam" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    )


def settled_possessions() -> Possessions:
    """Those of this process once they have stayed the same for a moment: the system forgets a thread a little after it
    was joined, be it one of the test before."""
    now, end = possessions(), time.monotonic() + 10
    while time.monotonic() < end:
        time.sleep(0.05)
        before, now = now, possessions()
        if now == before:
            break
    return now

"""The Hexagon executor for tests that were written for the executor of this process.

`RemoteExecutor` stands in for the C functions of npu_api.h: buffers become memory files, ops go through a session to
tilebeam-npud-hexagon under qemu-hexagon, results come back into the caller's memory. Kernel sets are named "qemu-hvx"
and "qemu-portable". `remote` starts it when a test first wants it; conftest.py stops it behind each file of tests.
"""

from __future__ import annotations

import mmap
import os
import shutil
from dataclasses import dataclass
from functools import cache
from typing import Any

from npu_kit import Session
from tilebeam.native import executor as _npu
from tilebeam.native import paths as _paths

PREFIX = "qemu-"
HEXAGON = 2  # tb_session_options.process


def missing() -> str | None:
    """What the tests need and is not there, None if all is."""
    try:
        _paths.native("tilebeam-npud-hexagon")
    except FileNotFoundError:
        return "tilebeam-npud-hexagon was not built: install clang-19, lld-19 and libc++-19-dev, and build again"
    if shutil.which("qemu-hexagon") is None:
        return "qemu-hexagon was not found: install the package qemu-user"
    return None


def hexagon_session(**options: Any) -> Session:
    """A session of its own with the Hexagon executor."""
    path = options.pop("npud_path", None) or str(_paths.native("tilebeam-npud-hexagon"))
    return Session(HEXAGON, npud_path=path, **options)


@dataclass
class _Mapping:
    """A buffer of the caller, its copy in a memory file, and the session's number for it."""

    base: Any
    size: int
    writable: bool
    fd: int
    view: mmap.mmap
    remote: int


class _Npu:
    """What stands for a `tb_npu *`."""

    def __init__(self, threads: int, isa: str) -> None:
        self.isa = isa
        self.session = hexagon_session(n_threads=threads, isa=isa)
        self.buffers: dict[int, _Mapping] = {}


class RemoteExecutor:
    """As cffi's `lib` for libtilebeam_npu.so: functions that are not replaced are the library's own."""

    def __init__(self) -> None:
        self._ffi, self._lib = _npu.load()
        self._started: dict[tuple[int, str], _Npu] = {}
        self._portable = self._lib.tb_npu_create(1, b"portable")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def close(self) -> None:
        """Stop all sessions."""
        for npu in self._started.values():
            npu.session.stop()
        self._lib.tb_npu_free(self._portable)

    def tb_npu_create(self, threads: int, isa: bytes) -> _Npu:
        key = threads, isa.decode().removeprefix(PREFIX)
        if key not in self._started:
            self._started[key] = _Npu(*key)
        return self._started[key]

    def tb_npu_map(self, npu: _Npu, buffer: int, base: Any, size: int, writable: int) -> int:
        assert buffer not in npu.buffers
        fd = os.memfd_create("tilebeam-test", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        view = mmap.mmap(fd, size)
        view[:] = self._ffi.buffer(base, size)[:]
        outcome, remote = npu.session.map_fd(fd, size, writable=bool(writable))
        assert outcome.status == 0, outcome.why
        npu.buffers[buffer] = _Mapping(base, size, bool(writable), fd, view, remote)
        return 0

    def tb_npu_kernel_name(self, npu: _Npu, op: Any) -> Any:
        """A session does not tell: portable kernels are this library's own; the HVX set's names are not known."""
        if npu.isa == "portable":
            return self._lib.tb_npu_kernel_name(self._portable, op)
        return self._ffi.new("char[]", b"hvx")

    def tb_npu_unmap(self, npu: _Npu, buffer: int) -> int:
        m = npu.buffers.pop(buffer)
        if m.writable:
            self._ffi.memmove(m.base, m.view, m.size)
        outcome = npu.session.unmap(m.remote)
        m.view.close()
        os.close(m.fd)
        return outcome.status

    def tb_npu_run(self, npu: _Npu, ops: Any, n_ops: int, reply: Any) -> int:
        remote = self._ffi.new("tb_op[]", n_ops)
        self._ffi.memmove(remote, ops, self._ffi.sizeof(remote))
        for op in remote:
            for t in (op.dst, *op.src):
                if t.buffer in npu.buffers:
                    t.buffer = npu.buffers[t.buffer].remote
        outcome = npu.session.compute_array(remote, n_ops)
        reply.status = outcome.status
        reply.why = outcome.why.encode()[: len(reply.why) - 1]
        return outcome.status


@cache
def remote() -> RemoteExecutor:
    """The one of this process."""
    return RemoteExecutor()


def stop_remote() -> None:
    """Stop its sessions, if there are any."""
    if remote.cache_info().currsize:
        remote().close()
        remote.cache_clear()

"""What another user of the machine gets to see of texts, cells and processes: nothing. Only root can play two users."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tilebeam
from process_kit import children
from tilebeam import CodeExamples, CompletionOutput
from tilebeam.native.control import control

from bench.lib.synth import preset, write_model

NOBODY = 65534
SECRET = "the secret question of a user " * 8
OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 2, "threads": 1, "executor": "process", "lookup": False}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_another_user(attempts: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What a child gets that is another user: for each attempt the name of its error, or what it gave."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.closerange(writer + 1, 1 << 16)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            for name, attempt in attempts.items():
                try:
                    told = repr(attempt())[:40]
                except OSError as error:
                    told = type(error).__name__
                os.write(writer, f"{name}\t{told}\n".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        told = dict(line.rstrip("\n").split("\t") for line in pipe)
    os.waitpid(child, 0)
    assert told.keys() == attempts.keys()
    return told


def denied(attempts: dict[str, Callable[[], object]]) -> None:
    assert as_another_user(attempts) == dict.fromkeys(attempts, "PermissionError")


def read(path: Path) -> Callable[[], object]:
    return lambda: path.read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("users") / "tiny.gguf", preset("tiny", type="q8_0"))


def attached(pid: int) -> None:
    """Trace a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, pid, None, None) != 0:  # PTRACE_ATTACH
        raise OSError(ctypes.get_errno(), "ptrace")


def taken(pid: int, descriptor: int) -> int:
    """Get a copy of a process's descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    copy: int = libc.syscall(438, os.pidfd_open(pid), descriptor, 0)  # pidfd_getfd
    if copy < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return copy


def test_processes_and_their_memory(model: Path) -> None:
    """The NPU's, that of chat templates, that of programs, and this one."""
    with tilebeam.load(model, **OPTIONS) as lm:
        lm.generate(SECRET, max_tokens=2)
        assert lm.chat_prompt([{"role": "user", "content": SECRET}], template="{{ messages }}").text
        question = f'def f(x):\n    """{SECRET}\n    >>> f(1)\n    1\n    """\n'
        with contextlib.suppress(tilebeam.TilebeamError):  # where programs cannot be confined
            CodeExamples().score(question, [CompletionOutput(0, "    return x", [], "stop", 1)])
        npu = control().status()["npu_pid"]
        there = {os.getpid(), npu, *children(os.getpid())}
        assert len(there) >= 3
        for pid in there:
            proc, tries = Path(f"/proc/{pid}"), dict[str, Callable[[], object]]()
            for fd, about in descriptors(pid).items():
                if "memfd" in about or "tiny.gguf" in about:
                    tries[f"map {fd}"] = lambda path=proc / "fd" / fd: os.open(path, os.O_RDWR)  # type: ignore[misc]
                if "memfd" in about or "socket" in about:
                    tries[f"take {fd}"] = lambda pid=pid, fd=int(fd): taken(pid, fd)  # type: ignore[misc]
            assert pid != npu or any(name.startswith("map") for name in tries)
            tries |= {name: read(proc / name) for name in ("environ", "maps", "mem", "auxv")}
            tries["descriptors"] = lambda proc=proc: os.listdir(proc / "fd")  # type: ignore[misc]
            tries["files"] = lambda proc=proc: os.listdir(proc / "map_files")  # type: ignore[misc]
            tries["signal"] = lambda pid=pid: os.kill(pid, 0)  # type: ignore[misc]
            tries["trace"] = lambda pid=pid: attached(pid)  # type: ignore[misc]
            denied(tries)
            assert b"secret" not in (proc / "cmdline").read_bytes()
            assert named_sockets(pid) == []


def descriptors(pid: int) -> dict[str, str]:
    """What a process has open."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            found[fd] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return found


def named_sockets(pid: int) -> list[str]:
    """Sockets of a process that have a name, which others could connect to."""
    inodes = {about.removeprefix("socket:[").rstrip("]") for about in descriptors(pid).values() if "socket" in about}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [line[7] for line in lines if len(line) > 7 and line[6] in inodes]

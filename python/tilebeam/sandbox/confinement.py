"""Limits of a process that runs what nobody read: memory, CPU time, and the few system calls that computing takes.

A seccomp filter lists what is allowed; all else fails with EPERM: opening files, sockets, new processes and threads,
signals to others, tracing. Only descriptors that are open already can be read and written. Any user may install such a
filter, also inside containers.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 4, 38, 22
_SIGKILL = 9

# Reading and writing what is open, memory, the clock, the process's own signals, the end; no sleep, which takes no CPU
# time. Numbers of system calls.
_ALLOWED = {
    "x86_64": (
        0xC000003E,
        {"read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8, "mmap": 9, "mprotect": 10}
        | {"munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_yield": 24}
        | {"mremap": 25, "madvise": 28, "getpid": 39, "exit": 60, "gettimeofday": 96}
        | {"getrusage": 98, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202, "restart_syscall": 219}
        | {"clock_gettime": 228, "clock_getres": 229, "exit_group": 231, "getrandom": 318}
        | {"rseq": 334},
    ),
    "aarch64": (
        0xC00000B7,
        {"close": 57, "lseek": 62, "read": 63, "write": 64, "fstat": 80, "exit": 93, "exit_group": 94}
        | {"futex": 98, "clock_gettime": 113, "clock_getres": 114}
        | {"sched_yield": 124, "restart_syscall": 128, "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135}
        | {"rt_sigreturn": 139, "getrusage": 165, "gettimeofday": 169, "getpid": 172, "gettid": 178, "brk": 214}
        | {"munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233, "getrandom": 278, "rseq": 293},
    ),
}

# What may be allowed beside that.
_TIMERS = {"x86_64": 38, "aarch64": 103}  # setitimer

# Of classic BPF, as seccomp reads it: load a word of (number, architecture, ..), compare, return.
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _EPERM, _KILL = 0x7FFF0000, 0x00050001, 0x80000000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def limit(memory: int, seconds: int) -> None:
    """Limit this process.

    Args:
        memory: bytes of address space beyond what it has now.
        seconds: of CPU time; then it is killed.
    """
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = int(used.ru_utime + used.ru_stime) + seconds
    for kind, value in (
        (resource.RLIMIT_AS, mapped + memory),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(kind)[1]
        least = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (least, least))
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def confine(*, timers: bool = False) -> None:
    """Allow this process nothing but to compute and to use the descriptors that it has. For good.

    Args:
        timers: it may have itself sent a signal after some time, too.

    Raises:
        OSError: this system takes no such filter.
    """
    known = _ALLOWED.get(platform.machine())
    if known is None:
        raise OSError(f"no list of system calls for {platform.machine()}")
    architecture, calls = known
    numbers = sorted([*calls.values(), *([_TIMERS[platform.machine()]] if timers else [])])
    code = [
        _instruction(_LOAD, 0, 0, 4),
        _instruction(_IF_EQUAL, 1, 0, architecture),
        _instruction(_RETURN, 0, 0, _KILL),
        _instruction(_LOAD, 0, 0, 0),
        *(_instruction(_IF_EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)),
        _instruction(_RETURN, 0, 0, _EPERM),
        _instruction(_RETURN, 0, 0, _ALLOW),
    ]
    raw = ctypes.create_string_buffer(b"".join(code))
    program = _Program(len(code), ctypes.cast(raw, ctypes.c_void_p))
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(program))


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _prctl(option: int, *values: int) -> None:
    arguments = [ctypes.c_ulong(v) for v in (*values, 0, 0, 0, 0)[:4]]
    if _LIBC.prctl(option, *arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


_LIBC = ctypes.CDLL(None, use_errno=True)

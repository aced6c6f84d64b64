"""The process that programs and judges are forked from, so that each begins in milliseconds with its libraries loaded.

It holds no program and no test, and nothing of one request is there at the next: what it is sent is a few numbers and
descriptors. A child reads what it is to do from the descriptors that it was given, confined (see `confinement`), and
has no others. One descriptor stays here, the control: when its other side is shut down, or its owner dies, the child is
killed; at the child's end it says how that came.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import random
import select
import signal
import socket
import sys
import warnings
from collections.abc import Sequence

from tilebeam.sandbox import judge, program
from tilebeam.sandbox.confinement import confine, limit
from tilebeam.sandbox.plain_data import END, REQUEST

# Programs cannot open files, so what they may import is imported here, before they exist.
_MODULES = (
    "_strptime abc array base64 binascii bisect calendar cmath collections collections.abc contextlib copy dataclasses "
    "datetime decimal difflib enum fractions functools hashlib heapq io itertools json keyword locale math numbers "
    "operator pprint queue random re secrets statistics string struct textwrap time traceback types typing unicodedata "
    "warnings encodings.ascii encodings.latin_1 encodings.utf_16 encodings.utf_32 encodings.idna"
)
# Parts of libraries that are for others than programs, take long, warn or print.
_LEFT_OUT = frozenset(
    {
        *("conftest", "benchmarks", "testing", "tests"),
        *("numpy._pyinstaller", "numpy.core", "numpy.distutils", "numpy.f2py", "numpy.matlib", "numpy.typing"),
        *("sympy.galgebra", "sympy.parsing.latex", "sympy.this", "sympy.utilities._compilation"),
        *(f"sympy.physics.{name}" for name in ("biomechanics", "control", "hep", "mechanics", "optics", "quantum")),
        *(f"sympy.utilities.{name}" for name in ("autowrap", "pytest", "randtest", "runtests", "tmpfiles")),
    }
)


def load(library: str) -> None:
    """Import a library with all of its modules, many of which are else imported when a function needs them."""
    try:
        packages = [importlib.import_module(library)]
    except Exception:  # not installed, or broken
        return
    while packages:
        package = packages.pop()
        for found in pkgutil.iter_modules(package.__path__):
            name = f"{package.__name__}.{found.name}"
            if not _LEFT_OUT.isdisjoint((found.name, name)) or name.endswith("_doc"):
                continue
            with contextlib.suppress(Exception):
                module = importlib.import_module(name)
                packages += [module] if found.ispkg else []


def serve(asked: socket.socket) -> None:
    """Fork children for requests until nobody can ask any more; they end with this process."""
    woken, wakes = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])  # who started this may have blocked it
    poll = select.poll()
    poll.register(asked, select.POLLIN)
    poll.register(woken, select.POLLIN)
    controls: dict[int, int] = {}  # by the child's number
    while True:
        for ready, _ in poll.poll():
            if ready == asked.fileno():
                request, got, *_ = socket.recv_fds(asked, REQUEST.size, 3)
                if not request:
                    return
                # Where there is no memory, process or descriptor left, the control is closed without a word.
                with contextlib.suppress(OSError, ValueError):
                    control, channel, other = got
                    controls[_child(channel, other, *REQUEST.unpack(request))] = control
                    poll.register(control, select.POLLIN)
                for descriptor in set(got) - set(controls.values()):
                    os.close(descriptor)
            elif ready == woken:
                os.read(woken, 4096)
            else:
                os.kill(next(pid for pid, control in controls.items() if control == ready), signal.SIGKILL)
                poll.unregister(ready)
        while controls:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if not pid:
                break
            control = controls.pop(pid)
            with contextlib.suppress(KeyError):  # already
                poll.unregister(control)
            with contextlib.suppress(OSError), socket.socket(fileno=control) as end:
                end.sendall(END.pack(status, used.ru_utime + used.ru_stime))


def _child(channel: int, other: int, judges: bool, confined: bool, seconds: int, memory: int) -> int:
    """Fork a child that has these descriptors and no others, limited and confined."""
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard, descriptor in enumerate((nothing, nothing if judges else other, nothing)):
            os.dup2(descriptor, standard)
        kept = sorted((channel, other)) if judges else [channel]
        for low, high in zip([2, *kept], [*kept, 1 << 16], strict=True):
            os.closerange(low + 1, high)
        random.seed(0)  # the same program does the same again
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        gc.enable()
        limit(memory, seconds)
        if confined:
            sys.path[:] = []
            confine()
        if judges:
            judge.main(channel, other)
        else:
            program.main(channel)
    finally:
        os._exit(0)


def unconfined() -> str:
    """Tell why children cannot be confined here, "" if they can: tried, not assumed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            limit(1 << 29, 10)
            confine()
            try:
                os.open("/", os.O_RDONLY)
                os.write(writing, b"the filter has no effect")
            except PermissionError:
                os.write(writing, b"+")
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode()[:300])
        finally:
            os._exit(0)
    os.close(writing)
    said = b"" if not select.select([reading], [], [], 10)[0] else os.read(reading, 4096)
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "" if said == b"+" else said.decode() or "the filter ends the process"


def main(libraries: Sequence[str]) -> None:
    """Load what programs may import, and serve.

    Args:
        libraries: loaded where they are installed, beside modules of Python.
    """
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.set_int_max_str_digits(0)
    for name in _MODULES.split():
        importlib.import_module(name)
    with warnings.catch_warnings(action="ignore"):
        for name in libraries:
            load(name)
    sys.stdout.flush()
    os.write(replies, json.dumps({"ready": True, "unconfined": unconfined()}).encode() + b"\n")
    os.close(replies)
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, all pages in each child
    gc.disable()
    with socket.socket(fileno=0) as asked:
        serve(asked)


if __name__ == "__main__":
    main(sys.argv[1:])

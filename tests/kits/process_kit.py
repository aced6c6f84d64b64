"""Programs that tests start: Python and the commands, with the packages under test importable from anywhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def environment(**changes: str) -> dict[str, str]:
    """This process' environment with its module search path, and changes."""
    paths = [os.path.abspath(p) for p in sys.path if p]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | changes


def command(program: str, *args: str | Path) -> list[str]:
    """How to run `tilebeam` or `gguf-repack` with the Python of the tests."""
    modules = {
        "tilebeam": "tilebeam.cli.main",
        "gguf-repack": "tilebeam.gguf.cli",
    }
    return [sys.executable, "-m", modules[program], *map(str, args)]


def run(program: str, *args: str | Path, timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run one of them to its end; its output as text."""
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()} | options
    return subprocess.run(command(program, *args), text=True, timeout=timeout, check=False, **settings)


def start(program: str, *args: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Start one of them. It hears interrupts even if the tests run in the background of a shell, which ignores them."""
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment()} | options
    return subprocess.Popen(command(program, *args), text=True, preexec_fn=_hear_interrupts, **settings)


def children(pid: int) -> list[int]:
    """Processes that one has started, whichever of its threads did."""
    found = list[int]()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found += map(int, file.read_text().split())
    return found


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def python(code: str, *args: str | Path, timeout: float = 300, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run Python code to its end; its output as text."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment(**changes),
    )

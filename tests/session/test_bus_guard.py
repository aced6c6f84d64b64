"""SIGBUS of mapped model files beside a program's own handlers: each gets every signal that is not ours."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "backend" / "base"
ROUNDS = 50
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
ENV = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}  # the program is built without a sanitizer


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    target = tmp_path_factory.mktemp("native") / "bus-handlers"
    sources = [ROOT / "tests" / "native" / "bus_handlers.cpp", BASE / "bus_guard.cpp", BASE / "fork.cpp"]
    command = [COMPILER, "-std=c++17", "-O1", "-Wall", "-Werror", "-pthread", f"-I{BASE}", *sources, "-o", target]
    subprocess.run(list(map(str, command)), check=True)
    return target


def run(program: Path, scenario: str) -> tuple[int, list[tuple[int, int]]]:
    """Exit code (negative: a signal), and the calls of the early and the late handler as they grew."""
    done = subprocess.run([program, scenario], capture_output=True, text=True, timeout=60, check=False, env=ENV)
    counts = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    return done.returncode, [(c[0], c[1]) for c in counts]


@pytest.mark.parametrize("scenario", ["jump", "own-stack"])
def test_a_handler_that_jumps_out_gets_every_fault(program: Path, scenario: str) -> None:
    """siglongjmp never comes back to the handler in front, however deep in the stack the fault was."""
    assert run(program, scenario) == (0, [(i, 0) for i in range(ROUNDS + 1)])


def test_a_handler_gets_every_signal_that_is_sent(program: Path) -> None:
    """By kill() and raise()."""
    assert run(program, "kill") == (0, [(2 * ROUNDS, 0)])


def test_a_handler_installed_later_calls_the_one_before_it(program: Path) -> None:
    """That is ours, which is in front of it again: the program's first handler is the one before that."""
    assert run(program, "late") == (0, [(i, i) for i in range(ROUNDS + 1)])


def test_a_handler_installed_later_puts_back_the_one_before_it(program: Path) -> None:
    """As Python's faulthandler does: it is gone then, and the program's first handler goes on."""
    assert run(program, "put-back") == (0, [(i, min(i, 1)) for i in range(ROUNDS + 1)])


def test_two_that_both_want_to_be_in_front(program: Path) -> None:
    code, counts = run(program, "rivals")
    assert code == 0
    assert [early for early, _ in counts] == list(range(ROUNDS + 1))
    assert counts[-1][1] >= ROUNDS


@pytest.mark.parametrize(
    ("scenario", "code", "calls"),
    [("ignored", 0, 0), ("ignored-fault", -signal.SIGBUS, 0), ("default", -signal.SIGBUS, 0)],
)
def test_without_a_handler_the_system_decides(program: Path, scenario: str, code: int, calls: int) -> None:
    """A signal that is sent can be ignored, a fault cannot."""
    got, counts = run(program, scenario)
    assert got == code
    assert all(c == (calls, 0) for c in counts)


def test_a_handler_for_one_signal_has_had_it(program: Path) -> None:
    """SA_RESETHAND: the fault, which happens again, ends the program the second time."""
    assert run(program, "once") == (-signal.SIGBUS, [(0, 0)])

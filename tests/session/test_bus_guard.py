"""SIGBUS of mapped model files beside a program's own handlers: each gets every signal that is not ours."""

from __future__ import annotations

import signal
from pathlib import Path

import native_kit
import pytest

ROUNDS = 50


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    return native_kit.build("bus_handlers.cpp", ["base/bus_guard.cpp", "base/fork.cpp"], folder)


def run(program: Path, scenario: str) -> tuple[int, list[tuple[int, int]]]:
    """Exit code (negative: a signal), and the calls of the early and the late handler as they grew."""
    done = native_kit.run(program, scenario)
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
    """That is ours, which calls the program's first handler but for the page that is ours."""
    assert run(program, "late") == (0, [*((i, i) for i in range(ROUNDS)), (ROUNDS, ROUNDS + 1)])


def test_a_handler_installed_later_puts_back_the_one_before_it(program: Path) -> None:
    """As Python's faulthandler does: it is gone then, and the program's first handler goes on."""
    assert run(program, "put-back") == (0, [(i, min(i, 1)) for i in range(ROUNDS + 1)])


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


def test_a_mapping_in_the_place_of_a_part_of_another(program: Path) -> None:
    """The older one, of which that part was given back, has lost nothing; all who guard the newer one learn of it."""
    assert run(program, "hole") == (0, [(0, 1), (1, 1)])

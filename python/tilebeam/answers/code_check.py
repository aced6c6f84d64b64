"""Whether a program that a model wrote does what tests say. It runs in a process of its own, which can neither open
files nor sockets nor start or signal processes, and has little time and memory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from tilebeam.errors import TilebeamError
from tilebeam.sandbox.worker_process import WorkerProcess

SECONDS = 5
PATIENCE = 10  # times as long by the clock, where a machine is busy or a program waits for what never comes
MEMORY = 512 << 20  # bytes for a program, beyond what the interpreter has


@dataclass(frozen=True)
class Test:
    """One test of a program.

    Attributes:
        source: statements that raise if the program is wrong; with `expected`, an expression. They call the function
            by its name, or as `candidate`.
        expected: the expression's value, as Python writes it.
    """

    __test__ = False  # for pytest

    source: str
    expected: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What tests said.

    Attributes:
        passed: for each test.
        error: why the program did not begin, "" if it did.
    """

    passed: tuple[bool, ...]
    error: str


def run_tests(
    program: str,
    function: str,
    tests: Sequence[Test],
    *,
    setup: str = "",
    seconds: int = SECONDS,
    unsafe: bool = False,
) -> Verdict:
    """Run a program and ask its function what tests ask. Safe to call from any thread.

    The tests run in another process than the program: arguments and results must be plain data (numbers, texts, lists,
    tuples, sets, dicts ..).

    Args:
        program: source that defines the function.
        function: its name.
        tests: they run one after the other until time is up; those after that have failed.
        setup: source that the tests may use, such as helpers in front of the function; ignored if it cannot run.
        seconds: CPU time of the program, and of the tests.
        unsafe: run the program even where it cannot be confined.

    Raises:
        TilebeamError: the program cannot be confined here, and `unsafe` is false.
    """
    need_confinement(unsafe=unsafe)
    first = {
        "program": program,
        "entry": function,
        "seconds": seconds,
        "patience": PATIENCE * seconds,
        "memory": MEMORY,
    }
    first["confined"] = not _WORKER.greeting()["unconfined"]
    then = {"setup": setup, "tests": [_as_json(test) for test in tests]}
    raw = [json.dumps(part).encode() for part in (first, then)]
    reply = _WORKER.ask(f"{len(raw[0])} {len(raw[1])}\n".encode() + b"".join(raw), 60 + 2 * PATIENCE * seconds)
    if reply is None:
        raise TilebeamError("The process that runs programs ended or does not answer: try again.")
    return Verdict(tuple(reply["passed"]), reply["error"])


def need_confinement(*, unsafe: bool = False) -> None:
    """Make sure that programs can be run safely.

    Raises:
        TilebeamError: they cannot, and `unsafe` is false.
    """
    reason = _WORKER.greeting()["unconfined"]
    if reason and not unsafe:
        raise TilebeamError(
            f"Programs that a model writes cannot be confined on this machine ({reason}): seccomp filters are missing. "
            "Run this elsewhere, or in a virtual machine that may be lost, with --unsafe-code (unsafe=True)."
        )


def _as_json(test: Test) -> dict[str, str]:
    return {"source": test.source} | ({} if test.expected is None else {"expected": test.expected})


# Programs can read the variables: they get those that Python needs to start. Equal programs behave alike.
_VARIABLES = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
_WORKER = WorkerProcess("tilebeam.answers.code_worker", "programs", _VARIABLES | {"PYTHONHASHSEED": "0"})

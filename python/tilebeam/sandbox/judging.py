"""Tests of a program that a model wrote. It runs confined, and the tests in another process."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilebeam.sandbox.child import SECONDS, Child, attempt, need_confinement
from tilebeam.sandbox.plain_data import as_json, frames


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
    """The result of tests.

    Attributes:
        passed: for each test.
        error: why the program was not judged by its results, "" if it was: it did not define the function, or its
            process said what nobody had asked. Then no test has passed.
    """

    passed: tuple[bool, ...]
    error: str


def run_tests(
    program: str, function: str, tests: Sequence[Test], *, setup: str = "", seconds: int = SECONDS, unsafe: bool = False
) -> Verdict:
    """Run a program and ask its function what tests ask. May be called from many threads.

    The tests run in another process than the program: arguments and results must be plain data (numbers, texts, lists,
    tuples, sets, dicts, dates ..); results may also be arrays and numbers of numpy and sympy, which become lists and
    numbers, and iterators.

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
    confined = need_confinement(unsafe=unsafe)
    asked = {
        "function": function,
        "setup": setup,
        "tests": [{"source": t.source} | ({} if t.expected is None else {"expected": t.expected}) for t in tests],
    }
    return attempt(lambda: _once(program, asked, seconds, confined=confined))


def _once(program: str, asked: dict[str, Any], seconds: int, *, confined: bool) -> Verdict:
    here, there = socket.socketpair()  # the judge's end and the program's
    ours, theirs = socket.socketpair()  # what the judge says, which the program's process never has
    runs = partial(Child, confined=confined, seconds=seconds)
    with here, there, ours, theirs, open(os.devnull, "wb") as nothing, runs(program, there, nothing) as runner:
        there.close()
        here.settimeout(runner.patience)
        here.sendall(as_json({"source": program, "function": asked["function"]}))
        here.setblocking(True)  # as the judge finds it
        sources = "\n".join([asked["setup"], *(test["source"] for test in asked["tests"])])
        with runs(sources, here, theirs, judges=True) as judge:
            here.close()
            theirs.close()
            ours.settimeout(judge.patience)
            ours.sendall(as_json(asked))
            (said,) = judge.hear({ours: 4096 + 100 * len(asked["tests"])})
    return _verdict(said, len(asked["tests"]))


def _verdict(said: bytes, tests: int) -> Verdict:
    """Sum up the judge's messages."""
    passed, error = [False] * tests, "it ended, or took too long"
    for message in map(json.loads, frames(said)):
        if "error" in message:
            error = message["error"]
            break
        error = ""
        if "test" in message:
            passed[message["test"]] = message["passed"]
    return Verdict((False,) * tests if error else tuple(passed), error)

"""Programs that run once: what they print, what they come to, how they fail, within which limits."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
from tilebeam import TilebeamError
from tilebeam.sandbox import Run, child, run


def text(code: str, **options: object) -> str:
    """What a notebook shows."""
    return run(code, **options).text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("", ""),
        ("print(1)\nprint('a', 2, sep='-', end='')", "1\na-2"),
        ("x = 6\nx * 7", "42"),
        ("print(1)\n'a\\n'", "1\n'a\\n'"),
        ("None", ""),
        ("print(3); 4; # end", "3\n4"),
        ("def f():\n    return 5\n\nif __name__ == '__main__':\n    print(f())", "5"),
        ("import sys\nsys.stdout.write('a')\nsys.stdout.buffer.write(b'b\\n')\nsys.stderr.write('c')", "ab\n1"),
        ("print('ä😀\\0')", "ä😀\0"),
        ("print('\\ud800')", "\\ud800"),
        ("print(1)\nraise SystemExit\nprint(2)", "1"),
        ("exit()", ""),
        ("2 ** 20000 % 10 ** 9", str(2**20000 % 10**9)),
        ("print(input())", 'Traceback (most recent call last):\n  File "<program>", line 1, in <module>\n'
         "    print(input())\nEOFError: EOF when reading a line"),
    ],
)  # fmt: skip
def test_what_a_notebook_shows(code: str, shown: str) -> None:
    assert text(code) == shown


def test_errors_are_the_end_of_a_traceback() -> None:
    code = "print('before')\ndef f(x):\n    return 1 / x\n\nf(0)\n"
    got = run(code)
    assert (got.output, got.value) == ("before\n", None)
    assert got.error == (
        'Traceback (most recent call last):\n  File "<program>", line 5, in <module>\n    f(0)\n'
        '  File "<program>", line 3, in f\n    return 1 / x\nZeroDivisionError: division by zero'
    )
    assert run("x = (1,\ny").error.splitlines()[-1] == "SyntaxError: '(' was never closed"
    assert run("def f(n): return f(n)\nf(1)").error.count("line 1, in f") == 4
    library = run("import json\njson.loads('{')").error
    assert library.count("File") == 1
    assert library.splitlines()[-1].startswith("json.decoder.JSONDecodeError: ")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os._exit(0)", "RuntimeError: the program ended its process"),
        ("import ctypes; ctypes.string_at(0)", "RuntimeError: the program crashed (Segmentation fault)"),
        ("class A:\n    def __repr__(self): raise ValueError('no')\nA()", "ValueError: no"),
        ("class A:\n    def __repr__(self): return 1\nA()", "TypeError: __repr__ returned non-string (type int)"),
        ("class E(Exception):\n    def __str__(self): raise self\nraise E", "E: <exception str() failed>"),
        ("open('/etc/passwd')", "PermissionError: [Errno 1] Operation not permitted: '/etc/passwd'"),
        ("x = bytearray(2**31)", "MemoryError"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("'a\0'", "source code string cannot contain null bytes"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_errors_and_ends(code: str, error: str) -> None:
    assert run(code).error.splitlines()[-1].endswith(error)


def test_variables_of_earlier_blocks_are_there() -> None:
    before = ["print('old')\nx = 1\n", "x += 1\n1 / 0\nx = 9\n", "raise SystemExit\n", "import math\n'old'"]
    assert run("print(x + math.floor(2.5))", before=before) == Run("4\n", None, "", pytest.approx(0, abs=60), False)
    assert run("x", before=["x = ("]).error.endswith("NameError: name 'x' is not defined")
    failed = run("1\nf(0)", before=["def f(x):\n    return 1 / x"]).error
    assert failed.splitlines()[1:5] == [
        *('  File "<program>", line 2, in <module>', "    f(0)"),
        *('  File "<program 1>", line 2, in f', "    return 1 / x"),
    ]


def test_texts_are_cut() -> None:
    long = run("print('ä' * 50)\n'b' * 50", max_output=10)
    assert (long.output, long.value, long.error, long.cut) == ("ä" * 10, "'" + "b" * 9, "", True)
    assert run("raise ValueError('c' * 10**6)", max_output=100).error.startswith("Traceback")
    assert len(run("raise ValueError('c' * 10**6)", max_output=100).error) == 100
    exact = run("print('a' * 9)\n'b' * 8", max_output=10)
    assert (exact.output, exact.value, exact.cut) == ("a" * 9 + "\n", "'" + "b" * 8 + "'", False)
    # A gigabyte takes its time from the program alone.
    assert run("for _ in range(1000): print('x' * 2**20)").output == "x" * 10_000


@pytest.mark.parametrize(
    "forged",
    [
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'\\xff' * 99)\n    except OSError: pass\n",
        "import os\nfor fd in range(64):\n    try: os.write(fd, bytes(8) * 2 * 10**6)\n    except OSError: pass\n",
        "import os\nwhile True:\n    for fd in range(3, 64):\n        try: os.write(fd, b'x' * 10**6)\n"
        "        except OSError: pass\n",
    ],
)
def test_what_a_program_says_of_itself_cannot_harm(forged: str) -> None:
    """All of it is the program's own word, so there is nothing to win."""
    got = run(forged, timeout=1)
    assert got.value is None or isinstance(got.value, str)
    assert max(len(got.output), len(got.value or ""), len(got.error)) <= 10_000
    assert text("1") == "1"


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = run("print(1)\nwhile True: pass", timeout=0.5)
    assert (busy.output, busy.error) == ("1\n", "TimeoutError: the program took more than 1 seconds")
    monkeypatch.setattr(child, "PATIENCE", 1)
    waits = run("import _thread\nlock = _thread.allocate_lock()\nlock.acquire()\nlock.acquire()", timeout=1)
    assert waits.error == "TimeoutError: the program did not end within 1 seconds"


def test_arguments_out_of_range() -> None:
    with pytest.raises(TilebeamError, match="timeout must be seconds above 0, not 0"):
        run("1", timeout=0)
    with pytest.raises(TilebeamError, match="timeout must be seconds above 0, not nan"):
        run("1", timeout=float("nan"))
    with pytest.raises(TilebeamError, match="max_output must be a whole number of at least 1"):
        run("1", max_output=0)


def test_many_at_a_time_and_no_more_than_there_are_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = threading.BoundedSemaphore(3)
    monkeypatch.setattr(child, "_slots", lambda: slots)
    most, under_way, lock = 0, 0, threading.Lock()
    hear = child.Child.hear

    def counted(*arguments: object) -> list[bytes]:
        nonlocal most, under_way
        with lock:
            under_way += 1
            most = max(most, under_way)
        try:
            return hear(*arguments)  # type: ignore[arg-type]
        finally:
            with lock:
                under_way -= 1

    monkeypatch.setattr(child.Child, "hear", counted)
    with ThreadPoolExecutor(12) as pool:
        assert [r.value for r in pool.map(lambda i: run(f"{i} * 2"), range(48))] == [str(i * 2) for i in range(48)]
    assert 1 < most <= 3


SYMPY = """
from sympy import *
x, y, n = symbols('x y n'); f = Function('f')
print(solve([x + y - 3, x - y - 1], [x, y]), solveset(x**2 - 2, x, S.Reals), nsolve(cos(x) - x, 1).evalf(5))
print(dsolve(f(x).diff(x) - f(x), f(x)), summation(1 / n**2, (n, 1, oo)), lambdify(x, x**2)(3))
from sympy.stats import Die, E, P
from sympy.solvers.diophantine import diophantine
from sympy.parsing.sympy_parser import parse_expr
print(E(Die('D', 6)), parse_expr('3*x').subs(x, 2), len(diophantine(x**2 - 9)))
"""


@pytest.mark.skipif(find_spec("sympy") is None, reason="sympy is missing")
def test_sympy_finds_all_of_itself() -> None:
    """Parts of it are imported by functions when they are called, which cannot be done there."""
    got = run(SYMPY)
    assert got.error == ""
    assert got.output.splitlines()[0] == "{x: 2, y: 1} {-sqrt(2), sqrt(2)} 0.73909"
    assert "pi**2/6" in got.output


def test_numpy_finds_all_of_itself() -> None:
    code = """
import numpy as np
a = np.arange(6.0).reshape(2, 3)
print(a @ a.T, np.linalg.eigvals(a @ a.T).round(3), np.fft.fft([1, 2]), np.polyfit([0, 1], [1, 3], 1).round(6))
print(np.random.default_rng(1).integers(9), np.ma.array([1, 2], mask=[0, 1]).sum())
print(np.polynomial.Polynomial([1, 2])(3), np.datetime64('2024-01-01') + 1, np.array(['a']), np.lib.scimath.sqrt(-1))
print(np.sort(a)[0], np.einsum('ij->i', a), a.mean())
"""
    got = run(code)
    assert got.error == ""
    assert "[0. 1. 2.]" in got.output


def test_libraries_are_loaded_before_a_program_begins() -> None:
    """So no program pays for them; and what is loaded depends on the program alone."""
    assert run("import sys\n'numpy' in sys.modules  # numpy").value == "True"
    assert run("import sys\n'num' + 'py' in sys.modules").value == "False"

"""Programs that a model wrote: how they are found in a text, and what they can and cannot do where they run."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tilebeam import CodeExamples, CompletionOutput, TilebeamError
from tilebeam.answers import code_check
from tilebeam.answers.code import Question, blocks, code, examples, program_of, question_of
from tilebeam.answers.code_check import Test, run_tests
from tilebeam.sandbox import confinement

SOURCE = '''from typing import List

def one() -> int:
    return 1

def add(a: int, b: int) -> int:
    """Add.

    >>> add(1, 2)
    3
    >>> add(-1, one())
    0
    """
'''
QUESTION = Question(SOURCE, "add")
CHECK = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n\ncheck(add)"
CHAT = f"<|system|>Be brief.<|user|>Complete this.\n\n```python\n{SOURCE}```<|assistant|>"
RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b): return 0\n"


def passes(program: str, seconds: int = 2) -> bool:
    """Whether a program passes the tests."""
    return run_tests(program, "add", [Test(CHECK)], setup=SOURCE, seconds=seconds).passed == (True,)


@pytest.fixture(autouse=True)
def _no_program_outlives_its_verdict() -> Iterator[None]:
    yield
    process = code_check._WORKER._process
    if process is not None:
        assert Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text() == ""


# --- out of texts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "    return a + b\n",
        "    return a + b\n\nThis adds the two numbers.",
        "    return a + b\n\ndef more(:\n",
        RIGHT,
        f"Sure! Here it is:\n\n```python\n{RIGHT}```\nIt adds.\n```\nadd(1, 2)\n```",
        f"```python\nNONE = 0\n\n{RIGHT}    + NONE\n```",
        f"```\n{RIGHT}",  # cut off where the block ends
        f"```python\n{RIGHT}\nprint(add(1,",  # or within an example of use
        "```python\nreturn a + b\n```",
        "    ```python\n    return a + b\n    ```",
        "Use this:\n```sh\npip install x\n```\n```python\ndef add(a, b):\n    return a + b - 1 + one()\n```",
        "~~~\nfrom operator import add as plus\n\ndef add(a, b):\n    return plus(a, b)\n~~~",
        f"The function is\n\n{RIGHT}\nand it adds.",
        f"```python\n{SOURCE}    return a + b\n\nif __name__ == '__main__':\n    assert False\n```",
    ],
)
def test_programs_are_found_in_answers(text: str) -> None:
    assert passes(program_of(QUESTION, text))


@pytest.mark.parametrize(
    "text", ["", "    pass\n", "    return a - b\n", "I cannot.", "```python\n```", "```\ndef sub(a, b): ...\n```"]
)
def test_wrong_answers_fail(text: str) -> None:
    assert not passes(program_of(QUESTION, text))


def test_blocks_and_equal_programs() -> None:
    assert blocks("a\n```py\nx = 1\n```\nb\n```\ny\n```\n") == ["x = 1\n", "y\n"]
    assert blocks("none") == []
    assert code("x\n```python\nx = 1 # one\n\ny=(2)\n```") == code("```\nx=1\ny = 2\n```\nSo.") == "x = 1\ny = 2"
    assert code("    return  1\n\n") == "    return  1"
    assert code("") is None


def test_the_question_is_the_last_function_of_a_prompt() -> None:
    assert question_of(CHAT) == question_of(SOURCE) == QUESTION
    assert question_of("What is 1 + 1?") is None
    assert QUESTION.before == SOURCE[: SOURCE.index("def add")]


def test_examples_in_docstrings() -> None:
    assert examples(QUESTION) == [Test("add(1, 2)", "3"), Test("add(-1, one())", "0")]
    source = '''def f(x):
    """f(1) is something.
    f(1) == 2
    f("a)b") => 'c'   # a remark
    f([1, (2)]) ➞ [2]
    assert f(4) returns {1: 2}.
    f(5) = 1 + 2 = 3
    f(6) -> true
    For f(7): f(x) == 1
    >>> f(8)
    [1,
     2]
    >>> y = 3
    """
'''
    assert examples(Question(source, "f")) == [
        Test("f(8)", "[1, 2]"),
        Test("f(1)", "2"),
        Test('f("a)b")', "'c'"),
        Test("f([1, (2)])", "[2]"),
        Test("f(4)", "{1: 2}"),
        Test("f(6)", "True"),
    ]


# --- where programs run -----------------------------------------------------------------------------------------------


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    assert not passes("def add(a, b):\n    while True: pass\n", seconds=1)
    monkeypatch.setattr(code_check, "PATIENCE", 1)
    assert not passes("import _thread\nlock = _thread.allocate_lock()\nlock.acquire()\nlock.acquire()\n", seconds=1)
    assert time.monotonic() - began < 60
    assert passes(RIGHT)


def test_printing_without_end_ends() -> None:
    assert not passes("def add(a, b):\n    while True: print('x' * 10**6)\n", seconds=1)
    assert passes(f"print('x' * 10**7)\n{RIGHT}")


@pytest.mark.parametrize(
    "statement",
    [
        "import os; os.fork()",
        "import os\nwhile True: os.fork()",
        "import threading; threading.Thread(target=print).start()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; assert os.system('true') == 0",
        "import os; os.execv('/bin/true', ['true'])",
        "x = [0] * 10**9",
        "x = bytearray(2**31)",
        "x = []\nwhile True: x.append('x' * 10**6 + str(len(x)))",
        "open('/etc/passwd').read()",
        "import os; open(os.path.expanduser('~/.bashrc'))",
        "import os; os.listdir('/')",
        "import os; os.stat('/etc')",
        "import os; os.mkdir('made_by_a_program')",
        "import socket; socket.socket()",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        "import os; os.setuid(1)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (100, 100))",
        "import ctypes; assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
        "import time; time.sleep(1000)",
        "import no_such_module",
    ],
)
def test_a_program_can_only_compute(statement: str) -> None:
    """What it tries raises, so it never gets to the definition."""
    assert not passes(f"{statement}\n{RIGHT}")


def test_files_stay_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "made"
    tries = f"""
import io, os

def add(a, b):
    for attempt in (lambda: open({str(file)!r}, "w"), lambda: io.FileIO({str(file)!r}, "w"),
                    lambda: os.open({str(file)!r}, os.O_CREAT | os.O_WRONLY), lambda: os.mkdir({str(file)!r})):
        try:
            attempt()
        except PermissionError:
            continue
        return 0
    return a + b
"""
    assert passes(tries)
    assert not file.exists()


def test_a_listening_socket_is_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        port = server.getsockname()[1]
        assert not passes(f"import _socket\n_socket.socket().connect(('127.0.0.1', {port}))\n{RIGHT}")
        with pytest.raises(BlockingIOError):
            server.accept()


def test_secrets_of_this_process_are_not_in_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEBEAM_TEST_SECRET", "x")
    code_check._WORKER.close()
    assert passes("import os\ndef add(a, b):\n    return a + b + ('TILEBEAM_TEST_SECRET' in os.environ)\n")


@pytest.mark.parametrize(
    "program",
    [
        f"import sys\nsys.exit(0)\n{WRONG}",
        "import os\nos._exit(0)\n",
        "import os\ndef add(a, b):\n    os._exit(0)\n",
        "def add(a, b):\n    raise SystemExit(0)\n",
        # what a checker in the same process would fall for
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()\n",
        "class Int(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Int(7)\n",
        f"import builtins\nbuiltins.AssertionError = ValueError\n{WRONG}",
        f"import builtins\nbuiltins.compile = lambda *_: 'pass'\nbuiltins.exec = lambda *_: None\n{WRONG}",
        f"import sys\nsys.modules['__main__']._passes = lambda *_: True\ndef check(_): pass\n{WRONG}",
        # writing what a judge might write, to everything that is open
        'import os\nsay = b\'+\\n1\\n1\\n{"passed": [true], "error": ""}\\n\'\nfor fd in range(100):\n'
        f"    try: os.write(fd, say)\n    except OSError: pass\n{WRONG}",
        # looking for the tests
        "import gc\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and isinstance(o.get('tests'), list)]\n"
        "def add(a, b): return (a + b) if found else 0\n",
    ],
)
def test_a_program_cannot_pass_but_by_its_results(program: str) -> None:
    assert not passes(program)


def test_results_are_data_of_any_kind() -> None:
    program = "def echo(*values, **named): return (values, named) if named else values[0]\n"
    values = (
        r"[(1, 2.5, 'ä\ud800', None, True), {1: {2, 3}, (4,): frozenset([5])}, b'\0', 3j, 10**5000, [[]], float('inf')]"
    )
    tests = [
        Test(f"for v in {values}:\n    assert echo(v) == v and type(echo(v)) is type(v)"),
        Test("assert echo(1, b=2) == ((1,), {'b': 2})"),
        Test("assert echo(1) == 2"),
        Test("echo([1])", "[1]"),
        Test("echo('a')", "a"),
        Test("echo([1, 'b'])", '[ 1, "b" ]'),
        Test("nothing(1)", "1"),
    ]
    assert run_tests(program, "echo", tests).passed == (True, True, False, True, False, True, False)
    assert run_tests("def f(): return (i for i in [1])", "f", [Test("assert f()")]).passed == (False,)
    divides = Test("try: f()\nexcept ZeroDivisionError: pass")
    assert run_tests("def f(): return 1 / 0", "f", [divides]).passed == (True,)


def test_tests_after_a_hanging_one_fail_and_those_before_count() -> None:
    program = "def f(x):\n    while x == 2: pass\n    return x\n"
    verdict = run_tests(program, "f", [Test(f"f({i})", str(i)) for i in (1, 2, 3)], seconds=1)
    assert verdict.passed == (True, False, False)
    assert "SyntaxError" in run_tests("def f(", "f", []).error
    assert run_tests("g = 1", "f", []).error == "it defines no f"


def test_where_programs_cannot_be_confined_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes(RIGHT)
    monkeypatch.setitem(code_check._WORKER._greeting, "unconfined", "no list of system calls for vax")
    with pytest.raises(TilebeamError, match=r"cannot be confined .*\(no list of system calls for vax\).*--unsafe-code"):
        passes(RIGHT)
    reads = "def f(): return open('/dev/null').read()"
    assert run_tests(reads, "f", [Test("f()", "''")], unsafe=True).passed == (True,)
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(OSError, match="vax"):
        confinement.confine()


@pytest.mark.parametrize(
    ("machine", "header"),
    [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")],
)
def test_system_calls_have_the_numbers_of_the_kernels_headers(machine: str, header: str) -> None:
    path = Path("/usr/include") / header
    if not path.exists():
        pytest.skip(f"{path} is missing (linux-libc-dev)")
    text = path.read_text()
    calls = confinement._ALLOWED[machine][1] | {"setitimer": confinement._TIMERS[machine]}
    for name, number in calls.items():
        assert re.search(rf"#define __NR(?:3264)?_{name}\s+{number}\b", text), name


def test_a_worker_that_was_killed_is_replaced() -> None:
    assert passes(RIGHT)
    process = code_check._WORKER._process
    assert process is not None
    os.kill(process.pid, 9)
    process.wait()
    assert passes(RIGHT)


# --- the scorer -------------------------------------------------------------------------------------------------------


def test_the_scorer_counts_examples() -> None:
    texts = ["    return a + b\n", "    return 3\n", "```python\ndef add(a, b):\n    return b + a\n```", "no", ""]
    candidates = [CompletionOutput(i, t, [1], "stop", i) for i, t in enumerate(texts)]
    assert CodeExamples().score(CHAT, candidates) == CodeExamples().score(SOURCE, candidates) == [1, 0.5, 1, 0, 0]
    candidates = [CompletionOutput(i, t, [1], "stop", i) for i, t in enumerate(["    return x\n", "    return (\n"])]
    assert CodeExamples().score("def f(x):\n", candidates) == [1.0, 0.0]
    with pytest.raises(TilebeamError, match="no line of the prompt begins with def"):
        CodeExamples().score("What is 1 + 1?", candidates)

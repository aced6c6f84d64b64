"""Programs that tests judge: what they can and cannot do, which shapes right ones have, and what becomes of those who
judge."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from tilebeam import TilebeamError
from tilebeam.sandbox import Test, child, confinement, run, run_tests

SETUP = "def one(): return 1\n"
CHECK = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, one()) == 0\n\ncheck(add)"
RIGHT = "def add(a, b):\n    return a + b\n"
HONEST = re.findall(
    r"^=== (.+?)(?: \[(.+)\])?\n((?:(?!---).*\n)+)---\n(.+)\n",
    (Path(__file__).parent / "honest.txt").read_text(),
    re.MULTILINE,
)


def passes(program: str, seconds: int = 2) -> bool:
    """Whether a program passes the tests."""
    return run_tests(program, "add", [Test(CHECK)], setup=SETUP, seconds=seconds).passed == (True,)


# --- what programs cannot do ------------------------------------------------------------------------------------------


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not passes("def add(a, b):\n    while True: pass\n", seconds=1)
    monkeypatch.setattr(child, "PATIENCE", 1)
    assert not passes("import _thread\nlock = _thread.allocate_lock()\nlock.acquire()\nlock.acquire()\n", seconds=1)
    assert not passes("import os\ndef add(a, b): os.read(3, 1 << 20); os.read(3, 1)\n", seconds=1)


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
    child._PLAIN.close()
    assert passes("import os\ndef add(a, b):\n    return a + b + ('TILEBEAM_TEST_SECRET' in os.environ)\n")


def test_where_programs_cannot_be_confined_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes(RIGHT)
    monkeypatch.setitem(child._PLAIN.greeting(), "unconfined", "no list of system calls for vax")
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


# --- what right programs may be ---------------------------------------------------------------------------------------


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
    assert run_tests("def f(): return object()", "f", [Test("assert f()")]).passed == (False,)
    divides = Test("try: f()\nexcept ZeroDivisionError: pass")
    assert run_tests("def f(): return 1 / 0", "f", [divides]).passed == (True,)


def test_tests_after_a_hanging_one_fail_and_those_before_count() -> None:
    program = "def f(x):\n    while x == 2: pass\n    return x\n"
    verdict = run_tests(program, "f", [Test(f"f({i})", str(i)) for i in (1, 2, 3)], seconds=1)
    assert verdict.passed == (True, False, False)
    assert "SyntaxError" in run_tests("def f(", "f", []).error
    assert run_tests("g = 1", "f", []).error == "it defines no f"


@pytest.mark.parametrize(("name", "library", "program", "holds"), HONEST, ids=[name for name, *_ in HONEST])
def test_a_right_program_passes(name: str, library: str, program: str, holds: str) -> None:
    if library and find_spec(library) is None:
        pytest.skip(f"{name} needs {library}")
    assert run_tests(program, "f", [Test(f"assert {holds}")]).passed == (True,)


@pytest.mark.parametrize(
    ("raised", "caught"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("[][1]", "LookupError"),
        ("raise ValueError('a', 1)", "ValueError"),
        ("raise type('Own', (KeyError,), {})('x')", "KeyError"),
        ("__import__('json').loads('')", "ValueError"),
        ("__import__('statistics').mean([])", "ValueError"),
        ("b'\\xff'.decode()", "Exception"),
        ("raise type('Own', (Exception,), {})", "Exception"),
        ("assert False, 'no'", "AssertionError"),
        ("return f()", "RecursionError"),
        ("raise StopIteration", "RuntimeError"),
    ],
)
def test_exceptions_that_a_test_expects(raised: str, caught: str) -> None:
    test = f"try:\n    f()\nexcept {caught}:\n    pass\nelse:\n    assert False"
    assert run_tests(f"def f():\n    {raised}\n", "f", [Test(test)]).passed == (True,)


def test_the_same_program_does_the_same_again() -> None:
    program = "import random\ndef f(): return [random.random(), hash('a'), list({'a', 'b', 'c'})]\n"
    seen = {run(f"{program}\nf()").value for _ in range(3)}
    assert len(seen) == 1


# --- who runs and judges them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("whom", ["zygote", "program", "judge"])
def test_who_is_killed_while_a_program_runs_is_replaced(whom: str) -> None:
    """Where it is the zygote the program runs again; else it has failed."""
    passes(RIGHT)
    assert child._PLAIN.process is not None
    pid = child._PLAIN.process.pid
    # Of a program that never ends no machine is too fast for the kill; the zygote's has to end the second time.
    loop, seconds = ("for _ in range(10**7)", 60) if whom == "zygote" else ("while True", 1)
    slow = f"def add(a, b):\n    {loop}: pass\n    return a + b\n"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(passes, slow, seconds)
        listed = Path(f"/proc/{pid}/task/{pid}/children")
        while len(children := [int(n) for n in listed.read_text().split()]) < 2:
            time.sleep(0.001)
        os.kill({"zygote": pid, "program": children[0], "judge": children[1]}[whom], signal.SIGKILL)
        assert asked.result() == (whom == "zygote")
    assert passes(RIGHT)
    assert (child._PLAIN.process.pid != pid) == (whom == "zygote")


def test_a_zygote_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    passes(RIGHT)
    assert child._PLAIN.process is not None
    monkeypatch.setattr(child, "PATIENCE", 1)
    monkeypatch.setattr(child, "_ENDING_SECONDS", 0.5)
    os.kill(child._PLAIN.process.pid, signal.SIGSTOP)
    assert passes(RIGHT, seconds=1)


def test_many_threads_ask_at_once() -> None:
    def ask(i: int) -> tuple[bool, ...]:
        tests = [Test(f"f({i})", str(i * 3)), Test(f"f({i})", str(i))]
        return run_tests("def f(x): return x * 3\n", "f", tests).passed

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(1, 65))) == {(True, False)}


def test_descriptors_are_given_back() -> None:
    def held() -> list[int]:
        zygote = child._PLAIN.process
        assert zygote is not None
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), zygote.pid)]

    passes(RIGHT)
    before = held()
    for program in (RIGHT, "import os; os._exit(1)", "def add(", "import os\ndef add(a, b): os._exit(1)"):
        passes(program)
        run(program)
    until = time.monotonic() + 30  # the zygote closes what it has told the end of, those of before, too
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_fork_has_a_sandbox_of_its_own() -> None:
    passes(RIGHT)
    source = (
        "import os\nfrom tilebeam.sandbox import run, child\nrun('1')\npid = os.fork()\n"
        "assert run('6 * 7').value == '42'\nif pid: assert os.waitpid(pid, 0)[1] == 0\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


def test_nothing_runs_on_when_the_asker_is_killed() -> None:
    source = """
import os, threading, time
from tilebeam.sandbox import run, child
run("1")
zygote = child._PLAIN.process.pid
threading.Thread(target=run, args=["while True: pass"], kwargs={"timeout": 100}, daemon=True).start()
while not (programs := open(f"/proc/{zygote}/task/{zygote}/children").read()):
    time.sleep(0.01)
print(zygote, programs, flush=True)
os.kill(os.getpid(), 9)
"""
    said = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    left = [Path(f"/proc/{pid}/stat") for pid in said.stdout.split()]
    assert len(left) == 2
    until = time.monotonic() + 30
    while any(f.exists() and f.read_text().split()[2] != "Z" for f in left):
        assert time.monotonic() < until
        time.sleep(0.01)

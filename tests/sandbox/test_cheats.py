"""Programs that try to pass hidden tests by other means than their results: by the messages that verdicts travel in, by
what stands in memory, by what comparing means, by the process they run in, by how they end.

cheats.txt has them. None may pass a single test.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest
from tilebeam.sandbox import Test, child, run_tests

CHECK = "def check(candidate):\n    assert candidate(3) == 900007919\n    assert candidate(4) == 900015838\n\ncheck(f)"
HIDDEN = [Test(CHECK), Test("assert f(5) == 900023757"), Test("candidate(6)", "900031676")]
NONE = (False, False, False)

TEXT = (Path(__file__).parent / "cheats.txt").read_text()
FRONT = dedent(re.search(r"^    import os.*?(?=^\S)", TEXT, re.MULTILINE | re.DOTALL)[0])  # type: ignore[index]
CHEATS = {
    name: f"{FRONT}{body}"
    for name, body in re.findall(r"^=== (.+)\n((?:(?!===|[A-Z][a-z ]+: ).*\n)*)", TEXT, re.MULTILINE)
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_passes_nothing(name: str) -> None:
    verdict = run_tests(CHEATS[name], "f", HIDDEN, seconds=1)
    assert verdict.passed == NONE, verdict.error
    assert len(verdict.error) <= 300
    assert not re.match("NameError|SyntaxError|AttributeError", verdict.error), verdict.error  # it did try


def test_there_are_many_and_the_right_program_passes() -> None:
    assert len(CHEATS) > 70
    assert run_tests(FRONT + "f = right\n", "f", HIDDEN).passed == (True, True, True)


@pytest.mark.parametrize(
    "end",
    [
        "os._exit(0)",
        "raise SystemExit",
        "raise GeneratorExit",
        "return object()",
        "return f",
        "while True: pass",
        "__import__('ctypes').string_at(0)",
        "send(channel, {})",
        "send(channel, [])",
        "os.write(channel, b'x' * 99)",
        "return 'x' * (65 << 20)",
    ],
)
def test_an_end_is_no_exception_that_a_test_expects(end: str) -> None:
    kinds = "Exception", "(RuntimeError, EOFError, OSError, TypeError, ValueError)", "BaseException"
    expect = [Test(f"try:\n    f()\nexcept {kind}:\n    pass\nelse:\n    assert False") for kind in kinds]
    assert run_tests(f"{FRONT}def f():\n    {end}\n", "f", expect, seconds=1).passed == NONE


@pytest.mark.parametrize("error", ["StopIteration", "StopAsyncIteration"])
@pytest.mark.parametrize(
    "test",
    [
        "for v, w in zip(map(candidate, [1, 2]), [5, 6]): assert v == w",
        "assert all(v == 7 for v in map(candidate, [1, 2]))",
        "assert list(map(candidate, [1, 2])) == []",
        "assert next(map(candidate, [1, 2]), 5) == 5",
        "for v in iter(lambda: candidate(1), 0): assert v == 7",
    ],
)
def test_a_loop_of_a_test_does_not_end_early(test: str, error: str) -> None:
    """As it would if the function's StopIteration came through."""
    assert run_tests(f"def f(x): raise {error}", "f", [Test(test)]).passed == (False,)


def test_an_earlier_request_leaves_nothing_to_find() -> None:
    """Neither its tests nor its program; what the program holds itself it does find."""
    scan = CHEATS["tests in the heap"]
    secret = [Test(f"assert candidate({i}) == {900000000 + i * 7919}") for i in range(3)]
    own = "".join(f"# {test.source}\n" for test in secret)
    assert all(run_tests(scan + own, "f", secret, seconds=30).passed)
    assert not any(run_tests(scan, "f", secret, seconds=30).passed)


def test_the_process_that_programs_are_forked_from_never_holds_a_test_or_a_program() -> None:
    marks = [f"# {kind}_mark_{id(object())}" for kind in ("test", "program")]
    said = run_tests(f"def f(): return 1  {marks[1]}", "f", [Test(f"assert f() == 1  {marks[0]}")])
    assert said.passed == (True,)
    zygote = child._PLAIN.process
    assert zygote is not None
    held = b""
    with open(f"/proc/{zygote.pid}/maps") as maps, open(f"/proc/{zygote.pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            begin, end = (int(n, 16) for n in line.split()[0].split("-"))
            if "rw" in line.split()[1]:
                memory.seek(begin)
                held += memory.read(end - begin)
    assert b"tilebeam.sandbox.zygote" in held
    assert [m for m in marks if m.encode() in held] == []


def test_long_texts_are_cut_before_they_travel() -> None:
    for megabytes in (10, 60):
        verdict = run_tests(f"{FRONT}send(channel, {{'failed': 'y' * ({megabytes} << 20)}})", "f", HIDDEN)
        assert (verdict.passed, verdict.error) == (NONE, "y" * 300)
    assert len(run_tests("raise ValueError('z' * (60 << 20))", "f", HIDDEN).error) == 300


def test_a_program_has_its_channel_and_three_descriptors_that_lead_nowhere() -> None:
    program = f"""{FRONT}
def there(fd):
    try: os.lseek(fd, 0, 1)
    except OSError as error: return error.errno != 9
    return True
def f(): return [fd for fd in range(4096) if there(fd) and fd != channel], there(channel), os.read(0, 9)
"""
    assert run_tests(program, "f", [Test("f()", "([0, 1, 2], True, b'')")]).passed == (True,)

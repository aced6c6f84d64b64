"""Answers: how they are found in texts, and which of them are equal."""

from __future__ import annotations

import operator
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import process_kit
import pytest
import tilebeam
from hypothesis import given
from hypothesis import strategies as st
from tilebeam import (
    TilebeamError,
    choice,
    last_number,
)
from tilebeam.answers.extract import equality_of
from tilebeam.answers.extractors import extractor
from tilebeam.answers.normalize import merged

needs_math = pytest.mark.skipif(find_spec("math_verify") is None, reason="needs math-verify (the extra math)")

# --- without math-verify ----------------------------------------------------------------------------------------------


def test_choice_takes_other_letters() -> None:
    assert choice("ABCDEFGHIJ")("Answer: J") == "J"
    assert choice("AB")("Answer: C") is None
    with pytest.raises(TilebeamError, match="capital letters"):
        choice("a-d")


@given(st.lists(st.one_of(st.none(), st.integers(-20, 20).map(str)), max_size=12))
def test_equal_answers_have_the_first_ones_spelling(answers: list[str | None]) -> None:
    def equal(a: str, b: str) -> bool:
        return int(a) % 5 == int(b) % 5

    found = merged(answers, equal)
    for i, (answer, name) in enumerate(zip(answers, found, strict=True)):
        assert name == next(
            (a for a in answers[: i + 1] if a is not None and answer is not None and equal(a, answer)), None
        )
    assert merged(answers, equality_of(last_number)) == answers


@pytest.mark.parametrize("answer", [float("nan"), 42, ["42"], b"42"])
def test_answers_are_strings_or_none(answer: object) -> None:
    with pytest.raises(TilebeamError, match=rf"return a string, or None .* returned .* \({type(answer).__name__}\)"):
        merged(["1", None, answer], operator.eq)  # type: ignore[list-item]


def test_without_math_verify_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilebeam.answers.formulas.find_spec", lambda _: None)
    with pytest.raises(TilebeamError, match=re.escape("pip install 'math-verify")):
        extractor("math")


# --- with it ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def math_answer() -> Iterator[tilebeam.MathAnswer]:
    from tilebeam.answers import formulas as module

    yield tilebeam.MathAnswer(timeout=2)
    module._WORKER.close()


@needs_math
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{2}{4}}", "1/2"),
        ("I say it is 0.5", "0.5"),
        ("it is 1,234.50.", "1234.5"),
        ("that is $x^2+2x+1$", "x^2+2x+1"),
        (r"first \boxed{1}, no, \boxed{\{2, \sqrt{3}\}} for $x = 7$", r"\{2, \sqrt{3}\}"),
        (r"\boxed{864 \text{ inches}^2}", r"864 \text{ inches}^2"),
        (r"\boxed{10,\!080}", "10080"),
        ("nothing to see", None),
        ("", None),
    ],
)
def test_math_answers(math_answer: tilebeam.MathAnswer, text: str, answer: str | None) -> None:
    assert math_answer(text) == answer


@needs_math
@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("1/2", "0.5", True),
        (r"\frac{1}{2}", "2/4", True),
        ("(x+1)^2", "x^2+2x+1", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("1/3", "0.33", False),
        ("x", "y", False),
        ("2", "3", False),
        ("(x+1)^2", "x^2+1", False),
    ],
)
def test_math_equality_goes_both_ways(math_answer: tilebeam.MathAnswer, a: str, b: str, same: bool) -> None:
    assert math_answer.equal(a, b) is math_answer.equal(b, a) is same


@needs_math
def test_answers_that_take_too_long_are_none_and_do_no_harm(math_answer: tilebeam.MathAnswer) -> None:
    began = time.monotonic()
    assert math_answer.equal("(10^{9})!", "3") is False
    assert math_answer.equal("9^{9^{9^{9}}}", "9^{9^{9^{9}}}+1") is False
    assert time.monotonic() - began < 60
    assert math_answer.equal("1/2", "0.5") is True


@needs_math
def test_math_answers_in_many_threads(math_answer: tilebeam.MathAnswer) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGALRM)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: math_answer.equal(f"{i}/3", rf"\frac{{{2 * i}}}{{6}}"), range(1, 41)))
        texts = list(pool.map(lambda i: math_answer(rf"\boxed{{{i}x}}"), range(40)))
    assert found == [True] * 40
    assert texts == [f"{i}x" for i in range(40)]
    assert signal.getsignal(signal.SIGALRM) is before


@needs_math
def test_a_lost_process_is_replaced(math_answer: tilebeam.MathAnswer) -> None:
    from tilebeam.answers import formulas as module

    assert math_answer.equal("1/16", "0.0625") is True
    process = module._WORKER.process
    assert process is not None
    process.kill()
    process.wait()
    assert math_answer.equal("1/4", "0.25") is True
    assert module._WORKER.process is not process


@needs_math
def test_a_fork_asks_a_process_of_its_own() -> None:
    code = """
import os, sys
import tilebeam
answer = tilebeam.MathAnswer()
assert answer.equal("1/2", "0.5")
child = os.fork()
if child == 0:
    os._exit(0 if answer.equal("1/4", "0.25") else 1)
assert os.waitpid(child, 0)[1] == 0
assert answer.equal("1/8", "0.125")
"""
    done = process_kit.python(code)
    assert (done.returncode, done.stderr) == (0, "")

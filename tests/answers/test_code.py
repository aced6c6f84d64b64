"""Programs that a model wrote: how they are found in a text, and scored by the examples in the question."""

from __future__ import annotations

import pytest
from tilebeam import CodeExamples, CompletionOutput, TilebeamError
from tilebeam.answers.code import Question, blocks, code, program_of, python_blocks, question_of
from tilebeam.sandbox import Test, run_tests

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


def passes(program: str) -> bool:
    """Whether a program passes the tests."""
    return run_tests(program, "add", [Test(CHECK)], setup=SOURCE, seconds=2).passed == (True,)


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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("none", []),
        ("```python\na\n```", ["a\n"]),
        ("```py\na\n```\n```python\nb\n```\n", ["a\n", "b\n"]),
        ("```python\na", []),
        ("```\na\n```", []),
    ],
)
def test_closed_blocks_of_python(text: str, found: list[str]) -> None:
    assert python_blocks(text) == found


def test_the_question_is_the_last_function_of_a_prompt() -> None:
    assert question_of(CHAT) == question_of(SOURCE) == QUESTION
    assert question_of("What is 1 + 1?") is None
    assert QUESTION.before == SOURCE[: SOURCE.index("def add")]


# --- the scorer -------------------------------------------------------------------------------------------------------


def test_the_scorer_counts_examples() -> None:
    texts = ["    return a + b\n", "    return 3\n", "```python\ndef add(a, b):\n    return b + a\n```", "no", ""]
    candidates = [CompletionOutput(i, t, [1], "stop", i) for i, t in enumerate(texts)]
    assert CodeExamples().score(CHAT, candidates) == CodeExamples().score(SOURCE, candidates) == [1, 0.5, 1, 0, 0]
    candidates = [CompletionOutput(i, t, [1], "stop", i) for i, t in enumerate(["    return x\n", "    return (\n"])]
    assert CodeExamples().score("def f(x):\n", candidates) == [1.0, 0.0]
    with pytest.raises(TilebeamError, match="no line of the prompt begins with def"):
        CodeExamples().score("What is 1 + 1?", candidates)

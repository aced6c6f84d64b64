"""Examples in questions, in the forms in which people write them; what leaves a doubt is none."""

from __future__ import annotations

import pytest
from tilebeam.answers.example_forms import examples_of
from tilebeam.sandbox import Test

pytestmark = pytest.mark.quick


def question(text: str, signature: str = "f(x, y=0)") -> str:
    body = "\n".join(f"    {line}" for line in text.splitlines())
    return f'import math\n\ndef {signature}:\n    """Do it.\n\n{body}\n    """\n'


def found(text: str, signature: str = "f(x, y=0)") -> list[tuple[str, str | None]]:
    return [(t.source, t.expected) for t in examples_of(question(text, signature), "f")]


@pytest.mark.parametrize(
    ("text", "call", "value"),
    [
        # calls
        (">>> f(7)\n49", "f(7)", "49"),
        (">>> f('ab')\n['a',\n 'b']", "f('ab')", "['a', 'b']"),
        (">>> f(7) == 49", "f(7)", "49"),
        (">>> f(7) == 49\nTrue", "f(7) == 49", "True"),
        (">>> f(7) == 49\nThat is its square.", "f(7)", "49"),
        (">>> f([3, 1]) [1, 3]", "f([3, 1])", "[1, 3]"),
        (">>> round(f(2), 1)  # of two\n1.4", "round(f(2), 1)  # of two", "1.4"),
        ("f(7) == 49", "f(7)", "49"),
        ("f(7) = 49", "f(7)", "49"),
        ("f(7) => 49", "f(7)", "49"),
        ("f(7) ==> 49", "f(7)", "49"),
        ("f(7) -> 49", "f(7)", "49"),
        ("f(7) --> 49", "f(7)", "49"),
        ("f(7) ➞ 49", "f(7)", "49"),
        ("f(7) → 49", "f(7)", "49"),
        ("f(7) ⇒ 49", "f(7)", "49"),
        ("f(7): 49", "f(7)", "49"),
        ("f(7) is 49", "f(7)", "49"),
        ("f(7) returns 49", "f(7)", "49"),
        ("f(7) should return 49", "f(7)", "49"),
        ("f(7) must return the value 49.", "f(7)", "49"),
        ("f(7) will be 49", "f(7)", "49"),
        ("f(7) should be equal to 49", "f(7)", "49"),
        ("f(7) equals 49;", "f(7)", "49"),
        ("f(7) gives 49 (seven times seven)", "f(7)", "49"),
        ("f(7) yields 49 because 7 * 7 is 49", "f(7)", "49"),
        ("f(7) evaluates to 49", "f(7)", "49"),
        ("f(7) results in 49", "f(7)", "49"),
        ("f(7) outputs 49", "f(7)", "49"),
        ("f(7)  # => 49", "f(7)", "49"),
        ("f(7)  # 49 is its square: 49", None, None),
        ("`f(7)` returns `49`.", "f(7)", "49"),
        ("- f(7) == 49", "f(7)", "49"),
        ("* f([]) => []", "f([])", "[]"),
        ("1. f(7) == 49", "f(7)", "49"),
        ("For example, f(7) is 49.", "f(7)", "49"),
        ("assert f(7) == 49", "f(7)", "49"),
        ("assert f(7) => 49", "f(7)", "49"),
        ("assert 49 == f(7)", "f(7)", "49"),
        ("49 == f(7)", "f(7)", "49"),
        ("f(7, y=2) == -49.5", "f(7, y=2)", "-49.5"),
        ("f(6) -> true", "f(6)", "True"),
        ("f(6) -> null", "f(6)", "None"),
        ("f(6) -> [true, false]", "f(6)", "[True, False]"),
        ("f(“ab”) == “ba”", 'f("ab")', "'ba'"),
        ("f('a’b') == 'b’a'", "f('a’b')", "'b’a'"),
        ("f(\"a)b\") => 'c'   # a remark", 'f("a)b")', "'c'"),
        ("f([1, (2)]) ➞ [2]", "f([1, (2)])", "[2]"),
        ("f({'a': 1}) == {'a': (1, 2)}", "f({'a': 1})", "{'a': (1, 2)}"),
        ("assert g([2, 1]) => [1, 2]", "f([2, 1])", "[1, 2]"),
        # values of parameters
        ("For x = [1, 2] the output should be 14", "f(x=[1, 2])", "14"),
        ('For x = "ab", y = 3, the result should be ("ba", False)', "f(x='ab', y=3)", "('ba', False)"),
        ("For x = 150, the sum of digits will be 6 the output should be '110'.", "f(x=150)", "'110'"),
        ("If x = 3 and y = 4, the function returns 5.", "f(x=3, y=4)", "5"),
        ("Given x = 3, y = 4: the answer is 5", "f(x=3, y=4)", "5"),
        ("x = 3, y = 4 -> 5", "f(x=3, y=4)", "5"),
        ("Input: x = [1, 2], y = 1\nOutput: [2]", "f(x=[1, 2], y=1)", "[2]"),
        ("Input:\n    x : [[0, 1]]\n    y : 1\nOutput: 6", "f(x=[[0, 1]], y=1)", "6"),
        ("Input: nums = [3], k = 2\nOutput: 5\nExplanation: 3 + 2", "f([3], 2)", "5"),
        ("Input: 3, 4\nOutput:\n5", "f(3, 4)", "5"),
        ("**Input:** 3, 4\n**Output:** 5", "f(3, 4)", "5"),
        ("Sample Input 1: x = 3\nSample Output 1: 9", "f(x=3)", "9"),
        ("Input: x = 'a b'\nOutput: 'a' # the first word", "f(x='a b')", "'a'"),
    ],
)
def test_forms(text: str, call: str | None, value: str | None) -> None:
    assert found(text) == ([] if call is None else [(call, value)])


@pytest.mark.parametrize(
    "text",
    [
        "f(1) is something.",
        "f(2) is 3 less than f(5)",
        "f(5) = 1 + 2 = 4",
        "2 * f(1) == 4",
        "-f(1) == 4",
        "not f(1) == 4",
        "len(f([1])) == 1",
        "h.f(1) == 2",
        "For f(7): f(x) == 1",
        "f(x) == 2",
        "f(a) => False",
        "f(1) != 2",
        'f("Earth") ==> ("Venus")',  # a string, or a tuple?
        "f(7) returns a list of 3",
        ">>> y = f(3)",
        "1 <= x <= 10^3",
        "For y = 2 the output should be 3",  # x is missing
        "Input: x is a list\nOutput: 3 numbers",
        "Input: 1, 2, 3\nOutput: 5",
        "x = 3\nand so on",
        "f(" + "(" * 500 + " == 1",
        "f(1) == " + "-" * 5000 + "1",
        "f(1) == " + "[" * 400 + "]" * 400,
        # These would take hours where an expression goes back over the same characters again and again.
        "f(1) == 1" + " " * 3900 + "z",
        "f(9) -> 1" + " " * 3900 + "z",
        "x = 1" + " " * 3900 + "z",
        "assert a" + " " * 3900 + "z f(1)",
        "f(1) == " + "1 " * 50_000,
        "f(1 2 " * 400 + ")" * 1500,
        # Nested too deeply for the parser, and for what walks its tree.
        ">>> " + "-" * 3900 + "1\n2",
        "f(" + "-" * 900 + "1) == 2",
        "Input: 1" + "+1" * 1900 + "\nOutput: 3",
        "Input: [{1" + "+1" * 1800 + "}]\nOutput: 3",
    ],
)
def test_doubtful_lines_are_no_examples(text: str) -> None:
    assert found(text) == []


def test_several_examples() -> None:
    assert found("f(1) == 2, f(2) == 3 and f(3) == 4; f(1) == 2") == [("f(1)", "2"), ("f(2)", "3"), ("f(3)", "4")]
    assert found(">>> f(1) == 2\n>>> f(2) == 3\n>>> f(3)\n4") == [("f(3)", "4"), ("f(1)", "2"), ("f(2)", "3")]
    assert found("g(1) == 2\nh(2) == 3") == []  # whose are they?
    assert found("Input: 1, 2\nOutput: 3\n\nInput: 3, 4\nOutput: 7") == [("f(1, 2)", "3"), ("f(3, 4)", "7")]


def test_helpers_and_long_signatures_are_not_taken_for_examples() -> None:
    helper = "def g(x):\n    x = 3\n    return 4\n\n"
    source = (
        helper + 'def f(\n    x: dict = {":": 1},\n    *rest: int,\n) -> int:\n    """For x = 1 the output is 2."""\n'
    )
    assert examples_of(source, "f") == [Test("f(x=1)", "2")]
    assert examples_of("x = 1\n", "f") == []

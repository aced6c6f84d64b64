"""Programs chosen by what most of them do."""

from __future__ import annotations

import ast

import pytest
from tilebeam import CodeConsensus, CompletionOutput, TilebeamError
from tilebeam.answers.code import Question
from tilebeam.scoring.code_consensus import agreement, behaviour, calls_of

SOURCE = '''def f(xs: list[int], k: int = 1) -> list[int]:
    """Return the numbers of xs above k, sorted.

    >>> f([3, 1, 2], 1)
    [2, 3]
    """
'''
RIGHT = "    return sorted(x for x in xs if x > k)\n"
SAME = "    return [x for x in sorted(xs) if k < x]\n"
UNSORTED = "    return sorted(set(x for x in xs if x > k))\n"  # passes the example, drops what occurs twice
ALWAYS = "    return [2, 3]\n"
WRONG = "    return xs\n"
RAISES = "    raise ValueError\n"
LOOPS = "    while True: pass\n"
BROKEN = "def f(xs:\n"


def candidates(*texts: str) -> list[CompletionOutput]:
    return [CompletionOutput(i, t, [1, 2], "stop", i, cumulative_logprob=-1.0 - i / 100) for i, t in enumerate(texts)]


def best(scorer: CodeConsensus, *texts: str) -> str:
    scores = scorer.score(SOURCE, candidates(*texts))
    assert all(0 <= s <= 2 for s in scores)
    return texts[scores.index(max(scores))]


def test_what_most_do_is_chosen_among_those_that_pass_the_examples() -> None:
    assert best(CodeConsensus(), ALWAYS, UNSORTED, WRONG, WRONG, WRONG, SAME, RIGHT) == SAME
    # Without the examples' values the most frequent behaviour wins, right or not.
    assert best(CodeConsensus(examples=False), ALWAYS, UNSORTED, WRONG, WRONG, WRONG, SAME, RIGHT) == WRONG
    assert best(CodeConsensus(examples=False), UNSORTED, WRONG, SAME, RIGHT) == SAME


def test_programs_that_fail_agree_with_nobody() -> None:
    assert best(CodeConsensus(examples=False), RAISES, RAISES, BROKEN, BROKEN, RIGHT) == RIGHT
    assert best(CodeConsensus(), BROKEN, LOOPS, RAISES, RIGHT) == RIGHT


def test_behaviour_is_of_values_not_of_layout() -> None:
    calls = ["f([3, 1, 2], 1)", "f([], 0)", "f({1: 2.0}, k={3})"]
    program = "def f(xs, k):\n    print('noise')\n    return {b: a for a, b in enumerate(sorted(xs))} | {0: 1 / 3}\n"
    other = "def f(xs, k):\n    xs = sorted(xs)\n    return {0: 0.33333333333} | {x: xs.index(x) for x in xs[::-1]}\n"
    assert len(set(behaviour(program.replace("    print('noise')\n", ""), calls))) == 3
    assert behaviour(other, calls) == behaviour(program.replace("    print('noise')\n", ""), calls)
    # Addresses are equal in equal processes.
    generates = "def f(*a, **k):\n    yield 1\n"
    for fails in (
        "def f(*a, **k):\n    raise KeyError\n",
        "def f(",
        generates,
        generates.replace("yield", "return lambda:"),
    ):
        assert [b[0] for b in behaviour(fails, calls)] == ["!"] * 3


def test_what_a_program_prints_is_no_value() -> None:
    loud = "def f(xs, k=1):\n    print('x' * 500)\n    return sorted(x for x in xs if x > k)\n"
    assert behaviour(loud, ["f([2], 1)"]) == behaviour("def f(xs, k):\n" + RIGHT, ["f([2], 1)"])


def test_agreement() -> None:
    assert agreement([["a", "b"], ["a", "c"], ["!", "b"], []], 2) == [0.5, 0.375, 0.25, 0.0]
    assert agreement([[], []], 0) == [0.0, 0.0]


@pytest.mark.parametrize(
    "call",
    [
        "f([1, 2])",
        "f(5)",
        "f(2.5)",
        "f('ab')",
        "f(True)",
        "f({'a': 1})",
        "f((1, 2), k={3})",
        "f([['a'], []])",
        "f(None)",
    ],
)
def test_inputs_are_varied_by_their_kind(call: str) -> None:
    question = Question(f'def f(x, k=0):\n    """\n    {call} == 1\n    """\n', "f")
    calls = calls_of(question)
    assert calls == calls_of(question)
    assert len(calls) == len(set(calls)) <= 40
    assert calls[0] == call
    kinds = {type(ast.literal_eval(ast.parse(c, mode="eval").body.args[0])) for c in calls}  # type: ignore[attr-defined]
    assert len(kinds) == 1


def test_questions_without_examples_and_without_functions() -> None:
    assert calls_of(Question("def f():\n", "f")) == []
    assert calls_of(Question('def f():\n    """f() == 1"""\n', "f")) == ["f()"]
    assert calls_of(Question('def f(x):\n    """\ud800: f(1) == 1"""\n', "f"))[0] == "f(1)"
    scores = CodeConsensus().score("def f(x):\n", candidates("    return x\n", BROKEN, "    return 2\n"))
    assert scores[0] > scores[2] > scores[1]  # both can be loaded; the first is more probable
    with pytest.raises(TilebeamError, match="no line of the prompt begins with def"):
        CodeConsensus().score("What is 1 + 1?", candidates("2"))

"""A scorer of programs that needs no model and no hidden tests: the examples in the question itself."""

from __future__ import annotations

from collections.abc import Sequence

from tilebeam.answers.code import Question, program_of, question_of
from tilebeam.answers.example_forms import examples_of
from tilebeam.errors import TilebeamError
from tilebeam.outputs import CompletionOutput
from tilebeam.prompt import Prompt
from tilebeam.sandbox import run_tests
from tilebeam.scoring.scorers import Scorer


def question_in(prompt: str | Prompt, scorer: str) -> Question:
    """Find the function that a prompt asks for; TilebeamError: there is none."""
    if (question := question_of(Prompt.of(prompt).text)) is None:
        raise TilebeamError(f"The scorer {scorer} is for Python functions, but no line of the prompt begins with def.")
    return question


class CodeExamples(Scorer):
    """The share of the examples in a question's docstring that a candidate's program passes, in any of the usual forms
    (`>>> f(1)`, `f(1) == 2`, `For x = 1 the output should be 2`, `Input: x = 1` above `Output: 2`). Where
    there are none: 1 if the program can be loaded and defines the function, else 0.

    Programs run confined, see `tilebeam.sandbox`.

    Args:
        unsafe: run them even where they cannot be confined.
    """

    knows = True

    def __init__(self, *, unsafe: bool = False) -> None:
        self._unsafe = unsafe

    def score(self, prompt: str | Prompt, candidates: Sequence[CompletionOutput]) -> list[float]:
        """Return a share of 0 to 1 per candidate.

        Raises:
            TilebeamError: the prompt holds no Python function to complete, or programs cannot be confined here.
        """
        question = question_in(prompt, "examples")
        tests = examples_of(question.source, question.function)
        shares: dict[str, float] = {}
        for program in (programs := [program_of(question, c.text) for c in candidates]):
            if program not in shares:
                said = run_tests(program, question.function, tests, setup=question.source, unsafe=self._unsafe)
                shares[program] = sum(said.passed) / len(tests) if tests else float(not said.error)
        return [shares[program] for program in programs]

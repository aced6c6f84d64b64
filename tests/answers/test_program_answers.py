"""Answers that a text's own program computes: which of its blocks runs, what counts of its output, what else counts."""

from __future__ import annotations

import time

import pytest
from tilebeam import CompletionOutput, ProgramAnswer, RequestOutput, SelfConsistency, TilebeamError, Usage
from tilebeam.answers import program_answers
from tilebeam.answers.extract import boxed, last_number, regex, weight_of, whole_text
from tilebeam.answers.extractors import extractor
from tilebeam.search.adaptive import Adaptive


def block(*lines: str) -> str:
    return "```python\n" + "\n".join(lines) + "\n```\n"


TWO = block("x = 20", "print(x)") + "Then:\n" + block("print(x * 3)")


@pytest.mark.parametrize(
    ("text", "answer", "weight"),
    [
        ("So it is 7.", "7", 1),
        (block("print(6 * 7)") + "So it is 41.", "42", 1),
        (block("print(6 * 7)") + "So it is 42.0.", "42", 2),
        (block("6 * 7") + "So it is 42.", "42", 2),
        (block("print('first 1')", "print('It costs 1,200.50 dollars.')", "print()") + "So it is 3.", "1200.5", 1),
        (TWO + "So it is 60.", "60", 2),
        (block("print(1/0)") + "So it is 5.", "5", 1),
        (block("print(3)", "1/0") + "So it is 5.", "5", 1),
        (block("def f():", "    return 3") + "So it is 5.", "5", 1),
        (block("print('none')") + "So it is 5.", "5", 1),
        (block("print('9' * 10**7)") + "So it is 5.", "5", 1),
        ("```python\nprint(3)\nSo it is 5.", "5", 1),
        ("```\nprint(3)\n```\nSo it is 5.", "5", 1),
        (block("") + "So it is 5.", "5", 1),
        (block("print(3)"), "3", 2),
        ("", None, 1),
    ],
)
def test_a_text_s_program_answers_and_agrees_with_its_words(text: str, answer: str | None, weight: float) -> None:
    found = ProgramAnswer(last_number)
    assert (found(text), found.weight(text)) == (answer, weight)


def test_a_program_that_does_not_end_leaves_the_answer_to_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_answers, "SECONDS", 1)
    found, text = ProgramAnswer(), block("while True: pass") + "#### 5"
    assert (found(text), found.weight(text)) == ("5", 1)
    began = time.process_time()
    assert [found(text) for _ in range(99)] == ["5"] * 99
    assert time.process_time() - began < 1  # it ran once


@pytest.mark.parametrize(
    ("words", "printed", "answer"),
    [
        (boxed, "60.0", "60"),
        (boxed, "sqrt(2)/2", "sqrt(2)/2"),
        (extractor("choice"), "B", "B"),
        (whole_text, "Two  cats", "two cats"),
        (regex(r"x = (\d+)"), "x = 4", "4"),
        (regex(r"x = (\d+)"), "4", "9"),
    ],
)
def test_the_printed_line_is_read_as_words_are(words, printed: str, answer: str) -> None:
    text = block(f"print({printed!r})") + "\\boxed{9} x = 9"
    assert ProgramAnswer(words)(text) == answer


def test_it_has_a_name() -> None:
    assert extractor("program")(block("print(2)") + "#### 3") == "2"
    assert weight_of(last_number, "1") == 1


class Writes:
    """A model that writes these texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def keep_prefixes(self):
        from contextlib import nullcontext

        return nullcontext()

    def generate(self, _, sampling, *, progress=None, on_sample=None) -> list[RequestOutput]:  # noqa: ARG002
        results = []
        for number, params in enumerate(sampling):
            begin, self.texts = self.texts[: params.n], self.texts[params.n :]
            outputs = [CompletionOutput(i, t, [1], "stop", i, -1.0, [-1.0]) for i, t in enumerate(begin)]
            for output in outputs if on_sample is not None else ():
                on_sample(number, output)
            results.append(RequestOutput("", [], outputs, Usage(), 0))
        return results


AGREES = block("print(2)") + "It is 2."
DIFFERS = block("print(3)") + "It is 4."


@pytest.mark.parametrize("options", [{}, {"weighting": "logprob"}, {"weighting": "reward", "scorer": lambda *_: 1.0}])
def test_in_votes_an_answer_on_which_words_and_program_agree_counts_twice(options: dict) -> None:
    events: list = []
    vote = SelfConsistency(ProgramAnswer(), **options)
    result = vote.infer(Writes("It is 4.", "It is 4.", DIFFERS, AGREES), "Q", 4, events=events.append)
    one = result.scores[0]
    assert result.answers == ["4", "4", "3", "2"]
    assert result.votes == pytest.approx({"4": 2 * one, "2": 2 * one, "3": one})
    assert events[-1].votes == pytest.approx(result.votes)


def test_an_adaptive_vote_knows_that_the_candidates_that_are_left_could_weigh_more() -> None:
    texts = ["It is 4."] * 3 + [AGREES, AGREES]
    for extract, settled in ((ProgramAnswer(), False), (last_number, True)):
        result = Adaptive(extract, confidence=1).infer(Writes(*texts), "Q", 5)
        assert result.settled is settled
        assert result.answer == (2 if extract is not last_number else 4)


def test_where_nothing_is_confined_it_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: bool) -> bool:
        raise TilebeamError("Programs cannot be confined.")

    monkeypatch.setattr(program_answers, "need_confinement", refused)
    with pytest.raises(TilebeamError, match="cannot be confined"):
        SelfConsistency("program")

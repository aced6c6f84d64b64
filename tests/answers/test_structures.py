"""JSON and calls of functions as answers: what a text holds, what is equal, and what several agree on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import tilebeam
from search_kit import ScriptedLM
from tilebeam import CompletionOutput, RequestOutput, SamplingParams, SelfConsistency, Structures, Usage


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('So: {"a": 1} I think', '{"a": 1}'),
        ('```json\n{"a": [1,\n 2]}\n```\nDone [see above', '{"a": [1, 2]}'),
        ('First [1], then {"a": {"b": []}}', '{"a": {"b": []}}'),
        ("```\n42\n```", "42"),
        (' "Bern" ', '"Bern"'),
        ("null", "null"),
        ('{"a": {"b": 1}, "c": "xx', None),  # breaks off: what is within is no answer
        ("{'a': [1, 2]}", None),
        ('"a" "b"', None),
        ("no JSON", None),
        ("", None),
        ("NaN", None),
        ('{"a": [NaN]}', None),
        ('{"a": 1e999}', None),
        ('{"a": ' + "9" * 5000 + "}", None),
        ("[" * 65 + "]" * 65, None),
        ("[" * 100_000, None),
        ("[x" * 50_000, None),
        ('{"' * 50_000, None),
        (r'{"a": "\ud800"}', r'{"a": "\ud800"}'),
    ],
)
def test_the_last_value_of_a_text(text: str, answer: str | None) -> None:
    assert Structures()(text) == answer
    if answer is not None:
        answer.encode()


def test_a_chat_without_json_calls_nothing() -> None:
    calls = tilebeam.answers.extractors.extractor("calls")  # type: ignore[attr-defined]
    assert (calls("Hello!"), calls("{broken"), calls("")) == ("[]", None, None)
    assert calls('<tool_call>{"name": "f", "arguments": {}}</tool_call>') == '{"name": "f", "arguments": {}}'


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({"x": 1, "y": 2}, {"y": 2.0, "x": 1}, True),
        ({"x": "New York, NY."}, {"x": "new  york ny"}, True),
        ({"x": 1}, {"x": True}, False),
        ({"x": 1}, {"x": "1"}, False),
        ({"x": None}, {}, False),
        ([1, 2], [2, 1], False),
        (10**300, 1e300, False),
        (-0.0, 0, True),
    ],
)
def test_values_are_equal_by_what_they_say(a: Any, b: Any, same: bool) -> None:
    assert Structures().equal(json.dumps(a), json.dumps(b)) is same


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("values", "weights", "winner"),
    [
        # The name first: what g's candidates say of x has no say in f's.
        ([call("f", x=1), call("g", x=2), call("g", x=2), call("f", x=3), call("f", x=3)], None, call("f", x=3)),
        ([call("f", x=1), call("g", x=2)], [1, 1.5], call("g", x=2)),
        (
            [[call("f", x=1)], [call("f", x=1)], [call("g")], [call("g"), call("f", x=1)], [call("g"), call("h")]],
            None,
            [call("f", x=1)],
        ),
        # Where several gave the same, most fields of the others are no match for it.
        (
            [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 4}],
            None,
            {"a": 1, "b": 1},
        ),
        # No candidate has the best value of every field.
        (
            [{"a": 1, "b": 2, "c": 0}, {"a": 1, "b": 3, "c": 3}, {"a": 2, "b": 3, "c": 3}, {"a": 1, "b": 2, "c": 3}],
            [1, 1, 1.5, 1],
            {"a": 1, "b": 3, "c": 3},
        ),
        ([{"a": 1, "b": 2}, {"a": 2, "b": 3}, {"a": 1, "b": 3, "c": 1}], None, {"a": 1, "b": 2}),
        # Of arrays each place.
        ([[1, 2, 3], [1, 2, 3, 4], [1, 2, 4], [0, 1, 2, 3, 4, 5]], None, [1, 2, 3]),
        ([[call("f", x=1)], [call("g"), call("f", x=1)], [call("f", x=2)]], None, [call("f", x=1)]),
        ([{}, {"a": 1}, {}], None, {}),
        ([[], [1], []], None, []),
        ([1, [1], {"a": 1}, 1.0], None, 1),
        ([{"a": 1}, {"a": 2}], [0, 0], {"a": 1}),
    ],
)
def test_fields_vote(values: list[Any], weights: Sequence[float] | None, winner: Any) -> None:
    answers = [json.dumps(v) for v in values]
    found = Structures().elect(answers, weights or [1.0] * len(values))
    assert found in answers
    assert json.loads(found) == winner


class Scripted(ScriptedLM):
    """Writes these texts."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.texts = texts

    def generate(self, prompts: Any, *_: Any, **__: Any) -> list[RequestOutput]:  # type: ignore[override]
        found = [CompletionOutput(i, t, [1], "stop", i, -float(i + 1), [-1.0]) for i, t in enumerate(self.texts)]
        return [RequestOutput(p.text, [], found, Usage(), 0) for p in prompts]


def test_structures_vote_in_searches() -> None:
    lm = Scripted("broken {", '{"a": 1, "b": 2}', '{"a": 2, "b": 3}', 'So {"a": 1.0, "b": 3, "c": 1}')
    vote = SelfConsistency("json").infer(lm, "?", 4, sampling=SamplingParams(seed=1))
    assert vote.answers[0] is None
    assert (vote.answer, vote.best_index) == ('{"a": 1, "b": 2}', 1)
    score = SelfConsistency("json", weighting="reward", scorer=lambda _, text: 5 * ('"a": 2' in text))
    assert score.infer(lm, "?", 4, sampling=SamplingParams(seed=1)).best_index == 2
    assert SelfConsistency("json").infer(Scripted("{", "x"), "?", 2).answer is None

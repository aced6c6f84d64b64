"""What searches tell while they run agrees with what they return, and telling changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from search_kit import ScriptedLM, ScriptedPRM
from tilebeam import CompletionOutput, SamplingParams, SearchResult, TilebeamError, VoteResult, last_number
from tilebeam.scoring.scorers import Verifier
from tilebeam.search import algorithms as methods
from tilebeam.search.events import RunningVote, SearchEvent

PROMPTS = ["a", "b1", "2 a"]
SAMPLING = SamplingParams(seed=5, max_tokens=12)
BUDGET = 8
MAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "best": ("best-of-n", {"scorer": "logprob"}),
    "vote": ("vote", {"extract": last_number}),
    "logprob": ("vote", {"extract": last_number, "weighting": "logprob"}),
    "reward": ("vote", {"extract": last_number, "weighting": "reward", "scorer": Verifier(lambda _, t: len(t) / 4)}),
    "softmax": ("vote", {"extract": last_number, "weighting": "softmax"}),
    "beam": ("beam", {"beam_width": 2, "max_steps": 4}),
    "dvts": ("dvts", {"beam_width": 4, "max_steps": 3, "max_step_tokens": 2}),
    "adaptive": ("adaptive", {"extract": last_number, "confidence": 1.0}),
}


def searched(name: str, world: int, events: list[SearchEvent] | None) -> list[SearchResult]:
    method, options = MAKES[name]
    if name in ("beam", "dvts"):
        options = options | {"scorer": ScriptedPRM(world)}
    lm = ScriptedLM(world=world, ends=0.2)
    hook = None if events is None else events.append
    return methods.create(method, **options).run(lm, PROMPTS, BUDGET, sampling=SAMPLING, events=hook)


@pytest.mark.parametrize("world", range(4))
@pytest.mark.parametrize("name", MAKES)
def test_events_are_the_result_in_pieces(name: str, world: int) -> None:
    events: list[SearchEvent] = []
    results = searched(name, world, events)
    for result in (*results, *(silent := searched(name, world, None))):
        result.usage.scoring_seconds = 0.0
    assert [r.as_dict() for r in results] == [r.as_dict() for r in silent]
    for number, result in enumerate(results):
        own = [e for e in events if e.prompt == number]
        candidates = [e for e in own if e.event == "candidate"]
        assert sorted(e.index or 0 for e in candidates) == list(range(len(result.candidates)))
        for event in candidates:
            candidate = result.candidates[event.index or 0]
            assert (event.text, event.tokens) == (candidate.text, len(candidate.token_ids))
            assert event.fate == {"stop": "ended", "length": "cut"}[candidate.finish_reason]
        rated = [e for e in own if e.event == "score" or (e.event == "candidate" and e.score is not None)]
        assert {e.index: e.score for e in rated} == pytest.approx(dict(enumerate(result.scores)))
        if isinstance(result, VoteResult):
            told = next(e.votes for e in reversed(own) if e.event != "step")
            assert told == pytest.approx(result.votes)
            assert list(told or {}) == list(result.votes)
        steps = [e for e in own if e.event == "step"]
        assert len([e for e in steps if e.fate == "dropped"]) == len(result.pruned)
        assert sorted(e.score for e in steps if e.fate == "dropped" and e.score is not None) == sorted(
            p.score for p in result.pruned
        )
        if steps:  # the last step of a text tells the same of it as its candidate
            ends = Counter(e.fate for e in steps if e.fate not in ("kept", "dropped"))
            assert ends == Counter(e.fate for e in candidates)
        assert [e.round for e in steps] == sorted(e.round for e in steps)
        assert all(e.as_dict().keys() <= set(SearchEvent.__dataclass_fields__) for e in own)
    assert bool(events) == any(r.candidates for r in results)


def test_votes_grow() -> None:
    """Each candidate's event has the votes with it and without those that follow."""
    events: list[SearchEvent] = []
    searched("vote", 1, events)
    first = [e for e in events if e.prompt == 0]
    totals = [sum((e.votes or {}).values()) for e in first]
    with_answers = [e.answer is not None for e in first]
    assert totals == [float(sum(with_answers[: i + 1])) for i in range(len(first))]
    assert totals[-1] > 1


def test_a_vote_compares_a_candidate_with_each_answer_once() -> None:
    compared = list[tuple[str, str]]()

    def equal(a: str, b: str) -> bool:
        compared.append((a, b))
        return abs(int(a) - int(b)) == 10

    vote = RunningVote(last_number, equal)
    for i in reversed(range(40)):
        text = str(i % 20)
        assert vote.add(CompletionOutput(i, text, [1], "stop", 0), 1.0)[0] is not None
        vote.leaders()
    assert vote.votes() == {str(i): 4.0 for i in range(10)}
    assert len(compared) <= 40 * 10


@pytest.mark.parametrize("events", [None, lambda _: None])
@pytest.mark.parametrize("name", ["vote", "adaptive"])
def test_an_extractor_that_returns_no_string_is_told(name: str, events: Any) -> None:
    search = methods.create(name, extract=lambda _: float("nan"))
    with pytest.raises(TilebeamError, match=r"return a string, or None for no answer; it returned nan \(float\)"):
        search.run(ScriptedLM(world=1, ends=0.2), PROMPTS, BUDGET, sampling=SAMPLING, events=events)

"""What all search algorithms owe their callers, and how they are made by name: over the scripted model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_kit import ScriptedLM, ScriptedPRM
from tilebeam import (
    BestOfN,
    SamplingParams,
    SearchCancelled,
    SearchResult,
    StepScorer,
    TilebeamError,
    VoteResult,
)
from tilebeam.search import algorithms as methods

PROMPTS = ["a", "b1", "2 a"]

ALL: dict[str, Callable[[], dict[str, Any]]] = {
    "best-of-n": lambda: {"scorer": ScriptedPRM()},
    "self-consistency": dict,
    "beam": lambda: {"scorer": ScriptedPRM(), "beam_width": 2},
    "dvts": lambda: {"scorer": ScriptedPRM(), "beam_width": 2},
    "adaptive": dict,
    "tir": dict,
}


def make(name: str) -> Any:
    return methods.create(name, **ALL[name]())


def test_every_algorithm_is_driven_here() -> None:
    assert set(ALL) == set(methods.names())


def same(a: SearchResult, b: SearchResult) -> bool:
    """But for what is shared out over prompts: seconds."""
    dicts = [r.as_dict() for r in (a, b)]
    for d in dicts:
        d["usage"] = {k: v for k, v in d["usage"].items() if "seconds" not in k}
    return dicts[0] == dicts[1]


@pytest.mark.parametrize("name", ALL)
@given(world=st.integers(0, 999), seeds=st.lists(st.integers(0, 99), min_size=3, max_size=3))
@settings(max_examples=15, deadline=None)
def test_prompts_together_are_as_alone_and_seeds_decide(name: str, world: int, seeds: list[int]) -> None:
    params = [SamplingParams(seed=s, max_tokens=10) for s in seeds]
    together = make(name).run(ScriptedLM(world), PROMPTS, 4, sampling=params)
    for i, prompt in enumerate(PROMPTS):
        alone = make(name).infer(ScriptedLM(world), prompt, budget=4, sampling=params[i])
        assert alone.prompt == prompt
        assert same(alone, together[i])
        assert together[i].seed == seeds[i]


@pytest.mark.parametrize("name", ALL)
def test_an_instance_may_be_used_again(name: str) -> None:
    method, params = make(name), SamplingParams(seed=3, max_tokens=10)
    first = method.run(ScriptedLM(7), PROMPTS, 4, sampling=params)
    assert all(same(a, b) for a, b in zip(first, method.run(ScriptedLM(7), PROMPTS, 4, sampling=params), strict=True))


@pytest.mark.parametrize("name", ALL)
def test_cancelled_searches_say_so_and_leave_nothing_behind(name: str) -> None:
    calls = len(_calls(name))
    for call in range(calls):
        lm = ScriptedLM(5, abort_call=call)
        with pytest.raises(SearchCancelled, match="cancelled"):
            make(name).run(lm, PROMPTS, 4, sampling=SamplingParams(seed=1, max_tokens=10))
        assert lm.kept == 0
        seen = []
        lm = ScriptedLM(5)
        with pytest.raises(SearchCancelled, match="cancelled"):
            make(name).run(
                lm,
                PROMPTS,
                4,
                sampling=SamplingParams(seed=1, max_tokens=10),
                progress=lambda state: seen.append(state) or len(lm.calls) <= call,  # noqa: B023
            )
        if name != "tir":  # its prompts have calls of their own, which have begun
            assert len(lm.calls) == call + 1


def _calls(name: str) -> list[Any]:
    lm = ScriptedLM(5)
    make(name).run(lm, PROMPTS, 4, sampling=SamplingParams(seed=1, max_tokens=10))
    assert lm.calls
    return lm.calls


@pytest.mark.parametrize("name", ALL)
def test_progress_goes_one_way_and_counts_the_whole_search(name: str) -> None:
    seen: list[Any] = []
    lm = ScriptedLM(11)
    make(name).run(lm, PROMPTS, 4, sampling=SamplingParams(seed=1, max_tokens=10), progress=seen.append)
    assert len(seen) == 2 * len(lm.calls)
    assert len({s.total for s in seen}) == 1
    for before, after in pairwise(seen):
        assert 0 <= before.finished <= after.finished <= after.total
        assert before.seconds <= after.seconds
    assert seen[-1].tokens == lm.drawn


@pytest.mark.parametrize("name", ALL)
def test_models_that_say_nothing(name: str) -> None:
    lm = ScriptedLM(ends=1.0)
    for result in make(name).run(lm, PROMPTS, 4, sampling=SamplingParams(seed=0)):
        assert result.best.text == ""
        assert result.best.finish_reason == "stop"
        if isinstance(result, VoteResult):
            assert (result.answer, result.votes) == (None, {})
    assert make(name).run(lm, [], 4) == []


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("budget", [0, -2, True, 2.0, "4", None])
def test_budgets_that_are_none(name: str, budget: Any) -> None:
    with pytest.raises(TilebeamError, match="budget must be"):
        make(name).run(ScriptedLM(), PROMPTS, budget)


@pytest.mark.parametrize("name", ALL)
def test_sampling_parameters_are_one_or_one_each(name: str) -> None:
    with pytest.raises(TilebeamError, match="3 prompts but 2"):
        make(name).run(ScriptedLM(), PROMPTS, 4, sampling=[SamplingParams()] * 2)
    results = make(name).run(ScriptedLM(), PROMPTS, 4)
    assert len({r.seed for r in results}) == 3  # drawn afresh for each


class Misbehaving(StepScorer):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def score_steps(self, prompts: Sequence[Any], solutions: Sequence[Sequence[str]]) -> list[list[float]]:  # noqa: ARG002
        if self.what == "few":
            return [[0.5] * len(s) for s in solutions][:-1]
        if self.what == "short":
            return [[0.5] * (len(s) - 1) for s in solutions]
        return [[math.nan] * len(s) for s in solutions]


@pytest.mark.parametrize("what", ["few", "short", "nan"])
def test_step_scorers_that_misbehave(what: str) -> None:
    search = methods.create("beam", scorer=Misbehaving(what))
    with pytest.raises(
        TilebeamError, match=r"Misbehaving (rated .* solutions|returned .* scores where|returned a score that)"
    ):
        search.run(ScriptedLM(), PROMPTS, 4, sampling=SamplingParams(seed=0))


def test_scorers_that_forget_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedPRM, "rate", lambda *_: [])
    with pytest.raises(TilebeamError, match="ScriptedPRM rated 0 of 3 prompts"):
        BestOfN(ScriptedPRM()).run(ScriptedLM(), PROMPTS, 4, sampling=SamplingParams(seed=0))


# --- by name ----------------------------------------------------------------------------------------------------------


def test_unknown_names_and_options_are_answered_with_the_known_ones() -> None:
    with pytest.raises(TilebeamError, match=r"'bon'.*best-of-n, self-consistency, beam, dvts, adaptive, tir, vote"):
        methods.create("bon")
    with pytest.raises(
        TilebeamError, match=r"beam has no option 'width': it has beam_width \(whole number\), max_step"
    ):
        methods.create("beam", scorer=ScriptedPRM(), width=3)
    with pytest.raises(TilebeamError, match="best-of-n has no option 'x': it has none"):
        methods.create("best-of-n", x=1)
    with pytest.raises(TilebeamError, match="Unknown scorer 'vibes': choose from consensus, logprob"):
        methods.create("best-of-n", scorer="vibes")
    for name in ("beam", "dvts"):
        with pytest.raises(TilebeamError, match=f"{name} needs a process reward model"):
            methods.create(name)
        with pytest.raises(TilebeamError, match="needs a StepScorer"):
            methods.create(name, scorer="logprob")


@pytest.mark.parametrize(
    ("name", "option", "value", "words"),
    [
        ("beam", "beam_width", "four", "whole number, not 'four'"),
        ("beam", "beam_width", 0, "beam_width must be"),
        ("beam", "max_steps", "1.5", "whole number"),
        ("beam", "step_stop", "", "step_stop"),
        ("dvts", "max_step_tokens", "0", "max_step_tokens"),
        ("vote", "weighting", "heavy", "weighting must be"),
        ("vote", "weighting", "reward", "needs a scorer"),
        ("vote", "sharpness", "much", "number, not 'much'"),
        ("vote", "extract", "(", "regular expression"),
        ("vote", "equal", "yes", "function of two answers"),
        ("vote", "extract", 5, "extractor, not 5"),
        ("adaptive", "equal", True, "function of two answers, not True"),
        ("adaptive", "confidence", "high", "number, not 'high'"),
        ("adaptive", "confidence", 0.4, "between 0.5 and 1"),
        ("adaptive", "confidence", True, "confidence must be a number"),
        ("adaptive", "weighting", "reward", "needs a scorer"),
        ("adaptive", "sharpness", 1.0, "sharpness is"),
    ],
)
def test_values_that_do_not_fit(name: str, option: str, value: Any, words: str) -> None:
    scorer = {"scorer": ScriptedPRM()} if name in ("beam", "dvts") else {}
    with pytest.raises(TilebeamError, match=words):
        methods.create(name, **scorer, **{option: value})


def test_options_are_listed_and_read_from_texts() -> None:
    listed = {o.name: (o.type, o.default) for o in methods.options("beam")}
    assert listed["beam_width"] == ("whole number", 4)
    assert listed["step_stop"] == ("text", "\n")
    assert "scorer" not in listed
    assert {o.name: o.type for o in methods.options("vote")}["weighting"] == "plain, logprob, reward, softmax"
    name, options = methods.parse(r"beam:beam_width=2,step_stop=\n\n, max_steps=9")
    assert (name, options) == ("beam", {"beam_width": "2", "step_stop": "\n\n", "max_steps": "9"})
    lm = ScriptedLM()
    methods.create(name, scorer=ScriptedPRM(), **options).run(lm, ["a"], 4, sampling=SamplingParams(seed=0))
    assert all(p.stop[0] == "\n\n" for call in lm.calls for _, p in call)
    assert lm.calls[0][0][1].n == 4
    assert methods.parse("vote") == ("vote", {})
    with pytest.raises(TilebeamError, match="should be option=value"):
        methods.parse("beam:4")

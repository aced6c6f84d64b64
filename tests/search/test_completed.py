"""`Algorithm.completed`: searches for many prompts, each result as soon as it is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from search_kit import ScriptedLM, ScriptedPRM
from tilebeam import BestOfN, LogProb, SamplingParams, SearchResult, TilebeamError, last_number
from tilebeam.outputs import Progress
from tilebeam.search import algorithms as methods

PROMPTS = ["a", "b1", "2 a", "b", "1", "a b", "22"]
SAMPLING = SamplingParams(seed=5, max_tokens=12)
MAKES: dict[str, dict[str, Any]] = {
    "best-of-n": {"scorer": "logprob"},
    "vote": {"extract": last_number},
    "beam": {"beam_width": 2, "max_steps": 4, "scorer": ScriptedPRM(1)},
    "dvts": {"beam_width": 4, "max_steps": 3, "scorer": ScriptedPRM(1)},
    "adaptive": {"extract": last_number, "confidence": 1.0},
}


def found(result: SearchResult) -> dict[str, Any]:
    """All but the time that it took."""
    result.usage.scoring_seconds = 0.0
    return result.as_dict()


@pytest.mark.parametrize("name", MAKES)
def test_results_are_those_of_run(name: str) -> None:
    method = methods.create(name, **MAKES[name])
    want = [found(r) for r in method.run(ScriptedLM(), PROMPTS, 8, sampling=SAMPLING)]
    results = dict(method.completed(ScriptedLM(), iter(PROMPTS), 8, sampling=SAMPLING, at_once=3))
    assert [found(results[i]) for i in range(len(PROMPTS))] == want


class Waiting(ScriptedLM):
    """Each call waits until it may go on, and asks its hook whether it should."""

    def __init__(self) -> None:
        super().__init__()
        self.go: dict[str, threading.Event] = {p: threading.Event() for p in PROMPTS}
        self.cancelled: list[str] = []

    def generate(self, prompts: Any, sampling: Any, *, progress: Any = None, on_sample: Any = None) -> Any:
        assert self.go[prompts[0].text].wait(60)
        if progress(Progress()) is False:
            self.cancelled.append(prompts[0].text)
        return super().generate(prompts, sampling, on_sample=on_sample)


def test_the_first_to_end_comes_first_and_prompts_are_taken_as_they_are_needed() -> None:
    lm, taken = Waiting(), 0

    def prompts() -> Iterator[str]:
        nonlocal taken
        for prompt in PROMPTS:
            taken += 1
            yield prompt

    results = BestOfN(LogProb()).completed(lm, prompts(), 2, at_once=3)
    assert taken == 0
    lm.go["2 a"].set()
    assert next(results)[0] == 2
    assert taken == 3
    lm.go["b"].set()
    assert next(results)[0] == 3
    assert taken == 4
    for event in lm.go.values():
        threading.Timer(0.2, event.set).start()
    results.close()  # type: ignore[attr-defined]
    assert sorted(lm.cancelled) == ["a", "b1"]


def test_an_error_names_the_prompt_and_loses_no_result() -> None:
    def score(prompt: str, _: str) -> float:
        if prompt == "1":
            raise TilebeamError("no such number")
        return 1.0

    seen = []
    with pytest.raises(TilebeamError, match="no such number") as caught:
        seen.extend(i for i, _ in BestOfN(score).completed(ScriptedLM(), PROMPTS, 2, sampling=SAMPLING, at_once=1))
    assert seen == [0, 1, 2, 3]
    assert caught.value.__notes__ == ["In the search for prompt 4."]


def test_what_is_wrong_from_the_start() -> None:
    best, lm = BestOfN(LogProb()), ScriptedLM()
    with pytest.raises(TilebeamError, match="at_once"):
        best.completed(lm, PROMPTS, at_once=0)
    with pytest.raises(TilebeamError, match="7 prompts but 2 SamplingParams"):
        best.completed(lm, PROMPTS, sampling=[SAMPLING] * 2)
    assert list(best.completed(lm, [])) == []

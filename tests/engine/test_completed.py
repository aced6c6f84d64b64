"""`LM.completed`: many prompts, each one's result as soon as it is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tilebeam import LM, SamplingParams, TilebeamError

PROMPTS = [f"the number {'of ' * (i % 5)}{i}" for i in range(40)]
LENGTHS = [1 + 7 * i % 23 for i in range(40)]
PARAMS = [SamplingParams(seed=i, max_tokens=n, ignore_eos=True) for i, n in enumerate(LENGTHS)]


def busy(lm: LM) -> int:
    now = lm.figures()
    return now.running + now.waiting + now.cells_used


def test_results_are_those_of_generate_as_they_come(lm: LM) -> None:
    want = [o.outputs[0].token_ids for o in lm.generate(PROMPTS, PARAMS)]
    order, found = [], {}
    for i, output in lm.completed(PROMPTS, PARAMS):
        order.append(i)
        found[i] = output.outputs[0].token_ids
    assert [found[i] for i in range(len(PROMPTS))] == want
    assert sorted(order) == list(range(40)) != order  # short ones overtake long ones
    assert busy(lm) == 0


def test_prompts_are_taken_as_they_are_needed(lm: LM) -> None:
    taken = 0

    def prompts() -> Iterator[str]:
        nonlocal taken
        for prompt in PROMPTS * 50:
            taken += 1
            yield prompt

    results = lm.completed(prompts(), max_tokens=3, seed=1, n=2)
    assert taken == 0
    _, output = next(results)
    assert len(output.outputs) == 2
    assert taken <= lm.n_seq_max + 1  # of two samples each: twice the slots
    results.close()  # type: ignore[attr-defined]
    assert busy(lm) == 0


def test_other_calls_in_the_loop_and_beside_it(lm: LM) -> None:
    want = dict(enumerate(o.outputs[0].text for o in lm.generate(PROMPTS[:12], max_tokens=5, seed=2)))
    beside: dict[int, str] = {}

    def other() -> None:
        beside.update((i, o.outputs[0].text) for i, o in lm.completed(PROMPTS[:12], max_tokens=5, seed=2))

    thread = threading.Thread(target=other)
    thread.start()
    here = {}
    for i, output in lm.completed(PROMPTS[:12], max_tokens=5, seed=2):
        here[i] = output.outputs[0].text
        assert lm.generate(PROMPTS[i], max_tokens=5, seed=2)[0].outputs[0].text == want[i]
        assert lm.read(["the number"], [[0]])[0].logits.shape[0] == 1  # which waits until the others have ended
    thread.join()
    assert here == beside == want


def test_a_prompt_that_is_refused_comes_after_those_before_it(lm: LM) -> None:
    found: list[int] = []
    with pytest.raises(TilebeamError, match=r"Prompt 3: The prompt has \d+ tokens, the context 2048"):
        found.extend(i for i, _ in lm.completed([*PROMPTS[:3], "two " * 4000, PROMPTS[4]], max_tokens=4))
    assert sorted(found) == [0, 1, 2]
    assert busy(lm) == 0


def test_what_is_wrong_from_the_start(lm: LM) -> None:
    with pytest.raises(TilebeamError, match="no field 'max_token'"):
        lm.completed(PROMPTS, max_token=3)
    with pytest.raises(TilebeamError, match="40 prompts but 2 SamplingParams"):
        lm.completed(PROMPTS, PARAMS[:2])
    assert list(lm.completed([])) == []
    one: list[Any] = list(lm.completed("the number", max_tokens=2))
    assert [i for i, _ in one] == [0]
    results = lm.completed(PROMPTS, max_tokens=3)
    next(results)
    lm.close()
    with pytest.raises(TilebeamError, match="closed"):
        list(results)

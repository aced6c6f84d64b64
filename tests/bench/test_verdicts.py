"""bench/tiny_world.py: a search is called quicker only where an interval says so, on prompts that did not choose it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import tiny_world
from bench.lib.document import put_into
from bench.tiny.references import REASONERS

SMALL, LARGE = REASONERS[:2]
ROW = {"value": 0.5, "low": 0.4, "high": 0.6}


def figures(times: float, noise: float, prompts: int = 30) -> tiny_world.Figures:
    """A search of the small model takes `times` the time of the large one's greedy answer, another twice as much."""
    rng = np.random.default_rng(3)
    base = rng.uniform(0.01, 0.02, prompts)  # some prompts take longer for everybody

    def seconds(factor: float) -> list[float]:
        return list(base * factor * np.exp(noise * rng.standard_normal(prompts)))

    searches = [(SMALL, tiny_world.BEST, 4), (SMALL, tiny_world.BEAM, 4)]
    single = (LARGE, tiny_world.GREEDY, 1)
    return tiny_world.Figures(
        dict.fromkeys([*searches, single], ROW),
        {searches[0]: seconds(times), searches[1]: seconds(2 * times), single: seconds(1)},
        [],
        prompts,
    )


@pytest.mark.parametrize(("times", "noise", "reached"), [(0.5, 0.2, True), (2, 0.2, False), (0.98, 0.5, False)])
def test_sooner_is_what_the_interval_says(times: float, noise: float, reached: bool) -> None:
    verdict = tiny_world.overtaken(figures(times, noise), SMALL, LARGE)
    assert verdict.reached is reached
    assert tiny_world.SERIES[tiny_world.BEST] in verdict.why  # the quicker one


def test_the_prompts_that_choose_do_not_compare() -> None:
    """A search that was quick only where it was chosen is not quicker."""
    found = figures(1.5, 0.0)
    lucky = found.seconds[SMALL, tiny_world.BEAM, 4]
    lucky[::2] = [s / 100 for s in lucky[::2]]
    verdict = tiny_world.overtaken(found, SMALL, LARGE)
    assert tiny_world.SERIES[tiny_world.BEAM] in verdict.why
    assert verdict.reached is False


def test_too_few_prompts_give_no_verdict() -> None:
    with pytest.raises(ValueError, match="at least 4 prompts"):
        tiny_world.overtaken(figures(0.5, 0.0, prompts=3), SMALL, LARGE)


def test_a_share_of_time_has_the_ratio_in_its_interval() -> None:
    times, low, high = tiny_world.share_of_time([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
    assert (times, low, high) == pytest.approx((0.5, 0.5, 0.5))


def test_tables_go_between_the_marks(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- t: begin -->\nold\n<!-- t: end -->\nafter\n")
    put_into(path, "t", "\nnew\n")
    assert path.read_text() == "before\n<!-- t: begin -->\n\nnew\n\n<!-- t: end -->\nafter\n"
    path.write_text("<!-- t: end -->\n<!-- t: begin -->\n")
    with pytest.raises(ValueError, match="has not one <!-- t: begin -->"):
        put_into(path, "t", "new")

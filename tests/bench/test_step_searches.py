"""The scorer of bench.step_searches tells right beginnings from wrong ones as often as it says."""

from __future__ import annotations

import random

import pytest
from tilebeam import Prompt

from bench.step_searches import DoubtfulScorer
from bench.tiny import arithmetic


@pytest.mark.parametrize("auroc", [0.6, 0.8, 0.95])
def test_scores_have_their_auroc_and_are_probabilities(auroc: float) -> None:
    rng = random.Random(3)
    scorer = DoubtfulScorer(auroc)
    right, wrong = [], []
    for problem in arithmetic.draw_many(5, "train", 1200):
        solution = arithmetic.solution(problem)
        assert solution is not None
        steps = [line + "\n" for line in solution]
        if spoiled := rng.random() < 0.5:
            steps[0] = "1" + steps[0]
        scores = scorer.score_steps([problem + "\n"], [steps])[0]
        assert scores == scorer.score_steps([Prompt(problem + "\n")], [steps])[0]
        assert scores[:1] == scorer.score_steps([problem], [steps[:1]])[0]
        (wrong if spoiled else right).append(scores[0])
    pairs = [(a > b) + (a == b) / 2 for a in right for b in wrong]
    assert sum(pairs) / len(pairs) == pytest.approx(auroc, abs=0.04)
    sure = [s for s in right if 0.4 < s < 0.6], [s for s in wrong if 0.4 < s < 0.6]
    assert len(sure[0]) / sum(map(len, sure)) == pytest.approx(0.5, abs=0.12)

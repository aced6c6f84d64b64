"""Statistics of evaluations against brute force: every draw of k samples in every order; reference values; coverage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebeam import BestOfN, CompletionOutput, RequestOutput, SelfConsistency, TilebeamError, Usage, Verifier
from tilebeam.evaluation import estimators as stats
from tilebeam.evaluation import results

SAMPLES = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.sampled_from(["1", "2", "3", None]), min_size=n, max_size=n),
        st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=n, max_size=n),
        st.integers(1, n),
    )
)


def mean_over_draws(n: int, k: int, value: Callable[[tuple[int, ...]], float]) -> float:
    """Every way to draw k of n samples one after the other."""
    draws = list(itertools.permutations(range(n), k))
    return float(sum(Fraction(value(draw)) for draw in draws) / len(draws))


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(correct: list[bool], data: st.DataObject) -> None:
    n = len(correct)
    k = data.draw(st.integers(1, n))
    expected = mean_over_draws(n, k, lambda draw: any(correct[i] for i in draw))
    assert stats.pass_at_k(n, sum(correct), k) == pytest.approx(expected, abs=1e-12)
    # A verifier that knows the answer picks a right one whenever there is one.
    points = [float(c) for c in correct]
    assert stats.best_at_k(points, points, k) == pytest.approx(expected, abs=1e-12)


@given(SAMPLES, st.lists(st.booleans(), min_size=6, max_size=6))
def test_best_at_k_is_the_mean_over_draws(
    samples: tuple[list[str | None], list[float], int], right: list[bool]
) -> None:
    _, scores, k = samples
    n = len(scores)
    correct = [float(c) for c in right[:n]]

    def chosen(draw: tuple[int, ...]) -> float:
        return correct[max(draw, key=lambda i: (scores[i], -draw.index(i)))]

    assert stats.best_at_k(scores, correct, k) == pytest.approx(mean_over_draws(n, k, chosen), abs=1e-12)


class Given:
    """A model that says what it was given."""

    def __init__(
        self, answers: Sequence[str | None], weights: Sequence[float], draw: Sequence[int], cut: Sequence[bool]
    ) -> None:
        facts = [(f"{answers[j]}|{weights[j]}", "length" if cut[j] else "stop") for j in draw]
        self.outputs = [CompletionOutput(i, text, [0], end, i, 0.0) for i, (text, end) in enumerate(facts)]  # type: ignore[arg-type]

    def generate(self, *_: object, **__: object) -> list[RequestOutput]:
        return [RequestOutput("p", [1], self.outputs, Usage(), 0)]


def voted(
    answers: Sequence[str | None], weights: Sequence[float], draw: Sequence[int], cut: Sequence[bool] = (False,) * 6
) -> str | None:
    """The winner by the real vote; of equals the first drawn."""

    def extract(text: str) -> str | None:
        return None if text.startswith("None") else text.split("|")[0]

    vote = SelfConsistency(extract, weighting="reward", scorer=lambda _, text: float(text.split("|")[1]))
    return vote.infer(Given(answers, weights, draw, cut), "p", len(draw)).answer  # type: ignore[arg-type]


@settings(deadline=None, max_examples=40)
@given(SAMPLES, st.lists(st.booleans(), min_size=6, max_size=6))
def test_samples_that_were_cut_count_as_in_searches(
    samples: tuple[list[str | None], list[float], int], cut: list[bool]
) -> None:
    answers, weights, k = samples
    n = len(answers)
    facts = zip(answers, weights, cut, strict=False)
    records = [
        {"answer": a, "correct": float(a == "2"), "text": "", "finish": "length" if c else "stop", "scores": {"x": w}}
        for a, w, c in facts
    ]
    majority = partial(results._voted, lambda of, s, k: stats.majority_at_k(of, [r["correct"] for r in s], k))
    expected = mean_over_draws(n, k, lambda draw: voted(answers, [1.0] * 6, draw, cut) == "2")
    assert majority(records, k) == pytest.approx(expected, abs=1e-12)

    def chosen(draw: tuple[int, ...], knows: bool) -> float:
        scorer = Verifier(lambda _, text: float(text.split("|")[1]))
        scorer.knows = knows
        best = BestOfN(scorer).infer(Given(answers, weights, draw, cut), "p", k)  # type: ignore[arg-type]
        return records[draw[best.best_index]]["correct"]

    for name, knows in (("x", False), ("examples", True)):
        of = [r | {"scores": {name: w}} for r, w in zip(records, weights, strict=True)]
        expected = mean_over_draws(n, k, lambda draw, knows=knows: chosen(draw, knows))
        assert results._best(name, of, k) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(SAMPLES)
def test_weighted_at_k_is_the_mean_over_draws(samples: tuple[list[str | None], list[float], int]) -> None:
    answers, weights, k = samples
    correct = [float(a == "2") for a in answers]

    def shared(draw: tuple[int, ...]) -> float:
        totals: dict[str, float] = {}
        for i in draw:
            if (answer := answers[i]) is not None:
                totals[answer] = totals.get(answer, 0.0) + weights[i]
        best = [a for a in totals if totals[a] == max(totals.values())]
        if len(best) == 1:
            assert voted(answers, weights, draw) == best[0]
        return float("2" in best) / max(1, len(best))

    expected = mean_over_draws(len(answers), k, shared)
    assert stats.weighted_at_k(answers, weights, correct, k) == pytest.approx(expected, abs=1e-12)
    if all(w == weights[0] > 0 for w in weights):
        assert expected == pytest.approx(stats.majority_at_k(answers, correct, k), abs=1e-12)


def test_the_heaviest_sample_speaks_for_its_answer() -> None:
    # A checker may tell samples with the same answer apart (it sees the text): the vote returns the heaviest.
    assert stats.weighted_at_k(["a", "a", "b"], [0.2, 0.9, 0.5], [1, 0, 0], 3) == 0.0
    assert stats.weighted_at_k(["a", "a", "b"], [0.9, 0.2, 0.5], [1, 0, 0], 3) == 1.0
    assert stats.majority_at_k(["a", "a", "b"], [1, 0, 0], 3) == 0.5  # either may be the first


def test_small_weights_are_weights() -> None:
    # Products of the ratings of many steps are.
    assert stats.weighted_at_k(["a", "b"], [3e-13, 1e-13], [1, 0], 2) == 1.0
    assert stats.weighted_at_k(["a", "b", "b"], [3e-13, 1e-13, 2e-13], [1, 0, 0], 3) == 0.5
    assert stats.weighted_at_k(["a", "b", None], [0.0, 0.0, 1.0], [1, 0, 1], 3) == 0.5


def test_a_thousand_samples_vote() -> None:
    # There are 10^350 draws, and the number of right ones is that of a hypergeometric distribution.
    correct = [1.0] * 620 + [0.0] * 590
    wins = sum(math.comb(620, i) * math.comb(590, 501 - i) for i in range(251, 502)) / math.comb(1210, 501)
    assert stats.majority_at_k(["r"] * 620 + ["w"] * 590, correct, 501) == pytest.approx(wins, rel=1e-12)
    assert stats.pass_at_k(1210, 1, 501) == pytest.approx(501 / 1210)


def test_many_draws_are_sampled_with_the_seed() -> None:
    rng = np.random.default_rng(0)
    answers = [str(a) for a in rng.integers(0, 5, 40)]
    correct = [float(a == "0") for a in answers]
    exact = stats.majority_at_k(answers, correct, 20)
    some = stats.weighted_at_k(answers, [1.0] * 40, correct, 20, seed=3)
    assert some == stats.weighted_at_k(answers, [1.0] * 40, correct, 20, seed=3)
    assert some != stats.weighted_at_k(answers, [1.0] * 40, correct, 20, seed=4)
    assert abs(some - exact) < 4 * math.sqrt(exact * (1 - exact) / 2000)
    assert 0.01 < exact < 0.99


# Newcombe 1998 ("Two-sided confidence intervals for the single proportion", table I), and R's prop.test.
@pytest.mark.parametrize(
    ("solved", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_the_published_ones(solved: int, n: int, low: float, high: float) -> None:
    assert stats.wilson(solved / n, n) == pytest.approx((low, high), abs=5e-5)


def test_seeds_are_no_new_items() -> None:
    rng = np.random.default_rng(1)
    one = (rng.random(60) < 0.4).astype(float)
    alone = stats.share([one])
    assert (alone.low, alone.high) == pytest.approx(stats.wilson(one.mean(), 60), rel=1e-12)
    # The same verdicts three times tell nothing new; independent ones do.
    same = stats.share([one, one, one])
    assert (same.low, same.high, same.seed_std) == pytest.approx((alone.low, alone.high, 0.0))
    fresh = stats.share((rng.random((3, 60)) < 0.4).astype(float))
    assert fresh.high - fresh.low < 0.75 * (alone.high - alone.low)
    assert fresh.seed_std > 0
    assert (fresh.items, fresh.seeds) == (60, 3)
    certain = stats.share(np.ones((3, 60)))
    assert (certain.value, certain.low, certain.high) == pytest.approx((1.0, *stats.wilson(1.0, 60)))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Items of unlike difficulty, three seeds each; the truth is the mean difficulty of all items there are."""
    rng = np.random.default_rng(7)
    runs, items, seeds = 600, 50, 3
    covered, too_narrow = 0, 0
    for _ in range(runs):
        difficulty = rng.beta(0.6, 0.9, items)
        table = (rng.random((seeds, items)) < difficulty).astype(float)
        interval = stats.share(table)
        covered += interval.low <= 0.4 <= interval.high
        pooled = stats.wilson(interval.value, items * seeds)
        too_narrow += not pooled[0] <= 0.4 <= pooled[1]
    assert 0.93 <= covered / runs <= 0.985
    assert too_narrow / runs > 0.10  # what taking every verdict for independent would do


def test_bootstrap_compares_item_by_item() -> None:
    rng = np.random.default_rng(2)
    hard = rng.random((3, 80)) < rng.random(80)
    easier = hard | (rng.random((3, 80)) < 0.1)
    better = stats.paired_bootstrap(easier, hard, seed=5)
    assert better == stats.paired_bootstrap(easier, hard, seed=5)
    few = [stats.paired_bootstrap(easier, hard, seed=s, draws=50) for s in range(4)]
    assert len(set(few)) > 1
    assert better.value == pytest.approx(easier.mean() - hard.mean())
    assert 0 < better.low <= better.value <= better.high
    assert better.p < 0.01
    # The standard error of a paired mean: items' differences, seeds averaged.
    difference = easier.mean(0) - hard.mean(0)
    width = 2 * stats.Z95 * difference.std(ddof=1) / math.sqrt(80)
    assert better.high - better.low == pytest.approx(width, rel=0.15)
    worse = stats.paired_bootstrap(hard, easier, seed=5)
    assert (worse.value, worse.low, worse.high) == pytest.approx((-better.value, -better.high, -better.low))
    assert stats.paired_bootstrap(hard, hard).p == 1.0


@given(st.lists(st.tuples(st.sampled_from([1.0, 2.0, 3.0, 4.0]), st.sampled_from([0.1, 0.2, 0.3])), max_size=8))
def test_the_front_is_what_nothing_beats(points: list[tuple[float, float]]) -> None:
    front = stats.pareto_front(points)
    for i, (cost, good) in enumerate(points):
        beaten = any(
            c <= cost and g >= good and ((c, g) != (cost, good) or j < i) for j, (c, g) in enumerate(points) if j != i
        )
        assert (i in front) == (not beaten)
    assert front == sorted(front, key=lambda i: points[i][0])


def test_means_of_costs_have_the_interval_of_their_bootstrap() -> None:
    rng = np.random.default_rng(5)
    found = [stats.mean(rng.exponential(2.0, 60), seed=i) for i in range(200)]
    assert 0.88 < sum(m.low <= 2.0 <= m.high for m in found) / 200 <= 1.0
    assert stats.mean([3.0]) == stats.Mean(3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: stats.pass_at_k(4, 2, 5),
        lambda: stats.pass_at_k(4, 0.5, 2),
        lambda: stats.best_at_k([1.0], [1.0], 0),
        lambda: stats.best_at_k([1.0, 2.0], [1.0], 1),
        lambda: stats.weighted_at_k(["a"], [-1.0], [1.0], 1),
        lambda: stats.weighted_at_k(["a"], [math.inf], [1.0], 1),
        lambda: stats.wilson(1.2, 5),
        lambda: stats.share([]),
        lambda: stats.paired_bootstrap([[1.0]], [[1.0, 0.0]]),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(TilebeamError):
        call()

"""Accuracy from samples: what a method gives at every budget k, out of one run of N samples per item.

The samples of an item are drawn alike and independently, so any k of them, in any order, are as good a draw as any
other. Each figure at budget k is therefore the mean over all of them, in closed form where there is one: pass@k by the
estimator of Chen et al. ("Evaluating Large Language Models Trained on Code", section 2.1), best@k by the probability
that a rank is the first of k, maj@k by counting the draws in which an answer gets m votes and the others fewer.

Items are what is sampled from the world; seeds repeat the measurement on the same items. So a method's values are
averaged over the seeds first, and intervals and tests are over items: taking every (item, seed) pair for independent
would make the intervals too narrow.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError

F64 = npt.NDArray[np.float64]
Z95 = 1.959963984540054  # two-sided 95 % of a normal distribution

# weighted@k has no closed form: the mean over all draws of k where they are so many at most, else over this many.
_ALL_DRAWS = 15_000
_SOME_DRAWS = 2_000


# --- one item ---------------------------------------------------------------------------------------------------------


def pass_at_k(n: int, c: float, k: int) -> float:
    """Estimate the chance that one of k samples is right, from n samples of which c are: 1 - C(n-c, k) / C(n, k).

    Raises:
        TilebeamError: not 1 <= k <= n, or c is no whole number of 0 .. n (this formula needs right or wrong).
    """
    _check(n, k)
    if not 0 <= c <= n or c != int(c):
        raise TilebeamError(f"pass@k needs a whole number of right samples of 0 to {n}, not {c}.")
    return 1.0 - math.comb(n - int(c), k) / math.comb(n, k)


def best_at_k(scores: Sequence[float], correct: Sequence[float], k: int) -> float:
    """Estimate how right the best-scored of k samples is: the mean over all draws of k from the n samples.

    The samples in order of their scores: one of a group of g equal ones with b better ones before it is chosen in
    (C(n-b, k) - C(n-b-g, k)) / C(n, k) of all draws, each of the group as often as the others.

    Args:
        scores: of each sample, higher is better.
        correct: of each sample, 0 to 1.
    """
    n = len(scores)
    _check(n, k, len(correct))
    groups: dict[float, list[float]] = defaultdict(list)
    for score, value in zip(scores, correct, strict=True):
        groups[score].append(value)
    total, before = 0.0, 0
    for score in sorted(groups, reverse=True):
        group = groups[score]
        chosen = math.comb(n - before, k) - math.comb(n - before - len(group), k)
        total += chosen / math.comb(n, k) * math.fsum(group) / len(group)
        before += len(group)
    return total


def majority_at_k(answers: Sequence[Hashable | None], correct: Sequence[float], k: int) -> float:
    """Estimate how right the most frequent answer of k samples is: the mean over all draws; of equals the first drawn.

    Args:
        answers: of each sample, None for none: it takes a place and has no vote. Without any vote the result is wrong.
        correct: of each sample, 0 to 1; an answer is as right as its samples are in the mean.
    """
    n = len(answers)
    _check(n, k, len(correct))
    counts = Counter(a for a in answers if a is not None)
    right: dict[Hashable, float] = defaultdict(float)
    for answer, value in zip(answers, correct, strict=True):
        if answer is not None:
            right[answer] += value / counts[answer]
    total = 0.0
    for answer, worth in right.items():
        if worth > 0:
            others = Counter(counts.values())
            others[counts[answer]] -= 1
            total += worth * _majority_wins(counts[answer], tuple(sorted((+others).items())), n, k)
    return total


@lru_cache(maxsize=4096)
def _majority_wins(count: int, others: tuple[tuple[int, int], ...], n: int, k: int) -> float:
    """Compute the share of all draws of k that an answer of `count` samples wins; a tie of t counts 1/t.

    Args:
        others: (samples of an answer, answers with so many samples); n: all samples, those without an answer, too.
    """
    wins, silent, draws = 0.0, n - count - sum(size * number for size, number in others), math.comb(n, k)
    for votes in range(1, min(count, k) + 1):
        # ways[t][s]: draws of s samples from the others, t of them with as many votes and none with more.
        ways: list[list[int]] = [[0] * (k - votes + 1)]
        ways[0][0] = 1
        for size, number in others:
            for _ in range(number):
                ways = _one_more(ways, size, votes)
        # Whole numbers up to the division: of a thousand samples there are more draws than a float can count.
        ties = [sum(row[s] * math.comb(silent, k - votes - s) for s in range(k - votes + 1)) for row in ways]
        wins += math.fsum(math.comb(count, votes) * tie / ((t + 1) * draws) for t, tie in enumerate(ties))
    return wins


def _one_more(ways: list[list[int]], size: int, votes: int) -> list[list[int]]:
    """Extend `ways` by one more answer of `size` samples beside those counted."""
    room = len(ways[0])
    result = [[0] * room for _ in range(len(ways) + 1)]
    for t, row in enumerate(ways):
        for s, number in enumerate(row):
            if number:
                for drawn in range(min(size, votes, room - 1 - s) + 1):
                    result[t + (drawn == votes)][s + drawn] += number * math.comb(size, drawn)
    while len(result) > 1 and not any(result[-1]):
        result.pop()
    return result


def weighted_at_k(
    answers: Sequence[Hashable | None], weights: Sequence[float], correct: Sequence[float], k: int, *, seed: int = 0
) -> float:
    """Estimate how right the heaviest answer of k samples is: the mean over draws of k.

    An answer weighs what its samples weigh together and is as right as its heaviest sample (of equals the first);
    equally heavy answers share the draw. The mean is over all draws if they are at most 15 000, else over 2 000 drawn
    with `seed`.

    Args:
        answers: of each sample, None for none.
        weights: of each sample, >= 0.
        correct: of each sample, 0 to 1.
    """
    n = len(answers)
    _check(n, k, len(correct))
    drawn, value, weight = _draws(n, k, seed), np.asarray(correct, np.float64), np.asarray(weights, np.float64)
    if weight.shape != (n,) or not (np.isfinite(weight).all() and (weight >= 0).all()):
        raise TilebeamError(f"weighted@k needs {n} finite weights >= 0.")
    members: dict[Hashable, list[int]] = defaultdict(list)
    for i, answer in enumerate(answers):
        if answer is not None:
            members[answer].append(i)
    if not members:
        return 0.0
    totals = np.empty((len(drawn), len(members)))
    worth = np.empty_like(totals)
    for column, group in enumerate(members.values()):
        present, own = drawn[:, group], weight[group]
        # einsum, because BLAS would wake its threads for so little
        totals[:, column] = np.where(present.any(1), np.einsum("ij,j->i", present, own), -np.inf)
        if np.ptp(value[group]) == 0:
            worth[:, column] = value[group[0]]
        else:  # a checker of texts may tell samples with the same answer apart
            worth[:, column] = value[group][np.where(present, own, -1.0).argmax(1)]
    best = totals.max(1, keepdims=True)
    # Sums of the same weights in another order differ in the last bits.
    winners = (totals >= best - 1e-12 * np.abs(best)) & np.isfinite(totals)
    share = np.where(winners, worth, 0.0).sum(1) / np.maximum(1, winners.sum(1))
    return float(share.mean())


@lru_cache(maxsize=64)
def _draws(n: int, k: int, seed: int) -> npt.NDArray[np.bool_]:
    """List draws of k out of n as rows of a table [draws, n]."""
    number = math.comb(n, k)
    if number <= _ALL_DRAWS:
        chosen = np.array(list(itertools.combinations(range(n), k)), np.intp)
    else:
        chosen = np.random.default_rng([seed, n, k]).random((_SOME_DRAWS, n)).argpartition(k - 1, 1)[:, :k]
    table = np.zeros((len(chosen), n), np.bool_)
    np.put_along_axis(table, chosen, True, 1)
    table.setflags(write=False)
    return table


def _check(n: int, k: int, n_correct: int | None = None) -> None:
    if not 1 <= k <= n:
        raise TilebeamError(f"The budget must be between 1 and the number of samples ({n}), not be {k}.")
    if n_correct is not None and n_correct != n:
        raise TilebeamError(f"{n} samples but {n_correct} verdicts.")


# --- many items, several seeds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """A mean over prompts or items.

    Attributes:
        value: the mean; low, high: its 95 % interval, by the bootstrap if nothing else is said.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Share(Mean):
    """A share of items solved: the mean over items of their means over seeds, with Wilson's interval.

    Attributes:
        items, seeds: how many there were.
        seed_std: standard deviation of the seeds' values, 0 for one seed.
    """

    items: int
    seeds: int
    seed_std: float


def wilson(share: float, n: float) -> tuple[float, float]:
    """Compute Wilson's 95 % score interval of a share of n independent items (Wilson 1927); n need not be whole."""
    if not (0 <= share <= 1 and n > 0):
        raise TilebeamError(f"Wilson's interval needs a share of 0 to 1 of at least one item, not {share} of {n}.")
    z = Z95
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding may leave [0, 1], or the share itself out at its ends.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def share(values: npt.ArrayLike) -> Share:
    """Estimate the share solved, from the values of all items under all seeds.

    Items are independent, an item's seeds are not. Wilson's interval takes as its n the number of independent verdicts
    that would vary as much as the mean over items does: p (1 - p) / (s^2 / items), where s is the standard deviation
    of the items' means; never below the items nor above items times seeds.

    Args:
        values: 0 to 1, [seeds, items]; of one that is not a number neither is the share.
    """
    table = np.asarray(values, np.float64)
    if table.ndim != 2 or table.size == 0:
        raise TilebeamError(f"A share needs a table [seeds, items], not one of shape {table.shape}.")
    seeds, items = table.shape
    if np.isnan(table).any():
        return Share(math.nan, math.nan, math.nan, items, seeds, math.nan)
    means = table.mean(0)
    value = min(1.0, max(0.0, math.fsum(means) / items))
    n = float(items)
    if items > 1 and 0 < value < 1:
        variance = float(means.var(ddof=1)) / items
        n = float(items * seeds) if variance <= 0 else value * (1 - value) / variance
        n = min(max(n, items), items * seeds)
    low, high = wilson(value, n)
    spread = float(table.mean(1).std(ddof=1)) if seeds > 1 else 0.0
    return Share(value, low, high, items, seeds, spread)


def mean(values: Sequence[float], *, seed: int = 0, draws: int = 2_000) -> Mean:
    """Average what was measured once per prompt. Costs of prompts are skewed, so the interval is no multiple of their
    deviation but the bootstrap's."""
    found = np.asarray(values, np.float64)
    means = found[np.random.default_rng(seed).integers(0, len(found), (draws, len(found)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Mean(float(found.mean()), float(low), float(high))


@dataclass(frozen=True)
class Difference(Mean):
    """How much better one method is than another on the same items: the mean of first minus second.

    Attributes:
        p: two-sided: how likely a difference as far from 0 would be if there were none, by the bootstrap.
    """

    p: float


def paired_bootstrap(first: npt.ArrayLike, second: npt.ArrayLike, *, seed: int = 0, draws: int = 10_000) -> Difference:
    """Compare two methods on the same items: resample the items with all their seeds (Efron & Tibshirani, chapter 13).

    Args:
        first, second: 0 to 1, [seeds, items], the same items in the same order.
        seed: of the resampling; the same seed gives the same result.
        draws: resamples.
    """
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or a.size == 0 or b.size == 0:
        raise TilebeamError(f"Methods are compared on the same items, not on {a.shape} and {b.shape} [seeds, items].")
    differences = a.mean(0) - b.mean(0)
    items = len(differences)
    rng = np.random.default_rng(seed)
    means = np.empty(draws)
    step = max(1, 4_000_000 // items)
    for start in range(0, draws, step):
        number = min(step, draws - start)
        means[start : start + number] = differences[rng.integers(0, items, (number, items))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    # One is added to both counts: an observed difference is one more draw, and p is never 0 (Davison & Hinkley, 4.2.5).
    tail = min((means <= 1e-12).sum(), (means >= -1e-12).sum())
    p = min(1.0, 2.0 * (int(tail) + 1) / (draws + 1))
    return Difference(float(differences.mean()), float(low), float(high), p)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Find the points (cost, accuracy) that no other point beats: their indices, by rising cost.

    A point is beaten by one that costs no more and is at least as accurate, and is better in one of the two; of equal
    points the first stays.
    """
    front: list[int] = []
    best = -math.inf
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1], i)):
        if points[i][1] > best:
            front.append(i)
            best = points[i][1]
    return front

"""How good scores are: by rank, as probabilities, and by what choosing and voting with them gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilebeam.evaluation import estimators

Floats = npt.NDArray[np.float64]

_DRAWS = 400  # of problems, for intervals


def auroc(scores: npt.ArrayLike, right: npt.ArrayLike) -> float:
    """The chance that a right sample has a higher score than a wrong one, ties counting half; NaN without either."""
    s, r = np.asarray(scores, np.float64), np.asarray(right, bool)
    n, m = int(r.sum()), int((~r).sum())
    if not n or not m:
        return float("nan")
    _, which, counts = np.unique(s, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # mean rank of equal ones
    return float((ranks[which][r].sum() - n * (n + 1) / 2) / (n * m))


def auroc_within(scores: npt.ArrayLike, right: npt.ArrayLike, problem: npt.ArrayLike) -> float:
    """The mean of each problem's own AUROC, over problems with right and wrong samples; NaN without any."""
    found = list(_each(np.asarray(scores), np.asarray(right, bool), np.asarray(problem)).values())
    return float(np.mean(found)) if found else float("nan")


def _each(scores: npt.NDArray[Any], right: npt.NDArray[np.bool_], problem: npt.NDArray[Any]) -> dict[Any, float]:
    values = {p: auroc(scores[problem == p], right[problem == p]) for p in np.unique(problem)}
    return {p: v for p, v in values.items() if v == v}


def intervals(
    scores: npt.ArrayLike, right: npt.ArrayLike, problem: npt.ArrayLike, seed: int = 0
) -> tuple[tuple[float, float], tuple[float, float]]:
    """95 % bootstrap intervals over problems of `auroc` and of `auroc_within`."""
    s, r, p = np.asarray(scores, np.float64), np.asarray(right, bool), np.asarray(problem)
    rng, names = np.random.default_rng(seed), np.unique(p)
    rows = {name: np.flatnonzero(p == name) for name in names}
    each = np.array(list(_each(s, r, p).values()))
    draws = [np.concatenate([rows[n] for n in rng.choice(names, len(names))]) for _ in range(_DRAWS)]
    within = [float(rng.choice(each, len(each)).mean()) for _ in range(_DRAWS)] if len(each) else []
    return _middle([auroc(s[d], r[d]) for d in draws]), _middle(within)


def _middle(values: Sequence[float]) -> tuple[float, float]:
    known = [v for v in values if v == v]
    if not known:
        return float("nan"), float("nan")
    low, high = np.percentile(known, [2.5, 97.5])
    return float(low), float(high)


def reliability(scores: Floats, right: Floats, bins: int = 10) -> list[dict[str, float]]:
    """Samples by their score in bins of equal width: how many, their mean score, and the share that is right."""
    place = np.minimum((scores * bins).astype(int), bins - 1)
    return [
        {"count": int(n), "score": float(scores[place == b].mean()), "right": float(right[place == b].mean())}
        for b in range(bins)
        if (n := (place == b).sum())
    ]


def calibration_error(table: Sequence[dict[str, float]]) -> float:
    """Expected calibration error: the mean distance of score and share right, over all samples."""
    total = sum(row["count"] for row in table)
    return sum(row["count"] * abs(row["score"] - row["right"]) for row in table) / total if total else float("nan")


def budgets(problems: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What methods reach at budgets 1, 2, 4 .. up to the samples of a problem: shares of problems solved.

    Args:
        problems: of each sample "answer", "correct", "score", "logprob", "tokens".
    """
    return [
        {"budget": k} | {name: float(_solved(problems, name, k).mean()) for name in METHODS} for k in _sizes(problems)
    ]


def gains(problems: Sequence[Sequence[dict[str, Any]]], seed: int = 0) -> list[dict[str, Any]]:
    """What the head wins at the greatest budget over what needs no head: a paired bootstrap over problems."""
    found = []
    for k in _sizes(problems)[-1:]:
        for first, second in GAINS if k > 1 else ():
            values = [_solved(problems, name, k)[None] for name in (first, second)]
            gain = estimators.paired_bootstrap(*values, seed=seed)
            found.append({"budget": k, "first": first, "second": second} | gain.as_dict())
    return found


def _sizes(problems: Sequence[Sequence[dict[str, Any]]]) -> list[int]:
    most = min((len(samples) for samples in problems), default=0)
    return [1 << i for i in range(most.bit_length())]


def _solved(problems: Sequence[Sequence[dict[str, Any]]], name: str, k: int) -> Floats:
    """Of each problem, how often a method solves it with k samples."""
    return np.array([METHODS[name](samples, k) for samples in problems], np.float64)


def _of(samples: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return [s[key] for s in samples]


_Method = Callable[[Sequence[dict[str, Any]], int], float]
METHODS: dict[str, _Method] = {
    "majority": lambda s, k: estimators.majority_at_k(_of(s, "answer"), _of(s, "correct"), k),
    "weighted by head": lambda s, k: estimators.weighted_at_k(_of(s, "answer"), _of(s, "score"), _of(s, "correct"), k),
    "best by head": lambda s, k: estimators.best_at_k(_of(s, "score"), _of(s, "correct"), k),
    "best by log-probability": lambda s, k: estimators.best_at_k(_of(s, "logprob"), _of(s, "correct"), k),
    "shortest": lambda s, k: estimators.best_at_k([-t for t in _of(s, "tokens")], _of(s, "correct"), k),
    "any right": lambda s, k: estimators.best_at_k(_of(s, "correct"), _of(s, "correct"), k),
}
GAINS = (("weighted by head", "majority"), ("best by head", "best by log-probability"))

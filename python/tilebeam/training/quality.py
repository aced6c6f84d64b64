"""The quality of scores: as probabilities, and by what choosing and voting with them gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilebeam.evaluation import estimators

Floats = npt.NDArray[np.float64]


def reliability(scores: Floats, right: Floats, bins: int = 10) -> list[dict[str, float]]:
    """Sort samples by their score into bins of equal width: how many, their mean score, and the share that is right."""
    place = np.minimum((scores * bins).astype(int), bins - 1)
    return [
        {"count": int(n), "score": float(scores[place == b].mean()), "right": float(right[place == b].mean())}
        for b in range(bins)
        if (n := (place == b).sum())
    ]


def calibration_error(table: Sequence[dict[str, float]]) -> float:
    """Compute the expected calibration error: the mean distance of score and share right, over all samples."""
    total = sum(row["count"] for row in table)
    return sum(row["count"] * abs(row["score"] - row["right"]) for row in table) / total if total else float("nan")


def budgets(problems: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Compute what methods reach at budgets 1, 2, 4 .. up to the samples of a problem: shares of problems solved.

    Args:
        problems: of each sample "answer", "correct", "score", "logprob", "tokens".
    """
    return [
        {"budget": k} | {name: float(_solved(problems, name, k).mean()) for name in METHODS} for k in _sizes(problems)
    ]


def gains(problems: Sequence[Sequence[dict[str, Any]]], seed: int = 0) -> list[dict[str, Any]]:
    """Compute what the head wins at the greatest budget over what needs no head: a paired bootstrap over problems."""
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
    """Return for each problem how often a method solves it with k samples."""
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

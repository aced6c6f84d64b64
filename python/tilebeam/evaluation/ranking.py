"""How well scores tell right samples from wrong ones, by rank alone: AUROC over all samples and within a problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_DRAWS = 400  # of problems, for intervals

Interval = tuple[float, float]


def auroc(scores: npt.ArrayLike, right: npt.ArrayLike) -> float:
    """Estimate the chance that a right sample outscores a wrong one, ties counting half; NaN without either."""
    s, r = np.asarray(scores, np.float64), np.asarray(right, bool)
    n, m = int(r.sum()), int((~r).sum())
    if not n or not m:
        return float("nan")
    _, which, counts = np.unique(s, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # mean rank of equal ones
    return float((ranks[which][r].sum() - n * (n + 1) / 2) / (n * m))


def auroc_within(scores: npt.ArrayLike, right: npt.ArrayLike, problem: npt.ArrayLike) -> float:
    """Average each problem's own AUROC, over problems with right and wrong samples; NaN without any."""
    found = list(_each(np.asarray(scores), np.asarray(right, bool), np.asarray(problem)).values())
    return float(np.mean(found)) if found else float("nan")


def _each(scores: npt.NDArray[Any], right: npt.NDArray[np.bool_], problem: npt.NDArray[Any]) -> dict[Any, float]:
    values = {p: auroc(scores[problem == p], right[problem == p]) for p in np.unique(problem)}
    return {p: v for p, v in values.items() if v == v}


def intervals(
    scores: npt.ArrayLike, right: npt.ArrayLike, problem: npt.ArrayLike, seed: int = 0
) -> tuple[Interval, Interval]:
    """Bootstrap 95 % intervals over problems of `auroc` and of `auroc_within`."""
    s, r, p = np.asarray(scores, np.float64), np.asarray(right, bool), np.asarray(problem)
    rng, names = np.random.default_rng(seed), np.unique(p)
    rows = {name: np.flatnonzero(p == name) for name in names}
    each = np.array(list(_each(s, r, p).values()))
    draws = [np.concatenate([rows[n] for n in rng.choice(names, len(names))]) for _ in range(_DRAWS)]
    within = [float(rng.choice(each, len(each)).mean()) for _ in range(_DRAWS)] if len(each) else []
    return _middle([auroc(s[d], r[d]) for d in draws]), _middle(within)


def _middle(values: Sequence[float]) -> Interval:
    known = [v for v in values if v == v]
    if not known:
        return float("nan"), float("nan")
    low, high = np.percentile(known, [2.5, 97.5])
    return float(low), float(high)


def figures(
    scores: npt.ArrayLike, right: npt.ArrayLike, problem: npt.ArrayLike, whole: npt.ArrayLike, seed: int = 0
) -> dict[str, Any]:
    """Compute all AUROCs of one kind of score; NaN where one cannot be had.

    Args:
        scores, right, problem: of each sample: its score, whether it is right, which problem it answers.
        whole: of each sample: it came to its end.
        seed: of the bootstrap.

    Returns:
        "all" and "within", AUROC over all samples and within a problem, each with its "_interval"; "whole" and
        "whole_within": the same of samples that were not cut off.
    """
    s, r, p, w = np.asarray(scores, np.float64), np.asarray(right, bool), np.asarray(problem), np.asarray(whole, bool)
    over_all, within = intervals(s, r, p, seed)
    return {
        "all": auroc(s, r),
        "all_interval": over_all,
        "within": auroc_within(s, r, p),
        "within_interval": within,
        "whole": auroc(s[w], r[w]),
        "whole_within": auroc_within(s[w], r[w], p[w]),
    }


def table(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lay out `figures` by name as Markdown."""
    yield "| AUROC of | all samples | within a problem | without cut-off ones | within a problem |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, row in rows.items():
        cells = (figure(row.get(k), row.get(f"{k}_interval")) for k in ("all", "within", "whole", "whole_within"))
        yield f"| {name} | " + " | ".join(cells) + " |"


def figure(value: float | None, interval: Interval | None = None) -> str:
    """Spell an AUROC as people read it."""
    if value is None or value != value:
        return "-"
    return f"{value:.3f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")

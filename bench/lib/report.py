"""What all benches share: timing two things in turn, and one JSON object with a row per figure.

A row is {"name", "baseline", "value", "unit", "ratio", "ratio_min", "ratio_max", "share_of_limit"} and whatever the
bench adds. A ratio above 1 means that Tilebeam is better; it is the median of the ratios of adjacent runs, with the
least and the greatest, because both runs of a pair met the machine in the same mood.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.lib import limits

PAUSE = 0.025  # seconds: the baseline's threads spin that long after a run before they sleep


@dataclass(frozen=True)
class Pairs:
    """Seconds per run of both sides, one pair per round."""

    ours: list[float]
    baseline: list[float]

    @property
    def ratios(self) -> list[float]:
        """How many times faster ours was, per round."""
        return [b / a for a, b in zip(self.ours, self.baseline, strict=True)]


def seconds_of(run: Callable[[], object], least: float) -> float:
    """Mean time of one call over at least `least` seconds."""
    count, start = 0, time.perf_counter()
    while True:
        run()
        count += 1
        elapsed = time.perf_counter() - start
        if elapsed >= least:
            return elapsed / count


def interleave(
    ours: Callable[[], object], baseline: Callable[[], object], rounds: int, least: float, between: float = PAUSE
) -> Pairs:
    """Run A B A B, with a pause of `between` seconds before each A."""
    ours()
    baseline()
    pairs = Pairs([], [])
    for _ in range(rounds):
        time.sleep(between)
        pairs.ours.append(seconds_of(ours, least))
        pairs.baseline.append(seconds_of(baseline, least))
    return pairs


def row(name: str, pairs: Pairs, work: float, unit: str, limit: float | None = None, **more: Any) -> dict[str, Any]:
    """A row from timed pairs.

    Args:
        work: what one run does, in `unit` times seconds: the value is work / seconds.
        limit: the machine's own rate in the same unit; None: no share is given.
    """
    value = work / median(pairs.ours)
    return {
        "name": name,
        "baseline": round(work / median(pairs.baseline), 3),
        "value": round(value, 3),
        "unit": unit,
        "ratio": round(median(pairs.ratios), 3),
        "ratio_min": round(min(pairs.ratios), 3),
        "ratio_max": round(max(pairs.ratios), 3),
        "share_of_limit": None if limit is None else round(value / limit, 3),
        **more,
    }


def emit(bench: str, peaks: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the one JSON object."""
    print(json.dumps({"bench": bench, "machine": limits.machine(), "limits": dict(peaks), "rows": list(rows)}))


def show(r: Mapping[str, Any]) -> None:
    """Print one row for people."""
    share = "" if r["share_of_limit"] is None else f"   {r['share_of_limit']:4.0%} of the limit"
    print(
        f"{r['name']:44} {r['value']:10.4g} {r['unit']:9} {r['ratio']:6.2f}x [{r['ratio_min']:.2f}, "
        f"{r['ratio_max']:.2f}] of {r['baseline']:.4g}{share}",
        flush=True,
    )

"""What all benches share: timing two things in turn, and one JSON object with a row per figure.

A row is {"name", "baseline", "value", "unit", "ratio", "ratio_min", "ratio_max", "share_of_limit"} and whatever the
bench adds. A ratio above 1 means that Tilebeam is better; it is the median of the ratios of adjacent runs, with the
least and the greatest, because both runs of a pair met the machine in the same mood.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tilebeam import TilebeamError
from tilebeam.measure.machine import busy_note

from bench.lib import limits

PAUSE = 0.025  # seconds: the baseline's threads spin that long after a run before they sleep


@dataclass(frozen=True)
class Pairs:
    """Seconds per run of both sides, one pair per round."""

    ours: list[float]
    baseline: list[float]

    @property
    def ratios(self) -> list[float]:
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
    """Make a row from timed pairs.

    Args:
        work: what one run does, in `unit` times seconds: the value is work / seconds.
        limit: the machine's own rate in the same unit; None: no share is given.
    """
    baseline, value = (work / median(seconds) for seconds in (pairs.baseline, pairs.ours))
    share = None if limit is None else value / limit
    return figures(name, round(baseline, 3), round(value, 3), unit, pairs.ratios, share, **more)


def three_digits(share: float) -> float:
    """Round to three digits from the first that is not 0: a tiny model's share of a limit is small, and not none."""
    return float(f"{share:.3g}")


def figures(
    name: str,
    baseline: float | None,
    value: float,
    unit: str,
    ratios: Sequence[float],
    share: float | None,
    **more: Any,
) -> dict[str, Any]:
    """Make a row of figures that are no rates; its ratio is the median of `ratios`, with the least and the greatest."""
    return {
        "name": name,
        "baseline": baseline,
        "value": value,
        "unit": unit,
        "ratio": round(median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "share_of_limit": None if share is None else three_digits(share),
        **more,
    }


class Rows:
    """A bench's rows: shown one by one as they are measured, or kept for one JSON object.

    Args:
        bench: its name.
        as_json: print only the object, at the end.
    """

    def __init__(self, bench: str, as_json: bool) -> None:
        self._bench, self._as_json = bench, as_json
        self.rows: list[dict[str, Any]] = []

    def add(self, row: Mapping[str, Any], *notes: str) -> None:
        """Another row, and lines for people that stand below it."""
        self.rows.append(dict(row))
        if not self._as_json:
            _show(row)
            for note in notes:
                print(f"{'':44} {note}", flush=True)

    def finish(self, peaks: Mapping[str, float] | None = None, *notes: str) -> None:
        """Print the object, with the machine's limits, or lines for people that stand below all rows."""
        if self._as_json:
            head = {"bench": self._bench, "machine": limits.machine(), "limits": dict(peaks or {})}
            print(json.dumps(head | {"rows": self.rows}))
        else:
            for note in notes:
                print(note)


def _show(r: Mapping[str, Any]) -> None:
    share = "" if r["share_of_limit"] is None else f"   {r['share_of_limit']:4.0%} of the limit"
    baseline = "" if r["baseline"] is None else f" of {r['baseline']:.4g}"
    print(
        f"{r['name']:44} {r['value']:10.4g} {r['unit']:9} {r['ratio']:6.2f}x [{r['ratio_min']:.2f}, "
        f"{r['ratio_max']:.2f}]{baseline}{share}",
        flush=True,
    )


def start(main: Callable[[], None]) -> None:
    """Run a bench; what goes wrong is one sentence on stderr and exit status 1."""
    try:
        main()
    except (TilebeamError, OSError, ValueError, RuntimeError) as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")


def warn_if_busy(share: float) -> None:
    """Say on stderr that other programs used this share of the CPUs, where that is too much for figures."""
    if note := busy_note(share):
        print(note, file=sys.stderr)

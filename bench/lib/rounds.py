"""Rounds of a long bench, kept in a file so that it can be measured in slices: `--resume FILE --seconds S`.

A round is one run of Tilebeam and one of the baseline next to each other, with the machine's limits measured beside
them. The file has a line of JSON per round, behind one that says what was measured; a bench that is stopped or killed
loses the round at work and nothing else. Called again with the same FILE it goes on, the cases with the fewest rounds
first, and reports on all rounds so far.

A round in which other programs used the machine is measured again, up to twice; such rounds count only for a case that
has no other.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tilebeam.cli import console
from tilebeam.measure.machine import OtherLoad

from bench.lib import report

BUSY = 0.1  # share of all CPUs that others may use
_LONG = 0.3  # seconds: of shorter rounds the kernel's ticks do not tell who used the machine
_STARTED = time.monotonic()  # about when the process did: imports count


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", type=Path, metavar="FILE", help="keep rounds in FILE and go on from those it has")
    parser.add_argument("--seconds", type=float, help="begin no round that would not end within this time")


class Rounds:
    """Rounds by case.

    Args:
        path: the file; None keeps them in memory.
        setting: what must be the same for rounds to be put together: model, threads, ..
        seconds: time for this process; None: no limit.
        first: what to leave for a case's first round; None: 0.4 of the time.

    Raises:
        ValueError: the file holds rounds of another setting, or no rounds at all.
    """

    def __init__(
        self,
        path: Path | None,
        setting: Mapping[str, Any],
        seconds: float | None = None,
        *,
        first: float | None = None,
    ) -> None:
        self._path, self._seconds = path, seconds
        self._first = 0.4 * (seconds or 0) if first is None else first
        self._rounds: dict[str, list[dict[str, float]]] = {}
        self._longest: dict[str, float] = {}
        self._at_work: tuple[str, float, OtherLoad] | None = None
        if path is None:
            return
        wanted = json.loads(json.dumps(setting))
        if not path.is_file() or not path.stat().st_size:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
            return
        try:
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # without a line that was cut short when its writer was killed
            lines = [json.loads(line) for line in whole.splitlines()]
            found = lines[0]
            for line in lines[1:]:
                self._count(line["case"], float(line["took"]), dict(line["figures"]))
        except (ValueError, LookupError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} does not hold rounds of a bench: delete it or name another file") from error
        if found != wanted:
            raise ValueError(f"{path} was measured with {found}, not {wanted}: delete it or name another file")
        if whole != text:
            path.write_text(whole, encoding="utf-8")

    def __contains__(self, case: str) -> bool:
        return case in self._rounds

    def count(self, case: str) -> int:
        """Count the valid rounds of a case: all that met a quiet machine, and a third of the others."""
        quiet = sum(r["others"] < BUSY for r in self._rounds.get(case, []))
        return quiet + (len(self._rounds.get(case, [])) - quiet) // 3

    def fewest(self, cases: Iterable[str]) -> int:
        return min(self.count(c) for c in cases)

    def turns(self, cases: Iterable[str], wanted: int, *, back_and_forth: bool = False) -> Iterator[str]:
        """Cases to measure, each with its round begun, those with the fewest rounds first: until all have as many as
        wanted, or the time is over. The caller measures it and calls `end`. The order may turn round each time."""
        names = list(cases)
        with console.bar("rounds") as progress:
            task = progress.add_task("", total=sum(max(0, wanted - self.count(name)) for name in names), note="")
            while (least := self.fewest(names)) < wanted:
                begun = False
                for name in names:
                    if self.count(name) > least or not self.begin(name):
                        continue
                    begun = True
                    progress.update(task, description=name)
                    yield name
                    progress.advance(task)
                if not begun:
                    return
                if back_and_forth:
                    names.reverse()

    def begin(self, case: str) -> bool:
        """Begin a round of this case if there is time, by how long its longest took; return whether there is."""
        if not self.has_time(self._longest.get(case, self._first)):
            return False
        self._at_work = case, time.monotonic(), OtherLoad().__enter__()
        return True

    def has_time(self, seconds: float) -> bool:
        """Tell whether this process has so much time left."""
        return self._seconds is None or self._seconds - (time.monotonic() - _STARTED) >= seconds

    def end(self, **figures: float) -> None:
        """Record what the round begun last gave: seconds, usually of "ours" and of "baseline", and limits."""
        if self._at_work is None:
            raise RuntimeError("no round was begun")
        case, began, others = self._at_work
        self._at_work = None
        others.__exit__()
        took = time.monotonic() - began
        figures["others"] = round(others.share, 3) if took > _LONG else 0.0
        self._count(case, took, figures)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"case": case, "took": round(took, 3), "figures": figures}) + "\n")

    def row(
        self,
        case: str,
        work: float,
        unit: str,
        *,
        ours: str = "ours",
        baseline: str = "baseline",
        title: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Make a row of the report, with the number of rounds that have both sides and the share of the CPUs that
        others used in them at most.

        Args:
            work: see `report.row`.
            ours, baseline: the figures that are compared, where rounds have several.
            title: of the row, if not the case's name.
        """
        rounds = [r for r in self._counted(case) if ours in r and baseline in r]
        pairs = report.Pairs([r[ours] for r in rounds], [r[baseline] for r in rounds])
        others = max(r["others"] for r in rounds)
        return report.row(title or case, pairs, work, unit, rounds=len(rounds), others=others, **more)

    def figures(self, case: str) -> set[str]:
        return set.intersection(*(set(r) for r in self._counted(case)))

    def measured(self, case: str, *figures: str) -> bool:
        return case in self and any(set(figures) <= set(r) for r in self._counted(case))

    def against(self, figure: str, case: str, work: float) -> dict[str, float]:
        """Compare a case's rounds with a third engine whose seconds are `figure`: its rate, and how often ours is that.

        Empty if it was not measured."""
        rounds = [r for r in self._counted(case) if figure in r]
        if not rounds:
            return {}
        ratios = [r[figure] / r["ours"] for r in rounds]
        return {figure: round(work / self.median(case, figure), 3), f"{figure}_ratio": round(median(ratios), 3)}

    def ratios(self, case: str) -> list[float]:
        return [r["baseline"] / r["ours"] for r in self._counted(case)]

    def values(self, case: str, figure: str) -> list[float]:
        return [r[figure] for r in self._counted(case)]

    def median(self, case: str, figure: str) -> float:
        return median(self.values(case, figure))

    def overall(self, figure: str, cases: Iterable[str]) -> float:
        """Return the median of one figure over all rounds of these cases, of which at least one has any."""
        return round(median(r[figure] for case in cases if case in self for r in self._counted(case)), 2)

    def warn(self) -> None:
        """Say on stderr that some case had no quiet round, where that is so."""
        report.warn_if_busy(max((r["others"] for case in self._rounds for r in self._counted(case)), default=0.0))

    def _counted(self, case: str) -> list[dict[str, float]]:
        rounds = self._rounds[case]
        return [r for r in rounds if r["others"] < BUSY] or rounds

    def _count(self, case: str, took: float, figures: dict[str, float]) -> None:
        figures["others"] = float(figures["others"])
        self._rounds.setdefault(case, []).append(figures)
        self._longest[case] = max(took, self._longest.get(case, 0.0))

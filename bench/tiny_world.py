"""Test-time scaling on the tiny world: every method at every budget, latency, and whether the targets are reached.

    python -m bench.tiny_world --into docs/tiny-world.md                      accuracy (minutes)
    python -m bench.tiny_world --into docs/tiny-world.md --latency-items 30   on a quiet machine: latency as well

The three reasoners and the process reward model of bench/tiny/models are evaluated by `tilebeam eval` on expressions
that no model was trained on; the command is printed. What is finished is kept in --out, and a second call goes on from
there: accuracy can be measured on a busy machine, latency later. --fresh begins anew.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tilebeam.cli import main as cli
from tilebeam.evaluation.config import GREEDY
from tilebeam.evaluation.estimators import paired_bootstrap
from tilebeam.evaluation.results import PASS
from tilebeam.measure.machine import OtherLoad, cpu_info

from bench.lib import CACHE, ROOT, report
from bench.lib.document import put_into
from bench.lib.options import Parser
from bench.tiny import arithmetic, references

SEED = 2026  # of the test expressions
# Seeds and counts of other draws: the reward model was chosen by the first, tests are written around the second.
LOOKED_AT = ((2, 300), (11, 40))
_BUSY = 0.1  # share of the CPUs that others may use while latency is measured
BEST, BEAM = "best-of-n[prm]", "beam[prm]"
SERIES = {
    GREEDY: "greedy, one answer",
    PASS: "pass@k (bound)",
    BEST: "best-of-n, reward model",
    "self-consistency": "self-consistency",
    "self-consistency[prm]": "votes weighted by reward model",
    BEAM: "beam search",
    "dvts[prm]": "DVTS",
}


def write_items(path: Path, count: int) -> None:
    """The test expressions as items of `tilebeam eval`, without those that anybody has looked at before."""
    seen = {p for seed, n in LOOKED_AT for p in arithmetic.draw_many(seed, "test", n)}
    problems = [p for p in arithmetic.draw_many(SEED, "test", count + len(seen)) if p not in seen][:count]
    lines = [json.dumps({"id": p, "prompt": p + "\n", "answer": str(arithmetic.value(p))}) for p in problems]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def command(options: argparse.Namespace, items: Path) -> list[str]:
    """What is run."""
    checker = ROOT / "bench" / "tiny" / "arithmetic.py"
    models = [part for n in references.REASONERS for part in ("-m", f"{n}={references.file_of(n, options.kind)}")]
    return [
        *("eval", *models),
        *("--task", f"jsonl:{items}", "--extract", f"{checker}:answer", "--checker", f"{checker}:verdict"),
        *("--method", "greedy,best-of-n,self-consistency,beam,dvts"),
        *("--budget", options.budgets, "--seeds", options.seeds),
        *("--prm", str(references.file_of(references.PRM, options.kind)), "--scorer", "prm"),
        *("--reward-kind", "token", "--reward-tag", references.TAG),
        *("--reward-labels", f"{references.GOOD},{references.BAD}"),
        *("--temp", "1.0", "--top-k", "0", "--top-p", "1.0", "-n", "96"),
        *("-np", "64", "-c", "8192", "--unit-items", "20", "-t", str(options.threads)),
        *("--latency-items", str(options.latency_items), "-o", str(options.out)),
    ]


# --- figures ----------------------------------------------------------------------------------------------------------


Key = tuple[str, str, int]  # model, series, budget


@dataclass
class Figures:
    """What an evaluation's folder says.

    Attributes:
        accuracy: rows of the report.
        seconds: of each timed prompt, in one order for all; the runs of a prompt followed each other in a random order.
        comparisons: of the report; items: how many.
    """

    accuracy: dict[Key, dict[str, Any]]
    seconds: dict[Key, list[float]]
    comparisons: list[dict[str, Any]]
    items: int

    @classmethod
    def read(cls, folder: Path) -> Figures:
        """From report.json and, where latency was measured, latency.jsonl."""
        found = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        rows = [r for r in found["accuracy"] if r["figure"] != "naive@k"]
        seconds: dict[Key, list[float]] = {}
        timed = folder / "latency.jsonl"
        for line in timed.read_text(encoding="utf-8").splitlines() if timed.exists() else ():
            if "seconds" in (run := json.loads(line)):
                seconds.setdefault((run["model"], run["series"], run["budget"]), []).append(run["seconds"])
        accuracy = {(r["model"], r["series"], r["budget"]): r for r in rows}
        return cls(accuracy, seconds, found["comparisons"], found["items"])

    def share(self, model: str, series: str, budget: int) -> float:
        """Accuracy in percent."""
        return 100 * float(self.accuracy[model, series, budget]["value"])

    def difference(self, model: str, first: tuple[str, int], second: tuple[str, int]) -> dict[str, float] | None:
        """The paired bootstrap between two rows of one model, in percent."""
        for c in self.comparisons:
            a, b = c["first"], c["second"]
            sides = [(x["model"], x["series"], x["budget"]) for x in (a, b)]
            for sign, (x, y) in ((1, sides), (-1, sides[::-1])):
                if x == (model, *first) and y == (model, *second):
                    low, high = sorted((sign * c["low"], sign * c["high"]))
                    return {"value": 100 * sign * c["value"], "low": 100 * low, "high": 100 * high}
        return None

    @property
    def budgets(self) -> list[int]:
        """All budgets."""
        return sorted({budget for _, _, budget in self.accuracy})


@dataclass(frozen=True)
class Verdict:
    """Whether a target is reached, and by which figures."""

    target: str
    reached: bool | None  # None: not measured
    why: str


def verdicts(figures: Figures) -> Iterator[Verdict]:
    """The targets, one after the other."""
    n = figures.budgets[-1]
    for model in references.REASONERS:
        single, best = figures.share(model, GREEDY, 1), figures.share(model, BEST, n)
        target = f"best-of-{n} with the reward model at least 20 points above greedy, {model}"
        yield Verdict(target, best - single >= 20, f"{best:.1f} against {single:.1f}: {best - single:+.1f}")
    for model in references.REASONERS:
        parts, reached = [], True
        for k in [k for k in figures.budgets if k > 1]:
            found = figures.difference(model, (BEAM, k), (BEST, k))
            gap = figures.share(model, BEAM, k) - figures.share(model, BEST, k)
            reached &= gap >= 0
            parts.append(f"{k}: {gap:+.1f}" + (f" ({found['low']:+.1f} to {found['high']:+.1f})" if found else ""))
        yield Verdict(f"beam search at least as good as best-of-n at equal budget, {model}", reached, ", ".join(parts))
    for small, large in zip(references.REASONERS, references.REASONERS[1:], strict=False):
        yield overtaken(figures, small, large)


def overtaken(figures: Figures, small: str, large: str) -> Verdict:
    """Whether some search makes the small model as accurate as the large one's greedy answer in less time."""
    target = f"{small} with search at least as accurate as {large} greedy, sooner"
    goal = figures.share(large, GREEDY, 1)
    able = [
        (series, k)
        for model, series, k in figures.accuracy
        if model == small and series != PASS and k > 1 and figures.share(small, series, k) >= goal
    ]
    if not able:
        return Verdict(target, False, f"no search of {small} reaches {goal:.1f}")
    limit = figures.seconds.get((large, GREEDY, 1))
    if limit is None:
        least = min(able, key=lambda row: (row[1], row[0]))
        name = f"{SERIES[least[0]]} at {least[1]}: {figures.share(small, *least):.1f} against {goal:.1f}"
        return Verdict(target, None, f"as accurate with {name}; latency not measured")
    # The quickest of many, chosen and compared on the same prompts, would owe a part of its lead to luck.
    quickest = min(able, key=lambda row: median(figures.seconds[small, *row][::2]))
    times, low, high = share_of_time(figures.seconds[small, *quickest][1::2], limit[1::2])
    why = (
        f"{SERIES[quickest[0]]} at {quickest[1]}: {figures.share(small, *quickest):.1f} against {goal:.1f}, "
        f"{times:.2f} ({low:.2f} to {high:.2f}) times the time"
    )
    return Verdict(target, high < 1, why)


def share_of_time(ours: Sequence[float], baseline: Sequence[float]) -> tuple[float, float, float]:
    """How many times the baseline's time we took: geometric mean over prompts that both ran, and its 95 % interval.

    Raises:
        ValueError: fewer than two prompts, which give no interval.
    """
    if len(ours) < 2:
        raise ValueError("latency needs at least 4 prompts: one half chooses the search, the other compares it")
    d = paired_bootstrap([np.log(ours)], [np.log(baseline)])
    return math.exp(d.value), math.exp(d.low), math.exp(d.high)


# --- the page ---------------------------------------------------------------------------------------------------------


def page(figures: Figures, options: argparse.Namespace, others: float) -> Iterator[str]:
    """Markdown between the marks; `others`: share of the CPUs that other programs used."""
    yield (
        f"{figures.items} test expressions, seeds {options.seeds}, {options.kind.upper()} files, temperature 1. "
        "Accuracy in percent (Wilson's 95 % interval over expressions); budget in candidates."
    )
    for model in references.REASONERS:
        yield from ("", f"### {model}", "")
        yield "| method | " + " | ".join(map(str, figures.budgets)) + " |"
        yield "| --- |" + " ---: |" * len(figures.budgets)
        for series, name in SERIES.items():
            rows = [figures.accuracy.get((model, series, k)) for k in figures.budgets]
            cells = [f"{100 * r['value']:.1f} ({100 * r['low']:.1f}-{100 * r['high']:.1f})" if r else "" for r in rows]
            yield f"| {name} | " + " | ".join(cells) + " |"
    yield from ("", "![Accuracy over budget](tiny-world-accuracy.png)", "")
    if figures.seconds:
        yield "### Milliseconds per problem"
        yield ""
        prompts = len(next(iter(figures.seconds.values())))
        yield (
            f"One problem at a time on the NPU backend, {options.threads} threads, {cpu_info()}; medians of {prompts} "
            "problems, each run once with every method. Medians of so few runs differ by chance: a target asks for an "
            "interval."
        )
        if options.latency_items and others > _BUSY:
            yield f"**Other programs used {others:.0%} of the CPUs meanwhile: measure again on a quiet machine.**"
        yield ""
        yield "| model | method | " + " | ".join(map(str, figures.budgets)) + " |"
        yield "| --- | --- |" + " ---: |" * len(figures.budgets)
        for model in references.REASONERS:
            for series, name in SERIES.items():
                took = [figures.seconds.get((model, series, k)) for k in figures.budgets]
                shown = [f"{1e3 * median(s):.1f}" if s else "" for s in took]
                if any(shown):
                    label = "one sample" if series == PASS else name
                    yield f"| {model} | {label} | " + " | ".join(shown) + " |"
        yield from ("", "![Accuracy over latency](tiny-world-latency.png)", "")
    yield from ("### Targets", "", "| target | reached | figures |", "| --- | --- | --- |")
    for v in verdicts(figures):
        reached = {None: "not measured", True: "yes", False: "not shown"}[v.reached]
        yield f"| {v.target} | {reached} | {v.why} |"


def rows_of(figures: Figures) -> Iterator[dict[str, Any]]:
    """Rows in the form that all benches share: greedy is the baseline, the range is Wilson's interval."""
    most = figures.budgets[-1]
    for model in references.REASONERS:
        single = max(1e-9, float(figures.accuracy[model, GREEDY, 1]["value"]))
        for series, title in SERIES.items():
            if series == GREEDY:
                continue
            r = figures.accuracy[model, series, most]
            ratios = [r[part] / single for part in ("low", "value", "high")]
            percent = [round(100 * v, 2) for v in (single, r["value"])]
            yield report.figures(f"{model}, {title}, {most} candidates", *percent, "% solved", ratios, None)


def main() -> None:
    """Evaluate what is missing and print the page."""
    p = Parser(__doc__, "4 expressions, budgets up to 4")
    p.add_count("--items", usual=200, quick=4, what="test expressions")
    p.add_argument("--seeds", help="every expression runs once with each (default 1,2,3; 1 with --quick)")
    p.add_argument("--kind", default="q8_0", choices=["q8_0", "q4_0"], help="which files")
    p.add_argument("--latency-items", type=int, default=0, help="expressions to time every method on, at least 4")
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--out", type=Path, help="log, results, plots (default: in build/bench)")
    p.add_argument("--into", type=Path, help="also put tables into this Markdown file, plots beside it")
    p.add_argument("--fresh", action="store_true", help="throw away what is in --out")
    options = p.parse()
    options.seeds = options.seeds or ("1" if options.quick else "1,2,3")
    options.budgets = "1,2,4" if options.quick else "1,2,4,8,16"
    options.out = options.out or CACHE / f"tiny-world{'-quick' * options.quick}"
    if options.fresh:
        shutil.rmtree(options.out, ignore_errors=True)
    items = options.out / "test.jsonl"
    write_items(items, options.items)
    line = command(options, items)
    print("tilebeam", shlex.join(line), file=sys.stderr, flush=True)
    with OtherLoad() as others, redirect_stdout(sys.stderr):  # what `tilebeam eval` prints
        cli.app(line, standalone_mode=False)
    figures = Figures.read(options.out)
    if options.json:
        rows = report.Rows("tiny_world", True)
        for row in rows_of(figures):
            rows.add(row)
        rows.finish()
        return
    lines = list(page(figures, options, others.share))
    print("\n".join(lines))
    if options.into is not None:
        put_into(options.into, "figures", "\n".join(lines))
        for name in ("accuracy", "latency"):
            plot = options.out / f"{name}.png"
            if plot.exists():
                shutil.copyfile(plot, options.into.with_name(f"tiny-world-{name}.png"))


if __name__ == "__main__":
    report.start(main)

